"""What indices make of a tensor's axes."""

from __future__ import annotations

import ast

from svexport.advise.calls import integer
from svexport.advise.rule import Shape

__all__ = ["complete", "indexed", "is_one_wide", "is_whole"]


def complete(index: ast.expr) -> int | None:
    """The rank that an index implies: an index that ends in ``:`` names every axis; None for any other."""
    items = index.elts if isinstance(index, ast.Tuple) else [index]
    axes = [item for item in items if not (isinstance(item, ast.Constant) and item.value is None)]
    if any(isinstance(item, ast.Constant) and item.value is Ellipsis for item in items) or len(items) < 2:
        return None
    return len(axes) if is_whole(items[-1]) else None


def indexed(index: ast.expr, base: Shape) -> Shape:
    """The shape of the part that ``index`` takes out of a tensor of shape ``base``."""
    items = index.elts if isinstance(index, ast.Tuple) else [index]
    rank = base.rank if base.rank is not None else complete(index)
    taking = [item for item in items if not (isinstance(item, ast.Constant) and item.value in (None, Ellipsis))]
    if any(not isinstance(item, (ast.Slice, ast.List)) and integer(item) is None for item in taking):
        return Shape()  # a mask or a tensor of indices
    if rank is not None and rank < len(taking):
        return Shape()
    ones: set[int] = set()
    front = at = 0  # the next axis of the result, and of the tensor
    behind = False
    taken = sum(integer(item) is not None for item in taking)
    for i, item in enumerate(items):
        if isinstance(item, ast.Constant) and item.value is Ellipsis:
            behind = True
            if rank is not None:
                kept = rank - len(taking)
                ones |= {front + k for k in range(kept) if at + k in base.ones or at + k - rank in base.ones}
                front, at = front + kept, at + kept
            else:
                last = items[i + 1 :]
                read = sum(not (isinstance(x, ast.Constant) and x.value is None) for x in last)
                ones |= {axis + read - len(last) for axis in base.ones if axis < -read}
            continue
        if isinstance(item, ast.Constant) and item.value is None:
            ones.add(front if rank is not None or not behind else i - len(items))
            front += 1
        elif integer(item) is not None:
            at += 1
            if rank is None and behind:
                ones = {axis for axis in ones if axis >= 0}
        else:
            stays = at in base.ones and (rank is not None or not behind)
            if (is_whole(item) and stays) or is_one_wide(item):
                ones.add(front if rank is not None or not behind else i - len(items))
            front, at = front + 1, at + 1
    if rank is None:
        integers_after = any(integer(item) is not None for item in items)
        return Shape(frozenset(ones)) if not integers_after else Shape()
    ones |= {front + k for k in range(rank - at) if at + k in base.ones or at + k - rank in base.ones}
    new = sum(isinstance(item, ast.Constant) and item.value is None for item in items)
    return Shape.of(ones, rank - taken + new)


def is_one_wide(item: ast.expr) -> bool:
    """Whether it is a slice of one element: ``:1``, ``2:3``, ``-1:``."""
    if not isinstance(item, ast.Slice) or item.step is not None:
        return False
    lower, upper = 0 if item.lower is None else integer(item.lower), integer(item.upper)
    if item.upper is None:
        return lower == -1
    return lower is not None and lower >= 0 and upper == lower + 1


def is_whole(item: ast.AST) -> bool:
    """Whether it is ``:``."""
    return isinstance(item, ast.Slice) and item.lower is None and item.upper is None and item.step is None
