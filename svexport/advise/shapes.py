"""Finds the ranks of tensors and their axes of size 1, judged by a function's text."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from svexport.advise.axes import permutation
from svexport.advise.calls import Call, argument, integer, parameter
from svexport.advise.flow import Binding
from svexport.advise.indices import complete, indexed
from svexport.advise.kinds import Kind
from svexport.advise.rule import Scope, Shape
from svexport.advise.torch_names import (
    ARITHMETIC,
    CREATORS,
    KEEPING_RANK,
    LIKE_CREATORS,
    RANKS,
    REDUCTIONS,
    SAME_RANK,
    SAME_SHAPE,
)
from svexport.advise.written import written_rank

__all__ = ["shape", "unpacked"]

_DEPTH = 40  # limit on nested expressions and on names that stand for them


_UNKNOWN = Shape()


class _OpenError(Exception):
    """A value depends only on values whose shapes are being found."""


def shape(scope: Scope, node: ast.AST, depth: int = 0) -> Shape:
    """The shape of a tensor: its rank, and the axes that ``unsqueeze``, ``None``, ``view`` or its sizes make 1."""
    if depth > _DEPTH:
        return _UNKNOWN
    if depth == 0:
        try:
            return shape(scope, node, 1)
        except _OpenError:
            return _UNKNOWN
    depth += 1
    if isinstance(node, ast.Name):
        return _of_name(scope, node, depth)
    if isinstance(node, ast.Attribute):
        return _of_attribute(scope, node, depth)
    if isinstance(node, ast.Subscript):
        return indexed(node.slice, shape(scope, node.value, depth))
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.MatMult):
            return _of_product(shape(scope, node.left, depth), shape(scope, node.right, depth))
        return _broadcast(scope, (node.left, node.right), depth)
    if isinstance(node, ast.UnaryOp):
        return shape(scope, node.operand, depth)
    if isinstance(node, ast.Compare) and len(node.comparators) == 1:
        return _broadcast(scope, (node.left, node.comparators[0]), depth)
    return _of_call(scope, node, depth) if isinstance(node, ast.Call) else _UNKNOWN


def _of_name(scope: Scope, node: ast.Name, depth: int) -> Shape:
    found, open_ = [], []
    for binding in scope.flow.definitions.get(node, frozenset()):
        try:
            known = _settled(scope, binding, depth)
        except _OpenError:
            known = None
        if known is None:  # ``x = x + y`` in a loop: assumed to keep the rank, dropped if that proves wrong
            open_.append(binding)
        else:
            found.append(known)
    if not found:
        if open_:
            raise _OpenError
        return _UNKNOWN
    ranks = {one.rank for one in found}
    rank = ranks.pop() if len(ranks) == 1 else None
    for binding in open_:
        scope.assumed.setdefault(binding, set()).add(rank)
    return Shape(frozenset.intersection(*(one.ones for one in found)), rank)


def _settled(scope: Scope, binding: Binding, depth: int) -> Shape | None:
    """The shape of a binding's value, None while it is being found."""
    if binding not in scope.shapes:
        before = len(scope.shapes)
        scope.shapes[binding] = None
        try:
            known = _of_binding(scope, binding, depth)
        except _OpenError:
            del scope.shapes[binding]
            raise
        if scope.assumed.pop(binding, set()) - {known.rank}:
            known = _UNKNOWN
            for other in list(scope.shapes)[before + 1 :]:
                if scope.shapes[other] is not None:
                    del scope.shapes[other]
        scope.shapes[binding] = known
    return scope.shapes[binding]


