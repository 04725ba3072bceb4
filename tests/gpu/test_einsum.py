from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from svexport.ops import _cuda
from svexport.ops._einsum.kernels import kernel_products
from svexport.ops._einsum.labels import parse
from svexport.ops.einsum import OP, einsum
from tests.gpu.support import TOLERANCES, gpu, relative_error

pytestmark = gpu

MODULE = importlib.import_module("svexport.ops.einsum")
EQUATIONS = ("nkctv,kvw->nctw", "nkctv,kcvw->nctw")
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


@pytest.fixture(autouse=True)
def loaded() -> None:
    assert _cuda.load()


def kernels_only() -> Any:
    """Where no plan may run."""
    return patch.object(MODULE, "run", side_effect=AssertionError("a plan instead of the kernels"))


def operator(equation: str, *operands: Tensor) -> Tensor:
    return OP(list(operands), *parse(equation, tuple(x.dim() for x in operands)))


def graph(n: int, k: int, c: int, t: int, v: int, w: int, dtype: torch.dtype, per_channel: bool) -> list[Tensor]:
    """Features and adjacency of a graph convolution."""
    x = torch.randn(n, k, c, t, v, device="cuda").to(dtype)
    return [x, torch.randn(*((k, c, v, w) if per_channel else (k, v, w)), device="cuda").to(dtype)]


def check(equation: str, operands: list[Tensor], kernel: bool = True) -> None:
    """Values and gradients beside those of torch.einsum in float64."""
    leaves, exact = ([x.detach().to(d).requires_grad_() for x in operands] for d in (operands[0].dtype, torch.float64))
    expected = torch.einsum(equation, *exact)
    grad = torch.randn(expected.shape, device="cuda").to(operands[0].dtype)
    with kernels_only() if kernel else nullcontext():
        actual = operator(equation, *leaves)
        got = torch.autograd.grad(actual, leaves, grad)
    wanted = torch.autograd.grad(expected, exact, grad.double())
    assert actual.is_contiguous()
    for a, e in zip((actual, *got), (expected, *wanted), strict=True):
        assert a.dtype == operands[0].dtype
        assert (error := relative_error(a, e.to(a.dtype))) < TOLERANCES[a.dtype], f"{tuple(a.shape)}: {error:.1e}"


@DTYPES
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "c", "t", "v", "w"),
    [
        (2, 3, 8, 300, 25, 25),
        (1, 3, 64, 300, 25, 25),
        (3, 3, 4, 150, 18, 18),
        (2, 1, 5, 31, 17, 17),
        (3, 3, 5, 37, 33, 20),
        (2, 2, 3, 37, 25, 33),
        (1, 3, 2, 101, 16, 64),
        (2, 8, 2, 64, 8, 48),
        (1, 3, 1, 1009, 25, 17),
        (5, 3, 150, 11, 17, 25),
        (4, 3, 63, 151, 17, 17),
        (2, 3, 4, 53, 1, 25),
        (2, 3, 4, 53, 25, 1),
        (2, 3, 4, 53, 3, 5),
        (1, 1, 1, 2, 64, 41),
        (8, 8, 8, 75, 22, 25),
        (4, 8, 40, 75, 27, 27),
        (4, 8, 5, 150, 42, 27),
        (4, 3, 150, 61, 27, 27),
        (2, 2, 150, 75, 50, 50),
        (6, 1, 140, 61, 25, 41),
        (8, 8, 40, 75, 25, 25),
        (3, 3, 140, 40, 27, 27),
        # So many sums that there are few rows for each.
        (3, 8, 200, 60, 22, 22),
        (1, 8, 255, 217, 27, 27),
        (62, 3, 97, 11, 25, 25),
        (33, 2, 150, 9, 20, 20),
        (40, 3, 150, 10, 25, 17),
    ],
)
def test_sizes(n: int, k: int, c: int, t: int, v: int, w: int, per_channel: bool, dtype: torch.dtype) -> None:
    equation = "nkctv,kcvw->nctw" if per_channel else "nkctv,kvw->nctw"
    check(equation, graph(n, k, c, t, v, w, dtype, per_channel))


