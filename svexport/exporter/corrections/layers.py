"""Pooling and fake quantizers, as the TorchScript exporter writes them: corrections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.onnx import symbolic_helper

from svexport.tracing.quantizers import full_range

__all__ = ["LAYERS"]

_Value = torch._C.Value
_Own = Callable[..., Any]
_kinds = torch.onnx.JitScalarType


def _of_batches(rank: int) -> Callable[..., Any]:
    """For one image without a batch (C, H, W) as well, which the exporter's own takes for channels of something."""

    def convert(g: Any, own: _Own, self: _Value, *rest: _Value) -> Any:
        if symbolic_helper._get_tensor_rank(self) != rank - 1:
            return own(g, self, *rest)
        results = own(g, symbolic_helper._unsqueeze_helper(g, self, [0]), *rest)
        if isinstance(results, _Value):
            return symbolic_helper._squeeze_helper(g, results, [0])
        return tuple(symbolic_helper._squeeze_helper(g, result, [0]) for result in results)

    return convert


def _fake_quantize(g: Any, own: _Own, self: _Value, scale: _Value, zero_point: _Value, *rest: _Value) -> Any:
    """The exporter's own knows no other ranges than those of types, or adds a Clip of uint8, which TensorRT lacks."""
    *axis, low, high = (int(symbolic_helper._maybe_get_const(value, "i")) for value in rest)
    full = full_range(low, high)
    if full is None:
        return own(g, self, scale, zero_point, *rest)
    scale = g.op("Cast", scale, to_i=_kinds.FLOAT.onnx_type())
    if full != (low, high):
        limits = scale, g.op("Cast", zero_point, to_i=_kinds.FLOAT.onnx_type())
        if axis:
            shape = [1] * (symbolic_helper._get_tensor_rank(self) or 1)
            shape[axis[0]] = -1
            limits = tuple(g.op("Reshape", v, g.op("Constant", value_t=torch.tensor(shape))) for v in limits)
        for bound, beyond, limit in zip((low, high), ("Max", "Min"), full, strict=True):
            if bound != limit:
                steps = g.op("Sub", g.op("Constant", value_t=torch.tensor(float(bound))), limits[1])
                self = g.op(beyond, self, g.op("Mul", steps, limits[0]))
    kind = _kinds.INT8 if full[0] else _kinds.UINT8
    given = scale, g.op("Cast", zero_point, to_i=kind.onnx_type())
    along = {"axis_i": axis[0]} if axis else {}
    return g.op("DequantizeLinear", g.op("QuantizeLinear", self, *given, **along), *given, **along)


_POOLS = ("adaptive_avg_pool{}d", "adaptive_max_pool{}d", "avg_pool{}d", "max_pool{}d_with_indices")

LAYERS: dict[str, Callable[..., Any]] = {
    **{f"aten::{pool.format(axes)}": _of_batches(axes + 2) for axes in (1, 2, 3) for pool in _POOLS},
    **{f"aten::max_pool{axes}d": _of_batches(axes + 2) for axes in (1, 3)},  # of two it is an op of ours
    "aten::pixel_shuffle": _of_batches(4),
    "aten::pixel_unshuffle": _of_batches(4),
    "aten::fake_quantize_per_channel_affine": _fake_quantize,
    "aten::fake_quantize_per_tensor_affine": _fake_quantize,
}
