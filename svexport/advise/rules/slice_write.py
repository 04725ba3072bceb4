"""SVX105: tensors built by writes into slices."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from itertools import pairwise, product

from svexport.advise.calls import integer
from svexport.advise.flow import Binding
from svexport.advise.functions import Reach
from svexport.advise.indices import is_one_wide, is_whole
from svexport.advise.kinds import Kind
from svexport.advise.rule import Found, Rule, Scope
from svexport.advise.shapes import shape
from svexport.advise.torch_names import ACTIVATIONS, ARITHMETIC, CREATORS, LIKE_CREATORS, NEW_CREATORS

__all__ = ["RULE"]

# Methods that reshape, cast or move a tensor just made; what they return is no view of a named tensor.
_SHAPED = ("to", "type_as", "cuda", "float", "contiguous", "view", "reshape", "permute", "transpose", "unflatten")
_OF_SIZES = {f"torch.{name}" for name in CREATORS - {"full"}}
# Functions whose results share no memory with their arguments.
_COMPUTED = (
    ACTIVATIONS | ARITHMETIC | {"cat", "concat", "stack", "repeat", "softmax", "matmul", "bmm", "einsum", "linear"}
)


def find(scope: Scope) -> Iterator[Found]:
    for binding, places in _writes(scope).items():
        name = places[0].value.id  # type: ignore[attr-defined]
        made = _made(scope, binding.value)
        if made is None or any(scope.function.guarded(place) for place in places):
            continue
        if _is_read_between(scope, binding, places, made == "new"):
            continue
        if not any(len(_items(place.slice)) > 1 or _is_given_tensor(scope, place) for place in places):
            continue
        if made == "new" and all(_is_region(scope, place) for place in places):
            better = "compute it by comparisons with `torch.arange`, or make it once"
            yield Found(scope.function.statement(places[0]), f"`{name}` is written into region by region: {better}")
            continue
        if all(_is_given_size(scope, place) for place in places):
            continue  # the writes are numbers, which nothing stacks
        in_forward = scope.function.reach is Reach.FORWARD
        if made == "result" and not (in_forward and len({ast.unparse(place.slice) for place in places}) > 1):
            continue
        in_loop = made == "new" and _are_rows_of_loop(scope, places)
        in_loop |= made != "result" and all(_is_gathered(scope, place) for place in places)
        if made == "copy" and not in_loop and len(_numbers(places[0])) > 1:
            continue  # a few elements of a matrix, whose other elements stay
        ranges = _are_ranges(scope, binding, places) and (in_forward or (made == "new" and _is_whole_axis(places)))
        padded = made == "new" and in_forward and _is_pad(scope, places)
        elements = made == "new" and _are_elements(scope, places)
        if in_loop or _are_parts(scope, places) or elements or ranges or padded:
            better = "put its parts together, by `torch.stack`, `torch.cat` or `F.pad`"
            yield Found(scope.function.statement(places[0]), f"`{name}` is written into slice by slice: {better}")


def _writes(scope: Scope) -> dict[Binding, list[ast.Subscript]]:
    """The places that write into a part of a name's value, by the binding of the name."""
    writes: dict[Binding, list[ast.Subscript]] = {}
    for node in scope.function.all(ast.Subscript):
        written = isinstance(node.ctx, ast.Store) and isinstance(_assignment(scope, node), (ast.Assign, ast.AugAssign))
        binding = scope.definition(node.value) if written else None
        if binding is not None and not binding.item:
            writes.setdefault(binding, []).append(node)
    return writes


def _assignment(scope: Scope, place: ast.Subscript) -> ast.AST:
    """The assignment that writes into a slice, possibly into several: ``y[0], y[1] = a, b``."""
    parent = scope.parent(place)
    return scope.parent(parent) if isinstance(parent, ast.Tuple) else parent


def _given(scope: Scope, place: ast.Subscript) -> ast.expr | None:
    """The value written there; None if the assignment unpacks one value into several places."""
    assignment, parent = _assignment(scope, place), scope.parent(place)
    if not isinstance(assignment, ast.Assign):
        return None
    if not isinstance(parent, ast.Tuple):
        return assignment.value
    values = assignment.value.elts if isinstance(assignment.value, ast.Tuple) else []
    return values[parent.elts.index(place)] if len(values) == len(parent.elts) else None


