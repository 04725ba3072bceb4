from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from svexport.ops.fast_sigmoid import OP
from tests.emulation import Kernels, emulated, in_memory, poisoned

pytestmark = emulated("fast_sigmoid")

TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def check(kernels: Kernels, x: Tensor, grad: Tensor) -> None:
    shown = f"{x.dtype} {tuple(x.shape)} {x.stride()} {grad.stride()}"
    same = x.double().requires_grad_()
    expected = OP.reference(same)
    (expected_grad,) = torch.autograd.grad(expected, same, grad.double())
    output, grad_x = (torch.empty_like(x).copy_(poisoned(*x.shape, dtype=x.dtype)) for _ in range(2))
    if random.random() < 0.2:
        output, grad_x = in_memory(output), in_memory(grad_x)
    assert kernels("fast_sigmoid", x, output), shown
    assert kernels("fast_sigmoid_backward", grad, x, grad_x), shown
    for actual, wanted in ((output, expected.detach()), (grad_x, expected_grad)):
        tolerance = TOLERANCES[x.dtype]
        torch.testing.assert_close(actual.double(), wanted, rtol=2 * tolerance, atol=tolerance, msg=shown)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_random_shapes_and_layouts(kernels: Kernels, dtype: torch.dtype) -> None:
    for _ in range(40):
        shape = [random.choice([1, 2, 3, 5, 7, 16]) for _ in range(random.randint(0, 4))]
        if shape and random.random() < 0.2:
            shape[random.randrange(len(shape))] = random.choice([0, 129])
        x, grad = ((torch.randn(shape) * 4).to(dtype) for _ in range(2))
        if random.random() < 0.7:
            x = in_memory(x)
        if random.random() < 0.3:
            grad = in_memory(grad)
        check(kernels, x, grad)


def test_large(kernels: Kernels) -> None:
    """Enough for blocks that read several vectors before they write, and a rest."""
    check(kernels, torch.randn(1_030_003), torch.randn(1_030_003))


def test_limits(kernels: Kernels) -> None:
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1e-40])
    output = torch.full_like(x, 77)
    assert kernels("fast_sigmoid", x, output)
    assert torch.equal(output.nan_to_num(7), OP.reference(x).nan_to_num(7))
