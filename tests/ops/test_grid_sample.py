from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import svexport
from svexport.graph import lower, strip
from svexport.ops import GridSample, grid_sample
from svexport.ops.grid_sample import OP, reference
from tests.support import OPSETS, op_model, run_model, run_op

MODES, PADDINGS = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
NAN, INF = math.nan, math.inf
# Torch's kernels agree on all of these. Beyond 2**24 pixels they no longer agree on a reflection.
SPECIAL = (NAN, INF, -INF, 3e38, -3e38, 1e4, -1e4, 0.0, 1.0, -1.0)
HUGE = (1e30, -1e30, 1e10, -1e10)
SHAPES = {
    4: [
        ((2, 3, 5, 7), (3, 4)),
        ((1, 1, 1, 1), (2, 3)),
        ((2, 2, 1, 6), (1, 5)),
        ((1, 3, 13, 1), (11, 1)),
        ((0, 2, 3, 4), (2, 2)),
    ],
    5: [
        ((2, 3, 3, 5, 7), (2, 3, 4)),
        ((1, 1, 1, 1, 1), (1, 2, 3)),
        ((1, 2, 4, 1, 3), (3, 1, 2)),
        ((0, 2, 3, 2, 4), (2, 1, 2)),
    ],
}


def combinations() -> Iterator:
    for rank, mode, padding, align in itertools.product((4, 5), range(3), range(3), (False, True)):
        if (rank, mode) != (5, 2):
            yield pytest.param(rank, mode, padding, align, id=f"{rank}D-{MODES[mode]}-{PADDINGS[padding]}-{align}")


every_combination = pytest.mark.parametrize(("rank", "mode", "padding", "align"), list(combinations()))


def torch_grid_sample(image: Tensor, grid: Tensor, mode: int, padding: int, align: bool) -> Tensor:
    return F.grid_sample(image, grid, MODES[mode], PADDINGS[padding], align)


