"""Moves standard nodes through Transposes: which nodes commute with a Transpose, and how their attributes change.

A *frame* is the permutation that the tensors of a node are in. Each function here handles one family of ops. It tells
which dimensions of the frame every input and output has, which frames are possible, and what to edit in the node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import onnx

from svexport.graph.permutation import Perm, identity
from svexport.graph.scope import Scope
from svexport.graph.walk import STANDARD, attributes_of

__all__ = ["DYNAMIC_SIZE", "FAMILIES", "Motion", "motion_of"]

DYNAMIC_SIZE = 64
"""The size assumed for a dynamic dimension."""

_SHORT_RUN = 8
"""Elements in a row of broadcast inputs, as few as which cost more than a Transpose spares."""

_FEW_ELEMENTS = 2**12
"""For tensors with fewer elements than this it makes no difference."""

Edits: TypeAlias = "dict[str | int, Any]"
"""New values of a node's attributes (by name) and constant inputs (by index)."""


@dataclass(frozen=True)
class Motion:
    """How a node runs in a frame.

    Attributes:
        rank: rank of the frame.
        inputs: for each input, its dimensions of the frame; None for an input that does not move (axes, scales).
        outputs: for each output, its dimensions of the frame.
        broadcast: whether inputs of lower rank have size 1 in the dimensions they lack.
        allows: whether a frame is possible.
        edit: the changes of the node for a frame.
    """

    rank: int
    inputs: tuple[Perm | None, ...]
    outputs: tuple[Perm, ...]
    broadcast: bool = False
    allows: Callable[[Perm], bool] = lambda frame: True
    edit: Callable[[Perm], Edits] = lambda frame: {}


def motion_of(node: onnx.NodeProto, scope: Scope) -> Motion | None:
    """How a node runs in other frames; None if it cannot, or if too little is known about it."""
    if node.domain not in STANDARD or node.op_type not in FAMILIES:
        return None
    try:
        motion = FAMILIES[node.op_type](_Node(node, scope))
    except _Fixed:
        return None
    return motion if motion.rank > 1 else None


class _Fixed(Exception):
    """The node runs on its tensors as they are, and in no other way."""


class _Node:
    """A node to ask questions of; what has no answer raises :class:`_Fixed`."""

    def __init__(self, node: onnx.NodeProto, scope: Scope) -> None:
        self.proto, self.scope, self.opset = node, scope, scope.opset
        self.attributes = attributes_of(node)

    def has(self, index: int) -> bool:
        return index < len(self.proto.input) and bool(self.proto.input[index])

    def shape(self, index: int) -> tuple[int | None, ...]:
        shape = self.scope.shape(self.proto.input[index]) if self.has(index) else None
        if shape is None:
            raise _Fixed
        return shape

    def rank(self, index: int) -> int:
        return len(self.shape(index))

    def constant(self, index: int) -> np.ndarray:
        array = self.scope.array(self.proto.input[index])
        if array is None:
            raise _Fixed
        return array

    def integers(self, name: str, index: int) -> list[int] | None:
        """Integers that are an attribute at old opsets and an input at newer ones; None if absent."""
        if name in self.attributes:
            return list(self.attributes[name])
        return self.constant(index).ravel().tolist() if self.has(index) else None

    def edit(self, name: str, index: int, values: Sequence[int]) -> Edits:
        """Other values for what :meth:`integers` read."""
        if name in self.attributes:
            return {name: list(values)}
        return {index: np.array(values, self.constant(index).dtype)}

    def all_outputs(self, dims: Perm) -> tuple[Perm, ...]:
        return (dims,) * len(self.proto.output)


def _unary(n: _Node) -> Motion:
    """The first input moves, all others stay."""
    full = identity(n.rank(0))
    return Motion(len(full), (full, *(None,) * (len(n.proto.input) - 1)), n.all_outputs(full))


def _elementwise(n: _Node) -> Motion:
    ranks = [n.rank(i) for i in range(len(n.proto.input))]
    full = identity(max(ranks))
    inputs = tuple(full[len(full) - rank :] for rank in ranks)
    shapes = [(1,) * (len(full) - rank) + n.shape(i) for i, rank in enumerate(ranks)]
    least = min(_run(shapes, full), _SHORT_RUN)
    small = math.prod(max(n or DYNAMIC_SIZE for n in sizes) for sizes in zip(*shapes, strict=True)) < _FEW_ELEMENTS
    allows = (lambda frame: True) if small else (lambda frame: _run(shapes, frame) >= least)
    return Motion(len(full), inputs, n.all_outputs(full), broadcast=True, allows=allows)


