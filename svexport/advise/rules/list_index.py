"""SVX204: indexing by a list of neighbouring indices, which a slice replaces."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise

from svexport.advise.calls import integer
from svexport.advise.functions import Reach
from svexport.advise.rule import Found, Rule, Scope
from svexport.advise.torch_names import ACTIVATIONS, ARITHMETIC, REDUCTIONS

__all__ = ["RULE"]

# Functions whose results share no memory with their arguments.
_FRESH = (
    ACTIVATIONS | ARITHMETIC | REDUCTIONS | {"cat", "concat", "stack", "softmax", "matmul", "bmm", "einsum", "linear"}
)


def find(scope: Scope) -> Iterator[Found]:
    for node in scope.function.all(ast.Subscript):
        index = _list(scope, node.slice)
        if index is None or isinstance(node.ctx, ast.Del):
            continue
        if not scope.is_tensor(node.value) and not (_is_of_module(scope) and isinstance(node.slice, ast.Tuple)):
            continue
        parent = scope.parent(node)
        if isinstance(parent, ast.Attribute) and parent.attr.endswith("_") and not parent.attr.endswith("__"):
            continue  # an in-place method changes the copy that the list makes; a slice is a view
        text = _slice([v for v in map(scope.integer, index.elts) if v is not None])
        if text is None:
            continue
        written = all(integer(e) is not None for e in index.elts)  # names of indices are not given up
        edit = scope.source.replace(index, text) if written and _is_safe(scope, node) else None
        yield Found(
            index, f"a list of neighbouring indices gathers, a slice reads in place: `{text}`", (edit,) if edit else ()
        )


def _is_of_module(scope: Scope) -> bool:
    """Whether it is a forward, or a method of a module without gradients, which have no numpy arrays."""
    function = scope.function
    if function.reach is Reach.FORWARD:
        return True
    return function.is_without_gradients and function.owner is not None and function.owner.is_module


def _list(scope: Scope, index: ast.expr) -> ast.List | ast.Tuple | None:
    """The one list or tuple of integers in an index whose other items are slices, None or ``...``."""
    items = index.elts if isinstance(index, ast.Tuple) else [index]
    lists = [item for item in items if isinstance(item, (ast.List, ast.Tuple))]
    others = [item for item in items if not isinstance(item, (ast.List, ast.Tuple))]
    plain = all(
        isinstance(o, ast.Slice) or (isinstance(o, ast.Constant) and o.value in (None, Ellipsis)) for o in others
    )
    if len(lists) != 1 or not plain or any(scope.integer(e) is None for e in lists[0].elts):
        return None
    return lists[0]


def _slice(values: list[int]) -> str | None:
    """The text of the slice equal to ``values``; None if there is none."""
    if not values or any((v < 0) != (values[0] < 0) for v in values):
        return None
    step = values[1] - values[0] if len(values) > 1 else 1
    if step < 1 or any(b - a != step for a, b in pairwise(values)):
        return None
    stop = values[-1] + 1
    start = str(values[0]) if values[0] else ""
    return f"{start}:{stop if stop else ''}" + (f":{step}" if step > 1 else "")


def _is_safe(scope: Scope, node: ast.Subscript) -> bool:
    """Whether the result is the same for a view of the tensor as for a copy."""
    if isinstance(node.ctx, ast.Store):
        written = scope.parent(node)
        if not isinstance(written, (ast.Assign, ast.AugAssign)):
            return False
        # A view on the right side would be read while its memory is written.
        names = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
        return not any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(written.value))
    parent: ast.AST = scope.parent(node)
    if isinstance(parent, (ast.List, ast.Tuple)):
        parent = scope.parent(parent)
    if isinstance(parent, (ast.BinOp, ast.Compare, ast.UnaryOp)):
        return True
    if isinstance(parent, ast.Attribute):
        parent = scope.parent(parent)
    call = scope.call(parent)
    return call is not None and call.name in _FRESH


RULE = Rule(
    code="SVX204",
    name="a list of neighbouring indices",
    why="It is an index tensor, copied to the device in every forward, and a Gather; a slice is a view and a Slice.",
    before="center = boxes[:, [0, 1]] * scale",
    after="center = boxes[:, :2] * scale",
    find=find,
    fixes=True,
    note="fixed where a view and a copy give the same: operands of arithmetic, arguments of some functions, targets",
)
