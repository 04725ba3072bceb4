from tests.tensorrt.reference.fixtures import files, tensorrt

__all__ = ["files", "tensorrt"]
