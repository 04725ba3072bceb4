"""Strided slices and their Concat as one space to depth, as in the Focus stem of YOLOX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

from svexport.graph.nodes import set_attributes
from svexport.graph.scope import Scope, drop_unused, is_standard, scopes, used_names
from svexport.ops._op import DOMAIN
from svexport.ops.space_to_depth import OP
from svexport.symbolic._builder import Builder, Value

__all__ = ["fuse_space_to_depth"]


def fuse_space_to_depth(model: onnx.ModelProto, *, node: bool = False) -> int:
    """Replaces the Concat of four slices of a tensor (even or odd rows, even or odd columns), in place.

    Reshape, Transpose and Reshape take its place, whichever dimensions are sliced, whichever is concatenated and whatever
    the order of the slices is (one that is neither row by row nor column by column adds a Gather).

    Args:
        model: the model to change.
        node: whether channels of images ``(N, C, H, W)`` become an ``svexport::SvSpaceToDepth`` instead.

    Returns:
        How many were replaced.
    """
    count = 0
    for scope in scopes(model):
        graph = scope.graph
        producers = {name: producer for producer in graph.node for name in producer.output}
        used = used_names(graph)
        nodes: list[onnx.NodeProto] = []
        for concat in list(graph.node):
            found = _match(concat, producers, scope)
            nodes += [concat] if found is None else _replacement(concat, found, scope, node)
            count += found is not None
        if len(nodes) != len(graph.node):
            ...
    return count


class _Blocks(NamedTuple):
    """Blocks of 2x2 elements along two axes, which become the outer part of another axis, in some order."""

    source: str
    axes: tuple[int, int]
    axis: int
    order: tuple[tuple[int, int], ...]  # of the elements of a block


def _match(concat: onnx.NodeProto, producers: Mapping[str, onnx.NodeProto], scope: Scope) -> _Blocks | None:
    if not is_standard(concat, "Concat") or len(concat.input) != 4:
        return None
    slices = [_slices(name, producers, scope) for name in concat.input]
    source, starts = slices[0]
    axes = tuple(sorted(starts))
    shape = scope.shape(source)
    if len(axes) != 2 or shape is None or 0 in shape or any(s != source or set(a) != set(axes) for s, a in slices):
        return None
    order = tuple((starts[axes[0]], starts[axes[1]]) for _, starts in slices)
    axis = helper.get_node_attr_value(concat, "axis") % len(shape)
    if sorted(order) != _ROW_BY_ROW or axis in axes:
        return None
    return _Blocks(source, (axes[0], axes[1]), axis, order)


_ROW_BY_ROW = [(0, 0), (0, 1), (1, 0), (1, 1)]
_COLUMN_BY_COLUMN = [(0, 0), (1, 0), (0, 1), (1, 1)]


def _slices(name: str, producers: Mapping[str, onnx.NodeProto], scope: Scope) -> tuple[str, dict[int, int]]:
    """The tensor that every second element is sliced from, and where the slices start, by axis."""
    found: dict[int, int] = {}
    while name in producers and is_standard(producers[name], "Slice"):
        node = producers[name]
        shape = scope.shape(node.input[0])
        arrays = [scope.array(each) for each in node.input[1:]]
        if shape is None or len(arrays) < 4 or any(array is None for array in arrays):
            break
        for start, end, axis, step in zip(*map(np.ravel, arrays), strict=True):
        ...
    return name, found
