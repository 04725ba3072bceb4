from __future__ import annotations

import ctypes
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.emulation import Kernels, Structure, emulated, in_memory
from tests.emulation.test_grid_sample import DTYPES, MODES, PADDINGS, Case, in_layout, tactic

pytestmark = emulated("grid_sample_int8")


class Sampling(ctypes.Structure):
    """That of sampling.h."""

    _fields_ = (("mode", ctypes.c_int), ("padding", ctypes.c_int), ("align_corners", ctypes.c_bool))


def in_blocks(codes: Tensor, size: int) -> Tensor:
    """CHW4 and CHW32: ``(N, ceil(C/size), H, W, size)``, the padding poisoned."""
    padded = F.pad(codes, (0, 0, 0, 0, 0, -codes.shape[1] % size), value=99)
    return padded.unflatten(1, (-1, size)).movedim(2, -1).contiguous()


FORMATS = {
    "CHW32": lambda codes: in_blocks(codes, 32),
    "CHW4": lambda codes: in_blocks(codes, 4),
    "linear": Tensor.contiguous,
    "channels-last": lambda codes: codes.contiguous(
        memory_format=torch.channels_last if codes.dim() == 4 else torch.channels_last_3d
    ),
    "any": in_memory,
}


@DTYPES
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("mode", range(3), ids=MODES)
def test_int8_images(kernels: Kernels, mode: int, format: str, dtype: torch.dtype) -> None:
    """In every format, to NCHW and channels-last, few points and many."""
    kernels.multiprocessors(random.choice([1, 132]))  # few have threads that do more
    for rank in (4, 5) if mode < 2 and not format.startswith("CHW") else (4,):
        for c in (random.choice([1, 3, 4, 12]), random.choice([16, 64, 70])):
            spatial = [random.randint(1, 20 if rank == 4 else 9) for _ in range(rank - 2)]
            points = [random.choice([1, 5, 17, 60]) if rank == 4 else random.randint(1, 9) for _ in range(rank - 2)]
            case = Case(dtype, spatial, points, random.choice([1, 2]), c, mode)
            codes, scale = torch.randint(-128, 128, case.input.shape, dtype=torch.int8), 0.017
            options = MODES[mode], PADDINGS[case.padding], case.align_corners
            expected = F.grid_sample(codes.double() * scale, case.grid.double(), *options)
            output = in_layout(torch.full(expected.shape, math.nan, dtype=dtype))
            given, sampling = FORMATS[format](codes), Structure(Sampling(mode, case.padding, case.align_corners))
            shown = f"{case.shown} {format} {given.shape} {given.stride()}"
            assert kernels("sample_int8", given, case.grid, output, sampling, scale, tactic()), shown
            assert not output.isnan().any(), shown
            near = ~case.unsure[:, None].expand_as(output)
            error = (output.double() - expected)[near].abs()
            assert (error < 5 * case.tolerance).all(), f"{shown}: {error.max()}"
            # What the type keeps, and a small part of a step of the codes, for weights may be in steps of 2^-14.
            kept = torch.finfo(dtype).eps / 2 * expected[near].abs()
            assert (error <= kept + scale * (2**-4 if mode == 2 else 2**-5) + 1e-4).all(), f"{shown}: {error.max()}"
