"""The decoder of multi-camera detectors: object queries that look at one another and into every camera."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from svexport.ops._op import Op, autocast
from svexport.ops.add_bias_residual_layer_norm import OP as ADD_NORM
from svexport.ops.camera_sample import ACTIVATIONS
from svexport.ops.camera_sample import OP as CAMERA_SAMPLE
from svexport.ops.camera_sample import implementation as sample
from svexport.ops.dequantize import dequantize
from svexport.ops.from_chw32 import from_chw32
from svexport.ops.scaled_dot_product_attention import OP as ATTENTION
from svexport.ops.sigmoid_gt import sigmoid_gt
from svexport.ops.to_chw32 import to_chw32

__all__ = ["EPS", "DecoderOutput", "TransformerDecoder", "TransformerDecoderConfig", "transformer_decoder"]

EPS = 1e-5
"""Of every layer norm, and of the inverse sigmoid."""

FUSE = ("block", "nodes")

MODULES = (
    *("mha.in_proj", "mha.out_proj", "mha_norm", "svca.attention_weights", "svca.output_proj"),
    *(f"svca.position_encoder.{i}" for i in (0, 1, 3, 4)),
    *("svca_norm", "ffn.0", "ffn.2", "ffn_norm", "reg.0", "reg.2", "reg.4"),
)
OFFSETS = ("svca.sampling_offsets",)
CLS = tuple(f"cls.{i}" for i in (0, 1, 3, 4, 6))
"""What has a weight and a bias, in the order of the op's ``weights``: in every layer, there with learned offsets too,
and once after the layers."""


def _parameters(modules: Sequence[str]) -> list[str]:
    return [f"{m}{'_' if m.endswith('in_proj') else '.'}{p}" for m in modules for p in ("weight", "bias")]


def weight_names(attributes: Mapping[str, Any]) -> list[str]:
    """Of the op's ``weights``, as in the module's state_dict.

    Raises:
        ValueError: if there would be more layers than any model has: a file may ask for billions.
    """
    if not 1 <= attributes["num_layers"] <= 1000:
        raise ValueError(f"expects num_layers of 1 to 1000, got {attributes['num_layers']}")
    layer = _parameters((*MODULES, *OFFSETS) if attributes["learned_offsets"] else MODULES)
    names = [f"layers.{i}.{name}" for i in range(attributes["num_layers"]) for name in layer]
    return names + _parameters(CLS)


def weight_shapes(config: TransformerDecoderConfig) -> dict[str, tuple[int, ...]]:
    """Of the op's ``weights`` by name, in their order."""
    channels, ffn = config.embed_dims, config.ffn_dims
    scores = config.num_cams * config.num_points * config.num_levels * config.num_groups
    matrices = {
        "mha.in_proj": (3 * channels, channels),
        "svca.attention_weights": (scores, channels),
        "svca.sampling_offsets": (3 * config.num_points, channels),
        "svca.position_encoder.0": (channels, 3),
        "ffn.0": (ffn, channels),
        "ffn.2": (channels, ffn),
        "reg.4": (config.code_size, channels),
        "cls.6": (config.num_classes, channels),
    }
    norms = {
        "mha_norm",
        "svca_norm",
        "ffn_norm",
        *(f"{m}.{i}" for m in ("svca.position_encoder", "cls") for i in (1, 4)),
    }
    shapes = {}
    for name in weight_names(vars(config)):
        module = re.sub(r"^layers\.\d+\.|[._](weight|bias)$", "", name)
        shape: tuple[int, ...] = matrices.get(module, (channels, channels))
        shapes[name] = shape if name.endswith("weight") and module not in norms else shape[:1]
    return shapes


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)  # which tracers would record all the same


# ------------------------------------------------------------------ rewrites


