"""Engines: anything that runs an exported model on torch tensors."""

from svexport.errors import EngineError
from svexport.runtime.engine import Engine, TensorSpec
from svexport.runtime.session import OnnxEngine, load

__all__ = ["Engine", "EngineError", "OnnxEngine", "TensorSpec", "load"]
