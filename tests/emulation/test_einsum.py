from __future__ import annotations

import dataclasses
import math
import random
from functools import partial

import pytest
import torch
from torch import Tensor

from svexport.kernels import planner
from tests.emulation import PRODUCT_TOLERANCES, Kernels, Memory, check_product, emulated

pytestmark = emulated("einsum*", "channel_*")

LARGE, SMALL = "soktv,skvmw->somtw", "soktv,somtw->skvmw"
DTYPES = pytest.mark.parametrize("dtype", PRODUCT_TOLERANCES, ids=str)


def make(sizes: list[int], order: list[int], dtype: torch.dtype, whole: bool, value: float | None = None) -> Tensor:
    """Its dimensions in an order in memory; whole: all of what could begin where 16 bytes do does."""
    count = math.prod(sizes)
    flat = torch.randn(count + 32) if value is None else torch.full((count + 32,), value)
    flat = flat.to(dtype)
    start = -flat.data_ptr() % 16 // flat.element_size() + (0 if whole else random.choice([0, 0, 1, 2, 3, 5]))
    view = flat[start : start + count]
    back = [order.index(i) for i in range(len(order))]
    return view.view([sizes[i] for i in order]).permute(back)


def large_order() -> list[int]:
    """Of S, O, K or M, then rows and columns, as they must be."""
    return [*random.sample(range(3), 3), 3, 4]


def small_order() -> list[int]:
    return random.sample(range(5), 5)