def fold_image_size(lidar2img: Tensor, image_size: Sequence[int]) -> Tensor:
    """``lidar2img`` for images of size (1, 1): projects to u and v in image sizes, with no division by them left.

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
    """Moves points by the centre offsets of the box branch, whose last bias is added in the copy that gathers them.

    Shape:
        - logits: ``(B, Q, 3)``, the :func:`inverse_sigmoid` of the points
        - product: ``(B, Q, code_size)``, of the branch's last Linear without its ``bias`` (code_size,)
    """
    product = _cast(product, logits.dtype)
    offset = torch.cat([product[..., a:b] + bias[a:b] for a, b in ((0, 2), (4, 5))], dim=-1)
    return torch.sigmoid(offset + logits)


def boxes_of(points: Tensor, product: Tensor, bias: Tensor, pc_range: Sequence[float]) -> Tensor:
    """The box code with its centre in metres, the bias added in the concat that makes it.

    Shape:
        - points: ``(B, Q, 3)``, moved already
        - product, bias: as of :func:`update`
        - output: ``(B, Q, code_size)``: cx, cy, w, l, cz, h, ...
    """
    x, y, z = (points[..., i : i + 1] * (pc_range[i + 3] - pc_range[i]) + pc_range[i] for i in range(3))
    product = _cast(product, points.dtype)
    return torch.cat((x, y, product[..., 2:4] + bias[2:4], z, product[..., 5:] + bias[5:]), dim=-1)


# ------------------------------------------------------------------ reference


class _Steps(NamedTuple):
    """What the decoder does besides linear layers: by references, by torch's kernels, or by nodes of their own."""

    attend: Callable[..., Tensor]
    sample: Callable[..., Tensor]
    add_norm: Callable[..., tuple[Tensor, Tensor]]
    dropout: float = 0.0
    every_layer: bool = False  # is asked for classes and boxes, not the last alone
    joined: bool = False  # whether what a layer does with its points teaches the layer that put them there


