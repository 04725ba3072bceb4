from __future__ import annotations

import random

import pytest
import torch

from tests.emulation import Kernels, emulated, in_memory, poisoned

pytestmark = emulated("permute")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.int64], ids=str)
def test_random_shapes_and_layouts(kernels: Kernels, dtype: torch.dtype) -> None:
    for _ in range(60):
        shape = [random.choice([1, 2, 3, 5, 8, 12, 32]) for _ in range(random.randint(0, 8))]
        while torch.Size(shape).numel() > 20_000:
            shape.pop()
        if shape and random.random() < 0.1:
            shape[random.randrange(len(shape))] = 0
        x = in_memory(torch.randint(-100, 100, shape).to(dtype))
        if x.numel() and shape and random.random() < 0.1:
            x = x.narrow(random.randrange(len(shape)), 0, 1).expand(shape)
        output = in_memory(poisoned(*shape, dtype=dtype))
        shown = f"{shape} {x.stride()} {output.stride()}"
        assert kernels("permute", x, output), shown
        assert torch.equal(output, x), shown


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.int64], ids=str)
def test_transposed(kernels: Kernels, dtype: torch.dtype) -> None:
    """Tiles in shared memory, whole and in part, by elements and by words."""
    for _ in range(6):
        step = random.choice([1, 2, 4, 4])
        sizes = [step * random.randint(max(1, 8 // step), 200 // step) for _ in range(2)]
        x = in_memory(torch.randint(-100, 100, (random.randint(1, 3), *sizes)).to(dtype), order=False)
        output = poisoned(len(x), *sizes[::-1], dtype=dtype).transpose(1, 2)
        shown = f"{tuple(x.shape)} {x.stride()} {output.stride()}"
        assert kernels("permute", x, output), shown
        assert torch.equal(output, x), shown


def test_many_elements(kernels: Kernels) -> None:
    """Several for each thread."""
    x = torch.randint(-100, 100, (5, 117, 3, 41))
    output = poisoned(3, 5, 117, 83, dtype=x.dtype)[..., ::2][..., :41].permute(1, 2, 0, 3)
    assert kernels("permute", x, output)
    assert torch.equal(output, x)