def _run(shapes: Sequence[Sequence[int | None]], frame: Perm) -> int:
    """How many elements in a row each input of these shapes has all of or one for all: runtimes loop over such rows.

    Points beside a constant for each of their two coordinates have rows of 2, where those come last.
    """
    length, first = 1, None
    for axis in reversed(frame):
        sizes = [shape[axis] for shape in shapes]
        whole = [size != 1 for size in sizes]
        if not any(whole):
            continue
        if first not in (None, whole):
            break
        length, first = length * max(size or DYNAMIC_SIZE for size in sizes), whole
    return length


def _dropout(n: _Node) -> Motion:
    if n.has(2):  # training, perhaps: what it drops depends on the order of the elements
        raise _Fixed
    return _unary(n)


def _along(default: int) -> Callable[[_Node], Motion]:
    """Nodes with one axis, as an attribute."""

    def motion(n: _Node) -> Motion:
        unary = _unary(n)
        axis = n.attributes.get("axis", default) % unary.rank
        return replace(unary, edit=lambda frame: {"axis": frame.index(axis)})

    return motion


def _all_along(n: _Node) -> Motion:
    """Nodes with one axis, all of whose inputs move."""
    motion = _along(0)(n)
    return replace(motion, inputs=(identity(motion.rank),) * len(n.proto.input))


def _without_axis(n: _Node, motion: Motion) -> Motion:
    """The axis is missing from the outputs."""
    axis = n.attributes.get("axis", 0) % motion.rank
    return replace(motion, outputs=n.all_outputs(tuple(i for i in range(motion.rank) if i != axis)))


def _arg_reduce(n: _Node) -> Motion:
    motion = _along(0)(n)
    return motion if n.attributes.get("keepdims", 1) else _without_axis(n, motion)


def _gather(n: _Node) -> Motion:
    motion = _along(0)(n)
    if n.rank(1) > 1:
        raise _Fixed
    return motion if n.rank(1) else _without_axis(n, motion)


def _reduce(n: _Node) -> Motion:
    motion = _unary(n)
    axes = n.integers("axes", 1)
    if not axes and n.attributes.get("noop_with_empty_axes"):
        return motion
    gone = [a % motion.rank for a in axes or range(motion.rank)]
    if axes:
        motion = replace(motion, edit=lambda frame: n.edit("axes", 1, sorted(map(frame.index, gone))))
    if n.attributes.get("keepdims", 1):
        return motion
    return replace(motion, outputs=(tuple(i for i in range(motion.rank) if i not in gone),))


def _squeeze(n: _Node) -> Motion:
    motion = _unary(n)
    axes = n.integers("axes", 1)
    if axes is None:  # whichever are 1
        raise _Fixed
    gone = [a % motion.rank for a in axes]
    rest = tuple(i for i in range(motion.rank) if i not in gone)
    return replace(motion, outputs=(rest,), edit=lambda frame: n.edit("axes", 1, sorted(map(frame.index, gone))))


def _unsqueeze(n: _Node) -> Motion:
    axes = n.integers("axes", 1) or []
    full = identity(n.rank(0) + len(axes))
    new = [a % len(full) for a in axes]
    old = tuple(i for i in full if i not in new)
    inputs = (old, *(None,) * (len(n.proto.input) - 1))
    return Motion(len(full), inputs, (full,), edit=lambda frame: n.edit("axes", 1, sorted(map(frame.index, new))))


def _slice(n: _Node) -> Motion:
    motion = _unary(n)
    axes = n.integers("axes", 3)
    starts = n.integers("starts", 1) if axes is None else None  # of the first dimensions
    moved = [a % motion.rank for a in (range(len(starts or ())) if axes is None else axes)]
    if n.opset < 10:
        return replace(motion, edit=lambda frame: {"axes": list(map(frame.index, moved))})
    dtype = n.constant(1 if axes is None else 3).dtype
    return replace(motion, edit=lambda frame: {3: np.array(list(map(frame.index, moved)), dtype)})


