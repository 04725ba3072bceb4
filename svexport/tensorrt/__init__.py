"""TensorRT: plugins for the svexport nodes of a file, compiled from C++ or in Python."""

from svexport.tensorrt.library import build, libraries
from svexport.tensorrt.plugins import Registered, register_plugins
from svexport.tensorrt.torch_tensorrt import register_torch_tensorrt

__all__ = ["Registered", "build", "libraries", "register_plugins", "register_torch_tensorrt"]
