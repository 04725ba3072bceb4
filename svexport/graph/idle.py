"""Removes nodes that change nothing, or nothing that the nodes after them read; values stay the same bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto

from svexport.graph.scope import Scope, byte_size, is_standard, readers_of, scopes, used_inside, used_names
from svexport.graph.walk import STANDARD, attributes_of, refill

__all__ = ["remove_idle"]

_VIEWS = {"Reshape", "Flatten", "Squeeze", "Unsqueeze"}
"""Ops that move no element; a Reshape after them depends on nothing but the order of the elements."""

_NEUTRAL: Mapping[str, tuple[float, bool]] = {
    "Mul": (1, True),
    "Div": (1, False),
    "Add": (-0.0, True),
    "Sub": (0.0, False),
}
"""The neutral number of each op, and whether it may be the first operand."""

_UNSIGNED_ZERO = {"Exp", "Sigmoid", "Softmax"}
"""Ops that give the same result for 0 and -0: in front of them 0 is neutral in an Add, too."""

_LARGEST = 2**20
"""Upper bound in bytes on the constants that are examined."""

_SLICE_INPUTS = 10
"""The first opset in which starts, ends, axes and steps of a Slice are inputs."""

_DYNAMIC = 2**61 - 1
"""A prime that stands for a dynamic size: no other size divides it, so what holds for it holds for any size."""


def remove_idle(model: onnx.ModelProto) -> None:
    """Removes nodes that change nothing from all graphs of a model, in place.

    - Nodes whose output is their input: a Reshape or Expand to the same shape, a Slice of everything, a Pad by
      nothing, a product with ones, a Cast to the same type.
    - Views and Transposes in a row that together move no element; one Reshape replaces them.
    - A Slice that only Slices of other axes read; each of those then slices all axes at once.

    Values stay the same to the last bit, including NaN and -0, and so do inputs, outputs and their names.
    """
    for scope in scopes(model):
        while _skip_moves(scope) | _join_slices(scope) | _skip_idle(scope):
            pass


# ---------------------------------------------------------------- views


def _skip_moves(scope: Scope) -> bool:
    """Replaces views and Transposes in a row that keep the elements' order by one Reshape; returns whether it did."""
    used, readers, changed = used_names(scope.graph), readers_of(scope.graph), False
    moves = {n.output[0]: n for n in scope.graph.node if n.domain in STANDARD and n.op_type in _VIEWS | {"Transpose"}}
    for node in moves.values():
        first = moves.get(node.input[0])
        sizes = None if first is None else _sizes(node, scope)
        if first is None or sizes is None:
            continue
        chain = list(_chain(node, moves))
        source = None
        if all(move.op_type in _VIEWS for move in chain[:2]):
            if node.op_type == "Reshape" or readers[first.output[0]] == 1:
                source = first.input[0]
        elif (length := _ordered(chain, scope)) is not None:
            source = chain[length - 1].input[0]
        if source is not None:
            node.op_type = "Reshape"
            node.input[:] = [source, scope.constant(np.array(sizes, np.int64), f"{node.output[0]}_shape")]
            del node.attribute[:]
            changed = True
    if changed:
        scope.drop_unused(used)
    return changed


