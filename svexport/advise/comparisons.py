"""Recognizes comparisons of tensors with numbers, as operators, methods or functions."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from svexport.advise.rule import Scope

__all__ = ["Comparison", "comparison"]

_ORDERS = {"gt", "lt", "ge", "le", "greater", "less", "greater_equal", "less_equal"}
_EQUALITIES = {"eq", "ne"}
_THRESHOLDS = ("thr", "conf")  # in the names of numbers that tensors are compared with


@dataclass(frozen=True)
class Comparison:
    """A comparison with a number.

    Attributes:
        node: the whole expression.
        number: what is compared with, written out or named.
        is_order: whether it asks for more or less, not whether it is equal.
    """

    node: ast.expr
    number: ast.expr
    is_order: bool

    @property
    def value(self) -> float | None:
        """The number, None if it is a name."""
        node, sign = self.number, 1
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            node, sign = node.operand, -1
        return sign * float(node.value) if isinstance(node, ast.Constant) else None  # type: ignore[arg-type]


def comparison(scope: Scope, node: ast.AST) -> Comparison | None:
    """What compares ``node`` with a number, None if nothing does."""
    parent = scope.parent(node)
    if isinstance(parent, ast.Compare):
        if len(parent.ops) != 1:
            return None
        other = parent.comparators[0] if parent.left is node else parent.left
        is_order = isinstance(parent.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE))
        known = is_order or isinstance(parent.ops[0], (ast.Eq, ast.NotEq))
        return Comparison(parent, other, is_order) if known and _is_number(scope, other) else None
    call = scope.call(scope.parent(parent) if isinstance(parent, ast.Attribute) else parent)
    if call is None or call.input is not node or call.name not in _ORDERS | _EQUALITIES or len(call.arguments) != 1:
        return None
    (other,) = call.arguments
    plain = not call.node.keywords and _is_number(scope, other)
    return Comparison(call.node, other, call.name in _ORDERS) if plain else None


def _is_number(scope: Scope, node: ast.expr) -> bool:
    written = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else node
    if isinstance(written, ast.Constant):
        return type(written.value) in (int, float)
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return any(word in name.lower() for word in _THRESHOLDS) and not scope.is_tensor(node)