def _is_read_between(scope: Scope, binding: Binding, places: list[ast.Subscript], new: bool) -> bool:
    """Whether a part is read between the writes, except by the write of that part: ``y[:, 0] = y[:, 0] * 2``.

    Of a ``new`` tensor, what an earlier write in the same round gave may be read: a name for it serves as well.
    """
    indices = {scope.function.statement(place): ast.unparse(place.slice) for place in places}
    made = {parent for _, parent in scope.function.above(binding.statement)} if binding.statement is not None else set()
    above = {parent for place in places for _, parent in scope.function.above(place)}
    again = any(isinstance(loop, (ast.For, ast.While)) for loop in above - made)
    last = max(statement.end_lineno or statement.lineno for statement in indices)
    for use in binding.uses:
        node = scope.parent(use)
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Load)
            and (again or node.lineno <= last)
            and indices.get(scope.function.statement(node)) != ast.unparse(node.slice)
            and (again or not new or not any(_holds(place, node) for place in places if place.lineno < node.lineno))
        ):
            return True
    return False


def _holds(place: ast.Subscript, read: ast.Subscript) -> bool:
    """Whether what is read was written there: ``y[:, 2:5] = z`` holds ``y[:, 3:4]``."""
    written, items = _items(place.slice), _items(read.slice)
    return len(written) == len(items) and all(map(_holds_item, written, items))


def _holds_item(written: ast.expr, read: ast.expr) -> bool:
    if ast.dump(written) == ast.dump(read):
        return True
    first, last = _bounds(written), _bounds(read)
    return first is not None and last is not None and first[0] <= last[0] and last[1] <= first[1]


def _bounds(item: ast.expr) -> tuple[int, int] | None:
    """The first index and the one behind the last of ``2:5`` or ``2``, counted from the front; None for others."""
    number = integer(item)
    if number is not None:
        return (number, number + 1) if number >= 0 else None
    if not isinstance(item, ast.Slice) or item.step is not None:
        return None
    lower, upper = 0 if item.lower is None else integer(item.lower), integer(item.upper)
    return (lower, upper) if lower is not None and upper is not None and 0 <= lower <= upper else None


def _is_pad(scope: Scope, places: list[ast.Subscript]) -> bool:
    """Whether the only write is that of a tensor into a range of every axis: ``y[:, 1:-1, 1:-1] = x``."""
    items = [item for place in places for item in _items(place.slice) if not _is_all(item)]
    plain = all(isinstance(item, ast.Slice) and item.step is None for item in items)
    return len(places) == 1 and bool(items) and plain and _is_given_tensor(scope, places[0])


def _is_given_tensor(scope: Scope, place: ast.Subscript) -> bool:
    """Whether the value written is a tensor, which could be stacked, and not a number."""
    given = _given(scope, place)
    return given is not None and scope.is_tensor(given)


def _is_given_size(scope: Scope, place: ast.Subscript) -> bool:
    given = _given(scope, place)
    return given is not None and scope.kind(given) is Kind.SIZE


def _items(index: ast.expr) -> list[ast.expr]:
    return index.elts if isinstance(index, ast.Tuple) else [index]


def _are_rows_of_loop(scope: Scope, places: list[ast.Subscript]) -> bool:
    """Whether loops write every row: ``y[:, i] = ...`` for each i of a range, or ``y[i, j, :n] = ...`` for two ranges.

    Along other axes a write may cover only a part, and differ in the branches of a test: ``y[:, :c, d, :, d:] = ...``.
    """
    around = scope.function.loops(places[0])
    names = {name for item in _items(places[0].slice) for name in _counting(scope, item, around)}
    loops = [loop for loop in around if _counter(loop) & names]
    if not loops or any(loops[-1] not in scope.function.loops(place) for place in places):
        return False
    nodes = [node for statement in loops[-1].body for node in ast.walk(statement)]
    if any(isinstance(node, (ast.Continue, ast.Break)) for node in nodes):
        return False  # only some rows are written
    counters = {name for loop in loops for name in _counter(loop)}
    inside = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    rows = set()
    for place in places:
        items = [(i, item) for i, item in enumerate(_items(place.slice)) if not _is_all(item)]
        found = [(i, item, _counting(scope, item, loops)) for i, item in items]
        counted = [(i, name) for i, _, of in found for name in of if name in counters]
        parts = [item for _, item, of in found if not of]
        begins = all(isinstance(part, ast.Slice) and part.lower is None and part.step is None for part in parts)
        of_two = begins and len(places) == 1 and len(loops) > 1
        if not of_two and not all(_is_padded(part, inside) or integer(part) is not None for part in parts):
            return False
        if not of_two and (parts or len(places) > 1) and not _is_given_tensor(scope, place):
            return False
        rows.add(tuple(counted))
    written = {scope.function.statement(place) for place in places}
    return len(rows) == 1 and len(rows.pop()) == len(loops) and _is_always_written(loops[-1].body, written)


