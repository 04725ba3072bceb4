"""Attention and rotary embeddings at lower opsets."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.graph.opsets.nodes import check, node_model


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


MASKS = ["none", "causal", "float", "boolean"]


@pytest.mark.parametrize("target", [22, 17, 11, 9])
@pytest.mark.parametrize(("mask", "heads", "dynamic"), [*itertools.product(MASKS, [2, 4], [False, True])])
def test_attention(mask: str, heads: int, dynamic: bool, target: int) -> None:
    q, k, v = draw(2, 4, 5, 8), draw(2, heads, 5, 8), draw(2, heads, 5, 6)
    inputs = [q, k, v]
    if mask == "float":
        inputs.append(draw(5, 5))
    if mask == "boolean":
        inputs.append(np.arange(50).reshape(2, 1, 5, 5) % 7 > 1)
        inputs[-1][0, 0, 2] = False  # nothing to attend to
    t = [torch.from_numpy(x) for x in inputs]
    given = t[3] if len(t) == 4 else None
    wanted = F.scaled_dot_product_attention(
        *t[:3], given, is_causal=mask == "causal", enable_gqa=heads == 2
    ).nan_to_num()
    model = node_model("Attention", 23, inputs, is_causal=int(mask == "causal"), dynamic=dynamic)
    check(model, inputs, target, [wanted.numpy()])


@pytest.mark.parametrize("target", [22, 11])
def test_cache(target: int) -> None:
    q, k, v = draw(2, 3, 2 * 8), draw(2, 3, 2 * 8), draw(2, 3, 2 * 6)
    past_k, past_v = draw(2, 2, 4, 8), draw(2, 2, 4, 6)
    inputs = [q, k, v, None, past_k, past_v]

    def heads(x: np.ndarray) -> np.ndarray:
        return x.reshape(2, 3, 2, -1).transpose(0, 2, 1, 3)

    present_k, present_v = np.concatenate([past_k, heads(k)], 2), np.concatenate([past_v, heads(v)], 2)
    mask = torch.tril(torch.ones(3, 7, dtype=torch.bool), 4)
    t = [torch.from_numpy(x) for x in (heads(q), present_k, present_v)]
    y = F.scaled_dot_product_attention(*t, mask).transpose(1, 2).flatten(2).numpy()
    model = node_model("Attention", 23, inputs, outputs=3, is_causal=1, q_num_heads=2, kv_num_heads=2)
    check(model, inputs, target, [y, present_k, present_v])


@pytest.mark.parametrize("causal", [0, 1])
def test_valid_keys(causal: int) -> None:
    q, k, v = draw(2, 2, 3, 8), draw(2, 2, 6, 8), draw(2, 2, 6, 8)
    count = np.array([5, 3])
    allowed = np.arange(6) < count[:, None, None, None]
    if causal:
        allowed = allowed & (np.arange(6) <= np.arange(3)[:, None] + count[:, None, None, None] - 3)
    t = [torch.from_numpy(x) for x in (q, k, v, allowed)]
    inputs = [q, k, v, None, None, None, count]
    model = node_model("Attention", 24, inputs, is_causal=causal)
    check(model, inputs, 13, [F.scaled_dot_product_attention(*t).numpy()])


@pytest.mark.parametrize("target", [22, 11, 9])
@pytest.mark.parametrize("part", [0, 4])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("flat", [False, True])
def test_rotary_embedding(flat: bool, interleaved: int, part: int, target: int) -> None:
    x = draw(2, 3, 5, 8)  # (B, heads, S, size)
    half = (part or 8) // 2
    angle = draw(2, 5, half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    turned, rest = np.split(x, [part or 8], -1)
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else np.split(turned, 2, -1)
    both = [first * cos - second * sin, first * sin + second * cos]
    turned = np.stack(both, -1).reshape(turned.shape) if interleaved else np.concatenate(both, -1)
    wanted = np.concatenate([turned, rest], -1)
    inputs = [x, np.cos(angle), np.sin(angle)]
    if flat:
        inputs[0], wanted = (v.transpose(0, 2, 1, 3).reshape(2, 5, 24) for v in (x, wanted))
    model = node_model(
        "RotaryEmbedding", 23, inputs, interleaved=interleaved, rotary_embedding_dim=part, num_heads=3 if flat else 0
    )
    check(model, inputs, target, [wanted])


@pytest.mark.parametrize(("mode", "starts"), [("linear", None), ("linear", [1, 3]), ("circular", [4, 3])])
def test_writes_of_a_cache(mode: str, starts: list[int] | None) -> None:
    cache, update = draw(2, 3, 5, 4), draw(2, 3, 2, 4)
    wanted = cache.copy()
    for batch, step in itertools.product(range(2), range(2)):
        wanted[batch, :, ((starts or [0, 0])[batch] + step) % 5] = update[batch, :, step]
    inputs = [cache, update, None if starts is None else np.array(starts)]
    check(node_model("TensorScatter", 24, inputs, mode=mode), inputs, 11, [wanted])