def _pad(n: _Node) -> Motion:
    motion = _unary(n)
    if n.has(3):
        axes = n.constant(3)
        moved = [int(a) % motion.rank for a in axes]
        return replace(motion, edit=lambda frame: {3: np.array(list(map(frame.index, moved)), axes.dtype)})
    pads = n.integers("pads", 1) or []
    before, after = pads[: motion.rank], pads[motion.rank :]
    return replace(motion, edit=lambda frame: n.edit("pads", 1, [before[i] for i in frame] + [after[i] for i in frame]))


def _cumsum(n: _Node) -> Motion:
    motion, axis = _unary(n), n.constant(1)
    moved = int(axis.item()) % motion.rank
    return replace(motion, edit=lambda frame: {1: np.full(axis.shape, frame.index(moved), axis.dtype)})


def _tile(n: _Node) -> Motion:
    motion, repeats = _unary(n), n.constant(1)
    return replace(motion, edit=lambda frame: {1: repeats[list(frame)]})


def _expand(n: _Node) -> Motion:
    rank, sizes = n.rank(0), n.constant(1)
    full = identity(max(rank, len(sizes)))
    sizes = np.concatenate([np.ones(len(full) - len(sizes), sizes.dtype), sizes])
    inputs = (full[len(full) - rank :], None)
    return Motion(len(full), inputs, (full,), broadcast=True, edit=lambda frame: {1: sizes[list(frame)]})


def _softmax(n: _Node) -> Motion:
    if n.opset >= 13:
        return _along(-1)(n)
    motion = _unary(n)  # over all dimensions from the axis on, together
    axis = n.attributes.get("axis", 1) % motion.rank
    return replace(motion, allows=lambda frame: set(frame[:axis]) == set(range(axis)))


def _normalize_trailing(n: _Node) -> Motion:
    """Over the dimensions from the axis on, with weights of their shape."""
    motion = _unary(n)
    axis = n.attributes.get("axis", -1) % motion.rank
    weights = [i for i in range(1, len(n.proto.input)) if n.has(i)]
    if len(n.proto.output) > 1 or any(n.rank(i) > motion.rank - axis for i in weights):
        raise _Fixed
    return replace(motion, allows=lambda frame: frame[axis:] == tuple(range(axis, motion.rank)))


def _keeping(*dims: int) -> Callable[[_Node], Motion]:
    """The given dimensions stay where they are."""

    def motion(n: _Node) -> Motion:
        if len(n.proto.output) > 1:
            raise _Fixed
        return replace(_unary(n), allows=lambda frame: all(frame[i] == i for i in dims))

    return motion


def _matmul(n: _Node) -> Motion:
    motion = _unary(n)  # all rows of the first are multiplied by one matrix
    if n.rank(1) != 2:
        raise _Fixed
    return replace(motion, allows=lambda frame: frame[-1] == motion.rank - 1)


def _quantize(n: _Node) -> Motion:
    scale = n.shape(1)
    if n.attributes.get("block_size") or len(scale) > 1:
        raise _Fixed
    return _unary(n) if scale in ((), (1,)) else _along(1)(n)


FAMILIES = {
    op_type: family
    for op_types, family in [
        (
            "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Cast CastLike Ceil Celu Clip Cos Cosh Elu Erf Exp Floor",
            _unary,
        ),
        (
            "Gelu HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Log Mish Neg Not Reciprocal Relu Round Selu",
            _unary,
        ),
        ("Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Tan Tanh ThresholdedRelu", _unary),
        ("Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less", _elementwise),
        ("LessOrEqual Max Mean Min Mod Mul Or PRelu Pow Sub Sum Where Xor", _elementwise),
        ("ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum", _reduce),
        ("ReduceSumSquare", _reduce),
        ("ArgMax ArgMin", _arg_reduce),
        ("BatchNormalization", _keeping(1)),
        ("Concat GatherElements ScatterElements", _all_along),
        ("CumSum", _cumsum),
        ("DequantizeLinear QuantizeLinear", _quantize),
        ("Dropout", _dropout),
        ("Expand", _expand),
        ("Gather", _gather),
        ("GlobalAveragePool GlobalMaxPool InstanceNormalization", _keeping(0, 1)),
        ("Hardmax LogSoftmax Softmax", _softmax),
        ("LayerNormalization RMSNormalization", _normalize_trailing),
        ("LpNormalization TopK", _along(-1)),
        ("MatMul", _matmul),
        ("Pad", _pad),
        ("Slice", _slice),
        ("Split", _along(0)),
        ("Squeeze", _squeeze),
        ("Tile", _tile),
        ("Unsqueeze", _unsqueeze),
    ]
    for op_type in op_types.split()
}
