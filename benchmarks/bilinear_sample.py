"""``svexport.ops.bilinear_sample`` beside ``F.grid_sample`` at the same points, whose mask a user still has to make."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from benchmarks import grid_sample
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
    last = torch.tensor([shape[3] - 1, shape[2] - 1], device="cuda")
    pixels = (grid.float() + 1) / 2 * last  # float32 also beside half
    arguments = (image, grid, 0, 0, True)
    peer = grid_sample.workload(shape, out, points, layout, dtype, backward=backward)
    name = peer.name.replace("grid_sample", "bilinear_sample").replace(" bilinear zeros", "")
    if not backward:
        return Workload(
            name,
            lambda: OP(image, pixels),
            {"F.grid_sample": lambda: torch.grid_sampler(*arguments)},
            bytes=peer.bytes + pixels.numel() // 2 * image.element_size(),
            goal=goal,
        )
    gradients = [torch.randn_like(x) for x in OP(image, pixels)]
    return Workload(
        name,
        lambda: torch.ops.svexport.bilinear_sample_backward(gradients, image, pixels, [True, True]),
        {"F.grid_sample": lambda: torch.ops.aten.grid_sampler_2d_backward(gradients[0], *arguments, [True, True])},
        bytes=peer.bytes,
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
