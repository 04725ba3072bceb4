"""ONNX models as files: typed values, svexport nodes, their bodies, checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from svexport.graph.bodies import attach, lower, strip

__all__ = ["attach", "lower", "strip"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'svexport.graph' has no attribute {name!r}")
    from svexport.graph import bodies  # on first use: it needs torch, and a check of a file does not

    return getattr(bodies, name)
