from __future__ import annotations

import pytest
import torch

from svexport.ops import solve
from svexport.ops.solve import OP
from svexport.ops.solve_ex import OP as EX
from tests.gpu.support import check_kernel, gpu, moved, relative_error
from tests.ops.test_inverse import MATRICES

pytestmark = gpu


def matrices(*batch: int, n: int) -> torch.Tensor:
    return (torch.randn(*batch, n, n) + 2 * n * torch.eye(n)).flip(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", range(1, 10))
def test_sizes(n: int, dtype: torch.dtype) -> None:
    """Up to 8 by the kernel, 9 by the reference."""
    A = matrices(3, 67, n=n).to(dtype)
    for columns in (1, 3, 16, 33):
        B = torch.randn(3, 67, n, columns).to(dtype)
        check_kernel(OP, (A, B, n, True, False))
        check_kernel(OP, (A, B.mT.contiguous(), n, False, False))
    check_kernel(OP, (A, torch.randn(3, 67, n).to(dtype), n, True, True))
    check_kernel(OP, (A[0, 0], torch.randn(n).to(dtype), n, True, True))


def test_batches_broadcast() -> None:
    for a, b in (((2, 1), (1, 5)), ((), (7,)), ((4, 3), ()), ((1,), (6,))):
        check_kernel(OP, (matrices(*a, n=4), torch.randn(*b, 4, 2), 4, True, False))
        check_kernel(EX, (matrices(*a, n=3), torch.randn(*b, 2, 3), 3, False, False), gradients=False)


@pytest.mark.parametrize("name", MATRICES)
def test_accuracy(name: str) -> None:
    """As exact as float32 can say: the computation is in float64, whatever the condition."""
    A = MATRICES[name][0]().float()
    B = torch.randn(len(A), A.shape[-1], 3)
    expected = torch.linalg.solve(A.double(), B.double())
    assert relative_error(solve(A.cuda(), B.cuda()), expected) < 2e-7


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("n", range(1, 9))
def test_singular(n: int, left: bool) -> None:
    A = torch.randn(40, n, n) + 2 * n * torch.eye(n)
    A[3] = 0
    A[7, :, n - 1] = 0
    A[11, n // 2] = 0
    B = torch.randn(40, n, n)
    expected, info = EX.reference(A.double(), B.double(), n, left, False)
    actual, number = EX(A.cuda(), B.cuda(), n, left, False)
    assert torch.equal(number.cpu() != 0, info != 0)
    assert int((number != 0).sum()) == 3
    assert number.min() == 0
    assert number.max() <= n
    assert actual[number != 0].isnan().all()
    assert relative_error(actual[number == 0], expected[info == 0]) < 1e-6


def test_strides() -> None:
    A, B = matrices(5, 7, n=4).cuda(), torch.randn(5, 7, 4, 6).cuda()
    expected = torch.linalg.solve(*moved((A, B), "cpu", torch.float64))
    for a in (A, A.mT.contiguous().mT, A.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)):
        for b in (B, B.mT.contiguous().mT, torch.cat([B, B], -1)[..., :6]):
            assert relative_error(solve(a, b), expected) < 1e-6
