"""SVX201: copies along an axis of size 1 for an elementwise function, which broadcasts."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from svexport.advise.axes import inserted
from svexport.advise.kinds import Call, integer
from svexport.advise.rule import Found, Rule, Scope
from svexport.advise.source import Edit
from svexport.advise.torch_names import ACTIVATIONS, ARITHMETIC

__all__ = ["RULE"]


def find(scope: Scope) -> Iterator[Found]:
    for node in scope.function.all(ast.Call):
        call = scope.call(node)
        if call is None or call.name != "repeat" or not call.is_method or node.keywords:
            continue
        factors = _factors(call)
        axes = _repeated(factors)
        made = [_has_size_1(scope, call.input, axis, len(factors)) for axis in axes]
        if not axes or not all(
            one or _is_one_wide(scope, call.input, axis) for axis, one in zip(axes, made, strict=True)
        ):
            continue
        name = scope.only_value(node)
        uses: list[ast.Name] = scope.uses.get(name, []) if name else []
        if not (all(_broadcasts(scope, use) for use in uses) if uses else _broadcasts(scope, node)):
            continue
        message = "`repeat` copies what the elementwise function after it broadcasts: leave it out, or `expand`"
        yield Found(node, message, _edits(scope, call, factors, axes[0]) if made == [True] else ())


def _factors(call: Call) -> list[ast.expr]:
    if len(call.arguments) == 1 and isinstance(call.arguments[0], (ast.Tuple, ast.List)):
        return call.arguments[0].elts
    return list(call.arguments)


def _repeated(factors: list[ast.expr]) -> list[int]:
    """The axes whose factor is not 1."""
    if any(isinstance(factor, ast.Starred) for factor in factors):
        return []
    return [i for i, factor in enumerate(factors) if integer(factor) != 1]


def _has_size_1(scope: Scope, node: ast.expr, axis: int, rank: int) -> bool:
    made = scope.value_of(node)
    if isinstance(made, ast.Call) and scope.file.qualified(made.func) in ("torch.arange", "torch.linspace"):
        return axis < rank - 1  # in front of its one axis
    return any((axis if at >= 0 else axis - rank) == at for at in inserted(scope, node).axes)


def _is_one_wide(scope: Scope, node: ast.expr, axis: int) -> bool:
    """``x[:, :1]``: of size 1, or 0 if x is empty, which ``expand`` refuses."""
    made = scope.value_of(node)
    if not isinstance(made, ast.Subscript) or not scope.is_tensor(made.value):
        return False
    items = made.slice.elts if isinstance(made.slice, ast.Tuple) else [made.slice]
    if len(items) <= axis or not all(isinstance(item, ast.Slice) for item in items[: axis + 1]):
        return False
    item = items[axis]
    lower = 0 if item.lower is None else integer(item.lower)  # type: ignore[attr-defined]
    upper = integer(item.upper)  # type: ignore[attr-defined]
    return lower is not None and lower >= 0 and upper == lower + 1


def _broadcasts(scope: Scope, node: ast.AST) -> bool:
    """Whether an elementwise function takes ``node``, and another tensor that has the full size."""
    parent = scope.parent(node)
    if isinstance(parent, ast.BinOp) and not isinstance(parent.op, ast.MatMult):
        other = parent.right if parent.left is node else parent.left
        return not _is_number(other)
    if isinstance(parent, ast.Compare) and len(parent.ops) == 1:
        other = parent.left if parent.left is not node else parent.comparators[0]
        return not _is_number(other) and not isinstance(parent.ops[0], (ast.Is, ast.IsNot, ast.In, ast.NotIn))
    call = scope.call(parent)
    return call is not None and call.name in ARITHMETIC - ACTIVATIONS and bool(call.arguments)


def _is_number(node: ast.expr) -> bool:
    """With a number alone, nothing would bring the size back that the repeat made."""
    return isinstance(node, (ast.Constant, ast.UnaryOp))


def _edits(scope: Scope, call: Call, factors: list[ast.expr], axis: int) -> tuple[Edit, ...]:
    sizes = ["-1"] * len(factors)
    sizes[axis] = scope.text(factors[axis])
    edit = scope.source.replace(call.node, f"{scope.source.receiver(call.node)}.expand({', '.join(sizes)})")
    return (edit,) if edit else ()


RULE = Rule(
    code="SVX201",
    name="`repeat` before an elementwise function",
    why=(
        "Elementwise functions broadcast axes of size 1 as they read; `repeat` writes the copies to memory first, and "
        "is a Tile in the file."
    ),
    before="y = x * weights.unsqueeze(1).repeat(1, n, 1)",
    after="y = x * weights.unsqueeze(1)    # or, where the size is wanted: .expand(-1, n, -1)",
    find=find,
    fixes=True,
    note="fixed with `expand`, which copies nothing; only where the axis was made by `unsqueeze` or `None` just before",
)
