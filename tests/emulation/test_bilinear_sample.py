from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from svexport.ops.bilinear_sample import OP
from tests.emulation import Kernels, Memory, emulated, in_memory, poisoned
from tests.emulation.test_grid_sample import gradient_tactic, tactic

pytestmark = emulated("grid_sample*")

TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)

OF_PIXELS = (0, 3, True)
"""Mode, padding and align_corners by which the gradient of grid_sample is that of bilinear_sample."""


def random_points(n: int, points: list[int], height: int, width: int) -> Tensor:
    """In and around an image, scattered, close together or crowded: at places that half types hold as well."""
    size = torch.tensor([width, height])
    grid = torch.rand(n, *points, 2) * (size + 4) - 2
    kind = random.choice(["scattered", "scattered", "smooth", "crowded"])
    if kind == "smooth":
        rows, columns = (torch.linspace(0, s - 1, p) for s, p in zip((height, width), points, strict=True))
        grid = torch.stack(torch.meshgrid(rows, columns, indexing="ij")[::-1], -1) + 0.3 * torch.rand(n, 1, 1, 2)
    if kind == "crowded":
        grid = grid * 0.03 + size / 2
    return (grid * 4).round() / 4


def check(kernels: Kernels, image: Tensor, grid: Tensor, deterministic: bool = False) -> None:
    shown = f"{image.dtype} {tuple(image.shape)} {image.stride()} {grid.dtype} {tuple(grid.shape)} {grid.stride()}"
    leaves = [t.double().requires_grad_() for t in (image, grid)]
    expected, expected_mask = OP.reference(*leaves)
    output = poisoned(*expected.shape, dtype=image.dtype)
    if random.random() < 0.5:
        output = output.contiguous(memory_format=torch.channels_last)
    mask = poisoned(*expected_mask.shape, dtype=image.dtype)
    memory = Memory.of(kernels.bytes("grid_sample_workspace", image, grid, 0))
    assert kernels("bilinear_sample", image, grid, output, mask, tactic(), then=memory), shown
    assert torch.equal(mask.double(), expected_mask.detach()), shown
    compare(output, expected.detach(), f"output {shown}")

    grad = torch.randn(expected.shape).to(image.dtype)
    if random.random() < 0.5:
        grad = grad.contiguous(memory_format=torch.channels_last)
    wanted = torch.autograd.grad(expected, leaves, grad.double())
    needed = random.choice([(True, True), (True, True), (True, False), (False, True)])
    results = [poisoned(*t.shape, dtype=t.dtype) if n else None for t, n in zip((image, grid), needed, strict=True)]
    way = gradient_tactic()
    size = kernels.bytes("grid_sample_backward_workspace", grad, image, grid, 0, deterministic, *needed, way)
    arguments = (grad, image, grid, *results, *OF_PIXELS, deterministic, way)
    assert kernels("grid_sample_backward", *arguments, Memory.of(size)), shown
    for result, gradient, name in zip(results, wanted, ("image", "grid"), strict=True):
        if result is not None:
            compare(result, gradient, f"gradient of {name} {shown}")


def compare(result: Tensor, expected: Tensor, shown: str) -> None:
    if expected.numel():
        error = (result.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-3)
        assert error < 3 * TOLERANCES[result.dtype], f"{shown}: {error}"


@DTYPES
@pytest.mark.parametrize("channels", [1, 2, 3, 5, 8, 17, 24, 40])
def test_random_images(kernels: Kernels, channels: int, dtype: torch.dtype) -> None:
    for count in (132, random.choice([16, 4])):
        kernels.multiprocessors(count)
        n, height, width = random.choice([1, 2, 3]), random.randint(1, 60), random.randint(1, 60)
        points = [random.randint(1, 30) for _ in range(2)]
        layout = random.choice([torch.contiguous_format, torch.channels_last])
        image = torch.randn(n, channels, height, width).to(dtype).contiguous(memory_format=layout)
        if random.random() < 0.2:
            image = in_memory(image)
        grid = random_points(n, points, height, width).to(random.choice([dtype, torch.float32])).contiguous()
        if random.random() < 0.2:
            grid = in_memory(grid)
        check(kernels, image, grid, random.random() < 0.2)


def test_special_coordinates(kernels: Kernels) -> None:
    values = (math.nan, math.inf, -math.inf, 1e30, -1e30, -0.0, 0.0, -1e-7, 4.0, 5.999999, 6.0, 7.0)
    grid = torch.cartesian_prod(torch.tensor(values), torch.tensor(values)).view(1, 12, 12, 2)
    image = torch.randn(1, 16, 5, 7)
    expected, expected_mask = OP.reference(image, grid)
    for layout in (torch.contiguous_format, torch.channels_last):
        output, mask = poisoned(1, 16, 12, 12, dtype=image.dtype), poisoned(1, 12, 12, 1, dtype=image.dtype)
        given = image.contiguous(memory_format=layout), grid, output, mask
        memory = Memory.of(kernels.bytes("grid_sample_workspace", *given[:2], 0))
        assert kernels("bilinear_sample", *given, tactic(), then=memory)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(mask, expected_mask)


@pytest.mark.parametrize(("image", "points"), [((0, 2, 3, 4), (2, 2)), ((2, 3, 3, 4), (0, 2))], ids=str)
def test_empty(kernels: Kernels, image: tuple, points: tuple) -> None:
    x, grid = torch.randn(image), torch.full((image[0], *points, 2), 1.5)
    output, mask = poisoned(*image[:2], *points, dtype=x.dtype), poisoned(image[0], *points, 1, dtype=x.dtype)
    memory = Memory.of(kernels.bytes("grid_sample_workspace", x, grid, 0))
    assert kernels("bilinear_sample", x, grid, output, mask, tactic(), then=memory)
    assert torch.equal(mask, torch.ones_like(mask))
    results = poisoned(*x.shape, dtype=x.dtype), poisoned(*grid.shape, dtype=x.dtype)
    size = kernels.bytes("grid_sample_backward_workspace", output, x, grid, 0, False, True, True, 0)
    assert kernels("grid_sample_backward", output, x, grid, *results, *OF_PIXELS, False, 0, Memory.of(size))
    assert not any(t.any() for t in results)
