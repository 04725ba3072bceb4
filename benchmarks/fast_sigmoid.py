"""``fast_sigmoid`` beside its own composition, eager and compiled, and ``torch.sigmoid``, which it approximates."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import torch

from benchmarks import _random
from benchmarks._measure import Workload
from svexport.ops.fast_sigmoid import OP


def workload(count: int, dtype: torch.dtype, backward: bool = False, compiled: bool = True) -> Workload:
    torch.compiler.reset()
    x, grad = torch.randn(2, count, device="cuda", dtype=dtype)
    if backward:
        leaf = x.clone().requires_grad_()
        with torch.cuda.stream(torch.cuda.Stream()):
            output, y = OP.reference(leaf), torch.sigmoid(x)
        torch.cuda.synchronize()
        return Workload(
            f"fast_sigmoid backward {count} {str(dtype)[6:]}",
            lambda: torch.ops.svexport.fast_sigmoid_backward([grad], x, [True]),
            {
                "torch": lambda: torch.autograd.grad(output, leaf, grad, retain_graph=True),
                "torch.sigmoid": lambda: torch.ops.aten.sigmoid_backward(grad, y),
            },
            bytes=3 * count * dtype.itemsize,
            goal=0.5,
        )
    function = torch.compile(OP.reference, dynamic=False)
    return Workload(
        f"fast_sigmoid {count} {str(dtype)[6:]}",
        lambda: OP(x),
        {"torch": lambda: OP.reference(x)}
        | ({"compiled": lambda: function(x)} if compiled else {})
        | {"torch.sigmoid": lambda: torch.sigmoid(x)},
        bytes=2 * count * dtype.itemsize,
    )


def workloads() -> Iterator[Workload]:
    for count in (900 * 256, 6 * 256 * 116 * 200):
        for dtype in (torch.float16, torch.float32):
            yield workload(count, dtype)
            yield workload(count, dtype, backward=True)


def sweep() -> Iterator[Workload]:
    for power in range(0, 28, 2):
        for count in (1 << power, (1 << power) + 3):
            for dtype in (torch.float16, torch.float32):
                for backward in (False, True):
                    yield workload(count, dtype, backward, compiled=False)


def at_random(r: Random) -> Workload:
    return workload(_random.count(r, 1, int(_random.LARGEST)), _random.dtype(r), r.random() < 0.5, compiled=False)
