from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.emulation import Kernels, emulated, in_memory, poisoned

pytestmark = emulated("solve")

TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def matrices(*batch: int, n: int) -> Tensor:
    """Far from singular, of any order of pivots."""
    orders = torch.rand(*batch, n).argsort(-1)
    return torch.randn(*batch, n, n) + (2 * n + 3) * torch.eye(n)[orders]


@pytest.mark.parametrize("n", range(1, 9))
def test_random_batches_and_layouts(kernels: Kernels, n: int) -> None:
    """Types as they come, batches that broadcast, and systems from the right: all transposed."""
    for dtype in TOLERANCES:
        for _ in range(3):
            batch = random.choice([[], [1], [random.randint(2, 30)], [3, random.randint(1, 20)], [2, 1, 5]])
            k = random.choice([1, 1, 2, 3, 15, 16, 17, 33])
            of_A, of_B = ([1 if random.random() < 0.2 else b for b in batch] for _ in range(2))
            batch = list(torch.broadcast_shapes(of_A, of_B))
            A = in_memory(matrices(*of_A, n=n).to(random.choice(list(TOLERANCES))))
            B = in_memory(torch.randn(*of_B, n, k).to(random.choice(list(TOLERANCES))))
            X = in_memory(poisoned(*batch, n, k, dtype=dtype))
            infos = poisoned(*of_A, dtype=torch.int32)
            info = infos.expand(batch) if random.random() < 0.7 else None
            views = A.expand(*batch, n, n), B.expand(*batch, n, k), X
            shown = " ".join(f"{t.dtype} {tuple(t.shape)} {t.stride()}" for t in views)
            assert kernels("solve", *views, info), shown
            expected = torch.linalg.solve(A.double(), B.double())
            error = (X.double() - expected).abs().max() / expected.abs().max()
            assert error < TOLERANCES[dtype], f"{shown}: {error}"
            assert info is None or not info.any(), shown
            left = matrices(*batch, n=n)
            Y = poisoned(*batch, k, n, dtype=dtype)
            assert kernels("solve", left.mT, B.expand(*batch, n, k), Y.mT, None), shown
            expected = torch.linalg.solve(left.double(), B.expand(*batch, n, k).double().mT, left=False)
            assert (Y.double() - expected).abs().max() / expected.abs().max() < TOLERANCES[dtype], shown


@pytest.mark.parametrize("n", range(1, 9))
def test_singular(kernels: Kernels, n: int) -> None:
    A = torch.randn(40, n, n) + 2 * n * torch.eye(n)
    A[3] = 0
    A[7, :, n - 1] = 0
    A[11, n // 2] = 0
    B = torch.randn(40, n, 19)
    X, info = poisoned(40, n, 19, dtype=A.dtype), poisoned(40, dtype=torch.int32)
    assert kernels("solve", A, B, X, info)
    expected, number = torch.linalg.solve_ex(A.double(), B.double())
    assert torch.equal(info, torch.linalg.inv_ex(A.double())[1])
    assert info.nonzero().flatten().tolist() == [3, 7, 11]
    assert X[info != 0].isnan().all()
    torch.testing.assert_close(X[info == 0].double(), expected[number == 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("batch", "k"), [((0,), 3), ((2, 0), 1), ((2,), 0)])
def test_empty(kernels: Kernels, batch: tuple[int, ...], k: int) -> None:
    X = torch.empty(*batch, 3, k)
    assert kernels("solve", torch.empty(*batch, 3, 3), X, X, None)


def test_larger_matrices_have_no_kernel(kernels: Kernels) -> None:
    A = torch.eye(9)
    assert not kernels("solve", A, A, torch.empty_like(A), None)
