"""Expressions that permute the axes of a tensor."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from svexport.advise.calls import Call
from svexport.advise.kinds import Kinds

__all__ = ["composed", "permutation", "permuted", "permuting"]

_MOVING = ("movedim", "moveaxis")
_PERMUTING = ("permute", "transpose", "swapaxes", "swapdims", *_MOVING)


def permuting(scope: Kinds, node: ast.AST) -> Call | None:
    """``node`` as a call, if it is a permute or transpose of a tensor with its axes given."""
    call = scope.call(node)
    if call is None or call.name not in _PERMUTING or not call.arguments:
        return None
    if call.name == "permute" or not call.is_method:
        return call
    return call if len(call.arguments) == 2 or scope.is_tensor(call.input) else None


def permuted(scope: Kinds, node: ast.expr) -> Call | None:
    """``node`` as a permute, looking through a name that is used only here and through ``.contiguous()``."""
    binding = scope.definition(node)
    if binding is not None:
        uses = [u for u in binding.uses if not _asks_for_type(scope, u) and not _is_instead(scope, u, node)]
        node = scope.value_of(node) if len(uses) == 1 else node
    call = scope.call(node)
    if call is not None and call.is_method and call.name == "contiguous":
        node = call.input
    return permuting(scope, node)


def _asks_for_type(scope: Kinds, use: ast.Name) -> bool:
    """Whether a use is ``x.device`` or ``x.dtype``, which no permute changes."""
    parent = scope.file.parents[use]
    return isinstance(parent, ast.Attribute) and parent.attr in ("device", "dtype")


def _is_instead(scope: Kinds, use: ast.AST, node: ast.AST) -> bool:
    """Whether a use is in the other branch of a test than ``node``: ``F.relu(x) if self.relu else x``."""
    branches = dict(_branches(scope, node))
    return any(branches.get(parent, branch) != branch for parent, branch in _branches(scope, use))


def _branches(scope: Kinds, node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """The tests around a node, each with its branch that holds the node."""
    for child, parent in scope.function.above(node):
        if isinstance(parent, (ast.If, ast.IfExp)) and child is not parent.test:
            body = parent.body if isinstance(parent.body, list) else [parent.body]
            yield parent, "body" if child in body else "orelse"


def permutation(call: Call, rank: int | None) -> tuple[int, ...] | None:
    """The full permutation of a permute or transpose; None if its axes are not written out or need an unknown rank."""
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
    """The single permute equal to ``x.permute(first).permute(second)``."""
    return tuple(first[axis] for axis in second)
