"""SVX302: sigmoids whose results are only compared with a threshold."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

from svexport.advise.calls import integer
from svexport.advise.comparisons import comparison
from svexport.advise.rule import Found, Rule, Scope

__all__ = ["RULE"]

# Methods that reshape, or take the largest or smallest values: the order of values stays.
_SHAPING = (
    *("squeeze", "unsqueeze", "view", "reshape", "flatten", "permute", "transpose", "contiguous"),
    *("amax", "amin"),
)


def find(scope: Scope) -> Iterator[Found]:
    for node in scope.function.all(ast.Call):
        call = scope.call(node)
        if call is None or call.name not in ("sigmoid", "special.expit") or call.arguments:
            continue
        compared = [comparison(scope, _with_shape(scope, place)) for place in scope.reads(node)]
        if not compared or any(c is None or not c.is_order for c in compared):
            continue
        values = {c.value for c in compared if c is not None}
        t = values.pop() if len(values) == 1 else None
        if t is None:
            better = "`svexport.ops.sigmoid_gt(x, t)`, or `x > log(t / (1 - t))`"
        elif 0 < t < 1:
            better = f"the logit with {math.log(t / (1 - t)):.6g}, or `svexport.ops.sigmoid_gt(x, {t})`"
        else:
            continue
        yield Found(node, f"a sigmoid only for a threshold: compare {better}")


def _with_shape(scope: Scope, node: ast.AST) -> ast.AST:
    """``node`` with the indexing, reshaping and largest values around it: ``x.squeeze(-1)``, ``x[..., 0]``."""
    while True:
        parent = scope.parent(node)
        call = scope.call(scope.parent(parent) if isinstance(parent, ast.Attribute) else parent)
        if isinstance(parent, ast.Subscript) and parent.value is node:
            node = parent
        elif call is not None and call.input is node and call.name in _SHAPING:
            node = call.node
        elif call is not None and call.input is node and call.name in ("max", "min"):
            taken = scope.parent(call.node)
            value = isinstance(taken, ast.Attribute) and taken.attr == "values"
            value |= isinstance(taken, ast.Subscript) and integer(taken.slice) == 0
            if not value and (call.arguments or call.keywords):
                return node
            node = taken if value else call.node
        else:
            return node


RULE = Rule(
    code="SVX302",
    name="a sigmoid before a threshold",
    why="The sigmoid grows with its argument: comparing the logit with the threshold's takes no exponential.",
    before="kept = x.sigmoid() > 0.7",
    after="kept = svexport.ops.sigmoid_gt(x, 0.7)    # or x > 0.847298",
    find=find,
    note="a rounded sigmoid may equal the threshold where the logit does not: results next to it may differ",
)