def _of_binding(scope: Scope, binding: Binding, depth: int) -> Shape:
    known = _UNKNOWN
    plain = not binding.item and not isinstance(binding.statement, ast.AugAssign)
    if plain and binding.value is not None:
        known = shape(scope, binding.value, depth)
    elif isinstance(binding.value, ast.Call) and binding.index is not None:
        known = _of_part(scope, binding.value, depth)
    told = _told_rank(scope, binding, depth) if known.rank is None else None
    if binding.parameter is None:
        return Shape.of(known.ones, told) if told is not None else known
    try:
        given = _given(scope, binding.parameter.arg, depth)
    except _OpenError:
        if told is None:
            raise
        given = _UNKNOWN
    if given.rank is None:
        return Shape.of(given.ones, told)
    return given if told in (None, given.rank) else Shape(rank=told)


def _given(scope: Scope, parameter: str, depth: int) -> Shape:
    """The shape of the argument that all callers in this file give for a parameter."""
    found = []
    for peer, call in scope.peers.sites.get(scope.function, []):
        given = argument(scope.function, call, parameter)
        if given is None or not isinstance(peer, Scope):
            return _UNKNOWN
        try:
            found.append(shape(peer, given, depth))
        except _OpenError:
            continue  # this caller passes on what it was given itself
    if scope.peers.sites.get(scope.function) and not found:
        raise _OpenError
    ranks = {one.rank for one in found}
    if len(ranks) != 1:
        return _UNKNOWN
    return Shape(frozenset.intersection(*(one.ones for one in found)), ranks.pop())


def _of_part(scope: Scope, node: ast.Call, depth: int) -> Shape:
    """The shape of one of the tensors that ``x.chunk(3, 1)`` and the like return."""
    call = scope.call(node)
    if call is None or call.name not in ("chunk", "split", "tensor_split", "unbind"):
        return _UNKNOWN
    rank = shape(scope, call.input, depth).rank
    return Shape(rank=rank - (call.name == "unbind") if rank is not None else None)


def _told_rank(scope: Scope, binding: Binding, depth: int) -> int | None:
    """The rank of a value, judged by its uses or by a comment or docstring about it."""
    if depth > _DEPTH:
        return None
    if binding not in scope.told:
        scope.told[binding] = None
        ranks = (_rank_by_use(scope, use, depth + 1) for use in binding.uses if not _asks_for_rank(scope, use))
        known = next((rank for rank in ranks if rank is not None), None)
        scope.told[binding] = written_rank(scope, binding) if known is None else known
    return scope.told[binding]


def _rank_by_use(scope: Scope, use: ast.Name, depth: int) -> int | None:
    parent = scope.parent(use)
    if isinstance(parent, ast.Attribute):
        whole = scope.parent(parent) if parent.attr != "shape" else parent
        sized = parent.attr == "shape" or (parent.attr == "size" and isinstance(whole, ast.Call) and not whole.args)
        unpacked = scope.parent(whole)
        if sized and isinstance(unpacked, ast.Assign) and unpacked.value is whole:
            (target, *_) = unpacked.targets
            known = isinstance(target, ast.Tuple) and not any(isinstance(part, ast.Starred) for part in target.elts)
            return len(target.elts) if known else None  # type: ignore[attr-defined]
        call = scope.call(whole) if isinstance(whole, ast.Call) and whole.func is parent else None
    elif isinstance(parent, ast.Subscript) and parent.value is use:
        return complete(parent.slice)
    else:
        call = scope.call(parent)
        if isinstance(parent, ast.Call) and parent.args[:1] == [use]:
            rank = next((RANKS[name] for name in scope.layers(parent.func) if name in RANKS), None)
            if rank is not None:
                return rank
            if scope.layers(parent.func) and all(name in SAME_RANK for name in scope.layers(parent.func)):
                return _rank_later(scope, parent, depth)
        if isinstance(parent, ast.Call) and use in parent.args:
            taken = _rank_taken(scope, parent, use, depth)
            if taken is not None:
                return taken
    if call is None or call.input is not use:
        return None
    if call.name == "permute":
        return len(call.dims) if call.dims is not None and len(call.dims) > 1 else None
    if not call.is_method and f"torch.nn.functional.{call.name}" in RANKS:
        return RANKS[f"torch.nn.functional.{call.name}"]
    if call.name in ("bmm", "baddbmm"):
        return 3
    return _rank_later(scope, call.node, depth) if call.name in SAME_SHAPE else None


