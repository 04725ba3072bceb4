"""``SvScaledDotProductAttention``: the body is MatMul, Softmax, MatMul, the pattern that TensorRT fuses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto

from svexport.errors import ExportError
from svexport.ops.scaled_dot_product_attention import OP
from svexport.symbolic._builder import Builder, Value
from svexport.symbolic._symbolic import Symbolic, TensorInfo
from svexport.symbolic.triu import keep

__all__ = ["repeat_heads"]

_WIDTHS = (TensorProto.BFLOAT16, TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE)

LOWEST: dict[int, float] = {TensorProto.FLOAT16: -65504.0, TensorProto.DOUBLE: float(np.finfo(np.float64).min)}


def body(
    b: Builder,
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value | None,
    is_causal: bool,
    scale: Sequence[float],
    enable_gqa: bool,
) -> Value:
    if 0 in (*query.shape[:-1], *key.shape[:-1], value.shape[-1]):
        return b.expand(b.like(0, query), *(b.dim(query, i) for i in range(query.rank - 1)), b.dim(value, -1))
    if enable_gqa:
        key, value = repeat_heads(b, key, query), repeat_heads(b, value, query)
    rank = max(query.rank, key.rank)
    swapped = b.transpose(key, [*range(key.rank - 2), key.rank - 1, key.rank - 2])
    scores = b.op("MatMul", b.op("Mul", query, _factor(b, query, scale)), swapped)
    bias = None
    if is_causal:
        bias = _bias(b, keep(b, b.dim(query, -2), b.dim(key, -2), 0, upper=False), query)
    elif attn_mask is not None:
        bias = _bias(b, attn_mask, query) if attn_mask.dtype == TensorProto.BOOL else attn_mask
    if bias is not None:
        if bias.dtype != query.dtype:  # a float32 mask may be added to half scores, which become float32
            bias, scores = (b.cast(x, max(bias.dtype, query.dtype, key=_WIDTHS.index)) for x in (bias, scores))
        scores = b.op("Add", scores, bias)
    output = b.op("MatMul", b.cast(b.op("Softmax", scores, axis=rank - 1), query.dtype), value)
    if bias is not None and attn_mask is not None:
        # The softmax is NaN where the mask leaves no key. Test the mask for that, not the scores: it may be constant.
        most = b.reduce("ReduceMax", bias, [bias.rank - 1], keepdims=True)
        nothing = b.op("Less", most, b.like(LOWEST.get(bias.dtype, float(np.finfo(np.float32).min)), bias))
        output = b.op("Where", nothing, b.like(0, query), output)
    return output


def _factor(b: Builder, query: Value, scale: Sequence[float]) -> Value:
    if scale:
        return b.like(scale[0], query)
    size = b.dim(query, -1)
    if isinstance(size, int):
        return b.like(1 / math.sqrt(size), query)
    return b.op("Reciprocal", b.op("Sqrt", b.cast(size, query.dtype)))


def _bias(b: Builder, mask: Value, query: Value) -> Value:
    """The bias that a boolean mask adds to the scores: 0 or -inf."""
    return b.op("Where", mask, b.like(0, query), b.like(-np.inf, query))


def repeat_heads(b: Builder, x: Value, query: Value) -> Value:
    """Repeats each head for the query heads that share it."""
    *batch, heads, length, size = b.dims(x)
    wanted = b.dim(query, -3)
    groups = b.quotient(wanted, heads)
    if groups == 1:
        return x
    repeated = b.expand(b.unsqueeze(x, x.rank - 2), *batch, heads, groups, length, size)
    return b.reshape(repeated, *batch, wanted, length, size)


def convert(
    query: TensorInfo,
    key: TensorInfo,
    value: TensorInfo,
    attn_mask: TensorInfo | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool = False,
) -> tuple[Any, ...] | None:
    """``aten::scaled_dot_product_attention``."""
    if dropout_p:
        raise ExportError(
            f"scaled_dot_product_attention expects dropout_p=0.0 outside of training, got {dropout_p}: torch draws "
            "random numbers in every forward; pass dropout_p=self.dropout if self.training else 0.0"
        )
    if query.shape is None or key.shape is None or value.shape is None:
        return None
    return query, key, value, attn_mask, is_causal, [] if scale is None else [scale], enable_gqa


Symbolic(OP, body, aten={"scaled_dot_product_attention": convert})
