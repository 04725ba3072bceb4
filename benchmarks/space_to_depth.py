"""``space_to_depth`` beside what Focus stems do: four strided slices and ``torch.cat``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import _random
from benchmarks._measure import Workload
from svexport.ops.space_to_depth import OP


def slices(x: Tensor) -> Tensor:
    return torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1)


def forward(shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format, compiled: bool = True) -> Workload:
    x = torch.randn(shape, device="cuda").to(dtype, memory_format=layout)
    torch.compiler.reset()
    function = torch.compile(slices, dynamic=False)
    name = " channels_last" if layout == torch.channels_last else ""
    return Workload(
        f"space_to_depth {'x'.join(map(str, shape))} {str(dtype)[6:]}{name}",
        lambda: OP(x),
        {"slices and cat": lambda: slices(x), "pixel_unshuffle": lambda: F.pixel_unshuffle(x, 2)}
        | ({"compiled": lambda: function(x)} if compiled else {}),
        bytes=2 * x.numel() * x.element_size(),
    )


def backward(shape: tuple[int, ...], dtype: torch.dtype) -> Workload:
    x = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        output = slices(x)
        grad = torch.randn_like(output)
    torch.cuda.synchronize()
    call = torch.ops.svexport.space_to_depth_backward
    return Workload(
        f"space_to_depth backward {'x'.join(map(str, shape))} {str(dtype)[6:]}",
        lambda: call([grad], x.detach(), [True]),
        {"slices and cat": lambda: torch.autograd.grad(output, x, grad, retain_graph=True)},
        bytes=2 * x.numel() * x.element_size(),
        goal=0.5,
    )


def workloads() -> Iterator[Workload]:
    for shape in ((1, 3, 640, 640), (8, 3, 640, 640), (6, 64, 232, 400)):
        for dtype in (torch.float16, torch.float32, torch.int8):
            for layout in (torch.contiguous_format, torch.channels_last):
                yield forward(shape, dtype, layout)
        yield backward(shape, torch.float16)


def sweep() -> Iterator[Workload]:
    for n in (1, 8):
        for c in (1, 3, 16, 100):
            for h, w in ((2, 2), (30, 50), (416, 416), (720, 1282)):
                for dtype in (torch.float16, torch.float32):
                    for layout in (torch.contiguous_format, torch.channels_last):
                        yield forward((n, c, h, w), dtype, layout, compiled=False)
                    yield backward((n, c, h, w), dtype)


def at_random(r: Random) -> Workload:
    shape = _random.drawn(
        lambda: (
            r.choice([1, 2, 8]),
            _random.count(r, 1, 128),
            2 * _random.count(r, 1, 600),
            2 * _random.count(r, 1, 600),
        ),
        lambda s: math.prod(s) < _random.LARGEST,
    )
    if r.random() < 0.4:
        return backward(shape, _random.dtype(r))
    return forward(shape, _random.dtype(r), _random.layout(r), compiled=False)