def _rank_taken(scope: Scope, call: ast.Call, use: ast.Name, depth: int) -> int | None:
    """The rank told of the parameter that ``use`` is given for, in a function, method or layer of the file."""
    callee = scope.callee(call)
    taken = parameter(callee.function, call, use) if callee is not None else None
    return _told_rank(callee, callee.flow.parameters[taken.arg], depth) if callee and taken else None


def _rank_later(scope: Scope, node: ast.Call, depth: int) -> int | None:
    """The rank told of the name that is assigned the call ``node``, which keeps the rank."""
    binding = scope.binding_of(node)
    if binding is None:
        parent = scope.parent(node)
        statement = scope.parent(parent) if isinstance(parent, ast.Tuple) else None
        bound = scope.flow.bound_by(statement) if isinstance(statement, ast.Assign) else []
        binding = next((b for b in bound if b.value is node), None)
    return _told_rank(scope, binding, depth) if binding is not None else None


def _asks_for_rank(scope: Scope, use: ast.AST) -> bool:
    """Whether a branch around ``use`` tests the rank, so that other branches see other ranks."""
    for child, parent in scope.function.above(use):
        if isinstance(parent, (ast.If, ast.IfExp)) and child is not parent.test:
            asked = {n.attr for n in ast.walk(parent.test) if isinstance(n, ast.Attribute)}
            if asked & {"ndim", "dim", "shape", "ndimension"}:
                return True
    return False


def _of_attribute(scope: Scope, node: ast.Attribute, depth: int) -> Shape:
    owner = scope.function.owner
    name = scope.file.qualified(node) or ""
    if owner is not None and name.startswith("self."):
        made = owner.buffers.get(node.attr)
        if name.count(".") == 1 and made is not None:
            holder = scope.peers.holding(made, scope.file.parents)
            return shape(holder, made, depth) if isinstance(holder, Scope) else _UNKNOWN
        if node.attr == "weight" and {"torch.nn.Embedding", "torch.nn.Linear"} & {*scope.layers(node.value)}:
            return Shape(rank=2)
    if node.attr in ("T", "mT", "data"):
        return Shape(rank=shape(scope, node.value, depth).rank)
    return _UNKNOWN


def _of_creation(scope: Scope, node: ast.expr | None) -> Shape:
    """The shape of ``torch.zeros(1, 1, n)``, ``torch.arange(n)`` and other creations."""
    if not isinstance(node, ast.Call):
        return _UNKNOWN
    name = (scope.file.qualified(node.func) or "").rpartition(".")
    if name[0] == "torch" and name[2] in CREATORS | {"rand", "randn"}:
        return _sized(scope, node.args[:1] if name[2] == "full" else node.args)
    if name[0] == "torch" and name[2] in ("arange", "linspace", "eye"):
        return Shape(rank=2 if name[2] == "eye" else 1)
    return _UNKNOWN


def _sized(scope: Scope, sizes: Sequence[ast.expr]) -> Shape:
    """The shape given by sizes: ``1, n, 1``, ``(1, n, 1)``, ``x.shape[:2] + (3, 3)`` or ``*x.shape[:2], 3, 3``."""
    if len(sizes) == 1 and isinstance(sizes[0], ast.BinOp) and isinstance(sizes[0].op, ast.Add):
        sizes = [*(_front(scope, sizes[0].left)), *(_front(scope, sizes[0].right))]
    sizes = unpacked(scope, sizes)
    if len(sizes) >= 1 and isinstance(sizes[0], (ast.Tuple, ast.List)):
        sizes = sizes[0].elts
    elif len(sizes) == 1 and integer(sizes[0]) is None:
        return _UNKNOWN  # the argument may be one size or a tuple of sizes
    counted = next((i for i, size in enumerate(sizes) if isinstance(size, ast.Starred)), len(sizes))
    if not sizes or counted < len(sizes):
        return Shape(frozenset(i for i, size in enumerate(sizes[:counted]) if integer(size) == 1))
    return Shape(frozenset(i for i, size in enumerate(sizes) if integer(size) == 1), len(sizes))


