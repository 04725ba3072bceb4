"""The configuration of a decoder, its presets, and the names and shapes of its weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from svexport.ops.camera_sample import ACTIVATIONS

__all__ = ["EPS", "TransformerDecoderConfig", "rig", "weight_names", "weight_shapes"]

EPS = 1e-5
"""The epsilon of every layer norm and of the inverse sigmoid."""

FUSE = ("block", "nodes")

MODULES = (
    *("mha.in_proj", "mha.out_proj", "mha_norm", "svca.attention_weights", "svca.output_proj"),
    *(f"svca.position_encoder.{i}" for i in (0, 1, 3, 4)),
    *("svca_norm", "ffn.0", "ffn.2", "ffn_norm", "reg.0", "reg.2", "reg.4"),
)
OFFSETS = ("svca.sampling_offsets",)
CLS = tuple(f"cls.{i}" for i in (0, 1, 3, 4, 6))
"""The modules that have a weight and a bias, in the order of the op's ``weights``: those of every layer, those that
learned offsets add to a layer, and those that follow the last layer."""


def _parameters(modules: Sequence[str]) -> list[str]:
    return [f"{m}{'_' if m.endswith('in_proj') else '.'}{p}" for m in modules for p in ("weight", "bias")]


def weight_names(attributes: Mapping[str, Any]) -> list[str]:
    """The names of the op's ``weights``, as in the module's state_dict.

    Raises:
        ValueError: on more layers than any model has: a file may ask for billions.
    """
    if not 1 <= attributes["num_layers"] <= 1000:
        raise ValueError(f"expects num_layers of 1 to 1000, got {attributes['num_layers']}")
    layer = _parameters((*MODULES, *OFFSETS) if attributes["learned_offsets"] else MODULES)
    names = [f"layers.{i}.{name}" for i in range(attributes["num_layers"]) for name in layer]
    return names + _parameters(CLS)


def weight_shapes(config: TransformerDecoderConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the op's ``weights`` by name, in their order."""
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


@dataclass(frozen=True)
class TransformerDecoderConfig:
    """The full description of a decoder, except its weights. The defaults are DETR3D's on nuScenes.

    Attributes:
        num_layers: layers, each of self attention, camera attention, feed forward and box branch.
        embed_dims: channels C of queries and features.
        num_heads: heads of the self attention.
        ffn_dims: width of the feed forward.
        num_classes: scores per query.
        code_size: numbers per box; the first six are cx, cy, w, l, cz, h.
        num_cams: cameras of the rig.
        num_points: sampling points per query, each with a weight per camera and level.
        num_groups: channel groups, each with its own weights.
        image_size: (height, width) of the images, in the pixels of ``lidar2img``.
        pc_range: ``(x, y, z)`` minimum, then maximum, in metres.
        depth_eps: the least depth that counts, in metres.
        uv_clamp: bounds of the image coordinates, in image sizes: ``(-1, 2)``. Default: only points inside the image
            count.
        activation: activation of the weights: ``"sigmoid"``, or ``"softmax"`` over cameras, points and levels jointly.
        learned_offsets: a linear layer predicts offsets of the points for each query, in metres; otherwise every point
            is the reference point.
        residual_query_pos: adds the position embedding to the residual of the self attention too, as some deployed
            decoders do. DETR3D does not.
        pool: adds a level, the 2x2 max-pool of the last.
        scales: one per given level; used for int8 levels, ignored for others; default: 1.
        num_queries: queries of the example inputs; a decoder takes any number.
        feature_sizes: (height, width) per given level of the example inputs; a decoder takes any sizes, of that many.

    Raises:
        ValueError: on values that are invalid or inconsistent.
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
        object.__setattr__(self, "_weight_shapes", weight_shapes(self))  # once: every call compares them

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
        """The number of levels sampled, including the pooled one."""
        return len(self.feature_sizes) + self.pool

    def attributes(self) -> tuple[Any, ...]:
        """The 14 values that the op takes and the node carries, in their order; the others follow from shapes."""
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
"""Presets, as differences from the defaults, which are DETR3D's."""


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def rig(config: TransformerDecoderConfig) -> Tensor:
    """``lidar2img (num_cams, 4, 4)`` of cameras at the origin that look all around; x right, y down, z ahead."""
    height, width = config.image_size
    half = math.radians(min(180 / config.num_cams + 5, 60))  # half the field of view, with some overlap
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
