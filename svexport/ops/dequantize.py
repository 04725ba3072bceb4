"""The inverse of symmetric int8 quantization."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from svexport.ops._op import Op
from svexport.ops.quantize import bind_scale, step_like

__all__ = ["dequantize"]

DTYPES = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}
"""Output dtypes by ONNX number (``TensorProto.DataType``), the attribute of the node."""


def reference(q: Tensor, scale: float, scales: Tensor | None, axis: int, dtype: int) -> Tensor:
    result = DTYPES[dtype]
    precise = torch.promote_types(result, torch.float32)
    return (q.to(precise) * step_like(q, scale, scales, axis, precise)).to(result)


def values_of(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Numbers in ``dtype``, dequantized if they are int8."""
    return x.to(dtype) if x.is_floating_point() else dequantize(x, scale, dtype)


def result_dtype(x: Tensor, other: Tensor) -> torch.dtype:
    """The dtype of what is computed of both: that of ``x``, or that of ``other`` if ``x`` is int8."""
    return x.dtype if x.is_floating_point() else other.dtype


def fake(q: Tensor, scale: float, scales: Tensor | None, axis: int, dtype: int) -> Tensor:
    return torch.empty_like(q, dtype=DTYPES[dtype])


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    def integers(*shape: int) -> Tensor:
        return (make(*shape) * 50).clamp(-128, 127).to(torch.int8)

    number = {dtype: number for number, dtype in DTYPES.items()}[make(1).dtype]
    yield integers(2, 3, 5, 7), 0.02, None, 0, number
    yield integers(2, 5, 3), 1.0, make(5), 1, number
    yield integers(4, 3), 1.0, make(3), 1, number
    yield integers(3, 1), 1.0, make(), 0, number
    yield integers(0, 4), 1.0, make(4), 1, number
    yield integers(), 0.1, None, 0, number


OP = Op(
    name="dequantize",
    schema="(Tensor q, float scale, Tensor? scales, int axis, int dtype) -> Tensor",
    reference=reference,
    samples=samples,
    fake=fake,
    plugin=False,
)


def dequantize(q: Tensor, scale: float | Tensor, dtype: torch.dtype = torch.float32, axis: int = 1) -> Tensor:
    """``q * scale``: the value that :func:`svexport.ops.quantize` stored, to within half a step.

    It is ONNX DequantizeLinear with zero point 0
    (https://onnx.ai/onnx/operators/onnx__DequantizeLinear.html). A tensor ``scale`` has a gradient.

    Args:
        q: ``(*)``, int8.
        scale: a positive number, which is an attribute of the node; or a tensor: one element, or ``(q.shape[axis],)``.
        dtype: the result's; half is multiplied in float32.
        axis: axis of ``q`` that a scale with several elements runs along.

    Returns:
        ``dtype``, the shape of ``q``.

    Raises:
        ValueError: on a number that is not positive and finite in float32, or a tensor that does not fit ``q``.
        TypeError: if ``q`` is not int8 or ``dtype`` not floating point.
    """
    numbers = [number for number, known in DTYPES.items() if known == dtype]
    if q.dtype != torch.int8 or not numbers:
        raise TypeError(f"dequantize expects an int8 tensor and a floating-point dtype, got {q.dtype} and {dtype}")
    return OP(q, *bind_scale("dequantize", q, scale, axis), numbers[0])
