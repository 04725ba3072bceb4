"""The ONNX model as a file: typed values, svexport nodes, their bodies."""

from svexport.graph.bodies import attach, lower, strip

__all__ = ["attach", "lower", "strip"]
