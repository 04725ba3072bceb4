"""SVX103: conversions that turn a size into a constant when traced."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from svexport.advise.calls import integer
from svexport.advise.functions import Reach
from svexport.advise.kinds import Kind
from svexport.advise.rule import Found, Rule, Scope

__all__ = ["RULE"]

_PYTHON = ("range", "print", "str", "isinstance", "min", "max")  # these freeze a size in any form


def find(scope: Scope) -> Iterator[Found]:
    for node in scope.function.all(ast.Call):
        if not isinstance(node.func, ast.Name) or len(node.args) != 1 or node.keywords:
            continue
        if node.func.id not in ("int", "len") or node.func.id in scope.bindings or scope.function.guarded(node):
            continue
        found = _int(scope, node) if node.func.id == "int" else _len(scope, node)
        if found is not None and not all(_is_tested(scope, use) for use in scope.reads(node) or [node]):
            yield found


def _int(scope: Scope, node: ast.Call) -> Found | None:
    value = node.args[0]
    if _is_of_state(scope, value):
        return None
    if scope.kind(value) is Kind.SIZE:
        text = scope.text(value)
        atom = isinstance(value, (ast.Name, ast.Attribute, ast.Subscript, ast.Call))
        message = f"`int()` of a size freezes it when traced: it is an integer already, `{_short(text)}`"
    elif isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div) and scope.kind(value.left) is Kind.SIZE:
        divisor = value.right
        whole = (scope.integer(divisor) or 0) > 0 or _is_whole(scope, divisor)
        if not whole and scope.kind(divisor) is not Kind.SIZE:
            return None
        start, _ = scope.source.span(value)
        left_end = scope.source.span(value.left)[1]
        right = scope.source.span(divisor)
        between = scope.source.text[left_end : right[0]]
        if between.count("/") != 1:
            return None
        text = scope.source.text[start:left_end] + between.replace("/", "//") + scope.text(divisor)
        if text.count("(") != text.count(")"):
            return None
        atom = False
        message = f"`int()` of a size freezes it when traced: divide integers, `{_short(text)}`"
    else:
        return None
    better = text if atom or _stands_alone(scope, node) else f"({text})"
    edit = scope.source.replace(node, better) if "\n" not in better else None
    return Found(node, message, (edit,) if edit else ())


def _is_whole(scope: Scope, node: ast.expr) -> bool:
    """Whether it is an attribute of ``self`` that is an integer."""
    owner = scope.function.owner
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return own and owner is not None and owner.is_whole(node.attr)  # type: ignore[attr-defined]


def _stands_alone(scope: Scope, node: ast.AST) -> bool:
    """Whether an operator expression may replace ``node`` without parentheses."""
    return isinstance(
        scope.parent(node), (ast.Assign, ast.AnnAssign, ast.Return, ast.Call, ast.keyword, ast.Tuple, ast.List)
    )


def _is_of_state(scope: Scope, node: ast.expr) -> bool:
    """Whether ``node`` is a size of a parameter or buffer, which is a constant anyway."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr == "shape":
            value = scope.value_of(part.value)
            if (scope.file.qualified(value) or "").startswith("self."):
                return True
    return False


def _len(scope: Scope, node: ast.Call) -> Found | None:
    value = node.args[0]
    row = isinstance(value, ast.Subscript) and integer(value.slice) is not None
    if not (row or isinstance(value, (ast.Name, ast.Attribute))) or not scope.is_tensor(value) or scope.is_state(value):
        return None
    better = f"{scope.text(value)}.shape[0]"
    edit = scope.source.replace(node, better)
    return Found(node, f"`len()` of a tensor freezes its size when traced: `{better}`", (edit,) if edit else ())


def _is_tested(scope: Scope, node: ast.AST) -> bool:
    """Whether a test or Python function reads the size: a test freezes it in any form, a loop is another rule's."""
    for child, parent in scope.function.above(node):
        if isinstance(parent, (ast.If, ast.While, ast.IfExp)) and child is parent.test:
            return True
        if isinstance(parent, ast.Call) and getattr(parent.func, "id", "") in _PYTHON:
            return True
        if isinstance(parent, ast.BinOp) and any(isinstance(s, ast.List) for s in (parent.left, parent.right)):
            return True  # repetition of a list
        if isinstance(parent, (ast.JoinedStr, ast.stmt)):
            return isinstance(parent, ast.JoinedStr)
    return False


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


RULE = Rule(
    code="SVX103",
    name="`int()` or `len()` of a tensor's size",
    why=(
        "Both return a plain integer, and a tracer no longer follows the size: the file is right only for the sizes of "
        "the example, even with dynamic shapes."
    ),
    before="n = len(x)\nh = int(x.shape[2] / 2)",
    after="n = x.shape[0]\nh = x.shape[2] // 2",
    find=find,
    reach=Reach.FORWARD,
    fixes=True,
    note="fixed, but for sizes divided across lines with a comment",
)
