from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from svexport.ops import ms_deform_attn
from svexport.ops.ms_deform_attn import OP
from tests.gpu.support import TOLERANCES, check_kernel, gpu, leaves, moved, relative_error

pytestmark = gpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def case(
    n: int = 2,
    queries: int = 37,
    m: int = 8,
    d: int = 32,
    points: int = 4,
    levels: tuple = ((13, 20), (7, 10), (4, 5), (1, 3)),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[Tensor]:
    """Arguments with locations in and around the image."""
    generator = torch.Generator().manual_seed(seed)
    shapes = torch.tensor(levels)
    sizes = shapes.prod(1)
    value = torch.randn(n, int(sizes.sum()), m, d, generator=generator)
    locations = torch.rand(n, queries, m, len(levels), points, 2, generator=generator) * 1.2 - 0.1
    weights = torch.rand(n, queries, m, len(levels), points, generator=generator)
    return [value.to(dtype), shapes, sizes.cumsum(0) - sizes, locations.to(dtype), weights.to(dtype)]


SHAPES = [
    {},
    {"d": 64, "queries": 5},
    {"d": 8, "m": 3},
    {"d": 16, "points": 1, "levels": ((5, 7),)},
    {"d": 1, "m": 1, "n": 1, "queries": 1, "points": 1, "levels": ((1, 1),)},
    {"d": 7, "m": 5, "points": 3},
    {"d": 36, "m": 2},
    {"d": 33, "m": 2, "queries": 3},
    {"d": 264, "m": 1, "queries": 3},
    {"d": 520, "m": 1, "queries": 2, "points": 2},
    {"d": 4, "m": 2, "points": 67},
    {"d": 32, "points": 41, "queries": 3},
    {"queries": 0},
    {"n": 0},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_is_the_reference(sizes: dict, dtype: torch.dtype) -> None:
    check_kernel(OP, (*case(**sizes, dtype=dtype), 1.0))


@pytest.mark.parametrize("change", [torch.int32, "order"], ids=str)
def test_levels(change: torch.dtype | str) -> None:
    value, shapes, starts, locations, weights = case()
    if change == "order":
        starts = torch.tensor([93, 0, 70, 90])
    else:
        shapes, starts = shapes.to(change), starts.to(change)
    check_kernel(OP, (value, shapes, starts, locations, weights, 1.0))


def test_levels_larger_than_value_read_nothing_outside_of_it() -> None:
    value, shapes, starts, locations, weights = moved(case(), "cuda")
    many = torch.cat([torch.full_like(value, math.nan), value, torch.full_like(value, math.nan)], dim=1)
    part = many[:, value.shape[1] : 2 * value.shape[1]]
    assert ms_deform_attn(part, shapes + 3, starts + 7, locations, weights).isfinite().all()
    assert ms_deform_attn(part, shapes + 3, starts - 1000, locations, weights).isfinite().all()


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf, 1e30, -1e30, 3e9, -2.0])
def test_a_strange_location_reads_zero(strange: float) -> None:
    args = case(levels=((3, 5), (4, 4)), queries=3)
    args[3][:, 0, ..., 0] = strange
    args[3][:, 1, :, 0, 0, 1] = strange
    check_kernel(OP, (*args, 1.0))


