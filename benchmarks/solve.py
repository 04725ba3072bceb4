"""``solve`` beside ``torch.linalg.solve_ex``, which unlike ``torch.linalg.solve`` does not wait for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import torch

from benchmarks import _random
from benchmarks._measure import Workload
from svexport.ops.solve import OP


def workload(batch: int, n: int, columns: int, left: bool = True) -> Workload:
    A = torch.randn(batch, n, n, device="cuda") + 2 * n * torch.eye(n, device="cuda")
    B = torch.randn(batch, *((n, columns) if left else (columns, n)), device="cuda")
    peers = {"torch.linalg.solve_ex": lambda: torch.linalg.solve_ex(A, B, left=left)}
    capturable = columns <= 4  # beyond, torch leaves it to a library that no graph can capture
    return Workload(
        f"solve {batch}x{n}x{n} {columns} columns{'' if left else ' right'}",
        lambda: OP(A, B, n, left, False),
        peers if capturable else {},
        bytes=(A.numel() + 2 * B.numel()) * 4,
        eager={} if capturable else peers,
    )


def workloads() -> Iterator[Workload]:
    for batch, n, columns in ((6, 4, 4), (1000, 4, 1), (100_000, 3, 3), (6, 4, 900)):
        yield workload(batch, n, columns)


def sweep() -> Iterator[Workload]:
    for batch in (1, 6, 1000, 100_000):
        for n in (1, 2, 3, 4, 6, 8):
            for columns in (1, 2, 4):
                yield workload(batch, n, columns, left=columns != 2)


def at_random(r: Random) -> Workload:
    return workload(_random.count(r, 1, 200_000), r.randint(1, 8), r.randint(1, 4), r.random() < 0.5)
