from __future__ import annotations

import math
import random
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.emulation import PRODUCT_TOLERANCES, Kernels, Memory, check_product, emulated

pytestmark = emulated("channel_product")

CASES = pytest.mark.parametrize("dtype", PRODUCT_TOLERANCES, ids=str)
ALIGNED = pytest.mark.parametrize("aligned", [4, 2, 1])


def large(
    samples: int, channels: int, positions: int, dtype: torch.dtype, aligned: int, value: float | None = None
) -> Tensor:
    """Samples that begin at multiples of so many elements, with other channels between them."""
    skipped = random.choice([0, 0, 1])
    count = samples * (channels + skipped) * positions
    flat = (torch.randn(count + 24) if value is None else torch.full((count + 24,), value)).to(dtype)
    start = -flat.data_ptr() % 16 // flat.element_size() + random.choice([0, aligned])
    return flat[start : start + count].view(samples, channels + skipped, positions)[:, :channels]


def random_sizes(aligned: int) -> tuple[int, int, int, int]:
    channels = (random.choice([1, 3, 16, 17, 31, 64, 70, random.randint(1, 140)]) for _ in range(2))
    return random.randint(1, 3), *channels, aligned * random.choice([1, 5, 32, 33, random.randint(1, 200 // aligned)])


@CASES
@ALIGNED
def test_product(kernels: Kernels, dtype: torch.dtype, aligned: int) -> None:
    for count in (132, 2, 1):
        kernels.multiprocessors(count)
        n, c, d, s = random_sizes(aligned)
        x, z = large(n, c, s, dtype, aligned), large(n, d, s, dtype, aligned, math.nan)
        y = torch.randn(d, c).to(dtype).T if random.random() < 0.5 else torch.randn(c, d).to(dtype)
        shown = f"N{n} C{c} D{d} S{s}, {count} multiprocessors"
        assert kernels("channel_product", x, y, z), shown
        check_product(z, partial(torch.einsum, "ncs,cd->nds"), x, y, shown=shown)


@CASES
@ALIGNED
def test_correlation(kernels: Kernels, dtype: torch.dtype, aligned: int) -> None:
    for count in (132, 2, 1):
        kernels.multiprocessors(count)
        n, c, d, s = random_sizes(aligned)
        x, z = large(n, c, s, dtype, aligned), large(n, d, s, dtype, aligned)
        y = torch.full((c, d), math.nan, dtype=dtype)
        if random.random() < 0.5:
            y = torch.full((d, c), math.nan, dtype=dtype).T
        workspace = Memory.of(kernels.bytes("channel_correlation_workspace", x, z))
        shown = f"N{n} C{c} D{d} S{s}, {count} multiprocessors"
        assert kernels("channel_correlation", x, z, y, workspace), shown
        check_product(y, partial(torch.einsum, "ncs,nds->cd"), x, z, shown=shown)
