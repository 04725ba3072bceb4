"""``svexport.ops.bilinear_sample`` beside what gives the same by ``F.grid_sample``: pixels to a grid, sampled, masked.

``F.grid_sample`` alone, without the mask and from a grid that is there already, is timed too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random

import torch
from torch import Tensor

from benchmarks import _random, grid_sample
from benchmarks._measure import Workload
from svexport.ops.bilinear_sample import OP


def workload(
    shape: tuple[int, ...],
    out: tuple[int, ...],
    points: str,
    layout: str,
    dtype: torch.dtype = torch.float16,
    backward: bool = False,
    goal: float | None = None,
) -> Workload:
    image, grid = grid_sample.operands(shape, out, points, dtype, layout)
    size = torch.tensor([shape[3] - 1, shape[2] - 1], device="cuda")
    pixels = (grid.float() + 1) / 2 * size  # float32 also beside half
    alone = grid_sample.workload(shape, out, points, layout, dtype, backward=backward)

    def mask() -> Tensor:
        return ((pixels >= 0) & (pixels < size)).all(-1)

    def composition() -> tuple[Tensor, Tensor]:
        valid = mask()
        output = torch.grid_sampler(image, (pixels * 2 / size - 1).to(dtype), 0, 0, True)
        return output * valid[:, None], valid[..., None].to(dtype)

    gradients = [torch.randn_like(x) for x in OP(image, pixels)]
    valid = mask()

    def composition_backward() -> tuple[Tensor, Tensor]:
        of_image, of_grid = torch.ops.aten.grid_sampler_2d_backward(
            gradients[0] * valid[:, None], image, grid, 0, 0, True, [True, True]
        )
        return of_image, of_grid.float() * 2 / size

    def ours_backward() -> list[Tensor]:
        return torch.ops.svexport.bilinear_sample_backward(gradients, image, pixels, [True, True])

    return Workload(
        alone.name.replace("grid_sample", "bilinear_sample").replace(" bilinear zeros", ""),
        ours_backward if backward else lambda: OP(image, pixels),
        {
            "F.grid_sample and mask": composition_backward if backward else composition,
            "F.grid_sample": next(iter(alone.peers.values())),
        },
        bytes=alone.bytes if backward else alone.bytes + pixels.numel() // 2 * image.element_size(),
        goal=goal,
    )


def workloads() -> Iterator[Workload]:
    for shape, out, points, *goals in grid_sample.WORKLOADS:
        for layout, goal in zip(grid_sample.FORMATS, goals, strict=True):
            yield workload(shape, out, points, layout, goal=goal)
    for shape, out, points, *_ in grid_sample.WORKLOADS:
        for layout in grid_sample.FORMATS:
            yield workload(shape, out, points, layout, backward=True, goal=0.5)


def sweep() -> Iterator[Workload]:
    for backward, (shape, out), points in itertools.product((False, True), grid_sample.SHAPES, ("random", "smooth")):
        for layout, dtype in itertools.product(grid_sample.FORMATS, (torch.float16, torch.float32)):
            yield workload(shape, out, points, layout, dtype, backward)


def at_random(r: Random) -> Workload:
    shape, out = grid_sample.random_sizes(r)
    layout = r.choice(["NCHW", "NCHW", "channels_last"])
    return workload(shape, out, r.choice(["random", "smooth"]), layout, _random.dtype(r), r.random() < 0.5)
