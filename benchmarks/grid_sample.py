"""``svexport.ops.grid_sample`` beside ``F.grid_sample``, forward and backward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import _random
from benchmarks._measure import Workload
from svexport.ops.grid_sample import OP

FORMATS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}
MODES, PADDINGS = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")

# image, points, whether these scatter over the image or are a shifted identity; goals: time over F.grid_sample's in
# NCHW and in channels-last
WORKLOADS = [
    ((6, 256, 116, 200), (900, 1), "random", 28 / 164, 8 / 164),
    ((6, 256, 36, 92), (512, 1), "random", 9 / 140, 7 / 140),
    ((1, 256, 200, 200), (200, 200), "random", 90 / 156, 20 / 156),
    ((1, 256, 200, 200), (200, 200), "smooth", 22 / 111, 17 / 111),
    ((8, 64, 256, 512), (256, 512), "random", 600 / 779, 105 / 779),
    ((8, 64, 256, 512), (256, 512), "smooth", 100 / 223, 85 / 223),
    ((1, 1, 480, 640), (480, 640), "random", 8 / 10.6, 8 / 10.6),
    ((1, 1, 480, 640), (480, 640), "smooth", 6.5 / 9.1, 6.5 / 9.1),
]


def operands(
    shape: tuple[int, ...], out: tuple[int, ...], points: str, dtype: torch.dtype, layout: str
) -> tuple[Tensor, Tensor]:
    image = torch.randn(shape, device="cuda", dtype=dtype)
    if len(shape) == 4:
        image = image.to(memory_format=FORMATS[layout])
    elif layout == "channels_last":
        image = image.to(memory_format=torch.channels_last_3d)
    if points == "random":
        grid = torch.rand(shape[0], *out, len(out), device="cuda") * 2.1 - 1.05
    else:
        theta = torch.eye(len(out), len(out) + 1, device="cuda")
        theta[:, -1] = 0.013
        if points == "turned":  # by ten degrees
            cosine, sine = math.cos(math.radians(10)), math.sin(math.radians(10))
            theta[:2, :2] = torch.tensor([[cosine, -sine], [sine, cosine]])
        grid = F.affine_grid(theta.expand(shape[0], -1, -1), [shape[0], 1, *out], align_corners=False)
    return image, grid.to(dtype)


def workload(
    shape: tuple[int, ...],
    out: tuple[int, ...],
    points: str,
    layout: str,
    dtype: torch.dtype = torch.float16,
    mode: int = 0,
    padding: int = 0,
    align: bool = False,
    backward: bool = False,
    goal: float | None = None,
) -> Workload:
    image, grid = operands(shape, out, points, dtype, layout)
    size = image.element_size()
    samples = shape[0] * shape[1] * math.prod(out)
    # each pixel that a point lies at once, at most
    pixels = min(image.numel(), samples * 2 ** len(out))
    kind = f"{'backward' if backward else 'forward'} {MODES[mode]} {PADDINGS[padding]}{' aligned' if align else ''}"
    name = f"grid_sample {kind} {'x'.join(map(str, shape))} {'x'.join(map(str, out))} {points} {dtype} {layout}"
    arguments = (image, grid, mode, padding, align)
    if not backward:
        return Workload(
            name.replace("torch.", ""),
            lambda: OP(*arguments, 1.0),
            {"F.grid_sample": lambda: torch.grid_sampler(*arguments)},
            bytes=(pixels + samples + grid.numel()) * size,
            goal=goal,
        )
    gradient = torch.randn(*shape[:2], *out, device="cuda", dtype=dtype)
    peer = torch.ops.aten.grid_sampler_2d_backward if len(out) == 2 else torch.ops.aten.grid_sampler_3d_backward
    return Workload(
        name.replace("torch.", ""),
        lambda: torch.ops.svexport.grid_sample_backward([gradient], *arguments, 1.0, [True, True]),
        {"F.grid_sample": lambda: peer(gradient, *arguments, [True, True])},
        bytes=(pixels + image.numel() + samples + 2 * grid.numel()) * size,
        goal=goal,
    )


def workloads() -> Iterator[Workload]:
    for shape, out, points, *goals in WORKLOADS:
        for layout, goal in zip(FORMATS, goals, strict=True):
            yield workload(shape, out, points, layout, goal=goal)
    for shape, out, points, *_ in WORKLOADS:
        for layout in FORMATS:
            yield workload(shape, out, points, layout, backward=True, goal=0.5)


SHAPES = [
    ((1, 1, 7, 5), (3, 2)),
    ((1, 3, 224, 224), (224, 224)),
    ((2, 3, 1080, 1920), (270, 480)),
    ((16, 1, 28, 28), (28, 28)),
    ((1, 8, 33, 65), (129, 31)),
    ((4, 32, 64, 64), (128, 128)),
    ((2, 20, 37, 41), (53, 59)),
    ((1, 64, 512, 1024), (100, 1)),
    ((1, 2048, 7, 7), (49, 1)),
    ((12, 256, 18, 46), (512, 4)),
    ((64, 16, 50, 50), (7, 7)),
    ((1, 512, 1, 4096), (1, 300)),
    ((1, 2, 300, 300), (300, 300)),
    ((1, 32, 256, 256), (256, 256)),
    ((4, 64, 128, 160), (128, 160)),
    ((1, 16, 512, 512), (512, 512)),
    ((8, 4, 200, 200), (200, 200)),
]
VOLUMES = [((1, 4, 16, 64, 64), (16, 64, 64)), ((2, 32, 8, 20, 20), (5, 9, 7)), ((1, 1, 64, 64, 64), (32, 32, 32))]


def sweep() -> Iterator[Workload]:
    half, single = torch.float16, torch.float32
    for backward, (shape, out), points in itertools.product((False, True), SHAPES, ("random", "smooth")):
        for layout, dtype in itertools.product(FORMATS, (half, single)):
            yield workload(shape, out, points, layout, dtype, backward=backward)
    for (shape, out), dtype in itertools.product(SHAPES, (half, single)):
        yield workload(shape, out, "turned", "NCHW", dtype)
    for backward, (shape, out), layout in itertools.product((False, True), SHAPES[1::2], FORMATS):
        for mode, padding in ((1, 0), (2, 0), (0, 1), (0, 2), (2, 2)):
            yield workload(shape, out, "random", layout, half, mode, padding, True, backward)
    for backward, (shape, out), points in itertools.product((False, True), VOLUMES, ("random", "smooth")):
        for layout, dtype in itertools.product(FORMATS, (half, single)):
            yield workload(shape, out, points, layout, dtype, backward=backward)


def fits(sizes: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    """Neither the image nor what is sampled is too large."""
    shape, out = sizes
    return math.prod(shape[:2]) * max(math.prod(shape[2:]), math.prod(out)) < _random.LARGEST


def random_sizes(r: Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of an image, and of its points: as many, as many times some factor, a few columns, anything."""

    def draw() -> tuple[tuple[int, ...], tuple[int, ...]]:
        height = _random.size(r, 4, 1500)
        width = max(2, round(height * r.choice([0.7, 1, 1, 1, 1.5, 16 / 9, 3])))
        factor = r.choice([0.25, 0.5, 0.75, 1.3, 1.5, 2, 2.5])
        out = r.choice([
            (height, width),
            (max(1, round(height * factor)), max(1, round(width * factor))),
            (_random.count(r, 1, 4000), r.choice([1, 1, 2, 4, 8])),
            (_random.size(r, 2, 1000), _random.size(r, 2, 1000)),
        ])  # fmt: skip
        return (r.choice([1, 1, 1, 2, 4, 6, 8, 16]), _random.size(r, 1, 600), height, width), out

    return _random.drawn(draw, fits)


def random_volumes(r: Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    def draw() -> tuple[tuple[int, ...], tuple[int, ...]]:
        image = tuple(_random.count(r, 2, 100) for _ in range(3))
        out = tuple(_random.count(r, 1, 100) for _ in range(3))
        return (r.choice([1, 2, 4]), _random.size(r, 1, 128), *image), out

    return _random.drawn(draw, fits)


def at_random(r: Random) -> Workload:
    volume = r.random() < 0.25
    shape, out = (random_volumes if volume else random_sizes)(r)
    modes = [(0, 0)] * 5 + [(1, 0), (0, 1), (0, 2), (1 if volume else 2, 0)]
    mode, padding = r.choice(modes)
    points = r.choice(["random", "smooth"] if volume else ["random", "smooth", "turned"])
    layout, backward = r.choice(["NCHW", "NCHW", "channels_last"]), r.random() < 0.5
    return workload(shape, out, points, layout, _random.dtype(r), mode, padding, r.random() < 0.3, backward)
