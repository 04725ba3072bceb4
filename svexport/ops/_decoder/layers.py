"""The layers of a decoder as functions of tensors, and the algebraic rewrites in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from svexport.ops._decoder.config import EPS, weight_names
from svexport.ops.dequantize import dequantize
from svexport.ops.from_chw32 import from_chw32
from svexport.ops.scaled_dot_product_attention import OP as ATTENTION

__all__ = ["Steps", "attend_exactly", "boxes_of", "decode", "fold_image_size", "inverse_sigmoid", "update"]


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)  # tracers record even a cast that changes nothing


# ------------------------------------------------------------------ rewrites


def fold_image_size(lidar2img: Tensor, image_size: Sequence[int]) -> Tensor:
    """Rescales ``lidar2img`` to images of size (1, 1): it projects to u and v in image sizes, without a division.

    Shape:
        - lidar2img: ``(..., 4, 4)``; the result is float32 at least
    """
    height, width = image_size
    matrix = _cast(lidar2img, torch.promote_types(lidar2img.dtype, torch.float32))
    return torch.cat((matrix[..., :1, :] / width, matrix[..., 1:2, :] / height, matrix[..., 2:, :]), dim=-2)


def inverse_sigmoid(x: Tensor) -> Tensor:
    """``log(x / (1 - x))`` of x in [0, 1], both sides of the fraction at least :data:`EPS`."""
    x = x.clamp(0, 1)
    return torch.log(x.clamp(min=EPS) / (1 - x).clamp(min=EPS))


def update(logits: Tensor, product: Tensor, bias: Tensor) -> Tensor:
    """Moves points by the box branch's centre offsets. The branch's last bias is added while gathering the offsets.

    Shape:
        - logits: ``(B, Q, 3)``, the :func:`inverse_sigmoid` of the points
        - product: ``(B, Q, code_size)``, the branch's last Linear without its ``bias`` (code_size,)
    """
    product = _cast(product, logits.dtype)
    offset = torch.cat([product[..., a:b] + bias[a:b] for a, b in ((0, 2), (4, 5))], dim=-1)
    return torch.sigmoid(offset + logits)


def boxes_of(points: Tensor, product: Tensor, bias: Tensor, pc_range: Sequence[float]) -> Tensor:
    """The box code with its centre in metres. The bias is added while concatenating the parts.

    Shape:
        - points: ``(B, Q, 3)``, moved already
        - product, bias: as for :func:`update`
        - output: ``(B, Q, code_size)``: cx, cy, w, l, cz, h, ...
    """
    x, y, z = (points[..., i : i + 1] * (pc_range[i + 3] - pc_range[i]) + pc_range[i] for i in range(3))
    product = _cast(product, points.dtype)
    return torch.cat((x, y, product[..., 2:4] + bias[2:4], z, product[..., 5:] + bias[5:]), dim=-1)


# ------------------------------------------------------------------ reference


class Steps(NamedTuple):
    """The steps of the decoder besides linear layers, as references, as torch's kernels or as separate nodes."""

    attend: Callable[..., Tensor]
    sample: Callable[..., Tensor]
    add_norm: Callable[..., tuple[Tensor, Tensor]]
    dropout: float = 0.0
    every_layer: bool = False  # whether every layer outputs classes and boxes, not the last alone
    joined: bool = False  # whether the gradient of a layer's points flows to the layer that moved them there


