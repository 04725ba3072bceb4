from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from svexport.ops import _cuda, grid_sample
from svexport.ops.grid_sample import OP
from tests.gpu.support import TOLERANCES, gpu, relative_error
from tests.ops.test_grid_sample import HUGE, SPECIAL, every_combination, random_args, special_args

pytestmark = gpu

HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
IMAGES = {
    4: [
        ((2, 3, 5, 7), (3, 4)),
        ((1, 1, 1, 1), (2, 3)),
        ((2, 8, 1, 6), (1, 5)),
        ((1, 16, 13, 1), (11, 1)),
        ((3, 64, 17, 12), (16, 8)),
        ((1, 72, 31, 33), (13, 10)),
        ((2, 256, 12, 20), (67, 1)),
        ((1, 40, 8, 8), (40, 41)),
        ((1, 12, 9, 9), (20, 4)),
        ((2, 1, 40, 50), (9, 7)),
    ],
    5: [
        ((2, 3, 3, 5, 7), (2, 3, 4)),
        ((1, 1, 1, 1, 1), (1, 2, 3)),
        ((1, 24, 4, 1, 3), (3, 8, 2)),
        ((2, 64, 5, 6, 7), (3, 5, 11)),
    ],
}


def layouts(image: Tensor) -> Iterator[Tensor]:
    last = torch.channels_last if image.dim() == 4 else torch.channels_last_3d
    yield image
    yield image.contiguous(memory_format=last)
    yield image.transpose(-1, -2).contiguous().transpose(-1, -2)
    padded = torch.nn.functional.pad(image, (1, 0))  # rows that no vector is aligned in
    yield padded[..., 1:]
    sliced = torch.cat([image, image], 1).contiguous(memory_format=last)
    yield sliced[:, 1 : 1 + image.shape[1]]
    yield image[:1].expand_as(image)


def on_gpu(image: Tensor, grid: Tensor, mode: int, padding: int, align: bool, scale: float = 1.0) -> Tensor:
    output = OP(image, grid, mode, padding, align, scale)
    assert output.is_contiguous()
    return output


def check(image: Tensor, grid: Tensor, *arguments: Any, backward: bool = True) -> None:
    """The op on the GPU against itself in float64 on the CPU, with gradients."""
    leaves = [x.detach().requires_grad_(backward) for x in (image, grid)]
    output = on_gpu(*leaves, *arguments)
    precise = [x.detach().double().cpu().requires_grad_(backward) for x in (image, grid)]
    expected = OP(*precise, *arguments, 1.0)
    assert relative_error(output, expected) < TOLERANCES[image.dtype]
    if backward:
        weight = torch.randn_like(output)
        found = torch.autograd.grad(output, leaves, weight)
        wanted = torch.autograd.grad(expected, precise, weight.double().cpu())
        for gradient, leaf, e in zip(found, leaves, wanted, strict=True):
            assert gradient.dtype == leaf.dtype
            limit = 2 * max(TOLERANCES[image.dtype], TOLERANCES[leaf.dtype])
            largest = (gradient.double().cpu() - e).abs().max()  # where gradients cancel to nothing
            assert relative_error(gradient, e) < limit or largest < limit


def test_has_kernels() -> None:
    assert _cuda.load()
    assert {"grid_sample", "grid_sample_backward"} <= _cuda.kernels()


@pytest.mark.parametrize("dtype", TOLERANCES)
@every_combination
def test_equals_float64(rank: int, mode: int, padding: int, align: bool, dtype: torch.dtype) -> None:
    for shape, out in IMAGES[rank]:
        image, grid = random_args(shape, out, align)
        image, grid = image.to("cuda", dtype), grid.to("cuda")
        check(image, grid, mode, padding, align)
        last = torch.channels_last if rank == 4 else torch.channels_last_3d
        check(image.contiguous(memory_format=last), grid, mode, padding, align)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rank", [4, 5])