def unpacked(scope: Scope, sizes: Iterable[ast.expr]) -> list[ast.expr]:
    """Sizes with those behind stars written out where they can be counted: ``1, *x.shape[-2:]``."""
    return [size for s in sizes for size in (_front(scope, s.value) if isinstance(s, ast.Starred) else [s])]


def _front(scope: Scope, sizes: ast.expr) -> list[ast.expr]:
    """Sizes that are written out, or one per axis of ``x.shape[:2]``; one starred expression if uncountable."""
    owner = scope.function.owner
    if owner is not None and isinstance(sizes, ast.Attribute) and (scope.file.qualified(sizes) or "")[:5] == "self.":
        sizes = owner.default(sizes.attr) or sizes
    if isinstance(sizes, (ast.Tuple, ast.List)):
        return sizes.elts
    taken = sizes.slice if isinstance(sizes, ast.Subscript) and scope.kind(sizes.value) is Kind.SHAPE else None
    if not isinstance(sizes, ast.Subscript) or not isinstance(taken, ast.Slice) or taken.step is not None:
        return [ast.Starred(sizes)]
    lower, upper = integer(taken.lower), integer(taken.upper)
    axes = range(0)
    if taken.lower is None and upper is not None:
        axes = range(upper)
    elif taken.upper is None and lower is not None:
        axes = range(lower, 0)
    return [ast.Subscript(sizes.value, ast.Constant(i)) for i in axes] or [ast.Starred(sizes)]


def _of_product(left: Shape, right: Shape) -> Shape:
    if left.rank is None or right.rank is None or min(left.rank, right.rank) < 2:
        return _UNKNOWN
    return Shape(rank=max(left.rank, right.rank))


def _broadcast(scope: Scope, operands: Iterable[ast.expr], depth: int) -> Shape:
    """The shape of an elementwise function of several operands."""
    known = [shape(scope, o, depth) for o in operands if not _is_scalar(scope, o)]
    if not known:
        return _UNKNOWN
    if len(known) == 1:
        return known[0]
    backs = [one.from_back() for one in known]
    ones = frozenset.intersection(*(back for back in backs if back is not None)) if None not in backs else frozenset()
    if any(one.rank is None for one in known):
        return Shape(ones)
    rank = max(one.rank or 0 for one in known)
    missing = [{*(back or ()), *range(-rank, -(one.rank or 0))} for one, back in zip(known, backs, strict=True)]
    return Shape.of(set.intersection(*missing), rank)


def _is_scalar(scope: Scope, node: ast.expr) -> bool:
    """Whether an operand is a Python number."""
    node = scope.value_of(node)
    if isinstance(node, ast.Constant) or scope.kind(node) is Kind.SIZE:
        return True
    if isinstance(node, ast.UnaryOp):
        return _is_scalar(scope, node.operand)
    if isinstance(node, ast.BinOp):
        return _is_scalar(scope, node.left) and _is_scalar(scope, node.right)
    if isinstance(node, ast.Call):
        name = scope.file.qualified(node.func) or ""
        return name.startswith("math.") or name in ("int", "float", "len")
    owner = scope.function.owner
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return own and owner is not None and owner.is_number(node.attr)  # type: ignore[attr-defined]


