"""SVX205: permutes before comparisons and elementwise functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from svexport.advise.axes import permuted, permuting
from svexport.advise.kinds import Call
from svexport.advise.rule import Found, Rule, Scope
from svexport.advise.torch_names import ACTIVATIONS

__all__ = ["RULE"]


def find(scope: Scope) -> Iterator[Found]:
    for node in scope.function.all(ast.Compare):
        before = permuting(scope, node.left)
        if before is None or len(node.ops) != 1 or not _is_scalar(node.comparators[0]):
            continue
        if not isinstance(node.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)):
            continue
        tail = scope.source.text[scope.source.span(node.left)[1] : scope.source.span(node)[1]]
        text = f"({scope.source.receiver(before.node)}{tail})" if before.is_method else ""
        message = "permuted before a comparison: compare first, and permute the booleans, a quarter of the bytes"
        yield _found(scope, node, before, text, message)
    for call_node in scope.function.all(ast.Call):
        call = scope.call(call_node)
        if call is None or call.name not in ACTIVATIONS or "inplace" in call.keywords:
            continue
        before = permuting(scope, call.input) or permuted(scope, call.input)
        if before is None or scope.function.guarded(call_node):
            continue
        text = _activated(scope, call, before) if before.node is call.input else ""
        message = (
            f"permuted before `{call.name}`: after it, `{call.name}` can run with the operation that made the tensor"
        )
        yield _found(scope, call_node, before, text, message)


def _activated(scope: Scope, call: Call, before: Call) -> str:
    """The elementwise function of what is permuted; empty where that is not certain."""
    if not before.is_method:
        return ""
    receiver = scope.source.receiver(before.node)
    start, end = scope.source.span(call.node)
    inner_start, inner_end = scope.source.span(before.node)
    text = scope.source.text
    return text[start:inner_start] + receiver + text[inner_end:end]


def _found(scope: Scope, node: ast.AST, before: Call, text: str, message: str) -> Found:
    axes = scope.source.text[scope.source.span(before.node.func)[1] : scope.source.span(before.node)[1]]
    if not text or "\n" in text or before.dims is None:
        return Found(node, message)
    edit = scope.source.replace(node, f"{text}.{before.name}{axes}")
    return Found(node, message, (edit,) if edit else ())


def _is_scalar(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


RULE = Rule(
    code="SVX205",
    name="a permute before a comparison or an elementwise function",
    why=(
        "A transpose between a convolution or product and its activation keeps TensorRT and compilers from running "
        "both as one; after a comparison it moves one byte per element, not four."
    ),
    before="scores = self.head(x).permute(0, 2, 3, 1).sigmoid()\nkept = x.permute(0, 2, 1) > 0",
    after="scores = self.head(x).sigmoid().permute(0, 2, 3, 1)\nkept = (x > 0).permute(0, 2, 1)",
    find=find,
    fixes=True,
    note="fixed where the axes are written out",
)
