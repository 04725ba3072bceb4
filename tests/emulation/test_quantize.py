from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from svexport.ops.dequantize import DTYPES
from svexport.ops.dequantize import OP as DEQUANTIZE
from svexport.ops.quantize import OP
from tests.emulation import Kernels, emulated, in_memory, poisoned

pytestmark = emulated("quantize")

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
NUMBERS = {dtype: number for number, dtype in DTYPES.items()}


def random_scales(shape: tuple[int, ...]) -> tuple[float, Tensor | None, int]:
    kind = random.choice(["number", "one", "several", "several"] if shape else ["number", "one"])
    if kind == "number":
        return float(torch.rand(()) * 0.05 + 1e-3), None, 0
    axis = random.randrange(len(shape)) if kind == "several" else 0
    return 1.0, torch.rand(shape[axis] if kind == "several" else ()) * 0.05 + 1e-3, axis


def like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Mostly of the same strides, as far as these are dense; otherwise of any."""
    output = torch.empty_like(x, dtype=dtype)
    output.copy_(poisoned(*x.shape, dtype=dtype))
    return output if random.random() < 0.7 else in_memory(output)


def check(kernels: Kernels, x: Tensor, scale: float, scales: Tensor | None, axis: int, restricted: bool) -> None:
    shown = f"{x.dtype} {tuple(x.shape)} {x.stride()} scales {None if scales is None else scales.shape} axis {axis}"
    q = like(x, torch.int8)
    expected = OP.reference(x, scale, scales, axis, restricted)
    assert kernels("quantize", x, scale, scales, axis, restricted, q), shown
    assert torch.equal(q, expected), shown
    for dtype in NUMBERS:
        if dtype != torch.float64:
            output = like(q, dtype)
            assert kernels("dequantize", q, scale, scales, axis, output), shown
            assert torch.equal(output, DEQUANTIZE.reference(q, scale, scales, axis, NUMBERS[dtype])), shown


@FLOATS
def test_random_shapes_and_layouts(kernels: Kernels, dtype: torch.dtype) -> None:
    for _ in range(40):
        shape = [random.choice([1, 2, 3, 5, 7, 16, 33]) for _ in range(random.randint(0, 5))]
        if math.prod(shape) > 8000 or random.random() < 0.1:
            shape = shape[:2]
        if shape and random.random() < 0.2:
            shape[random.randrange(len(shape))] = random.choice([0, 129, 517])
        x = in_memory((torch.randn(shape) * 2).to(dtype))
        check(kernels, x, *random_scales(x.shape), random.random() < 0.5)


def test_large(kernels: Kernels) -> None:
    """Enough for blocks that read several vectors before they write, and a rest; scales that change within vectors."""
    x = torch.randn(3, 7, 51_213)
    scales = torch.rand(7) * 0.05 + 1e-3
    q, back = poisoned(*x.shape, dtype=torch.int8), poisoned(*x.shape, dtype=torch.float32)
    assert kernels("quantize", x, 1.0, scales, 1, True, q)
    assert torch.equal(q, OP.reference(x, 1.0, scales, 1, True))
    assert kernels("dequantize", q, 0.037, None, 0, back)
    assert torch.equal(back, DEQUANTIZE.reference(q, 0.037, None, 0, 1))


def test_ties_and_neighbours_of_ties(kernels: Kernels) -> None:
    """The quotient is rounded to float32 before it is rounded to an integer: x next to (k + 1/2) * scale."""
    exponents = torch.randint(-30, 30, (200,))
    scales = torch.cat([torch.rand(200) * 10.0**exponents, torch.tensor([1e-38, 1e-42, 1e38, 0.1])])
    x = scales[:, None] * (torch.arange(-130, 130) + 0.5)
    for near in (x, x.nextafter(torch.tensor(math.inf)), x.nextafter(torch.tensor(-math.inf))):
        q = poisoned(*x.shape, dtype=torch.int8)
        assert kernels("quantize", near, 1.0, scales, 0, False, q)
        assert torch.equal(q, OP.reference(near, 1.0, scales, 0, False))


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 0.02, 1e30, 3e38])
def test_far_beyond_the_range(kernels: Kernels, scale: float) -> None:
    x = torch.tensor([math.inf, -math.inf, 3.4e38, -3.4e38, 1e-45, -1e-45, 0.0, -0.0, 1e-38, 65504.0])
    for restricted in (False, True):
        q = poisoned(10, dtype=torch.int8)
        assert kernels("quantize", x, scale, None, 0, restricted, q)
        assert torch.equal(q, OP.reference(x, scale, None, 0, restricted))
