from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport.ops.inverse import OP, Inverse, inverse
from tests.support import OPSETS, exported, op_model, run_op


def rotations(*batch: int, n: int = 3) -> Tensor:
    q, r = torch.linalg.qr(torch.randn(*batch, n, n, dtype=torch.float64))
    return q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]


def lidar2img(batch: int, metre: float = 1.0) -> Tensor:
    """Intrinsics of a camera of 1600 x 900 pixels times extrinsics with translations in the given unit."""
    intrinsics = torch.eye(4, dtype=torch.float64).repeat(batch, 1, 1)
    focal = torch.rand(batch, dtype=torch.float64) * 1500 + 300
    intrinsics[:, 0, 0], intrinsics[:, 1, 1] = focal, focal * 1.01
    intrinsics[:, 0, 2], intrinsics[:, 1, 2] = 816.3, 491.5
    extrinsics = torch.eye(4, dtype=torch.float64).repeat(batch, 1, 1)
    extrinsics[:, :3, :3] = rotations(batch)
    extrinsics[:, :3, 3] = torch.randn(batch, 3, dtype=torch.float64) * 2 * metre
    return intrinsics @ extrinsics


def conditioned(batch: int, n: int, condition: float) -> Tensor:
    values = torch.logspace(0, -torch.tensor(condition).log10(), n, dtype=torch.float64)
    return rotations(batch, n=n) * values @ rotations(batch, n=n)


SCALES = torch.logspace(3, -3, 4, dtype=torch.float64)
MATRICES = {  # with the largest error of float32, relative to the norm of the inverse
    "rotations": (lambda: rotations(200), 3e-7),
    "rotations 8x8": (lambda: rotations(100, n=8), 3e-7),
    "lidar2img": (lambda: lidar2img(200), 1e-6),
    "lidar2img in millimetres": (lambda: lidar2img(200, 1000), 1e-6),
    "rows in different units": (lambda: SCALES[:, None] * rotations(200, n=4), 1e-6),
    "columns in different units": (lambda: rotations(200, n=4) * SCALES, 1e-6),
    "condition 1e3": (lambda: conditioned(200, 4, 1e3), 1e-4),
    "condition 1e6": (lambda: conditioned(200, 4, 1e6), 1e-1),
    "condition 1e6, 2x2": (lambda: conditioned(200, 2, 1e6), 1e-1),
    "condition 1e6, 8x8": (lambda: conditioned(200, 8, 1e6), 1e-1),
}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float(((actual.double() - expected).flatten(-2).norm(dim=-1) / expected.flatten(-2).norm(dim=-1)).max())


@pytest.mark.parametrize("name", MATRICES)
def test_accuracy(name: str) -> None:
    """Of the body, against float64; no more than a few times the error of torch itself where that is worse."""
    torch.manual_seed(0)
    make, largest = MATRICES[name]
    A = make().float()
    expected = torch.linalg.inv(A.double())
    theirs = relative_error(torch.linalg.inv(A), expected)  # LAPACK's, which is not the same on every machine
    for opset in (9, 20):
        (actual,) = run_op(OP, (A, A.shape[-1]), opset)
        error = relative_error(actual, expected)
        assert error <= largest
        assert error <= max(1e-6, 5 * theirs)
    if largest <= 1e-6 and float(torch.linalg.cond(A.double()).max()) < 2e6:
        assert relative_error(inverse(A), expected) <= max(1e-5, theirs)


@pytest.mark.parametrize("opset", [9, 17])
def test_half_is_computed_in_float32(opset: int) -> None:
    torch.manual_seed(0)
    A = (lidar2img(50) * torch.tensor([0.1, 0.1, 1, 1])[:, None]).half()
    expected = torch.linalg.inv(A.double())
    for actual in (*run_op(OP, (A, 4), opset), inverse(A)):
        assert actual.dtype == torch.float16
        torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-5 + float(expected.abs().max()) * 5e-4)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("shape", [(2, 1, 3, 2, 4, 4), (0, 4, 4), (2, 0, 3, 3), (0, 0), (1, 1), (3, 16, 16)])
def test_batches(shape: tuple[int, ...], opset: int) -> None:
    torch.manual_seed(1)
    n = shape[-1]
    A = torch.randn(shape, dtype=torch.float64) + 5 * torch.eye(n)
    expected = torch.linalg.inv(A)
    torch.testing.assert_close(inverse(A), expected)
    for dynamic in (False, True):
        (actual,) = run_op(OP, (A.float(), n), opset, dynamic=dynamic)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


