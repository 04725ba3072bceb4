"""What the cameras see at points in space: projection, sampling of every feature level, weighted sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from svexport.ops._bilinear import corners
from svexport.ops._kept import zeros
from svexport.ops._module import DropIn
from svexport.ops._op import Op
from svexport.ops.dequantize import result_dtype, values_of

__all__ = ["ACTIVATIONS", "OUTSIDE", "CameraSample", "Detr3DCrossAtten", "camera_sample"]

ACTIVATIONS = ("sigmoid", "softmax")
"""Activations of the weights; the node holds an index into this tuple."""

OUTSIDE = -1.0  # where unseen points are put, in image widths: no pixel of any level is near


def _project(
    reference_points: Tensor,
    lidar2img: Tensor,
    offsets: Tensor,
    points: int,
    image_size: Sequence[int],
    pc_range: Sequence[float],
    depth_eps: float,
    in_image: bool,
    uv_clamp: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """u and v of every point in every camera, 0 to 1 across the image: ``(B, Q, points, cams)`` each."""
    batch, queries, _ = reference_points.shape
    cams = lidar2img.shape[1]
    precise = torch.promote_types(reference_points.dtype, lidar2img.dtype)
    precise = torch.promote_types(torch.promote_types(precise, offsets.dtype), torch.float32)
    axes = zip(reference_points.to(precise).unbind(-1), pc_range[:3], pc_range[3:], strict=True)
    place = torch.stack([x * (high - low) + low for x, low, high in axes], dim=-1)  # (B, Q, 3), metres
    place = (place[:, :, None] + offsets.to(precise)).expand(batch, queries, points, 3)

    # No matrix product: it might run in TF32 or, under autocast, in half, and be off by pixels.
    rows = lidar2img.to(precise)[:, :, :3].transpose(1, 2).reshape(batch, 1, 1, 3 * cams, 4)
    image = (place[..., None, :] * rows[..., :3]).sum(-1) + rows[..., 3]  # (B, Q, points, 3*cams)
    x, y, depth = image.unflatten(-1, (3, cams)).unbind(-2)
    seen = depth > depth_eps
    depth = depth.clamp(min=depth_eps)
    u, v = x / depth / image_size[1], y / depth / image_size[0]
    for t in (u, v):
        centred = 2 * t - 1  # the decoders' test, which rounds differently from 0 < t < 1; false for NaN
        seen = seen & ((centred > -1) & (centred < 1) if in_image else ~t.isnan())
    if not in_image:
        u, v = u.clamp(*uv_clamp), v.clamp(*uv_clamp)
    return torch.where(seen, u, OUTSIDE), torch.where(seen, v, OUTSIDE)


def _levels(features: Sequence[Tensor], scales: Sequence[float], dtype: torch.dtype) -> list[Tensor]:
    return [values_of(f, scale, dtype) for f, scale in zip(features, scales, strict=True)]


def _activate(weights: Tensor, activation: int, dtype: torch.dtype) -> Tensor:
    weights = weights.to(dtype)
    if ACTIVATIONS[activation] == "sigmoid":
        return weights.sigmoid()
    return weights.flatten(2, 4).softmax(2).view(weights.shape)


def reference(
    features: Sequence[Tensor],
    reference_points: Tensor,
    lidar2img: Tensor,
    weights: Tensor,
    offsets: Tensor,
    image_size: Sequence[int],
    pc_range: Sequence[float],
    depth_eps: float,
    in_image: bool,
    uv_clamp: Sequence[float],
    activation: int,
    scales: Sequence[float],
) -> Tensor:
    batch, queries, cams, points, _, groups = weights.shape
    u, v = _project(reference_points, lidar2img, offsets, points, image_size, pc_range, depth_eps, in_image, uv_clamp)
    channels = features[0].shape[2]
    dtype = result_dtype(features[0], weights)
    precise = torch.promote_types(dtype, u.dtype)
    weights = _activate(weights, activation, precise).transpose(2, 3)  # (B, Q, points, cams, L, G)
    image = torch.arange(batch * cams, device=u.device).view(batch, 1, 1, cams)
    output = weights.new_zeros(batch, queries, groups, channels // groups)
    for level, feature in enumerate(_levels(features, scales, precise)):
        height, width = feature.shape[3:]
        table = feature.permute(0, 1, 3, 4, 2).reshape(batch * cams * height * width, channels)
        start = image * (height * width)
        sampled = torch.stack(
            [
                table[start + j * width + i] * (a * b)[..., None]
                for j, a in corners(v.to(precise) * height - 0.5, height)
                for i, b in corners(u.to(precise) * width - 0.5, width)
            ]
        ).sum(0)  # (B, Q, points, cams, C)
        sampled = torch.where(sampled.isnan(), 0, sampled).unflatten(-1, (groups, channels // groups))
        output = output + (sampled * weights[..., level, :, None]).sum((2, 3))
    return output.flatten(2).to(dtype)


def implementation(
    features: Sequence[Tensor],
    reference_points: Tensor,
    lidar2img: Tensor,
    weights: Tensor,
    offsets: Tensor,
    image_size: Sequence[int],
    pc_range: Sequence[float],
    depth_eps: float,
    in_image: bool,
    uv_clamp: Sequence[float],
    activation: int,
    scales: Sequence[float],
) -> Tensor:
    batch, queries, cams, points, _, groups = weights.shape
    uv = _project(reference_points, lidar2img, offsets, points, image_size, pc_range, depth_eps, in_image, uv_clamp)
    channels = features[0].shape[2]
    dtype = result_dtype(features[0], weights)
    precise = torch.promote_types(dtype, uv[0].dtype)
    grid = (2 * torch.stack(uv, dim=-1) - 1).to(precise)  # (B, Q, points, cams, 2)
    grid = grid.permute(0, 3, 1, 2, 4).reshape(batch * cams, queries, points, 2)
    weights = _activate(weights, activation, precise).permute(4, 0, 2, 5, 1, 3)  # (L, B, cams, G, Q, points)
    output = weights.new_zeros(batch, groups, channels // groups, queries)
    for level, feature in enumerate(_levels(features, scales, precise)):
        sampled = F.grid_sample(feature.flatten(0, 1), grid, padding_mode="zeros", align_corners=False)
        sampled = sampled.nan_to_num(0.0, math.inf, -math.inf)
        sampled = sampled.view(batch, cams, groups, channels // groups, queries, points)
        output = output + (sampled * weights[level, :, :, :, None]).sum((1, 5))
    return output.flatten(1, 2).transpose(1, 2).to(dtype).contiguous()


def fake(
    features: Sequence[Tensor], reference_points: Tensor, lidar2img: Tensor, weights: Tensor, *_: object
) -> Tensor:
    sizes = *reference_points.shape[:2], features[0].shape[2]
    return features[0].new_empty(*sizes, dtype=result_dtype(features[0], weights))


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    """Cameras at the origin, spread around the vertical axis; x points right, y down, z ahead."""
    pc_range = (-8.0, -8.0, -2.0, 8.0, 8.0, 2.0)
    for batch, queries, cams, points, groups, channels, levels, clamp, activation, int8 in [
        (2, 7, 4, 1, 1, 3, [(5, 7), (3, 2)], None, 0, False),
        (1, 5, 6, 3, 2, 4, [(4, 11)], None, 1, False),
        (2, 3, 2, 2, 1, 2, [(1, 1), (2, 3), (1, 5)], (-1.0, 2.0), 0, False),
        (1, 6, 2, 1, 1, 5, [(4, 6), (2, 3)], None, 0, True),
    ]:
        angles = torch.arange(cams) * (2 * math.pi / cams)
        lidar2img = torch.zeros(cams, 4, 4)
        lidar2img[:, 0, 0], lidar2img[:, 0, 1] = angles.sin(), -angles.cos()
        lidar2img[:, 1, 2] = -1
        lidar2img[:, 2, 0], lidar2img[:, 2, 1] = angles.cos(), angles.sin()
        lidar2img[:, 3, 3] = 1
        intrinsics = torch.eye(4)
        intrinsics[:2, 2] = torch.tensor([24.0, 16.0])
        intrinsics[0, 0] = intrinsics[1, 1] = 20
        lidar2img = (intrinsics @ lidar2img).to(make(0)) + make(batch, cams, 4, 4) * 0.05
        features = [make(batch, cams, channels, *size) for size in levels]
        yield (
            [(f * 40).clamp(-128, 127).to(torch.int8) for f in features] if int8 else features,
            make(batch, queries, 3).sigmoid(),
            lidar2img,
            make(batch, queries, cams, points, len(levels), groups),
            make(batch, queries, points, 3) if points > 1 else make(1, 1, 1, 3) * 0,
            (32, 48),
            pc_range,
            1e-5 if clamp is None else 1e-2,
            clamp is None,
            clamp or (0.0, 1.0),
            activation,
            [0.03 + 0.01 * level if int8 else 1.0 for level in range(len(levels))],
        )


OP = Op(
    name="camera_sample",
    schema="(Tensor[] features, Tensor reference_points, Tensor lidar2img, Tensor weights, Tensor offsets, "
    "int[] image_size, float[] pc_range, float depth_eps, bool in_image, float[] uv_clamp, int activation, "
    "float[] scales) -> Tensor",
    reference=reference,
    implementation=implementation,
    fake=fake,
    samples=samples,
)


def camera_sample(
    features: Sequence[Tensor],
    reference_points: Tensor,
    lidar2img: Tensor,
    weights: Tensor,
    *,
    image_size: Sequence[int],
    pc_range: Sequence[float],
    depth_eps: float = 1e-5,
    uv_clamp: tuple[float, float] | None = None,
    activation: str = "sigmoid",
    offsets: Tensor | None = None,
    scales: Sequence[float] | None = None,
) -> Tensor:
    """Samples the feature maps of several cameras where points in space appear in them, and sums with learned weights.

    This is the feature sampling of DETR3D (Y. Wang et al., CoRL 2021, https://arxiv.org/abs/2110.06922, section 3.2);
    with offsets, several points, softmax and groups it is that of Sparse4D and its successors
    (X. Lin et al., https://arxiv.org/abs/2211.10581):

    1. ``p = reference_points * (max - min) + min + offsets`` in metres; ``c = lidar2img @ (p, 1)`` for every camera;
    2. ``u = c.x / max(c.z, depth_eps) / width`` and ``v`` likewise with the height; a point counts where
       ``c.z > depth_eps`` and ``-1 < 2u-1 < 1`` and ``-1 < 2v-1 < 1``. With ``uv_clamp`` u and v are clamped instead,
       and only the depth is tested;
    3. every level is sampled there as by ``torch.nn.functional.grid_sample(padding_mode="zeros",
       align_corners=False)``, so that values fade to zero at the border;
    4. samples that do not count, and NaN samples (from a dead or uncalibrated camera), become 0. The samples are
       multiplied by the activated weights and summed over cameras, points and levels.

    Shape:
        - features: L of ``(B, cams, C, H_l, W_l)``; a step of an int8 level is worth ``scales[level]``. TensorRT may
          hold int8 levels in any of its formats
        - reference_points: ``(B, Q, 3)``, in [0, 1] of the range
        - lidar2img: ``(B, cams, 4, 4)``: LiDAR metres to ``(u * depth, v * depth, depth, 1)``, u and v in pixels
        - weights: ``(B, Q, cams, points, L)``, or ``(B, Q, cams, points, L, G)`` for G groups of C/G channels each;
          before activation
        - offsets: ``(B, Q, points, 3)``, metres; without them all points are the reference point
        - output: ``(B, Q, C)``, the dtype of ``features``; that of ``weights`` if they are int8

    Projection and coordinates are computed in float32 at least, also for half inputs.

    On CUDA a NaN sample has no gradient; on the CPU the gradient of its coordinates is 0 times NaN, which is NaN.

    Args:
        image_size: (height, width) of the images, in the pixels of ``lidar2img``.
        pc_range: ``(x, y, z)`` minimum, then maximum, in metres.
        depth_eps: the least depth that counts, in metres.
        uv_clamp: bounds of u and v, in image sizes: ``(-1, 2)``. Default: the test of step 2.
        activation: ``"sigmoid"``, or ``"softmax"``: over cameras, points and levels jointly, in each group.
        scales: one per level; used for int8 levels, ignored for others; default: 1.

    Raises:
        ValueError: on shapes other than these, an image without a pixel or an unknown activation.
        TypeError: if features are neither floating point nor int8, or weights are not floating point.
    """

    def unexpected(expected: str) -> ValueError:
        shapes = {f"features[{i}]": feature for i, feature in enumerate(features)}
        shapes |= {"reference_points": reference_points, "lidar2img": lidar2img, "weights": weights}
        shapes |= {} if offsets is None else {"offsets": offsets}
        got = ", ".join(f"{name} {tuple(t.shape)}" for name, t in shapes.items())
        return ValueError(f"camera_sample expects {expected}; got {got}")

    if weights.dim() not in (5, 6) or weights.shape[4] != len(features) or not features or features[0].dim() != 5:
        raise unexpected("features (B, cams, C, H, W), L of them, and weights (B, Q, cams, points, L[, G])")
    batch, queries, cams, points = weights.shape[:4]
    channels = features[0].shape[2]
    if any(f.dim() != 5 or f.shape[:3] != (batch, cams, channels) or 0 in f.shape[3:] for f in features):
        raise unexpected(f"features ({batch}, {cams}, {channels}, H, W), none empty")
    if weights.dim() == 6 and (weights.shape[5] == 0 or channels % weights.shape[5]):
        raise unexpected(f"a number of groups, the last dimension of weights, that divides the {channels} channels")
    if reference_points.shape != (batch, queries, 3) or lidar2img.shape != (batch, cams, 4, 4):
        raise unexpected(f"reference_points ({batch}, {queries}, 3) and lidar2img ({batch}, {cams}, 4, 4)")
    if offsets is not None and offsets.shape != (batch, queries, points, 3):
        raise unexpected(f"offsets ({batch}, {queries}, {points}, 3)")
    if activation not in ACTIVATIONS:
        raise ValueError(f"camera_sample expects activation {' or '.join(map(repr, ACTIVATIONS))}, got {activation!r}")
    pixels = len(image_size) == 2 and min(image_size) > 0
    if not pixels or len(pc_range) != 6 or (uv_clamp is not None and len(uv_clamp) != 2):
        raise ValueError(
            "camera_sample expects image_size (height, width) in pixels, pc_range of 6 numbers and uv_clamp None or "
            f"(low, high); got {image_size}, {pc_range} and {uv_clamp}"
        )
    if scales is not None and len(scales) != len(features):
        raise ValueError(f"camera_sample expects a scale for each of the {len(features)} features, got {scales}")
    if not weights.is_floating_point() or not all(f.is_floating_point() or f.dtype == torch.int8 for f in features):
        kinds = ", ".join(str(t.dtype) for t in (*features, weights))
        raise TypeError(f"camera_sample expects features in floating point or int8, and weights, got {kinds}")
    return OP(
        list(features),
        reference_points,
        lidar2img,
        weights if weights.dim() == 6 else weights[..., None],
        # zeros, not an absent input: TensorRT's parser does not support an absent input before a present one
        zeros(reference_points, (1, 1, 1, 3)) if offsets is None else offsets,
        list(image_size),
        list(pc_range),
        depth_eps,
        uv_clamp is None,
        (0.0, 1.0) if uv_clamp is None else uv_clamp,
        ACTIVATIONS.index(activation),
        [1.0] * len(features) if scales is None else list(scales),
    )


class CameraSample(nn.Module):
    """Module form of :func:`camera_sample`; it holds the options and has no parameters."""

    def __init__(
        self,
        image_size: Sequence[int],
        pc_range: Sequence[float],
        depth_eps: float = 1e-5,
        uv_clamp: tuple[float, float] | None = None,
        activation: str = "sigmoid",
        scales: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.image_size = tuple(image_size)
        self.pc_range = tuple(pc_range)
        self.depth_eps = depth_eps
        self.uv_clamp = uv_clamp
        self.activation = activation
        self.scales = None if scales is None else tuple(scales)

    def forward(
        self,
        features: Sequence[Tensor],
        reference_points: Tensor,
        lidar2img: Tensor,
        weights: Tensor,
        offsets: Tensor | None = None,
    ) -> Tensor:
        """Calls :func:`camera_sample` with the options given to the constructor."""
        return self.sample(features, reference_points, lidar2img, weights, offsets, self.scales)

    def sample(
        self,
        features: Sequence[Tensor],
        reference_points: Tensor,
        lidar2img: Tensor,
        weights: Tensor,
        offsets: Tensor | None,
        scales: Sequence[float] | None,
    ) -> Tensor:
        """As :meth:`forward`, but with the given scales instead of the module's."""
        return camera_sample(
            features,
            reference_points,
            lidar2img,
            weights,
            image_size=self.image_size,
            pc_range=self.pc_range,
            depth_eps=self.depth_eps,
            uv_clamp=self.uv_clamp,
            activation=self.activation,
            offsets=offsets,
            scales=scales,
        )

    def extra_repr(self) -> str:
        """The options, as ``print(module)`` shows them."""
        return (
            f"image_size={self.image_size}, pc_range={self.pc_range}, depth_eps={self.depth_eps}, "
            f"uv_clamp={self.uv_clamp}, activation={self.activation!r}, scales={self.scales}"
        )


class Detr3DCrossAtten(DropIn, nn.Module):
    """DETR3D's cross attention, computed by :func:`camera_sample`; same constructor, parameters and initialization.

    Source: https://github.com/WangYueFt/detr3d, ``projects/mmdet3d_plugin/models/utils/detr3d_transformer.py``

    Args:
        embed_dims: channels C of the queries.
        num_heads: no effect; neither do ``im2col_step``, ``norm_cfg``, ``init_cfg`` and ``batch_first``.
        num_levels: number of levels of the feature pyramid.
        num_points: weights per camera and level; all of them are of the reference point.
        num_cams: number of cameras of the rig.
        pc_range: ``(x, y, z)`` minimum, then maximum, in metres.
        dropout: probability for the output, applied before the residual is added.
    """

    replaces = ("Detr3DCrossAtten",)
    requires = (
        *("num_levels", "num_points", "num_cams", "pc_range"),
        *("attention_weights", "output_proj", "position_encoder", "dropout"),
    )

    def __init__(
        self,
        embed_dims: int = 256,
        num_heads: int = 8,
        num_levels: int = 4,
        num_points: int = 5,
        num_cams: int = 6,
        im2col_step: int = 64,
        pc_range: Sequence[float] | None = None,
        dropout: float = 0.1,
        norm_cfg: dict[str, Any] | None = None,
        init_cfg: Any = None,
        batch_first: bool = False,
    ) -> None:
        super().__init__()
        self.embed_dims, self.num_heads = embed_dims, num_heads
        self.num_levels, self.num_points, self.num_cams = num_levels, num_points, num_cams
        self.im2col_step, self.norm_cfg, self.init_cfg, self.batch_first = im2col_step, norm_cfg, init_cfg, batch_first
        self.pc_range = pc_range
        self.dropout = nn.Dropout(dropout)
        self.attention_weights = nn.Linear(embed_dims, num_cams * num_levels * num_points)
        self.output_proj = nn.Linear(embed_dims, embed_dims)
        encoder: list[nn.Module] = []
        for inputs in (3, embed_dims):
            encoder += [nn.Linear(inputs, embed_dims), nn.LayerNorm(embed_dims), nn.ReLU(inplace=True)]
        self.position_encoder = nn.Sequential(*encoder)
        nn.init.zeros_(self.attention_weights.weight)
        nn.init.zeros_(self.attention_weights.bias)
        nn.init.xavier_uniform_(self.output_proj.weight)
        nn.init.zeros_(self.output_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Any,
        value: Sequence[Tensor],
        residual: Tensor | None = None,
        query_pos: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        reference_points: Tensor | None = None,
        spatial_shapes: Tensor | None = None,
        level_start_index: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Samples the feature maps ``value`` at the reference points and adds the residual.

        Shape:
            - query, query_pos, residual: ``(Q, B, C)``; residual defaults to query
            - value: L of ``(B, cams, C, H_l, W_l)``; defaults to key
            - reference_points: ``(B, Q, 3)``, in [0, 1] of the range
            - kwargs: ``img_metas``, one dict per batch element with ``lidar2img``, cams of (4, 4), and ``img_shape``,
              whose first entry is (height, width, ...); other keywords are ignored, as in DETR3D
            - output: ``(Q, B, C)``

        Raises:
            ValueError: if reference_points or img_metas is missing, or on other shapes.
        """
        metas = kwargs.get("img_metas")
        if reference_points is None or not metas or self.pc_range is None:
            raise ValueError("expected reference_points, img_metas and a pc_range")
        value = key if value is None else value
        residual = query if residual is None else residual
        query = query if query_pos is None else query + query_pos
        weights = self.attention_weights(query.transpose(0, 1))  # (B, Q, cams*points*L)
        precise = torch.promote_types(reference_points.dtype, torch.float32)  # half would be off by pixels
        lidar2img = torch.stack(
            [
                torch.stack([torch.as_tensor(m, dtype=precise, device=query.device) for m in meta["lidar2img"]])
                for meta in metas
            ]
        )
        output = self.sample(
            value,
            reference_points,
            lidar2img,
            weights.unflatten(-1, (self.num_cams, self.num_points, self.num_levels)),
            image_size=tuple(metas[0]["img_shape"][0][:2]),
            pc_range=self.pc_range,
        )
        x = reference_points.clamp(0, 1)
        position = self.position_encoder(torch.log(x.clamp(min=1e-5) / (1 - x).clamp(min=1e-5)))
        output = self.output_proj(output.transpose(0, 1))
        return self.dropout(output) + residual + position.transpose(0, 1)

    def sample(self, features: Sequence[Tensor], *inputs: Tensor, **options: Any) -> Tensor:
        """Calls :func:`camera_sample`."""
        return camera_sample(features, *inputs, **options)
