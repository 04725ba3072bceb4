"""SVX302: sigmoids for nothing but a threshold."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

from svexport.advise.rule import Found, Rule, Scope

__all__ = ["RULE"]

_THRESHOLD = ("thr", "conf")


def find(scope: Scope) -> Iterator[Found]:
    for node in scope.function.all(ast.Call):
        call = scope.call(node)
        if call is None or call.name not in ("sigmoid", "special.expit") or call.arguments:
            continue
        name = scope.only_value(node)
        places: list[ast.AST] = list(scope.uses.get(name, [])) if name else [node]
        thresholds = [_threshold(scope, place) for place in places]
        if not thresholds or None in thresholds:
            continue
        better = "`svexport.ops.sigmoid_gt(x, t)`, or `x > log(t / (1 - t))`"
        values = {t.value for t in thresholds if isinstance(t, ast.Constant)}
        if len(values) == 1 and len(thresholds) == len(places):
            t = values.pop()
            assert isinstance(t, (int, float))
            if not 0 < t < 1:
                continue
            better = f"the logit with {math.log(t / (1 - t)):.6g}, or `svexport.ops.sigmoid_gt(x, {t})`"
        yield Found(node, f"a sigmoid for nothing but a threshold: compare {better}")


def _threshold(scope: Scope, node: ast.AST) -> ast.expr | None:
    """What ``node`` is compared with, a number."""
    parent = scope.parent(node)
    if not isinstance(parent, ast.Compare) or len(parent.ops) != 1:
        return None
    if not isinstance(parent.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE)):
        return None
    other = parent.comparators[0] if parent.left is node else parent.left
    if isinstance(other, ast.Constant) and isinstance(other.value, (int, float)):
        return other
    name = other.attr if isinstance(other, ast.Attribute) else other.id if isinstance(other, ast.Name) else ""
    return other if any(word in name.lower() for word in _THRESHOLD) and not scope.is_tensor(other) else None


RULE = Rule(
    code="SVX302",
    name="a sigmoid before a threshold",
    why="The sigmoid grows with its argument: to compare the logit with that of the threshold takes no exponential.",
    before="kept = x.sigmoid() > 0.7",
    after="kept = svexport.ops.sigmoid_gt(x, 0.7)    # or x > 0.847298",
    find=find,
    note="a rounded sigmoid may equal the threshold where the logit does not: results differ next to it",
)
