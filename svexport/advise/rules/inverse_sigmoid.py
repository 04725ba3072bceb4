"""SVX303: inverse sigmoids that are infinite at 0 and 1."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from svexport.advise.rule import Found, Rule, Scope

__all__ = ["RULE"]

_BOUNDING = ("clamp", "clip", "eps", "nan_to_num", "clamp_min", "maximum", "minimum", "clamp_")
_DEPTH = 4  # limit on names that stand for other names
_MASKING = ("where", "masked_fill", "masked_fill_", "nan_to_num")


def find(scope: Scope) -> Iterator[Found]:
    for node in [*scope.function.all(ast.Call), *scope.function.all(ast.BinOp)]:
        x = _inverted(scope, node)
        if x is None or _is_bounded(scope, x) or _is_masked(scope, node, x):
            continue
        text = scope.text(x)
        yield Found(node, f"an inverse sigmoid is infinite at 0 and 1: `torch.logit({text}, eps=1e-5)`")


def _inverted(scope: Scope, node: ast.AST) -> ast.Name | None:
    """The x of ``log(x / (1 - x))``, ``log(x) - log(1 - x)`` or ``log(1 / x - 1)``; None for anything else."""
    value = _logarithm(scope, node)
    value = scope.value_of(value) if value is not None else None
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Sub) and _is_one(value.right):
        inverse = value.left
        if isinstance(inverse, ast.BinOp) and isinstance(inverse.op, ast.Div) and _is_one(inverse.left):
            return inverse.right if isinstance(inverse.right, ast.Name) else None
    if isinstance(node, ast.BinOp):
        logs = [_logarithm(scope, side) for side in (node.left, node.right)] if isinstance(node.op, ast.Sub) else []
        pair = (logs[0], logs[1]) if logs and logs[0] is not None and logs[1] is not None else None
    else:
        is_ratio = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div)
        pair = (value.left, value.right) if is_ratio else None  # type: ignore[union-attr]
    if pair is None:
        return None
    rest = scope.value_of(_unclamped(scope, pair[1]))
    if not isinstance(rest, ast.BinOp) or not isinstance(rest.op, ast.Sub) or not _is_one(rest.left):
        return None
    given, definitions = rest.right, scope.flow.definitions
    for x in (pair[0], _unclamped(scope, pair[0])):
        # Names that different assignments reach may have different values.
        named = isinstance(x, ast.Name) and isinstance(given, ast.Name) and x.id == given.id
        if named and definitions.get(x) == definitions.get(given):  # type: ignore[call-overload]
            return x  # type: ignore[return-value]
    return None


def _unclamped(scope: Scope, node: ast.expr) -> ast.expr:
    """The ``x`` of ``x.clamp(min=0)`` or of a name for it; anything else itself."""
    value = scope.value_of(node)
    call = scope.call(value)
    return call.input if call is not None and _clamps_to_0_1(scope, call.node) else node


def _is_one(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value == 1


def _logarithm(scope: Scope, node: ast.AST) -> ast.expr | None:
    call = scope.call(node)
    return call.input if call is not None and call.name == "log" and not call.arguments else None


def _is_bounded(scope: Scope, x: ast.Name) -> bool:
    """Whether something keeps x away from 0 and 1."""
    for binding in scope.bindings.get(x.id, []):
        within = {n.func for n in ast.walk(binding.value or x) if isinstance(n, ast.Call) and _clamps_to_0_1(scope, n)}
        names = {n.attr for n in ast.walk(binding.value or x) if isinstance(n, ast.Attribute) and n not in within}
        names |= {n.id for n in ast.walk(binding.value or x) if isinstance(n, ast.Name)}
        if any(word in name for name in names for word in _BOUNDING):
            return True
    uses = [use for binding in scope.flow.definitions.get(x, ()) for use in binding.uses]
    for use in uses:  # x.clamp_(...)
        attribute = scope.parent(use)
        if isinstance(attribute, ast.Attribute) and attribute.attr == "clamp_":
            return True
    return False


def _clamps_to_0_1(scope: Scope, node: ast.Call) -> bool:
    """Whether it is ``x.clamp(0, 1)``, which still allows 0 and 1."""
    call = scope.call(node)
    if call is None or call.name not in ("clamp", "clip"):
        return False
    limits = [*call.arguments, *(value for key, value in call.keywords.items() if key != "input")]
    return all(isinstance(limit, ast.Constant) and limit.value in (0, 1) for limit in limits)


def _is_masked(scope: Scope, node: ast.AST, x: ast.Name) -> bool:
    """Whether the name assigned is masked later, by a mask computed from x or from the logarithm."""
    statement = scope.function.statement(node)
    targets = {t.id for t in getattr(statement, "targets", []) if isinstance(t, ast.Name)}
    for later in scope.function.all(ast.Call):
        call = scope.call(later)
        if later.lineno <= statement.lineno or call is None or call.name not in _MASKING:
            continue
        given = (call.input, *call.arguments, *call.keywords.values())
        if not targets & {n.id for a in given for n in ast.walk(a) if isinstance(n, ast.Name)}:
            continue
        mask = call.arguments[0] if call.is_method and call.arguments else call.input
        if call.name == "nan_to_num" or {x.id, *targets} & _made_of(scope, mask):
            return True
    return False


def _made_of(scope: Scope, node: ast.expr, depth: int = 0) -> set[str]:
    """The names that a value may be computed from, directly or through other names."""
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)] if depth < _DEPTH else []
    values = [b.value for n in names for b in scope.flow.definitions.get(n, ()) if b.value is not None]
    return {n.id for n in names}.union(*(_made_of(scope, value, depth + 1) for value in values))


RULE = Rule(
    code="SVX303",
    name="an inverse sigmoid without eps",
    why=(
        "`log(x / (1 - x))` is infinite at 0 and 1, and sigmoids reach both by rounding, in half from about 8.3 on. "
        "One infinite reference point turns all that attends to it into NaN."
    ),
    before="def inverse_sigmoid(x):\n    return torch.log(x / (1 - x))",
    after="def inverse_sigmoid(x, eps=1e-5):\n    return torch.logit(x, eps=eps)",
    find=find,
    note="values next to 0 and 1 change, as they should",
)
