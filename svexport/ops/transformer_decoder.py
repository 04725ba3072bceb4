"""The decoder of multi-camera detectors: object queries attend to one another and to every camera."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from svexport.ops._decoder.config import EPS, FUSE, TransformerDecoderConfig, rig, weight_names
from svexport.ops._decoder.layers import Steps, attend_exactly, decode
from svexport.ops._op import Op, autocast
from svexport.ops.add_bias_residual_layer_norm import OP as ADD_NORM
from svexport.ops.camera_sample import OP as CAMERA_SAMPLE
from svexport.ops.camera_sample import implementation as sample
from svexport.ops.sigmoid_gt import sigmoid_gt
from svexport.ops.to_chw32 import to_chw32

__all__ = ["DecoderOutput", "TransformerDecoder", "TransformerDecoderConfig", "transformer_decoder"]


_REFERENCE = Steps(attend_exactly, CAMERA_SAMPLE.reference, ADD_NORM.reference)
_IMPLEMENTATION = Steps(F.scaled_dot_product_attention, sample, ADD_NORM.reference)


def reference(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return decode(_REFERENCE, *args)[-1]


def differentiable(joined: bool, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The reference, with or without the gradients of points between layers."""
    return decode(_REFERENCE._replace(joined=joined), *args)[-1]


def implementation(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return decode(_IMPLEMENTATION, *args)[-1]


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
    # One layer only: points are detached between layers, which finite differences would count as a wrong gradient.
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
    """The outputs of a layer for every query.

    Shape:
        - classes: ``(B, Q, num_classes)``, scores before the sigmoid
        - boxes: ``(B, Q, code_size)``: cx, cy, w, l, cz, h, sin, cos, vx, vy; the centre in metres
        - reference_points: ``(B, Q, 3)``, the centre in [0, 1] of the range
    """

    classes: Tensor
    boxes: Tensor
    reference_points: Tensor

    def above(self, score: float) -> Tensor:
        """Whether each class score after the sigmoid is above ``score``, computed without it: bool, as ``classes``."""
        return sigmoid_gt(self.classes, score)


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
        - weights: those of :meth:`TransformerDecoder.weights`, in that order, the dtype of ``query``. Autocast first
          converts weights and queries to its dtype, except those in float64
        - everything else: as for :class:`TransformerDecoder`

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
    """Checks the arguments and returns those of the op."""
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
    """Initializes the parameters as DETR3D does."""
    for p in module.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)


