"""The comparison of replacements runs where the tensors are, and gives the same on the GPU as on the CPU."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from svexport.parity import parity
from tests.gpu.support import gpu

pytestmark = gpu


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.complex64, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,), (7, 11, 13), (0, 4)])
def test_as_on_the_cpu(dtype, shape):
    expected = (10 * torch.randn(shape)).to(dtype)
    actual = (expected + torch.randn(shape).to(dtype) / 100).to(dtype)
    if expected.numel() > 2 and dtype.is_floating_point:
        for tensor in (expected, actual):
            tensor.view(-1)[:2] = torch.tensor([math.nan, math.inf], dtype=dtype)
        actual.view(-1)[-1] = math.nan
    there, here = parity("y", expected.cuda(), actual.cuda()), parity("y", expected, actual)
    for field in dataclasses.fields(here):
        found, wanted = getattr(there, field.name), getattr(here, field.name)
        assert found == pytest.approx(wanted, rel=1e-9), field.name
