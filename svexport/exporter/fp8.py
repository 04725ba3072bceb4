"""Fake quantization to fp8 (E4M3): torch's computation, and the QuantizeLinear and DequantizeLinear of files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from svexport.errors import ExportError
from svexport.tensorrt.support.datatypes import FIRST
from svexport.tensorrt.support.target import Target, dotted

__all__ = ["FIRST_FP8_OPSET", "LARGEST", "ToFp8", "fake_quantize_fp8", "refuse_fp8", "to_onnx"]

FIRST_FP8_OPSET = 19
"""Of ONNX's QuantizeLinear to float8e4m3fn."""

LARGEST = 448.0
"""Of E4M3 without infinities."""

_E4M3 = torch.float8_e4m3fn


class ToFp8(nn.Module):
    """A module that may quantize to fp8; ``fp8`` says whether it does."""

    fp8 = False


@torch.library.custom_op("svexport::fake_quantize_fp8", mutates_args=())
def fake_quantize_fp8(x: Tensor, scale: Tensor, axis: int) -> Tensor:
    """``clamp(x / scale, -448, 448)`` rounded to E4M3, times ``scale``, with a straight-through gradient.

    Shape:
        - x: any, floating point
        - scale: float32, a scalar or ``(x.shape[axis],)``
    """
    step = _along(scale, x, axis)
    return ((x.float() / step).clamp(-LARGEST, LARGEST).to(_E4M3).float() * step).to(x.dtype)


@fake_quantize_fp8.register_fake
def _(x: Tensor, scale: Tensor, axis: int) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    x, scale, axis = inputs
    ctx.save_for_backward((x.float() / _along(scale, x, axis)).abs() <= LARGEST)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    (inside,) = ctx.saved_tensors
    return gradient * inside, None, None


fake_quantize_fp8.register_autograd(_backward, setup_context=_keep)


def _along(scale: Tensor, x: Tensor, axis: int) -> Tensor:
    return scale.reshape([-1 if i == axis % x.dim() else 1 for i in range(x.dim())]) if scale.dim() else scale


def to_onnx(x: Any, scale: Any, axis: int) -> Any:
    """The nodes of the exporter on torch.export; in float32, as the scale is."""
    import onnx_ir as ir
    from onnxscript import opset19

    write: Any = opset19
    sizes = [int(size) for size in scale.shape or ()]
    zeros = write.Constant(value=ir.tensor(torch.zeros(sizes).numpy()))
    zero_point = write.Cast(zeros, to=ir.DataType.FLOAT8E4M3FN.value)
    given = write.Cast(x, to=ir.DataType.FLOAT.value) if x.dtype != ir.DataType.FLOAT else x
    quantized = write.QuantizeLinear(given, scale, zero_point, axis=axis, saturate=1)
    result = write.DequantizeLinear(quantized, scale, zero_point, axis=axis)
    return write.Cast(result, to=x.dtype.value) if x.dtype != ir.DataType.FLOAT else result


def refuse_fp8(model: nn.Module, opset: int, platform: Target | None) -> list[str]:
    """Notes on a model that quantizes to fp8.

    Raises:
        ExportError: if the model quantizes to fp8, and the opset or the target has none.
    """
    if not any(isinstance(module, ToFp8) and module.fp8 for module in model.modules()):
        return []
    if opset < FIRST_FP8_OPSET:
        raise ExportError(
            f"the model is quantized to fp8, which ONNX has from opset {FIRST_FP8_OPSET} on, got opset={opset}; give "
            f"opset={FIRST_FP8_OPSET}, or quantize to int8"
        )
    first = FIRST["FLOAT8E4M3FN"]
    if platform is not None and platform.version < first:
        raise ExportError(
            f"the model is quantized to fp8, which TensorRT has from {dotted(first)} on, got {platform}; "
            "quantize to int8"
        )
    return [
        "ONNX Runtime 1.31 takes a Relu before QuantizeLinear to fp8 away: run the file by svexport.load, or give "
        "InferenceSession disabled_optimizers=['ReluQuantRewrite']"
    ]
