from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport.ops.solve import OP, Solve, is_vector, solve
from tests.ops.test_inverse import MATRICES
from tests.support import OPSETS, exported, run_op

SHAPES = {  # of A and B, and whether A stands on the left
    "matrix": ((2, 4, 4), (2, 4, 3), True),
    "vectors": ((2, 4, 4), (2, 4), True),
    "one vector": ((4, 4), (4,), True),
    "one vector for every matrix": ((2, 4, 4), (4,), True),
    "right": ((2, 4, 4), (2, 3, 4), False),
    "broadcast": ((5, 1, 3, 3), (2, 3, 2), True),
    "broadcast right": ((3, 3), (2, 1, 2, 3), False),
    "matrix that could be vectors": ((3, 3), (3, 3), True),
    "4-D batch": ((2, 1, 3, 2, 2, 2), (3, 1, 2, 1), True),
    "empty batch": ((0, 3, 3), (0, 3, 2), True),
    "no columns": ((2, 3, 3), (2, 3, 0), True),
    "1x1": ((1, 1), (1, 7), True),
    "8x8": ((3, 8, 8), (3, 8, 2), True),
}


def operands(name: str) -> tuple[Tensor, Tensor, bool]:
    torch.manual_seed(0)
    shape_a, shape_b, left = SHAPES[name]
    A = torch.randn(shape_a, dtype=torch.float64) + 5 * torch.eye(shape_a[-1])
    return A.flip(-2), torch.randn(shape_b, dtype=torch.float64), left


@pytest.mark.parametrize("name", SHAPES)
def test_equals_torch(name: str) -> None:
    A, B, left = operands(name)
    expected = torch.linalg.solve(A, B, left=left)
    torch.testing.assert_close(solve(A, B, left=left), expected)
    torch.testing.assert_close(Solve(left=left)(A, B), expected)
    args = (A.float(), B.float(), A.shape[-1], left, is_vector(A.shape, B.shape))
    for opset in OPSETS:
        for dynamic in (False, True):
            (actual,) = run_op(OP, args, opset, dynamic=dynamic)
            torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MATRICES)
def test_accuracy(name: str) -> None:
    torch.manual_seed(0)
    make, largest = MATRICES[name]
    A = make().float()
    n = A.shape[-1]
    B = A @ torch.randn(len(A), n, 2)
    exact = torch.linalg.solve(A.double(), B.double())
    (actual,) = run_op(OP, (A, B, n, True, False), 11)

    def error(x: Tensor) -> float:
        return float(((x.double() - exact).norm(dim=1) / exact.norm(dim=1)).max())

    assert error(actual) <= max(3 * largest, 5 * error(torch.linalg.solve(A, B)))


def test_half_is_computed_in_float32() -> None:
    A, B, _ = operands("matrix")
    A, B = A.half() * torch.tensor([[1.0], [50], [0.02], [1]]).half(), B.half()
    expected = torch.linalg.solve(A.double(), B.double())
    for actual in (*run_op(OP, (A, B, 4, True, False), 11), solve(A, B)):
        assert actual.dtype == torch.float16
        torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_singular() -> None:
    A, B = torch.stack([torch.eye(3) * 2, torch.ones(3, 3)]), torch.ones(2, 3)
    assert solve(A, B)[1].isnan().all()
    for actual in (solve(A, B), *run_op(OP, (A, B, 3, True, True), 11)):
        torch.testing.assert_close(actual[0], torch.full((3,), 0.5))
        assert not actual[1].isfinite().all()


def test_gradients() -> None:
    A, B, _ = operands("matrix")
    for right in (B, B[..., 0]):
        assert torch.autograd.gradcheck(solve, (A.requires_grad_(), right.clone().requires_grad_()))


@pytest.mark.parametrize(
    ("A", "B", "match"),
    [
        ((2, 3), (2,), r"square matrices \(\*, n, n\), got \(2, 3\)"),
        ((3, 3), (4, 2), r"Incompatible shapes of A and B .*3x3 and 4x2"),
        ((2, 3, 3), (3, 3, 2), r"a \(3\) must match the size of tensor b \(2\)"),
    ],
)
def test_errors(A: tuple[int, ...], B: tuple[int, ...], match: str) -> None:
    with pytest.raises(RuntimeError, match=match):
        solve(torch.randn(A), torch.randn(B))


@pytest.mark.parametrize("function", [solve, svexport.ops.solve_ex])
def test_errors_say_what_is_expected(function) -> None:
    for A in ((), (3,), (2, 3), (2, 2, 3)):
        with pytest.raises(RuntimeError, match=rf"^{function.__name__} expects square .* got {re.escape(str(A))}"):
            function(torch.randn(A), torch.randn(3))
    with pytest.raises(RuntimeError, match=rf"^{function.__name__} expects B .* got \(\)"):
        function(torch.eye(3), torch.tensor(1.0))


def test_integers_are_refused() -> None:
    with pytest.raises(RuntimeError, match="floating point"):
        solve(2 * torch.eye(3), torch.ones(3, 2, dtype=torch.int64))


class Solves(nn.Module):
    def forward(self, A: Tensor, B: Tensor, vectors: Tensor) -> list[Tensor]:
        result, info = torch.linalg.solve_ex(A, B)
        return [
            torch.linalg.solve(A, B),
            torch.linalg.solve(A, vectors),
            torch.linalg.solve(A, vectors[0]),
            torch.linalg.solve(A, B.transpose(1, 2), left=False),
            torch.linalg.solve_ex(A, vectors)[0] + 1,
            result,
            info,
            svexport.ops.solve(A, B) * 2,
        ]


@pytest.mark.core
@pytest.mark.parametrize("opset", [9, 11, 13, 17, 18, 20, pytest.param(23, marks=exported(23))])
def test_unedited_models(opset: int, tmp_path) -> None:
    torch.manual_seed(opset)
    A, B, vectors = torch.randn(3, 4, 4) + 3 * torch.eye(4), torch.randn(3, 4, 2), torch.randn(3, 4)
    shapes = {name: {0: "batch"} for name in ("A", "B", "vectors")}
    report = svexport.export(
        Solves(), (A[:2], B[:2], vectors[:2]), tmp_path / "m.onnx", opset=opset, dynamic_shapes=shapes, verify=False
    )
    actual = svexport.load(report.path)(A, B, vectors)
    for a, e in zip(actual, Solves()(A, B, vectors), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


def test_dynamic_matrices(tmp_path) -> None:
    with pytest.raises(svexport.ExportError, match="static"):
        svexport.export(
            Solves(),
            (torch.eye(4)[None], torch.randn(1, 4, 2), torch.randn(1, 4)),
            tmp_path / "m.onnx",
            dynamic_shapes={"A": {1: "n", 2: "n"}, "B": {1: "n"}, "vectors": {1: "n"}},
        )