def _of_call(scope: Scope, node: ast.Call, depth: int) -> Shape:
    layers = scope.layers(node.func)
    if layers:
        ranks = {RANKS.get(name) for name in layers}
        if len(ranks) == 1 and None not in ranks:
            rank = ranks.pop()
            given = shape(scope, node.args[0], depth).ones if node.args else frozenset()
            return Shape(_ones_of_layer(scope, node, layers, Shape.of(given, rank).ones), rank)
        if node.args and all(name in SAME_RANK for name in layers):
            before = shape(scope, node.args[0], depth)
            if layers != ["torch.nn.Linear"]:
                return before
            last = {-1, before.rank - 1 if before.rank is not None else -1}
            return Shape.of((before.ones - last) | ({-1} if _gives_one(scope, node) else set()), before.rank)
        return _of_returned(scope, node, depth)
    if scope.target(node) is not None:
        return _of_returned(scope, node, depth)
    call = scope.call(node)
    made = _of_creation(scope, node)
    if call is None or made is not _UNKNOWN:
        return made
    if not call.is_method and f"torch.nn.functional.{call.name}" in RANKS:
        rank = RANKS[f"torch.nn.functional.{call.name}"]
        ones = {*Shape.of(shape(scope, call.input, depth).ones, rank).ones} & ({0} if "conv" in call.name else {0, 1})
        ones |= {2, 3} if call.name.startswith("adaptive") and _is_of_ones(call.get(0, "output_size")) else set()
        weight = call.get(0, "weight") if call.name == "conv2d" else None
        ones |= {1} if weight is not None and 0 in shape(scope, weight, depth).ones else set()
        return Shape(frozenset(ones), rank)
    if call.name == "unsqueeze":
        return _unsqueezed(shape(scope, call.input, depth), integer(call.get(0, "dim")))
    if call.is_method and call.name in ("view", "reshape", "new_zeros", "new_ones", "new_empty"):
        return _sized(scope, call.arguments)
    if call.is_method and call.name in ("expand", "repeat"):
        return Shape(rank=_sized(scope, call.arguments).rank)
    if call.name == "reshape":
        return _sized(scope, call.arguments)
    if call.name in SAME_SHAPE | LIKE_CREATORS:
        return shape(scope, call.input, depth)
    if call.name in ARITHMETIC:
        return _broadcast(scope, (call.input, *call.arguments), depth)
    return _of_other(scope, call, depth)


def _gives_one(scope: Scope, node: ast.Call) -> bool:
    """Whether the ``nn.Linear`` of ``self``, or the last one of an ``nn.Sequential``, has one output."""
    owner = scope.function.owner
    name = (scope.file.qualified(node.func) or "").removeprefix("self.")
    made: ast.expr | None = owner.attributes.get(name) if owner is not None else None
    while isinstance(made, ast.Call):
        last = (scope.file.qualified(made.func) or "").rpartition(".")[2]
        if last == "Linear":
            outputs = made.args[1] if len(made.args) > 1 else None
            return integer(next((k.value for k in made.keywords if k.arg == "out_features"), outputs)) == 1
        made = made.args[-1] if last == "Sequential" and made.args else None
    return False


def _ones_of_layer(scope: Scope, node: ast.Call, layers: list[str], ones: frozenset[int]) -> frozenset[int]:
    """The axes of size 1, from the front, of a ``self`` layer's output, if its input has those of ``ones``."""
    owner = scope.function.owner
    name = (scope.file.qualified(node.func) or "").removeprefix("self.")
    made = owner.attributes.get(name) if owner is not None else None
    if isinstance(made, ast.Call):
        return _ones_left(scope, made, ones)
    return ones & {2, 3, 4} if not any(map(_enlarges, layers)) else frozenset()


