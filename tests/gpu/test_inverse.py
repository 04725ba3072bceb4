from __future__ import annotations

import pytest
import torch

from svexport.ops.inverse import OP
from svexport.ops.inverse_ex import OP as EX
from tests.gpu.support import TOLERANCES, check_kernel, gpu, moved, relative_error
from tests.ops.test_inverse import MATRICES, lidar2img
from tests.ops.test_inverse import relative_error as matrix_error

pytestmark = gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("batch", [(), (1,), (6,), (3, 701)])
def test_sizes(batch: tuple[int, ...], n: int, dtype: torch.dtype) -> None:
    A = (torch.randn(*batch, n, n) + (2 * n + 3) * torch.eye(n)).flip(-1).to(dtype)
    check_kernel(OP, (A, n))
    check_kernel(EX, (A, n))


@pytest.mark.parametrize("name", MATRICES)
def test_accuracy(name: str) -> None:
    """As exact as float32 can say: the computation is in float64, whatever the condition."""
    A = MATRICES[name][0]().float()
    assert matrix_error(OP(A.cuda(), A.shape[-1]).cpu(), torch.linalg.inv(A.double())) < 2e-7


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_every_order_of_pivots(n: int) -> None:
    A = torch.stack([torch.eye(n)[torch.randperm(n)] * (torch.rand(n, 1) + 0.5) for _ in range(500)])
    A = A + 1e-3 * torch.randn(500, n, n)
    check_kernel(OP, (A, n))


@pytest.mark.parametrize("n", range(1, 9))
def test_singular(n: int) -> None:
    A = torch.randn(40, n, n) + 2 * n * torch.eye(n)
    A[3] = 0
    A[7, :, n - 1] = 0
    A[11, n // 2] = 0
    if n > 1:
        A[13, n - 1] = A[13, 0]
    expected, info = EX.reference(A.double(), n)
    actual, number = EX(A.cuda(), n)
    singular = torch.zeros(40, dtype=torch.bool)
    singular[[3, 7, 11, *([13] if n > 1 else [])]] = True
    assert torch.equal(number.cpu() != 0, singular)
    clear = info != 0  # of two equal rows rounding on the CPU may leave a difference
    assert torch.equal(number.cpu()[clear], info[clear])
    assert actual[singular.cuda()].isnan().all()
    assert relative_error(actual[~singular.cuda()], expected[~singular]) < 1e-6
    assert torch.equal(OP(A.cuda(), n).isnan(), actual.isnan())


def test_nan_is_no_singularity() -> None:
    A = torch.eye(3).repeat(5, 1, 1)
    A[2, 1, 1] = torch.nan
    actual, info = EX(A.cuda(), 3)
    assert not info.any()
    assert actual[2].isnan().any()
    assert torch.equal(actual[[0, 1, 3, 4]].cpu(), A[[0, 1, 3, 4]])


def test_strides() -> None:
    A = (torch.randn(5, 7, 4, 4) + 8 * torch.eye(4)).cuda()
    expected = torch.linalg.inv(A.cpu().double())
    for variant in (
        A.transpose(-1, -2).contiguous().transpose(-1, -2),
        A.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
        A.transpose(0, 1).contiguous().transpose(0, 1),
        torch.cat([A, A], -1)[..., :4],
    ):
        assert relative_error(OP(variant, 4), expected) < 1e-6
    one = A[:1, :1].expand(5, 7, 4, 4)
    assert relative_error(OP(one, 4), expected[:1, :1].expand(5, 7, 4, 4)) < 1e-6


def test_gradient_of_camera_matrices() -> None:
    A = lidar2img(6).float()
    check_kernel(OP, (A[None], 4))


@pytest.mark.parametrize("n", [9, 16])
def test_larger_matrices_run_the_reference(n: int) -> None:
    check_kernel(OP, (torch.randn(3, n, n) + 2 * n * torch.eye(n), n))


@pytest.mark.large
def test_a_million() -> None:
    A = torch.randn(2**20 + 3, 4, 4, device="cuda") + 8 * torch.eye(4, device="cuda")
    assert relative_error(OP(A, 4), torch.linalg.inv(moved(A, torch.float64))) < TOLERANCES[torch.float32]