def test_layouts(rank: int, dtype: torch.dtype) -> None:
    for (shape, out), padding in itertools.product(IMAGES[rank], (0, 2)):
        image, grid = (x.to("cuda") for x in random_args(shape, out, False))
        for view in layouts(image.to(dtype)):
            check(view, grid, 0, padding, False)
        strided = torch.stack([grid, grid + 1], -1).transpose(1, 2).contiguous().transpose(1, 2)[..., 0]
        check(image.to(dtype), strided, 0, padding, False)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("mode", [0, 1])
def test_channels_last_of_any_number(mode: int, dtype: torch.dtype) -> None:
    """Read side by side, one or two at once, or by each point's own thread; images that no vector is aligned in."""
    for shape, out in [
        ((2, 37, 40, 45), (9, 31)),
        ((1, 130, 33, 21), (20, 15)),
        ((1, 30, 50, 50), (41, 43)),
        ((1, 14, 90, 91), (40, 33)),
        ((1, 26, 12, 13, 14), (8, 9, 11)),
        ((2, 16, 40, 40), (120, 110)),
        ((1, 128, 64, 64), (67, 31)),
    ]:
        image, grid = (x.to("cuda") for x in random_args(shape, out, False))
        grid.view(-1)[: 4 * len(out) : len(out)] = grid.new_tensor([math.nan, math.inf, -math.inf, 1e30])
        for view in layouts(image.to(dtype)):
            check(view, grid, mode, 0, False, backward=False)
            check(view, grid.nan_to_num(0).clamp(-2, 2), mode, 2, False, backward=False)


def shifted(images: int, out: tuple[int, ...]) -> Tensor:
    """Points as far apart as the pixels of an image of their number, every row between two rows of pixels."""
    theta = torch.eye(len(out), len(out) + 1)
    theta[:, -1] = 0.013
    return F.affine_grid(theta.expand(images, -1, -1), [images, 1, *out], align_corners=False)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_points_that_are_neighbours(padding: int, dtype: torch.dtype) -> None:
    """Many threads add to each pixel at once."""
    for shape in ((2, 3, 50, 72), (1, 1, 31, 36), (3, 1, 17, 33), (1, 20, 9, 65), (1, 4, 5, 16, 40), (2, 3, 3, 7, 35)):
        grid = shifted(shape[0], shape[2:])
        check(torch.randn(shape, device="cuda", dtype=dtype), grid.cuda(), 0, padding, False)


def check_anywhere(image: Tensor, grid: Tensor, padding: int, shift: int, bound: float) -> None:
    """Coordinates in float32 and in the type of the image, which also lies so many elements off its alignment."""
    shifted_image = torch.cat([image.flatten()[:shift], image.flatten()])[shift:].view(image.shape)
    for coordinates in (grid, grid.to(image.dtype)):
        expected = OP(image.double().cpu(), coordinates.double().cpu(), 0, padding, False, 1.0)
        for data in (image, shifted_image):
            assert relative_error(on_gpu(data, coordinates, 0, padding, False), expected) < bound


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_planes(padding: int, dtype: torch.dtype) -> None:
    """Few points of NCHW images, coordinates in float32 and in the type of the image."""
    for shape, out in [
        ((2, 3, 40, 64), (11, 33)),
        ((1, 1, 40, 64), (30, 30)),
        ((1, 1, 33, 62), (21, 7)),
        ((1, 5, 7, 4), (6, 6)),
    ]:
        image = torch.randn(shape, device="cuda", dtype=dtype)
        grid = many("scattered", shape[0], out)
        check_anywhere(image, grid, padding, 2, TOLERANCES[dtype])