TACTICS = {
    "large": [1, 17],  # one warp, blocks apart
    "small": [65 + 16 * of + sums for of in (0, 1) for sums in (2, 3, 4, 5)],
    "channel_product": [130, 131, 133],
    "channel_correlation": [193],
}


@DTYPES
@pytest.mark.parametrize("kernel", TACTICS)
def test_each_tactic(kernel: str, dtype: torch.dtype) -> None:
    """Whatever it costs; where sizes have no such tactic, the cheapest runs."""
    of_channels = kernel.startswith("channel")
    for tactic in TACTICS[kernel]:
        torch.ops.svexport._force_tactic("einsum", tactic)
        try:
            if of_channels:
                for n, c, d, t, w in [
                    (2, 64, 128, 300, 25),
                    (3, 100, 130, 20, 10),
                    (1, 17, 5, 101, 1),
                    (3, 70, 150, 43, 3),
                ]:
                    check(CHANNELS, channels(n, c, d, t, w, dtype), WIDE)
            else:
                for sizes in [
                    (1, 3, 16, 300, 25, 25),
                    (3, 3, 5, 37, 33, 20),
                    (2, 2, 7, 31, 8, 64),
                    (8, 8, 9, 75, 22, 17),
                ]:
                    check("nkctv,kvw->nctw", graph(*sizes, dtype, False))
                check("nkctv,kcvw->nctw", graph(33, 2, 150, 9, 20, 20, dtype, True))
        finally:
            torch.ops.svexport._force_tactic("einsum", 0)


@DTYPES
def test_other_orders(dtype: torch.dtype) -> None:
    """Labels are known by which tensors have them, wherever they stand."""
    x, y = graph(2, 3, 4, 70, 25, 18, dtype, False)
    check("kvw,nkctv->nctw", [y, x])
    check("nckvt,wkv->ncwt", [x.permute(0, 2, 1, 4, 3), y.permute(2, 0, 1)], kernel=False)  # t innermost in the output
    check("knctv,wkv->nctw", [x.transpose(0, 1), y.permute(2, 0, 1)])
    check("nkctv,kcvw->cntw", [x, torch.randn(3, 4, 25, 18, device="cuda").to(dtype)])
    check("...kctv,kvw->...ctw", [x[None].expand(1, 2, 3, 4, 70, 25), y])
    check("nctw,kvw->nkctv", [torch.randn(2, 4, 70, 18, device="cuda").to(dtype), y])  # the gradient of x as a product
    check("nkctv,nctw->kvw", [x, torch.randn(2, 4, 70, 18, device="cuda").to(dtype)])  # that of y


@DTYPES
def test_strides(dtype: torch.dtype) -> None:
    equation = "nkctv,kvw->nctw"
    x, y = graph(4, 4, 6, 40, 25, 25, dtype, False)
    check(equation, [x[::2], y.mT[:4]])
    check(equation, [x[:, 1:], y[1:]])  # unaligned
    check(equation, [x[:, :, 1:4], y])
    check(equation, [x.transpose(0, 1).contiguous().transpose(0, 1), y[..., 3:20]])
    check(equation, [x[:, :3], y[:1].expand(3, 25, 25)])
    flat = torch.randn(x.numel() + 3, device="cuda").to(dtype)
    check(equation, [flat[3:].view(x.shape), y])
    # Rows with gaps or not of neighbours, which a plan copies.
    check(equation, [x[..., :20], y[:, :20]], kernel=False)
    check(equation, [x[:, :, :, ::2], y], kernel=False)
    check(equation, [x.mT.contiguous().mT, y], kernel=False)
    check(equation, [x.to(memory_format=torch.channels_last_3d), y], kernel=False)


@DTYPES
def test_gradient_of_a_sum(dtype: torch.dtype) -> None:
    """It has strides of 0."""
    x, y = (z.requires_grad_() for z in graph(2, 3, 4, 50, 25, 25, dtype, False))
    a, b = torch.autograd.grad(operator("nkctv,kvw->nctw", x, y).sum(), (x, y))
    exact = [z.detach().double().requires_grad_() for z in (x, y)]
    e, f = torch.autograd.grad(torch.einsum("nkctv,kvw->nctw", *exact).sum(), exact)
    assert relative_error(a, e) < TOLERANCES[dtype]
    assert relative_error(b, f) < TOLERANCES[dtype]


