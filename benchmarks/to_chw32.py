"""``to_chw32`` and ``from_chw32`` beside the same as torch pads, permutes and copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from random import Random

import torch
from torch import Tensor

from benchmarks import _random
from benchmarks._measure import Workload
from svexport.ops.from_chw32 import OP as FROM
from svexport.ops.to_chw32 import OP


def workload(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format = torch.contiguous_format
) -> Workload:
    torch.compiler.reset()
    x = (torch.randn(shape, device="cuda") * 50).to(dtype).contiguous(memory_format=layout)
    packed = OP(x, False)
    ours: Callable[[], Tensor]
    if name == "from_chw32":
        function, arguments = FROM.reference, (packed, shape[1])
        ours, size = (lambda: FROM(packed, shape[1])), packed.numel() + x.numel()
    else:
        pool = name == "to_chw32 pool"
        function, arguments = OP.reference, (x, pool)
        ours, size = (lambda: OP(x, pool)), x.numel() + packed.numel() // (4 if pool else 1)
    peers = {"torch": lambda: function(*arguments)}
    suffix = " channels_last" if layout == torch.channels_last else ""
    return Workload(
        f"{name} {'x'.join(map(str, shape))} {str(dtype)[6:]}{suffix}", ours, peers, bytes=size * x.element_size()
    )


NAMES = ("to_chw32", "to_chw32 pool", "from_chw32")


def workloads() -> Iterator[Workload]:
    for dtype in (torch.int8, torch.float16, torch.float32):
        for name in NAMES:
            for shape in ((6, 256, 116, 200), (6, 256, 29, 50)):
                yield workload(name, shape, dtype)
        yield workload("to_chw32", (6, 256, 116, 200), dtype, torch.channels_last)


def sweep() -> Iterator[Workload]:
    for shape in (
        (1, 3, 2, 2),
        (1, 33, 15, 25),
        (6, 64, 72, 184),
        (1, 256, 200, 200),
        (2, 70, 31, 33),
        (8, 32, 256, 512),
    ):
        for dtype in (torch.int8, torch.float16, torch.float32):
            for name in NAMES:
                yield workload(name, shape, dtype)
                if name != "from_chw32":
                    yield workload(name, shape, dtype, torch.channels_last)


def at_random(r: Random) -> Workload:
    shape = _random.drawn(
        lambda: (r.choice([1, 2, 6]), *(_random.count(r, low, 300) for low in (1, 2, 2))),
        lambda s: math.prod(s) < _random.LARGEST,
    )
    name = r.choice(NAMES)
    layout = torch.contiguous_format if name == "from_chw32" else _random.layout(r)
    return workload(name, shape, r.choice([torch.int8, torch.float16, torch.float32]), layout)
