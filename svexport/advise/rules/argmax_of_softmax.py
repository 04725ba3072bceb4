"""SVX304: softmax or sigmoid of values of which only the order is used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import takewhile

from svexport.advise.calls import Call, integer
from svexport.advise.rule import Found, Rule, Scope
from svexport.advise.shapes import shape

__all__ = ["RULE"]


def find(scope: Scope) -> Iterator[Found]:
    for node in scope.function.all(ast.Call):
        call = scope.call(node)
        if call is None or not _is_argmax(scope, call):
            continue
        made = call.input
        if isinstance(made, ast.Name):
            value = scope.value_of(made)
            binding = scope.definition(made)
            if value is made or binding is None or len(binding.uses) != 1:
                continue
            made = value
        made, dim = _unshaped(scope, made, _dim(call))
        inner = scope.call(made)
        if inner is None or inner.name not in ("softmax", "log_softmax", "sigmoid"):
            continue
        if inner.name != "sigmoid" and not _is_axis(scope, inner, dim):
            continue
        yield Found(node, f"`{inner.name}` keeps the order: take `{call.name}` of what it is given")


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
    """The tensor before flattens of axes behind ``dim``, permutes and slices, and the axis that ``dim`` is there."""
    while dim is not None and isinstance(node, ast.Subscript):
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        taken = len(list(takewhile(lambda item: integer(item) is not None, items)))
        if not all(isinstance(i, ast.Slice) or (isinstance(i, ast.Constant) and i.value is ...) for i in items[taken:]):
            break
        node, dim = node.value, dim + taken if dim >= 0 else dim
    call = scope.call(node)
    while call is not None and dim is not None and call.name in ("flatten", "permute", "contiguous"):
        if call.name == "permute":
            if call.dims is None or not -len(call.dims) <= dim < len(call.dims):
                break
            dim = call.dims[dim]
        elif call.name == "flatten" and not 0 <= dim < (integer(call.get(0, "start_dim")) or 0):
            break
        node, call = call.input, scope.call(call.input)
    return node, dim


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
