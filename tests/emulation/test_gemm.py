from __future__ import annotations

import ctypes
import math
import random
from functools import partial

import pytest
import torch
from torch import Tensor

from svexport.ops import _cuda
from tests.emulation import PRODUCT_TOLERANCES, Kernels, Memory, Structure, check_product, emulated

pytestmark = emulated("gemm")


class Linear(ctypes.Structure):
    """``svexport::Linear`` of gemm.h."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_tail", ctypes.c_void_p),
        ("tail", ctypes.c_int),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("inner", ctypes.c_int),
        ("out", ctypes.c_int),
        ("relu", ctypes.c_bool),
    )


def make(*shape: int, dtype: torch.dtype, value: float | None = None) -> Tensor:
    """Contiguous, sometimes not at a multiple of 16 bytes."""
    start = random.choice([0, 0, 0, 1, 8])
    size = start + math.prod(shape)
    flat = torch.randn(size) if value is None else torch.full((size,), value)
    return flat.to(dtype)[start:].view(shape)


def product(tail: int, relu: bool, x: Tensor, x_tail: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
    sums = x @ weight.T
    if x_tail is not None:
        sums[:, tail:] = x_tail @ weight[tail:].T
    if bias is not None:
        sums = sums + bias
    return sums.relu() if relu else sums


def check_random_layer(kernels: Kernels, dtype: torch.dtype, inner: range) -> None:
    rows, width = random.choice([1, 31, 33, 64, random.randint(1, 150)]), random.choice(inner)
    out = random.choice([1, 8, 64, 65, random.randint(1, 150)])
    x, weight = make(rows, width, dtype=dtype), make(out, width, dtype=dtype)
    bias = make(out, dtype=dtype) if random.random() < 0.7 else None
    x_tail = make(rows, width, dtype=dtype) if random.random() < 0.5 else None
    tail = 0 if x_tail is None else random.randint(0, out)
    relu = random.random() < 0.5
    y = make(rows, out, dtype=dtype, value=math.nan)
    tensors = {"x": x, "x_tail": x_tail, "weight": weight, "bias": bias, "y": y}
    layer = Linear(tail=tail, rows=rows, inner=width, out=out, relu=relu)
    for name, t in tensors.items():
        setattr(layer, name, None if t is None else t.data_ptr())
    shown = f"{rows}x{width} -> {out}, tail {tail}, {[t is not None and t.data_ptr() % 16 for t in tensors.values()]}"
    given = Structure(layer, [Memory.within(t) for t in tensors.values() if t is not None])
    assert kernels("linear", given, list(PRODUCT_TOLERANCES).index(dtype)), shown
    check_product(y, partial(product, tail, relu), x, x_tail, weight, bias, shown=shown, smallest=1e-4)


@pytest.mark.parametrize("dtype", PRODUCT_TOLERANCES, ids=str)
@pytest.mark.parametrize("inner", [range(1, 200), range(8, 257, 8)], ids=str)
def test_random_layers(kernels: Kernels, dtype: torch.dtype, inner: range) -> None:
    for _ in range(6):
        check_random_layer(kernels, dtype, inner)


@pytest.mark.parametrize("inner", [range(1, 200), range(8, 257, 8)], ids=str)
def test_without_tensor_cores_for_floats(inner: range) -> None:
    """As compiled for a Turing."""
    kernels = Kernels(_cuda.CSRC / "cuda" / "gemm.cu", architecture="75")
    for _ in range(6):
        check_random_layer(kernels, torch.float32, inner)
