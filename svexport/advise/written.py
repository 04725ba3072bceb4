"""Ranks that comments and docstrings give."""

from __future__ import annotations

import ast
import re

from svexport.advise.flow import Binding
from svexport.advise.rule import Scope

__all__ = ["written_rank"]


def written_rank(scope: Scope, binding: Binding) -> int | None:
    """The rank that a trailing comment or the docstring gives: ``# (B, C, H, W)``, ``x: (B, N, C)``."""
    if binding.parameter is not None:
        text = f"{ast.get_docstring(scope.function.node) or ''}\n{_first_comments(scope)}"
        found = re.search(rf"\b{re.escape(binding.parameter.arg)}\b[^\n(\[]{{0,24}}([(\[][^\n]*)", text)
        return _axes_of(found[1]) if found else None
    statement = binding.statement
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or len(scope.flow.bound_by(statement)) != 1:
        return None
    comment = scope.source.comment(statement.end_lineno or 0)
    found = re.match(r"#+\s*(?:\w+\s*[:=]\s*|->\s*)?([(\[].*)", comment)
    return _axes_of(found[1]) if found else None


def _first_comments(scope: Scope) -> str:
    """The comments from the head of a function up to its first statement after the docstring."""
    body = scope.function.node.body
    lines = range(scope.function.node.lineno, body[0].lineno)
    if len(body) > 1 and ast.get_docstring(scope.function.node) is not None:
        lines = range(scope.function.node.lineno, body[1].lineno)
    return "\n".join(scope.source.comment(line) for line in lines)


def _axes_of(text: str) -> int | None:
    """The number of axes in a text such as ``(B, C, H, W)``; fewer than three count only in capitals: ``(N,)``."""
    found = re.match(r"[(\[]([\w\s*/+.,-]*)[)\]]", text)
    axes = [axis.strip() for axis in found[1].split(",")] if found else []
    if len(axes) == 2 and not axes[1]:
        return 1 if axes[0].isidentifier() and axes[0][:1].isupper() else None
    named = all(axis and not axis.startswith(".") and not axis.replace(".", "").isdigit() for axis in axes[:1])
    plain = named and all(re.fullmatch(r"[A-Za-z_]\w*(\s*[*/+-]\s*\w+)*|\d+", axis) for axis in axes)
    capitals = axes and all(axis[:1].isupper() or axis.isdigit() for axis in axes)
    return len(axes) if plain and (capitals or len(axes) > 2) and len(axes) > 1 else None