def random_args(shape: tuple, out: tuple, align: bool, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """An image, and points over three times its extent; none at the edge or middle of a pixel, where rounding tells."""
    sizes = torch.tensor(shape[:1:-1], dtype=dtype)
    points = (shape[0], *out, len(out))
    pixel = ((torch.rand(points, dtype=dtype) * 3 - 1) * sizes).floor() + torch.randint(2, points) / 2
    pixel = pixel + 0.03 + 0.44 * torch.rand(points, dtype=dtype)
    return torch.randn(shape, dtype=dtype), 2 * pixel / (sizes - 1).clamp(1) - 1 if align else (
        2 * pixel + 1
    ) / sizes - 1


def special_args(rank: int, values: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """An image, and points of which one coordinate is special, the others not."""
    axes = rank - 2
    grid = torch.full((axes, len(values), axes), 0.1)
    for axis in range(axes):
        grid[axis, :, axis] = torch.tensor(values)
    return torch.randn(1, 2, *(3, 5, 7)[-axes:]), grid.reshape(1, *[1] * (axes - 1), -1, axes)


# ---------------------------------------------------------------------------------------------- torch


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@every_combination
def test_equals_torch(rank: int, mode: int, padding: int, align: bool, dtype: torch.dtype, tolerance: float) -> None:
    """The op and its reference, forward and backward."""
    for shape, out in SHAPES[rank]:
        args = random_args(shape, out, align, dtype)
        expected = torch_grid_sample(*(x.double() for x in args), mode, padding, align)
        weight = torch.randn_like(expected)
        leaves = [x.double().requires_grad_() for x in args]
        wanted = torch.autograd.grad(torch_grid_sample(*leaves, mode, padding, align), leaves, weight)
        for function in (OP, reference):
            leaves = [x.clone().requires_grad_() for x in args]
            output = function(*leaves, mode, padding, align, 1.0)
            assert output.dtype == dtype
            torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
            found = torch.autograd.grad(output, leaves, weight.to(dtype), materialize_grads=True)
            for gradient, e in zip(found, wanted, strict=True):
                torch.testing.assert_close(gradient.double(), e, rtol=10 * tolerance, atol=10 * tolerance)


@every_combination
def test_special_coordinates(rank: int, mode: int, padding: int, align: bool) -> None:
    """NaN, infinite and huge coordinates are what they are to torch on a CPU."""
    image, grid = special_args(rank, SPECIAL if padding == 2 else SPECIAL + HUGE)
    expected = torch_grid_sample(image, grid, mode, padding, align)
    for function in (OP, reference):
        actual = function(image, grid, mode, padding, align, 1.0)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("mode", [0, 2])
@pytest.mark.parametrize("padding", range(3))
def test_second_derivatives(mode: int, padding: int) -> None:
    image, grid = random_args((1, 2, 3, 4), (2, 2), False, torch.float64)
    assert torch.autograd.gradgradcheck(
        lambda *x: OP(*x, mode, padding, False, 1.0), (image.requires_grad_(), grid.requires_grad_())
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("shape", "out"), [((1, 2, 2, 3000), (4, 50)), ((1, 2, 2, 3, 1500), (2, 3, 30))])
def test_half_coordinates_are_float32(dtype: torch.dtype, shape: tuple, out: tuple) -> None:
    """A half that counts pixels is exact up to 2048 (256 in bfloat16) only."""
    image, grid = torch.randn(shape).to(dtype), torch.rand(1, *out, len(out)) * 2 - 1
    for points in (grid, grid.to(dtype)):  # float32 beside half, and all half
        leaves = [image.clone().requires_grad_(), points.clone().requires_grad_()]
        output = grid_sample(*leaves, align_corners=False)
        assert output.dtype == dtype
        precise = [x.detach().float().requires_grad_() for x in leaves]
        expected = F.grid_sample(*precise, align_corners=False)
        torch.testing.assert_close(output.float(), expected, rtol=1e-2, atol=1e-2)
        gradients = torch.autograd.grad(output.sum(), leaves)
        for leaf, gradient, e in zip(leaves, gradients, torch.autograd.grad(expected.sum(), precise), strict=True):
            assert gradient.dtype == leaf.dtype
            torch.testing.assert_close(gradient.float(), e, rtol=1e-2, atol=1e-2 * float(e.abs().max()))


def test_memory_layouts() -> None:
    image, grid = random_args((2, 3, 5, 7), (4, 3), False)
    expected = F.grid_sample(image, grid, align_corners=False)
    strided = torch.stack([image, image + 1], -1)[..., 0], torch.stack([grid, grid + 1], 1)[:, 0]
    last = image.to(memory_format=torch.channels_last), grid.transpose(1, 2).contiguous().transpose(1, 2)
    for args in (strided, last, (image.expand(2, 3, 5, 7), grid[:1].expand(2, -1, -1, -1))):
        actual = grid_sample(*args, align_corners=False)
        torch.testing.assert_close(actual, F.grid_sample(*args, align_corners=False))
        assert actual.stride() == expected.stride()


@pytest.mark.parametrize(("mode", "padding"), [*itertools.product(range(3), range(3))])
def test_compiles_with_dynamic_shapes(mode: int, padding: int) -> None:
    torch.compiler.reset()  # or the ninth of these is one recompilation too many
    compiled = torch.compile(
        lambda *x: grid_sample(*x, MODES[mode], PADDINGS[padding], False),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for shape, out in (((2, 3, 5, 7), (3, 4)), ((3, 2, 4, 6), (2, 5))):
        leaves = [x.requires_grad_() for x in random_args(shape, out, False)]
        actual, expected = compiled(*leaves), torch_grid_sample(*leaves, mode, padding, False)
        torch.testing.assert_close(actual, expected)
        gradients = torch.autograd.grad(actual.sum(), leaves, materialize_grads=True)
        for gradient, e in zip(gradients, torch.autograd.grad(expected.sum(), leaves), strict=True):
            torch.testing.assert_close(gradient, e, rtol=1e-4, atol=1e-4)


IMAGE, GRID = torch.ones(1, 1, 3, 3), torch.zeros(1, 2, 2, 2)


@pytest.mark.parametrize(
    ("image", "grid", "options", "match"),
    [
        (IMAGE, GRID, {"mode": "linear"}, "mode to be one of 'bilinear', 'nearest', 'bicubic'; got 'linear'"),
        (IMAGE, GRID, {"mode": 0}, "got 0"),
        (IMAGE, GRID, {"padding_mode": "mirror"}, "padding_mode to be one of .* got 'mirror'"),
        (IMAGE[0], GRID, {}, r"expects input \(N, C, H, W\).* got input \(1, 3, 3\)"),
        (IMAGE, GRID[0], {}, r"got input \(1, 1, 3, 3\) and grid \(2, 2, 2\)"),
        (IMAGE[None, None], GRID[None, None], {}, r"expects input \(N, C, H, W\)"),
        (IMAGE[None], GRID, {}, "expects input"),
        (IMAGE, torch.zeros(1, 2, 2, 3), {}, "2 coordinates in the last dimension"),
        (IMAGE, GRID.expand(2, -1, -1, -1), {}, "its batch size"),
        (IMAGE[:, :, :0], GRID, {}, "at least one pixel"),
        (IMAGE[None], torch.zeros(1, 1, 2, 2, 3), {"mode": "bicubic"}, "4-D input only.*use 'bilinear'"),
        (IMAGE, GRID.to("meta"), {}, "one device; got cpu and meta"),
        (IMAGE.int(), GRID.int(), {}, "floating-point or int8 input; got torch.int32"),
        (IMAGE, GRID.double(), {}, "grid in torch.float32, .*got torch.float64"),
        (IMAGE.double(), GRID, {}, "grid in torch.float64, .*got torch.float32"),
        (IMAGE.half(), GRID.double(), {}, "grid in torch.float16 or torch.float32"),
    ],
)
def test_errors(image: Tensor, grid: Tensor, options: dict, match: str) -> None:
    """Of torch's own type, whatever that is."""
    with pytest.raises(Exception) as torchs:  # noqa: PT011
        F.grid_sample(image, grid, align_corners=False, **options)
    with pytest.raises(torchs.type, match=match):
        grid_sample(image, grid, align_corners=False, **options)


def test_align_corners_unsaid() -> None:
    image, grid = random_args((1, 2, 5, 7), (3, 2), False)
    with pytest.warns(UserWarning, match="align_corners=None for False"):
        actual = grid_sample(image, grid)
    torch.testing.assert_close(actual, F.grid_sample(image, grid, align_corners=False))


@pytest.mark.parametrize("dtypes", [*itertools.product((torch.float32, torch.bfloat16), repeat=2)])
def test_autocast(dtypes: tuple) -> None:
    args = [x.to(dtype) for x, dtype in zip(random_args((1, 2, 5, 7), (3, 2), False), dtypes, strict=True)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(grid_sample(*args, align_corners=False), F.grid_sample(*args, align_corners=False))


def test_shapes_on_the_meta_device() -> None:
    args = [x.to("meta") for x in random_args((1, 2, 5, 7), (3, 2), False)]
    assert grid_sample(*args, align_corners=False).shape == (1, 2, 3, 2)


def test_module() -> None:
    module = GridSample("bicubic", "reflection", align_corners=True)
    assert not module.state_dict()
    assert repr(module) == "GridSample(mode='bicubic', padding_mode='reflection', align_corners=True, scale=1.0)"
    args = random_args((2, 3, 5, 7), (3, 4), True)
    torch.testing.assert_close(module(*args), torch_grid_sample(*args, 2, 2, True))


# ---------------------------------------------------------------------------------------------- ONNX


@pytest.mark.parametrize("opset", OPSETS)
@every_combination
def test_body_equals_torch(rank: int, mode: int, padding: int, align: bool, opset: int) -> None:
    for shape, out in SHAPES[rank][:1] if opset in (13, 16, 18) else SHAPES[rank]:
        args = random_args(shape, out, align)
        expected = torch_grid_sample(*args, mode, padding, align)
        for dynamic in (False, True):
            (actual,) = run_op(OP, (*args, mode, padding, align, 1.0), opset, dynamic=dynamic)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_body_at_any_size(data: st.DataObject) -> None:
    """Images small and large beside their points: the zeros outside are found in two ways."""
    rank = data.draw(st.sampled_from((4, 4, 5)))
    size = st.integers(1, 13)
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 5), *[size] * (rank - 2)))
    out = data.draw(st.tuples(*[size] * (rank - 2)))
    mode, padding = data.draw(st.integers(0, 6 - rank)), data.draw(st.integers(0, 2))
    align, dynamic = data.draw(st.booleans()), data.draw(st.booleans())
    args = random_args(shape, out, align)
    (actual,) = run_op(OP, (*args, mode, padding, align, 1.0), data.draw(st.sampled_from(OPSETS)), dynamic=dynamic)
    torch.testing.assert_close(actual, torch_grid_sample(*args, mode, padding, align), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("opset", [9, 11, 18])
@every_combination
def test_body_at_special_coordinates(rank: int, mode: int, padding: int, align: bool, opset: int) -> None:
    image, grid = special_args(rank, SPECIAL if padding == 2 else SPECIAL + HUGE)
    expected = torch_grid_sample(image, grid, mode, padding, align)
    for dynamic in (False, True):
        (actual,) = run_op(OP, (image, grid, mode, padding, align, 1.0), opset, dynamic=dynamic)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("opset", [9, 11])
@every_combination
def test_body_never_leaves_the_image(rank: int, mode: int, padding: int, align: bool, opset: int) -> None:
    """Where torch's kernels do not agree, the file gives a value of the image, and runs."""
    image, grid = special_args(rank, (*HUGE, 3e9, -3e9, 2.0**31, -(2.0**63), 1e37))
    image = image.abs() + 1
    for dynamic in (False, True):
        (actual,) = run_op(OP, (image, grid, mode, padding, align, 1.0), opset, dynamic=dynamic)
        assert actual.isfinite().all()
        if padding and mode != 2:
            assert (actual >= 1).all()
            assert (actual <= image.max() + 1e-5).all()


@pytest.mark.parametrize("opset", [9, 11, 17])
@pytest.mark.parametrize("mode", range(3))
@pytest.mark.parametrize("out", [(1, 3), (9, 9)], ids=["few points", "many points"])
def test_zeros_outside_of_an_image_that_is_not_finite(opset: int, mode: int, out: tuple) -> None:
    image, grid = random_args((2, 3, 9, 8), out, False)
    image[torch.rand(image.shape) < 0.2] = NAN
    image[torch.rand(image.shape) < 0.2] = INF
    expected = torch_grid_sample(image, grid, mode, 0, False)
    for dynamic in (False, True):
        (actual,) = run_op(OP, (image, grid, mode, 0, False, 1.0), opset, dynamic=dynamic)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("opset", [9, 16])
@every_combination
def test_body_in_double_and_half(rank: int, mode: int, padding: int, align: bool, opset: int) -> None:
    shape, out = SHAPES[rank][0]
    for dtype, points, tolerance in (
        (torch.float64, torch.float64, 1e-11),
        (torch.float16, torch.float16, 2e-3),
        (torch.float16, torch.float32, 2e-3),
    ):
        image, grid = random_args(shape, out, align, torch.float64)
        args = (image.to(dtype), grid.to(points), mode, padding, align, 1.0)
        (actual,) = run_op(OP, args, opset)
        torch.testing.assert_close(actual, OP(*args), rtol=tolerance, atol=tolerance)


@pytest.mark.core
@pytest.mark.parametrize("opset", [10, 17])
@every_combination
def test_body_with_an_open_batch(rank: int, mode: int, padding: int, align: bool, opset: int) -> None:
    """What most files leave open: one model for batches of any size, none included."""
    shape, out = SHAPES[rank][0]
    model = op_model(OP, (*random_args(shape, out, align), mode, padding, align, 1.0), opset, lowered=False)
    strip(model)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    model = lower(model)
    for batch in (1, 3, 0):
        args = random_args((batch, *shape[1:]), out, align)
        (actual,) = run_model(model, args)
        torch.testing.assert_close(actual, torch_grid_sample(*args, mode, padding, align), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("opset", [9, 11, 16, 20])
@every_combination
def test_body_is_small(rank: int, mode: int, padding: int, align: bool, opset: int) -> None:
    limit = 38 if rank == 4 else 37
    for shape, out in SHAPES[rank][0], ((6, 64, *(30, 40, 2)[: rank - 2]), (3, 4, 5)[: rank - 2]):
        model = op_model(OP, (*random_args(shape, out, align), mode, padding, align, 1.0), opset)
        types = {node.op_type for node in model.graph.node}
        assert not types & {"GridSample", "Loop", "Scan", "If", "Constant"}
        if opset >= 11:
            assert len(model.graph.node) <= limit


@pytest.mark.core
@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize(("rank", "mode", "padding"), [(4, 0, 0), (4, 2, 2), (5, 1, 1)])
def test_unedited_model(tmp_path, opset: int, rank: int, mode: int, padding: int) -> None:
    """``F.grid_sample`` in a model becomes the node, by either exporter, and the file equals the model."""

    class Model(nn.Module):
        def forward(self, image: Tensor, grid: Tensor) -> Tensor:
            return F.grid_sample(image * 2, grid, MODES[mode], PADDINGS[padding], align_corners=True)

    shape, out = SHAPES[rank][0]
    path = tmp_path / "model.onnx"
    svexport.export(Model(), random_args(shape, out, True), path, opset=opset)
    (node,) = (node for node in onnx.load(path).graph.node if node.domain == "svexport")
    assert node.op_type == "SvGridSample"
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert (values["interpolation_mode"], values["padding_mode"], values["align_corners"]) == (mode, padding, 1)


# ---------------------------------------------------------------------------------------------- int8


@pytest.mark.parametrize("points", [torch.float32, torch.float16, torch.float64], ids=str)
@every_combination
def test_int8_images_are_their_values(rank: int, mode: int, padding: int, align: bool, points: torch.dtype) -> None:
    """In the op, its reference and the body; the result has the type of the grid, whose gradient is that of torch."""
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3}[points]
    for shape, out in SHAPES[rank]:
        image, grid = random_args(shape, out, align)
        codes, grid = (image * 60).round().clamp(-128, 127).to(torch.int8), grid.to(points)
        scale = float(torch.rand(()) + 0.1)
        values = codes.double() * (scale if points == torch.float64 else float(np.float32(scale)))
        leaf = grid.double().clone().requires_grad_()
        expected = torch_grid_sample(values, leaf, mode, padding, align)
        weight = torch.randn_like(expected)
        wanted = None if mode == 1 else torch.autograd.grad(expected, leaf, weight)[0]
        args = (mode, padding, align, scale)
        (body,) = run_op(OP, (codes, grid, *args), int(np.random.choice(OPSETS)), dynamic=rank == 4)
        torch.testing.assert_close(body, OP(codes, grid, *args), rtol=1e-5, atol=127 * scale * tolerance)
        for function in (OP, reference):
            own = grid.clone().requires_grad_()
            output = function(codes, own, *args)
            assert output.dtype == points
            torch.testing.assert_close(output.double(), expected.detach(), rtol=tolerance, atol=127 * scale * tolerance)
            if points != torch.float16 and mode != 1:
                (found,) = torch.autograd.grad(output, own, weight.to(points))
                torch.testing.assert_close(found.double(), wanted, rtol=100 * tolerance, atol=1e4 * tolerance)


class Quantized(nn.Module):
    """An image in int8 between two nodes."""

    def forward(self, image: Tensor, grid: Tensor) -> Tensor:
        return grid_sample(svexport.ops.quantize(image, 0.03), grid, align_corners=False, scale=0.03)


@pytest.mark.parametrize(("opset", "target"), [(11, None), (18, "10.0")])
def test_int8_image_in_a_file(opset: int, target: str | None, tmp_path: Path) -> None:
    args = random_args((2, 5, 7, 9), (3, 4), False)
    report = svexport.export(Quantized(), args, tmp_path / "m.onnx", opset=opset, target=target)
    assert report.verified
    graph = onnx.load(report.path).graph
    (node,) = (n for n in graph.node if n.op_type == "SvGridSample")
    assert next(a.f for a in node.attribute if a.name == "scale") == pytest.approx(0.03)
    (before,) = (n for n in graph.node if node.input[0] in n.output)
    assert before.op_type == "QuantizeLinear"


def test_int8_under_autocast_and_with_integers() -> None:
    codes, grid = torch.randint(-128, 128, (1, 2, 5, 7), dtype=torch.int8), torch.rand(1, 3, 2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = grid_sample(codes, grid, align_corners=False, scale=0.5)
    torch.testing.assert_close(output, grid_sample(codes.float() / 2, grid, align_corners=False))
    with pytest.raises(RuntimeError, match=r"floating-point grid; got torch\.int8"):
        grid_sample(codes, grid.to(torch.int8), align_corners=False)
    with pytest.raises(NotImplementedError, match=r"or int8 input; got torch\.uint8"):
        grid_sample(codes.to(torch.uint8), grid, align_corners=False)