def check_not_finite(equation: str, x: Tensor, y: Tensor, grad: Tensor, seed: int) -> None:
    """Infinities and NaN of either sign where torch.einsum has them in float64, and all else as exact as ever."""
    x.flatten()[torch.randint(x.numel(), (3,))] = torch.inf
    x.flatten()[torch.randint(x.numel(), (2,))] = -torch.inf
    x.flatten()[torch.randint(x.numel(), (1,))] = torch.nan
    x[0, 0, 0, 0] = 0
    if seed % 2:
        y.flatten()[torch.randint(y.numel(), (1,))] = torch.inf
        grad.flatten()[torch.randint(grad.numel(), (2,))] = -torch.inf
    else:
        y.abs_()
        grad.abs_()
        y[..., 3] = 0
    sides = []
    for t in (x.dtype, torch.float64):
        leaves = [z.to(t).requires_grad_() for z in (x, y)]
        output = (operator if t == x.dtype else torch.einsum)(equation, *leaves)
        sides.append((output.detach(), *torch.autograd.grad(output, leaves, grad.to(t))))
    assert all((~sides[1][i].isfinite()).any() for i in (0, 2))  # the gradient of x has nothing to do with x
    for a, e in zip(*sides, strict=True):
        assert torch.equal(a.isposinf(), e.isposinf())
        assert torch.equal(a.isneginf(), e.isneginf())
        assert relative_error(a, e) < TOLERANCES[x.dtype]


@DTYPES
@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize(("k", "c", "v"), [(3, 4, 25), (3, 150, 27), (8, 64, 27), (8, 300, 20), (8, 255, 27)])
def test_what_is_not_finite(k: int, c: int, v: int, equation: str, dtype: torch.dtype) -> None:
    """Infinities and NaN are where torch has them, signs included, and what else is in their rows is right."""
    for seed in range(6):
        torch.manual_seed(seed)
        x, y = graph(2, k, c, 61, v, v, dtype, equation.count("c") == 3)
        grad = torch.randn(2, c, 61, v, device="cuda").to(dtype)
        check_not_finite(equation, x, y, grad, seed)


def test_the_largest_numbers() -> None:
    """They are infinite when rounded to a part; their products and sums are as large as floats can tell."""
    largest = torch.finfo(torch.float32).max
    x, y = graph(1, 1, 1, 40, 25, 25, torch.float32, False)
    x[0, 0, 0, 3, 4] = largest
    y[0, 4] = y[0, 4].clamp(-0.9, 0.9)
    check("nkctv,kvw->nctw", [x, y])
    y[0, 4, :3] = torch.tensor([1.5, -1.5, 1.0])
    output = operator("nkctv,kvw->nctw", x, y)[0, 0, 3, :3]
    assert torch.equal(output, output.new_tensor([torch.inf, -torch.inf, largest]))


@DTYPES
@pytest.mark.parametrize("equation", EQUATIONS)
def test_outputs_are_fully_written(equation: str, dtype: torch.dtype) -> None:
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        operands = [z.requires_grad_() for z in graph(3, 3, 5, 43, 25, 25, dtype, equation.count("c") == 3)]
        output = operator(equation, *operands)
        tensors = [output, *torch.autograd.grad(output, operands, torch.randn_like(output))]
    finally:
        torch.use_deterministic_algorithms(False)
    assert not any(t.isnan().any() for t in tensors)


def test_empty() -> None:
    for n, k, t in ((0, 3, 40), (2, 0, 40), (2, 3, 0)):
        check("nkctv,kvw->nctw", graph(n, k, 4, t, 25, 25, torch.float32, False), kernel=False)