def _counter(loop: ast.For) -> set[str]:
    """The counter of ``for i in range(n)`` or ``for i, row in enumerate(rows)``; empty for other loops."""
    call, target = loop.iter, loop.target
    name = getattr(call.func, "id", "") if isinstance(call, ast.Call) else ""
    if name == "enumerate" and isinstance(target, ast.Tuple):
        target = target.elts[0]
    return {target.id} if name in ("range", "enumerate") and isinstance(target, ast.Name) else set()


def _counting(scope: Scope, item: ast.expr, loops: list[ast.For]) -> list[str]:
    """The counters whose rounds an index enumerates: ``i``, ``i * n + j`` with n rounds of j, or a running counter."""
    if isinstance(item, ast.Name):
        counters = [name for loop in loops for name in _counter(loop)]
        return [item.id] if item.id in counters else counters if _runs(scope, item, loops) else []
    if not isinstance(item, ast.BinOp) or not isinstance(item.op, ast.Add) or not isinstance(item.left, ast.BinOp):
        return []
    outer, size, inner = item.left.left, item.left.right, item.right
    if not isinstance(item.left.op, ast.Mult) or not isinstance(outer, ast.Name) or not isinstance(inner, ast.Name):
        return []
    for loop in loops:
        if _counter(loop) == {inner.id} and isinstance(loop.iter, ast.Call) and len(loop.iter.args) == 1:
            return [outer.id, inner.id] if ast.dump(loop.iter.args[0]) == ast.dump(size) else []
    return []


def _runs(scope: Scope, item: ast.Name, loops: list[ast.For]) -> bool:
    """Whether a name begins at 0 before the loops and each round of the innermost loop adds 1 to it."""
    steps = [b.statement for b in scope.bindings.get(item.id, [])]
    if len(steps) != 2 or not loops or not all(_counter(loop) for loop in loops):
        return False
    first, step = steps if isinstance(steps[1], ast.AugAssign) else steps[::-1]
    begins = isinstance(first, ast.Assign) and integer(first.value) == 0 and first.lineno < loops[-1].lineno
    adds = isinstance(step, ast.AugAssign) and isinstance(step.op, ast.Add) and integer(step.value) == 1
    return begins and adds and step in loops[0].body


def _is_padded(item: ast.expr, inside: set[str]) -> bool:
    """Whether it is a slice whose bounds no round computes; otherwise the rows would differ in size."""
    if not isinstance(item, ast.Slice) or item.step is not None:
        return False
    nodes = list(ast.walk(item))
    computed = any(isinstance(n, ast.Name) and n.id in inside for n in nodes)
    return not computed and not any(isinstance(n, (ast.Call, ast.Subscript, ast.IfExp)) for n in nodes)


def _is_always_written(body: list[ast.stmt], written: set[ast.stmt]) -> bool:
    """Whether every path through a block makes one of the writes."""
    found = False
    for statement in body:
        inside = {node for node in ast.walk(statement) if node in written}
        if isinstance(statement, ast.If) and inside:
            if not all(_is_always_written(way, written) for way in (statement.body, statement.orelse)):
                return False
        elif isinstance(statement, (ast.For, ast.With)) and inside:
            if not _is_always_written(statement.body, written):
                return False
        elif inside and statement not in written:
            return False
        found |= bool(inside)
    return found


def _is_gathered(scope: Scope, place: ast.Subscript) -> bool:
    """Whether it is ``y[:, a] = x[:, b] - x[:, c]`` for a, b, c of a list, which indexing by lists replaces."""
    loop, assignment = next(iter(scope.function.loops(place)), None), scope.parent(place)
    if loop is None or assignment not in loop.body or not isinstance(assignment, ast.Assign):
        return False
    if any(isinstance(node, (ast.Continue, ast.Break)) for node in ast.walk(loop)) or scope.kind(loop.iter) is not None:
        return False
    rows = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}

    def by_row(node: ast.expr) -> bool:
        items = [item for item in _items(node.slice) if not _is_all(item)] if isinstance(node, ast.Subscript) else []
        return bool(items) and all(isinstance(item, ast.Name) and item.id in rows for item in items)

    def moves(node: ast.expr) -> bool:
        if isinstance(node, ast.BinOp):
            return moves(node.left) and moves(node.right)
        return by_row(node) and scope.is_tensor(node.value)  # type: ignore[attr-defined]

    return by_row(place) and moves(assignment.value)


