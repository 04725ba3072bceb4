from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from svexport.graph import lower, strip
from svexport.ops import BilinearSample, bilinear_sample
from svexport.ops.bilinear_sample import OP, reference
from tests.support import OPSETS, op_model, run_model, run_op

NAN, INF = math.nan, math.inf
SHAPES = [
    ((2, 3, 5, 7), (3, 4)),
    ((1, 1, 1, 1), (2, 3)),
    ((2, 2, 1, 6), (1, 5)),
    ((1, 3, 13, 1), (11, 1)),
    ((1, 2, 2, 2), (5, 5)),
    ((0, 2, 3, 4), (2, 2)),
]


def by_hand(image: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Point by point, in Python floats."""
    height, width = image.shape[2:]
    output = image.new_zeros(image.shape[0], image.shape[1], *grid.shape[1:3])
    mask = image.new_zeros(*grid.shape[:3], 1)
    for n, i, j in torch.cartesian_prod(*map(torch.arange, grid.shape[:3])).tolist():
        x, y = grid[n, i, j].tolist()
        if not (x >= 0 and y >= 0 and x < width - 1 and y < height - 1):
            continue
        x0, y0 = math.floor(x), math.floor(y)
        fx, fy = x - x0, y - y0
        above = image[n, :, y0, x0] * (1 - fx) + image[n, :, y0, x0 + 1] * fx
        below = image[n, :, y0 + 1, x0] * (1 - fx) + image[n, :, y0 + 1, x0 + 1] * fx
        output[n, :, i, j] = above * (1 - fy) + below * fy
        mask[n, i, j] = 1
    return output, mask


def random_args(shape: tuple, out: tuple, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """An image and points in and around it."""
    sizes = torch.tensor(shape[:1:-1], dtype=torch.float64)
    grid = torch.rand(shape[0], *out, 2, dtype=torch.float64) * (sizes + 1) - 1
    return torch.randn(shape, dtype=torch.float64).to(dtype), grid.to(dtype)


def edge_args(width: int = 7, height: int = 5) -> tuple[Tensor, Tensor]:
    """Points at the limits of the mask, and beyond all limits."""
    below = torch.nextafter(torch.tensor([width - 1.0, height - 1.0]), torch.zeros(2)).tolist()
    values = (NAN, INF, -INF, 3e38, -3e38, 1e10, -1e-40, -0.0, 0.0, 1.0, *below, width - 1, height - 1, width, -1e-7)
    special = torch.tensor(values)
    grid = torch.stack([*torch.meshgrid(special, special, indexing="ij")], -1)[None]
    return torch.randn(1, 3, height, width), grid


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    torch.testing.assert_close(actual[0], expected[0].to(actual[0].dtype), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(actual[1], expected[1].to(actual[1].dtype), rtol=0, atol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("shape", "out"), SHAPES)
def test_equals_the_loop(shape: tuple, out: tuple, dtype: torch.dtype, tolerance: float) -> None:
    args = random_args(shape, out, dtype)
    expected = by_hand(*(x.double() for x in args))
    for function in (bilinear_sample, reference, BilinearSample()):
        output, mask = function(*args)
        assert output.dtype == mask.dtype == dtype
        assert_same((output, mask), expected, tolerance)


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (5, 7), (1, 6), (4, 1)])
def test_mask_is_exact(shape: tuple[int, int]) -> None:
    """At the limits themselves and one float below, at NaN and infinity; what is masked is zero."""
    image, grid = edge_args(*reversed(shape))
    image[:] = INF  # nothing times zero
    output, mask = bilinear_sample(image, grid)
    assert torch.equal(mask, by_hand(image, grid)[1])
    assert mask.any() == (min(shape) > 1)
    assert (output[(mask == 0).movedim(3, 1).expand_as(output)] == 0).all()


def test_equals_grid_sample_inside_the_mask() -> None:
    image, grid = random_args((2, 3, 7, 11), (13, 17), torch.float64)
    leaves = [image.requires_grad_(), grid.requires_grad_()]
    output, mask = bilinear_sample(*leaves)
    scale = torch.tensor([11, 7]) - 1.0
    expected = F.grid_sample(image, 2 * grid / scale - 1, align_corners=True) * mask.detach().movedim(3, 1)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(output)
    for gradient, e in zip(
        torch.autograd.grad(output, leaves, weight), torch.autograd.grad(expected, leaves, weight), strict=True
    ):
        torch.testing.assert_close(gradient, e, rtol=1e-11, atol=1e-11)


def test_second_derivatives() -> None:
    image = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    grid = (torch.rand(1, 2, 2, 2, dtype=torch.float64) * 0.8 + 0.1 + torch.tensor([2, 1])).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda *x: bilinear_sample(*x)[0], (image, grid))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_coordinates_are_float32(dtype: torch.dtype) -> None:
    image, grid = random_args((1, 2, 2, 3000), (4, 50))
    output, mask = bilinear_sample(image.to(dtype), grid)
    assert output.dtype == mask.dtype == dtype
    assert_same((output.float(), mask.float()), by_hand(image.to(dtype).float(), grid), 1e-2)


@pytest.mark.parametrize(
    ("image", "grid"),
    [
        ((1, 3, 3), (1, 2, 2, 2)),
        ((1, 1, 3, 3), (2, 2, 2)),
        ((1, 1, 3, 3), (1, 2, 2, 3)),
        ((1, 1, 3, 3), (2, 2, 2, 2)),
        ((1, 1, 3, 3, 3), (1, 2, 2, 2, 3)),
        ((1, 1, 0, 3), (1, 2, 2, 2)),
    ],
)
def test_errors(image: tuple, grid: tuple) -> None:
    with pytest.raises(
        ValueError, match=r"image \(N, C, H, W\), H and W not 0, and grid \(N, gH, gW, 2\).*got image \(1, "
    ):
        bilinear_sample(torch.zeros(image), torch.zeros(grid))


def test_integers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"floating-point image, got torch.uint8"):
        bilinear_sample(torch.zeros(1, 1, 3, 3, dtype=torch.uint8), torch.zeros(1, 2, 2, 2))


# ---------------------------------------------------------------------------------------------- ONNX


@pytest.mark.parametrize("opset", OPSETS)
def test_body_equals_the_loop(opset: int) -> None:
    for shape, out in SHAPES:
        args = random_args(shape, out)
        for lowered, dynamic in ((True, False), (True, True), (False, False), (False, True)):
            actual = run_op(OP, args, opset, lowered=lowered, dynamic=dynamic)
            assert_same(actual, by_hand(*(x.double() for x in args)), 1e-5)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_body_at_any_size(data: st.DataObject) -> None:
    size = st.integers(1, 13)
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 5), size, size))
    args = random_args(shape, data.draw(st.tuples(size, size)))
    actual = run_op(OP, args, data.draw(st.sampled_from(OPSETS)), dynamic=data.draw(st.booleans()))
    assert_same(actual, bilinear_sample(*args), 1e-5)


@pytest.mark.parametrize("opset", OPSETS)
def test_body_mask_is_exact(opset: int) -> None:
    for shape in ((5, 7), (1, 1), (1, 6), (4, 1), (2, 2)):
        image, grid = edge_args(*reversed(shape))
        for dynamic in (False, True):
            assert_same(run_op(OP, (image, grid), opset, dynamic=dynamic), by_hand(image, grid), 1e-5)
            _, mask = expected = bilinear_sample(torch.full_like(image, INF), grid)
            output, actual = run_op(OP, (torch.full_like(image, INF), grid), opset, dynamic=dynamic)
            assert torch.equal(actual, mask)
            assert torch.equal(output == 0, expected[0] == 0)


@pytest.mark.parametrize("opset", [9, 11, 17])
def test_body_in_double_and_half(opset: int) -> None:
    for dtype, points, tolerance in (
        (torch.float64, torch.float64, 1e-11),
        (torch.float16, torch.float16, 2e-3),
        (torch.float16, torch.float32, 2e-3),
    ):
        image, grid = random_args((2, 3, 5, 7), (4, 3), torch.float64)
        args = image.to(dtype), grid.to(points)
        assert_same(run_op(OP, args, opset), bilinear_sample(*args), tolerance)


@pytest.mark.parametrize("opset", [9, 11, 17])
def test_body_with_an_open_batch(opset: int) -> None:
    model = op_model(OP, random_args((2, 3, 5, 7), (4, 3)), opset, lowered=False)
    strip(model)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    model = lower(model)
    for batch in (1, 3, 0):
        args = random_args((batch, 3, 5, 7), (4, 3))
        assert_same(run_model(model, args), bilinear_sample(*args), 1e-5)


@pytest.mark.parametrize("opset", OPSETS)
def test_body_is_small(opset: int) -> None:
    model = op_model(OP, random_args((2, 3, 5, 7), (4, 3)), opset)
    assert "GridSample" not in {node.op_type for node in model.graph.node}
    assert len(model.graph.node) <= 34
