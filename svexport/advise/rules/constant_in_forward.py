"""SVX106: constant tensors that every forward makes anew."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from svexport.advise.calls import integer
from svexport.advise.functions import Reach
from svexport.advise.rule import Found, Rule, Scope

__all__ = ["RULE"]

_MAKERS = {
    f"torch.{name}"
    for name in (
        "tensor",
        "as_tensor",
        "from_numpy",
        "arange",
        "linspace",
        "logspace",
        "eye",
        "Tensor",
        "FloatTensor",
        "LongTensor",
        "IntTensor",
        "BoolTensor",
    )
}
_ON_DEVICE = ("torch.arange", "torch.linspace", "torch.logspace", "torch.eye")
_OF_CONSTANTS = ("numpy.array", "numpy.asarray", "numpy.arange", "numpy.linspace", "int", "float", "len", "min", "max")
_NUMBERS = ("math.pi", "math.e", "math.inf", "numpy.pi", "numpy.inf", "torch.pi", "torch.inf")


def find(scope: Scope) -> Iterator[Found]:
    owner = scope.function.owner
    if owner is not None and owner.is_training_only:
        return
    for node in scope.function.all(ast.Call):
        name = scope.file.qualified(node.func)
        if name not in _MAKERS:
            call = scope.call(node)
            if call is None or not call.is_method or call.name != "new_tensor":
                continue
            name = call.name
        if owner is None and name in _ON_DEVICE:
            continue  # a function outside of a class may make these, on the device that it needs
        told = [*node.args, *(k.value for k in node.keywords if k.arg not in ("device", "dtype"))]
        if not told or not all(_is_constant(scope, value, name in _ON_DEVICE) for value in told):
            continue
        if scope.function.guarded(node):
            continue
        if name in _ON_DEVICE and _is_of_host(scope, node):
            continue
        if any(isinstance(parent, ast.Lambda) for _, parent in scope.function.above(node)):
            continue
        better = "`self.register_buffer` in `__init__`" + ("" if owner is not None else ", and give it to the function")
        yield Found(node, f"`{name}` of constants in every forward: make it once, {better}")


def _is_of_host(scope: Scope, node: ast.Call) -> bool:
    """Whether ``node`` makes a float64 tensor on the CPU, for a computation that is meant to run there."""
    given = {k.arg: scope.file.qualified(k.value) for k in node.keywords}
    return "device" not in given and given.get("dtype") in ("torch.float64", "torch.double")


def _is_constant(scope: Scope, node: ast.expr, counted: bool = False) -> bool:
    """Whether a value is the same in every forward; with ``counted``, also through the function's own names."""
    if isinstance(node, (ast.Tuple, ast.List)):
        return bool(node.elts) and all(_is_constant(scope, item, counted) for item in node.elts)
    if isinstance(node, ast.ListComp):
        return _is_constant_list(scope, node, counted)
    if isinstance(node, ast.Subscript):
        bounds = [node.slice.lower, node.slice.upper] if isinstance(node.slice, ast.Slice) else [node.slice]
        return _is_constant(scope, node.value, counted) and all(b is None or integer(b) is not None for b in bounds)
    if isinstance(node, ast.UnaryOp):
        return _is_constant(scope, node.operand, counted)
    if isinstance(node, ast.Call):
        return (
            scope.file.qualified(node.func) in _OF_CONSTANTS
            and bool(node.args)
            and all(_is_constant(scope, argument, counted) for argument in node.args)
        )
    if isinstance(node, ast.BinOp):
        return _is_constant(scope, node.left, counted) and _is_constant(scope, node.right, counted)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        owner = scope.function.owner
        settled = owner is not None and node.attr in owner.settled - owner.tensors - owner.buffers.keys()
        return settled or (owner is not None and isinstance(owner.default(node.attr), (ast.List, ast.Tuple)))
    if isinstance(node, ast.Name):
        binding, value = scope.definition(node), scope.value_of(node)
        if counted and binding is not None and binding.item and binding.index is not None:  # h, w = self.size
            return isinstance(binding.value, ast.Attribute) and _is_constant(scope, binding.value)
        if value is not node and (counted or isinstance(value, ast.Attribute)):
            return not isinstance(value, (ast.List, ast.Tuple)) and _is_constant(scope, value, counted)
        told = scope.file.constants.get(node.id) if scope.is_of_file(node) else None
        return told is not None and _is_constant(scope, told, counted)
    if isinstance(node, ast.Attribute):
        return scope.file.qualified(node) in _NUMBERS
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float, complex))


def _is_constant_list(scope: Scope, node: ast.ListComp, counted: bool) -> bool:
    """Whether it is ``[[x, y] for x in (-1, 1) for y in (-1, 1)]``: numbers, and what counts through them."""
    counting = {n.id for loop in node.generators for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    given = [loop.iter for loop in node.generators]
    numbers = [a for g in given for a in (g.args if isinstance(g, ast.Call) else [g])]
    known = not any(loop.ifs for loop in node.generators)
    known &= all(not isinstance(g, ast.Call) or scope.file.qualified(g.func) == "range" for g in given)
    plain = (ast.Tuple, ast.List, ast.Name, ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Load)
    inside = list(ast.walk(node.elt))
    simple = all(isinstance(n, plain) for n in inside) and all(
        n.id in counting for n in inside if isinstance(n, ast.Name)
    )
    return known and simple and all(_is_constant(scope, n, counted) for n in numbers)


RULE = Rule(
    code="SVX106",
    name="a constant made in forward",
    why=(
        "Every forward makes it anew: `torch.tensor` makes it on the CPU, and the copy waits for the device. In a half "
        "model it has a type of its own, with casts around it."
    ),
    before=(
        "def forward(self, x):\n    mean = torch.tensor([0.485, 0.456, 0.406], device=x.device)\n"
        "    return x - mean[:, None, None]"
    ),
    after=(
        "def __init__(self):\n    super().__init__()\n"
        "    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]\n"
        '    self.register_buffer("mean", mean, persistent=False)\n\n'
        "def forward(self, x):\n    return x - self.mean"
    ),
    find=find,
    reach=Reach.FORWARD,
    note="the buffer needs a name, and a place in `__init__`",
)
