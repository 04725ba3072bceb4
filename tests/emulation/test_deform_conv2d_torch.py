"""The torch operators on the emulated device, forward and backward: columns in pieces, and sums over the pieces."""

from __future__ import annotations

import random

import pytest
import torch

from svexport.ops.deform_conv2d import OP
from tests.emulation import HERE, Kernels, emulated
from tests.gpu.support import TOLERANCES, leaves, moved, relative_error
from tests.gpu.test_deform_conv2d import case

BINDING = HERE / "deform_conv2d_torch.cpp"
pytestmark = [*emulated("deform_conv2d_in_pieces", "matmul", "permute"), pytest.mark.kernels(BINDING)]

SHAPES = [
    {"n": 1, "channels": 32, "outputs": 32, "size": (31, 11)},
    {"n": 2, "channels": 64, "outputs": 12, "size": (23, 17), "groups": 4, "offset_groups": 2, "stride": (2, 1)},
    {"n": 3, "channels": 32, "outputs": 40, "size": (1, 83), "mask": False},
    {"n": 3, "channels": 3, "outputs": 16, "size": (37, 13), "kernel": (5, 5), "mask": False},
    {"n": 2, "channels": 16, "outputs": 16, "size": (29, 31), "groups": 16},
    {"n": 3, "channels": 32, "outputs": 16, "size": (19, 16), "bias": False, "dilation": (2, 1)},
    {"n": 3, "channels": 12, "outputs": 9, "groups": 3, "offset_groups": 4},
    {"n": 0},
]


@pytest.fixture(scope="module")
def operators(kernels: Kernels) -> Kernels:
    """``torch.ops.svexport_emulated``."""
    kernels.load_operators(BINDING)
    return kernels


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_outputs_and_gradients(operators: Kernels, sizes: dict, dtype: torch.dtype) -> None:
    args = case(**sizes, seed=random.getrandbits(32))
    args[1] = (args[1] * 8).round() / 8 + 1 / 16  # not so near whole pixels that rounding leads to the next one
    args = moved(args, dtype)
    layout = random.choice([torch.contiguous_format, torch.channels_last])
    args[0], args[2] = (args[i].contiguous(memory_format=layout) for i in (0, 2))
    precise, inputs = leaves(tuple(moved(args, torch.float64)))
    expected = OP.reference(*precise)
    actual = torch.ops.svexport_emulated.deform_conv2d(*args)
    assert relative_error(actual, expected) < TOLERANCES[dtype]

    grad = torch.randn(expected.shape).to(dtype)
    gradients = torch.autograd.grad(expected, inputs, grad.double())
    for needed in ([True] * len(inputs), [random.random() < 0.6 for _ in inputs]):
        found = torch.ops.svexport_emulated.deform_conv2d_backward([grad], *args, needed)
        wanted = [g for g, need in zip(gradients, needed, strict=True) if need]
        for a, e in zip(found, wanted, strict=True):
            assert relative_error(a, e) < 3 * TOLERANCES[dtype]
    assert not operators.report()
