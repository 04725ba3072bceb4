"""``svexport.ops.camera_sample`` beside its composition of torch functions, as written and compiled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from benchmarks import _random
from benchmarks._measure import Workload
from examples import detr3d
from svexport.ops.camera_sample import OP, implementation

LAYOUTS = ("NCHW", "channels_last")


@dataclass(frozen=True)
class Sizes:
    """One rig of six cameras and one decoder."""

    name: str
    queries: int
    levels: tuple[tuple[int, int], ...]
    image_size: tuple[int, int]
    channels: int = 256
    points: int = 1
    groups: int = 1
    batch: int = 1
    softmax: bool = False
    offsets: bool = False
    uv_clamp: tuple[float, float] | None = None
    depth_eps: float = 1e-5


DETR3D = Sizes("detr3d", 900, ((116, 200), (58, 100), (29, 50), (15, 25)), (928, 1600))
SEED = Sizes("seed", 512, ((72, 184), (36, 92), (18, 46), (9, 23)), (288, 736))
STREAM = Sizes(
    *("stream", 900, ((40, 100), (20, 50), (10, 25), (5, 13)), (320, 800)),
    points=13,
    groups=8,
    softmax=True,
    offsets=True,
    uv_clamp=(-1.0, 2.0),
    depth_eps=1e-2,
)


def arguments(sizes: Sizes, layout: str, dtype: torch.dtype) -> tuple:
    """Of the operator: points all over the range, most of which a camera does not see."""
    rig = torch.stack(list(detr3d.surround_cameras(sizes.image_size).values())).cuda()
    cams = len(rig)
    features = [
        torch.randn(sizes.batch * cams, sizes.channels, *size, device="cuda", dtype=dtype) for size in sizes.levels
    ]
    if layout == "channels_last":
        features = [f.to(memory_format=torch.channels_last) for f in features]
    shape = (sizes.batch, sizes.queries, cams, sizes.points, len(sizes.levels), sizes.groups)
    points = (sizes.batch, sizes.queries, sizes.points, 3)
    return (
        [f.unflatten(0, (sizes.batch, cams)) for f in features],
        torch.rand(sizes.batch, sizes.queries, 3, device="cuda"),
        rig.expand(sizes.batch, -1, -1, -1).contiguous(),
        torch.randn(shape, device="cuda", dtype=dtype),
        torch.randn(points, device="cuda") if sizes.offsets else torch.zeros(1, 1, 1, 3, device="cuda"),
        list(sizes.image_size),
        list(detr3d.Config.pc_range),
        sizes.depth_eps,
        sizes.uv_clamp is None,
        list(sizes.uv_clamp or (0.0, 1.0)),
        int(sizes.softmax),
        [1.0] * len(features),
    )


def least_bytes(args: tuple, backward: bool) -> int:
    """Every pixel that a sample needs once, and the rest once; backward also every gradient."""
    features, points, lidar2img, weights, offsets, *options, _ = args
    pixels = 0
    for level, feature in enumerate(features):
        # what of a map has a gradient when everything else is 1 is what is read
        probe = torch.ones(*feature.shape[:2], 1, *feature.shape[3:], device="cuda", requires_grad=True)
        ones = torch.zeros_like(weights[..., level : level + 1, :1], dtype=torch.float32)
        output = implementation([probe], points, lidar2img, ones, offsets, *options, [1.0])
        (gradient,) = torch.autograd.grad(output.sum(), probe)
        pixels += int((gradient != 0).sum()) * feature.shape[2]
    size = features[0].element_size()
    small = sum(t.numel() * t.element_size() for t in (points, lidar2img, weights, offsets))
    output = points.shape[0] * points.shape[1] * features[0].shape[2] * size
    total = pixels * size + small + output
    return total + small + sum(f.numel() for f in features) * size if backward else total


def as_in_detr3d(args: tuple) -> Callable[[], Tensor]:
    """The feature sampling of examples/detr3d.py, in the type of the features."""
    features, points, lidar2img, weights, *_ = args
    dtype = features[0].dtype
    points, lidar2img = points.to(dtype), lidar2img.to(dtype)
    attention = detr3d.CameraAttention(
        detr3d.Config(image_size=tuple(args[5]), levels=tuple(f.shape[3:] for f in features))
    )

    def run() -> Tensor:
        sampled, valid = attention.sample(features, points, lidar2img)
        factors = weights.squeeze(-1).sigmoid()[:, None] * valid.to(dtype)
        return (torch.nan_to_num(sampled) * factors).sum((-1, -2, -3)).permute(0, 2, 1)

    return run


def gradients(function: Callable[..., Tensor], args: tuple) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward, of everything that may have a gradient."""
    count = len(args[0])
    leaves = [t.detach().requires_grad_() for t in (*args[0], *args[1:5])]
    gradient = torch.randn_like(function(*args))
    return lambda: torch.autograd.grad(
        function(leaves[:count], *leaves[count:], *args[5:]), leaves, gradient, allow_unused=True
    )