def test_deterministic() -> None:
    x, y = (z.requires_grad_() for z in graph(8, 3, 64, 150, 25, 25, torch.float32, False))
    grad = torch.randn(8, 64, 150, 25, device="cuda")
    runs = []
    for _ in range(3):
        output = operator("nkctv,kvw->nctw", x, y)
        runs.append((output, *torch.autograd.grad(output, (x, y), grad)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


# ------------------------------------------------------------------ products of channels

CHANNELS = "nctw,cd->ndtw"
WIDE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)  # elsewhere a plan runs


def channels(n: int, c: int, d: int, t: int, w: int, dtype: torch.dtype) -> list[Tensor]:
    """Features and the weights of a convolution of 1 x 1."""
    return [torch.randn(n, c, t, w, device="cuda").to(dtype), torch.randn(c, d, device="cuda").to(dtype)]


@DTYPES
@pytest.mark.parametrize(
    ("n", "c", "d", "t", "w"),
    [
        (2, 64, 128, 300, 25),
        (2, 128, 64, 150, 18),
        (9, 64, 64, 56, 56),
        (3, 3, 64, 31, 17),
        (2, 100, 130, 20, 10),
        (1, 17, 5, 101, 1),
        (5, 1, 7, 3, 5),
        (2, 16, 1, 40, 25),
        (1, 200, 33, 64, 4),
        (40, 96, 96, 7, 7),
        (1, 300, 260, 40, 10),
        (4, 150, 70, 61, 5),
        (70, 24, 40, 61, 15),
        (3, 70, 150, 43, 3),
    ],
)
def test_channels(n: int, c: int, d: int, t: int, w: int, dtype: torch.dtype) -> None:
    check(CHANNELS, channels(n, c, d, t, w, dtype), WIDE)


@DTYPES
def test_channels_of_other_orders(dtype: torch.dtype) -> None:
    x, y = channels(4, 24, 40, 30, 25, dtype)
    check("cd,nctw->ndtw", [y, x], WIDE)
    check("nctw,dc->ndtw", [x, y.mT.contiguous()], WIDE)
    check("...ctw,cd->...dtw", [x[None], y], WIDE)
    check("ncs,cd->nds", [x.flatten(2), y], WIDE)
    check("nkctw,kcd->ndtw", [x.unflatten(1, (3, 8)), y.unflatten(0, (3, 8))], WIDE)
    check(CHANNELS, [x[::2], y[:, ::2]], WIDE)
    check(CHANNELS, [x[:, 3:20], y[3:20]], WIDE)
    for begin in (1, 2, 4):  # not where 16 bytes do
        flat = torch.randn(x.numel() + begin, device="cuda").to(dtype)
        check(CHANNELS, [flat[begin:].view(x.shape), y], WIDE)
    check(CHANNELS, [x[:, :, :29, :], y], WIDE)  # rows that end before the next begins


@DTYPES
def test_channels_left_to_a_plan(dtype: torch.dtype) -> None:
    """Positions with gaps or behind the channels, one channel for all, and a matrix a sample: products of torch's."""
    x, y = channels(4, 24, 40, 30, 25, dtype)
    check(CHANNELS, [x[..., :20], y], kernel=False)
    check(CHANNELS, [x.to(memory_format=torch.channels_last), y], kernel=False)
    check(CHANNELS, [x[:, :1].expand(4, 24, 30, 25), y], kernel=False)
    check("nctw,cd->ntwd", [x, y], kernel=False)
    check("nctw,ncd->ndtw", [x, torch.randn(4, 24, 40, device="cuda").to(dtype)], kernel=False)


@DTYPES
def test_channels_that_are_not_finite(dtype: torch.dtype) -> None:
    for seed in range(6):
        torch.manual_seed(seed)
        x, y = channels(2, 20, 40, 31, 25 if seed % 3 else 24, dtype)
        grad = torch.randn(2, 40, 31, x.shape[3], device="cuda").to(dtype)
        check_not_finite(CHANNELS, x, y, grad, seed)


def test_the_largest_numbers_of_channels() -> None:
    largest = torch.finfo(torch.float32).max
    x, y = channels(1, 16, 8, 5, 8, torch.float32)
    x[0, 2, 3, 4] = largest
    y[2] = torch.tensor([1.5, -1.5, 1.0, 0.5, 0.0, -0.5, -1.0, 0.25])
    output = operator(CHANNELS, x, y)[0, :, 3, 4]
    torch.testing.assert_close(output[:3], output.new_tensor([torch.inf, -torch.inf, largest]), rtol=1e-6, atol=0)
    assert relative_error(output[3:], torch.einsum("c,cd->d", x[0, :, 3, 4].double(), y.double())[3:].float()) < 1e-6


@DTYPES
def test_channels_are_deterministic_and_fully_written(dtype: torch.dtype) -> None:
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        x, y = (z.requires_grad_() for z in channels(8, 64, 100, 43, 25, dtype))
        grad = torch.randn(8, 100, 43, 25, device="cuda").to(dtype)
        runs = []
        for _ in range(3):
            output = operator(CHANNELS, x, y)
            runs.append((output, *torch.autograd.grad(output, (x, y), grad)))
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))
        assert not any(t.isnan().any() for t in run)


