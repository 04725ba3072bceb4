"""The emulation itself: correct kernels give correct numbers, and faults in others are found."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from tests.emulation import HERE, Kernels, emulated

pytestmark = emulated("kernels")

FILLING, MISALIGNED, REVERSED, NEIGHBOURS, UNWRITTEN, DEADLOCK, MISSING_LANE = 0, 1, 2, 4, 6, 7, 8
SUM, VOTES, HALVES, PIPELINE, TOO_LARGE, PAIRS, PRODUCT, ENGINE = 9, 10, 11, 12, 14, 15, 16, 17
LATE, WIDE_PRODUCT, CALLS, DIRECTED, UNKNOWN = 18, 19, 20, 21, 99


def aligned(size: int) -> Tensor:
    """Random, at a multiple of 16 bytes."""
    flat = torch.randn(size + 4)
    start = -flat.data_ptr() % 16 // 4
    return flat[start : start + size]


def test_an_access_outside_of_what_is_allowed(kernels: Kernels) -> None:
    x = torch.full((100,), -1.0)
    assert kernels("emulated", FILLING, x, None, None, 100)
    assert torch.equal(x, torch.arange(100.0))
    with pytest.raises(AssertionError, match=r"filling_kernel.*outside of what is allowed: st\.global"):
        kernels("emulated", FILLING, x, None, None, 101)


@pytest.mark.parametrize(
    ("which", "threads", "message"),
    [
        (MISALIGNED, 4, "not aligned"),
        (REVERSED + 1, 64, "a race: another thread"),
        (NEIGHBOURS + 1, 32, "a race: another thread"),
        (DEADLOCK, 64, "a deadlock"),
        (MISSING_LANE, 32, "a lane that is not there"),
        (TOO_LARGE, 1, "cudaError"),
    ],
)
def test_what_is_wrong_is_found(kernels: Kernels, which: int, threads: int, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        kernels("emulated", which, torch.randn(threads), None, None, 1)
    x = torch.empty(3)
    assert kernels("emulated", FILLING, x, None, None, 3), "and what comes after is not concerned"


def test_barriers_of_blocks_and_warps(kernels: Kernels) -> None:
    x = torch.randn(64)
    expected = x.flip(0)
    assert kernels("emulated", REVERSED, x, None, None, 0)
    assert torch.equal(x, expected)
    x = torch.randn(32)
    expected = x.view(16, 2).flip(1).flatten()
    assert kernels("emulated", NEIGHBOURS, x, None, None, 0)
    assert torch.equal(x, expected)
    assert kernels.launched()["reversed_kernel"] >= 1


def test_shared_memory_that_nobody_has_written_is_not_a_number(kernels: Kernels) -> None:
    x = torch.randn(64)
    expected = x.clone()
    expected[0] = torch.nan
    assert kernels("emulated", UNWRITTEN, x, None, None, 0)
    torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("n", [1, 31, 97, 1000])
def test_a_sum_of_a_block(kernels: Kernels, n: int) -> None:
    x, y = torch.randn(n), torch.full((n,), torch.nan)
    assert kernels("emulated", SUM, x, y, None, n)
    torch.testing.assert_close(y, x.sum().expand(n), rtol=1e-5, atol=1e-5)


def test_votes(kernels: Kernels) -> None:
    x = torch.randint(0, 4, (32,), dtype=torch.int32)
    y = torch.full((32, 8), -7, dtype=torch.int32)
    assert kernels("emulated", VOTES, x, y, None, 0)
    values = x.tolist()
    for lane, v in enumerate(values):
        masks = [sum(1 << k for k, other in enumerate(values) if holds(other)) for holds in (lambda o: o & 1, v.__eq__)]
        bits = (v + 1).bit_length()
        expected = [
            *masks,
            min(values),
            values.count(2),
            int(3 in values),
            values.count(v),
            sum(other & 1 for other in values) if v & 1 else -1,
            32 - bits + 100 * ((v & -v).bit_length()) + 10000 * int(f"{v:04b}"[::-1], 2),
        ]
        assert [number % 2**32 for number in y[lane].tolist()] == [number % 2**32 for number in expected]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves(kernels: Kernels, dtype: torch.dtype) -> None:
    n = 200
    x, y = torch.randn(n).to(dtype), torch.randn(n).to(dtype)
    z = torch.full((3, n), torch.nan, dtype=dtype)
    assert kernels("emulated", HALVES, x, y, z, n)
    a, b = x.double(), y.double()
    expected = [a * b + 0.5, x.float() / y.float(), (x.float() * 100).round()]
    assert torch.equal(z, torch.stack([e.to(dtype) for e in expected]))


def test_copies_happen_when_they_are_waited_for(kernels: Kernels) -> None:
    n = 5
    x, y = torch.randn(n * 128), torch.full((n * 128,), torch.nan)
    assert kernels("emulated", PIPELINE, x, y, None, n)
    assert torch.equal(x, y)
    with pytest.raises(AssertionError, match="a copy to there is under way"):
        kernels("emulated", PIPELINE + 1, x, y, None, n)


def test_barriers_of_some_warps(kernels: Kernels) -> None:
    x = torch.randn(128)
    expected = x.view(2, 2, 32).flip(1).flatten()
    assert kernels("emulated", PAIRS, x, None, None, 0)
    assert torch.equal(x, expected)
    for fault in (1, 2):
        with pytest.raises(AssertionError, match=r"a race: another thread (writes|reads)"):
            kernels("emulated", PAIRS, x, None, None, fault)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_products_of_fragments(kernels: Kernels, dtype: torch.dtype) -> None:
    inner = 8 if dtype == torch.float32 else 16
    x, y, z = torch.randn(16, inner).to(dtype), torch.randn(inner, 8).to(dtype), torch.full((16, 8), torch.nan)
    assert kernels("emulated", PRODUCT, x, y, z, 0)
    expected = x.double() @ y.double() + (dtype != torch.float32)
    torch.testing.assert_close(z.double(), expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_the_copy_engine(kernels: Kernels, n: int) -> None:
    x, y = aligned(n * 32), aligned(n * 32)
    assert kernels("emulated", ENGINE, x, y, None, 0)
    assert torch.equal(y, 2 * x)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("kNoWait", "a race: "),
        ("kEarlyArrival", "a race: a copy to there is under way|another thread reads what is written"),
        ("kNoSyncwarp", "a race: another thread reads what is written|a race: another thread writes what is read"),
        ("kNoArrival", "a deadlock"),
        ("kFewBytes", "a deadlock"),
        ("kManyArrivals", "more arrivals"),
        ("kSlipped", "not aligned"),
        ("kNoFence", "without a fence"),
        ("kNoReadWait", "a copy from there is under way"),
        ("kNoLastWait", "a copy from shared memory that nobody has waited for"),
        ("kNoInit", "no barrier"),
        ("kOverwritten", "a copy to there is under way"),
        ("kUnordered", "a race: another thread"),
    ],
)
def test_what_is_wrong_with_the_copy_engine_is_found(kernels: Kernels, fault: str, message: str) -> None:
    names = re.search(r"enum Fault \{(.*?)\}", (HERE / "kernels.cu").read_text(), re.DOTALL)
    assert names
    which = [name.strip() for name in names[1].split(",")].index(fault)
    with pytest.raises(AssertionError, match=message):
        kernels("emulated", ENGINE, aligned(6 * 32), aligned(6 * 32), None, which)


def test_arrivals_when_copies_are_there(kernels: Kernels) -> None:
    x, y = torch.randn(64), torch.full((64,), torch.nan)
    assert kernels("emulated", LATE, x, y, None, 0)
    assert torch.equal(x, y)
    with pytest.raises(AssertionError, match=r"a copy to there is under way|another thread writes"):
        kernels("emulated", LATE, x, y, None, 1)


def test_products_of_four_warps(kernels: Kernels) -> None:
    x, y, z = torch.randn(64, 16).half(), torch.randn(16, 8).half(), torch.full((64, 8), torch.nan)
    assert kernels("emulated", WIDE_PRODUCT, x, y, z, 0)
    torch.testing.assert_close(z.double(), x.double() @ y.double(), rtol=1e-6, atol=2e-6)
    with pytest.raises(AssertionError, match=r"without a fence\.proxy\.async"):
        kernels("emulated", WIDE_PRODUCT, x, y, z, 1)


def test_what_a_launcher_has_no_kernel_for(kernels: Kernels) -> None:
    assert not kernels("emulated", UNKNOWN, torch.empty(1), None, None, 1)


def test_functions_that_are_called(kernels: Kernels) -> None:
    n = 50
    x, y = torch.randn(n), torch.full((n,), torch.nan)
    assert kernels("emulated", CALLS, x, y, None, n)
    i = torch.arange(n)
    expected = torch.where(i % 3 == 0, -5, x + 1) + torch.where((n - 1 - i) % 3 == 0, i, x.flip(0) + 1)
    torch.testing.assert_close(y, expected.masked_fill(i % 4 == 1, torch.nan), equal_nan=True, rtol=0, atol=0)


def test_rounding_up_and_down(kernels: Kernels) -> None:
    """The last number that is not beyond the exact one."""
    n = 200
    x, y = (torch.randn(n) * 10.0 ** torch.randint(-9, 9, (n,)) for _ in range(2))
    z = torch.full((4, n), torch.nan)
    assert kernels("emulated", DIRECTED, x, y, z, n)
    for row, result in enumerate(z):
        up = row % 2 == 1
        beyond = result.nextafter(torch.tensor(-math.inf if up else math.inf)).tolist()
        for a, b, rounded, last in zip(x.tolist(), y.tolist(), result.tolist(), beyond, strict=True):
            third = Fraction(torch.tensor(1e-20).item()) if row == 2 else 0
            exact = Fraction(a) + Fraction(b) if row < 2 else Fraction(a) * Fraction(b) + third
            assert last < exact <= rounded if up else rounded <= exact < last
