"""SVX201: ``repeat`` along an axis of size 1 before an elementwise function, which broadcasts anyway."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from svexport.advise.calls import Call, integer
from svexport.advise.indices import is_whole
from svexport.advise.rule import Found, Rule, Scope
from svexport.advise.shapes import shape, unpacked
from svexport.advise.source import Edit
from svexport.advise.torch_names import ACTIVATIONS, ARITHMETIC, REDUCTIONS

__all__ = ["RULE"]

_STEPS = 4  # limit on elementwise functions in a row
_ALONE = {"float", "half", "long", "int", "bool", "clamp", "logical_not"}


def find(scope: Scope) -> Iterator[Found]:
    for node in scope.function.all(ast.Call):
        call = scope.call(node)
        if call is None or call.name != "repeat" or not call.is_method or node.keywords:
            continue
        factors = _factors(scope, call)
        axes = _repeated(factors)
        if not axes or not all(_has_size_1(scope, call.input, axis, len(factors)) for axis in axes):
            continue
        uses = [use for use in scope.reads(node) if not _is_model(scope, use)]
        kept = {*range(len(factors))} - {*axes}
        if not uses or not all(_broadcasts(scope, use, kept, len(factors)) for use in uses):
            continue
        message = "`repeat` copies what the elementwise function after it broadcasts: leave it out, or `expand`"
        yield Found(node, message, _edits(scope, call, factors, axes))


def _factors(scope: Scope, call: Call) -> list[ast.expr]:
    if len(call.arguments) == 1 and isinstance(call.arguments[0], (ast.Tuple, ast.List)):
        return call.arguments[0].elts
    return unpacked(scope, call.arguments)


def _repeated(factors: list[ast.expr]) -> list[int]:
    """The axes whose factor is not 1."""
    if any(isinstance(factor, ast.Starred) for factor in factors):
        return []
    return [i for i, factor in enumerate(factors) if integer(factor) != 1]


def _has_size_1(scope: Scope, node: ast.expr, axis: int, rank: int) -> bool:
    """Whether the axis, of ``rank`` axes, has size 1: of a sum or product, where both operands have it."""
    made = scope.value_of(node)
    if isinstance(made, ast.BinOp) and not isinstance(made.op, ast.MatMult):
        sides = [side for side in (made.left, made.right) if not _is_number(side)]
        if sides and all(_has_size_1(scope, side, axis, rank) for side in sides):
            return True
    known = shape(scope, node)
    if known.rank is not None and known.rank < rank:
        return axis < rank - known.rank  # a new axis in front of the tensor's own
    return axis in known.ones or axis - rank in known.ones


def _broadcasts(scope: Scope, node: ast.AST, kept: set[int], rank: int, depth: int = 0) -> bool:
    """Whether an elementwise function takes ``node`` together with another operand that may have the full size.

    Args:
        kept: the axes that ``repeat`` left as they were, empty if their numbers are not known any more.
        rank: the number of axes that ``kept`` is about.
    """
    parent = scope.parent(node)
    alone = _elementwise_alone(scope, node)
    if alone is None:
        alone, kept = _seen(scope, node) or _reduced(scope, node, kept, rank), set()
    if alone is not None:  # a function of node alone: look at the uses of its result
        later = scope.reads(alone)
        return depth < _STEPS and bool(later) and all(_broadcasts(scope, use, kept, rank, depth + 1) for use in later)
    if isinstance(parent, ast.BinOp) and not isinstance(parent.op, ast.MatMult):
        other = parent.right if parent.left is node else parent.left
        return not _is_number(other)
    if isinstance(parent, ast.Compare) and len(parent.ops) == 1:
        other = parent.left if parent.left is not node else parent.comparators[0]
        return not _is_number(other) and not isinstance(parent.ops[0], (ast.Is, ast.IsNot, ast.In, ast.NotIn))
    call = scope.call(parent)
    return call is not None and call.name in ARITHMETIC - ACTIVATIONS and bool(call.arguments)


def _seen(scope: Scope, node: ast.AST) -> ast.expr | None:
    """The view around ``node`` that only adds axes: ``x[..., None]``, ``x.unsqueeze(1)``."""
    parent = scope.parent(node)
    if isinstance(parent, ast.Subscript) and parent.value is node:
        items = parent.slice.elts if isinstance(parent.slice, ast.Tuple) else [parent.slice]
        plain = all(is_whole(i) or (isinstance(i, ast.Constant) and i.value in (None, Ellipsis)) for i in items)
        return parent if plain else None
    call = scope.call(scope.parent(parent)) if isinstance(parent, ast.Attribute) else None
    return call.node if call is not None and call.input is node and call.name == "unsqueeze" else None


def _reduced(scope: Scope, node: ast.AST, kept: set[int], rank: int) -> ast.expr | None:
    """The reduction around ``node`` along axes that ``repeat`` left as they were."""
    parent = scope.parent(node)
    call = scope.call(scope.parent(parent) if isinstance(parent, ast.Attribute) else parent)
    if call is None or call.input is not node or call.name not in REDUCTIONS:
        return None
    given = call.get(0, "dim", "axis")
    dims = [integer(d) for d in (given.elts if isinstance(given, (ast.Tuple, ast.List)) else [given])]
    return call.node if all(d is not None and d % rank in kept for d in dims) else None


def _is_model(scope: Scope, node: ast.AST) -> bool:
    """Whether only the type and device of ``node`` are read: ``y.type_as(node)``."""
    call = scope.call(scope.parent(node))
    return call is not None and call.is_method and call.name in ("type_as", "to") and node in call.arguments


def _elementwise_alone(scope: Scope, node: ast.AST) -> ast.expr | None:
    """The elementwise function of ``node`` alone around it: ``mask > 0``, ``x * 2``, ``x.float()``, ``F.relu(x)``."""
    parent = scope.parent(node)
    if isinstance(parent, ast.UnaryOp) and not isinstance(parent.op, ast.Not):
        return parent
    if isinstance(parent, ast.BinOp):
        return parent if _is_number(parent.right if parent.left is node else parent.left) else None
    if isinstance(parent, ast.Compare) and len(parent.ops) == 1:
        return parent if _is_number(parent.comparators[0] if parent.left is node else parent.left) else None
    call = scope.call(scope.parent(parent) if isinstance(parent, ast.Attribute) else parent)
    if call is None or call.input is not node:
        return None
    cast = call.name in ("to", "type_as")
    alone = cast or (call.name in ACTIVATIONS | _ALONE and all(map(_is_number, call.arguments)))
    return call.node if alone else None


def _is_made(scope: Scope, node: ast.expr) -> bool:
    """Whether ``unsqueeze``, ``None``, ``view`` or the like made the axis."""
    made = scope.value_of(node)
    if isinstance(made, ast.Subscript):
        items = made.slice.elts if isinstance(made.slice, ast.Tuple) else [made.slice]
        return any(isinstance(item, ast.Constant) and item.value is None for item in items)
    call = scope.call(made)
    return call is not None and call.name in ("unsqueeze", "view", "reshape", "arange", "linspace")


def _is_number(node: ast.expr) -> bool:
    """Whether an operand is a number, which cannot restore the size that ``repeat`` made."""
    while isinstance(node, ast.Attribute):
        node = node.value  # torch.finfo(x.dtype).min
    limits = isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("finfo", "iinfo")
    return limits or isinstance(node, (ast.Constant, ast.UnaryOp))


def _edits(scope: Scope, call: Call, factors: list[ast.expr], axes: list[int]) -> tuple[Edit, ...]:
    """``expand`` for ``repeat`` along one axis made just before: any other axis of size 1 may be empty at run time."""
    if len(axes) != 1 or not _is_made(scope, call.input) or any(isinstance(a, ast.Starred) for a in call.arguments):
        return ()
    (axis,) = axes
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
