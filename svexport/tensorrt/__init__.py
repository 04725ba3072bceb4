"""TensorRT: C++ and Python plugins for the svexport nodes of a file, and what each TensorRT version parses."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from svexport.tensorrt.command import trtexec
    from svexport.tensorrt.library import build, libraries
    from svexport.tensorrt.plugins import Registered, register_plugins
    from svexport.tensorrt.torch_tensorrt import register_torch_tensorrt

__all__ = ["Registered", "build", "libraries", "register_plugins", "register_torch_tensorrt", "trtexec"]

# Imported on first use: plugins need torch, but svexport.check works without it.
_LAZY = {
    "Registered": "plugins",
    "build": "library",
    "libraries": "library",
    "register_plugins": "plugins",
    "register_torch_tensorrt": "torch_tensorrt",
    "trtexec": "command",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'svexport.tensorrt' has no attribute {name!r}")
    return getattr(import_module(f"svexport.tensorrt.{_LAZY[name]}"), name)
