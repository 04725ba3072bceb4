from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._measure import peak_memory
from svexport.ops.deform_conv2d import OP
from tests.gpu.support import TOLERANCES, check_kernel, gpu, leaves, moved, relative_error

pytestmark = gpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def case(
    n: int = 2,
    channels: int = 16,
    outputs: int = 24,
    size: tuple = (13, 11),
    kernel: tuple = (3, 3),
    stride: tuple = (1, 1),
    padding: tuple = (1, 1),
    dilation: tuple = (1, 1),
    groups: int = 1,
    offset_groups: int = 1,
    bias: bool = True,
    mask: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[Any]:
    """Arguments of the torch operator whose offsets reach out of the image."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    out = F.conv2d(torch.zeros(1, 1, *size), torch.zeros(1, 1, *kernel), None, stride, padding, dilation).shape[2:]
    taps = offset_groups * kernel[0] * kernel[1]
    tensors = [
        make(n, channels, *size),
        make(n, 2 * taps, *out) * 2,
        make(outputs, channels // groups, *kernel),
        make(outputs) if bias else None,
        make(n, taps, *out).sigmoid() if mask else None,
    ]
    tensors = [None if t is None else t.to(dtype) for t in tensors]
    return [*tensors, stride, padding, dilation, groups, offset_groups, 1.0]


SHAPES = [
    {},
    {"channels": 64, "outputs": 64, "n": 1},
    {"channels": 256, "outputs": 256, "size": (7, 5), "n": 3},
    {"channels": 64, "outputs": 130, "offset_groups": 4},
    {"channels": 64, "outputs": 48, "groups": 2, "offset_groups": 2},
    {"channels": 128, "outputs": 64, "groups": 4, "offset_groups": 2},
    {"channels": 128, "outputs": 64, "groups": 2, "offset_groups": 8},
    {"channels": 16, "outputs": 16, "groups": 16, "offset_groups": 16},
    {"channels": 12, "outputs": 9, "groups": 3, "offset_groups": 4},
    {"channels": 3, "outputs": 5, "size": (17, 19)},
    {"channels": 1, "outputs": 1, "size": (1, 7), "kernel": (1, 1), "padding": (0, 0), "n": 1},
    {"channels": 36, "outputs": 35, "mask": False},
    {"channels": 40, "outputs": 33, "bias": False},
    {"channels": 24, "outputs": 257, "mask": False, "bias": False},
    {"stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)},
    {"stride": (3, 2), "padding": (2, 0), "dilation": (2, 1), "groups": 2, "offset_groups": 2},
    {"kernel": (2, 5), "padding": (0, 2), "size": (7, 1), "n": 1},
    {"kernel": (7, 7), "padding": (3, 3), "channels": 8, "outputs": 8},
    {"channels": 64, "outputs": 130, "size": (90, 91), "n": 1},
    {"n": 0},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_is_the_reference(sizes: dict, layout: torch.memory_format, dtype: torch.dtype) -> None:
    args = case(**sizes, dtype=dtype)
    args[0], args[2] = (args[i].to(memory_format=layout) for i in (0, 2))
    check_kernel(OP, tuple(args))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tactic", [1, 2])
def test_each_tactic_is_the_reference(tactic: int, dtype: torch.dtype) -> None:
    torch.ops.svexport._force_tactic("deform_conv2d", tactic)
    try:
        for sizes in SHAPES:
            for layout in (torch.contiguous_format, torch.channels_last):
                args = case(**sizes, dtype=dtype)
                args[0] = args[0].to(memory_format=layout)
                check_kernel(OP, tuple(args), gradients=False)
    finally:
        torch.ops.svexport._force_tactic("deform_conv2d", 0)


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf, 1e30, -1e30, 3e9])
def test_a_strange_offset_reads_zero(strange: float) -> None:
    args = case(channels=32)
    args[1][:, 3] = strange
    args[1][:, :, 2, 5] = strange
    check_kernel(OP, tuple(args))


def test_offsets_of_whole_pixels_have_the_gradient_of_the_reference() -> None:
    args = case(channels=32)
    args[1] = args[1].round()
    check_kernel(OP, tuple(args))
    args[1] = torch.zeros_like(args[1])
    check_kernel(OP, tuple(args))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_offsets_mask_and_bias_beside_half_values(dtype: torch.dtype) -> None:
    args = case(size=(5, 300), channels=32)
    check_kernel(OP, (args[0].to(dtype), args[1], args[2].to(dtype), *args[3:]))
    check_kernel(OP, (args[0].to(dtype), args[1], *args[2:]))  # and weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [5, 32])
def test_strides(channels: int, dtype: torch.dtype) -> None:
    """channels-last, transposed, a slice that is not aligned."""
    args = moved(case(channels=channels, dtype=dtype), "cuda")
    expected = OP(*args)
    image, weight = args[0], args[2]
    images = [
        image.to(memory_format=torch.channels_last),
        image.mT.contiguous().mT,
        torch.cat([image[:, :1], image], dim=1).to(memory_format=torch.channels_last)[:, 1:],
        torch.cat([image[..., :1], image], dim=3)[..., 1:],
    ]
    for i in images:
        for w in (weight, weight.to(memory_format=torch.channels_last), weight.flip(0).flip(0).mT.contiguous().mT):
            offset = args[1].to(memory_format=torch.channels_last)
            mask = args[4].repeat_interleave(2, dim=3)[..., ::2]
            actual = OP(i, offset, w, args[3].repeat_interleave(3)[::3], mask, *args[5:])
            torch.testing.assert_close(actual, expected)
            assert actual.is_contiguous()


def test_gradient_of_any_strides() -> None:
    args, inputs = leaves(tuple(moved(case(), "cuda")))
    output = OP(*args)
    random = torch.randn_like(output)
    for grad in (
        output.new_ones(()).expand(output.shape),
        random.to(memory_format=torch.channels_last),
        random.mT.contiguous().mT,
    ):
        expected = torch.autograd.grad(output, inputs, grad.contiguous(), retain_graph=True)
        for a, e in zip(torch.autograd.grad(output, inputs, grad, retain_graph=True), expected, strict=True):
            assert relative_error(a, e) < 1e-5


@pytest.mark.parametrize("needed", range(1, 32))
def test_only_the_gradients_that_are_needed(needed: int) -> None:
    args = moved(case(), "cuda")
    tensors = args[:5]
    for t in tensors:
        t.requires_grad_()
    every = torch.autograd.grad(OP(*args).square().sum(), tensors)
    for i, t in enumerate(tensors):
        t.requires_grad_(bool(needed >> i & 1))
    OP(*args).square().sum().backward()
    for t, e in zip(tensors, every, strict=True):
        assert (t.grad is not None) == t.requires_grad
        if t.grad is not None:
            assert relative_error(t.grad, e) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_deterministic_backward(dtype: torch.dtype) -> None:
    """Many taps on few pixels, whose order would show."""
    given = case(size=(3, 3), padding=(11, 11), channels=32, dtype=dtype)
    given[1] = torch.rand_like(given[1]) * 24 - 12
    torch.use_deterministic_algorithms(True)
    try:
        check_kernel(OP, tuple(given))
        args, inputs = leaves(tuple(moved(given, "cuda")))
        output = OP(*args)
        grad = torch.randn_like(output)
        runs = [torch.autograd.grad(output, inputs, grad, retain_graph=True) for _ in range(5)]
        grad[0, 0, 0, 0] = math.inf
        assert not torch.autograd.grad(output, inputs[0], grad)[0].isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs:
        for first, second in zip(run, runs[0], strict=True):
            assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SHAPES[:-1], ids=str)
def test_int8_inputs(sizes: dict, dtype: torch.dtype) -> None:
    """By the op, linear and channels-last, and in TensorRT's formats; the output has the type of the weight."""
    args = case(**sizes, dtype=dtype)
    args[0] = codes = (args[0].float() * 40).clamp(-128, 127).to(torch.int8)
    args[-1] = 0.025
    expected = OP.reference(*(t.double() if isinstance(t, Tensor) and t is not codes else t for t in args))
    rest = moved(args[1:], "cuda")
    for layout in (torch.contiguous_format, torch.channels_last):
        actual = OP(codes.cuda().to(memory_format=layout), *rest)
        assert actual.dtype == dtype
        assert relative_error(actual, expected) < TOLERANCES[dtype]
    for size in (32, 4):
        padded = F.pad(codes, (0, 0, 0, 0, 0, -codes.shape[1] % size), value=99)
        blocks = padded.unflatten(1, (-1, size)).movedim(2, -1).contiguous().cuda()
        actual = OP(blocks, *rest)
        assert relative_error(actual, expected) < TOLERANCES[dtype]


def test_as_torchvision() -> None:
    torchvision = pytest.importorskip("torchvision")
    for sizes in SHAPES[:-1]:
        args = moved(case(**sizes), "cuda")
        expected = torchvision.ops.deform_conv2d(*args[:4], *args[5:8], args[4])
        assert relative_error(OP(*args), expected) < 1e-5 + max(args[0].shape[2:]) * 2**-23  # a place in float32


PIECES = [
    {"n": 3, "channels": 256, "outputs": 8, "size": (90, 90)},  # images
    {"n": 1, "channels": 256, "outputs": 256, "size": (64, 67)},  # rows of one, in the backward at least
    {"n": 1, "channels": 64, "outputs": 33, "size": (211, 197), "offset_groups": 4},
    {"n": 1, "channels": 128, "outputs": 64, "size": (601, 129), "stride": (2, 1), "groups": 4, "bias": False},
    {
        "n": 1,
        "channels": 96,
        "outputs": 40,
        "size": (149, 151),
        "kernel": (3, 5),
        "padding": (3, 0),
        "dilation": (2, 3),
    },
    {"n": 1, "channels": 3, "outputs": 16, "size": (613, 401), "kernel": (5, 5), "mask": False},  # planes
    {"n": 1, "channels": 128, "outputs": 16, "size": (1, 30011)},  # a row that is more than what is made at a time
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", PIECES, ids=str)
def test_columns_in_pieces(sizes: dict, dtype: torch.dtype) -> None:
    """What the taps read is made for some of the images, or rows of one, at a time."""
    args = case(**sizes)
    args[1] = (args[1] * 8).round() / 8 + 1 / 16  # not so near whole pixels that rounding leads to the next one
    args = moved(args, "cuda", dtype)
    actual, inputs = leaves(tuple(args))
    expected, precise = leaves(tuple(moved(args, torch.float64)))  # by the reference
    outputs = OP(*actual), OP(*expected)
    assert relative_error(*outputs) < TOLERANCES[dtype]
    grad = torch.randn_like(outputs[0])
    gradients = torch.autograd.grad(outputs[0], inputs, grad)
    for a, e in zip(gradients, torch.autograd.grad(outputs[1], precise, grad.double()), strict=True):
        assert relative_error(a, e) < 3 * TOLERANCES[dtype]


@pytest.mark.parametrize("sizes", PIECES, ids=str)
def test_pieces_as_torchvision(sizes: dict) -> None:
    torchvision = pytest.importorskip("torchvision")
    args = moved(case(**sizes), "cuda")
    expected = torchvision.ops.deform_conv2d(
        *moved([*args[:4]], torch.float64), *args[5:8], moved(args[4], torch.float64)
    )
    assert relative_error(OP(*args), expected) < 1e-5 + max(args[0].shape[2:]) * 2**-23  # a place in float32


@pytest.mark.parametrize("sizes", PIECES[:4], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_takes_no_more_memory_than_torchvision(sizes: dict, dtype: torch.dtype) -> None:
    """Of the device, at once: 2 % of the peak of a training step, beyond 4 MB for pieces that are not made smaller.

    Gradients of half inputs are summed in float32, which torchvision does in the half type.
    """
    torchvision = pytest.importorskip("torchvision")
    args, inputs = leaves(tuple(moved(case(**sizes), "cuda", dtype)))

    def ours() -> None:
        torch.autograd.grad(OP(*args).sum(), inputs)

    def peer() -> None:
        torch.autograd.grad(torchvision.ops.deform_conv2d(*args[:4], *args[5:8], args[4]).sum(), inputs)

    limit = 1.02 * peak_memory(peer)
    sums = 0 if dtype is torch.float32 else 4 * inputs[0].numel()
    assert peak_memory(ours) < limit + sums + (4e6 if limit < 40e6 else 0)


@pytest.mark.large
def test_more_than_2_31_elements() -> None:
    """Of the input: 4.3 GB of half precision, of which the last image has numbers."""
    args = moved(case(n=1, channels=64, dtype=torch.float16, size=(64, 64)), "cuda")
    large = torch.empty((8193, 64, 64, 64), dtype=torch.float16, device="cuda").permute(0, 3, 1, 2)
    assert large.numel() > 2**31
    large[-1] = args[0][0]
    # two rows of one image, 2**31 elements apart
    far = large.as_strided((1, 64, 2, 64), (0, 1, large.stride(0) * 8192, 64))
    far[:, :, 0] = args[0][:, :, 0]
    args[0] = torch.stack([args[0][:, :, 0], args[0][:, :, 0]], dim=2)
    large[-1, :, 0] = args[0][0, :, 1]
    args[1], args[4] = args[1][:, :, :2].contiguous(), args[4][:, :, :2].contiguous()
    torch.testing.assert_close(OP(far, *args[1:]), OP(*args), rtol=0, atol=0)
