"""Arguments for every op that has a plugin: the op's own samples, and channels in multiples of TensorRT's vectors."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import svexport
from svexport.ops._op import Op
from svexport.tensorrt.nodes import plugin_ops

__all__ = ["CASES", "arguments", "inputs_of", "small_decoder", "with_inputs"]

# Inputs that say where to sample: they may be float32 beside a half image.
COORDINATES = {
    "grid_sample": ("grid",),
    "bilinear_sample": ("grid",),
    "camera_sample": ("reference_points", "lidar2img", "offsets"),
    "deform_conv2d": ("offset",),
    "ms_deform_attn": ("sampling_locations",),
    "transformer_decoder": ("reference_points", "lidar2img"),
}


def _vectorised(make: Any) -> dict[str, list[tuple]]:
    def camera(channels: int, scales: tuple[float, float] = (1.0, 1.0)) -> tuple:
        features = [make(1, 2, channels, 6, 10), make(1, 2, channels, 3, 5)]
        if scales[0] != 1:
            features = [(f * 40).clamp(-128, 127).to(torch.int8) for f in features]
        lidar2img = torch.tensor([[20.0, 0, 24, 0], [0, 20, 16, 0], [0, 0, 1, 0], [0, 0, 0, 1]]).expand(1, 2, 4, 4)
        points, weights = make(1, 9, 3).sigmoid(), make(1, 9, 2, 1, 2, 1)
        pc_range = (-2.0, -2.0, 1.0, 2.0, 2.0, 9.0)
        return (
            features,
            points,
            lidar2img.clone(),
            weights,
            make(1, 1, 1, 3) * 0,
            (32, 48),
            pc_range,
            1e-5,
            True,
            (0.0, 1.0),
            0,
            list(scales),
        )

    return {
        "grid_sample": [
            ((make(2, 48, 9, 11) * 40).clamp(-128, 127).to(torch.int8), make(2, 5, 7, 2) * 0.7, mode, 0, False, 0.02)
            for mode in range(3)
        ]
        + [
            (make(2, 16, 9, 11), make(2, 5, 7, 2) * 0.7, mode, padding, align, 1.0)
            for mode, padding, align in [(0, 0, False), (0, 1, True), (1, 2, False), (2, 0, False)]
        ],
        "bilinear_sample": [(make(2, 8, 9, 11), make(2, 5, 7, 2).sigmoid() * 10)],
        "camera_sample": [camera(64), camera(40, (0.02, 0.03)), camera(40)],
        "deform_conv2d": [
            (
                *((make(2, 48, 7, 9) * 40).clamp(-128, 127).to(torch.int8), make(2, 18, 7, 9), make(24, 48, 3, 3)),
                *(make(24), make(2, 9, 7, 9).sigmoid(), [1, 1], [1, 1], [1, 1], 1, 1, 0.02),
            ),
            (
                *(make(2, 16, 7, 9), make(2, 18, 7, 9), make(24, 16, 3, 3), make(24), make(2, 9, 7, 9).sigmoid()),
                *([1, 1], [1, 1], [1, 1], 1, 1, 1.0),
            ),
        ],
    }


def arguments(op: Op) -> Iterator[tuple]:
    """Argument tuples of the torch operator, the same at every call."""
    generator = torch.Generator().manual_seed(sum(map(ord, op.name)))

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    yield from op.samples(make)
    yield from _vectorised(make).get(op.name, [])


def small_decoder(num_layers: int, learned_offsets: bool = False) -> svexport.ops.TransformerDecoder:
    torch.manual_seed(num_layers)
    config = svexport.ops.TransformerDecoderConfig(
        num_layers=num_layers,
        embed_dims=32,
        num_heads=2,
        ffn_dims=48,
        num_classes=3,
        code_size=8,
        num_cams=2,
        learned_offsets=learned_offsets,
        image_size=(32, 48),
        num_queries=5,
        feature_sizes=((4, 6), (2, 3)),
    )
    decoder = svexport.ops.TransformerDecoder(config).eval()
    for p in decoder.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return decoder


CASES = [(op, i) for op in plugin_ops() for i in range(sum(1 for _ in arguments(op)))]


def inputs_of(op: Op, args: Sequence[Any]) -> list[tuple[str, Tensor]]:
    """The node's inputs, with the names of the op's arguments."""
    result = []
    for argument, value in zip(op.arguments, args, strict=True):
        if argument.is_tensor and value is not None:
            result += [(argument.name, t) for t in (value if argument.kind == "tensors" else [value])]
    return result


def with_inputs(op: Op, args: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
    """The arguments with other tensors in their places."""
    rest = iter(tensors)
    result = copy.copy(list(args))
    for i, (argument, value) in enumerate(zip(op.arguments, args, strict=True)):
        if argument.is_tensor and value is not None:
            result[i] = [next(rest) for _ in value] if argument.kind == "tensors" else next(rest)
    return result
