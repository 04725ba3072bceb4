"""SVX304: softmax or sigmoid of values of which only the order is used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import takewhile

from svexport.advise.calls import Call, integer
from svexport.advise.rule import Found, Rule, Scope
from svexport.advise.shapes import shape

__all__ = ["RULE"]

_SHAPING = ("flatten", "permute", "contiguous", "squeeze")


def find(scope: Scope) -> Iterator[Found]:
    for node in scope.function.all(ast.Call):
        call = scope.call(node)
        if call is None or not _is_argmax(scope, call):
            continue
        made, dim = _unshaped(scope, call.input, _dim(call))
        inner = scope.call(made)
        if inner is None or inner.name not in ("softmax", "log_softmax", "sigmoid"):
            continue
        if inner.name != "sigmoid" and not _is_axis(scope, inner, dim):
            continue
        yield Found(node, f"`{inner.name}` keeps the order: take `{call.name}` of its argument")


def _is_axis(scope: Scope, call: Call, dim: int | None) -> bool:
    """Whether ``call`` is along the axis ``dim``, counted from the same end or from the other."""
    own = integer(call.get(0, "dim", "axis"))
    if own is None or dim is None or own == dim:
        return own is not None and own == dim
    return abs(own - dim) == shape(scope, call.input).rank and (own < 0) != (dim < 0)


def _is_argmax(scope: Scope, call: Call) -> bool:
    """Whether only indices are used: ``argmax``, ``argsort``, ``x.max(-1)[1]``, ``_, label = x.topk(2)``."""
    if call.name not in ("max", "topk", "sort"):
        return call.name in ("argmax", "argsort")
    if call.name == "max" and integer(call.get(0, "dim", "axis")) is None:
        return False
    taken = scope.parent(call.node)
    if isinstance(taken, ast.Subscript):
        return integer(taken.slice) in (1, -1)
    if isinstance(taken, ast.Assign) and isinstance(target := taken.targets[0], ast.Tuple):
        return isinstance(first := target.elts[0], ast.Name) and first.id == "_"
    return isinstance(taken, ast.Attribute) and taken.attr == "indices"


def _unshaped(scope: Scope, node: ast.expr, dim: int | None) -> tuple[ast.expr, int | None]:
    """The tensor before slices, permutes and the like, through names used once; and the axis that ``dim`` is there.

    The axis is None where it is not certain.
    """
    while True:
        binding, call = scope.definition(node), scope.call(node)
        value = scope.value_of(node)
        if binding is not None and len(binding.uses) == 1 and value is not node:
            node = value
        elif isinstance(node, ast.Subscript):
            items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            taken = len(list(takewhile(lambda item: integer(item) is not None, items)))
            if not all(isinstance(i, ast.Slice) or _is_ellipsis(i) for i in items[taken:]):
                return node, dim
            node, dim = node.value, dim + taken if dim is not None and dim >= 0 else dim
        elif call is not None and call.name in _SHAPING:
            node, dim = call.input, _dim_before(call, dim)
        else:
            return node, dim


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _dim_before(call: Call, dim: int | None) -> int | None:
    """The axis of the input that is axis ``dim`` of the result of a call that moves or joins axes."""
    if dim is None or call.name == "contiguous":
        return dim
    if call.name == "permute":
        return call.dims[dim] if call.dims is not None and -len(call.dims) <= dim < len(call.dims) else None
    if call.name == "flatten":
        return dim if 0 <= dim < (integer(call.get(0, "start_dim")) or 0) else None
    axis = integer(call.get(0, "dim"))  # of squeeze
    if axis is None or ((axis < 0) != (dim < 0) and axis not in (0, -1)):
        return None  # which of the two comes first follows from the rank
    if (axis < 0) != (dim < 0):
        return dim
    return dim - (dim <= axis) if axis < 0 else dim + (dim >= axis)


def _dim(call: Call) -> int | None:
    """The axis along which ``call`` orders: the given one, or the last if that is the default."""
    given = call.get(1 if call.name == "topk" else 0, "dim", "axis")
    return -1 if given is None and call.name in ("topk", "sort", "argsort") else integer(given)


RULE = Rule(
    code="SVX304",
    name="a softmax before argmax",
    why="Softmax and sigmoid keep the order of their values: the index of the largest is the same without them.",
    before="label = logits.softmax(-1).argmax(-1)",
    after="label = logits.argmax(-1)",
    find=find,
    note="values that round to one probability differ as logits: which index wins may change",
)
