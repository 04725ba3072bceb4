"""Axes that an expression adds to a tensor, or puts elsewhere."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from svexport.advise.kinds import Call, integer
from svexport.advise.rule import Scope

__all__ = ["Inserted", "composed", "inserted", "is_whole", "permutation", "permuted", "permuting"]

_PERMUTING = ("permute", "transpose", "swapaxes", "swapdims")


@dataclass(frozen=True)
class Inserted:
    """Where axes of size 1 were added; and the rank of the result, if it is known.

    Attributes:
        axes: from the front (>= 0) or from the back (< 0).
    """

    axes: frozenset[int] = frozenset()
    rank: int | None = None

    def from_back(self) -> frozenset[int] | None:
        """``axes`` from the back, None if that takes a rank that is not known."""
        if self.rank is None and any(axis >= 0 for axis in self.axes):
            return None
        return frozenset(axis - (self.rank or 0) if axis >= 0 else axis for axis in self.axes)


def inserted(scope: Scope, node: ast.expr) -> Inserted:
    """Axes of size 1 that ``node`` has by ``unsqueeze``, ``None`` or ``view``, as far as that is certain."""
    told = _told_rank(scope, node)
    node = scope.value_of(node)
    call = scope.call(node)
    if call is not None and call.name == "unsqueeze":
        axis = integer(call.get(0, "dim"))
        before = inserted(scope, call.input)
        if axis is None:
            return Inserted(rank=told)
        # Axes on the side that is counted from keep their place only in front of the new one.
        kept = {a for a in before.axes if (a >= 0) == (axis >= 0) and (a < axis if axis >= 0 else a > axis)}
        return Inserted(frozenset({axis, *kept}), before.rank + 1 if before.rank is not None else None)
    if call is not None and call.is_method and call.name in ("view", "reshape"):
        sizes = list(call.arguments)
        if len(sizes) == 1 and isinstance(sizes[0], (ast.Tuple, ast.List)):
            sizes = sizes[0].elts
        if len(sizes) < 2 or any(isinstance(size, ast.Starred) for size in sizes):
            return Inserted()
        return Inserted(frozenset(i for i, size in enumerate(sizes) if integer(size) == 1), len(sizes))
    if isinstance(node, ast.Subscript):
        return _by_none(node.slice, inserted(scope, node.value).rank)
    return Inserted(rank=told)


def _told_rank(scope: Scope, node: ast.expr) -> int | None:
    """The rank of a name that means one tensor, by ``n, c, h, w = x.shape``."""
    if not isinstance(node, ast.Name) or len(scope.bindings.get(node.id, [])) > 1:
        return None
    bound = scope.bindings.get(node.id)
    if bound and any(p.arg == node.id for p in scope.function.parameters):
        return None  # before, it is another one perhaps
    for use in scope.uses.get(node.id, []):
        of = scope.parent(use)
        whole = of if isinstance(of, ast.Attribute) and of.attr == "shape" else scope.parent(of)
        called = isinstance(whole, ast.Call) and isinstance(of, ast.Attribute) and of.attr == "size" and not whole.args
        unpacked = scope.parent(whole)
        if (whole is of or called) and isinstance(unpacked, ast.Assign) and unpacked.value is whole:
            (target, *_) = unpacked.targets
            if isinstance(target, ast.Tuple) and not any(isinstance(part, ast.Starred) for part in target.elts):
                return len(target.elts)
    return None


def _by_none(index: ast.expr, rank: int | None) -> Inserted:
    """Of a tensor of so many axes, if that is known."""
    items = index.elts if isinstance(index, ast.Tuple) else [index]
    ellipses = [i for i, item in enumerate(items) if isinstance(item, ast.Constant) and item.value is Ellipsis]
    split = ellipses[0] if ellipses else len(items)
    axes = set()
    for i, item in enumerate(items):
        if i in ellipses:
            continue
        if isinstance(item, ast.Constant) and item.value is None:
            axes.add(i if i < split else i - len(items))
        elif not isinstance(item, ast.Slice):
            return Inserted()  # integers take axes away
    # Who writes the last axis out as ``:`` has written them all.
    complete = not ellipses and len(items) > 1 and is_whole(items[-1])
    if complete and rank is None:
        return Inserted(frozenset(axes), len(items))
    return Inserted(frozenset(axes), None if rank is None else rank + len(axes))


def is_whole(item: ast.AST) -> bool:
    """Whether it is ``:``."""
    return isinstance(item, ast.Slice) and item.lower is None and item.upper is None and item.step is None


def permuting(scope: Scope, node: ast.AST) -> Call | None:
    """``node`` as a permute or transpose of a tensor, its axes given."""
    call = scope.call(node)
    if call is None or call.name not in _PERMUTING or not call.arguments:
        return None
    if call.name == "permute" or not call.is_method:
        return call
    return call if len(call.arguments) == 2 or scope.is_tensor(call.input) else None


def permuted(scope: Scope, node: ast.expr) -> Call | None:
    """``node``, or what a name that is used nowhere else stands for, as a permute; made contiguous or not."""
    if isinstance(node, ast.Name):
        node = scope.value_of(node) if len(scope.uses.get(node.id, [])) == 1 else scope.value_just_before(node)
    call = scope.call(node)
    if call is not None and call.is_method and call.name == "contiguous":
        node = call.input
    return permuting(scope, node)


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
    axes[a], axes[b] = axes[b], axes[a]
    return tuple(axes)


def composed(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    """One permute in the place of two: ``x.permute(first).permute(second)``."""
    return tuple(first[axis] for axis in second)
