from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from svexport.ops.from_chw32 import OP as FROM
from svexport.ops.to_chw32 import OP
from tests.emulation import Kernels, emulated, in_memory, poisoned

pytestmark = emulated("to_chw32", "permute")

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def random_image(dtype: torch.dtype) -> Tensor:
    n, c = random.choice([1, 1, 2, 3]), random.choice([1, 5, 31, 32, 33, 70])
    h, w = random.choice([1, 2, 3, 7, 18]), random.choice([1, 2, 3, 7, 16, 23, 24])
    x = torch.randint(-100, 100, (n if random.random() > 0.05 else 0, c, h, w)).to(dtype)
    return in_memory(x) if random.random() < 0.6 else x


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.int64], ids=str)
def test_there_and_back(kernels: Kernels, dtype: torch.dtype) -> None:
    for _ in range(20):
        x = random_image(dtype)
        shown = f"{tuple(x.shape)} {x.stride()}"
        expected = OP.reference(x, False)
        packed = poisoned(*expected.shape, dtype=dtype)
        assert kernels("to_chw32", x, False, packed), shown
        assert torch.equal(packed, expected), shown
        if random.random() < 0.4:
            packed = in_memory(packed)
        back = poisoned(*x.shape, dtype=dtype)
        shown += f" from {packed.stride()}"
        assert kernels("from_chw32", packed, back), shown
        assert torch.equal(back, FROM.reference(packed, x.shape[1])), shown
        assert torch.equal(back, x), shown


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8], ids=str)
def test_pool(kernels: Kernels, dtype: torch.dtype) -> None:
    """Of NaN and infinity too."""
    for _ in range(20):
        x = random_image(dtype)
        if x.numel() and dtype.is_floating_point and random.random() < 0.5:
            for value in (torch.nan, torch.inf, -torch.inf):
                x.masked_fill_(torch.rand(x.shape) < 0.1, value)
        shown = f"{tuple(x.shape)} {x.stride()}"
        n, c, h, w = x.shape
        output = poisoned(n, -(-c // 32), h // 2, w // 2, 32, dtype=dtype)
        assert kernels("to_chw32", x, True, output), shown
        if output.numel():
            expected = OP.reference(x.contiguous().double(), True).to(dtype)
            assert torch.equal(output.isnan(), expected.isnan()), shown
            assert torch.equal(output.nan_to_num(123), expected.nan_to_num(123)), shown