class _Layers:
    """The layers of a decoder, one step after the other, with its parameters by name.

    Attributes:
        sizes: numbers of batches and queries.
        channels, cams, counts: sizes of parameters, which tracers know: those of inputs they compute in the file if
            any of them is dynamic. ``counts`` are points, levels and groups.
    """

    def __init__(
        self, steps: _Steps, parameters: Mapping[str, Tensor], sizes: Sequence[int], num_heads: int, counts: Any
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
        """The norm of ``last(x) + residual + extra``, ``last`` a linear layer whose bias is left to this sum."""
        product, bias = self.linear(last, x, bias=False), self.parameters[f"{last}.bias"]
        if self.steps.dropout:
            product, bias = F.dropout(product + bias, self.steps.dropout), torch.zeros_like(bias)
        affine = self.parameters[f"{norm}.weight"], self.parameters[f"{norm}.bias"]
        return self.steps.add_norm(product, bias, residual, *affine, EPS, extra)[0]

    def attended(self, layer: str, query: Tensor, query_pos: Tensor, extra: Tensor | None) -> Tensor:
        """The queries after attention among themselves."""
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
        """The queries after attention to the cameras: ``sample`` of points, scores and offsets."""
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
        """The last product of the branch of boxes, and its bias."""
        hidden = self.linear(f"{layer}.reg.2", self.linear(f"{layer}.reg.0", query).relu()).relu()
        return self.linear(f"{layer}.reg.4", hidden, bias=False), self.parameters[f"{layer}.reg.4.bias"]


def _decode(
    steps: _Steps,
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
        if i and not steps.joined:  # as in DETR3D: a layer does not teach the one that put its points there
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

    Those of another type than the queries are in float32 at least, so that what is sampled is rounded once; int8 is
    read as it is, but from CHW32 or to pool.
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


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ATTENTION.reference(q, k, v, None, False, (), False)


_REFERENCE = _Steps(_attend, CAMERA_SAMPLE.reference, ADD_NORM.reference)
_IMPLEMENTATION = _Steps(F.scaled_dot_product_attention, sample, ADD_NORM.reference)


def reference(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _decode(_REFERENCE, *args)[-1]


def differentiable(joined: bool, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The reference, with or without the gradients of points between layers."""
    return _decode(_REFERENCE._replace(joined=joined), *args)[-1]


def implementation(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _decode(_IMPLEMENTATION, *args)[-1]


def fake(
    query: Tensor,
    query_pos: Tensor,
    reference_points: Tensor,
    features: Sequence[Tensor],
    lidar2img: Tensor,
    weights: Sequence[Tensor],
    *values: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    names = weight_names(dict(zip((a.name for a in OP.attributes), values, strict=True)))
    batch, queries = query.shape[:2]
    code_size = weights[names.index("layers.0.reg.4.bias")].shape[0]
    boxes, points = (reference_points.new_empty(batch, queries, size) for size in (code_size, 3))
    return query.new_empty(batch, queries, weights[-1].shape[0]), boxes, points


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    # One layer: the points of the next take no part in the gradient, which finite differences would notice.
    config = TransformerDecoderConfig(
        num_layers=1,
        embed_dims=4,
        num_heads=2,
        ffn_dims=3,
        num_classes=2,
        code_size=6,
        num_cams=2,
        image_size=(32, 48),
        pc_range=(-2, -2, -1, 2, 2, 1),
        num_queries=5,
        feature_sizes=((4, 5),),
    )
    variants: list[tuple[int, dict[str, Any]]] = [
        (2, {"residual_query_pos": True, "pool": True, "scales": (0.03,)}),
        (1, {"num_points": 2, "num_groups": 2, "activation": "softmax", "learned_offsets": True, "uv_clamp": (-1, 2)}),
    ]
    for batch, overrides in variants:
        variant = replace(config, **overrides)
        with torch.device("meta"):
            shapes = [p.shape for p in TransformerDecoder(variant).weights()]
        features = [make(batch, 2, 4, *size) for size in variant.feature_sizes]
        if variant.scales:
            features = [to_chw32((f * 40).flatten(0, 1)).clamp(-127, 127).to(torch.int8) for f in features]
            features = [f.unflatten(0, (batch, 2)) for f in features]
        queries = variant.num_queries
        yield (
            make(batch, queries, 4),
            make(batch, queries, 4),
            make(batch, queries, 3).sigmoid(),
            features,
            rig(variant).to(make(0)) + make(batch, 2, 4, 4) * 0.05,
            [make(*shape) / 2 for shape in shapes],
            *variant.attributes(),
        )


OP = Op(
    name="transformer_decoder",
    schema="(Tensor query, Tensor query_pos, Tensor reference_points, Tensor[] features, Tensor lidar2img, "
    "Tensor[] weights, int num_layers, int num_heads, int num_points, int num_groups, int[] image_size, "
    "float[] pc_range, float depth_eps, bool in_image, float[] uv_clamp, int activation, bool learned_offsets, "
    "bool residual_query_pos, bool pool, float[] scales) -> (Tensor classes, Tensor boxes, Tensor points)",
    reference=reference,
    implementation=implementation,
    fake=fake,
    samples=samples,
    weight_names=weight_names,
)


# ------------------------------------------------------------------ interface


class DecoderOutput(NamedTuple):
    """What the last layer says of every query.

    Shape:
        - classes: ``(B, Q, num_classes)``, scores before the sigmoid
        - boxes: ``(B, Q, code_size)``: cx, cy, w, l, cz, h, sin, cos, vx, vy; the centre in metres
        - reference_points: ``(B, Q, 3)``, the centre in [0, 1] of the range
    """

    classes: Tensor
    boxes: Tensor
    reference_points: Tensor

    def above(self, score: float) -> Tensor:
        """Where the class scores are above ``score``, without a sigmoid: bool, the shape of ``classes``."""
        return sigmoid_gt(self.classes, score)


@dataclass(frozen=True)
class TransformerDecoderConfig:
    """All that a decoder is made of, besides its weights. The defaults are DETR3D's on nuScenes.

    Attributes:
        num_layers: each of self attention, camera attention, feed forward and box branch.
        embed_dims: channels C of queries and features.
        num_heads: of the self attention.
        ffn_dims: width of the feed forward.
        num_classes: scores of a query.
        code_size: numbers of a box; the first six are cx, cy, w, l, cz, h.
        num_cams: of the rig.
        num_points: a query samples at, each with a weight per camera and level.
        num_groups: of channels, each with weights of its own.
        image_size: (height, width) of the images, in the pixels of ``lidar2img``.
        pc_range: ``(x, y, z)`` minimum, then maximum, in metres.
        depth_eps: the least depth that counts, in metres.
        uv_clamp: bounds of the image coordinates, in image sizes: ``(-1, 2)``. Default: only what lies in the image
            counts.
        activation: of the weights, ``"sigmoid"``, or ``"softmax"`` over cameras, points and levels jointly.
        learned_offsets: points lie at offsets that a linear layer finds for each query, in metres; otherwise all of
            them are the reference point.
        residual_query_pos: the position embedding joins the residual of the self attention too, as some deployed
            decoders have it. DETR3D does not.
        pool: one more level, the 2x2 max-pool of the last.
        scales: of int8 levels, one per given level, any number for those that are not; default: 1.
        num_queries: of the example inputs; a decoder takes any.
        feature_sizes: (height, width) of each given level of the example inputs; a decoder takes any, of that many.

    Raises:
        ValueError: on values that are impossible or do not fit each other.
    """

    num_layers: int = 6
    embed_dims: int = 256
    num_heads: int = 8
    ffn_dims: int = 512
    num_classes: int = 10
    code_size: int = 10
    num_cams: int = 6
    num_points: int = 1
    num_groups: int = 1
    image_size: tuple[int, int] = (928, 1600)
    pc_range: tuple[float, ...] = (-51.2, -51.2, -5.0, 51.2, 51.2, 3.0)
    depth_eps: float = 1e-5
    uv_clamp: tuple[float, float] | None = None
    activation: str = "sigmoid"
    learned_offsets: bool = False
    residual_query_pos: bool = False
    pool: bool = False
    scales: tuple[float, ...] | None = None
    num_queries: int = 900
    feature_sizes: tuple[tuple[int, int], ...] = ((116, 200), (58, 100), (29, 50), (15, 25))

    def __post_init__(self) -> None:
        def expect(name: str, holds: bool, expected: str) -> None:
            if not holds:
                raise ValueError(f"TransformerDecoderConfig expects {name} {expected}, got {getattr(self, name)!r}")

        def numbers(value: Any, count: int) -> bool:
            return isinstance(value, Sequence) and len(value) == count and all(_finite(v) for v in value)

        def size(value: Any) -> bool:
            return numbers(value, 2) and all(isinstance(v, int) and v > 0 for v in value)

        counts = ("num_layers", "embed_dims", "num_heads", "ffn_dims", "num_classes", "num_cams", "num_points")
        for name in (*counts, "num_groups", "num_queries"):
            value = getattr(self, name)
            expect(name, type(value) is int and value > 0, "to be a positive integer")
        expect("code_size", type(self.code_size) is int and self.code_size >= 6, "of at least cx, cy, w, l, cz, h: 6")
        for name in ("num_heads", "num_groups"):
            expect(name, self.embed_dims % getattr(self, name) == 0, f"to divide embed_dims, {self.embed_dims}")
        expect("image_size", size(self.image_size), "(height, width) in pixels")
        expect("pc_range", numbers(self.pc_range, 6), "of 6 numbers: x, y, z minimum, then maximum, in metres")
        ordered = all(low < high for low, high in zip(self.pc_range[:3], self.pc_range[3:], strict=True))
        expect("pc_range", ordered, "with each minimum below its maximum")
        expect("depth_eps", _finite(self.depth_eps) and self.depth_eps > 0, "to be a positive depth in metres")
        clamped = self.uv_clamp is not None
        expect("uv_clamp", not clamped or numbers(self.uv_clamp, 2), "None, or (low, high) in image sizes")
        expect("uv_clamp", not clamped or self.uv_clamp[0] < self.uv_clamp[1], "with low below high")  # type: ignore[index]
        expect("activation", self.activation in ACTIVATIONS, " or ".join(map(repr, ACTIVATIONS)))
        for name in ("learned_offsets", "residual_query_pos", "pool"):
            expect(name, isinstance(getattr(self, name), bool), "to be True or False")
        levels = self.feature_sizes
        sizes = isinstance(levels, Sequence) and len(levels) > 0 and all(map(size, levels))
        expect("feature_sizes", sizes, "of (height, width), one for each given level")
        expect("feature_sizes", not self.pool or min(levels[-1]) > 1, "to end in a level that can be pooled: 2 by 2")
        positive = self.scales is None or (numbers(self.scales, len(levels)) and min(self.scales) > 0)
        expect("scales", positive, f"None, or one positive number for each of the {len(levels)} given levels")
        object.__setattr__(self, "_weight_shapes", weight_shapes(self))  # which every call compares

    @classmethod
    def preset(cls, name: str) -> TransformerDecoderConfig:
        """A reference configuration: ``"detr3d"``, ``"seed"`` (a deployed one) or ``"stream"`` (many points, softmax).

        Raises:
            ValueError: on another name.
        """
        if name not in PRESETS:
            raise ValueError(f"expected a preset, {', '.join(map(repr, PRESETS))}; got {name!r}")
        return cls(**PRESETS[name])

    @property
    def num_levels(self) -> int:
        """Levels sampled, the pooled one too."""
        return len(self.feature_sizes) + self.pool

    def attributes(self) -> tuple[Any, ...]:
        """The 14 values that the op takes and the node carries, in their order; shapes tell the others."""
        return (
            self.num_layers,
            self.num_heads,
            self.num_points,
            self.num_groups,
            list(self.image_size),
            [float(v) for v in self.pc_range],
            float(self.depth_eps),
            self.uv_clamp is None,
            [0.0, 1.0] if self.uv_clamp is None else [float(v) for v in self.uv_clamp],
            ACTIVATIONS.index(self.activation),
            self.learned_offsets,
            self.residual_query_pos,
            self.pool,
            [1.0] * len(self.feature_sizes) if self.scales is None else [float(v) for v in self.scales],
        )


PRESETS: dict[str, dict[str, Any]] = {
    "seed": {
        "num_layers": 4,
        "image_size": (288, 736),
        "residual_query_pos": True,
        "pool": True,
        "num_queries": 512,
        "feature_sizes": ((72, 184), (36, 92), (18, 46)),
    },
    "detr3d": {},
    "stream": {
        "ffn_dims": 2048,
        "num_points": 13,
        "num_groups": 8,
        "image_size": (320, 800),
        "depth_eps": 1e-2,
        "uv_clamp": (-1.0, 2.0),
        "activation": "softmax",
        "learned_offsets": True,
        "feature_sizes": ((40, 100), (20, 50), (10, 25), (5, 13)),
    },
}
"""What differs from the defaults, which are DETR3D's."""


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def rig(config: TransformerDecoderConfig) -> Tensor:
    """Cameras in the origin that look all around: x right, y down, z ahead; ``lidar2img (num_cams, 4, 4)``."""
    height, width = config.image_size
    half = math.radians(min(180 / config.num_cams + 5, 60))  # of the view, with some overlap
    angles = torch.arange(config.num_cams) * (2 * math.pi / config.num_cams)
    matrix = torch.zeros(config.num_cams, 4, 4)
    matrix[:, 0, 0], matrix[:, 0, 1] = angles.sin(), -angles.cos()
    matrix[:, 1, 2] = -1
    matrix[:, 2, 0], matrix[:, 2, 1] = angles.cos(), angles.sin()
    matrix[:, 3, 3] = 1
    intrinsics = torch.eye(4)
    intrinsics[0, 0] = intrinsics[1, 1] = width / 2 / math.tan(half)
    intrinsics[0, 2], intrinsics[1, 2] = width / 2, height / 2
    return intrinsics @ matrix


def transformer_decoder(
    query: Tensor,
    query_pos: Tensor,
    reference_points: Tensor,
    features: Sequence[Tensor],
    lidar2img: Tensor,
    weights: Sequence[Tensor],
    config: TransformerDecoderConfig,
) -> DecoderOutput:
    """The decoder of :class:`TransformerDecoder` as a function of its weights.

    Shape:
        - weights: those of :meth:`TransformerDecoder.weights`, in that order, the dtype of ``query``; under autocast
          these and the queries are converted to its dtype first, but for those in float64
        - everything else: as of :class:`TransformerDecoder`

    Raises:
        ValueError: on other shapes, or another number of weights.
        TypeError: on other dtypes.
    """
    args = _arguments(config, query, query_pos, reference_points, features, lidar2img, weights)
    return DecoderOutput(*OP(*args))


def _arguments(
    config: TransformerDecoderConfig,
    query: Tensor,
    query_pos: Tensor,
    reference_points: Tensor,
    features: Sequence[Tensor],
    lidar2img: Tensor,
    weights: Sequence[Tensor],
) -> tuple[Any, ...]:
    """Those of the op, checked."""
    query, query_pos, *weights = autocast((query, query_pos, *weights))

    def wrong(expected: str, *tensors: Tensor) -> ValueError:
        return ValueError(
            f"transformer_decoder expects {expected}; got {', '.join(str(tuple(t.shape)) for t in tensors)}"
        )

    channels, cams = config.embed_dims, config.num_cams
    if query.dim() != 3 or query.shape[2] != channels or query_pos.shape != query.shape:
        raise wrong(f"query and query_pos (B, Q, {channels})", query, query_pos)
    batch, queries, _ = query.shape
    if reference_points.shape != (batch, queries, 3) or lidar2img.shape != (batch, cams, 4, 4):
        expected = f"reference_points ({batch}, {queries}, 3) and lidar2img ({batch}, {cams}, 4, 4)"
        raise wrong(expected, reference_points, lidar2img)
    blocks = -(-channels // 32)
    shapes = {5: (batch, cams, channels), 6: (batch, cams, blocks)}
    fits = all(f.dim() in shapes and f.shape[:3] == shapes[f.dim()] and f.shape[5:] in ((), (32,)) for f in features)
    if not fits or len(features) != len(config.feature_sizes) or any(0 in f.shape[3:] for f in features):
        expected = f"{len(config.feature_sizes)} features, ({batch}, {cams}, {channels}, H, W) each, or int8 in CHW32, "
        raise wrong(f"{expected}({batch}, {cams}, {blocks}, H, W, 32)", *features)
    if config.pool and min(features[-1].shape[3:5]) < 2:
        raise wrong("a last level to pool of at least 2 by 2 pixels", features[-1])
    expected_shapes: dict[str, tuple[int, ...]] = config._weight_shapes  # type: ignore[attr-defined]
    if len(weights) != len(expected_shapes):
        count = len(expected_shapes)
        raise ValueError(f"transformer_decoder expects {count} weights for this config, got {len(weights)}")
    for (name, shape), weight in zip(expected_shapes.items(), weights, strict=True):
        if weight.shape != shape:
            raise wrong(f"{name} {shape} for this config", weight)
    dtype, *others = dict.fromkeys(t.dtype for t in (query, query_pos, *weights))
    if not dtype.is_floating_point or others:
        kinds = ", ".join(dict.fromkeys(str(t.dtype) for t in weights))
        raise TypeError(
            "transformer_decoder expects query, query_pos and weights of one floating-point dtype, got "
            f"{query.dtype}, {query_pos.dtype} and {kinds}; convert one or the other with .to()"
        )
    if not reference_points.is_floating_point():
        raise TypeError(f"transformer_decoder expects floating-point reference_points, got {reference_points.dtype}")
    for f in features:
        if f.dtype != torch.int8 and (f.dim() == 6 or not f.is_floating_point()):
            raise TypeError(
                "transformer_decoder expects features (B, cams, C, H, W) in floating point or int8, or int8 as made by "
                f"svexport.ops.to_chw32, (B, cams, ceil(C/32), H, W, 32); got {tuple(f.shape)} in {f.dtype}"
            )
    return query, query_pos, reference_points, list(features), lidar2img, weights, *config.attributes()


def _initialize(module: nn.Module) -> None:
    """As DETR3D does."""
    for p in module.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)


class _CameraAttention(nn.Module):
    """The parameters of an attention to the cameras."""

    def __init__(self, config: TransformerDecoderConfig) -> None:
        super().__init__()
        channels = config.embed_dims
        weights = config.num_cams * config.num_points * config.num_levels * config.num_groups
        self.attention_weights = nn.Linear(channels, weights)
        if config.learned_offsets:
            self.sampling_offsets = nn.Linear(channels, config.num_points * 3)
        self.output_proj = nn.Linear(channels, channels)
        encoder: list[nn.Module] = []
        for inputs in (3, channels):
            encoder += [nn.Linear(inputs, channels), nn.LayerNorm(channels, EPS), nn.ReLU()]
        self.position_encoder = nn.Sequential(*encoder)
        _initialize(self)
        nn.init.zeros_(self.attention_weights.weight)  # equal attention to all cameras
        nn.init.zeros_(self.attention_weights.bias)
        nn.init.zeros_(self.output_proj.bias)
        if config.learned_offsets:
            nn.init.zeros_(self.sampling_offsets.weight)
            nn.init.uniform_(self.sampling_offsets.bias, -1, 1)  # metres: points apart from the beginning


class _Layer(nn.Module):
    """The parameters of a layer."""

    def __init__(self, config: TransformerDecoderConfig) -> None:
        super().__init__()
        channels = config.embed_dims
        self.mha = nn.MultiheadAttention(channels, config.num_heads)
        self.mha_norm = nn.LayerNorm(channels, EPS)
        self.svca = _CameraAttention(config)
        self.svca_norm = nn.LayerNorm(channels, EPS)
        self.ffn = nn.Sequential(nn.Linear(channels, config.ffn_dims), nn.ReLU(), nn.Linear(config.ffn_dims, channels))
        _initialize(self.mha)
        _initialize(self.ffn)
        self.ffn_norm = nn.LayerNorm(channels, EPS)
        reg: list[nn.Module] = []
        for _ in range(2):
            reg += [nn.Linear(channels, channels), nn.ReLU()]
        self.reg = nn.Sequential(*reg, nn.Linear(channels, config.code_size))


class TransformerDecoder(nn.Module):
    """A decoder of the DETR3D kind, from queries and feature maps to boxes, as one operator.

    Y. Wang et al., CoRL 2021, https://arxiv.org/abs/2110.06922; its numbers are those of
    https://github.com/WangYueFt/detr3d. With several points, groups, softmax and learned offsets it attends to the
    cameras as Sparse4D (https://arxiv.org/abs/2211.10581) and its successors do.

    In every layer the queries attend to one another (``mha``) and to what the cameras see at their reference points
    (``svca``: :func:`svexport.ops.camera_sample`) and go through a feed forward (``ffn``), each with its residual and
    norm; then the box branch (``reg``) moves their points. After the last layer ``cls`` scores them.

    It trains as any module: its parameters are ordinary ones, and the gradient of the operator is that of its
    reference, computed anew in the backward pass. As in DETR3D, no gradient flows from the points of a layer to the
    layer before; :meth:`every_layer` is for losses on all of them.

    Shape:
        - query, query_pos: ``(B, Q, embed_dims)``, content and position embedding
        - reference_points: ``(B, Q, 3)``, in [0, 1] of the range. They may be float32 for half queries, and so are then
          the boxes and points of the output; between the layers points are in float32 at least. A half
          file with these and ``lidar2img`` in float32 is that of ``decoder.half()`` with such inputs;
          ``svexport.export(..., dtype=torch.float16)`` converts them too.
        - features: a list of given levels, finest first, each ``(B, cams, C, H, W)``; those in int8 are worth
          ``scales[level]`` a step and may be given in CHW32, ``(B, cams, ceil(C/32), H, W, 32)``
          (:func:`svexport.ops.to_chw32`). TensorRT takes either, and makes its own CHW32 of the former.
        - lidar2img: ``(B, cams, 4, 4)``: LiDAR metres to ``(u * depth, v * depth, depth, 1)``, u and v in pixels
        - output: :class:`DecoderOutput`

    Args:
        config: see :class:`TransformerDecoderConfig`.
        fuse: ``"block"`` runs and exports the decoder as one node; ``"nodes"`` as small ones between native matrix
            products: :func:`svexport.ops.camera_sample` and :func:`svexport.ops.add_bias_residual_layer_norm`. It may
            be changed at any time (``decoder.fuse = "nodes"``); the results are the same.
        dropout: in training, of attention, its output and the feed forward, as in DETR3D (0.1 there). The layers then
            run one by one.
    """

    def __init__(self, config: TransformerDecoderConfig, fuse: str = "block", dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.fuse = fuse
        self.dropout = dropout
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        channels = config.embed_dims
        cls: list[nn.Module] = []
        for _ in range(2):
            cls += [nn.Linear(channels, channels), nn.LayerNorm(channels, EPS), nn.ReLU()]
        last = nn.Linear(channels, config.num_classes)
        self.cls = nn.Sequential(*cls, last)
        nn.init.constant_(last.bias, -math.log((1 - 0.01) / 0.01))  # every class is improbable

    @property
    def fuse(self) -> str:
        """``"block"`` or ``"nodes"``; anything else is a ValueError."""
        return self._fuse

    @fuse.setter
    def fuse(self, value: str) -> None:
        if value not in FUSE:
            raise ValueError(f"TransformerDecoder expects fuse {' or '.join(map(repr, FUSE))}, got {value!r}")
        self._fuse = value

    def weights(self) -> list[Tensor]:
        """The parameters in the order of the op, named as in the state_dict by :func:`weight_names`."""
        return [_get(self, name) for name in self.config._weight_shapes]  # type: ignore[attr-defined]

    def forward(
        self,
        query: Tensor,
        query_pos: Tensor,
        reference_points: Tensor,
        features: Sequence[Tensor],
        lidar2img: Tensor,
    ) -> DecoderOutput:
        """Runs the decoder: a :class:`DecoderOutput` of its last layer, or of every one."""
        return self.decode(query, query_pos, reference_points, list(features), lidar2img)[-1]

    def every_layer(
        self,
        query: Tensor,
        query_pos: Tensor,
        reference_points: Tensor,
        features: Sequence[Tensor],
        lidar2img: Tensor,
    ) -> list[DecoderOutput]:
        """What each layer says of the queries, all of them scored by ``cls``: for a loss on every layer.

        The last is what :meth:`forward` returns. The box branches of the layers before learn from theirs alone.
        """
        return self.decode(query, query_pos, reference_points, list(features), lidar2img, every_layer=True)

    def decode(
        self, *inputs: Any, config: TransformerDecoderConfig | None = None, every_layer: bool = False
    ) -> list[DecoderOutput]:
        """:meth:`every_layer`, or the last alone, with a configuration of its own."""
        given = *inputs, self.weights()
        args = _arguments(config or self.config, *given)
        dropout = self.dropout if self.training else 0.0
        if self.fuse == "block" and not every_layer and not dropout:
            return [DecoderOutput(*OP(*args))]
        attend = functools.partial(F.scaled_dot_product_attention, dropout_p=dropout)
        steps = _Steps(attend, CAMERA_SAMPLE, ADD_NORM, dropout, every_layer)
        return [DecoderOutput(*output) for output in _decode(steps, *args)]

    @property
    def example_inputs(self) -> tuple[Tensor, Tensor, Tensor, list[Tensor], Tensor]:
        """Inputs of the sizes of the configuration, the same every time: points around the car, cameras all around.

        The features are smooth and no point is close to a camera, for what is seen of it there would change with the
        last digit of its place.
        """
        config, like = self.config, next(self.parameters())
        generator = torch.Generator().manual_seed(0)
        query, query_pos = torch.randn(2, 1, config.num_queries, config.embed_dims, generator=generator).to(like)
        angle, radius, height = torch.rand(3, 1, config.num_queries, generator=generator)
        angle, radius = 2 * math.pi * angle, 0.06 + 0.42 * radius
        points = torch.stack((0.5 + radius * angle.cos(), 0.5 + radius * angle.sin(), 0.1 + 0.8 * height), dim=-1)
        features = []
        for size in config.feature_sizes:
            coarse = torch.randn(config.num_cams, config.embed_dims, 6, 10, generator=generator)
            features.append(F.interpolate(coarse, size, mode="bilinear").to(like)[None])
        return query, query_pos, points.to(like), features, rig(config).to(like)[None]

    def load_detr3d(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the weights of a DETR3D checkpoint, as mmdetection3d saves it, its head trained ``with_box_refine``.

        Of every key the end decides, whatever stands before (``pts_bbox_head.``):

        ==================================================  =======================================
        ``transformer.decoder.layers.i.attentions.0.attn``  ``layers.i.mha``
        ``transformer.decoder.layers.i.attentions.1``       ``layers.i.svca``
        ``transformer.decoder.layers.i.ffns.0.layers.0.0``  ``layers.i.ffn.0``
        ``transformer.decoder.layers.i.ffns.0.layers.1``    ``layers.i.ffn.2``
        ``transformer.decoder.layers.i.norms.0, 1, 2``      ``layers.i.mha_norm, svca_norm, ffn_norm``
        ``reg_branches.i``                                  ``layers.i.reg``
        ``cls_branches.(num_layers - 1)``                   ``cls``
        ==================================================  =======================================

        Keys of other modules (backbone, query embedding, class branches of the other layers) are left out.

        Args:
            checkpoint: a state_dict, or a dict with one as its ``"state_dict"``.

        Raises:
            RuntimeError: if weights are missing or have other shapes, as ``load_state_dict`` does, or there are none.
        """
        layer = r"(?:.*\.)?transformer\.decoder\.layers\.(\d+)\."
        places = [
            (rf"{layer}attentions\.0\.attn\.", r"layers.\1.mha."),
            (rf"{layer}attentions\.1\.", r"layers.\1.svca."),
            (rf"{layer}ffns\.0\.layers\.0\.0\.", r"layers.\1.ffn.0."),
            (rf"{layer}ffns\.0\.layers\.1\.", r"layers.\1.ffn.2."),
            *((rf"{layer}norms\.{i}\.", rf"layers.\1.{name}_norm.") for i, name in enumerate(("mha", "svca", "ffn"))),
            (r"(?:.*\.)?reg_branches\.(\d+)\.", r"layers.\1.reg."),
            (rf"(?:.*\.)?cls_branches\.{self.config.num_layers - 1}\.", "cls."),
        ]
        found = {}
        for key, tensor in checkpoint.get("state_dict", checkpoint).items():
            for pattern, place in places:
                if match := re.match(pattern, key):
                    found[match.expand(place) + key[match.end() :]] = tensor
        if not found:
            keys = ", ".join(map(repr, list(checkpoint)[:5])) or "nothing"
            raise RuntimeError(
                "load_detr3d expects a state_dict with keys like "
                "'transformer.decoder.layers.0.attentions.1.output_proj.weight', or a dict with one as its "
                f"'state_dict'; got {keys}"
            )
        self.load_state_dict(found)

    def extra_repr(self) -> str:
        """The configuration, as ``print(module)`` shows it."""
        return f"{self.config}, fuse={self.fuse!r}, dropout={self.dropout}"


def _get(module: nn.Module, name: str) -> Tensor:
    """As ``getattr`` part by part, which takes ten times as long: but for what stands in for a module or parameter."""
    *path, last = name.split(".")
    for part in path:
        child = module._modules.get(part)
        module = getattr(module, part) if child is None else child
    parameter = module._parameters.get(last)
    return getattr(module, last) if parameter is None else parameter
