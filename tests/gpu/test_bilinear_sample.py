from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from svexport.ops import _cuda, bilinear_sample
from svexport.ops.bilinear_sample import OP
from tests.gpu.support import TOLERANCES, gpu, relative_error
from tests.gpu.test_grid_sample import IMAGES, layouts

pytestmark = gpu


def random_pixels(shape: tuple, out: tuple) -> Tensor:
    """Points over twice the extent of the image, none at the edge of a pixel."""
    sizes = torch.tensor([shape[3], shape[2]])
    points = (shape[0], *out, 2)
    return ((torch.rand(points) * 2 - 0.5) * sizes).floor() + 0.05 + 0.9 * torch.rand(points)


def check(image: Tensor, grid: Tensor) -> None:
    leaves = [x.detach().requires_grad_() for x in (image, grid)]
    output, mask = bilinear_sample(*leaves)
    assert output.is_contiguous()
    assert mask.is_contiguous()
    assert output.dtype == mask.dtype == image.dtype
    precise = [x.detach().double().cpu().requires_grad_() for x in (image, grid)]
    expected, expected_mask = bilinear_sample(*precise)
    assert torch.equal(mask.double().cpu(), expected_mask)
    assert relative_error(output, expected) < TOLERANCES[image.dtype]
    weight = torch.randn_like(output)
    found = torch.autograd.grad(output, leaves, weight)
    wanted = torch.autograd.grad(expected, precise, weight.double().cpu())
    for gradient, leaf, e in zip(found, leaves, wanted, strict=True):
        assert gradient.dtype == leaf.dtype
        assert relative_error(gradient, e) < max(TOLERANCES[image.dtype], TOLERANCES[leaf.dtype])


def test_has_kernels() -> None:
    assert _cuda.load()
    assert {"bilinear_sample", "bilinear_sample_backward"} <= _cuda.kernels()


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_equals_float64(dtype: torch.dtype) -> None:
    for shape, out in IMAGES[4]:
        for image in layouts(torch.randn(shape, device="cuda", dtype=dtype)):
            check(image, random_pixels(shape, out).cuda())


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_many_points(dtype: torch.dtype) -> None:
    """Scattered, smooth, and an image of either."""
    shape, out = (2, 32, 64, 71), (180, 141)
    image = torch.randn(shape, device="cuda", dtype=dtype)
    rows, columns = torch.arange(180) * 0.4 - 0.33, torch.arange(141) * 0.5 - 0.27
    smooth = torch.stack(torch.meshgrid(rows, columns, indexing="ij")[::-1], -1).expand(2, *out, 2)
    mixed = torch.cat([random_pixels(shape, out)[:1], smooth[:1]])
    for grid in (random_pixels(shape, out), smooth.contiguous(), mixed):
        check(image, grid.cuda())


def test_special_coordinates() -> None:
    values = (math.nan, math.inf, -math.inf, 1e30, -1e30, -0.0, 0.0, -1e-7, 4.0, 5.999999, 6.0, 7.0)
    grid = torch.cartesian_prod(torch.tensor(values), torch.tensor(values)).view(1, 12, 12, 2)
    image = torch.randn(1, 16, 5, 7)
    expected = OP(image, grid)
    for layout in (torch.contiguous_format, torch.channels_last):
        actual = OP(image.cuda().contiguous(memory_format=layout), grid.cuda())
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a.cpu(), e, rtol=1e-5, atol=1e-5)


def test_half_coordinates_beside_float_images() -> None:
    image = torch.randn(2, 8, 30, 40, device="cuda")
    check(image, (torch.rand(2, 9, 4, 2, device="cuda") * 32).half())


@pytest.mark.parametrize(("image", "grid"), [((0, 2, 3, 4), (0, 2, 2, 2)), ((2, 3, 3, 4), (2, 0, 2, 2))])
def test_empty(image: tuple, grid: tuple) -> None:
    output, mask = OP(torch.randn(image, device="cuda"), torch.randn(grid, device="cuda"))
    assert output.shape == (*image[:2], *grid[1:3])
    assert mask.shape == (*grid[:3], 1)


def test_no_channels() -> None:
    output, mask = OP(torch.randn(2, 0, 3, 4, device="cuda"), torch.full((2, 5, 1, 2), 1.5, device="cuda"))
    assert output.shape == (2, 0, 5, 1)
    assert torch.equal(mask, torch.ones_like(mask))


def test_deterministic() -> None:
    image = torch.randn(2, 16, 4, 5, device="cuda")
    grid = torch.rand(2, 30, 30, 2, device="cuda") * 5
    gradients = [torch.randn_like(x) for x in OP(image, grid)]
    fast = torch.ops.svexport.bilinear_sample_backward(gradients, image, grid, [True, True])
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (
            torch.ops.svexport.bilinear_sample_backward(gradients, image, grid, [True, True]) for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b, f in zip(first, second, fast, strict=True):
        assert torch.equal(a, b)
        assert relative_error(a, f) < 1e-5