def _is_region(scope: Scope, place: ast.Subscript) -> bool:
    """Whether it is ``y[:, rows, columns] = ...`` in loops over literal slices, as for masks of shifted windows."""
    items = [item for item in _items(place.slice) if not _is_all(item)]
    return bool(items) and all(_is_of_slices(scope, item) for item in items)


def _is_of_slices(scope: Scope, item: ast.expr) -> bool:
    binding = scope.definition(item)
    if binding is None or not binding.item or binding.index is not None or not isinstance(binding.value, ast.expr):
        return False
    made = scope.value_of(binding.value)
    parts = made.elts if isinstance(made, (ast.Tuple, ast.List)) else []
    return bool(parts) and all(isinstance(p, ast.Call) and scope.file.qualified(p.func) == "slice" for p in parts)


def _are_parts(scope: Scope, places: list[ast.Subscript]) -> bool:
    """Whether it is ``y[..., 0] = ...; y[..., 1] = ...``, or all phases ``y[0::2] = ...; y[1::2] = ...``."""
    keys = set()
    for place in places:
        items = _items(place.slice)
        numbers = _numbers(place)
        steps = {i: _phase(item) for i, item in enumerate(items) if _phase(item) is not None}
        if len(numbers) + len(steps) == 0 or (numbers and steps):
            return False
        if any(not _is_all(item) for i, item in enumerate(items) if i not in numbers and i not in steps):
            return False
        keys.add((tuple(numbers or steps), len(items), tuple(numbers.values()), tuple(steps.values())))
    if len(keys) < 2 or len(keys) != len(places) or len({key[:2] for key in keys}) != 1:
        return False
    phases = {tuple(s for s in key[3] if s is not None) for key in keys if key[3]}
    if not phases:
        return len({scope.parent(_assignment(scope, place)) for place in places}) == 1  # not in different branches
    counts = [step for _, step in next(iter(phases))]
    return math.prod(counts) == len(phases) and phases == {*product(*([(i, n) for i in range(n)] for n in counts))}


def _are_elements(scope: Scope, places: list[ast.Subscript]) -> bool:
    """Whether it is ``y[:, 0, 0] = ...; y[:, 1, 0] = ...; y[:, :, 1] = ...``: by numbers, all along one axis."""
    numbers = [_numbers(place) for place in places]
    whole = all(
        _is_all(item) or i in n for p, n in zip(places, numbers, strict=True) for i, item in enumerate(_items(p.slice))
    )
    axes = set.intersection(*(set(n) for n in numbers))
    count = len({tuple(sorted(n.items())) for n in numbers})
    same = len({len(_items(place.slice)) for place in places}) == 1
    block = len({scope.parent(_assignment(scope, place)) for place in places}) == 1  # not in different branches
    return whole and same and block and bool(axes) and count == len(places) > 1


def _numbers(place: ast.Subscript) -> dict[int, int]:
    """The integers among the indices by axis; ``2:3`` counts as 2."""
    found = {}
    for i, item in enumerate(_items(place.slice)):
        number = integer(item)
        if isinstance(item, ast.Slice) and is_one_wide(item):
            number = 0 if item.lower is None else integer(item.lower)
        if number is not None:
            found[i] = number
    return found


def _are_ranges(scope: Scope, binding: Binding, places: list[ast.Subscript]) -> bool:
    """Whether it is ``y[:, :k] = ...; y[:, k:] = ...``: ranges of one axis, with single integers among them.

    Along another axis a write may be shifted, which is a pad: ``y[:-1, :k] = x[1:, :k]``. The one index of an axis of
    size 1 counts as all of it.
    """
    if len({len(_items(place.slice)) for place in places}) != 1:
        return False
    ones = shape(scope, binding.value).ones if binding.value is not None else frozenset()
    parts = [
        {i: item for i, item in enumerate(_items(p.slice)) if not (_is_all(item) or (i in ones and integer(item) == 0))}
        for p in places
    ]
    axes = set.intersection(*(set(part) for part in parts))
    if len(axes) != 1:
        return False
    (axis,) = axes
    if not all(_is_shift(item) for part in parts for i, item in part.items() if i != axis):
        return False
    ranges = [isinstance(part[axis], ast.Slice) and part[axis].step is None for part in parts]  # type: ignore[attr-defined]
    return any(ranges) and all(r or integer(p[axis]) is not None for r, p in zip(ranges, parts, strict=True))


