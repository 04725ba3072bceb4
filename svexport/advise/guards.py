"""Branches to ignore: code for training only, code that no tracer sees, and code that runs once."""

from __future__ import annotations

import ast

from svexport.advise.torch_names import LABELS, TRACING

__all__ = ["excuses"]


def excuses(test: ast.expr, in_body: bool) -> bool:
    """Whether a branch, the body of the test or what is beside it, runs only in training, without a tracer, or once."""
    words = {n.attr for n in ast.walk(test) if isinstance(n, ast.Attribute)}
    words |= {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
    if words & TRACING:
        return True
    negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    if any("loss" in word for word in words) and in_body:
        return True
    if "training" in words:
        return in_body != negated
    for node in ast.walk(test):
        if isinstance(node, ast.Compare) and isinstance(node.comparators[0], ast.Constant):
            if isinstance(node.ops[0], ast.IsNot) and in_body and _last_name(node.left).endswith(LABELS):
                return True
            # A cache that is filled once.
            if isinstance(node.ops[0], ast.Is) and in_body and isinstance(node.left, ast.Attribute):
                return True
    return False


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
