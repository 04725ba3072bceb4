"""Symmetric int8 quantization."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from svexport.ops._op import Op, check_floating_point

__all__ = ["bind_scale", "quantize", "step_like"]


def bind_scale(name: str, x: Tensor, scale: float | Tensor, axis: int) -> tuple[float, Tensor | None, int]:
    """Turns a scale into arguments of an op: a number, or a tensor of one element or of one per index of ``axis``.

    Raises:
        ValueError: if the number is not positive and finite in float32, or on another shape.
    """
    if not isinstance(scale, Tensor):
        limits = torch.finfo(torch.float32)
        if not limits.tiny * limits.eps <= scale <= limits.max:
            why = ", which float32 does not hold" if 0 < scale < math.inf else ""
            raise ValueError(f"{name} expects a positive, finite scale, got {scale}{why}")
        return scale, None, 0
    if scale.numel() == 1 and scale.dim() <= 1:
        return 1.0, scale.reshape(()), 0
    if not -x.dim() <= axis < x.dim() or scale.shape != x.shape[axis : axis + 1 or None]:
        raise ValueError(
            f"{name} expects a scale of one element, or of the size of axis {axis} of a tensor {tuple(x.shape)}; "
            f"got {tuple(scale.shape)}"
        )
    return 1.0, scale, axis % x.dim()


def step_like(x: Tensor, scale: float, scales: Tensor | None, axis: int, dtype: torch.dtype) -> Tensor:
    """The scale as a tensor that broadcasts against ``x``."""
    if scales is None:
        # A tensor, because CUDA multiplies by the reciprocal of a number; float32 is the precision of an attribute.
        return torch.full((), scale, dtype=torch.float32, device=x.device).to(dtype)
    scales = scales.to(dtype)
    return scales.reshape([-1 if i == axis else 1 for i in range(x.dim())]) if scales.dim() else scales


def reference(x: Tensor, scale: float, scales: Tensor | None, axis: int, restricted: bool) -> Tensor:
    precise = torch.promote_types(x.dtype, torch.float32)
    steps = x.to(precise) / step_like(x, scale, scales, axis, precise)
    return steps.round().clamp(-127 if restricted else -128, 127).to(torch.int8)


def fake(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, dtype=torch.int8)


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    yield make(2, 3, 5, 7), 0.02, None, 0, True
    yield make(11), 0.013, None, 0, False  # beyond both ends
    yield make(2, 5, 3), 1.0, make(5).abs() * 0.02 + 0.004, 1, True
    yield make(4, 3), 1.0, make(3).abs() * 0.02 + 0.004, 1, False
    yield make(3, 1), 1.0, make().abs() + 0.01, 0, True
    yield make(0, 4), 1.0, make(4).abs() + 0.01, 1, True
    yield make(), 0.1, None, 0, True


OP = Op(
    name="quantize",
    schema="(Tensor x, float scale, Tensor? scales, int axis, bool restricted) -> Tensor",
    reference=reference,
    samples=samples,
    fake=fake,
    plugin=False,
)


def quantize(x: Tensor, scale: float | Tensor, axis: int = 1, restricted: bool = True) -> Tensor:
    """Symmetric int8: ``x / scale``, rounded half to even, saturated to [-127, 127] or [-128, 127].

    It is ONNX QuantizeLinear with zero point 0, which supports only the full range
    (https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html). The integer result has no gradient; for training,
    ``torch.fake_quantize_per_tensor_affine`` has a straight-through one.

    Args:
        x: ``(*)``, floating point; half is divided in float32. The result for NaN is not specified.
        scale: a positive number, which is an attribute of the node; or a tensor: one element, or ``(x.shape[axis],)``
            with one scale for each index of ``axis``.
        axis: axis of ``x`` that a scale with several elements runs along.
        restricted: saturate to the symmetric [-127, 127], one more node in ONNX; otherwise to [-128, 127].

    Returns:
        int8, the shape of ``x``.

    Raises:
        ValueError: on a number that is not positive and finite in float32, or a tensor that does not fit ``x``.
        TypeError: if ``x`` is not floating point.
    """
    check_floating_point("quantize", "tensor", x)
    return OP(x, *bind_scale("quantize", x, scale, axis), restricted)
