from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport
from svexport.ops.layer_norm import OP, LayerNorm, layer_norm, reference
from tests.support import BOTH_EXPORTERS, OPSETS, check_export, op_model, run_op

AFFINE = pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, True), (False, False)])
SHAPES = [((2, 3, 7), 1), ((5, 4, 3), 2), ((2, 1, 4, 5), 3), ((11,), 1), ((3, 1), 1), ((13, 17), 1), ((0, 5), 1)]


def problem(shape: tuple[int, ...], dims: int, weight: bool, bias: bool, dtype: torch.dtype = torch.float64) -> tuple:
    generator = torch.Generator().manual_seed(sum(shape) + dims)
    size = shape[len(shape) - dims :]

    def make(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype)

    return make(*shape) * 3 + 1, size, make(*size) if weight else None, make(*size) if bias else None, 1e-3


def by_hand(x: Tensor, size: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float) -> np.ndarray:
    """Row by row, in NumPy."""
    count = int(np.prod(size))
    rows = []
    for row in x.double().numpy().reshape(-1, count):
        row = (row - row.sum() / count) / np.sqrt(((row - row.sum() / count) ** 2).sum() / count + eps)
        row = row * (1 if weight is None else weight.double().numpy().ravel())
        rows.append(row + (0 if bias is None else bias.double().numpy().ravel()))
    return np.reshape(rows, x.shape)


@AFFINE
@pytest.mark.parametrize(("shape", "dims"), SHAPES)
def test_values(shape, dims, weight, bias) -> None:
    args = problem(shape, dims, weight, bias)
    expected = torch.from_numpy(by_hand(*args))
    for function in (layer_norm, OP, reference):
        torch.testing.assert_close(function(*args), expected, rtol=1e-12, atol=1e-12)


@AFFINE
@pytest.mark.parametrize("opset", OPSETS)
def test_body(opset, weight, bias) -> None:
    for shape, dims in SHAPES[1:4] + SHAPES[-1:]:
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 1e-2), (torch.float64, 1e-11)):
            args = problem(shape, dims, weight, bias, dtype)
            for dynamic in (False, True):
                (y,) = run_op(OP, args, opset, dynamic=dynamic)
                assert y.dtype == dtype
                expected = torch.from_numpy(by_hand(*args[:-1], np.float32(args[-1])))
                torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("opset", OPSETS)
def test_half_far_from_zero(opset) -> None:
    """Sums and squares that half cannot hold, differences that it would lose."""
    x = (torch.randn(3, 256, generator=torch.Generator().manual_seed(0)) + 900).half()
    expected = F.layer_norm(x.double(), (256,))
    for y in (*run_op(OP, (x, [256], None, None, 1e-5), opset), OP(x, [256], None, None, 1e-5)):
        torch.testing.assert_close(y.double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("opset", OPSETS)
def test_the_node_from_opset_17(opset) -> None:
    args = problem((2, 3, 7), 1, True, True, torch.float32)
    types = [node.op_type for node in op_model(OP, args, opset).graph.node]
    if opset >= 17:
        assert types == ["LayerNormalization"]
    else:  # the pattern that ONNX Runtime and TensorRT look for
        assert types == ["ReduceMean", "Sub", "Pow", "ReduceMean", "Add", "Sqrt", "Div", "Mul", "Add"]


@AFFINE
def test_gradients_with_absent_tensors(weight, bias) -> None:
    x, size, w, b, eps = problem((2, 2, 3), 2, weight, bias)
    tensors = [t.requires_grad_() for t in (x, w, b) if t is not None]
    gradients = [torch.autograd.grad(f(x, size, w, b, eps).square().sum(), tensors) for f in (OP, F.layer_norm)]
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected)

    def function(x: Tensor, *rest: Tensor) -> Tensor:
        left = iter(rest)
        return OP(x, size, next(left) if weight else None, next(left) if bias else None, eps)

    assert torch.autograd.gradgradcheck(function, tensors)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}, {"eps": 0.1}])
