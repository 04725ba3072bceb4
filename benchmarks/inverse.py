"""``inverse`` beside ``torch.linalg.inv_ex``, which unlike ``torch.linalg.inv`` does not wait for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import torch

from benchmarks import _random
from benchmarks._measure import Workload
from svexport.ops.inverse import OP


def forward(batch: int, n: int, eager: bool = True) -> Workload:
    A = torch.randn(batch, n, n, device="cuda") + 2 * n * torch.eye(n, device="cuda")
    return Workload(
        f"inverse {batch}x{n}x{n}",
        lambda: OP(A, n),
        {"torch.linalg.inv_ex": lambda: torch.linalg.inv_ex(A)},
        bytes=2 * A.numel() * 4,
        goal=0.5,
        eager={"torch.linalg.inv (eager)": lambda: torch.linalg.inv(A)} if eager else {},
    )


def backward(batch: int, n: int) -> Workload:
    A = (torch.randn(batch, n, n, device="cuda") + 2 * n * torch.eye(n, device="cuda")).requires_grad_()
    with torch.cuda.stream(torch.cuda.Stream()):
        inverse = torch.linalg.inv_ex(A)[0]
        grad = torch.randn_like(inverse)
    torch.cuda.synchronize()
    call = torch.ops.svexport.inverse_backward
    return Workload(
        f"inverse backward {batch}x{n}x{n}",
        lambda: call([grad], A.detach(), n, [True]),
        {"torch.linalg.inv_ex": lambda: torch.autograd.grad(inverse, A, grad, retain_graph=True)},
        bytes=3 * A.numel() * 4,
        # The peer has the inverse from the forward, and its two products take little more than two empty kernels.
        goal=0.5 if batch > 100 else 1.0,
    )


def workloads() -> Iterator[Workload]:
    for batch in (6, 1000, 1_000_000):
        for n in (3, 4, 8):
            yield forward(batch, n)
            yield backward(batch, n)


def sweep() -> Iterator[Workload]:
    for batch in (1, 6, 100, 3000, 100_000):
        for n in range(1, 9):
            yield forward(batch, n, eager=False)
            yield backward(batch, n)


def at_random(r: Random) -> Workload:
    batch, n = _random.count(r, 1, 200_000), r.randint(1, 8)
    return backward(batch, n) if r.random() < 0.5 else forward(batch, n, eager=False)
