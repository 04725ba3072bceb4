"""Attention, rotary embeddings and the cache of keys and values."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from onnx import TensorProto, numpy_helper

from svexport.graph.opsets.rules import Node, down
from svexport.symbolic._builder import Builder, Dim, Value, static
from svexport.symbolic.scaled_dot_product_attention import repeat_heads
from svexport.symbolic.triu import keep

__all__: list[str] = []

_BOOL, _INT64 = TensorProto.BOOL, TensorProto.INT64


@down("Attention", 24)
def attention_24(b: Builder, node: Node) -> Value | tuple[Value | None, ...] | None:
    """The number of valid keys per batch is new; a mask expresses the same."""
    if node.given(6) is None:
        return None
    q, k, mask = node.tensor(), node.tensor(1), None if node.given(3) is None else _computed(b, node, 3)
    valid = b.cast(replace(node.typed(6), shape=(None,)), _INT64)
    keys = b.dim(k, -2)
    places, valid = b.arange(keys), b.unsqueeze(valid, 1, 2, 3)  # (K,), (B, 1, 1, 1)
    allowed = b.op("Less", places, valid)
    if node.attribute("is_causal") == 1:
        rows = b.unsqueeze(b.arange(b.dim(q, -2)), 1)  # (Q, 1)
        last = b.op("Sub", b.op("Add", rows, valid), b.shape(b.dim(q, -2)))
        beyond = b.op("Greater", places, last)
        allowed = b.op("And", allowed, b.op("Not", beyond))
        node.set(is_causal=0)
    if mask is not None:
        mask = _filled(b, mask, keys)
        if mask.dtype == _BOOL:
            allowed = b.op("And", allowed, mask)
        else:
            allowed = b.op("Where", allowed, mask, b.like(-math.inf, mask))
    node.give(*node.inputs[:3], allowed, node.given(4), node.given(5))
    return None


def _filled(b: Builder, mask: Value, keys: Dim) -> Value:
    """A mask that may say nothing of the last keys, which then do not count."""
    count = b.dim(mask, -1)
    if count == keys:
        return mask
    rank = mask.rank
    missing = (
        b.op("Sub", b.shape(keys), b.shape(count))
        if isinstance(keys, Value) or isinstance(count, Value)
        else keys - count
    )
    rest = [*(b.dim(mask, i) for i in range(rank - 1)), missing]
    fill = b.constant(np.array(False)) if mask.dtype == _BOOL else b.like(-math.inf, mask)
    shape = (*(mask.shape or ())[:-1], *static(keys))
    return b.op("Concat", mask, b.expand(fill, *rest), axis=rank - 1, shape=shape)


@down("Attention", 23)
def attention_23(b: Builder, node: Node) -> tuple[Value | None, ...]:
    """Scores, softcap, mask, softmax, values; a row that may attend to nothing is zero."""
    q, k, v = (_computed(b, node, i) for i in range(3))
    flat = q.rank == 3
    if flat:
        q = _heads(b, q, node.attribute("q_num_heads"))
        k, v = (_heads(b, x, node.attribute("kv_num_heads")) for x in (k, v))
    past: Dim = 0
    if node.given(4) is not None and node.given(5) is not None:
        past_key, past_value = _computed(b, node, 4), _computed(b, node, 5)
        past = b.dim(past_key, 2)
        k, v = _joined(b, past_key, k), _joined(b, past_value, v)
    present = k, v
    k, v = repeat_heads(b, k, q), repeat_heads(b, v, q)
    factor = _factor(b, node, q)
    swapped = b.op("Mul", b.transpose(k, (0, 1, 3, 2)), factor)
    sizes = (*(q.shape or ())[:3], (k.shape or (None,) * 4)[2])
    scores = b.op("MatMul", b.op("Mul", q, factor, shape=q.shape), swapped, shape=sizes)
    steps = [scores]
    if (softcap := node.attribute("softcap")) > 0:
        cap = b.like(softcap, scores)
        scores = b.op("Mul", b.op("Tanh", b.op("Div", scores, cap)), cap)
    steps.append(scores)
    bias, masked = _bias(b, node, q, k, past)
    for one in bias:
        scores = b.op("Add", scores, one)
    steps.append(scores)
    precision = node.attribute("softmax_precision") or scores.dtype
    precise = scores if precision == TensorProto.BFLOAT16 else b.cast(scores, precision)
    weights = b.cast(b.op("Softmax", precise, axis=3, shape=sizes), q.dtype)
    if masked is not None:
        weights = b.op("Where", masked, b.like(0, weights), weights)
    steps.append(weights)
    y = b.op("MatMul", weights, v, shape=(*sizes[:3], (v.shape or (None,) * 4)[3]))
    if flat:
        y = b.transpose(y, (0, 2, 1, 3))
        y = b.reshape(y, b.dim(y, 0), b.dim(y, 1), b.product(b.dim(y, 2), b.dim(y, 3)))
    chosen = steps[node.attribute("qk_matmul_output_mode")]
    dtypes = (node.dtype(0), node.dtype(1), node.dtype(2), node.dtype(0))
    made = zip((y, *present, chosen), dtypes)
    return tuple(b.cast(x, dtype) if node.output(i) is not None else None for i, (x, dtype) in enumerate(made))


def _computed(b: Builder, node: Node, index: int) -> Value:
    """An input in a type that runtimes compute with."""
    x = node.tensor(index)
    return b.cast(x, TensorProto.FLOAT) if x.dtype == TensorProto.BFLOAT16 else x


def _heads(b: Builder, x: Value, count: int | None) -> Value:
    """``(B, S, heads * size)`` -> ``(B, heads, S, size)``."""
    if not count:
        raise ValueError("inputs of rank 3 come with their numbers of heads")
    return b.transpose(b.reshape(x, b.dim(x, 0), b.dim(x, 1), count, b.quotient(b.dim(x, 2), count)), (0, 2, 1, 3))


def _joined(b: Builder, past: Value, x: Value) -> Value:
    sizes = (past.shape or (None,) * 4)[2], (x.shape or (None,) * 4)[2]
    total = None if None in sizes else sum(s for s in sizes if s is not None)
    known = x.shape or (None,) * 4
    return b.op("Concat", past, x, axis=2, shape=(*known[:2], total, known[3]))


def _factor(b: Builder, node: Node, q: Value) -> Value:
    """The factor for queries and for keys: the square root of the scale."""
    scale, size = node.attribute("scale"), b.dim(q, 3)
    if scale is not None:
        return b.like(math.sqrt(scale), q)
    if isinstance(size, int):
        return b.like(math.sqrt(1 / math.sqrt(size)), q)
    root = b.op("Sqrt", b.op("Sqrt", b.cast(size, TensorProto.FLOAT)))
    return b.cast(b.op("Reciprocal", root), q.dtype)


def _bias(b: Builder, node: Node, q: Value, k: Value, past: Dim) -> tuple[list[Value], Value | None]:
    """The bias that masks add to the scores, and the rows that are fully masked; None if there can be none."""
    zero, lowest = b.like(0, q), b.like(-math.inf, q)
    parts: list[Value] = []
    if node.given(3) is not None:
        mask = _filled(b, _computed(b, node, 3), b.dim(k, 2))
        if mask.dtype == _BOOL:
            mask = b.op("Where", mask, zero, lowest)
        parts.append(mask)
    if node.attribute("is_causal") == 1:
        allowed = keep(b, b.dim(q, 2), b.dim(k, 2), past, upper=False)
        if allowed.name in b.constants:
            known = np.where(numpy_helper.to_array(b.constants[allowed.name]), 0.0, -math.inf)
            parts.append(b.constant(known, q.dtype))
        else:
            parts.append(b.op("Where", allowed, zero, lowest))
    if node.given(3) is None:
        return parts, None  # every query attends to the first key at least
    total = parts[0] if len(parts) == 1 else b.op("Add", *parts)
    most = b.reduce("ReduceMax", total, [total.rank - 1], keepdims=True)
    return [total], b.op("Less", most, b.like(_LOWEST[q.dtype], q))


_LOWEST: dict[int | None, float] = {
    TensorProto.FLOAT: float(np.finfo(np.float32).min),
    TensorProto.FLOAT16: -65504.0,
    TensorProto.DOUBLE: float(np.finfo(np.float64).min),
}
"""The lowest finite number of each type; a score below it is minus infinity."""


# ------------------------------------------------------------------ rotary embeddings


@down("RotaryEmbedding", 23)
def rotary_embedding(b: Builder, node: Node) -> Value:
    given = node.tensor()
    cos, sin = (node.typed(i) for i in (1, 2))
    x = given
    if given.rank == 3:
        count = node.attribute("num_heads")
        if not count:
            node.refuse("its input of rank 3 comes without a number of heads")
        x = b.reshape(x, b.dim(x, 0), b.dim(x, 1), count, b.quotient(b.dim(x, 2), count))
    else:
        x = b.transpose(x, (0, 2, 1, 3))  # (B, S, heads, size)
    size = b.dim(x, 3)
    part = node.attribute("rotary_embedding_dim") or size
    if not isinstance(part, int):
        node.refuse("the size of its heads is not static")
    half = part // 2
    if (ids := node.given(3)) is not None:
        cos, sin = (b.op("Gather", cache, ids, axis=0) for cache in (cos, sin))
    cos, sin = (b.unsqueeze(replace(cache, shape=(None, None, half)), 2) for cache in (cos, sin))
    rotated, rest = (x, None) if part == size else (b.slice(x, 3, 0, part), b.slice(x, 3, part, 2**31 - 1))
    if node.attribute("interleaved"):
        dims = [b.dim(x, i) for i in range(3)]
        pairs = b.reshape(rotated, *dims, half, 2)
        first, second = (b.squeeze(one, 4) for one in b.split(pairs, 4, [1, 1]))
    else:
        first, second = b.split(rotated, 3, [half, half])

    def product(x: Value, y: Value) -> Value:
        return b.op("Mul", x, y)

    real = b.op("Sub", product(first, cos), product(second, sin))
    imaginary = b.op("Add", product(first, sin), product(second, cos))
    if node.attribute("interleaved"):
        y = b.op("Concat", b.unsqueeze(real, 4), b.unsqueeze(imaginary, 4), axis=4, shape=(None,) * 5)
        y = b.reshape(y, *dims, part)
        parts = [y]
    else:
        parts = [real, imaginary]
    y = b.concat([*parts, *([] if rest is None else [rest])], 3)
    y = replace(y, dtype=given.dtype, shape=x.shape)
    if given.rank == 3:
        return b.reshape(y, *(b.dim(given, i) for i in range(3)))
    return b.transpose(y, (0, 2, 1, 3))


@down("TensorScatter", 24)
def tensor_scatter(b: Builder, node: Node) -> Value:
    """ScatterElements, at the places after each batch's own."""
    cache, update = node.tensor(), node.tensor(1)
    axis = node.attribute("axis") % cache.rank
    index = b.reshape(b.arange(b.dim(update, axis)), *(-1 if i == axis else 1 for i in range(cache.rank)))
    if (starts := node.given(2)) is not None:
        starts = replace(starts, dtype=_INT64, shape=(None,))
        index = b.op("Add", index, b.unsqueeze(starts, *range(1, cache.rank)))
    if node.attribute("mode") == "circular":
        index = b.op("Mod", index, b.shape(b.dim(cache, axis)))
    index = b.expand(index, *b.dims(update))
    return b.op("ScatterElements", cache, index, update, axis=axis, shape=cache.shape)