def many(points: str, images: int, out: tuple[int, ...], *window: slice) -> Tensor:
    """Points on the GPU that lie as said; mixed: smooth, but in a window of the last image; strays: but for a few."""
    axes = len(out)
    scattered = torch.rand(images, *out, axes, device="cuda") * 2.2 - 1.1
    if points == "scattered":
        return scattered
    if points == "crowded":
        return 0.01 * scattered
    theta = torch.tensor([[1.0, 0.1, 0, 0.03], [-0.05, 0.9, 0, 0.01], [0, 0.07, 0.95, -0.02]], device="cuda")
    if points == "turned":
        theta[1, 0] = -0.3
    if points == "level":
        theta[0, 1] = theta[1, 0] = 0
    theta = theta[:axes, [*range(axes), 3]]
    grid = F.affine_grid(theta.expand(images, axes, axes + 1), [images, 1, *out], align_corners=False).clone()
    if points == "mixed":
        grid[(-1, *window)] = scattered[(-1, *window)]
    if points == "strays":
        grid.view(-1, axes)[4001::5003] = scattered.view(-1, axes)[4001::5003]
    return grid


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("points", ["smooth", "scattered", "mixed", "crowded"])
def test_many_points(points: str, dtype: torch.dtype) -> None:
    """Pixels come from planes, boxes in shared memory or a copy in channels-last: by how many points, and where."""
    for shape, out in [((1, 72, 53, 61), (251, 240)), ((2, 64, 96, 128), (160, 220)), ((3, 32, 64, 71), (140, 131))]:
        image = torch.randn(shape, device="cuda", dtype=dtype)
        grid = many(points, shape[0], out, slice(30, 70), slice(40, 90))
        strided = torch.cat([grid, grid], -1)[..., :2]  # not read by planes
        for coordinates, padding in itertools.product((grid, grid.half(), strided), (0, 1)):
            check(image, coordinates, 0, padding, False, backward=False)
        gradient = torch.randn(*shape[:2], *out, device="cuda", dtype=dtype)
        (found,) = torch.ops.svexport.grid_sample_backward([gradient], image, grid, 0, 0, False, 1.0, [True, False])
        precise = image.double().cpu().requires_grad_()
        output = OP(precise, grid.double().cpu(), 0, 0, False, 1.0)
        (wanted,) = torch.autograd.grad(output, precise, gradient.double().cpu())
        assert relative_error(found, wanted) < TOLERANCES[dtype]


TACTICS = {"points": (1, 4), "vectors": (33,), "narrow": (34,), "planes": (35,), "sampled": (36,), "boxes": (37,)}
"""The ids of tactics.h."""
SUMS = ["none", "ordered", "plane", "pixels", "pairs", "lists"]
"""The ids of gradient.h are one more than these, and 8 for vectors, 16 for boxes."""
SHAPES = [
    ((2, 3, 40, 64), (11, 33)),
    ((1, 24, 21, 18), (67, 3)),
    ((2, 40, 50, 44), (64, 46)),
    ((1, 26, 12, 13, 14), (8, 9, 11)),
    ((1, 64, 200, 216), (256, 255)),
]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", TACTICS)
def test_each_tactic_is_the_reference(name: str, dtype: torch.dtype) -> None:
    """Whatever it costs; where tensors have no such tactic, the cheapest runs."""
    try:
        for tactic, (shape, out) in itertools.product(TACTICS[name], SHAPES):
            torch.ops.svexport._force_tactic("grid_sample", tactic)
            for points in ("smooth", "scattered"):
                grid = many(points, shape[0], out)
                for image in itertools.islice(layouts(torch.randn(shape, device="cuda", dtype=dtype)), 2):
                    expected = OP(image.double().cpu(), grid.double().cpu(), 0, 0, False, 1.0)
                    found = on_gpu(image, grid, 0, 0, False)
                    assert relative_error(found, expected) < max(TOLERANCES[dtype], 5e-5)  # rounded coordinates
    finally:
        torch.ops.svexport._force_tactic("grid_sample", 0)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("parts", [0, 8, 24])