def test_pivots() -> None:
    """Zeros on the diagonal, all permutations of three rows, and elements that a division by them would blow up."""
    rows = torch.eye(3)[torch.cartesian_prod(*[torch.arange(3)] * 3)]  # (27, 3, 3)
    A = rows[torch.linalg.det(rows) != 0] * torch.tensor([1.0, -2.0, 0.5])
    assert len(A) == 6
    torch.testing.assert_close(run_op(OP, (A, 3), 11)[0], torch.linalg.inv(A), rtol=0, atol=0)
    A = torch.tensor([[[1e-12, 1.0], [1.0, 1.0]], [[0.0, 1e-20], [1e20, 0.0]]])
    torch.testing.assert_close(run_op(OP, (A, 2), 11)[0], torch.linalg.inv(A.double()).float())


@pytest.mark.parametrize("singular", [torch.zeros(3, 3), torch.ones(3, 3), torch.diag(torch.tensor([1.0, 0.0, 2.0]))])
def test_singular(singular: Tensor) -> None:
    """NaN from the op, something that is not finite from a file, and no harm to the rest of the batch."""
    regular = torch.tensor([[2.0, 1, 0], [0, 1, 1], [1, 0, 1]])
    A = torch.stack([regular, singular, regular.T])
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        torch.linalg.inv(A)
    actual = inverse(A)
    assert actual[1].isnan().all()
    for result in (actual, *run_op(OP, (A, 3), 11)):
        assert not result[1].isfinite().all()
        torch.testing.assert_close(result[[0, 2]], torch.linalg.inv(A[[0, 2]]))


def test_no_matrix_product_in_the_body() -> None:
    """TensorRT would run it in TF32, with three digits."""
    model = op_model(OP, (torch.eye(4), 4), 17)
    assert not {"MatMul", "Gemm", "Einsum"} & {node.op_type for node in model.graph.node}
    assert len(model.graph.node) < 70


def test_gradients() -> None:
    A = (torch.randn(2, 3, 3, dtype=torch.float64) + 3 * torch.eye(3)).requires_grad_()
    assert torch.autograd.gradcheck(inverse, (A,))
    assert torch.autograd.gradgradcheck(inverse, (A,))


def test_module_and_errors() -> None:
    A = torch.randn(2, 3, 3) + 3 * torch.eye(3)
    torch.testing.assert_close(Inverse()(A), torch.linalg.inv(A))
    for function in (inverse, svexport.ops.inverse_ex):
        for bad in ((2, 3), (2, 2, 3), (3,), ()):
            match = rf"^{function.__name__} expects square .* got {re.escape(str(bad))}"
            with pytest.raises(RuntimeError, match=match):
                function(torch.randn(bad))
        with pytest.raises(RuntimeError, match="floating point"):  # as torch says; not rounded to integers
            function(torch.tensor([[2, 0], [0, 4]]))


class Inverses(nn.Module):
    """Every way to spell it."""

    def forward(self, A: Tensor) -> list[Tensor]:
        inverse, info = torch.linalg.inv_ex(A)
        again = [
            torch.linalg.inv(A),
            torch.inverse(A),
            A.inverse(),
            A.transpose(1, 2).inverse(),
            svexport.ops.inverse(A),
        ]
        return [*again, inverse, info, torch.linalg.inv_ex(A)[0] * 2]


@pytest.mark.core
@pytest.mark.parametrize("opset", [9, 11, 13, 17, 18, 20, pytest.param(23, marks=exported(23))])
def test_unedited_models(opset: int, tmp_path) -> None:
    torch.manual_seed(2)
    A = torch.stack([lidar2img(1)[0].float(), torch.ones(4, 4)])
    report = svexport.export(
        Inverses(), (A[:1],), tmp_path / "m.onnx", opset=opset, dynamic_shapes={"A": {0: "batch"}}, verify=False
    )
    assert report.nodes["SvInverse"] in (2, 5)  # with and without those that are equal
    *inverses, info, double = svexport.load(report.path)(A)
    expected = torch.linalg.inv(A[:1].double())
    for actual in (*inverses[:3], *inverses[4:], double / 2):
        assert relative_error(actual[:1], expected) < 1e-6
        assert not actual[1].isfinite().all()
    assert relative_error(inverses[3][:1], expected.mT) < 1e-6
    assert info.dtype == torch.int32
    assert info.tolist() == [0, 1]
    assert torch.linalg.inv_ex(A).info.bool().tolist() == [False, True]


@pytest.mark.parametrize("opset", [11, 18])
def test_size_must_be_static(opset: int, tmp_path) -> None:
    class Model(nn.Module):
        def forward(self, A: Tensor) -> Tensor:
            return torch.inverse(A)

    shapes = {"A": {0: "n", 1: "n"}}
    with pytest.raises(svexport.ExportError, match="static"):
        svexport.export(Model(), (torch.eye(3),), tmp_path / "m.onnx", opset=opset, dynamic_shapes=shapes)
    with pytest.raises(svexport.ExportError, match="at most 16"):
        svexport.export(Model(), (torch.eye(17),), tmp_path / "m.onnx", opset=opset)
    assert not list(tmp_path.iterdir())
