"""SVX205: permutes before comparisons and elementwise functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from svexport.advise.axes import permuted, permuting
from svexport.advise.calls import Call, integer
from svexport.advise.comparisons import comparison
from svexport.advise.rule import Found, Rule, Scope
from svexport.advise.torch_names import ACTIVATIONS

__all__ = ["RULE"]

_DEPTH = 4  # limit on nested sums and products


def find(scope: Scope) -> Iterator[Found]:
    for node in scope.function.all(ast.Call):
        before = permuting(scope, node)
        whole = _made_contiguous(scope, node)
        uses = scope.reads(whole)
        compared = comparison(scope, uses[0]) if before is not None and len(uses) == 1 else None
        if before is not None and compared is not None:
            message = "permuted before a comparison: compare first, and permute the booleans, a quarter of the bytes"
            yield _found(scope, compared.node, before, message, uses[0] is node and whole is node)
        call = scope.call(node)
        if call is None or not _is_elementwise(call) or {"inplace", "out"} & {*call.keywords}:
            continue
        before = permuted(scope, call.input) or (_scaled(scope, call.input) if call.name in ACTIVATIONS else None)
        if before is None or scope.function.guarded(node):
            continue
        message = (
            f"permuted before `{call.name}`: after it, `{call.name}` can run with the operation that made the tensor"
        )
        yield _found(scope, node, before, message, before.node is call.input)


def _made_contiguous(scope: Scope, node: ast.Call) -> ast.Call:
    """The call ``node.contiguous()`` around a permute; else the permute itself."""
    parent = scope.parent(node)
    call = scope.call(scope.parent(parent)) if isinstance(parent, ast.Attribute) else None
    return call.node if call is not None and call.name == "contiguous" and call.input is node else node


def _scaled(scope: Scope, node: ast.expr, depth: int = 0) -> Call | None:
    """The permute in ``x.permute(0, 2, 1).mul(255)`` or ``x.permute(0, 2, 1) * 2 + 1``; integers keep the type."""
    call = scope.call(node)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Add, ast.Sub)):
        given, number = node.left, node.right
    elif call is not None and call.is_method and call.name in ("mul", "add", "sub") and len(call.node.args) == 1:
        given, number = call.input, call.arguments[0]
    else:
        return None
    if integer(number) is None or depth > _DEPTH:
        return None
    return permuted(scope, given) or _scaled(scope, given, depth + 1)


def _is_elementwise(call: Call) -> bool:
    """Whether the function is elementwise in one tensor: an activation, or ``clamp`` by numbers."""
    if call.name not in ("clamp", "clip", "clamp_min", "clamp_max"):
        return call.name in ACTIVATIONS
    bounds = [*call.arguments, *(value for name, value in call.keywords.items() if name not in ("input", "out"))]
    signless = [b.operand if isinstance(b, ast.UnaryOp) else b for b in bounds]
    return bool(bounds) and all(isinstance(b, ast.Constant) for b in signless)


def _found(scope: Scope, node: ast.expr, before: Call, message: str, directly: bool) -> Found:
    """The finding at ``node``; its edit moves the permute behind ``node`` if ``node`` holds the permute itself."""
    if not directly or not before.is_method or before.dims is None:
        return Found(node, message)
    text, source = scope.source.text, scope.source
    start, end = source.span(node)
    inner_start, inner_end = source.span(before.node)
    better = text[start:inner_start] + source.receiver(before.node) + text[inner_end:end]
    axes = text[source.span(before.node.func)[1] : inner_end]
    if "\n" in better or "\n" in axes:
        return Found(node, message)
    better = f"({better})" if isinstance(node, ast.Compare) else better
    edit = source.replace(node, f"{better}.{before.name}{axes}")
    return Found(node, message, (edit,) if edit else ())


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
