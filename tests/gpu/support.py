"""Shared by the tests of CUDA kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from svexport.ops import _cuda
from svexport.ops._op import Op, as_tuple
from tests.ops.test_every_op import flat

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU and torch built for it"),
]
"""``pytestmark`` of every file here."""

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest relative error of a kernel, by the type of the data."""


def moved(value: Any, *args: Any, **kwargs: Any) -> Any:
    """``.to(...)`` of every tensor in nested lists and tuples; those of integers keep their dtype."""
    if isinstance(value, (list, tuple)):
        return type(value)(moved(v, *args, **kwargs) for v in value)
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        return value.to(*args, **kwargs)
    return value.to(
        *(a for a in args if not isinstance(a, torch.dtype)), **{k: v for k, v in kwargs.items() if k != "dtype"}
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """``|actual - expected| / |expected|`` in float64; infinite where NaN or infinities are not in the same places.

    Values that should be zero, and are not quite, are measured against a thousandth.
    """
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    assert actual.shape == expected.shape, f"expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
    finite = expected.isfinite()
    if not torch.equal(actual.isfinite(), finite) or not torch.equal(actual.isnan(), expected.isnan()):
        return float("inf")
    actual, expected = actual[finite], expected[finite]
    floor = 1e-3 * expected.numel() ** 0.5
    return float((actual - expected).norm() / expected.norm().clamp(min=floor)) if expected.numel() else 0.0


def leaves(args: tuple) -> tuple[tuple, list[Tensor]]:
    """Copies of the arguments whose floating-point tensors require gradients, and those tensors."""
    found: list[Tensor] = []

    def one(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
            return [one(v) for v in value]
        if isinstance(value, Tensor) and value.is_floating_point():
            found.append(value.detach().clone().requires_grad_())
            return found[-1]
        return value

    return tuple(map(one, args)), found


def outputs_and_gradients(function: Any, args: tuple, grads: list[Tensor] | None = None) -> tuple[list, list]:
    """Outputs, and the gradients of the inputs for ``grads`` of the floating-point outputs (ones by default)."""
    given, inputs = leaves(args)
    outputs = as_tuple(function(*given))
    with_grad = [o for o in outputs if o.requires_grad]
    if not with_grad:  # of the reference; the op may say that there is a gradient, which is zero
        return list(outputs), [torch.zeros_like(i) for i in inputs]
    if grads is None:
        grads = [torch.ones_like(o) for o in with_grad]
    gradients = torch.autograd.grad(
        with_grad, inputs, [g.to(o.device, o.dtype) for o, g in zip(with_grad, grads)], allow_unused=True
    )
    return [o.detach() for o in outputs], [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, gradients)]


def check_kernel(op: Op, args: tuple, *, tolerance: float | None = None, gradients: bool = True) -> None:
    """Compares the op on CUDA with its reference in float64 on the CPU, for arguments given on the CPU."""
    dtype = next((t.dtype for t in flat(args) if t.is_floating_point()), torch.float32)
    limit = TOLERANCES[dtype] if tolerance is None else tolerance
    expected, _ = outputs_and_gradients(op.reference, moved(args, torch.float64))
    generator = torch.Generator().manual_seed(1)
    grads = [
        torch.randn(o.shape, generator=generator, dtype=torch.float64).to(dtype)
        for o in expected
        if o.is_floating_point()
    ]
    cuda = moved(args, "cuda")
    if gradients:
        expected, wanted = outputs_and_gradients(op.reference, moved(args, torch.float64), [g.double() for g in grads])
        actual, got = outputs_and_gradients(op, cuda, grads)
    else:
        actual, wanted, got = list(as_tuple(op(*cuda))), [], []
    same_type = as_tuple(op.reference(*args))  # integers round ties of values in the type given
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.is_cuda
        if not e.is_floating_point():
            assert torch.equal(a.cpu(), same_type[index]), f"output {index}"
            continue
        assert (error := relative_error(a, e)) < limit, f"output {index}: relative error {error:.2e} >= {limit:.0e}"
    if f"{op.name}_backward" not in _cuda.kernels():
        return  # torch's own kernels in the type given, which are not under test
    for index, (a, e) in enumerate(zip(got, wanted, strict=True)):
        assert (error := relative_error(a, e)) < 3 * limit, f"gradient {index}: relative error {error:.2e}"
