"""``quantize`` and ``dequantize`` beside their torch compositions, eager and compiled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

import torch
from torch import Tensor

from benchmarks import _random
from benchmarks._measure import Workload
from svexport.ops.dequantize import DTYPES
from svexport.ops.dequantize import OP as DEQUANTIZE
from svexport.ops.quantize import OP

NUMBERS = {dtype: number for number, dtype in DTYPES.items()}


def workload(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    axis: int | None = None,
    back: bool = False,
    layout: torch.memory_format = torch.contiguous_format,
    compiled: bool = True,
) -> Workload:
    torch.compiler.reset()
    x = torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=layout)
    scales: Tensor | None = None if axis is None else torch.rand(shape[axis], device="cuda") * 0.05 + 0.01
    op, last = (DEQUANTIZE, NUMBERS[dtype]) if back else (OP, True)
    arguments = ((x * 50).to(torch.int8) if back else x, 0.02, scales, axis or 0, last)
    compiled_peer = torch.compile(op.reference, dynamic=False)
    peers = {"torch": lambda: op.reference(*arguments)} | (
        {"compiled": lambda: compiled_peer(*arguments)} if compiled else {}
    )
    name = f"{op.name} {'x'.join(map(str, shape))} {str(dtype)[6:]}{'' if axis is None else f' axis {axis}'}"
    return Workload(
        name + (" channels_last" if layout == torch.channels_last else ""),
        lambda: op(*arguments),
        peers,
        bytes=x.numel() * (x.element_size() + 1),
    )


def workloads() -> Iterator[Workload]:
    for back in (False, True):
        for dtype in (torch.float16, torch.float32):
            for axis in (None, 1):
                yield workload((6, 256, 116, 200), dtype, axis, back)
        yield workload((6, 256, 116, 200), torch.float16, 1, back, torch.channels_last)
        yield workload((1, 900, 256), torch.float16, None, back)


def sweep() -> Iterator[Workload]:
    for back in (False, True):
        for shape in ((1, 3, 2, 2), (1, 33, 15, 25), (6, 64, 72, 184), (8, 64, 256, 512)):
            for dtype in (torch.float16, torch.float32):
                for axis in (None, 0, 1, 3):
                    yield workload(shape, dtype, axis, back, compiled=False)
                yield workload(shape, dtype, 1, back, torch.channels_last, compiled=False)


def at_random(r: Random) -> Workload:
    shape = _random.drawn(
        lambda: (r.choice([1, 2, 6]), *(_random.count(r, 1, 300) for _ in range(3))),
        lambda s: math.prod(s) < _random.LARGEST,
    )
    axis, back = r.choice([None, 0, 1, 3]), r.random() < 0.5
    return workload(shape, _random.dtype(r), axis, back, _random.layout(r), compiled=False)
