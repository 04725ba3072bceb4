"""``ms_deform_attn`` beside mmcv's composition of torch functions: ``grid_sample`` of every level, weighted sum."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from random import Random

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor

from benchmarks import _random
from benchmarks._measure import Workload
from svexport.ops.ms_deform_attn import OP

LEVELS = ((116, 200), (58, 100), (29, 50), (15, 25))
torch._functorch.config.donated_buffer = False  # a compiled backward runs many times


def composition(value: Tensor, levels: tuple, locations: Tensor, weights: Tensor) -> Tensor:
    n, _, m, d = value.shape
    _, queries, _, count, points, _ = locations.shape
    grids = 2 * locations - 1
    sampled = []
    for level, part in enumerate(value.split([h * w for h, w in levels], dim=1)):
        image = part.flatten(2).transpose(1, 2).reshape(n * m, d, *levels[level])
        grid = grids[:, :, :, level].transpose(1, 2).flatten(0, 1)
        sampled.append(F.grid_sample(image, grid, padding_mode="zeros", align_corners=False))
    factors = weights.transpose(1, 2).reshape(n * m, 1, queries, count * points)
    output = (torch.stack(sampled, dim=-2).flatten(-2) * factors).sum(-1).view(n, m * d, queries)
    return output.transpose(1, 2).contiguous()


def arguments(n: int, queries: int, m: int, d: int, points: int, levels: tuple, dtype: torch.dtype) -> list[Tensor]:
    shapes = torch.tensor(levels, device="cuda")
    sizes = shapes.prod(1)
    value = torch.randn(n, int(sizes.sum()), m, d, device="cuda").to(dtype)
    locations = torch.rand(n, queries, m, len(levels), points, 2, device="cuda").to(dtype)
    weights = torch.rand(n, queries, m, len(levels), points, device="cuda").to(dtype)
    return [value, shapes, sizes.cumsum(0) - sizes, locations, weights]


def name(what: str, value: Tensor, locations: Tensor) -> str:
    n, s, m, d = value.shape
    levels, points = locations.shape[3:5]
    return f"{what} {n}x{locations.shape[1]} queries, {s}x{m}x{d}, {levels}x{points} {str(value.dtype)[6:]}"


def forward(*sizes: object, levels: tuple = LEVELS, compiled: bool = True, near: bool = False) -> Workload:
    """``near``: queries are the pixels of the levels and look around themselves, as in an encoder."""
    *rest, dtype = sizes
    args = arguments(*rest, levels, dtype)
    if near:
        pixels = torch.cat(
            [torch.cartesian_prod((torch.arange(h) + 0.5) / h, (torch.arange(w) + 0.5) / w).flip(1) for h, w in levels]
        )[: args[3].shape[1]]
        moves = torch.randn_like(args[3], dtype=torch.float32) * 3 / args[1].flip(1)[:, None]
        args[3] = (pixels.cuda()[:, None, None, None] + moves).to(dtype)
    value, _, _, locations, weights = args
    peers = {"eager": lambda: composition(value, levels, locations, weights)}
    if compiled:
        function = torch.compile(composition, dynamic=False)
        peers = {"compiled": lambda: function(value, levels, locations, weights)} | peers
    return Workload(
        name("ms_deform_attn near" if near else "ms_deform_attn", value, locations),
        lambda: OP(*args, 1.0),
        peers,
        bytes=sum(t.numel() * t.element_size() for t in (value, locations, weights))
        + locations.shape[1] * value[:, 0].numel() * value.element_size(),
        goal=1 / 3,
    )


def backward(*sizes: object, levels: tuple = LEVELS, compiled: bool = True) -> Workload:
    *rest, dtype = sizes
    value, shapes, starts, locations, weights = arguments(*rest, levels, dtype)
    inputs = [t.detach().requires_grad_() for t in (value, locations, weights)]
    functions = {"compiled": torch.compile(composition, dynamic=False)} if compiled else {}
    with torch.cuda.stream(torch.cuda.Stream()):
        outputs = {n: f(inputs[0], levels, *inputs[1:]) for n, f in (functions | {"eager": composition}).items()}
        grad = torch.randn_like(outputs["eager"])
        torch.autograd.grad(next(iter(outputs.values())), inputs, grad, retain_graph=True)
    torch.cuda.synchronize()
    call, needs = torch.ops.svexport.ms_deform_attn_backward, [True, False, False, True, True]
    return Workload(
        name("ms_deform_attn backward", value, locations),
        lambda: call([grad], value, shapes, starts, locations, weights, 1.0, needs),
        {n: partial(torch.autograd.grad, o, inputs, grad, retain_graph=True) for n, o in outputs.items()},
        bytes=2 * sum(t.numel() * t.element_size() for t in inputs) + grad.numel() * grad.element_size(),
        goal=1 / 2,
    )


def workloads() -> Iterator[Workload]:
    for dtype in (torch.float16, torch.float32):
        for queries in (900, 20000):
            yield forward(1, queries, 8, 32, 4, dtype)
            yield backward(1, queries, 8, 32, 4, dtype)
        yield forward(1, 20000, 8, 32, 4, dtype, near=True)


def sweep() -> Iterator[Workload]:
    small, one = ((40, 40), (20, 20), (10, 10)), ((64, 64),)
    for dtype in (torch.float16, torch.float32):
        for n, queries in ((1, 1), (1, 100), (2, 300), (1, 2000), (4, 2100)):
            for m, d, points in ((8, 32, 4), (4, 16, 1), (1, 64, 8), (8, 36, 4), (2, 128, 2), (3, 7, 3)):
                for levels in (small, one) if queries < 2000 else (small,):
                    yield forward(n, queries, m, d, points, dtype, levels=levels, compiled=False)


def at_random(r: Random) -> Workload:
    def draw() -> tuple:
        height, count = _random.count(r, 4, 120), r.choice([1, 2, 3, 4])
        levels = tuple((max(1, height >> i), max(1, round(height * 1.6) >> i)) for i in range(count))
        m, d, points = (
            r.choice([1, 2, 4, 8, 8, 8]),
            r.choice([8, 16, 24, 30, 32, 32, 32, 64]),
            r.choice([1, 2, 4, 4, 8]),
        )
        return (r.choice([1, 1, 2, 4]), _random.count(r, 1, 20000), m, d, points), levels

    sizes, levels = _random.drawn(draw, lambda s: math.prod(s[0]) * len(s[1]) < _random.LARGEST)
    if r.random() < 0.4:
        return backward(*sizes, _random.dtype(r), levels=levels, compiled=False)
    return forward(*sizes, _random.dtype(r), levels=levels, compiled=False)
