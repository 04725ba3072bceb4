"""Sizes that values decide, such as how many a mask picks: torch's own branches on them, in a trace by torch.export."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from svexport.exporter.constants import leaves_of
from svexport.tracing.source import is_library, is_own
from svexport.tracing.swapped import swapped

__all__ = ["of_picked", "of_two_or_more"]


@contextmanager
def of_two_or_more() -> Iterator[None]:
    """Has torch's functions go the way of sizes from 2 on where they ask whether a size that values decide is 0 or 1.

    They ask in order to return early, or to refuse. What they compute otherwise is right of 0 and 1 too: so it was of
    three hundred functions that were compared, except ``trapezoid`` and ``cov``, which have forms of ours. What the
    user's lines ask is not answered.
    """
    from torch.fx.experimental.sym_node import SymNode
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    own, between = SymNode.guard_bool, {torch.__file__, inspect.getfile(SymNode)}

    def asked_by_torch(frame: FrameType) -> bool:
        while frame.f_back is not None and frame.f_code.co_filename in between:
            frame = frame.f_back
        path = frame.f_code.co_filename
        return is_library(path) and not is_own(path)

    def guard_bool(node: Any, file: str, line: int) -> bool:
        try:
            return own(node, file, line)
        except GuardOnDataDependentSymNode:
            # C++ says its file, some of which converts for Python.
            if "python" in file or not (file or asked_by_torch(sys._getframe(1))):
                raise
            return bool(node.shape_env.evaluate_expr(node.expr, size_oblivious=True))

    with swapped(SymNode, guard_bool=guard_bool):
        yield


def of_picked(functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> dict[Callable[..., Any], Any]:
    """The functions, for calls with a size that is no number; of others torch's own."""

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if any(map(_is_sized, leaves_of((args, kwargs)))) else NotImplemented

        return call

    return {own: guarded(function) for own, function in functions.items()}


def _is_sized(x: Any) -> bool:
    sizes = x.shape if isinstance(x, Tensor) else (x,)
    return any(isinstance(size, (torch.SymInt, torch.SymFloat)) for size in sizes)
