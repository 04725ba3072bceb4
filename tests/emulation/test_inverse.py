from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from svexport.ops.inverse_ex import OP as EX
from tests.emulation import Kernels, emulated, in_memory, poisoned

pytestmark = emulated("inverse")

TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
SIZES = pytest.mark.parametrize("n", range(1, 9))


def random_batch() -> list[int]:
    return random.choice([[], [1], [random.randint(2, 90)], [3, random.randint(1, 40)], [2, 1, 5]])


def in_order_of_pivots(*batch: int, n: int) -> Tensor:
    """Any, of matrices that are far from singular."""
    orders = torch.rand(*batch, n).argsort(-1)
    return torch.randn(*batch, n, n) + (2 * n + 3) * torch.eye(n)[orders]


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).abs().max() / expected.abs().max())


@DTYPES
@SIZES
def test_values_and_gradients(kernels: Kernels, n: int, dtype: torch.dtype) -> None:
    for _ in range(3):
        batch = random_batch()
        A = in_memory(in_order_of_pivots(*batch, n=n).to(dtype))
        grad = in_memory(torch.randn(*batch, n, n).to(dtype))
        output, grad_A = (poisoned(*A.shape, dtype=dtype) for _ in range(2))
        info = poisoned(*batch, dtype=torch.int32) if random.random() < 0.5 else None
        shown = f"{tuple(A.shape)} {A.stride()} {grad.stride()}"
        assert kernels("inverse", A, output, info), shown
        assert kernels("inverse_backward", grad, A, grad_A), shown
        same = A.double().requires_grad_()
        expected = torch.linalg.inv(same)
        (wanted,) = torch.autograd.grad(expected, same, grad.double())
        assert error(output, expected.detach()) < TOLERANCES[dtype], shown
        assert error(grad_A, wanted) < TOLERANCES[dtype], shown
        assert info is None or not info.any(), shown


@SIZES
def test_singular(kernels: Kernels, n: int) -> None:
    A = torch.randn(40, n, n) + 2 * n * torch.eye(n)
    A[3] = 0
    A[7, :, n - 1] = 0
    A[11, n // 2] = 0
    if n > 1:
        A[13, n - 1] = A[13, 0]
    output, info = poisoned(40, n, n, dtype=A.dtype), poisoned(40, dtype=torch.int32)
    assert kernels("inverse", A, output, info)
    singular = torch.zeros(40, dtype=torch.bool)
    singular[[3, 7, 11, *([13] if n > 1 else [])]] = True
    assert torch.equal(info != 0, singular)
    expected, number = EX.reference(A.double(), n)
    clear = number != 0  # of two equal rows rounding in torch may leave a difference
    assert torch.equal(info[clear], number[clear])
    assert output[singular].isnan().all()
    assert error(output[~singular], expected[~singular]) < 1e-6


@pytest.mark.parametrize("condition", [1e3, 1e6])
@pytest.mark.parametrize("n", [2, 4, 7])
def test_as_exact_as_float32_can_say(kernels: Kernels, n: int, condition: float) -> None:
    left, right = (torch.linalg.qr(torch.randn(50, n, n, dtype=torch.float64))[0] for _ in range(2))
    A = (left * torch.logspace(0, -torch.tensor(condition).log10(), n, dtype=torch.float64) @ right).float()
    output = poisoned(50, n, n, dtype=A.dtype)
    assert kernels("inverse", A, output, None)
    expected = torch.linalg.inv(A.double())
    assert max(error(o, e) for o, e in zip(output, expected, strict=True)) < 2e-7


def test_nan_is_no_singularity(kernels: Kernels) -> None:
    A = torch.eye(3).repeat(5, 1, 1)
    A[2, 1, 1] = torch.nan
    output, info = torch.zeros(5, 3, 3), poisoned(5, dtype=torch.int32)
    assert kernels("inverse", A, output, info)
    assert not info.any()
    assert output[2].isnan().any()
    assert torch.equal(output[[0, 1, 3, 4]], A[[0, 1, 3, 4]])


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 4, 4)])
def test_empty(kernels: Kernels, shape: tuple[int, ...]) -> None:
    A = torch.empty(shape)
    assert kernels("inverse", A, torch.empty(shape), torch.empty(shape[:-2], dtype=torch.int32))
    assert kernels("inverse_backward", A, A, torch.empty(shape))


def test_larger_matrices_have_no_kernel(kernels: Kernels) -> None:
    A = torch.eye(9)
    assert not kernels("inverse", A, torch.empty_like(A), None)