def workload(
    sizes: Sizes,
    layout: str,
    dtype: torch.dtype = torch.float16,
    *,
    backward: bool = False,
    peers: Sequence[str] = ("torch",),
    goal: float | None = None,
    limit: float | None = None,
) -> Workload:
    args = arguments(sizes, layout, dtype)
    if backward:
        ours, theirs = gradients(OP, args), {"torch": gradients(implementation, args)}
    else:
        compiled = torch.compile(implementation, dynamic=False)
        every = {
            "torch": lambda: implementation(*args),
            "torch.compile": lambda: compiled(*args),
        }
        ours, theirs = (lambda: OP(*args)), {name: every[name] for name in peers}
    direction = "forward and backward" if backward else "forward"
    name = f"camera_sample {direction} {sizes.name} {str(dtype).removeprefix('torch.')} {layout}"
    # Which makes tensors of numbers on the CPU, and so cannot be captured.
    eager = {"detr3d.py (eager)": as_in_detr3d(args)} if not backward and sizes in (DETR3D, SEED) else {}
    return Workload(name, ours, theirs, bytes=least_bytes(args, backward), goal=goal, limit=limit, eager=eager)


def workloads() -> Iterator[Workload]:
    for sizes, layout in itertools.product((DETR3D, SEED, STREAM), LAYOUTS):
        limit = 12 if layout == "channels_last" and sizes is not STREAM else None
        yield workload(sizes, layout, goal=1 / 20 if sizes is not STREAM else None, limit=limit)
    for sizes, layout in itertools.product((DETR3D, SEED), LAYOUTS):
        yield workload(sizes, layout, peers=("torch.compile",), goal=1 / 5)
    for sizes, layout in itertools.product((DETR3D, SEED, STREAM), LAYOUTS):
        yield workload(sizes, layout, backward=True, goal=1 / 2)


SHAPES = [
    Sizes("one", 1, ((5, 7),), (40, 56), channels=1),
    Sizes("few", 10, ((8, 22), (4, 11)), (128, 352), channels=3),
    Sizes("odd", 301, ((17, 31), (9, 15)), (136, 248), channels=37),
    Sizes("narrow", 900, ((58, 100), (29, 50)), (464, 800), channels=32),
    Sizes("wide", 300, ((29, 50), (15, 25), (8, 13)), (928, 1600), channels=1024),
    Sizes("dense", 40000, ((15, 25),), (480, 800), channels=128),
    Sizes("batch", 200, ((29, 50), (15, 25)), (464, 800), channels=64, batch=4),
    Sizes("groups", 300, ((29, 50), (15, 25)), (464, 800), points=4, groups=32, softmax=True, offsets=True),
    Sizes("points", 50, ((29, 50), (15, 25)), (464, 800), channels=64, points=50, offsets=True, uv_clamp=(-1.0, 2.0)),
    Sizes("split", 100, ((29, 50),), (464, 800), channels=96, groups=96, points=2, offsets=True),
]


def sweep() -> Iterator[Workload]:
    for backward, sizes, layout in itertools.product((False, True), SHAPES, LAYOUTS):
        for dtype in (torch.float16, torch.float32):
            yield workload(sizes, layout, dtype, backward=backward)


def at_random(r: Random) -> Workload:
    def draw() -> Sizes:
        height, levels = _random.count(r, 6, 120), r.choice([1, 2, 3, 4, 4])
        width = round(height * r.uniform(1, 2.6))
        groups, points = r.choice([1, 1, 1, 2, 4, 8]), r.choice([1, 1, 1, 2, 4, 13])
        return Sizes(
            "random",
            _random.count(r, 1, 3000),
            tuple((max(1, height >> i), max(1, width >> i)) for i in range(levels)),
            (height * 8, width * 8),
            channels=-(-_random.size(r, 4, 512) // groups) * groups,
            points=points,
            groups=groups,
            batch=r.choice([1, 1, 1, 2, 4]),
            softmax=r.random() < 0.3,
            offsets=points > 1,
        )

    sizes = _random.drawn(draw, lambda s: s.batch * 6 * s.channels * math.prod(s.levels[0]) < _random.LARGEST)
    return workload(sizes, r.choice(LAYOUTS), _random.dtype(r), backward=r.random() < 0.4)