class _CameraAttention(nn.Module):
    """The parameters of a camera attention."""

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
            nn.init.uniform_(self.sampling_offsets.bias, -1, 1)  # metres; the points differ from the start


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

    The decoder is that of Y. Wang et al., CoRL 2021, https://arxiv.org/abs/2110.06922; the default numbers are those of
    https://github.com/WangYueFt/detr3d. With several points, groups, softmax and learned offsets it attends to the
    cameras as Sparse4D (https://arxiv.org/abs/2211.10581) and its successors do.

    In every layer the queries attend to one another (``mha``), then to the image features at their reference points
    (``svca``: :func:`svexport.ops.camera_sample`), then pass a feed forward (``ffn``), each step with residual and
    norm. The box branch (``reg``) then moves the reference points. After the last layer ``cls`` scores the queries.

    It trains like any module: its parameters are ordinary ones, and the gradient of the operator is that of its
    reference, recomputed in the backward pass. As in DETR3D, no gradient flows from the points of a layer to the
    previous layer; use :meth:`every_layer` for losses on all layers.

    Shape:
        - query, query_pos: ``(B, Q, embed_dims)``, content and position embedding
        - reference_points: ``(B, Q, 3)``, in [0, 1] of the range. They may be float32 with half queries; the boxes and
          points of the output are float32 then. Between layers points are in float32 at least. For a half file that
          keeps them and ``lidar2img`` in float32, export ``decoder.half()`` with such inputs;
          ``svexport.export(..., dtype=torch.float16)`` converts them too.
        - features: a list of given levels, finest first, each ``(B, cams, C, H, W)``. A step of an int8 level is worth
          ``scales[level]``; int8 levels may be in CHW32, ``(B, cams, ceil(C/32), H, W, 32)``
          (:func:`svexport.ops.to_chw32`). TensorRT takes either, and converts the former to CHW32 itself.
        - lidar2img: ``(B, cams, 4, 4)``: LiDAR metres to ``(u * depth, v * depth, depth, 1)``, u and v in pixels
        - output: :class:`DecoderOutput`

    Args:
        config: see :class:`TransformerDecoderConfig`.
        fuse: ``"block"`` runs and exports the decoder as one node; ``"nodes"`` as small nodes between native matrix
            products: :func:`svexport.ops.camera_sample` and :func:`svexport.ops.add_bias_residual_layer_norm`. It may
            be changed at any time (``decoder.fuse = "nodes"``); the results are the same.
        dropout: probability in training for attention, its output and the feed forward, as in DETR3D (0.1 there). With
            dropout the layers run one by one.
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
        nn.init.constant_(last.bias, -math.log((1 - 0.01) / 0.01))  # every class starts improbable

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
        """The parameters in the order of the op; :func:`weight_names` gives their names in the state_dict."""
        return [_get(self, name) for name in self.config._weight_shapes]  # type: ignore[attr-defined]

    def forward(
        self,
        query: Tensor,
        query_pos: Tensor,
        reference_points: Tensor,
        features: Sequence[Tensor],
        lidar2img: Tensor,
    ) -> DecoderOutput:
        """Runs the decoder and returns the :class:`DecoderOutput` of its last layer."""
        return self.decode(query, query_pos, reference_points, list(features), lidar2img)[-1]

    def every_layer(
        self,
        query: Tensor,
        query_pos: Tensor,
        reference_points: Tensor,
        features: Sequence[Tensor],
        lidar2img: Tensor,
    ) -> list[DecoderOutput]:
        """The outputs of every layer, all scored by ``cls``, for a loss on every layer.

        The last is the result of :meth:`forward`. Each earlier box branch gets gradients only from its own output.
        """
        return self.decode(query, query_pos, reference_points, list(features), lidar2img, every_layer=True)

    def decode(
        self, *inputs: Any, config: TransformerDecoderConfig | None = None, every_layer: bool = False
    ) -> list[DecoderOutput]:
        """The outputs of every layer or of the last alone, with the given configuration instead of the module's."""
        given = *inputs, self.weights()
        args = _arguments(config or self.config, *given)
        dropout = self.dropout if self.training else 0.0
        if self.fuse == "block" and not every_layer and not dropout:
            return [DecoderOutput(*OP(*args))]
        attend = functools.partial(F.scaled_dot_product_attention, dropout_p=dropout)
        steps = Steps(attend, CAMERA_SAMPLE, ADD_NORM, dropout, every_layer)
        return [DecoderOutput(*output) for output in decode(steps, *args)]

    @property
    def example_inputs(self) -> tuple[Tensor, Tensor, Tensor, list[Tensor], Tensor]:
        """Fixed inputs with the sizes of the configuration: points around the car, cameras that look all around.

        The features are smooth and no point is close to a camera: close points would make the output sensitive to the
        last digit of a coordinate.
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

        Keys are matched by their end, whatever the prefix (``pts_bbox_head.``):

        ==================================================  =======================================
        ``transformer.decoder.layers.i.attentions.0.attn``  ``layers.i.mha``
        ``transformer.decoder.layers.i.attentions.1``       ``layers.i.svca``
        ``transformer.decoder.layers.i.ffns.0.layers.0.0``  ``layers.i.ffn.0``
        ``transformer.decoder.layers.i.ffns.0.layers.1``    ``layers.i.ffn.2``
        ``transformer.decoder.layers.i.norms.0, 1, 2``      ``layers.i.mha_norm, svca_norm, ffn_norm``
        ``reg_branches.i``                                  ``layers.i.reg``
        ``cls_branches.(num_layers - 1)``                   ``cls``
        ==================================================  =======================================

        Keys of other modules (backbone, query embedding, class branches of the other layers) are ignored.

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
    """``getattr`` along a dotted name, ten times as fast; falls back to it for stand-ins of modules or parameters."""
    *path, last = name.split(".")
    for part in path:
        child = module._modules.get(part)
        module = getattr(module, part) if child is None else child
    parameter = module._parameters.get(last)
    return getattr(module, last) if parameter is None else parameter
