from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.emulation import Kernels, Memory, emulated

pytestmark = emulated("grid_sample*")

MODES, PADDINGS = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
TOLERANCES = {torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def in_layout(x: Tensor) -> Tensor:
    if random.random() < 0.5:
        return x
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def tactic() -> int:
    """Any; the planner's choice where it is not for the tensors."""
    return random.choice([0, 0, 1, 4, 16, *range(33, 38)])


def gradient_tactic() -> int:
    """Likewise: how sums are made, and with vectors and boxes by themselves."""
    return random.choice([0, 0, 1 + random.choice(range(6)) + random.choice([0, 8, 24])])


class Case:
    """Random sizes, points that scatter, lie close together or crowd, and what torch makes of them in float64."""

    def __init__(self, dtype: torch.dtype, spatial: list[int], points: list[int], n: int, c: int, mode: int) -> None:
        self.mode, self.padding, self.align_corners = mode, random.choice([0, 0, 0, 1, 2]), random.random() < 0.3
        kind = random.choice(["scattered", "smooth", "crowded", "mixed"])
        grid = torch.rand(n, *points, len(points)) * 2.4 - 1.2
        theta = torch.eye(len(points), len(points) + 1) + 0.1 * torch.randn(n, len(points), len(points) + 1)
        smooth = F.affine_grid(theta, [n, 1, *points], align_corners=False)
        if kind == "smooth":
            grid = smooth
        elif kind == "crowded":
            grid = grid * 0.02
        elif kind == "mixed":
            grid[..., : points[-1] // 2, :] = smooth[..., : points[-1] // 2, :]
        self.grid = grid.to(random.choice([dtype, torch.float32])).contiguous()
        self.input = in_layout(torch.randn(n, c, *spatial).to(dtype))
        grad = torch.randn(n, c, *points).to(dtype)
        # Points so close to where a neighbour begins that float32 takes another one have no gradient.
        size = torch.tensor(spatial[::-1], dtype=torch.float64)
        at = self.grid.double() + 1
        at = at / 2 * (size - 1) if self.align_corners else (at * size - 1) / 2
        off = at - 0.5 if mode == 1 else at
        unsure = (off - off.round()).abs() < 2e-3 + 1e-6 * size
        if self.padding:
            unsure |= (at.abs() < 2e-2) | ((at - size + 1).abs() < 2e-2)
            unsure |= ((at + 0.5).abs() < 2e-2) | ((at - size + 0.5).abs() < 2e-2)
        self.unsure = unsure.any(-1)
        self.grad = in_layout(grad.masked_fill(self.unsure[:, None], 0))
        self.shown = (
            f"{dtype} {list(self.input.shape)} {self.input.stride()} {points} {MODES[mode]} {PADDINGS[self.padding]}"
            f" align_corners={self.align_corners} {kind} grid {self.grid.dtype}"
        )
        self.tolerance = TOLERANCES[dtype] + 1e-6 * max(spatial)
        x, g = self.input.double().requires_grad_(), self.grid.double().requires_grad_()
        self.output = F.grid_sample(x, g, MODES[mode], PADDINGS[self.padding], self.align_corners)
        self.output.backward(self.grad.double())
        self.grad_input, self.grad_grid = x.grad, g.grad

    def check_forward(self, kernels: Kernels) -> None:
        output = in_layout(torch.full(self.output.shape, math.nan, dtype=self.input.dtype))
        memory = Memory.of(kernels.bytes("grid_sample_workspace", self.input, self.grid, self.mode))
        arguments = (self.input, self.grid, output, self.mode, self.padding, self.align_corners, 1.0, tactic())
        assert kernels("grid_sample", *arguments, then=memory), self.shown
        near = ~self.unsure[:, None].expand_as(output)
        error = (output.double() - self.output.detach())[near].abs().max() if near.any() else torch.zeros(())
        assert error < 5 * self.tolerance, f"{self.shown}: {error}"
        assert not output.isnan().any(), self.shown

    def check_backward(self, kernels: Kernels, deterministic: bool, input: bool, grid: bool) -> None:
        grad_input = torch.full(self.input.shape, math.nan, dtype=self.input.dtype) if input else None
        grad_grid = torch.full(self.grid.shape, math.nan, dtype=self.grid.dtype) if grid else None
        tactic = gradient_tactic()
        given = (self.grad, self.input, self.grid)
        size = kernels.bytes("grid_sample_backward_workspace", *given, self.mode, deterministic, input, grid, tactic)
        options = (self.mode, self.padding, self.align_corners, deterministic, tactic)
        assert kernels("grid_sample_backward", *given, grad_input, grad_grid, *options, Memory.of(size)), self.shown
        if grad_input is not None:
            error = (grad_input.double() - self.grad_input).abs().max() / self.grad_input.abs().max().clamp_min(1e-9)
            assert error < self.tolerance, f"gradient of input, {self.shown}: {error}"
        if grad_grid is not None:
            assert not grad_grid.isnan().any(), self.shown
            most = torch.finfo(grad_grid.dtype).max  # half has no number for some of a wide image
            pair = (t.double().clamp(-most, most) for t in (grad_grid, self.grad_grid))
            result, expected = (t.masked_fill(self.unsure[..., None], 0) for t in pair)
            error = (result - expected).abs().max() / expected.abs().max().clamp_min(1e-3)
            limit = 2 * max(self.tolerance, TOLERANCES[grad_grid.dtype])
            assert error < limit, f"gradient of grid, {self.shown}: {error}"


@DTYPES
@pytest.mark.parametrize("mode", range(3), ids=MODES)
@pytest.mark.parametrize("rank", [4, 5])
def test_random_images(kernels: Kernels, rank: int, mode: int, dtype: torch.dtype) -> None:
    if rank == 5 and mode == 2:
        pytest.skip("torch samples volumes bilinearly and at the nearest point only")
    for count in (132, 132, 16, 4):
        kernels.multiprocessors(count)
        spatial = [random.randint(1, 90 if rank == 4 else 20) for _ in range(rank - 2)]
        points = [random.randint(1, 50 if rank == 4 else 12) for _ in range(rank - 2)]
        c = min(random.choice([1, 2, 3, 4, 5, 8, 12, 17, 24, 40]), max(1, 60_000 // math.prod(spatial)))
        case = Case(dtype, spatial, points, random.choice([1, 2, 3]), c, mode)
        case.check_forward(kernels)
        wanted = random.choice([(True, True), (True, True), (True, False), (False, True)])
        case.check_backward(kernels, random.random() < 0.2, *wanted)


@DTYPES
@pytest.mark.parametrize("mode", range(2), ids=MODES[:2])
@pytest.mark.parametrize("rank", [4, 5])
def test_large_images(kernels: Kernels, rank: int, mode: int, dtype: torch.dtype) -> None:
    """A million elements and more, for which there are kernels of their own; few points, as they are interpreted."""
    kernels.multiprocessors(132)
    for c in (random.choice([1, 3, 4]), random.choice([5, 8, 16])):
        first = [random.randint(60, 200)] if rank == 4 else [random.randint(4, 12), random.randint(20, 60)]
        spatial = [*first, -(-(2**20 + random.randint(0, 5000)) // (c * math.prod(first)))]
        points = [random.randint(20, 60) for _ in range(2)] if rank == 4 else [random.randint(5, 14) for _ in range(3)]
        case = Case(dtype, spatial, points, 1, c, mode)
        case.check_forward(kernels)
        case.check_backward(kernels, False, True, random.random() < 0.7)