def _is_whole_axis(places: list[ast.Subscript]) -> bool:
    """Whether ranges of one axis cover it: ``y[:, :k]`` and ``y[:, k:]``."""
    parts = [[item for item in _items(place.slice) if not _is_all(item)] for place in places]
    if not all(len(part) == 1 and isinstance(part[0], ast.Slice) for part in parts):
        return False
    ends = [(part[0].lower, part[0].upper) for part in parts]  # type: ignore[attr-defined]
    joined = [a[1] and b[0] and ast.dump(a[1]) == ast.dump(b[0]) for a, b in pairwise(ends)]
    return len(ends) > 1 and ends[0][0] is None and ends[-1][1] is None and all(joined)


def _is_shift(item: ast.expr) -> bool:
    """Whether it is a slice such as ``1:`` or ``:-1``."""
    if not isinstance(item, ast.Slice) or item.step is not None or (item.lower is None) == (item.upper is None):
        return False
    lower, upper = integer(item.lower), integer(item.upper)
    return (lower or 0) > 0 or (upper or 0) < 0


def _phase(item: ast.expr) -> tuple[int, int] | None:
    """(start, step) of a slice ``start::step``; None for anything else."""
    if not isinstance(item, ast.Slice) or item.step is None or item.upper is not None:
        return None
    step, start = integer(item.step), 0 if item.lower is None else integer(item.lower)
    return (start, step) if step is not None and start is not None else None


def _is_all(item: ast.expr) -> bool:
    return is_whole(item) or (isinstance(item, ast.Constant) and item.value is Ellipsis)


def _made(scope: Scope, value: ast.expr | None) -> str | None:
    """Whether a tensor is ``"new"`` without values yet, a ``"copy"``, or the ``"result"`` of a computation.

    None if it may be a view of another tensor, into which the writes are meant to go.
    """
    value = _unshaped(scope, value)
    if isinstance(value, ast.BinOp):
        return "result" if scope.is_tensor(value) else None
    call = scope.call(value) if value is not None else None
    if call is not None and call.name in (NEW_CREATORS if call.is_method else (CREATORS | LIKE_CREATORS) - {"full"}):
        return "new"
    if isinstance(value, ast.Call) and scope.file.qualified(value.func) in _OF_SIZES:
        return "new"  # with unpacked sizes: ``torch.empty(*x.shape, 2)``
    if call is not None and call.name == "clone":
        return "copy"
    if call is not None and call.name in _COMPUTED and scope.is_tensor(call.node):
        return "result"
    if not isinstance(value, ast.Call) or not scope.is_tensor(value):
        binding = scope.binding_of(value) if value is not None else None
        if binding is None or not isinstance(value, ast.Call) or scope.kind_of_any([binding]) is not Kind.TENSOR:
            return None
    if scope.layers(value.func):
        return "result"
    owner = scope.function.owner
    name = scope.file.qualified(value.func.value if isinstance(value.func, ast.Subscript) else value.func) or ""
    own = name.startswith("self.") and owner is not None and owner.method(name.removeprefix("self.")) is None
    return "result" if own and name.count(".") == 1 else None


def _unshaped(scope: Scope, value: ast.expr | None) -> ast.expr | None:
    """The value before reshapes, casts and moves, looking through names that are used only once."""
    while value is not None:
        call, binding = scope.call(value), scope.definition(value)
        if call is not None and call.is_method and call.name in _SHAPED:
            value = call.input
        elif binding is not None and len(binding.uses) == 1 and scope.value_of(value) is not value:
            value = binding.value
        else:
            break
    return value


RULE = Rule(
    code="SVX105",
    name="a tensor written into slice by slice",
    why=(
        "In the file each write is a ScatterND over the whole tensor, with its indices, after a fill with values that "
        "nobody reads. At run time each is a kernel of its own."
    ),
    before="y = torch.zeros_like(x)\ny[..., 0] = x[..., 0] * w\ny[..., 1] = x[..., 1] * h",
    after="y = torch.stack((x[..., 0] * w, x[..., 1] * h), -1)",
    find=find,
    note="what is stacked, and along which axis, follows from all writes together",
)
