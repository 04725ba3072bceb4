from __future__ import annotations

import random

import pytest
import torch

from svexport.ops.space_to_depth import OP
from tests.emulation import Kernels, emulated, in_memory

pytestmark = emulated("space_to_depth", "permute")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.int64], ids=str)
def test_random_shapes_and_layouts(kernels: Kernels, dtype: torch.dtype) -> None:
    for _ in range(25):
        n, c, h, w = random.randint(1, 3), random.randint(1, 40), 2 * random.randint(1, 12), 2 * random.randint(1, 40)
        x = torch.randint(-100, 100, (n, c, h, w)).to(dtype)
        output = torch.full((n, 4 * c, h // 2, w // 2), 77, dtype=dtype)
        x, output = (
            t.contiguous(memory_format=random.choice([torch.channels_last, torch.contiguous_format]))
            for t in (x, output)
        )
        if random.random() < 0.5:
            x, output = in_memory(x, order=False), in_memory(output, order=False)
        shown = f"{tuple(x.shape)} {x.stride()} {output.stride()}"
        assert kernels("space_to_depth", x, output), shown
        assert torch.equal(output, OP.reference(x)), shown
        back = in_memory(torch.full_like(x, 77), order=False)
        assert kernels("depth_to_space", output, back), shown
        assert torch.equal(back, x), shown