@pytest.mark.skipif(not WIDE, reason="needs compute capability 9.0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_eager_runs_the_kernels_of_channels(dtype: torch.dtype) -> None:
    x, y = (z.requires_grad_() for z in channels(8, 64, 128, 300, 25, dtype))
    grad = torch.randn(8, 128, 300, 25, device="cuda").to(dtype)
    exact = [z.detach().double().requires_grad_() for z in (x, y)]
    expected = torch.einsum(CHANNELS, *exact)
    wanted = (expected, *torch.autograd.grad(expected, exact, grad.double()))
    with kernels_only():
        output = einsum(CHANNELS, x, y)
        got = (output, *torch.autograd.grad(output, (x, y), grad))
    for a, e in zip(got, wanted, strict=True):
        assert relative_error(a, e.to(dtype)) < TOLERANCES[dtype]
    for needed in (x, y):  # one gradient alone
        other = [z if z is needed else z.detach() for z in (x, y)]
        with kernels_only():
            (alone,) = torch.autograd.grad(einsum(CHANNELS, *other), (needed,), grad)
        assert torch.equal(alone, got[1 if needed is x else 2])


@pytest.mark.skipif(not WIDE, reason="needs compute capability 9.0")
def test_second_derivatives_of_channels() -> None:
    operands = channels(8, 64, 32, 300, 25, torch.float32)
    grads = []
    for function in (einsum, torch.einsum):
        x, y = (z.clone().requires_grad_() for z in operands)
        first = torch.autograd.grad(function(CHANNELS, x, y).square().sum(), (x, y), create_graph=True)
        grads.append(torch.autograd.grad(first[0].square().mean() + first[1].square().mean(), (x, y)))
    for a, e in zip(*grads, strict=True):
        assert relative_error(a, e) < 1e-4


@pytest.mark.large
def test_channels_of_more_than_two_to_the_31st_elements() -> None:
    n, c, d, s = 70, 64, 128, 2**18
    assert n * d * s > 2**31
    x = torch.empty(n, c, s, dtype=torch.float16, device="cuda").normal_()
    y = torch.randn(c, d, dtype=torch.float16, device="cuda")
    output = operator("ncs,cd->nds", x, y)
    for i in (0, n // 2, n - 1):
        expected = torch.einsum("cs,cd->ds", x[i].float(), y.float())
        assert relative_error(output[i], expected.half()) < TOLERANCES[torch.float16]
    x.zero_()
    x[-1] = 1
    output.zero_()
    output[-1, -1, : 2**10] = 1
    summed = operator("ncs,nds->cd", x, output)
    assert torch.equal(summed[:, -1], torch.full_like(summed[:, -1], 2**10))
    assert not summed[:, :-1].any()


# ------------------------------------------------------------------ einsum() itself


@pytest.fixture
def large() -> list[Tensor]:
    operands = graph(2, 3, 64, 150, 25, 25, torch.float32, False)
    assert all(kernel_products("nkctv,kvw->nctw", *(x.shape for x in operands), item_size=4))
    return operands


def test_eager_runs_the_kernels(large: list[Tensor]) -> None:
    with kernels_only():
        actual = einsum("nkctv,kvw->nctw", *large)
    assert relative_error(actual, torch.einsum("nkctv,kvw->nctw", *[x.double() for x in large])) < 1e-5


@DTYPES
@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("nkctv,kvw->nctw", ((4, 8, 12, 150, 50), (8, 50, 50))),  # where shared memory does not hold the matrix
        ("nctw,cd->ndtw", ((2, 12, 75, 18), (12, 40))),  # small
        ("nctw,cd->ndtw", ((1, 28, 150, 17), (28, 60))),  # one sample
        ("nctw,cd->ndtw", ((3, 300, 75, 25), (300, 12))),
        ("nctw,cd->ndtw", ((3, 12, 75, 25), (12, 300))),
    ],
)
def test_products_by_what_is_fastest_for_each(
    equation: str, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype
) -> None:
    leaves = [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape in shapes]
    exact = [z.detach().double().requires_grad_() for z in leaves]
    expected = torch.einsum(equation, *exact)
    grad = torch.randn(expected.shape, device="cuda").to(dtype)
    wanted = torch.autograd.grad(expected, exact, grad.double(), retain_graph=True)
    output = einsum(equation, *leaves)
    got = torch.autograd.grad(output, leaves, grad, retain_graph=True)
    for a, e in zip((output, *got), (expected, *wanted), strict=True):
        assert a.shape == e.shape
        assert a.dtype == dtype
        assert relative_error(a, e.to(dtype)) < TOLERANCES[dtype]
    for i in range(2):  # one alone, and of a sum, whose own gradient is expanded
        operands = [z if i == j else z.detach() for j, z in enumerate(leaves)]
        (alone,) = torch.autograd.grad(einsum(equation, *operands).sum(), operands[i])
        (of_sum,) = torch.autograd.grad(expected.sum(), exact[i], retain_graph=True)
        assert relative_error(alone, of_sum.to(dtype)) < TOLERANCES[dtype]


