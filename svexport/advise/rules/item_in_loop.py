"""SVX101: loops that take values out of tensors."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from svexport.advise.calls import integer
from svexport.advise.functions import Reach
from svexport.advise.kinds import Kind
from svexport.advise.rule import Found, Rule, Scope

__all__ = ["RULE"]


def find(scope: Scope) -> Iterator[Found]:
    for node in scope.function.all(ast.Call):
        taken = _taken(scope, node)
        if taken is None:
            continue
        name, tensor = taken
        if not scope.function.in_loop(node) or scope.function.guarded(node):
            continue
        if _ends_early(scope, node) or _is_on_cpu(scope, tensor):
            continue
        if name == ".tolist()" and _is_of_batch(scope, node, tensor):
            continue
        better = "take all values out before the loop, in one `.tolist()`, or stay with tensors"
        yield Found(node, f"`{name}` in a loop waits for the device every round: {better}")


def _taken(scope: Scope, node: ast.Call) -> tuple[str, ast.expr] | None:
    """The name of a conversion and its tensor: ``x.item()``, ``x.tolist()``, ``int(x)``, ``float(x)``."""
    called = scope.file.qualified(node.func)
    if called in ("int", "float") and called not in scope.bindings and len(node.args) == 1 and not node.keywords:
        return (f"{called}()", node.args[0]) if scope.is_tensor(node.args[0]) else None
    call = scope.call(node)
    if call is None or call.name not in ("item", "tolist") or node.args or node.keywords:
        return None
    in_torch = scope.function.reach is Reach.FORWARD or scope.function.is_without_gradients
    certain = call.name == "item" and in_torch and not _is_array(scope, call.input)
    return (f".{call.name}()", call.input) if certain or scope.is_tensor(call.input) else None


def _is_of_batch(scope: Scope, node: ast.AST, tensor: ast.expr) -> bool:
    """Whether a loop outside of a model iterates over values of unknown kind, such as a loader's batches.

    Rows of a tensor that was made before the loop are none.
    """
    if scope.function.reach is Reach.FORWARD:
        return False
    loops = scope.function.loops(node)[:1]
    whole = tensor
    while isinstance(whole, ast.Subscript):
        whole = whole.value
    made = scope.definition(whole)
    if made is not None and whole is not tensor and loops and made.statement not in {*ast.walk(loops[0])}:
        return False
    given = [loop.iter for loop in loops]
    if given and isinstance(given[0], ast.Call) and getattr(given[0].func, "id", "") in ("zip", "enumerate"):
        given = given[0].args
    return bool(given) and all(isinstance(a, (ast.Name, ast.Subscript)) and scope.kind(a) is None for a in given)


def _ends_early(scope: Scope, node: ast.AST) -> bool:
    """Whether the loop's end depends on what it computes, so that not all values are known before it."""
    for child, parent in scope.function.above(node):
        if isinstance(parent, ast.GeneratorExp):
            taker = scope.parent(parent)
            return isinstance(taker, ast.Call) and scope.file.qualified(taker.func) in ("any", "all", "next")
        if isinstance(parent, ast.While):
            return not _counts(scope, parent)
        if isinstance(parent, ast.For) and child in parent.body:
            return any(isinstance(n, ast.Break) for n in ast.walk(parent))
    return False


def _counts(scope: Scope, loop: ast.While) -> bool:
    """Whether only a counter ends the loop: ``while i < 8: ...; i += 1`` without ``break``."""
    test = loop.test
    if any(isinstance(n, (ast.Break, ast.Return)) for n in ast.walk(loop)):
        return False
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.left, ast.Name):
        return False
    inside = set(ast.walk(loop))
    steps = [b.statement for b in scope.bindings.get(test.left.id, []) if b.statement in inside]
    steady = all(isinstance(s, ast.AugAssign) and integer(s.value) is not None for s in steps)
    (limit,) = test.comparators
    names = {n.id for n in ast.walk(limit) if isinstance(n, ast.Name)}
    moved = any(b.statement in inside for name in names for b in scope.bindings.get(name, []))
    calls = any(isinstance(n, ast.Call) and not _is_count(scope, n) for n in ast.walk(limit))
    return bool(steps) and steady and not moved and not calls


def _is_count(scope: Scope, node: ast.Call) -> bool:
    """Whether a call is ``len(...)`` or ``x.size(0)``, which do not wait for the device."""
    return scope.file.qualified(node.func) == "len" or scope.kind(node) is Kind.SIZE


def _values(scope: Scope, node: ast.expr) -> list[ast.expr]:
    """The values bound to the names of an expression anywhere in the function."""
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id not in scope.file.names]
    return [b.value for n in names for b in scope.bindings.get(n.id, []) if b.value is not None]


def _is_array(scope: Scope, node: ast.expr) -> bool:
    """Whether a numpy call may have made the value."""
    called = [scope.file.qualified(v.func) or "" for v in _values(scope, node) if isinstance(v, ast.Call)]
    return any(name.startswith(("numpy.", "np.")) for name in called)


def _is_on_cpu(scope: Scope, node: ast.expr) -> bool:
    """Whether torch made the tensor on the CPU, or it was copied there whole: no round then waits for the device."""
    values = _values(scope, node)
    if any(isinstance(v, ast.Call) and getattr(v.func, "attr", "") in ("cpu", "numpy") for v in values):
        return True
    made = [v for v in values if isinstance(v, ast.Call) and scope.file.qualified(v.func) in _MAKERS]
    return bool(made) and not any(k.arg == "device" for v in made for k in v.keywords)


_MAKERS = {
    f"torch.{n}"
    for n in ("arange", "linspace", "tensor", "zeros", "ones", "randperm", "randint", "rand", "empty", "full")
}

RULE = Rule(
    code="SVX101",
    name="`.item()`, `.tolist()`, `int()` or `float()` in a loop",
    why=(
        "Each call waits until the device has done everything queued so far, then copies one value: the device idles "
        "while Python goes on. A tracer keeps the value of the example input as a constant, or refuses."
    ),
    before="for i in range(8):\n    scale = scales[i].item()\n    parts.append(x[i] * scale)",
    after="parts = x[:8] * scales[:8, None]    # or, outside of the model: for scale in scales.tolist():",
    find=find,
    note="the better form depends on how the values are used",
)