def _chain(node: onnx.NodeProto, moves: Mapping[str, onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """A node and the views and Transposes that lead to it, last first."""
    step: onnx.NodeProto | None = node
    while step is not None:
        yield step
        step = moves.get(step.input[0])


def _sizes(node: onnx.NodeProto, scope: Scope) -> list[int] | None:
    """The sizes for a Reshape to the output of a node, with at most one -1 and no 0; None if there are none."""
    sizes: list[int | None]
    given = scope.array(node.input[1]) if node.op_type == "Reshape" else None
    if given is not None:
        sizes = given.tolist()
        if 0 in sizes and not attributes_of(node).get("allowzero"):
            before = scope.shape(node.input[0]) or ()
            sizes = [(before[i] if i < len(before) else None) if s == 0 else s for i, s in enumerate(sizes)]
    elif node.op_type != "Reshape" and (shape := scope.shape(node.output[0])) is not None:
        sizes = [-1 if size is None else size for size in shape]
    else:
        return None
    known = [size for size in sizes if size is not None]
    return known if len(known) == len(sizes) and 0 not in known and known.count(-1) < 2 else None


def _ordered(chain: Sequence[onnx.NodeProto], scope: Scope) -> int | None:
    """The largest number of nodes at the end of a chain (last first) that together keep the elements' order; None if
    there are none, or only Transposes, which :mod:`svexport.graph.transposes` removes."""
    shapes = [scope.shape(node.output[0]) for node in chain] + [scope.shape(chain[-1].input[0])]
    numbers = [None if s is None or s.count(None) > 1 else [_DYNAMIC if n is None else n for n in s] for s in shapes]
    for length in range(len(chain), 1, -1):
        steps = numbers[: length + 1]
        if all(node.op_type == "Transpose" for node in chain[:length]):
            return None
        if all(step is not None and 0 not in step and math.prod(step) == math.prod(steps[0] or ()) for step in steps):
            perms = [_permutation(node) if node.op_type == "Transpose" else None for node in chain[:length]]
            if _in_order([step or [] for step in steps], perms):
                return length
    return None


def _permutation(node: onnx.NodeProto) -> list[int]:
    return list(attributes_of(node).get("perm", ()))


def _in_order(shapes: Sequence[Sequence[int]], perms: Sequence[Sequence[int] | None]) -> bool:
    """Whether moves, last first, keep the order of elements; ``shapes`` go from the last output to the first input.

    An axis is a list of (stride, size) in the first input, outermost first; it has several where a view joined axes.
    """
    axes = [[(math.prod(shapes[-1][i + 1 :]), size)] for i, size in enumerate(shapes[-1])]
    for shape, perm in zip(shapes[-2::-1], perms[::-1], strict=True):
        if perm is None:
            regrouped = _regrouped([part for axis in axes for part in axis], shape)
            if regrouped is None:
                return False
            axes = regrouped
        else:
            axes = [axes[i] for i in perm or range(len(axes))[::-1]]
    parts = [(stride, size) for axis in axes for stride, size in axis if size > 1]
    ends = [stride * size for stride, size in parts]
    return all(end == stride for end, (stride, _) in zip(ends[1:], parts, strict=False))


def _regrouped(parts: Sequence[tuple[int, int]], shape: Sequence[int]) -> list[list[tuple[int, int]]] | None:
    """Parts of axes grouped as the axes of a view; None if an axis would begin or end inside a part that it does not
    divide."""
    left = [part for part in parts[::-1] if part[1] > 1]  # a stack with the outermost part on top
    axes = []
    for size in shape:
        axis = []
        while size > 1:
            if not left:
                return None
            stride, whole = left.pop()
            outer = math.gcd(whole, size)
            if outer < whole:
                if outer != size:
                    return None
                left.append((stride, whole // outer))
            axis.append((stride * (whole // outer), outer))
            size //= outer
        axes.append(axis)
    return None if left else axes


# ---------------------------------------------------------------- slices


def _join_slices(scope: Scope) -> bool:
    """Merges a Slice into the Slices that read it, if nothing else reads it and their axes differ from its own;
    returns whether any was merged."""
    if scope.opset < _SLICE_INPUTS:
        return False
    used, readers, changed = used_names(scope.graph), readers_of(scope.graph), False
    slices = [node for node in scope.graph.node if is_standard(node, "Slice")]
    for first in slices:
        following = [node for node in slices if node.input[0] == first.output[0]]
        before = _bounds(first, scope) if following and readers[first.output[0]] == len(following) else None
        bounds = [_bounds(node, scope) for node in following]
        if before is None or any(own is None or not own.keys().isdisjoint(before) for own in bounds):
            continue
        for node, own in zip(following, bounds, strict=True):
            joined = before | (own or {})
            starts, ends, steps = zip(*joined.values(), strict=True)
            inputs = {"starts": starts, "ends": ends, "axes": list(joined), "steps": steps}
            node.input[1:] = [
                scope.constant(np.array(numbers, np.int64), f"{node.output[0]}_{kind}")
                for kind, numbers in inputs.items()
            ]
            node.input[0] = first.input[0]
        changed = True
    if changed:
        scope.drop_unused(used)
    return changed


def _bounds(node: onnx.NodeProto, scope: Scope) -> dict[int, tuple[int, int, int]] | None:
    """Start, end and step by axis (counted from the front); None if they are not constants."""
    shape = scope.shape(node.input[0])
    given = [scope.array(name) if name else None for name in node.input[1:]]
    if shape is None or any(array is None for array, name in zip(given, node.input[1:], strict=True) if name):
        return None
    starts, ends, axes, steps = [None if array is None else array.tolist() for array in [*given, None, None][:4]]
    if not starts or ends is None:
        return None
    axes = [axis % len(shape) for axis in (range(len(starts)) if axes is None else axes)]
    steps = [1] * len(starts) if steps is None else steps
    return dict(zip(axes, zip(starts, ends, steps, strict=True), strict=True)) if len(set(axes)) == len(axes) else None


# ---------------------------------------------------------------- what changes nothing


def _skip_idle(scope: Scope) -> bool:
    """Removes nodes whose output equals one of their inputs; returns whether there were any."""
    graph, used = scope.graph, used_names(scope.graph)
    results = {value.name for value in graph.output}
    inside = {name for node in graph.node for name in used_inside(node)}
    made = {name for node in graph.node for name in node.output}
    unsigned = _read_unsigned(graph) - results - inside
    instead: dict[str, str] = {}
    gone: list[onnx.NodeProto] = []
    for node in graph.node:
        node.input[:] = [instead.get(name, name) for name in node.input]
        same = _same(node, scope, unsigned)
        if same is None or node.output[0] in inside:
            continue
        output = node.output[0]
        if output not in results:
            instead[output] = same
        elif same in made and same not in results | inside and same not in scope.constants:
            _rename(graph.node, same, output)
            instead = {name: output if other == same else other for name, other in instead.items()}
            made.remove(same)
        else:
            continue
        gone.append(node)
    if gone:
        kept = [node for node in graph.node if not any(node is other for other in gone)]
        refill(graph.node, kept)
        scope.drop_unused(used)
    return bool(gone)


def _read_unsigned(graph: onnx.GraphProto) -> set[str]:
    """The values that only nodes read that give the same result for 0 and -0."""
    reading = {
        name for node in graph.node if node.op_type in _UNSIGNED_ZERO and node.domain in STANDARD for name in node.input
    }
    others = (node for node in graph.node if node.op_type not in _UNSIGNED_ZERO or node.domain not in STANDARD)
    return reading.difference(*(node.input for node in others))


def _rename(nodes: Iterable[onnx.NodeProto], name: str, new: str) -> None:
    for node in nodes:
        node.input[:] = [new if given == name else given for given in node.input]
        node.output[:] = [new if made == name else made for made in node.output]


def _same(node: onnx.NodeProto, scope: Scope, unsigned: set[str]) -> str | None:
    """The input that a node's only output equals, of that type and shape; None where it may differ.

    Outputs in ``unsigned`` may have 0 for -0.
    """
    if node.domain not in STANDARD or not node.input or not node.input[0] or len(node.output) != 1:
        return None
    if node.op_type in _NEUTRAL:
        return _unchanged(node, scope, node.output[0] in unsigned)
    first = node.input[0]
    if node.op_type == "Concat":
        return first if len(node.input) == 1 else None
    if node.op_type == "Cast":
        info = scope.infos.get(first)
        return first if info is not None and info.elem_type == attributes_of(node)["to"] else None
    if node.op_type == "Pad":
        pads = scope.array(node.input[1]) if len(node.input) > 1 else np.array(attributes_of(node).get("pads", [1]))
        return first if pads is not None and not pads.any() else None
    if node.op_type in {"Reshape", "Flatten", "Expand", "Slice"}:
        shape = scope.shape(first)
        if shape is None or shape != scope.shape(node.output[0]):
            return None
        if node.op_type in _VIEWS and 0 not in shape:  # as many elements: one size that is open is the same as well
            return first if shape.count(None) < 2 else None
        return first if None not in shape and (node.op_type != "Slice" or _goes_by_one(node, scope)) else None
    return None


def _goes_by_one(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether all steps of a Slice are 1; a step of -1 keeps the sizes but reverses the elements."""
    if len(node.input) < 5 or not node.input[4]:
        return True
    steps = scope.array(node.input[4])
    return steps is not None and bool((steps == 1).all())


def _unchanged(node: onnx.NodeProto, scope: Scope, unsigned: bool) -> str | None:
    """The input that the node's other, constant input leaves unchanged; None if there is none."""
    number, either = _NEUTRAL[node.op_type]
    for value, name in [(node.input[0], node.input[1]), (node.input[1], node.input[0])][: 1 + either]:
        tensor, shape = scope.constants.get(name), scope.shape(value)
        if tensor is None or shape is None or tensor.data_type == TensorProto.BFLOAT16 or byte_size(tensor) > _LARGEST:
            continue
        sizes = zip(tensor.dims[::-1], shape[::-1], strict=False)
        if len(tensor.dims) > len(shape) or any(size not in (1, own) for size, own in sizes):
            continue
        array = scope.array(name)
        assert array is not None
        signed = array.dtype.kind == "f" and number == 0 and not unsigned
        if (array == number).all() and not (signed and (np.signbit(array) != np.signbit(number)).any()):
            return value
    return None