def test_module(options) -> None:
    theirs, ours = nn.LayerNorm([3, 4], **options), LayerNorm([3, 4], **options)
    for p in theirs.parameters():
        nn.init.normal_(p)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)
    torch.testing.assert_close(torch.compile(ours, fullgraph=True, backend="eager")(x), theirs(x))


def test_errors() -> None:
    with pytest.raises(RuntimeError, match=r"normalized_shape=\[4\], expected input with shape \[\*, 4\]"):
        layer_norm(torch.randn(2, 3), (4,))
    with pytest.raises(RuntimeError, match="weight to be of same shape"):
        layer_norm(torch.randn(2, 3), (3,), torch.randn(2))


# ---------------------------------------------------------------- export


class Norms(nn.Module):
    """An unedited model."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.weight, self.none = nn.LayerNorm(8), nn.LayerNorm([3, 8], bias=False), nn.LayerNorm(8, eps=1e-2)
        self.none.weight = self.none.bias = None
        self.register_buffer("offset", torch.randn(8))
        for p in self.parameters():
            nn.init.normal_(p)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.both(x)
        return y, self.weight(x + y), self.none(x) * 2, F.layer_norm(y, (8,), None, self.offset)


@pytest.mark.core
@pytest.mark.parametrize("opset", [9, 16, 17, 18])
def test_export_of_an_unedited_model(opset, tmp_path) -> None:
    torch.manual_seed(0)
    report = svexport.export(
        Norms(), (torch.randn(2, 3, 8),), tmp_path / "m.onnx", opset=opset, dynamic_shapes={"x": {0: "n"}}
    )
    assert report.verified
    ours, native = (report.traced_nodes.get(name, 0) for name in ("SvLayerNorm", "LayerNormalization"))
    if opset >= 17 or BOTH_EXPORTERS:  # TorchScript writes opset 17, whose own node is converted
        assert (ours, native) == ((4, 0) if opset < 17 else (0, 4))


def test_export_in_half(tmp_path) -> None:
    torch.manual_seed(1)
    assert svexport.export(Norms(), (torch.randn(2, 3, 8),), tmp_path / "m.onnx", dtype=torch.float16).verified


@pytest.mark.parametrize("opset", [11, 18])
def test_export_of_the_op_with_absent_tensors(opset, tmp_path) -> None:
    class Direct(nn.Module):
        def forward(self, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
            return OP(x, [7], None, b, 1e-5), OP(x, [7], w, None, 1e-5), OP(x, [7], None, None, 1e-5)

    args = torch.randn(2, 7), torch.randn(7), torch.randn(7)
    report = svexport.export(Direct(), args, tmp_path / "m.onnx", opset=opset, plugins=["layer_norm"])
    assert report.verified
    nodes = [n for n in onnx.load(report.path).graph.node if n.op_type == "SvLayerNorm"]
    given = ["".join("x" if name else "-" for name in n.input).rstrip("-") for n in nodes]
    assert given == ["x-x", "xx", "x"]


@pytest.mark.parametrize("axes", [{0: "n"}, {0: "n", 1: "h", 2: "d"}])
@pytest.mark.parametrize(("opset", "plugins"), [(9, False), (11, True), (17, True), (17, False), (18, True)])
def test_export_of_sizes_read_from_a_dynamic_tensor(opset, axes, plugins, tmp_path) -> None:
    class Sizes(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> list[Tensor]:
            return [F.layer_norm(x, x.shape[1:]), F.layer_norm(x, (x.shape[-1],)), F.layer_norm(x, w.shape, w, w)]

    shapes = {"x": axes, "w": {0: "d"}} if 2 in axes else {"x": axes}
    sizes = [(2, 3, 8), (5, 7, 1) if 2 in axes else (1, 3, 8)]
    args = [(torch.randn(size), torch.randn(size[-1])) for size in sizes]
    assert check_export(Sizes(), tmp_path, opset, *args, dynamic_shapes=shapes, plugins=plugins).verified
