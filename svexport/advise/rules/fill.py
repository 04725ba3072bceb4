"""SVX202: tensors that are made, filled, cast and moved in separate steps."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from svexport.advise.calls import Call, integer
from svexport.advise.kinds import Kind
from svexport.advise.rule import Found, Rule, Scope
from svexport.advise.source import Edit
from svexport.advise.torch_names import CREATORS, LIKE_CREATORS, NEW_CREATORS

__all__ = ["RULE"]

_CASTS = ("float", "half", "double", "long", "int", "bool")
_PARTS = ("dtype", "device")
_COUNTS = ("start", "end", "step", "steps", "n")


def find(scope: Scope) -> Iterator[Found]:
    for node in scope.function.all(ast.Call):
        call = scope.call(node)
        if call is None or not call.is_method or scope.function.guarded(node):
            continue
        if _sets_value(scope, call):
            yield Found(node, f"two steps write a tensor of one number: `{_full(scope, call)}`")
        elif call.name == "fill_" and len(node.args) == 1 and not node.keywords:
            if _cast(scope, scope.parent(scope.parent(node))) is None:  # else the finding at the cast covers it
                yield from _filled(scope, call)
        elif len(node.args) == 1 and (call.name == "type_as" or _is_to_tensor(scope, call)):
            yield from _like(scope, call)
        elif call.name in ("to", "cuda"):
            yield from _moved(scope, call)


def _sets_value(scope: Scope, call: Call) -> bool:
    """Whether it is ``ones().mul_(0.5)`` or ``zeros().add_(2)``."""
    if call.name not in ("mul_", "add_") or len(call.arguments) != 1 or not _is_number(call.arguments[0]):
        return False
    made = _creation(scope, call.input)
    plain = made.name.removeprefix("new_") if made is not None else ""
    return plain.startswith("ones" if call.name == "mul_" else "zeros")


def _full(scope: Scope, call: Call) -> str:
    made = _creation(scope, call.input)
    assert made is not None
    like = made.name in LIKE_CREATORS
    return "torch.full_like" if like else "new_full" if made.is_method else "torch.full"


def _creation(scope: Scope, node: ast.expr) -> Call | None:
    """``node`` as a call if it is ``torch.zeros(...)``, ``torch.zeros_like(x)``, ``x.new_zeros(...)`` or similar."""
    call = scope.call(node)
    if call is None or any(k not in _PARTS for k in call.keywords):
        return None
    if call.is_method:
        return call if call.name in NEW_CREATORS else None
    return call if call.name in CREATORS | LIKE_CREATORS else None


def _counted(scope: Scope, node: ast.expr) -> Call | None:
    """``node`` as a call if it is ``torch.arange(n)``, ``torch.linspace(0, 1, n)`` or ``torch.eye(n)``."""
    call = scope.call(node)
    known = call is not None and not call.is_method and call.name in ("arange", "linspace", "logspace", "eye")
    return call if known and all(k in _PARTS + _COUNTS for k in call.keywords) else None  # type: ignore[union-attr]


def _cast(scope: Scope, node: ast.AST) -> Call | None:
    call = scope.call(node)
    return call if call is not None and call.is_method and call.name == "type_as" else None


def _filled(scope: Scope, call: Call) -> Iterator[Found]:
    made = _creation(scope, call.input)
    if made is None or (made.name == "full" and not made.is_method):
        return
    value = call.arguments[0]
    written = scope.text(value)
    kinds = ", ".join(scope.text(k) for k in made.node.keywords)
    tail = f", {kinds}" if kinds else ""
    if made.name in LIKE_CREATORS:
        name, text = "torch.full_like", f"{_torch(scope, made, 'full_like')}({scope.text(made.input)}, {written}{tail})"
    elif made.is_method:
        size = _size(scope, made.node.args)
        name, text = "new_full", f"{scope.source.receiver(made.node)}.new_full({size}, {written}{tail})" if size else ""
    else:
        size = _size(scope, made.node.args)
        if "dtype" not in made.keywords and integer(value) is not None:
            written += ".0"  # torch.full of an integer makes integers, torch.zeros makes floats
        name, text = "torch.full", f"{_torch(scope, made, 'full')}({size}, {written}{tail})" if size else ""
    edit = scope.source.replace(call.node, text) if text and _is_number(value) else None
    yield Found(call.node, f"`{made.name}` and `fill_` write twice: `{name}`", (edit,) if edit else ())


def _is_to_tensor(scope: Scope, call: Call) -> bool:
    """Whether it is ``y.to(x)``, which takes type and device from a tensor."""
    return call.name == "to" and not call.node.keywords and scope.is_tensor(call.arguments[0])


def _like(scope: Scope, call: Call) -> Iterator[Found]:
    inner = scope.call(call.input)
    filling = inner if inner is not None and inner.is_method and inner.name == "fill_" and inner.arguments else None
    made = _creation(scope, filling.input if filling else call.input)
    if made is None or made.is_method or made.name in LIKE_CREATORS or made.keywords:
        return
    target = call.arguments[0]
    text = scope.text(target)
    receiver = text if isinstance(target, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)) else f"({text})"
    arguments = ", ".join(scope.text(a) for a in made.node.args)
    name = "new_full" if filling or made.name == "full" else f"new_{made.name}"
    exact = True
    if filling:
        size = _size(scope, made.node.args)
        arguments = f"{size}, {scope.text(filling.arguments[0])}" if size else ""
        exact = _is_small(filling.arguments[0])
    elif made.name == "full":
        exact = len(made.node.args) == 2 and _is_small(made.node.args[1])
    edit = scope.source.replace(call.node, f"{receiver}.{name}({arguments})") if exact and arguments else None
    message = f"`{made.name}` and `{call.name}` first make it in another type, or on the CPU: `{receiver}.{name}(...)`"
    yield Found(call.node, message, (edit,) if edit else ())


def _moved(scope: Scope, call: Call) -> Iterator[Found]:
    cast = scope.call(call.input)
    casts = cast is not None and cast.is_method and cast.name in _CASTS and not cast.node.args
    source = cast.input if casts and cast is not None else call.input
    made = _creation(scope, source) or _counted(scope, source)
    if made is None or made.is_method or made.name in LIKE_CREATORS or "device" in made.keywords:
        return
    if call.name == "cuda":
        yield Found(call.node, f"`torch.{made.name}` on the CPU is copied to the device, which waits: `device=`")
        return
    device = _device(call)
    if device is None:
        return
    if casts:
        message = f"`torch.{made.name}` is cast, then copied to the device, which waits: say both where it is made"
        yield Found(call.node, message)
        return
    inner = scope.source.span(made.node)[1] - 1
    end = scope.source.span(call.node)[1]
    comma = "" if scope.source.text[:inner].rstrip().endswith(",") else ", "
    text = f"{comma}device={scope.text(device)})"
    whole = scope.source.text[inner:end]
    given = [*made.node.args, *(v for k, v in made.keywords.items() if k in _COUNTS)]
    same = made.name in CREATORS or all(integer(a) is not None or scope.kind(a) is Kind.SIZE for a in given)
    plain = "\n" not in whole and "#" not in whole and not whole.startswith("))")
    edits = (Edit(inner, end, text),) if same and plain else ()
    message = f"`torch.{made.name}` on the CPU is copied to the device, which waits: `device={scope.text(device)}`"
    yield Found(call.node, message, edits)


def _device(call: Call) -> ast.expr | None:
    """The argument of ``.to`` if it is the only one and a device."""
    given = [*call.arguments, *(k.value for k in call.node.keywords)]
    if len(given) != 1 or any(k.arg != "device" for k in call.node.keywords):
        return None
    value = given[0]
    name = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""
    return value if call.node.keywords or name in ("device", "_device", "dev") else None


def _torch(scope: Scope, call: Call, name: str) -> str:
    """``name`` with the module as the call spells it: ``torch.full`` for a call of ``torch.zeros``."""
    function = call.node.func
    return f"{scope.text(function.value)}.{name}" if isinstance(function, ast.Attribute) else f"torch.{name}"


def _size(scope: Scope, arguments: list[ast.expr]) -> str:
    """The sizes as the text of one tuple; empty if a single argument may be a size or a tuple."""
    texts = [scope.text(a) for a in arguments]
    if len(arguments) > 1:
        return f"({', '.join(texts)})"
    if not arguments:
        return ""
    only = arguments[0]
    if isinstance(only, (ast.Tuple, ast.List)) or scope.kind(only) is Kind.SHAPE:
        return texts[0]
    return f"({texts[0]},)" if integer(only) is not None or scope.kind(only) is Kind.SIZE else ""


def _is_small(node: ast.expr | None) -> bool:
    """Whether ``node`` is an integer literal that every type represents exactly."""
    value = integer(node)
    return value is not None and 0 <= value <= 127


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


RULE = Rule(
    code="SVX202",
    name="`zeros().fill_().type_as()` and its like",
    why=(
        "Each step writes the tensor again: made of float32 on the CPU, filled, cast, copied to the device. One call "
        "makes it in the right type, on the right device."
    ),
    before=(
        "mask = torch.zeros(n, n).fill_(1).type_as(x)\nbias = torch.zeros_like(x).fill_(0.5)\n"
        "y = torch.ones(n).to(x.device)"
    ),
    after="mask = x.new_full((n, n), 1)\nbias = torch.full_like(x, 0.5)\ny = torch.ones(n, device=x.device)",
    find=find,
    fixes=True,
    note="fixed where the value is the same number in every type, and it is certain which arguments are sizes",
)
