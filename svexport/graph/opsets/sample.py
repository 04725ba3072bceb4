"""Sampling at computed positions: standard nodes are replaced by the bodies of svexport's own ops."""

from __future__ import annotations

from dataclasses import replace

from onnx import TensorProto

from svexport.graph.opsets.rules import Node, down, unchanged
from svexport.ops.grid_sample import BICUBIC, BILINEAR, BORDER, NEAREST, REFLECTION, ZEROS
from svexport.symbolic import affine_grid, deform_conv2d, grid_sample
from svexport.symbolic._builder import FLOAT_TYPES, Builder, Value

__all__: list[str] = []

unchanged("GridSample DeformConv", 22)

_MODES = {
    "linear": BILINEAR,
    "bilinear": BILINEAR,
    "nearest": NEAREST,
    "cubic": BICUBIC,
    "bicubic": BICUBIC,
    "zeros": ZEROS,
    "border": BORDER,
    "reflection": REFLECTION,
}


@down("GridSample", 20)
def grid_sample_20(b: Builder, node: Node) -> Value | None:
    """Modes had other names, and images two axes."""
    if node.rank() > 4:
        return _grid_sample(b, node)
    mode = node.attribute("mode")
    node.set(mode={"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode))
    return None


@down("GridSample", 16)
def grid_sample_16(b: Builder, node: Node) -> Value:
    return _grid_sample(b, node)


def _grid_sample(b: Builder, node: Node) -> Value:
    mode, padding = _MODES[node.attribute("mode")], _MODES[node.attribute("padding_mode")]
    image = node.tensor()
    if image.dtype not in FLOAT_TYPES:
        node.refuse("its image is not of floating-point numbers")
    if image.rank not in (4, 5) or (image.rank == 5 and mode == BICUBIC):
        node.refuse(f"{node.attribute('mode')} samples of an image of rank {image.rank}")
    return grid_sample.sampled(b, image, node.tensor(1), mode, padding, node.attribute("align_corners"))


@down("AffineGrid", 20)
def affine_grid_20(b: Builder, node: Node) -> Value:
    theta = node.typed()
    size = node.input(1)
    if (ints := node.ints(1)) is not None:
        return affine_grid.body(b, theta, ints, node.attribute("align_corners"))
    (count,) = node.sizes(1)
    size = replace(size, dtype=TensorProto.INT64)
    return affine_grid.body(b, theta, b.split(size, 0, [1] * count), node.attribute("align_corners"))


@down("DeformConv", 19)
def deform_conv_19(b: Builder, node: Node) -> Value:
    if node.rank() != 4:
        node.refuse(f"its image has rank {node.rank()}; it is written for two spatial axes")
    bias, mask = (None if node.given(i) is None else node.tensor(i) for i in (3, 4))
    return deform_conv2d.body(
        b,
        node.tensor(),
        node.tensor(2),
        node.tensor(1),
        bias,
        mask,
        node.attribute("strides") or [1, 1],
        (node.attribute("pads") or [0, 0])[:2],
        node.attribute("dilations") or [1, 1],
        node.attribute("group"),
        node.attribute("offset_group"),
        1.0,
    )