class _Layers:
    """The steps of a decoder's layers, with its parameters by name.

    Attributes:
        sizes: batch size and number of queries.
        channels, cams, counts: taken from parameters, whose sizes are static for a tracer; sizes of inputs would be
            computed in the file if any of them is dynamic. ``counts`` are points, levels and groups.
    """

    def __init__(
        self, steps: Steps, parameters: Mapping[str, Tensor], sizes: Sequence[int], num_heads: int, counts: Any
    ) -> None:
        self.steps, self.parameters, self.sizes, self.num_heads = steps, parameters, sizes, num_heads
        self.channels, self.counts = parameters["cls.0.bias"].shape[0], counts
        self.cams = parameters["layers.0.svca.attention_weights.bias"].shape[0] // math.prod(counts)

    def linear(self, name: str, x: Tensor, bias: bool = True) -> Tensor:
        return F.linear(x, self.parameters[f"{name}.weight"], self.parameters[f"{name}.bias"] if bias else None)

    def norm_relu(self, name: str, x: Tensor) -> Tensor:
        affine = self.parameters[f"{name}.weight"], self.parameters[f"{name}.bias"]
        return F.layer_norm(x, (self.channels,), *affine, EPS).relu()

    def branch(self, name: str, x: Tensor) -> Tensor:
        """Linear, norm and ReLU, twice."""
        for linear, norm in ((0, 1), (3, 4)):
            x = self.norm_relu(f"{name}.{norm}", self.linear(f"{name}.{linear}", x))
        return x

    def add_norm(self, last: str, norm: str, x: Tensor, residual: Tensor, extra: Tensor | None = None) -> Tensor:
        """The norm of ``last(x) + residual + extra``; the bias of the linear layer ``last`` is added in this sum."""
        product, bias = self.linear(last, x, bias=False), self.parameters[f"{last}.bias"]
        if self.steps.dropout:
            product, bias = F.dropout(product + bias, self.steps.dropout), torch.zeros_like(bias)
        affine = self.parameters[f"{norm}.weight"], self.parameters[f"{norm}.bias"]
        return self.steps.add_norm(product, bias, residual, *affine, EPS, extra)[0]

    def attended(self, layer: str, query: Tensor, query_pos: Tensor, extra: Tensor | None) -> Tensor:
        """The queries after self attention."""
        channels = self.channels

        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (self.num_heads, channels // self.num_heads)).transpose(1, 2)  # (B, H, Q, C/H)

        where = query + query_pos
        weight, bias = (self.parameters[f"{layer}.mha.in_proj_{p}"] for p in ("weight", "bias"))
        qk = F.linear(where, weight[: 2 * channels], bias[: 2 * channels])
        v = F.linear(query, weight[2 * channels :], bias[2 * channels :])
        mixed = self.steps.attend(heads(qk[..., :channels]), heads(qk[..., channels:]), heads(v))
        mixed = mixed.transpose(1, 2).reshape(*self.sizes, channels)
        return self.add_norm(f"{layer}.mha.out_proj", f"{layer}.mha_norm", mixed, query, extra)

    def seen(
        self,
        layer: str,
        query: Tensor,
        query_pos: Tensor,
        points: Tensor,
        logits: Tensor,
        sample: Callable[[Tensor, Tensor, Tensor], Tensor],
        learned_offsets: bool,
    ) -> Tensor:
        """The queries after camera attention, which calls ``sample`` with points, scores and offsets."""
        svca = f"{layer}.svca"
        where = query + query_pos
        scores = self.linear(f"{svca}.attention_weights", where).unflatten(-1, (self.cams, *self.counts))
        if learned_offsets:
            offsets = self.linear(f"{svca}.sampling_offsets", where).unflatten(-1, (self.counts[0], 3))
        else:
            offsets = points.new_zeros(1, 1, 1, 3)
        sampled = _cast(sample(points, scores, offsets), query.dtype)
        position = self.branch(f"{svca}.position_encoder", _cast(logits, query.dtype))
        return self.add_norm(f"{svca}.output_proj", f"{layer}.svca_norm", sampled, query, position)

    def fed_forward(self, layer: str, query: Tensor) -> Tensor:
        dropout = self.steps.dropout
        hidden = F.dropout(self.linear(f"{layer}.ffn.0", query).relu(), dropout, training=dropout > 0)
        return self.add_norm(f"{layer}.ffn.2", f"{layer}.ffn_norm", hidden, query)

    def box(self, layer: str, query: Tensor) -> tuple[Tensor, Tensor]:
        """The box branch's last product, and its bias."""
        hidden = self.linear(f"{layer}.reg.2", self.linear(f"{layer}.reg.0", query).relu()).relu()
        return self.linear(f"{layer}.reg.4", hidden, bias=False), self.parameters[f"{layer}.reg.4.bias"]


def decode(
    steps: Steps,
    query: Tensor,
    query_pos: Tensor,
    reference_points: Tensor,
    features: Sequence[Tensor],
    lidar2img: Tensor,
    weights: Sequence[Tensor],
    num_layers: int,
    num_heads: int,
    num_points: int,
    num_groups: int,
    image_size: Sequence[int],
    pc_range: Sequence[float],
    depth_eps: float,
    in_image: bool,
    uv_clamp: Sequence[float],
    activation: int,
    learned_offsets: bool,
    residual_query_pos: bool,
    pool: bool,
    scales: Sequence[float],
) -> list[tuple[Tensor, Tensor, Tensor]]:
    names = weight_names({"num_layers": num_layers, "learned_offsets": learned_offsets})
    parameters = dict(zip(names, weights, strict=True))
    levels, scales = _levels(features, query.dtype, parameters["cls.0.bias"].shape[0], pool, scales)
    layers = _Layers(steps, parameters, query.shape[:2], num_heads, (num_points, len(levels), num_groups))
    lidar2img = fold_image_size(lidar2img, image_size)
    points = _cast(reference_points, torch.promote_types(reference_points.dtype, torch.float32))

    def sample(points: Tensor, scores: Tensor, offsets: Tensor) -> Tensor:
        view = (1, 1), pc_range, depth_eps, in_image, uv_clamp, activation, scales
        return steps.sample(levels, points, lidar2img, scores, offsets, *view)

    outputs: list[tuple[Tensor, Tensor, Tensor]] = []
    for i in range(num_layers):
        layer = f"layers.{i}"
        if i and not steps.joined:  # as in DETR3D: no gradient flows to the layer that moved the points
            points = points.detach()
        query = layers.attended(layer, query, query_pos, query_pos if residual_query_pos else None)
        logits = inverse_sigmoid(points)
        query = layers.seen(layer, query, query_pos, points, logits, sample, learned_offsets)
        query = layers.fed_forward(layer, query)
        product, bias = layers.box(layer, query)
        points = update(logits, product, bias)
        if steps.every_layer or i == num_layers - 1:
            classes = layers.linear("cls.6", layers.branch("cls", query))
            boxes = _cast(boxes_of(points, product, bias, pc_range), reference_points.dtype)
            outputs.append((classes, boxes, _cast(points, reference_points.dtype)))
    return outputs


def _levels(
    features: Sequence[Tensor], dtype: torch.dtype, channels: int, pool: bool, scales: Sequence[float]
) -> tuple[list[Tensor], list[float]]:
    """The levels ``(B, cams, C, H, W)`` and the pooled one, each with its scale.

    Levels whose dtype differs from the queries' are converted to float32 at least, so that samples are rounded once.
    int8 levels are read directly, unless they are in CHW32 or are pooled.
    """
    levels, steps = [], []
    for i, (feature, scale) in enumerate(zip(features, scales, strict=True)):
        precise = torch.promote_types(dtype, torch.float32)
        if feature.dtype == torch.int8:
            if feature.dim() == 6:
                feature = from_chw32(feature.flatten(0, 1), channels).unflatten(0, feature.shape[:2])
            if pool and i == len(features) - 1:
                feature = dequantize(feature, scale, precise)
        elif feature.dtype != dtype:
            feature = _cast(feature, torch.promote_types(feature.dtype, precise))
        levels.append(feature)
        steps.append(scale if feature.dtype == torch.int8 else 1.0)
    if pool:
        last = levels[-1]
        levels.append(F.max_pool2d(last.flatten(0, 1), 2).unflatten(0, last.shape[:2]))
        steps.append(1.0)
    return levels, steps


def attend_exactly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ATTENTION.reference(q, k, v, None, False, (), False)
