"""Ops that change shapes, and those that make or read them: Reshape, Squeeze, Split, Slice, Pad, Shape, Range."""

from __future__ import annotations

from svexport.graph.opsets.dtypes import moves
from svexport.graph.opsets.rules import Node, down, unchanged
from svexport.symbolic._builder import Builder

moves("Concat DepthToSpace Expand Flatten Identity Pad Reshape Shape Size Slice SpaceToDepth Split Squeeze Tile")
moves("Transpose Trilu Unsqueeze")

unchanged("Transpose", 13, 21, 23, 24)
unchanged("Squeeze Unsqueeze", 21, 23, 24)


@down("Squeeze Unsqueeze", 13)
def _axes_as_attribute(b: Builder, node: Node) -> None:
    if len(node.proto.input) > 1:
        axes = node.ints(1)
        if axes is None:
            node.refuse("its axes are computed, and are an attribute there")
        node.set(axes=axes)
        node.give(node.input())
