from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from svexport.ops.ms_deform_attn import OP
from tests.emulation import Kernels, emulated, in_memory, poisoned

pytestmark = emulated("ms_deform_attn")

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def make(n: int, queries: int, m: int, d: int, points: int, levels: list[tuple[int, int]]) -> list[Tensor]:
    """Arguments; the places of points are exact in float32, so that the reference takes the same pixels in float64."""
    shapes = torch.tensor(levels)
    sizes = shapes.prod(1)
    locations = torch.randint(-500, 4600, (n, queries, m, len(levels), points, 2)) / 4096
    weights = torch.rand(n, queries, m, len(levels), points)
    return [torch.randn(n, int(sizes.sum()), m, d), shapes, sizes.cumsum(0) - sizes, locations, weights]


def random_case(dtype: torch.dtype, d: int) -> list[Tensor]:
    n, m, points = random.choice([1, 2, 3]), random.choice([1, 2, 3, 8]), random.choice([1, 2, 4, 4, 7])
    levels = [(random.randint(1, 20), random.randint(1, 20)) for _ in range(random.choice([1, 2, 3, 4]))]
    queries = max(1, random.choice([2000, 10_000]) // (n * m * d * points * len(levels)))
    value, shapes, starts, locations, weights = make(n, min(queries, 70), m, d, points, levels)
    if random.random() < 0.3:
        order = torch.randperm(len(levels))  # of the levels in memory
        sizes = shapes.prod(1)[order]
        starts[order] = sizes.cumsum(0) - sizes
    if random.random() < 0.3:
        shapes, starts = shapes.int(), starts.int()
    locations = locations.to(random.choice([dtype, torch.float32]))
    return [value.to(dtype), shapes, starts, locations, weights.to(random.choice([dtype, torch.float32]))]


def check(kernels: Kernels, args: list[Tensor], needed: tuple[bool, bool, bool] = (True, True, True)) -> None:
    value, shapes, starts, locations, weights = args
    shown = " ".join(f"{t.dtype} {tuple(t.shape)} {t.stride()}" for t in args)
    leaves = [t.double().requires_grad_() for t in (value, locations, weights)]
    expected = OP.reference(leaves[0], shapes, starts, *leaves[1:], 1.0)
    grad = torch.randn(expected.shape).to(value.dtype)
    wanted = torch.autograd.grad(expected, leaves, grad.double())

    output = poisoned(*expected.shape, dtype=value.dtype)
    assert kernels("ms_deform_attn", *args, output, 1.0, tactic()), shown
    compare(output, expected.detach(), f"output {shown}")

    if random.random() < 0.3:
        grad = in_memory(grad)
    deterministic = random.random() < 0.3
    scale = torch.tensor(2.0**40) if deterministic else None
    sums = torch.zeros(value.shape, dtype=torch.int64 if deterministic else torch.float32) if needed[0] else None
    results = [poisoned(*t.shape, dtype=t.dtype) if need else None for t, need in zip(args[3:], needed[1:])]
    assert kernels("ms_deform_attn_backward", grad, *args, sums, scale, *results, tactic()), shown
    if sums is not None and deterministic:
        sums = sums.double() / 2.0**40
    for result, gradient, name in zip([sums, *results], wanted, ("value", "locations", "weights")):
        if result is not None:
            compare(result, gradient, f"gradient of {name} {shown}")


def tactic() -> int:
    """Any; the planner's choice where it is not for the tensors."""
    return random.choice([0, 1, 4, 8])


def compare(result: Tensor, expected: Tensor, shown: str) -> None:
    if expected.numel():
        error = (result.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-6)
        assert error < TOLERANCES.get(result.dtype, 1e-5), f"{shown}: {error}"


@DTYPES
@pytest.mark.parametrize("d", [1, 4, 7, 8, 16, 32, 33, 36, 64, 264])
def test_random_shapes_and_layouts(kernels: Kernels, d: int, dtype: torch.dtype) -> None:
    for aligned in (True, False):
        args = random_case(dtype, d)
        if not aligned:
            args = [in_memory(t) for t in args]
        needed = random.choice([(True, True, True), tuple(random.random() < 0.5 for _ in range(3))])
        check(kernels, args, needed)


@pytest.mark.parametrize("points", [41, 67])
def test_more_samples_than_a_warp_holds(kernels: Kernels, points: int) -> None:
    check(kernels, make(1, 3, 2, random.choice([4, 32]), points, [(5, 7), (3, 4), (1, 1), (2, 9)]))


def test_points_on_pixels(kernels: Kernels) -> None:
    """Have the gradient of the reference."""
    value, shapes, starts, locations, weights = make(1, 20, 2, 8, 4, [(8, 8), (2, 4)])
    locations = (torch.randint(-1, 10, locations.shape) + 0.5) / 8
    check(kernels, [value, shapes, starts, locations, weights])


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf, 1e30, -1e30, 3e9, -2.0])
def test_a_strange_location_reads_zero(kernels: Kernels, strange: float) -> None:
    args = make(1, 3, 2, 8, 3, [(3, 5), (4, 4)])
    args[3][:, 0, ..., 0] = strange
    args[3][:, 1, :, 0, 0, 1] = strange
    check(kernels, args)


@pytest.mark.parametrize("shift", [7, -1000, 2**31 - 40])
def test_levels_larger_than_value_read_nothing_outside_of_it(kernels: Kernels, shift: int) -> None:
    value, shapes, starts, locations, weights = make(2, 9, 2, 8, 4, [(6, 7), (3, 3)])
    output = poisoned(2, 9, 16, dtype=value.dtype)
    assert kernels("ms_deform_attn", value, shapes + 3, starts + shift, locations, weights, output, 1.0, tactic())
    assert output.isfinite().all()


@pytest.mark.parametrize(("n", "queries", "points"), [(0, 3, 2), (2, 0, 2), (2, 3, 0)])
def test_empty(kernels: Kernels, n: int, queries: int, points: int) -> None:
    args = make(n, queries, 2, 4, points, [(3, 4), (1, 2)])
    output = poisoned(n, queries, 8, dtype=torch.float32)
    assert kernels("ms_deform_attn", *args, output, 1.0, tactic())
    assert not output.any()
    sums = torch.zeros_like(args[0])
    results = [torch.empty_like(t) for t in args[3:]]
    assert kernels("ms_deform_attn_backward", torch.ones_like(output), *args, sums, None, *results, tactic())
    assert not sums.any()


@DTYPES
@pytest.mark.parametrize("d", [1, 7, 8, 16, 32, 48, 80, 264])
def test_int8_values(kernels: Kernels, d: int, dtype: torch.dtype) -> None:
    """To any type, beside locations and weights of any."""
    for aligned in (True, False):
        value, shapes, starts, locations, weights = random_case(dtype, d)
        codes, scale = torch.randint(-128, 128, value.shape, dtype=torch.int8), 0.013
        expected = OP.reference(codes, shapes, starts, locations.double(), weights.double(), scale)
        args = [codes, shapes, starts, locations, weights]
        if not aligned:
            args = [in_memory(t) for t in args]
        shown = " ".join(f"{t.dtype} {tuple(t.shape)} {t.stride()}" for t in args)
        output = poisoned(*expected.shape, dtype=dtype)
        chosen = random.choice([0, 0, 1, 8, 16])
        assert kernels("ms_deform_attn", *args, output, scale, chosen), shown
        compare(output, expected, f"output {shown}")
