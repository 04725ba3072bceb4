"""The kernels of deform_conv2d: the operator, what its taps read and the gradients of that, and packing."""

from __future__ import annotations

import ctypes
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from svexport.ops.deform_conv2d import OP
from tests.emulation import Kernels, Memory, Structure, emulated, in_memory, poisoned
from tests.emulation.test_grid_sample_int8 import FORMATS

pytestmark = emulated("deform_conv2d_in_pieces", "matmul", "permute")

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
PAIR = ctypes.c_int * 2
SCALE = 0.017  # of int8 inputs


class DeformConv2d(ctypes.Structure):
    _fields_ = (
        *((name, PAIR) for name in ("kernel", "stride", "padding", "dilation")),
        *((name, ctypes.c_int) for name in ("channels", "groups", "offset_groups")),
        ("scale", ctypes.c_float),
    )


class Piece(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("first", "images", "row", "rows"))


class Case:
    """Random sizes, and what the taps read: outputs of a convolution whose weight is the identity."""

    def __init__(self, dtype: torch.dtype, channels: int, groups: int, offset_groups: int) -> None:
        self.n, self.channels, self.groups = random.choice([1, 2, 3]), channels, groups
        two = [
            [random.choice(numbers) for _ in range(2)] for numbers in ((1, 2, 3), (1, 1, 2, 3), (0, 1, 2), (1, 1, 2))
        ]
        self.kernel, stride, padding, dilation = two
        size = [d * (k - 1) + random.randint(1, 12) for d, k in zip(dilation, self.kernel, strict=True)]
        plane = F.conv2d(torch.zeros(1, 1, *size), torch.zeros(1, 1, *self.kernel), None, stride, padding, dilation)
        self.out = list(plane.shape[2:])
        taps = math.prod(self.kernel)
        self.per_group = channels // groups
        self.structure = Structure(
            DeformConv2d(*(PAIR(*pair) for pair in two), channels, groups, offset_groups, SCALE),
        )
        self.input = torch.randn(self.n, channels, *size).to(dtype)
        # Places that are exact in every type, so that the reference reads the same pixels.
        offset = (torch.randn(self.n, 2 * offset_groups * taps, *self.out) * 16).round().clamp(-120, 120) / 8
        mask = torch.rand(self.n, offset_groups * taps, *self.out)
        self.offset = in_memory(offset.to(random.choice([dtype, torch.float32])))
        self.mask = in_memory(mask.to(random.choice([dtype, torch.float32]))) if random.random() < 0.7 else None
        self.leaves = [t if t is None else t.double().requires_grad_() for t in (self.input, self.offset, self.mask)]
        x, offset64, mask64 = self.leaves
        one = torch.eye(self.per_group * taps, dtype=torch.float64).view(-1, self.per_group, *self.kernel)
        weight = one.repeat(groups, 1, 1, 1)
        self.options = (stride, padding, dilation, groups, offset_groups, SCALE)
        self.read = OP.reference(x, offset64, weight, None, mask64, *self.options)
        self.read = self.read.view(self.n * groups, self.per_group * taps, math.prod(self.out))
        self.run = math.gcd(self.per_group, channels // offset_groups)
        self.packed_run = -(-self.run * self.input.itemsize // 16) * 16 // self.input.itemsize
        first, row = random.randrange(self.n), random.randrange(self.out[0])
        rows = random.randint(1, self.out[0] - row)
        self.piece = random.choice([Piece(first, self.n - first, 0, self.out[0]), Piece(first, 1, row, rows)])
        self.shown = (
            f"{tuple(self.input.shape)} kernel {self.kernel} stride {stride} padding {padding} dilation {dilation} "
            f"groups {groups} {offset_groups} offset {self.offset.dtype} {self.offset.stride()} rows {row} {rows} "
            f"mask {self.mask is not None and (self.mask.dtype, self.mask.stride())}"
        )

    def packed(self, x: Tensor) -> Tensor:
        """``(N, H, W, packed C)``."""
        runs = x.unflatten(1, (-1, self.run)).permute(0, 3, 4, 1, 2)
        return F.pad(runs, (0, self.packed_run - self.run)).flatten(3).contiguous()

    def unpacked(self, y: Tensor) -> Tensor:
        return y.unflatten(3, (-1, self.packed_run))[..., : self.run].flatten(3).permute(0, 3, 1, 2)

    def in_columns(self, read: Tensor) -> Tensor:
        """Packed, ``(N*groups, oH*oW, taps * packed C/groups)``."""
        taps = read.unflatten(1, (self.per_group, -1))  # (N*groups, C/groups, taps, oH*oW)
        runs = taps.unflatten(1, (-1, self.run)).permute(0, 4, 3, 1, 2)
        return F.pad(runs, (0, self.packed_run - self.run)).flatten(2).contiguous()

    def part(self, x: Tensor) -> Tensor:
        """Of the piece: of ``(N*groups, ., oH*oW)``, or of ``(N, ., oH, oW)``."""
        each, p = len(x) // self.n, self.piece
        rows = x.unflatten(2, self.out) if x.dim() == 3 else x
        rows = rows[p.first * each : (p.first + p.images) * each, :, p.row : p.row + p.rows]
        return rows.flatten(2) if x.dim() == 3 else rows


def compare(result: Tensor, expected: Tensor, shown: str, factor: float = 1) -> None:
    if expected.numel():
        error = (result.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-3)
        assert error < factor * TOLERANCES.get(result.dtype, 1e-5), f"{shown}: {error}"


GROUPS = [(16, 1, 1), (64, 1, 4), (24, 2, 2), (32, 4, 2), (64, 2, 8), (36, 1, 1), (40, 1, 5), (264, 1, 1), (72, 1, 9)]
SHORT = [(3, 1, 1), (1, 1, 1), (12, 3, 4), (16, 16, 16), (5, 1, 5), (14, 2, 2), (27, 1, 3)]


def backward(kernels: Kernels, case: Case, planes: bool, grads: Tensor, given: Tensor, shape: torch.Size) -> tuple:
    """Whether ``grads`` is what was read now; the sums of the input's gradients; gradients of offset and mask."""
    deterministic, replace = random.random() < 0.3, random.random() < 0.6
    scale = torch.tensor(2.0**40) if deterministic else None
    needed = [random.random() < 0.8 for _ in range(3)]
    sums = torch.zeros(shape, dtype=torch.int64 if deterministic else torch.float32) if needed[0] else None
    results = [
        poisoned(*t.shape, dtype=t.dtype) if t is not None and need else None
        for t, need in zip((case.offset, case.mask), needed[1:], strict=True)
    ]
    arguments = grads, replace, given, case.offset, case.mask, case.structure, Structure(case.piece)
    assert kernels("deform_conv2d_columns_backward", planes, *arguments, sums, scale, *results), case.shown
    if sums is not None and deterministic:
        sums = sums.double() / 2.0**40
    return replace, sums, results


def check_gradients(case: Case, wanted: tuple, sums: Tensor | None, results: list) -> None:
    if sums is not None:
        compare(sums, wanted[0], f"gradient of input {case.shown}")
    for result, gradient, name in zip(results, wanted[1:], ("offset", "mask"), strict=False):
        if result is not None:
            compare(case.part(result), case.part(gradient), f"gradient of {name} {case.shown}", 3)
            case.part(result).fill_(math.nan)
            assert result.isnan().all(), f"gradient of {name} of another piece {case.shown}"


@DTYPES
@pytest.mark.parametrize(("channels", "groups", "offset_groups"), GROUPS)
def test_columns(kernels: Kernels, channels: int, groups: int, offset_groups: int, dtype: torch.dtype) -> None:
    """Of packed images."""
    case = Case(dtype, channels, groups, offset_groups)
    image, expected = case.packed(case.input), case.in_columns(case.part(case.read)).detach()
    columns = poisoned(*expected.shape, dtype=dtype)
    given = image, case.offset, case.mask, case.structure, Structure(case.piece)
    assert kernels("deform_conv2d_columns", False, *given, columns), case.shown
    compare(columns, expected, case.shown)

    grads = torch.randn(expected.shape).to(dtype)
    padding = case.in_columns(torch.ones_like(case.part(case.read)))
    grads = grads * padding.to(dtype)  # as a product with packed weights has them
    leaves = [t for t in case.leaves if t is not None]
    wanted = torch.autograd.grad(case.in_columns(case.part(case.read)), leaves, grads.double())
    replace, sums, results = backward(kernels, case, False, grads, image, image.shape)
    check_gradients(case, wanted, sums if sums is None else case.unpacked(sums), results)
    if replace:
        compare(grads, expected, f"replaced {case.shown}")


@DTYPES
@pytest.mark.parametrize(("channels", "groups", "offset_groups"), [*SHORT, *GROUPS[:4]])
def test_planes(kernels: Kernels, channels: int, groups: int, offset_groups: int, dtype: torch.dtype) -> None:
    """Of images of any strides; rows of columns that are padded."""
    case = Case(dtype, channels, groups, offset_groups)
    expected = case.part(case.read).detach()
    plane = expected.shape[2]
    storage = poisoned(*expected.shape[:2], -(-plane // 8) * 8, dtype=dtype)
    given = in_memory(case.input), case.offset, case.mask, case.structure, Structure(case.piece)
    assert kernels("deform_conv2d_columns", True, *given, storage[..., :plane]), f"{case.shown} {given[0].stride()}"
    compare(storage[..., :plane], expected, f"{case.shown} {given[0].stride()}")
    assert not storage[..., plane:].any(), case.shown

    grads = torch.randn(expected.shape).to(dtype)
    leaves = [t for t in case.leaves if t is not None]
    wanted = torch.autograd.grad(case.part(case.read), leaves, grads.double())
    replace, sums, results = backward(kernels, case, True, grads, case.input, case.input.shape)
    check_gradients(case, wanted, sums, results)
    if replace:
        compare(grads, expected, f"replaced {case.shown}")


@DTYPES
@pytest.mark.parametrize(("channels", "groups", "offset_groups"), [*GROUPS[:5], *SHORT[:4]])
def test_operator(kernels: Kernels, channels: int, groups: int, offset_groups: int, dtype: torch.dtype) -> None:
    case = Case(dtype, channels, groups, offset_groups)
    weight = torch.randn(groups * random.randint(1, 40), case.per_group, *case.kernel).to(dtype)
    weight = weight / weight[0].numel() ** 0.5
    bias = torch.randn(len(weight)).to(random.choice([dtype, torch.float32])) if random.random() < 0.5 else None
    layout = random.choice(
        [torch.Tensor.contiguous, lambda t: t.contiguous(memory_format=torch.channels_last), in_memory]
    )
    x, weight = layout(case.input), layout(weight)
    expected = OP.reference(
        *(None if t is None else t.double() for t in (x, case.offset, weight, bias, case.mask)), *case.options
    )
    output = poisoned(*expected.shape, dtype=dtype)
    tactic = random.choice([0, 1, 2])
    shown = f"{case.shown} {x.stride()} weight {tuple(weight.shape)} {weight.stride()} tactic {tactic}"
    every = kernels.bytes("deform_conv2d_workspace", x, case.offset, weight, case.structure)
    needed = kernels.bytes("deform_conv2d_scratch", x, case.offset, weight, case.structure, tactic)
    assert needed <= every, shown
    memory = Memory.of(random.choice([needed, every]))
    arguments = x, case.offset, weight, bias, case.mask, output, case.structure, tactic, memory
    assert kernels("deform_conv2d", *arguments), shown
    compare(output, expected, shown, 3)


@DTYPES
@pytest.mark.parametrize("tactic", [1, 2])
@pytest.mark.parametrize(
    "sizes",  # of the input, kernel, stride, padding, dilation, numbers of groups and of offset groups
    [
        ((31, 11), (3, 3), (1, 1), (1, 1), (1, 1), 1, 1),
        ((19, 16), (3, 3), (1, 1), (2, 1), (1, 2), 2, 4),
        ((61, 13), (3, 2), (2, 1), (0, 1), (2, 1), 4, 2),
        ((3, 400), (1, 3), (1, 1), (0, 0), (1, 1), 1, 1),
    ],
)
def test_rows_of_an_image_at_a_time(kernels: Kernels, sizes: tuple, tactic: int, dtype: torch.dtype) -> None:
    """More columns of each of two images than the launchers of this test make at a time."""
    size, kernel, stride, padding, dilation, groups, offset_groups = sizes
    channels, outputs, taps = 32, 2 * groups, offset_groups * math.prod(kernel)
    x, weight = torch.randn(2, channels, *size), torch.randn(outputs, channels // groups, *kernel) / 16
    out = F.conv2d(x, weight, None, stride, padding, dilation, groups).shape[2:]
    offset, mask = (torch.randn(2, 2 * taps, *out) * 16).round().clamp(-120, 120) / 8, torch.rand(2, taps, *out)
    given = [t.to(dtype) for t in (x, offset, weight, torch.randn(outputs), mask)]
    expected = OP.reference(*(t.double() for t in given), stride, padding, dilation, groups, offset_groups, 1.0)
    numbers = (PAIR(*pair) for pair in (kernel, stride, padding, dilation))
    conv = Structure(DeformConv2d(*numbers, channels, groups, offset_groups, 1.0))
    output = poisoned(*expected.shape, dtype=dtype)
    memory = Memory.of(kernels.bytes("deform_conv2d_scratch", *given[:3], conv, tactic))
    kernels.launched()
    assert kernels("deform_conv2d", *given, output, conv, tactic, memory)
    assert kernels.launched()[("columns_kernel", "planes_kernel")[tactic - 1]] > 2
    compare(output, expected, "output")


@DTYPES
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("channels", "groups", "offset_groups"), [*GROUPS[:4], (48, 1, 3), *SHORT[:4]])
def test_int8_inputs(
    kernels: Kernels, channels: int, groups: int, offset_groups: int, format: str, dtype: torch.dtype
) -> None:
    """In every format, to any type; offsets, mask and bias of any."""
    case = Case(dtype, channels, groups, offset_groups)
    codes = torch.randint(-128, 128, case.input.shape, dtype=torch.int8)
    weight = torch.randn(groups * random.randint(1, 20), case.per_group, *case.kernel).to(dtype)
    weight = weight / weight[0].numel() ** 0.5
    bias = torch.randn(len(weight)).to(random.choice([dtype, torch.float32])) if random.random() < 0.5 else None
    others = [None if t is None else t.double() for t in (case.offset, weight, bias, case.mask)]
    expected = OP.reference(codes.double() * SCALE, *others, *case.options)
    given, output = FORMATS[format](codes), poisoned(*expected.shape, dtype=dtype)
    memory = Memory.of(kernels.bytes("deform_conv2d_workspace", given, case.offset, weight, case.structure))
    kernels.launched()
    arguments = given, case.offset, weight, bias, case.mask, output, case.structure, random.choice([0, 1, 2]), memory
    shown = f"{case.shown} {format} weight {tuple(weight.shape)}"
    assert kernels("deform_conv2d", *arguments), shown
    compare(output, expected, shown, 3)
    if format == "CHW32" and case.run % 16 == 0 and arguments[7] == 1:
        assert kernels.launched()["columns_kernel"], shown


@DTYPES
def test_packing_and_back(kernels: Kernels, dtype: torch.dtype) -> None:
    """Of inputs, and of weights."""
    for channels, groups, offset_groups in (*GROUPS, *SHORT):
        case = Case(dtype, channels, groups, offset_groups)
        weight = torch.randn(random.randint(1, 40), case.per_group, *case.kernel).to(dtype)
        for x in (case.input, weight):
            x, expected = in_memory(x), case.packed(x)
            y = poisoned(*expected.shape, dtype=dtype)
            assert kernels("pack", x, y, case.structure), case.shown
            assert torch.equal(y, expected), f"{case.shown} {x.stride()}"
            back = poisoned(*x.shape, dtype=dtype)
            assert kernels("unpack", y, back, case.structure), case.shown
            assert torch.equal(back, x), case.shown


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf, 1e30, -1e30, 3e9])
def test_a_strange_offset_reads_zero(kernels: Kernels, strange: float) -> None:
    case = Case(torch.float32, 8, 1, 1)
    case.offset[:, 0] = strange
    image = case.packed(case.input)
    read = case.part(case.read).detach().unflatten(1, (8, -1))
    read[:, :, 0] = 0
    expected = case.in_columns(read.flatten(1, 2))
    columns = poisoned(*expected.shape, dtype=torch.float32)
    given = case.offset, case.mask, case.structure, Structure(case.piece)
    assert kernels("deform_conv2d_columns", False, image, *given, columns), case.shown
    compare(columns, expected, case.shown)
    planes = poisoned(*read.flatten(1, 2).shape, dtype=torch.float32)
    assert kernels("deform_conv2d_columns", True, case.input, *given, planes), case.shown
    compare(case.in_columns(planes), expected, case.shown)