def _ones_left(scope: Scope, made: ast.expr, ones: frozenset[int], depth: int = 0) -> frozenset[int]:
    """The same for a layer, or an ``nn.Sequential`` of layers, as ``__init__`` makes it."""
    name = (scope.file.qualified(made.func) or "") if isinstance(made, ast.Call) and depth < _DEPTH else ""
    if not isinstance(made, ast.Call) or not name.startswith("torch.nn.") or _enlarges(name):
        return frozenset()
    last = name.rpartition(".")[2]
    if last == "Sequential":
        for part in made.args:
            ones = _ones_left(scope, part, ones, depth + 1)
        return ones
    if last in ("AdaptiveAvgPool2d", "AdaptiveMaxPool2d"):
        pooled = len(made.args) == 1 and _is_of_ones(made.args[0])
        return (ones & {1}) | ({2, 3} if pooled else set())
    if last.startswith("Conv"):
        channels = made.args[1] if len(made.args) > 1 else None
        channels = next((k.value for k in made.keywords if k.arg == "out_channels"), channels)
        return (ones & {2, 3, 4}) | ({1} if integer(channels) == 1 else set())  # a convolution keeps 1 pixel 1 pixel
    return frozenset() if name == "torch.nn.Linear" else ones & {1, 2, 3, 4}


def _is_of_ones(size: ast.expr | None) -> bool:
    """Whether a size is 1 along every axis: ``1``, ``(1, 1)``."""
    sizes = size.elts if isinstance(size, (ast.Tuple, ast.List)) else [size]
    return all(integer(one) == 1 for one in sizes)


def _enlarges(name: str) -> bool:
    """Whether a layer may turn one pixel into several."""
    return name.rpartition(".")[2].startswith(("ConvTranspose", "PixelShuffle", "Upsample"))


def _of_other(scope: Scope, call: Call, depth: int) -> Shape:
    """The shape of functions that move, reduce or join axes."""
    if call.name in ("matmul", "mm"):
        others = [shape(scope, a, depth) for a in call.arguments[:1]]
        return _of_product(shape(scope, call.input, depth), others[0]) if others else _UNKNOWN
    if call.name == "bmm":
        return Shape(rank=3)
    if call.name == "einsum":
        equation = call.input.value if isinstance(call.input, ast.Constant) else None
        if not isinstance(equation, str) or "->" not in equation or "." in equation:
            return _UNKNOWN
        return Shape(rank=len(equation.partition("->")[2].replace(" ", "")))
    if call.name in ("cat", "concat", "concatenate", "stack"):
        return _of_joined(scope, call, depth)
    before = shape(scope, call.input, depth)
    if call.name in ("permute", "transpose", "movedim", "swapaxes"):
        told = (
            len(call.dims) if call.name == "permute" and call.dims is not None and len(call.dims) > 1 else before.rank
        )
        order, ones = permutation(call, told), Shape.of(before.ones, told).ones
        return Shape(frozenset(i for i, axis in enumerate(order or ()) if axis in ones), told)
    rank = before.rank
    if call.name in KEEPING_RANK:
        whole = {0, 1} if call.name in ("interpolate", "grid_sample") else set()
        return Shape(frozenset(Shape.of(before.ones, rank).ones & whole), rank)
    if call.name == "flatten":
        return _flattened(before, integer(call.get(0, "start_dim")) or 0, call.get(1, "end_dim"))
    if call.name == "squeeze":
        axis = integer(call.get(0, "dim"))
        return Shape(rank=rank - 1) if rank is not None and axis is not None else _UNKNOWN
    if call.name.removeprefix("linalg.") in REDUCTIONS | {"max", "min"}:
        return _reduced(before, call)
    return _UNKNOWN


def _of_joined(scope: Scope, call: Call, depth: int) -> Shape:
    """The shape of ``cat`` and ``stack`` of a written list, or of a list filled by ``append``."""
    items = call.input.elts if isinstance(call.input, (ast.List, ast.Tuple)) else _appended(scope, call.input)
    known = [shape(scope, item, depth) for item in items[:4]]
    ranks = {one.rank for one in known} - {None}
    rank = ranks.pop() if len(ranks) == 1 else None
    if call.name == "stack":
        return Shape(rank=rank + 1 if rank is not None else None)
    dim = integer(call.get(0, "dim") or ast.Constant(0))
    if dim is None or rank is None or len(known) < len(items) or any(one.rank is None for one in known):
        return Shape(rank=rank)
    return Shape.of(frozenset.intersection(*(one.ones for one in known)) - {dim % rank}, rank)


