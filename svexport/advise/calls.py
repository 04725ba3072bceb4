"""Calls of torch functions and methods in one form, and the arguments of calls."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from svexport.advise.functions import Function

__all__ = ["Call", "argument", "integer", "parameter"]


@dataclass(frozen=True)
class Call:
    """A call of a torch function or of a tensor's method, in one form for both.

    Attributes:
        name: the function or method: ``"sum"``, ``"linalg.inv"``.
        input: the tensor it is called on.
        arguments: the positional arguments after the input.
    """

    node: ast.Call
    name: str
    input: ast.expr
    arguments: tuple[ast.expr, ...]
    is_method: bool

    @cached_property
    def keywords(self) -> dict[str | None, ast.expr]:
        """Arguments by keyword; a ``**`` argument is under None."""
        return {k.arg: k.value for k in self.node.keywords}

    def get(self, position: int, *names: str) -> ast.expr | None:
        """The argument at ``position`` after the input, or by one of ``names``."""
        if len(self.arguments) > position:
            return self.arguments[position]
        return next((self.keywords[name] for name in names if name in self.keywords), None)

    @cached_property
    def dims(self) -> tuple[int, ...] | None:
        """Its arguments if all are integers: ``permute(0, 2, 1)``, ``permute((0, 2, 1))``, ``transpose(1, 2)``."""
        items = list(self.arguments) or [v for k, v in self.keywords.items() if k in ("dims", "dim0", "dim1", "dim")]
        if len(items) == 1 and isinstance(items[0], (ast.Tuple, ast.List)):
            items = items[0].elts
        values = [integer(item) for item in items]
        return tuple(v for v in values if v is not None) if items and None not in values else None


def argument(function: Function, call: ast.Call, name: str) -> ast.expr | None:
    """The argument that a call gives for a parameter of ``function``; None if it is not written out."""
    if any(k.arg == name for k in call.keywords):
        return next(k.value for k in call.keywords if k.arg == name)
    names = [p.arg for p in (*function.node.args.posonlyargs, *function.node.args.args)]
    if function.owner is not None and names[:1] in (["self"], ["cls"]):
        names = names[1:]
    given = call.args[: names.index(name) + 1] if name in names else []
    whole = name in names and len(given) > names.index(name) and not any(isinstance(a, ast.Starred) for a in given)
    return given[-1] if whole else None


def parameter(function: Function, call: ast.Call, given: ast.expr) -> ast.arg | None:
    """The parameter of ``function`` for which a call gives the expression ``given``; None if that is not certain."""
    return next((p for p in function.parameters if argument(function, call, p.arg) is given), None)


def integer(node: ast.AST | None) -> int | None:
    """The integer literal that ``node`` is, possibly negated; None if it is something else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = integer(node.operand)
        return None if value is None else -value
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool):
        return node.value
    return None