def random_sizes(dtype: torch.dtype, whole: bool) -> tuple[int, ...]:
    """S, O, K, M, T, V, W: few sums, many of them, or long ones."""
    each = 16 // dtype.itemsize if whole else 1
    kind = random.choice(["few", "few", "many", "long"])
    most = 64 if kind == "few" else 20
    s = random.randint(20, 60) if kind == "many" else random.choice([1, 1, 2, 3]) if kind == "few" else 1
    o = random.randint(40, 120) if kind == "long" else random.choice([1, 1, 2, 4])
    k, m = (random.randint(1, 8 if kind == "few" else 3) for _ in range(2))
    rows = random.choice([1, 2, 7, 31, 32, 33, random.randint(1, 150)])
    if kind == "long":
        rows = random.choice(
            [9, 40, 70, 72]
        )  # the last tile of these in turn in all places of shared memory, and others
    v, w = (random.randint(1, most // each) * each for _ in range(2))
    return s, o, k, m, rows, v, w


def run(kernels: Kernels, x: Tensor, y: Tensor, z: Tensor, sums: bool, count: int) -> str:
    """By one of the tactics for these, by chance; which, or nothing where no kernel is for them."""
    s, o, k, t, v = x.shape
    m, w = z.shape[2], z.shape[4]
    sizes = {"shared": s, "outer": o, "x_count": k, "rows": t, "x_width": v, "z_count": m, "z_width": w}
    gpu = dataclasses.replace(planner.GPUS["h100"], name="emulated", multiprocessors=count)
    plan = planner.plan("einsum", gpu, sums=int(sums), item_size=x.element_size(), **sizes)
    tactic = random.choice(plan.tactics)
    workspace = Memory.of(kernels.bytes("einsum_views_workspace", x, y, z, sums))
    kernels.launched()
    ran = kernels("einsum_views", x, y, z, sums, tactic.id, workspace, random.random() < 0.5)
    kernel = str(tactic.constants["kernel"]).replace("channel_", "") + "_kernel"
    assert ran == (kernel != "matrices_kernel") == (kernel in kernels.launched()), tactic
    return str(tactic) if ran else ""


@DTYPES
@pytest.mark.parametrize("whole", [True, False])
def test_large(kernels: Kernels, dtype: torch.dtype, whole: bool) -> None:
    done = 0
    for count in (132, 132, 132, 4, 2, 2, 1, 1, 1):
        kernels.multiprocessors(count)
        s, o, k, m, rows, v, w = random_sizes(dtype, whole)
        x = make([s, o, k, rows, v], large_order(), dtype, whole)
        y = make([s, k, v, m, w], small_order(), dtype, whole)
        z = make([s, o, m, rows, w], large_order(), dtype, whole, math.nan)
        if not (tactic := run(kernels, x, y, z, False, count)):
            continue
        done += 1
        shown = f"S{s} O{o} K{k} M{m} T{rows} V{v} W{w}, {count} multiprocessors, {tactic}"
        check_product(z, partial(torch.einsum, LARGE), x, y, shown=shown)
    assert done


@DTYPES
@pytest.mark.parametrize("whole", [True, False])
def test_small(kernels: Kernels, dtype: torch.dtype, whole: bool) -> None:
    done = 0
    for count in (132, 132, 132, 4, 2, 2, 1, 1, 1):
        kernels.multiprocessors(count)
        s, o, k, _, rows, v, w = random_sizes(dtype, whole)
        x = make([s, o, k, rows, v], large_order(), dtype, whole)
        z = make([s, o, 1, rows, w], large_order(), dtype, whole)
        y = make([s, k, v, 1, w], small_order(), dtype, whole, math.nan)
        if not (tactic := run(kernels, x, y, z, True, count)):
            continue
        done += 1
        shown = f"S{s} O{o} K{k} T{rows} V{v} W{w}, {count} multiprocessors, {tactic}"
        check_product(y, partial(torch.einsum, SMALL), x, z, shown=shown)
    assert done


@DTYPES
@pytest.mark.parametrize("whole", [True, False])
def test_what_is_not_finite(kernels: Kernels, dtype: torch.dtype, whole: bool) -> None:
    kernels.multiprocessors(2)
    for value in (math.inf, -math.inf, math.nan):
        s, o, k, m, rows, v, w = random_sizes(dtype, whole)
        x = make([s, o, k, rows, v], large_order(), dtype, whole)
        y = make([s, k, v, m, w], small_order(), dtype, whole)
        z = make([s, o, 1, rows, w], large_order(), dtype, whole)
        for t in (x, y, z):
            t[tuple(random.randrange(size) for size in t.shape)] = value
        large = make([s, o, m, rows, w], large_order(), dtype, whole, 7)
        small = make([s, k, v, 1, w], small_order(), dtype, whole, 7)
        results = []
        if run(kernels, x, y, large, False, 2):
            results.append((large, torch.einsum(LARGE, x.double(), y.double())))
        if run(kernels, x, small, z, True, 2):
            results.append((small, torch.einsum(SMALL, x.double(), z.double())))
        for result, expected in results:
            same = torch.where(expected.isfinite(), result.isfinite(), result.double() == expected)
            assert (same | (expected.isnan() & result.isnan())).all(), f"S{s} O{o} K{k} M{m} T{rows} V{v} W{w}, {value}"


# ------------------------------------------------------------------ channels: S, V and W are 1


def channels(
    samples: int, count: int, positions: int, dtype: torch.dtype, aligned: int, value: float | None = None
) -> Tensor:
    """Samples that begin at multiples of so many elements, with other channels between them."""
    skipped = random.choice([0, 0, 1])
    size = samples * (count + skipped) * positions
    flat = (torch.randn(size + 24) if value is None else torch.full((size + 24,), value)).to(dtype)
    start = -flat.data_ptr() % 16 // flat.element_size() + random.choice([0, aligned])
    return flat[start : start + size].view(1, samples, count + skipped, positions, 1)[:, :, :count]


def matrix(c: int, d: int, dtype: torch.dtype, value: float | None = None) -> Tensor:
    c, d, transposed = (c, d, False) if random.random() < 0.5 else (d, c, True)
    y = torch.randn(c, d).to(dtype) if value is None else torch.full((c, d), value, dtype=dtype)
    return (y.T if transposed else y)[None, :, None, :, None]


def random_channels(aligned: int) -> tuple[int, int, int, int]:
    counts = (random.choice([1, 3, 16, 17, 31, 64, 70, random.randint(1, 140)]) for _ in range(2))
    return random.randint(1, 3), *counts, aligned * random.choice([1, 5, 32, 33, random.randint(1, 200 // aligned)])


@DTYPES
@pytest.mark.parametrize("aligned", [4, 2, 1])
def test_product_of_channels(kernels: Kernels, dtype: torch.dtype, aligned: int) -> None:
    for count in (132, 2, 1):
        kernels.multiprocessors(count)
        n, c, d, s = random_channels(aligned)
        x, z = channels(n, c, s, dtype, aligned), channels(n, d, s, dtype, aligned, math.nan)
        y = matrix(c, d, dtype)
        tactic = run(kernels, x, y, z, False, count)
        assert tactic
        check_product(
            z, partial(torch.einsum, LARGE), x, y, shown=f"N{n} C{c} D{d} S{s}, {count} multiprocessors, {tactic}"
        )


@DTYPES
@pytest.mark.parametrize("aligned", [4, 2, 1])
def test_correlation_of_channels(kernels: Kernels, dtype: torch.dtype, aligned: int) -> None:
    for count in (132, 2, 1):
        kernels.multiprocessors(count)
        n, c, d, s = random_channels(aligned)
        x, z = channels(n, c, s, dtype, aligned), channels(n, d, s, dtype, aligned)
        y = matrix(c, d, dtype, math.nan)
        tactic = run(kernels, x, y, z, True, count)
        assert tactic
        check_product(
            y, partial(torch.einsum, SMALL), x, z, shown=f"N{n} C{c} D{d} S{s}, {count} multiprocessors, {tactic}"
        )