def _appended(scope: Scope, node: ast.expr) -> list[ast.expr]:
    """The expressions appended to a list that begins empty; none if it is changed in another way."""
    made = scope.value_of(node)
    binding = scope.definition(node)
    if binding is None or not isinstance(made, ast.List) or made.elts:
        return []
    found = []
    for use in binding.uses:
        filling = scope.parent(use)
        if use is node or not isinstance(filling, ast.Attribute):
            continue
        call = scope.parent(filling)
        if filling.attr != "append" or not isinstance(call, ast.Call) or len(call.args) != 1:
            return []
        found.append(call.args[0])
    return found


def _of_returned(scope: Scope, node: ast.Call, depth: int) -> Shape:
    """The shape that a function, method or layer of the file returns."""
    callee = scope.callee(node)
    returned = [r.value for r in callee.function.all(ast.Return)] if callee is not None else []
    if callee is None or not returned or any(value is None for value in returned):
        return _UNKNOWN
    known = [shape(callee, value, depth) for value in returned if value is not None]
    ranks = {one.rank for one in known}
    rank = ranks.pop() if len(ranks) == 1 else None
    return Shape.of(frozenset.intersection(*(one.ones for one in known)), rank)


def _flattened(before: Shape, first: int, end: ast.expr | None) -> Shape:
    last, rank = -1 if end is None else integer(end), before.rank
    if last is None:
        return _UNKNOWN
    if rank is None:  # of the first axes, behind which there are others
        return Shape(frozenset(axis for axis in before.ones if axis < 0)) if first == 0 < last else _UNKNOWN
    first, last = first % rank, last % rank
    joined = {first} if {*range(first, last + 1)} <= before.ones else set()
    kept = {a if a < first else a - (last - first) for a in before.ones if a < first or a > last}
    return Shape.of(joined | kept, rank - (last - first))


def _unsqueezed(before: Shape, axis: int | None) -> Shape:
    if axis is None:
        return _UNKNOWN
    if before.rank is not None:
        rank = before.rank + 1
        at = axis % rank if -rank <= axis < rank else 0
        return Shape.of({a + (a >= at) for a in Shape.of(before.ones, before.rank).ones} | {at}, rank)
    # Without the rank, only axes counted from the same end as the new one are known behind it.
    if axis >= 0:
        return Shape(frozenset({axis, *(a + (a >= axis) for a in before.ones if a >= 0)}))
    return Shape(frozenset({axis, *(a - (a <= axis) for a in before.ones if a < 0)}))


def _reduced(before: Shape, call: Call) -> Shape:
    node = call.get(0, "dim", "axis")
    if node is None and not call.keywords:
        return Shape(rank=0)
    items = node.elts if isinstance(node, (ast.Tuple, ast.List)) else [node]
    dims = [integer(item) for item in items]
    if before.rank is None:
        keeps = isinstance(keep := call.get(1, "keepdim"), ast.Constant) and keep.value is True
        known = {d for d in dims if d is not None}
        return Shape(frozenset(known) | before.ones) if keeps and None not in dims else _UNKNOWN
    if None in dims:
        return _UNKNOWN
    keep = call.get(1, "keepdim")
    axes = {d % before.rank for d in dims if d is not None}
    ones = Shape.of(before.ones, before.rank).ones
    if isinstance(keep, ast.Constant) and keep.value is True:
        return Shape.of(ones | axes, before.rank)
    if keep is not None:
        return _UNKNOWN
    left = [axis for axis in range(before.rank) if axis not in axes]
    return Shape.of({i for i, axis in enumerate(left) if axis in ones}, len(left))