def test_locations_on_pixels_have_the_gradient_of_the_reference() -> None:
    value, shapes, starts, locations, weights = case(levels=((8, 8), (2, 4)))
    locations = (torch.randint_like(locations, -1, 10) + 0.5) / 8
    check_kernel(OP, (value, shapes, starts, locations, weights, 1.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_locations_and_weights_beside_half_values(dtype: torch.dtype) -> None:
    value, shapes, starts, locations, weights = case(levels=((3, 2000),))
    check_kernel(OP, (value.to(dtype), shapes, starts, locations, weights, 1.0))
    check_kernel(OP, (value.to(dtype), shapes, starts, locations, weights.to(dtype), 1.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(dtype: torch.dtype) -> None:
    """Heads before pixels, channels before heads, every second query, a slice that is not aligned."""
    value, shapes, starts, locations, weights = moved(case(dtype=dtype), "cuda")
    expected = ms_deform_attn(value, shapes, starts, locations, weights)
    unaligned = torch.cat([value[..., :1], value], dim=-1)[..., 1:]
    for v in (value.transpose(1, 2).contiguous().transpose(1, 2), value.mT.contiguous().mT, unaligned):
        actual = ms_deform_attn(
            v,
            shapes.t().contiguous().t(),
            torch.stack([starts, starts], dim=1)[:, 0],
            locations.transpose(1, 4).contiguous().transpose(1, 4),
            weights.repeat_interleave(2, dim=1)[:, ::2],
        )
        torch.testing.assert_close(actual, expected)
        assert actual.is_contiguous()


def test_gradient_of_any_strides() -> None:
    args, inputs = leaves(tuple(moved(case(), "cuda")))
    output = OP(*args, 1.0)
    for grad in (torch.ones_like(output), torch.randn(output.shape[::-1], device="cuda").permute(2, 1, 0)):
        expected = torch.autograd.grad(output, inputs, grad.contiguous(), retain_graph=True)
        strided = grad.new_ones(()).expand(grad.shape) if grad.is_contiguous() else grad
        for a, e in zip(torch.autograd.grad(output, inputs, strided, retain_graph=True), expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("needed", range(1, 7))
def test_only_the_gradients_that_are_needed(needed: int) -> None:
    args = moved(case(), "cuda")
    tensors = [args[i] for i in (0, 3, 4)]
    for t in tensors:
        t.requires_grad_()
    every = torch.autograd.grad(ms_deform_attn(*args).square().sum(), tensors)
    for i, t in enumerate(tensors):
        t.requires_grad_(bool(needed >> i & 1))
    ms_deform_attn(*args).square().sum().backward()
    for t, e in zip(tensors, every, strict=True):
        assert (t.grad is not None) == t.requires_grad
        if t.grad is not None:
            torch.testing.assert_close(t.grad, e, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_deterministic_backward(dtype: torch.dtype) -> None:
    """Many queries on few pixels, whose order would show."""
    value, shapes, starts, locations, weights = case(queries=2000, levels=((3, 4), (1, 2)), dtype=dtype)
    torch.use_deterministic_algorithms(True)
    try:
        check_kernel(OP, (value, shapes, starts, locations, weights, 1.0))
        args, inputs = leaves(tuple(moved((value, shapes, starts, locations, weights), "cuda")))
        output = OP(*args, 1.0)
        grad = torch.randn_like(output)
        runs = [torch.autograd.grad(output, inputs, grad, retain_graph=True) for _ in range(5)]
        grad[0, 0, 0] = math.inf
        assert not torch.autograd.grad(output, inputs[0], grad)[0].isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs:
        for first, second in zip(run, runs[0], strict=True):
            assert torch.equal(first, second)


@pytest.mark.large
def test_more_than_2_31_elements() -> None:
    """Of value: 4.4 GB; only the last image is read."""
    value, shapes, starts, locations, weights = moved(case(n=1, levels=((90, 100),), dtype=torch.float16), "cuda")
    large = torch.empty((958, *value.shape[1:]), dtype=value.dtype, device="cuda")
    assert large.numel() > 2**31
    large[-1] = value[0]
    image = large[-1:].expand(3, -1, -1, -1)
    expected = ms_deform_attn(value, shapes, starts, locations, weights)
    assert relative_error(ms_deform_attn(image[:1], shapes, starts, locations, weights), expected) == 0
    # the same pixels, 2**31 elements apart
    far = large.view(-1).as_strided((1, 2, *value.shape[2:]), (1, 957 * value[0].numel(), *value.stride()[2:]))
    far.copy_(value[:, :2])
    shapes = torch.tensor([[1, 2]], device="cuda")
    expected = ms_deform_attn(value[:, :2].contiguous(), shapes, starts, locations, weights)
    assert relative_error(ms_deform_attn(far, shapes, starts, locations, weights), expected) == 0


def test_more_pixels_in_float64_than_torch_counts_in_one_call() -> None:
    """2**26 + 64: threads of ``embedding_bag``'s backward, 32 each, are more than int32 holds."""
    _, shapes, starts, locations, weights = case(n=1, queries=(1 << 20) + 1, m=1, points=4, dtype=torch.float64)
    value = torch.randn(1, int(shapes.prod(1).sum()), 1, 1, dtype=torch.float64)
    args = moved([value, shapes, starts, locations, weights], "cuda")
    last = [*args[:3], args[3][:, -7:], args[4][:, -7:]]
    gradients = []
    for given in (args, last):
        leaf = given[4].detach().requires_grad_()
        output = ms_deform_attn(*given[:4], leaf)
        gradients.append(torch.autograd.grad(output[:, -7:].square().sum(), leaf)[0][:, -7:])
    assert relative_error(*gradients) < 1e-12


@pytest.mark.parametrize("d", [3, 16, 32, 80])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_values(d: int, dtype: torch.dtype) -> None:
    """What is sampled has the type of the weights."""
    for precise in (dtype, torch.float32):
        value, shapes, starts, locations, weights = case(d=d, queries=301, levels=((13, 21), (6, 10), (3, 5)))
        codes = (value * 50).clamp(-128, 127).to(torch.int8)
        args = codes, shapes, starts, locations.to(precise), weights.to(dtype)
        expected = OP.reference(codes, shapes, starts, args[3].double(), args[4].double(), 0.02)
        actual = ms_deform_attn(*moved(args, "cuda"), scale=0.02)
        assert actual.dtype == dtype
        assert relative_error(actual, expected) < TOLERANCES[dtype]


def test_weights_of_int8_values_have_a_gradient() -> None:
    """By the reference: no kernel is for it."""
    value, shapes, starts, locations, weights = case()
    codes = (value * 50).clamp(-128, 127).to(torch.int8)
    found, wanted = (
        torch.autograd.grad(ms_deform_attn(*args, leaf, scale=0.02).square().sum(), leaf)[0]
        for args, leaf in (
            (moved((codes, shapes, starts, locations), "cuda"), weights.cuda().requires_grad_()),
            ((codes, shapes, starts, locations.double()), weights.double().requires_grad_()),
        )
    )
    assert relative_error(found, wanted) < 1e-4
