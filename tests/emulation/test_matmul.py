from __future__ import annotations

import math
import random
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.emulation import PRODUCT_TOLERANCES, Kernels, Memory, check_product, emulated

pytestmark = emulated("matmul")


def matrices(count: int, rows: int, columns: int, dtype: torch.dtype, along_rows: bool) -> Tensor:
    """Some that have neighbours along columns, or rows, in memory, with or without gaps, aligned or not."""
    if along_rows:
        return matrices(count, columns, rows, dtype, False).transpose(1, 2)
    skipped, start = random.choice([(0, 0), (0, 0), (0, random.randint(1, 9)), (random.randint(1, 9), 0)])
    flat = torch.randn(start + count * rows * (columns + skipped)).to(dtype)
    return flat[start:].view(count, rows, columns + skipped)[..., :columns]


def product(count: int, a: Tensor, b: Tensor, bias: Tensor | None, before: Tensor | None) -> Tensor:
    """Of so many matrices, a's and b's in turn; added to what was there before."""
    sums = a.repeat(count // len(a), 1, 1) @ b.repeat(count // len(b), 1, 1)
    sums = sums if before is None else sums + before
    return sums if bias is None else sums + bias.view(len(a), -1, 1).repeat(count // len(a), 1, 1)


@pytest.mark.parametrize("dtype", PRODUCT_TOLERANCES, ids=str)
@pytest.mark.parametrize("b_along_k", [False, True])
def test_random_matrices(kernels: Kernels, dtype: torch.dtype, b_along_k: bool) -> None:
    for count in (132, 132, 4, 2, 1):
        kernels.multiprocessors(count)
        of_a, of_b, times = random.randint(1, 2), random.randint(1, 3), random.choice([1, 1, 2])
        both = math.lcm(of_a, of_b) * times
        m, n = (random.choice([1, 8, 33, 64, 70, random.randint(1, 140)]) for _ in range(2))
        k = random.choice([1, 7, 32, 64, 100, random.randint(1, 200), 700])
        a = matrices(of_a, m, k, dtype, dtype == torch.float32 and random.random() < 0.5)
        b = matrices(of_b, k, n, dtype, b_along_k)
        bias = torch.randn(of_a * m).to(random.choice([dtype, torch.float32])) if random.random() < 0.5 else None
        start, behind = random.choice([(0, 0), (2, 6), (random.randint(0, 9), random.randint(0, 9))])
        rows = torch.full((both, m, start + n + behind), math.nan, dtype=dtype)
        c = rows[..., start : start + n]
        every = kernels.bytes("matmul_workspace")
        workspace = Memory.of(random.choice([every, kernels.bytes("matmul_partials", a, c)]))
        assert workspace.tensor.numel() <= every
        shown = f"{of_a}x{m}x{k}{a.stride()} {of_b}x{k}x{n}{b.stride()} {c.stride()} {count} multiprocessors"
        add = random.random() < 0.3
        if add:
            c.normal_()
        before = c.clone() if add else None
        assert kernels("matmul", a, b, bias, c, add, workspace), shown
        check_product(c, partial(product, both), a, b, bias, before, shown=shown)
        c.fill_(math.nan)
        assert rows.isnan().all(), f"wrote between rows: {shown}"
