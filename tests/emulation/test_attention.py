from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F

from tests.emulation import Kernels, Memory, emulated

pytestmark = emulated("attention")

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, range(1, 64)], ids=str)
def test_random_queries(kernels: Kernels, dtype: torch.dtype, head_dim: int | range) -> None:
    for queries in (1, 64, random.randint(2, 63), random.randint(65, 150)):
        of_head = head_dim if isinstance(head_dim, int) else random.choice(head_dim)
        batch, heads = random.randint(1, 2), random.randint(1, 2)
        size = batch * queries * 3 * heads * of_head
        flat = torch.randn(size + 16).to(dtype)
        start = -flat.data_ptr() % 16 // flat.element_size() + random.choice([0, 0, 0, 1])
        qkv = flat[start : start + size].view(batch, queries, 3, heads, of_head)
        output = torch.full((batch, queries, heads, of_head), math.nan, dtype=dtype)
        given = map(Memory.within, (qkv, output))
        shown = f"batch {batch}, {queries} queries, {heads} heads of {of_head}, from {start}"
        assert kernels("attention", *given, batch, queries, heads, of_head, list(TOLERANCES).index(dtype)), shown
        q, k, v = qkv.double().permute(2, 0, 3, 1, 4)
        expected = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        error = (output.double() - expected).abs().max()
        assert error < TOLERANCES[dtype], f"{shown}: {error}"


def test_what_there_is_no_kernel_for(kernels: Kernels) -> None:
    memory = Memory.of(3 * 65 * 4)
    assert not kernels("attention", memory, memory, 1, 1, 1, 65, 0)