class Steps(TorchDispatchMode):
    """Counts operators that run a kernel."""

    VIEWS = ("view", "_unsafe_view", "permute", "expand", "transpose", "t", "unsqueeze", "squeeze", "detach", "unbind")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ not in self.VIEWS
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("nkctv,kcvw->nctw", ((2, 2, 8, 75, 25), (2, 8, 25, 25))),
        ("nkctv,kcvw->nctw", ((4, 3, 8, 31, 20), (3, 8, 20, 20))),
        ("nkctv,kcvw->nctw", ((1, 3, 8, 31, 20), (3, 8, 20, 20))),
        ("nkctv,kvw->nctw", ((2, 2, 8, 75, 25), (2, 25, 25))),
        ("nctw,cd->ndtw", ((4, 12, 7, 5), (12, 30))),
        ("bhnm,bdhm->bdhn", ((8, 4, 13, 13), (8, 32, 4, 13))),
    ],
)
def test_short_products_take_no_more_steps_than_torch(equation: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Forward and backward: each step takes as long as it does to begin."""
    leaves = [torch.randn(shape, device="cuda", requires_grad=True) for shape in shapes]
    counts = []
    for function in (einsum, torch.einsum):
        grad = torch.ones(function(equation, *leaves).shape, device="cuda")
        with Steps() as steps:
            torch.autograd.grad(function(equation, *leaves), leaves, grad)
        counts.append(steps.count)
    assert counts[0] <= counts[1]


def test_second_derivatives(large: list[Tensor]) -> None:
    grads = []
    for function in (einsum, torch.einsum):
        x, y = (z.clone().requires_grad_() for z in large)
        output = function("nkctv,kvw->nctw", x, y)
        first = torch.autograd.grad(output.square().sum(), (x, y), create_graph=True)
        grads.append(torch.autograd.grad(first[0].square().mean() + first[1].square().mean(), (x, y)))
    for a, e in zip(*grads, strict=True):
        assert relative_error(a, e) < 1e-4


def test_torch_func(large: list[Tensor]) -> None:
    x, y = large
    function: Callable[..., Tensor] = lambda x: einsum("nkctv,kvw->nctw", x, y)  # noqa: E731
    expected = function(x)
    tangent = torch.randn_like(x)
    assert relative_error(torch.vmap(function)(x[:, None])[:, 0], expected) < 1e-5
    _, actual = torch.func.jvp(function, (x,), (tangent,))
    assert relative_error(actual, function(tangent)) < 1e-5
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        actual = torch.autograd.forward_ad.unpack_dual(function(dual)).tangent
    assert relative_error(actual, function(tangent)) < 1e-5
    grad = torch.func.grad(lambda x: function(x).square().sum())(x)
    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(function(leaf).square().sum(), leaf)
    assert relative_error(grad, wanted) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(large: list[Tensor], dtype: torch.dtype) -> None:
    compiled = torch.compile(einsum, fullgraph=True)
    exact = torch.einsum("nkctv,kvw->nctw", *[z.double() for z in large])
    for function in (einsum, compiled):
        x, y = (z.clone().requires_grad_() for z in large)
        with torch.autocast("cuda", dtype=dtype):
            actual = function("nkctv,kvw->nctw", x, y)
        assert actual.dtype == dtype
        assert relative_error(actual, exact) < 2 * TOLERANCES[dtype]
        grads = torch.autograd.grad(actual.float().square().mean(), (x, y))
        assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_compile(equation: str) -> None:
    operands = [z.requires_grad_() for z in graph(2, 3, 8, 150, 25, 25, torch.float32, equation.count("c") == 3)]

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return (einsum(equation, x * 2, y) + 1).square().mean()

    actual, expected = torch.compile(loss, fullgraph=True)(*operands), loss(*operands)
    assert relative_error(actual, expected) < 1e-5
    wanted = torch.autograd.grad(expected, operands)
    for a, e in zip(torch.autograd.grad(actual, operands), wanted, strict=True):
        assert relative_error(a, e) < 1e-5


@pytest.mark.parametrize("equation", EQUATIONS)
def test_opcheck(equation: str) -> None:
    operands = [z.requires_grad_() for z in graph(2, 3, 4, 50, 25, 25, torch.float32, equation.count("c") == 3)]
    torch.library.opcheck(OP.torch_op, (operands, *parse(equation, tuple(z.dim() for z in operands))))


def test_cuda_graph(large: list[Tensor]) -> None:
    """Captured once with its backward, replayed on other values."""
    x, y = (z.requires_grad_() for z in large)
    grad = torch.randn(2, 64, 150, 25, device="cuda")

    def step() -> tuple[Tensor, ...]:
        output = einsum("nkctv,kvw->nctw", x, y)
        return output, *torch.autograd.grad(output, (x, y), grad)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        outputs = step()
    with torch.no_grad():
        for tensor in (x, y, grad):
            tensor.copy_(torch.randn_like(tensor))
    captured.replay()
    for actual, expected in zip(outputs, step(), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.large
def test_more_than_two_to_the_31st_elements() -> None:
    """Every offset is counted in 64 bits: the last rows are those of the same product on their own."""
    n, k, c, t, v = 115, 3, 64, 4000, 25
    assert math.prod((n, k, c, t, v)) > 2**31
    x = torch.empty(n, k, c, t, v, dtype=torch.float16, device="cuda").normal_()
    y = torch.randn(k, v, v, dtype=torch.float16, device="cuda")
    output = operator("nkctv,kvw->nctw", x, y)
    for i in (0, n // 2, n - 1):
        expected = torch.einsum("kctv,kvw->ctw", x[i].double(), y.double())
        assert relative_error(output[i], expected) < TOLERANCES[torch.float16]
    gradient = operator("nctw,kvw->nkctv", output, y.mT.contiguous().mT)
    expected = torch.einsum("ctw,kvw->kctv", output[-1].double(), y.double())
    assert relative_error(gradient[-1], expected.half()) < TOLERANCES[torch.float16]
    x.zero_()
    x[-1] = 1
    output.zero_()
    output[-1, -1] = 1
    summed = operator("nkctv,nctw->kvw", x, output)
    assert torch.equal(summed, torch.full_like(summed, t))