@pytest.mark.parametrize("sums", SUMS[2:])
def test_each_tactic_of_the_gradient_is_the_reference(sums: str, parts: int, dtype: torch.dtype) -> None:
    torch.ops.svexport._force_tactic("grid_sample_backward", 1 + SUMS.index(sums) + parts)
    try:
        for (shape, out), points in itertools.product(SHAPES, ("level", "scattered", "mixed")):
            check_gradients(shape, out, points, 0, dtype)
    finally:
        torch.ops.svexport._force_tactic("grid_sample_backward", 0)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("points", ["smooth", "tilted", "scattered", "mixed"])
def test_planes_in_shared_memory(points: str, dtype: torch.dtype) -> None:
    """Some million results: from memory, or from planes in one or two bands of rows, by where a sample of points is."""
    for shape, out in [
        ((1, 24, 203, 210), (211, 209)),
        ((1, 9, 301, 260), (300, 400)),
        ((3, 33, 57, 46), (64, 170)),
        ((2, 64, 16, 500), (70, 121)),
    ]:
        image = torch.randn(shape, device="cuda", dtype=dtype)
        grid = many("smooth" if points == "tilted" else points, shape[0], out, slice(0, out[0] // 2), slice(None))
        grid = grid.flip(-1).contiguous() if points == "tilted" else grid
        for i, x in enumerate((float("nan"), 3.0, -3.0)):
            grid.view(-1, 2)[i::997, i % 2] = x
        for padding in (0, 1, 2):
            check_anywhere(image, grid, padding, 1, max(TOLERANCES[dtype], 5e-5))  # rounded coordinates
        grid.view(-1, 2)[5::997, 1] = float("inf")  # a row of no band
        expected = OP(image.double().cpu(), grid.double().cpu(), 0, 0, False, 1.0)
        torch.full(expected.shape, 7.0, device="cuda", dtype=dtype)  # is what stays of a result that is not written
        assert relative_error(on_gpu(image, grid, 0, 0, False), expected) < max(TOLERANCES[dtype], 5e-5)


def check_gradients(shape: tuple[int, ...], out: tuple[int, ...], points: str, mode: int, dtype: torch.dtype) -> None:
    """Beside the reference in float32, contiguous and channels-last, both and that of the image alone."""
    grid = many(points, shape[0], out)
    image = torch.randn(shape, device="cuda", dtype=dtype)
    gradient = torch.randn(*shape[:2], *out, device="cuda", dtype=dtype)
    # At the edge of a pixel, rounding decides which two a point lies between, and half way between two which of them is
    # nearest: these points have no gradient.
    pixel = (grid.double() + 1) * torch.tensor(shape[:1:-1], device="cuda") / 2 - (1 if mode == 1 else 0.5)
    gradient.masked_fill_(((pixel - pixel.round()).abs() < 1e-3).any(-1)[:, None], 0)
    leaves = [image.float().cpu().requires_grad_(), grid.cpu().requires_grad_()]
    wanted = torch.autograd.grad(OP(*leaves, mode, 0, False, 1.0), leaves, gradient.float().cpu())
    for layout in (torch.contiguous_format, torch.channels_last if len(out) == 2 else torch.channels_last_3d):
        arguments = ([gradient], image.contiguous(memory_format=layout), grid, mode, 0, False, 1.0)
        both = torch.ops.svexport.grid_sample_backward(*arguments, [True, True])
        (first,) = torch.ops.svexport.grid_sample_backward(*arguments, [True, False])
        assert relative_error(both[0], wanted[0]) < 2 * TOLERANCES[dtype]
        assert relative_error(first, wanted[0]) < 2 * TOLERANCES[dtype]
        assert relative_error(both[1], wanted[1]) < 2e-5


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("points", ["smooth", "level", "turned", "scattered", "mixed", "crowded"])
def test_gradients_of_many_points(points: str, dtype: torch.dtype) -> None:
    """Pixels are written by blocks that own them, or added up, by where the points are and how large everything is."""
    for shape, out in [
        ((4, 16, 300, 264), (290, 272)),
        ((4, 24, 301, 263), (291, 270)),
        ((1, 64, 260, 263), (304, 192)),
        ((2, 3, 700, 1011), (301, 333)),
        ((1, 20, 411, 530), (400, 333)),
        ((1, 1, 401, 334), (300, 290)),
        ((2, 4, 401, 423), (390, 401)),
        ((1, 6, 850, 830), (800, 790)),
        ((1, 8, 263, 257), (261, 270)),
        ((1, 128, 190, 181), (201, 190)),
        ((3, 8, 131, 90), (261, 183)),
        ((1, 36, 97, 71), (151, 123)),
    ]:
        check_gradients(shape, out, points, 0, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("points", ["smooth", "scattered", "crowded"])
def test_gradients_of_fewer_points_than_pixels(points: str, mode: int, dtype: torch.dtype) -> None:
    """Sums in shared memory, where a thread has several points too, by atomics, or lists of large tiles."""
    for shape, out in [
        ((1, 4, 1103, 901), (61, 70)),
        ((2, 5, 640, 700), (100, 131)),
        ((3, 8, 420, 416), (210, 208)),
        ((1, 3, 750, 1120), (373, 560)),
        ((1, 1, 200, 301), (61, 40)),
        ((40, 2, 90, 160), (41, 33)),
        ((1, 24, 150, 160), (29, 37)),
    ]:
        check_gradients(shape, out, points, mode, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("points", ["smooth", "scattered", "mixed", "crowded"])
def test_gradients_of_volumes(points: str, mode: int, dtype: torch.dtype) -> None:
    """Large and small, more points than pixels and fewer, of few channels and of many."""
    for shape, out in [
        ((2, 6, 31, 67, 75), (14, 59, 33)),
        ((1, 24, 40, 33, 45), (21, 30, 43)),
        ((1, 40, 3, 101, 123), (2, 60, 170)),
        ((3, 3, 21, 24, 18), (20, 25, 30)),
    ]:
        check_gradients(shape, out, points, mode, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("points", ["smooth", "scattered", "mixed", "crowded"])
def test_gradients_of_nearest_points(points: str, dtype: torch.dtype) -> None:
    """Of large maps of half types too, whose sums are floats."""
    for shape, out in [((1, 3, 511, 730), (500, 633)), ((2, 40, 190, 181), (201, 190)), ((1, 5, 504, 503), (58, 151))]:
        check_gradients(shape, out, points, 1, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("points", ["smooth", "level", "turned", "strays", "scattered", "mixed", "crowded"])
def test_gradients_of_few_channels(points: str, dtype: torch.dtype) -> None:
    """Sums of pairs of pixels, by neighbours, or of each for itself."""
    for shape, out in [
        ((1, 1, 401, 334), (401, 334)),
        ((2, 3, 180, 201), (190, 170)),
        ((1, 4, 223, 257), (333, 201)),
        ((3, 2, 130, 400), (100, 391)),
    ]:
        check_gradients(shape, out, points, 0, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("mode", [0, 1])
def test_gradients_with_special_points(mode: int, dtype: torch.dtype) -> None:
    """Points that are nowhere add nothing, however the others are added up."""
    special = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -1e30, 3.0])
    for shape, out in [
        ((1, 1, 401, 334), (401, 334)),
        ((1, 5, 504, 503), (158, 151)),
        ((2, 6, 31, 67, 75), (14, 59, 33)),
    ]:
        grid = many("smooth", shape[0], out)
        rows = grid.view(-1, len(out))
        for i, x in enumerate(special):
            rows[17 + i :: 997, i % len(out)] = x
        image = torch.randn(shape, device="cuda", dtype=dtype)
        gradient = torch.randn(*shape[:2], *out, device="cuda", dtype=dtype)
        (found,) = torch.ops.svexport.grid_sample_backward([gradient], image, grid, mode, 0, False, 1.0, [True, False])
        leaf = image.float().cpu().requires_grad_()
        (wanted,) = torch.autograd.grad(OP(leaf, grid.cpu(), mode, 0, False, 1.0), leaf, gradient.float().cpu())
        assert relative_error(found, wanted) < 2 * TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_one_channel(dtype: torch.dtype) -> None:
    """Two points a thread, if there is an even number of them and they are aligned."""
    for shape, out in [((2, 1, 33, 47), (12, 10)), ((3, 1, 9, 14), (5, 7)), ((1, 1, 64, 80), (64, 80))]:
        image, grid = random_args(shape, out, False)
        for precision in {dtype, SINGLE}:
            points = grid.to("cuda", precision)
            shifted = torch.cat([points.new_zeros(2), points.flatten()])[2:].view_as(points)
            for view in (points, shifted):
                check(image.to("cuda", dtype), view, 0, 0, False)
                check(image.to("cuda", dtype), view, 0, 0, True, backward=False)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_half_grids(dtype: torch.dtype) -> None:
    for shape, out in IMAGES[4]:
        check(*(x.to("cuda", dtype) for x in random_args(shape, out, False)), 0, 1, False)


@every_combination
def test_special_coordinates(rank: int, mode: int, padding: int, align: bool) -> None:
    """NaN, infinite and huge coordinates are what they are on a CPU."""
    image, grid = special_args(rank, SPECIAL if padding == 2 else SPECIAL + HUGE)
    image = image.repeat_interleave(4, 1)
    expected = OP(image, grid, mode, padding, align, 1.0)
    last = torch.channels_last if rank == 4 else torch.channels_last_3d
    for view in (image.cuda(), image.cuda().contiguous(memory_format=last)):
        actual = OP(view, grid.cuda(), mode, padding, align, 1.0)
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_pixels_outside_are_not_read(mode: int) -> None:
    """A NaN or infinite pixel shows where a point has it among its own, and nowhere else."""
    image, grid = random_args((1, 8, 6, 7), (50, 1), False)
    image[0, :, 0, 0], image[0, :, 5, 6] = float("nan"), float("inf")
    expected = OP(image.double(), grid.double(), mode, 0, False, 1.0)
    for view in (image.cuda(), image.cuda().contiguous(memory_format=torch.channels_last)):
        actual = OP(view, grid.cuda(), mode, 0, False, 1.0).cpu()
        assert torch.equal(actual.isnan(), expected.isnan())
        assert torch.equal(actual.isinf(), expected.isinf())


def test_nearest_rounds_like_a_cpu() -> None:
    """Coordinates in the middle between two pixels, by affine grids as users make them."""
    image = torch.randn(1, 2, 37, 53)
    for theta in ([[-1, 0, 0], [0, 1, 0]], [[0, 1, 0], [-1, 0, 0]], [[0.5, 0, 0], [0, 0.5, 0]]):
        grid = F.affine_grid(torch.tensor([theta], dtype=torch.float32), [1, 2, 74, 106], align_corners=False)
        assert torch.equal(OP(image.cuda(), grid.cuda(), 1, 0, False, 1.0).cpu(), OP(image, grid, 1, 0, False, 1.0))


@pytest.mark.parametrize(
    ("image", "grid"),
    [
        ((0, 2, 3, 4), (0, 2, 2, 2)),
        ((2, 0, 3, 4), (2, 2, 2, 2)),
        ((2, 3, 3, 4), (2, 0, 2, 2)),
        ((1, 8, 2, 3, 4), (1, 2, 0, 2, 3)),
    ],
)
def test_empty(image: tuple, grid: tuple) -> None:
    leaves = [torch.randn(s, device="cuda", requires_grad=True) for s in (image, grid)]
    output = OP(*leaves, 0, 0, False, 1.0)
    assert output.shape == (*image[:2], *grid[1:-1])
    for gradient, leaf in zip(torch.autograd.grad(output.sum(), leaves), leaves, strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_expanded_gradient(layout: torch.memory_format) -> None:
    """The gradient of a sum is one number with strides of zero."""
    image, grid = random_args((2, 64, 9, 11), (30, 20), False)
    leaves = [image.cuda().contiguous(memory_format=layout).requires_grad_(), grid.cuda().requires_grad_()]
    found = torch.autograd.grad(OP(*leaves, 0, 0, False, 1.0).sum(), leaves)
    precise = [image.double().requires_grad_(), grid.double().requires_grad_()]
    wanted = torch.autograd.grad(OP(*precise, 0, 0, False, 1.0).sum(), precise)
    for gradient, e in zip(found, wanted, strict=True):
        assert relative_error(gradient, e) < 1e-5


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_channel_last_gradient(layout: torch.memory_format) -> None:
    image, grid = random_args((2, 64, 9, 11), (30, 20), False)
    leaves = [image.cuda().contiguous(memory_format=layout).requires_grad_(), grid.cuda().requires_grad_()]
    output = OP(*leaves, 0, 0, False, 1.0)
    weight = torch.randn_like(output)
    found = torch.autograd.grad(output, leaves, weight.contiguous(memory_format=torch.channels_last))
    precise = [image.double().requires_grad_(), grid.double().requires_grad_()]
    wanted = torch.autograd.grad(OP(*precise, 0, 0, False, 1.0), precise, weight.double().cpu())
    for gradient, e in zip(found, wanted, strict=True):
        assert relative_error(gradient, e) < 1e-5


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_one_gradient(needs: tuple[bool, bool], dtype: torch.dtype) -> None:
    for shape, out in IMAGES[4]:
        image, grid = (x.to("cuda") for x in random_args(shape, out, False))
        image = image.to(dtype)
        gradient = torch.randn(*shape[:2], *out, device="cuda", dtype=dtype)
        both = torch.ops.svexport.grid_sample_backward([gradient], image, grid, 0, 0, False, 1.0, [True, True])
        one = torch.ops.svexport.grid_sample_backward([gradient], image, grid, 0, 0, False, 1.0, list(needs))
        assert len(one) == 1
        assert relative_error(one[0], both[needs.index(True)]) < TOLERANCES[dtype]


@every_combination
def test_deterministic(rank: int, mode: int, padding: int, align: bool) -> None:
    """Many points on few pixels: whatever depends on the order of additions would show."""
    image = torch.randn(2, 16, *(3, 4, 5)[2 - rank :], device="cuda", dtype=HALF)
    grid = torch.rand(2, *[16] * (rank - 2), rank - 2, device="cuda") * 2 - 1
    gradient = torch.randn(*image.shape[:2], *grid.shape[1:-1], device="cuda", dtype=HALF)
    arguments = ([gradient], image, grid, mode, padding, align, 1.0, [True, True])
    fast = torch.ops.svexport.grid_sample_backward(*arguments)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (torch.ops.svexport.grid_sample_backward(*arguments) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b, f in zip(first, second, fast, strict=True):
        assert torch.equal(a, b)
        assert relative_error(a, f) < 2e-3


@pytest.mark.large
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_more_elements_than_32_bits_count(layout: torch.memory_format) -> None:
    image = torch.empty((3, 4096, 422, 422), device="cuda", dtype=HALF, memory_format=layout)
    assert image[:2].numel() < 2**31 < image.numel()
    image[2].normal_()
    grid = torch.rand(3, 5, 3, 2, device="cuda") * 2 - 1
    output = OP(image, grid, 0, 0, False, 1.0)
    assert torch.equal(output[2:], OP(image[2:].clone(memory_format=layout), grid[2:], 0, 0, False, 1.0))


@pytest.mark.large
def test_more_points_than_32_bits_count() -> None:
    image = torch.randn(3, 1, 5, 7, device="cuda", dtype=HALF)
    grid = torch.rand(3, 27000, 27000, 2, device="cuda", dtype=HALF) * 2 - 1
    output = OP(image, grid, 0, 0, False, 1.0)
    assert output.numel() > 2**31
    assert torch.equal(output[2:, :, -3:], OP(image[2:], grid[2:, -3:], 0, 0, False, 1.0))


@pytest.mark.large
def test_more_images_than_a_grid_has_blocks() -> None:
    image, grid = torch.randn(70000, 8, 2, 2), torch.rand(70000, 1, 1, 2) * 2 - 1
    check(image.cuda(), grid.cuda(), 0, 0, False)
    check(image.cuda().contiguous(memory_format=torch.channels_last), grid.cuda(), 0, 0, False)


def test_memory_of_a_half_model() -> None:
    """Nothing larger than the output is allocated, whatever the layout."""
    for layout in (torch.contiguous_format, torch.channels_last):
        image = torch.randn(2, 64, 64, 64, device="cuda", dtype=HALF).contiguous(memory_format=layout)
        grid = torch.rand(2, 32, 32, 2, device="cuda") * 2 - 1
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output = grid_sample(image, grid, align_corners=False)
        assert torch.cuda.max_memory_allocated() - before <= output.numel() * output.element_size() + 1024


# ------------------------------------------------------------------ int8


def in_blocks(codes: Tensor, size: int) -> Tensor:
    """TensorRT's CHW4 and CHW32: ``(N, ceil(C/size), H, W, size)``."""
    padded = F.pad(codes, (0, 0, 0, 0, 0, -codes.shape[1] % size), value=99)
    return padded.unflatten(1, (-1, size)).movedim(2, -1).contiguous()


@pytest.mark.parametrize("dtype", TOLERANCES)
@every_combination
def test_int8_images(rank: int, mode: int, padding: int, align: bool, dtype: torch.dtype) -> None:
    """As the op takes them and in TensorRT's formats, to NCHW and channels-last."""
    last = torch.channels_last if rank == 4 else torch.channels_last_3d
    for shape, out in IMAGES[rank]:
        image, grid = random_args(shape, out, align)
        codes, scale = (image * 50).round().clamp(-128, 127).to(torch.int8), 0.02
        expected = OP(codes, grid.double(), mode, padding, align, scale)
        for given in layouts(codes.cuda()):
            wanted = OP(given.cpu(), grid.double(), mode, padding, align, scale)
            assert relative_error(on_gpu(given, grid.cuda(), mode, padding, align, scale), wanted) < 2e-5
        packed = [in_blocks(codes, size) for size in (4, 32)] if rank == 4 else []
        for given in (codes, codes.contiguous(memory_format=last), *packed):
            for layout in (torch.contiguous_format, last):
                output = torch.full(expected.shape, math.nan, dtype=dtype, device="cuda").to(memory_format=layout)
                torch.ops.svexport_internal.grid_sample_int8(
                    given.cuda(), grid.cuda(), mode, padding, align, scale, output
                )
                assert relative_error(output, expected) < TOLERANCES[dtype], (given.shape, given.stride(), layout)


def test_grid_of_an_int8_image_has_a_gradient() -> None:
    """By the reference: no kernel is for it."""
    image, grid = random_args((2, 8, 9, 7), (5, 6), False)
    codes = (image * 50).clamp(-128, 127).to(torch.int8)
    leaves = [grid.cuda().requires_grad_(), grid.double().requires_grad_()]
    outputs = [OP(c, leaf, 0, 0, False, 0.02) for c, leaf in zip((codes.cuda(), codes), leaves, strict=True)]
    found, wanted = (torch.autograd.grad(y.square().sum(), leaf)[0] for y, leaf in zip(outputs, leaves, strict=True))
    assert relative_error(found, wanted) < 1e-4
