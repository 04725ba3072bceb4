from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from svexport.kernels import planner
from tests.emulation import Kernels, Memory, emulated

pytestmark = emulated("add_bias_residual_layer_norm*")

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def make(*shape: int, dtype: torch.dtype, value: float | None = None) -> Tensor:
    """Contiguous, sometimes not at a multiple of 16 bytes."""
    start = random.choice([0, 0, 0, 1, 3, 8])
    flat = torch.randn(start + math.prod(shape)) if value is None else torch.full((start + math.prod(shape),), value)
    return flat.to(dtype)[start:].view(shape)


def tactic(
    count: int, tensors: Sequence[Tensor | None], parameters: Sequence[Tensor], **problem: int
) -> planner.Tactic:
    """One of those for tensors of rows (the first is x) and for vectors, by chance."""
    rows, columns = tensors[0].shape
    item = tensors[0].element_size()
    multiple = [math.gcd(16, *(t.data_ptr() for t in all_ if t is not None)) for all_ in (tensors, parameters)]
    strides = math.gcd(16, columns * item) if rows > 1 else 16
    gpu = dataclasses.replace(planner.GPUS["h100"], name="emulated", multiprocessors=count)
    problem |= {"rows": rows, "columns": columns, "item_size": item, "strides": strides}
    found = planner.plan("add_bias_residual_layer_norm", gpu, addresses=multiple[0], parameters=multiple[1], **problem)
    return random.choice(found.tactics)


def check(result: Tensor, expected: Tensor, shown: str, factor: float = 1) -> None:
    error = (result.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
    assert error < factor * TOLERANCES[result.dtype], f"{shown}: {error}"


@DTYPES
@pytest.mark.parametrize(
    "columns", [range(2, 300), range(250, 1100), range(1000, 4500), range(4097, 9000), range(8193, 17000)], ids=str
)
def test_random_rows(kernels: Kernels, columns: range, dtype: torch.dtype) -> None:
    """In turn with few multiprocessors, where blocks have several rows."""
    for count in (132, 4, 2, 1):
        kernels.multiprocessors(count)
        d = random.choice(columns)
        rows = random.choice([1, 2, 7, random.randint(1, 40)]) if d < 4500 else random.randint(1, 9)
        x, residual = (make(rows, d, dtype=dtype) for _ in range(2))
        extra = make(rows, d, dtype=dtype) if random.random() < 0.3 else None
        of_vectors = random.choice([dtype, torch.float32])
        bias, weight, norm_bias = (make(d, dtype=of_vectors) for _ in range(3))
        y, s = (make(rows, d, dtype=dtype, value=math.nan) for _ in range(2))
        way = tactic(count, (x, residual, extra, y, s), (bias, weight, norm_bias), extra=extra is not None)
        shown = f"{rows}x{d}, vectors {of_vectors}, {count} multiprocessors, {way}"
        assert kernels("add_bias_residual_layer_norm", x, bias, residual, weight, norm_bias, 1e-5, extra, y, s, way.id)

        inputs = [
            t if t is None else t.double().requires_grad_() for t in (x, bias, residual, weight, norm_bias, extra)
        ]
        x64, bias64, residual64, weight64, norm_bias64, extra64 = inputs
        s64 = x64 + bias64 + residual64 + (0 if extra64 is None else extra64)
        y64 = F.layer_norm(s64, (d,), weight64, norm_bias64, 1e-5)
        check(y, y64.detach(), f"y {shown}")
        check(s, s64.detach(), f"s {shown}")

        dy, ds = (make(rows, d, dtype=dtype) for _ in range(2))
        torch.autograd.backward([y64, s64], [dy.double(), ds.double()])
        gradients = [
            None if t is None or random.random() < 0.1 else make(*t.shape, dtype=t.dtype, value=math.nan)
            for t in (x, bias, residual, weight, norm_bias, extra)
        ]
        wanted = [gradients[i] for i in (0, 2, 5)]
        way = tactic(count, (x, residual, extra, dy, ds, *wanted), (bias, weight), extra=extra is not None, backward=1)
        shown += f", backward {way}"
        workspace = Memory.of(kernels.bytes("add_bias_residual_layer_norm_backward_workspace", x))
        assert kernels(
            "add_bias_residual_layer_norm_backward",
            *(dy, ds, x, bias, residual, weight, 1e-5, extra),
            *gradients,
            workspace,
            way.id,
        )
        for name, result, value in zip(("x", "bias", "residual", "weight", "norm_bias", "extra"), gradients, inputs):
            if result is not None:
                check(result, value.grad, f"gradient of {name} {shown}", 3)
