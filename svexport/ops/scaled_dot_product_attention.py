"""Scaled dot-product attention, as matrix products and a softmax at every opset."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from svexport.ops._op import Op

__all__ = ["scaled_dot_product_attention"]


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: Sequence[float],
    enable_gqa: bool,
) -> Tensor:
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query * (scale[0] if scale else 1 / math.sqrt(query.shape[-1])) @ key.mT
    if is_causal:
        if attn_mask is not None:
            raise RuntimeError("scaled_dot_product_attention: is_causal needs attn_mask to be None")
        attn_mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    nothing = (scores == -torch.inf).all(-1, keepdim=True)  # no key to attend to: the output is 0, not NaN
    weights = torch.where(nothing, 0, torch.where(nothing, 0, scores).softmax(-1))
    return (weights @ value).contiguous()


def implementation(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: Sequence[float],
    enable_gqa: bool,
) -> Tensor:
    return scaled_dot_product_attention(
        query, key, value, attn_mask, 0.0, is_causal, scale=scale[0] if scale else None, enable_gqa=enable_gqa
    ).contiguous()


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    q, k, v = make(2, 4, 3, 5), make(2, 4, 7, 5), make(2, 4, 7, 6)
    yield q, k, v, None, False, (), False
    yield q, k, v, None, True, (0.3,), False
    yield q, k, v, make(3, 7), False, (), False
    mask = make(2, 1, 3, 7) > 0
    mask[0, 0, 1] = False  # nothing to attend to
    yield q, k, v, mask, False, (), False
    mask = make(2, 4, 1, 7)
    mask[1, 2] = -torch.inf
    yield q, k, v, mask, False, (), False
    yield q, make(2, 2, 7, 5), make(2, 2, 7, 5), make(2, 4, 3, 7) > -1, False, (1.0,), True
    yield make(3, 5), make(1, 5), make(1, 2), None, False, (), False
    yield make(2, 0, 5), make(2, 4, 5), make(2, 4, 3), None, False, (), False
    yield make(2, 3, 5), make(2, 0, 5), make(2, 0, 3), None, False, (), False


OP = Op(
    name="scaled_dot_product_attention",
    schema=(
        "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, float[] scale, bool enable_gqa)"
        " -> Tensor"
    ),
    reference=reference,
    samples=samples,
    implementation=implementation,
    plugin=False,
    inline=True,
)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention``: ``softmax(query @ key.mT * scale + attn_mask) @ value``.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html

    Shape:
        - query: ``(N, ..., Hq, L, E)``
        - key: ``(N, ..., H, S, E)``
        - value: ``(N, ..., H, S, Ev)``; with ``enable_gqa`` Hq is a multiple of H, otherwise they are equal
        - attn_mask: broadcasts to ``(N, ..., Hq, L, S)``; boolean (True takes part) or added to the scores
        - output: ``(N, ..., Hq, L, Ev)``, 0 where the mask leaves nothing to attend to

    ``dropout_p`` must be 0 in a model to be exported. ``scale`` is ``1 / sqrt(E)`` by default.
    """
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
