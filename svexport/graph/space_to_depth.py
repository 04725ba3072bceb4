"""Fuses strided slices and their Concat into one space to depth, as in the Focus stem of YOLOX."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import NamedTuple

import onnx
from onnx import helper, numpy_helper

from svexport.graph.nodes import set_attributes
from svexport.graph.permutation import Perm, identity
from svexport.graph.scope import Scope, drop_unused, is_standard, scopes, used_names
from svexport.graph.walk import refill
from svexport.ops._op import DOMAIN
from svexport.ops.space_to_depth import OP
from svexport.symbolic._builder import Builder, Dim, Value

__all__ = ["fuse_space_to_depth"]

INT32_MAX = 2**31 - 1
"""The end that exporters write for a slice that has no end."""

ROW_BY_ROW = [(0, 0), (0, 1), (1, 0), (1, 1)]
COLUMN_BY_COLUMN = [(0, 0), (1, 0), (0, 1), (1, 1)]


def fuse_space_to_depth(model: onnx.ModelProto, *, node: bool = False) -> int:
    """Replaces the Concat of four slices of a tensor (even or odd rows, even or odd columns), in place.

    Reshape, Transpose and Reshape take its place, for any two sliced dimensions, any other concatenated dimension, and
    any order of the slices (an order that is neither row by row nor column by column adds a Gather).

    Args:
        model: the model, changed in place.
        node: whether to write an ``svexport::SvSpaceToDepth`` instead for images ``(N, C, H, W)`` joined along C.

    Returns:
        The number of Concats replaced.
    """
    count = 0
    for scope in scopes(model):
        graph = scope.graph
        used = used_names(graph)
        producers = {name: producer for producer in graph.node for name in producer.output}
        found = {i: blocks for i, n in enumerate(graph.node) if (blocks := _match(n, producers, scope)) is not None}
        if found:
            nodes: list[onnx.NodeProto] = []
            for i, concat in enumerate(list(graph.node)):
                nodes += _nodes(concat.output[0], found[i], scope, node) if i in found else [concat]
            refill(graph.node, nodes)
            drop_unused(graph, used.union(*(new.output for new in nodes)))
        count += len(found)
    if count and node and all(entry.domain != DOMAIN for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return count


class _Blocks(NamedTuple):
    """2x2 blocks along two axes of the transposed source, whose elements are joined along a third axis."""

    source: str
    perm: Perm
    axes: tuple[int, int]
    axis: int
    order: list[tuple[int, int]]


def _match(concat: onnx.NodeProto, producers: Mapping[str, onnx.NodeProto], scope: Scope) -> _Blocks | None:
    if not is_standard(concat, "Concat") or len(concat.input) != 4:
        return None
    slices = [_slices(name, producers, scope) for name in concat.input]
    source, starts = slices[0]
    shape = scope.shape(source)
    if (
        shape is None
        or 0 in shape
        or any(other != source or len(s) != 2 or s.keys() != starts.keys() for other, s in slices)
    ):
        return None
    first, second = sorted(starts)
    order = [(s[first], s[second]) for _, s in slices]
    axis = helper.get_node_attr_value(concat, "axis") % len(shape)
    if sorted(order) != ROW_BY_ROW or axis in (first, second):
        return None
    perm = identity(len(shape))
    before = producers.get(source)
    if before is not None and is_standard(before, "Transpose") and before.attribute and scope.shape(before.input[0]):
        source, perm = before.input[0], tuple(before.attribute[0].ints)  # merges it into the new Transpose
    return _Blocks(source, perm, (first, second), axis, order)


def _slices(name: str, producers: Mapping[str, onnx.NodeProto], scope: Scope) -> tuple[str, dict[int, int]]:
    """The tensor that Slices of every second element lead back to, and the start along each sliced axis."""
    found: dict[int, int] = {}
    while name in producers and is_standard(producers[name], "Slice"):
        source = producers[name].input[0]
        shape = scope.shape(source)
        inputs = [array for each in producers[name].input[1:] if (array := scope.array(each)) is not None]
        if shape is None or not 3 <= len(inputs) == len(producers[name].input) - 1:
            break
        starts, ends, axes, *steps = (array.ravel().tolist() for array in inputs)
        here: dict[int, int] = {}
        for start, end, axis, step in zip(starts, ends, axes, steps[0] if steps else [1] * len(axes), strict=True):
            size = shape[axis]
            if end < (INT32_MAX if size is None else size) or (start, step) not in ((0, 1), (0, 2), (1, 2)):
                return name, found
            if step == 2:
                here[axis % len(shape)] = start
        if found.keys() & here.keys():
            break
        found |= here
        name = source
    return name, found


def _nodes(output: str, blocks: _Blocks, scope: Scope, node: bool) -> list[onnx.NodeProto]:
    """The nodes that make ``output`` in place of the slices and their Concat."""
    b = Builder(scope.opset, scope.fresh(f"{output}/space_to_depth") + "/")
    (first, second), axis, order = blocks.axes, blocks.axis, blocks.order
    x = Value(blocks.source, scope.infos[blocks.source].elem_type or None, scope.shape(blocks.source))
    split: list[Dim] = []  # two dimensions for each sliced one
    at = [0] * x.rank  # the index in ``split`` of each dimension
    for i, dim in sorted(enumerate(blocks.perm), key=itemgetter(1)):
        at[i] = len(split)
        size = b.dim(x, dim)
        split += [b.quotient(size, 2), 2] if i in blocks.axes else [size]
    if node and (blocks.perm, blocks.axes, axis) == ((0, 1, 2, 3), (2, 3), 1):
        packed, natural = b.op(OP.node_type, x, domain=DOMAIN), COLUMN_BY_COLUMN
        set_attributes(b.nodes[-1], OP, ())
    else:
        natural = COLUMN_BY_COLUMN if order == COLUMN_BY_COLUMN else ROW_BY_ROW
        offsets = [at[first] + 1, at[second] + 1][:: 1 if natural == ROW_BY_ROW else -1]
        packed = b.transpose(b.reshape(x, *split), at[:axis] + offsets + at[axis:])
    halves = [split[i] for i in at]
    outer, inner = halves[:axis], halves[axis + 1 :]
    if order != natural:
        packed = b.reshape(packed, *outer, 4, halves[axis], *inner)
        packed = b.op("Gather", packed, b.ints(*map(natural.index, order)), axis=axis)
    if b.nodes[-1].domain != DOMAIN:
        b.reshape(packed, *outer, b.product(4, halves[axis]), *inner)

    names = {name: scope.constant(numpy_helper.to_array(tensor), name) for name, tensor in b.constants.items()}
    for new in b.nodes:
        new.input[:] = [names.get(name, name) for name in new.input]
    b.nodes[-1].output[0] = output
    return b.nodes
