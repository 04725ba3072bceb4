"""SVX104: results whose size depends on values."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from svexport.advise.functions import Reach
from svexport.advise.rule import Found, Rule, Scope
from svexport.advise.sizes import is_first_size

__all__ = ["RULE"]


def find(scope: Scope) -> Iterator[Found]:
    for node in scope.function.all(ast.Call):
        call = scope.call(node)
        if call is None or scope.function.guarded(node):
            continue
        if call.name == "where" and not call.is_method and not call.arguments and not call.keywords:
            name = "torch.where(condition)"
        elif call.name in ("nonzero", "argwhere") and (not call.is_method or scope.is_tensor(call.input)):
            name = call.name
        else:
            continue
        if _in_loop_of_python(scope, node) or _leaves(scope, node):
            continue
        better = "keep the shape: `torch.where(mask, a, b)`, `masked_fill`, a product with the mask, or `topk`"
        yield Found(node, f"the size of `{name}` depends on values: {better}")


def _in_loop_of_python(scope: Scope, node: ast.AST) -> bool:
    """Whether ``node`` is in a loop over anything but a tensor's rows, such as classes or levels."""
    if not scope.function.in_loop(node):
        return False
    for child, parent in scope.function.above(node):
        if isinstance(parent, ast.For) and child in parent.body:
            return not _is_over_rows(scope, parent.iter)
        if isinstance(parent, (ast.ListComp, ast.GeneratorExp)) and child is parent.elt:
            return not all(_is_over_rows(scope, loop.iter) for loop in parent.generators)
    return True


def _is_over_rows(scope: Scope, rows: ast.expr) -> bool:
    """Whether a loop iterates over the first axis of a tensor, such as the images of a batch."""
    name = getattr(rows.func, "id", "") if isinstance(rows, ast.Call) else ""
    given = rows.args if isinstance(rows, ast.Call) else []
    if name == "zip":
        return bool(given) and all(_is_over_rows(scope, a) for a in given)
    if name == "range" and len(given) == 1:
        named = given[0].attr if isinstance(given[0], ast.Attribute) else getattr(given[0], "id", "")
        return "batch" in named.lower() or is_first_size(scope, given[0])
    rows = given[0] if name == "enumerate" and given else rows
    found = scope.call(scope.value_of(rows))
    return scope.is_tensor(rows) and (found is None or found.name not in ("nonzero", "argwhere", "unique"))


def _leaves(scope: Scope, node: ast.AST) -> bool:
    """Whether the result leaves tensors for Python: ``for i in mask.nonzero()``, ``.tolist()``."""
    for child, parent in scope.function.above(node):
        if isinstance(parent, (ast.For, ast.comprehension)):
            return child is parent.iter
        if isinstance(parent, ast.Attribute) and parent.attr in ("tolist", "numpy", "item"):
            return True
        if isinstance(parent, (ast.ListComp, ast.GeneratorExp)):
            return False  # a loop around takes the list of results apart, not a result
        if isinstance(parent, ast.stmt):
            break
    return any(
        isinstance(scope.parent(use), (ast.For, ast.comprehension))
        or getattr(scope.parent(use), "attr", "") in ("tolist", "numpy", "item")
        for use in scope.reads(child)  # type: ignore[arg-type]
        if use is not child
    )


RULE = Rule(
    code="SVX104",
    name="`nonzero()` or `torch.where(condition)` in forward",
    why=(
        "The number of results is known only after the values: eager CUDA waits for the device, torch.export needs an "
        "unbacked size, and TensorRT has NonZero from 8.5 on only."
    ),
    before="rows = torch.nonzero(mask)[:, 0]\nx[rows] = 0",
    after="x = x.masked_fill(mask[:, None], 0)",
    find=find,
    reach=Reach.FORWARD,
    note="the better form depends on how the indices are used",
)
