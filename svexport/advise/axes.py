"""Recognizes expressions that add axes to a tensor or move its axes."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from svexport.advise.kinds import Call, Kinds

__all__ = ["composed", "permutation", "permuted", "permuting"]

_MOVING = ("movedim", "moveaxis")
_PERMUTING = ("permute", "transpose", "swapaxes", "swapdims", *_MOVING)


def permuting(scope: Kinds, node: ast.AST) -> Call | None:
    """``node`` as a permute or transpose of a tensor, its axes given."""
    call = scope.call(node)
    if call is None or call.name not in _PERMUTING or not call.arguments:
        return None
    if call.name == "permute" or not call.is_method:
        return call
    return call if len(call.arguments) == 2 or scope.is_tensor(call.input) else None


def permuted(scope: Kinds, node: ast.expr) -> Call | None:
    """``node``, or what a name that is used nowhere else stands for, as a permute; made contiguous or not."""
    binding = scope.definition(node)
    if binding is not None:
        uses = [use for use in binding.uses if not _asks_for_type(scope, use)]
        node = scope.value_of(node) if len(uses) == 1 else node
    call = scope.call(node)
    if call is not None and call.is_method and call.name == "contiguous":
        node = call.input
    return permuting(scope, node)


def _asks_for_type(scope: Kinds, use: ast.Name) -> bool:
    """``x.device``, ``x.dtype``: no matter how it is permuted."""
    parent = scope.file.parents[use]
    return isinstance(parent, ast.Attribute) and parent.attr in ("device", "dtype")


def permutation(call: Call, rank: int | None) -> tuple[int, ...] | None:
    """The axes of a permute or transpose in full, None if they are not written out or take a rank that is not known."""
    dims = call.dims
    if dims is None:
        return None
    if call.name == "permute":
        rank = len(dims)
        order = tuple(d % rank for d in dims if -rank <= d < rank)
        return order if sorted(order) == list(range(rank)) else None
    if rank is None or len(dims) != 2 or not all(-rank <= d < rank for d in dims):
        return None
    a, b = (d % rank for d in dims)
    axes = list(range(rank))
    if call.name in _MOVING:
        axes.insert(b, axes.pop(a))
        return tuple(axes)
    axes[a], axes[b] = axes[b], axes[a]
    return tuple(axes)


def composed(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    """One permute in the place of two: ``x.permute(first).permute(second)``."""
    return tuple(first[axis] for axis in second)
