"""Maps in int8 as TensorRT lays them out beside half maps in channels-last: the same kernels' results in half."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks import camera_sample, deform_conv2d, grid_sample, ms_deform_attn
from benchmarks._measure import Workload
from svexport import ops

STEP = 0.03  # of the maps


def packed(image: Tensor) -> Tensor:
    """CHW32: ``(*, ceil(C/32), H, W, 32)``."""
    codes = ops.to_chw32(ops.quantize(image.flatten(0, -4), STEP))
    return codes.unflatten(0, image.shape[:-3])


def of_grid_sample(shape: tuple[int, ...], out: tuple[int, ...], points: str) -> Workload:
    image, grid = grid_sample.operands(shape, out, points, torch.float16, "channels_last")
    grid, codes = grid.float(), packed(image)  # coordinates stay float32 in half models
    output = image.new_empty(*shape[:2], *out)
    name = f"grid_sample int8 {'x'.join(map(str, shape))} {'x'.join(map(str, out))} {points}"
    pixels = min(image.numel(), 4 * output.numel())
    return Workload(
        name,
        lambda: torch.ops.svexport_internal.grid_sample_int8(codes, grid, 0, 0, False, STEP, output),
        {"half channels-last": lambda: grid_sample.OP(image, grid, 0, 0, False, 1.0)},
        bytes=pixels + output.numel() * 2 + grid.numel() * 4,
        goal=1.0,
    )


def of_camera_sample(sizes: camera_sample.Sizes) -> Workload:
    args = camera_sample.arguments(sizes, "channels_last", torch.float16)
    features, *rest = args
    codes, levels = [packed(f) for f in features], len(features)
    output = features[0].new_empty(sizes.batch, sizes.queries, sizes.channels)
    return Workload(
        f"camera_sample int8 {sizes.name}",
        lambda: torch.ops.svexport_internal.camera_sample_levels(
            codes, [STEP] * levels, [False] * levels, *rest[:-1], output
        ),
        {"half channels-last": lambda: camera_sample.OP(*args)},
        bytes=camera_sample.least_bytes(args, False) // 2,
        goal=1.0,
    )


def of_ms_deform_attn(n: int, queries: int, heads: int, channels: int, points: int) -> Workload:
    args = ms_deform_attn.arguments(n, queries, heads, channels, points, ms_deform_attn.LEVELS, torch.float16)
    value, shapes, starts, locations, weights = args
    rest = shapes, starts, locations.float(), weights
    codes = ops.quantize(value, STEP)
    return Workload(
        ms_deform_attn.name("ms_deform_attn int8", value, locations),
        lambda: ms_deform_attn.OP(codes, *rest, STEP),
        {"half": lambda: ms_deform_attn.OP(value, *rest, 1.0)},
        bytes=value.numel() + sum(t.numel() * t.element_size() for t in rest) + 2 * n * queries * heads * channels,
        goal=1.0,
    )


def of_deform_conv2d(n: int, channels: int, size: tuple[int, int]) -> Workload:
    layout = torch.channels_last
    name, args, _ = deform_conv2d.arguments(n, channels, channels, size, torch.float16, layout=layout)
    args[1] = args[1].float()
    image, *rest, _ = args
    codes = packed(image)
    return Workload(
        f"deform_conv2d int8 {name}",
        lambda: deform_conv2d.OP(codes, *rest, STEP),
        {"half channels-last": lambda: deform_conv2d.OP(*args)},
        bytes=deform_conv2d.traffic([codes, *rest, image]),  # the output is as large as the image in half
        goal=1.0,
    )


def workloads() -> Iterator[Workload]:
    for shape, out, points, *_ in grid_sample.WORKLOADS:
        if shape[1] % 32 == 0:
            yield of_grid_sample(shape, out, points)
    for shape, points in itertools.product([(1, 32, 116, 200), (2, 96, 60, 80)], ("random", "smooth")):
        yield of_grid_sample(shape, (math.ceil(shape[2] / 2), shape[3]), points)
    for sizes in (camera_sample.DETR3D, camera_sample.SEED, camera_sample.STREAM):
        yield of_camera_sample(sizes)
    for queries, channels in itertools.product((900, 20000), (32, 64)):
        yield of_ms_deform_attn(1, queries, 8, channels, 4)
    for n, channels, size in ((1, 256, (58, 100)), (6, 256, (58, 100)), (1, 64, (58, 100)), (1, 512, (29, 50))):
        yield of_deform_conv2d(n, channels, size)
