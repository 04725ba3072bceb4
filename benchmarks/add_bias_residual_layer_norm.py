"""``add_bias_residual_layer_norm`` beside its composition: ``F.layer_norm`` and additions, eager and compiled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import _random
from benchmarks._measure import Workload
from svexport.ops.add_bias_residual_layer_norm import OP

BANDWIDTH = 4.3e6  # bytes per microsecond that an H200 copies, reads and writes together
EMPTY = 4.4  # microseconds of an empty kernel


def composition(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, norm_bias: Tensor, eps: float, extra: Tensor | None
) -> tuple[Tensor, Tensor]:
    s = x + bias + residual
    if extra is not None:
        s = s + extra
    return F.layer_norm(s, weight.shape, weight, norm_bias, eps), s


def problem(rows: int, d: int, dtype: torch.dtype, extra: bool) -> tuple:
    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    args = make(rows, d), make(d), make(rows, d), make(d), make(d)
    return *args, 1e-5, make(rows, d) if extra else None


def forward(rows: int, d: int, dtype: torch.dtype, extra: bool, compiled: bool = True) -> Workload:
    args = problem(rows, d, dtype, extra)
    peers: dict[str, Callable] = {"F.layer_norm + adds": lambda: composition(*args)}
    if compiled:
        torch.compiler.reset()
        function = torch.compile(composition, dynamic=False)
        peers["compiled"] = lambda: function(*args)
    size = (4 + extra) * rows * d * dtype.itemsize
    return Workload(
        f"add_bias_residual_layer_norm {rows}x{d} {str(dtype)[6:]}{' extra' if extra else ''}",
        lambda: OP(*args),
        peers,
        bytes=size,
        limit=1.3 * (size / BANDWIDTH + EMPTY) if compiled else None,
    )


def backward(rows: int, d: int, dtype: torch.dtype, extra: bool, compiled: bool = True) -> Workload:
    args = problem(rows, d, dtype, extra)
    leaves = [t.requires_grad_() for t in args if isinstance(t, Tensor)]
    grads = [torch.randn_like(leaves[0]) for _ in range(2)]
    call = torch.ops.svexport.add_bias_residual_layer_norm_backward
    detached = [t.detach() if isinstance(t, Tensor) else t for t in args]

    def of(function: Callable) -> Callable:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # so that no default stream takes part in the backward
            outputs = function(*args)
        torch.cuda.synchronize()
        return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)

    peers = {"F.layer_norm + adds": of(composition)}
    if compiled:
        torch.compiler.reset()
        peers["compiled"] = of(torch.compile(composition, dynamic=False))
    return Workload(
        f"add_bias_residual_layer_norm backward {rows}x{d} {str(dtype)[6:]}{' extra' if extra else ''}",
        lambda: call(grads, *detached, [True] * len(leaves)),
        peers,
        bytes=(6 + 2 * extra) * rows * d * dtype.itemsize,
        goal=0.5 if compiled else None,
    )


def workloads() -> Iterator[Workload]:
    for rows in (900, 40000):
        for dtype in (torch.float16, torch.float32):
            for extra in (False, True):
                yield forward(rows, 256, dtype, extra)
                yield backward(rows, 256, dtype, extra)


def sweep() -> Iterator[Workload]:
    for rows in (1, 100, 900, 6000, 40000, 200000):
        for d in (64, 100, 256, 511, 512, 768, 1024, 2048, 4096):
            if rows * d > 2**27:
                continue
            for dtype in (torch.float16, torch.float32):
                yield forward(rows, d, dtype, False, compiled=False)
                yield backward(rows, d, dtype, False, compiled=False)


def at_random(r: Random) -> Workload:
    rows, d = _random.drawn(
        lambda: (_random.count(r, 1, 200_000), _random.size(r, 8, 12_000)), lambda s: math.prod(s) < _random.LARGEST
    )
    return r.choice([forward, backward])(rows, d, _random.dtype(r), r.random() < 0.4, compiled=False)
