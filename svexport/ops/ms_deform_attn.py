"""Multi-scale deformable attention: every query mixes a few points sampled from every level of a feature pyramid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from svexport.ops._bilinear import corners
from svexport.ops._module import DropIn
from svexport.ops._op import Op
from svexport.ops.dequantize import result_dtype, values_of

__all__ = ["MultiScaleDeformableAttention", "MultiScaleDeformableSampling", "ms_deform_attn"]


def _attend(
    weighted_sum: Callable[[Tensor, Tensor, Tensor], Tensor],
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    scale: float,
) -> Tensor:
    """The op on tensors. Level sizes enter only tensor arithmetic, because they may be data of the graph."""
    n, s, m, d = value.shape
    queries = sampling_locations.shape[1]
    dtype = result_dtype(value, attention_weights)
    precise = torch.promote_types(torch.promote_types(dtype, sampling_locations.dtype), torch.float32)
    value = values_of(value, scale, precise)
    height, width = spatial_shapes[:, :, None].long().unbind(1)  # (L, 1) each
    x, y = sampling_locations.to(precise).unbind(-1)  # (N, Lq, M, L, P) each
    columns = corners(x * width - 0.5, width)
    rows = corners(y * height - 0.5, height)

    # value as a table of rows (n, s, m) of D numbers
    image = torch.arange(n, device=value.device).view(-1, 1, 1, 1, 1)
    head = torch.arange(m, device=value.device).view(-1, 1, 1)
    start = (image * s + level_start_index[:, None]) * m + head  # (N, 1, M, L, 1)
    attention = attention_weights.to(precise)
    rows = [(index * (width * m) + start, weight * attention) for index, weight in rows]
    columns = [(index * m, weight) for index, weight in columns]
    index = torch.stack([j + i for j, _ in rows for i, _ in columns], dim=-1)  # (N, Lq, M, L, P, 4)
    weight = torch.stack([v * w for _, v in rows for _, w in columns], dim=-1)

    shape = (n * queries * m, math.prod(index.shape[3:]))
    output = weighted_sum(value.reshape(n * s * m, d), index.view(shape), weight.view(shape))
    return output.view(n, queries, m * d).to(dtype)


def _gather_and_multiply(table: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """``(R, D)``, ``(B, K)``, ``(B, K)`` -> ``(B, D)``: for each of B, the weighted sum of K rows."""
    return (weight[:, None] @ table[index])[:, 0]


_MOST_INDICES = (1 << 26) - 1
"""Maximum indices of one ``embedding_bag``: its CUDA backward counts threads in int32, with 32 threads per index."""


def _embedding_bag(table: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """:func:`_gather_and_multiply` in one pass, without copies of the rows; differentiable only once."""
    if 0 in (*table.shape, *index.shape):  # embedding_bag refuses empty tensors
        return _gather_and_multiply(table, index, weight)
    bags = max(1, _MOST_INDICES // index.shape[1])
    pieces = [
        F.embedding_bag(i, table, per_sample_weights=w, mode="sum")
        for i, w in zip(index.split(bags), weight.split(bags), strict=True)
    ]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def reference(*args: Any) -> Tensor:
    return _attend(_gather_and_multiply, *args)


def implementation(*args: Any) -> Tensor:
    value, spatial_shapes, level_start_index = args[:3]
    if spatial_shapes.is_cpu and level_start_index.is_cpu:
        rows, shapes, starts = value.shape[1], spatial_shapes.tolist(), level_start_index.tolist()
        if any(min(start, h, w) < 0 or start + h * w > rows for (h, w), start in zip(shapes, starts, strict=True)):
            raise ValueError(
                f"ms_deform_attn: value has {rows} rows, which do not hold levels of {shapes} (height, width) that "
                f"start at rows {starts}"
            )
    return _attend(_embedding_bag, *args)


def fake(
    value: Tensor, _shapes: Tensor, _starts: Tensor, sampling_locations: Tensor, attention_weights: Tensor, _: float
) -> Tensor:
    sizes = value.shape[0], sampling_locations.shape[1], value.shape[2] * value.shape[3]
    return value.new_empty(*sizes, dtype=result_dtype(value, attention_weights))


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    for n, m, d, queries, points, levels, scale in [
        (2, 3, 5, 7, 2, [(5, 7), (2, 3)], None),
        (1, 8, 4, 1, 4, [(11, 3)], None),
        (3, 1, 1, 2, 1, [(1, 1), (1, 5), (3, 1)], None),
        (1, 2, 6, 4, 3, [(4, 5), (2, 3)], 0.03),
        (2, 2, 3, 0, 2, [(2, 2)], None),
    ]:
        device = make(0).device
        shapes = torch.tensor(levels, device=device)
        sizes = shapes.prod(1)
        locations = make(n, queries, m, len(levels), points, 2).sigmoid() * 1.3 - 0.15
        weights = make(n, queries, m, len(levels), points).sigmoid()
        value, starts = make(n, int(sizes.sum()), m, d), sizes.cumsum(0) - sizes
        if scale is not None:
            value = (value * 40).clamp(-128, 127).to(torch.int8)
        yield value, shapes, starts, locations, weights, scale or 1.0


OP = Op(
    name="ms_deform_attn",
    schema="(Tensor value, Tensor spatial_shapes, Tensor level_start_index, Tensor sampling_locations, "
    "Tensor attention_weights, float scale) -> Tensor",
    reference=reference,
    implementation=implementation,
    fake=fake,
    samples=samples,
)


def ms_deform_attn(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    *,
    scale: float = 1.0,
) -> Tensor:
    """Multi-scale deformable attention.

    X. Zhu et al., *Deformable DETR*, ICLR 2021, https://arxiv.org/abs/2010.04159, equation 3, after the value
    projection; the arguments are those of ``mmcv.ops.MultiScaleDeformableAttnFunction``, without ``im2col_step``.

    Shape:
        - value: ``(N, S, M, D)``: the pixels of all levels, row by row and level after level, for M heads of D
          channels; a step of an int8 value is worth ``scale``
        - spatial_shapes: ``(L, 2)``, integers: (height, width) of the levels
        - level_start_index: ``(L,)``, integers: where each level starts among the S pixels
        - sampling_locations: ``(N, Lq, M, L, P, 2)``: (x, y) from 0 to 1 across the image, edge to edge. Kept in
          float32 at least, also for half inputs.
        - attention_weights: ``(N, Lq, M, L, P)``
        - output: ``(N, Lq, M*D)``, the dtype of ``value``, or of ``attention_weights`` if ``value`` is int8

    A point is sampled as ``torch.nn.functional.grid_sample(padding_mode="zeros", align_corners=False)`` does, except
    that a NaN location reads 0.

    Args:
        scale: value of one step of an int8 ``value``; ignored for any other.

    Raises:
        ValueError: on shapes other than these, or (eager, on the CPU) levels that lie outside of ``value``.
        TypeError: if ``value`` is neither floating point nor int8, ``attention_weights`` is not, or ``spatial_shapes``
            or ``level_start_index`` is.
    """
    if (
        value.dim() != 4
        or sampling_locations.dim() != 6
        or spatial_shapes.shape != (sampling_locations.shape[3], 2)
        or level_start_index.shape != spatial_shapes.shape[:1]
        or sampling_locations.shape[0] != value.shape[0]
        or sampling_locations.shape[2] != value.shape[2]
        or sampling_locations.shape[5] != 2
        or attention_weights.shape != sampling_locations.shape[:5]
        or value.shape[1] == 0
    ):
        raise ValueError(
            "ms_deform_attn expects value (N, S, M, D) with S > 0, spatial_shapes (L, 2), level_start_index (L,), "
            "sampling_locations (N, Lq, M, L, P, 2) and attention_weights (N, Lq, M, L, P); got value "
            f"{tuple(value.shape)}, spatial_shapes {tuple(spatial_shapes.shape)}, level_start_index "
            f"{tuple(level_start_index.shape)}, sampling_locations {tuple(sampling_locations.shape)} and "
            f"attention_weights {tuple(attention_weights.shape)}"
        )
    int8 = value.dtype == torch.int8
    if not (value.is_floating_point() or (int8 and attention_weights.is_floating_point())) or (
        spatial_shapes.is_floating_point() or level_start_index.is_floating_point()
    ):
        raise TypeError(
            "ms_deform_attn expects value in floating point, or int8 beside attention_weights in floating point, "
            f"spatial_shapes and level_start_index in integers; got {value.dtype}, {attention_weights.dtype}, "
            f"{spatial_shapes.dtype} and {level_start_index.dtype}"
        )
    scale = float(scale) if int8 else 1.0
    return OP(value, spatial_shapes, level_start_index, sampling_locations, attention_weights, scale)


class MultiScaleDeformableAttention(DropIn, nn.Module):
    """``mmcv.ops.MultiScaleDeformableAttention``: the same constructor, parameters and initialization.

    Args:
        embed_dims: channels C of the queries.
        num_heads: divides ``embed_dims``.
        num_levels: number of levels of the feature pyramid.
        num_points: points sampled per query, head and level.
        im2col_step: no effect here; in mmcv it does not change the result either.
        dropout: probability for the output, applied before ``identity`` is added.
        batch_first: whether query, value and output are ``(N, length, C)``; otherwise ``(length, N, C)``.
        norm_cfg: no effect, as in mmcv.
        init_cfg: no effect; :meth:`init_weights` initializes the parameters.
        value_proj_ratio: channels of the projected value, as a multiple of ``embed_dims``.

    Raises:
        ValueError: if a size is not positive, or ``num_heads`` does not divide ``embed_dims`` or the projected value's
            channels.
    """

    replaces = ("MultiScaleDeformableAttention",)
    requires = (
        *("num_heads", "num_levels", "num_points", "batch_first", "dropout"),
        *("sampling_offsets", "attention_weights", "value_proj", "output_proj"),
    )

    def __init__(
        self,
        embed_dims: int = 256,
        num_heads: int = 8,
        num_levels: int = 4,
        num_points: int = 4,
        im2col_step: int = 64,
        dropout: float = 0.1,
        batch_first: bool = False,
        norm_cfg: dict[str, Any] | None = None,
        init_cfg: Any = None,
        value_proj_ratio: float = 1.0,
    ) -> None:
        super().__init__()
        if min(embed_dims, num_heads, num_levels, num_points) < 1:
            raise ValueError(
                "expected embed_dims, num_heads, num_levels and num_points of at least 1, got "
                f"{embed_dims}, {num_heads}, {num_levels} and {num_points}"
            )
        value_dims = int(embed_dims * value_proj_ratio)
        if embed_dims % num_heads or value_dims % num_heads:
            raise ValueError(
                f"expected num_heads to divide embed_dims and the {value_dims} channels of the projected value, "
                f"got num_heads={num_heads} and embed_dims={embed_dims}"
            )
        self.embed_dims = embed_dims
        self.num_heads = num_heads
        self.num_levels = num_levels
        self.num_points = num_points
        self.im2col_step = im2col_step
        self.batch_first = batch_first
        self.norm_cfg = norm_cfg
        self.dropout = nn.Dropout(dropout)
        samples = num_heads * num_levels * num_points
        self.sampling_offsets = nn.Linear(embed_dims, samples * 2)
        self.attention_weights = nn.Linear(embed_dims, samples)
        self.value_proj = nn.Linear(embed_dims, value_dims)
        self.output_proj = nn.Linear(value_dims, embed_dims)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Points every head in its own direction, each further point farther away; all points have equal weight."""
        angle = torch.arange(self.num_heads) * (2 * math.pi / self.num_heads)
        direction = torch.stack((angle.cos(), angle.sin()), dim=-1)
        direction /= direction.abs().amax(dim=-1, keepdim=True)  # onto the unit square
        distance = torch.arange(1, self.num_points + 1)
        offsets = direction[:, None, None] * distance[:, None]  # (M, 1, P, 2)
        nn.init.zeros_(self.sampling_offsets.weight)
        self.sampling_offsets.bias.copy_(offsets.expand(-1, self.num_levels, -1, -1).flatten())
        nn.init.zeros_(self.attention_weights.weight)
        nn.init.zeros_(self.attention_weights.bias)
        for projection in (self.value_proj, self.output_proj):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        identity: Tensor | None = None,
        query_pos: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        reference_points: Tensor | None = None,
        spatial_shapes: Tensor | None = None,
        level_start_index: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attends and adds ``identity``.

        Shape:
            - query, query_pos, identity: ``(Lq, N, C)``, or ``(N, Lq, C)`` with ``batch_first``; identity defaults to
              query
            - key, kwargs: ignored; accepted because mmcv's decoder layers pass them
            - value: ``(S, N, C)`` or ``(N, S, C)``; defaults to query
            - key_padding_mask: ``(N, S)``, true where value is padding
            - reference_points: ``(N, Lq, L, 2)``, (x, y) in [0, 1], or ``(N, Lq, L, 4)``, (x, y, width, height)
            - spatial_shapes: ``(L, 2)``, level_start_index: ``(L,)``, see :func:`ms_deform_attn`
            - output: the shape of query

        Raises:
            ValueError: if reference_points, spatial_shapes or level_start_index is missing, or on other shapes.
        """
        if reference_points is None or spatial_shapes is None or level_start_index is None:
            raise ValueError("expected reference_points, spatial_shapes and level_start_index")
        if reference_points.dim() != 4 or reference_points.shape[-1] not in (2, 4):
            raise ValueError(
                f"expected reference_points (N, Lq, L, 2) or (N, Lq, L, 4), got {tuple(reference_points.shape)}"
            )
        if spatial_shapes.shape != (self.num_levels, 2) or reference_points.shape[2] not in (1, self.num_levels):
            raise ValueError(
                f"expected spatial_shapes and reference_points of num_levels={self.num_levels}, got "
                f"{tuple(spatial_shapes.shape)} and {tuple(reference_points.shape)}"
            )
        value = query if value is None else value
        identity = query if identity is None else identity
        if query_pos is not None:
            query = query + query_pos
        if not self.batch_first:
            query, value = query.transpose(0, 1), value.transpose(0, 1)
        if query.dim() != 3 or value.dim() != 3 or value.shape[0] != query.shape[0]:
            raise ValueError(
                f"expected query (N, Lq, {self.embed_dims}) and value (N, S, {self.embed_dims}) of one N, got "
                f"{tuple(query.shape)} and {tuple(value.shape)}, batch first"
            )
        n, queries, _ = query.shape

        value = self.value_proj(value)
        if key_padding_mask is not None:
            value = value.masked_fill(key_padding_mask[..., None], 0.0)
        value = value.view(n, value.shape[1], self.num_heads, -1)
        shape = (n, queries, self.num_heads, self.num_levels, self.num_points)
        offsets = self.sampling_offsets(query).view(*shape, 2)
        offsets = offsets.to(torch.promote_types(offsets.dtype, torch.float32))
        weights = self.attention_weights(query).view(*shape[:3], -1).softmax(-1).view(shape)

        centre = reference_points[:, :, None, :, None, :2]
        if reference_points.shape[-1] == 2:
            offsets = offsets / spatial_shapes.flip(-1)[:, None]  # pixels of the level
        else:
            offsets = offsets / self.num_points * reference_points[:, :, None, :, None, 2:] * 0.5  # parts of the box
        output = self.attend(value, spatial_shapes, level_start_index, centre + offsets, weights)
        output = self.output_proj(output)
        if not self.batch_first:
            output = output.transpose(0, 1)
        return self.dropout(output) + identity

    def attend(self, value: Tensor, *inputs: Tensor) -> Tensor:
        """Calls :func:`ms_deform_attn` with the projected value."""
        return ms_deform_attn(value, *inputs)


class MultiScaleDeformableSampling(DropIn, nn.Module):
    """The parameterless ``MultiScaleDeformableAttention`` of Hugging Face transformers; calls :func:`ms_deform_attn`.

    It is the ``attn`` of the attention layers of Deformable DETR, Grounding DINO, RT-DETR, OmDet-Turbo and others.
    Source: https://github.com/huggingface/transformers/blob/main/src/transformers/models/deformable_detr
    """

    replaces = ("MultiScaleDeformableAttention",)

    def forward(
        self,
        value: Tensor,
        value_spatial_shapes: Tensor,
        value_spatial_shapes_list: list[tuple[int, int]],
        level_start_index: Tensor,
        sampling_locations: Tensor,
        attention_weights: Tensor,
        im2col_step: int,
    ) -> Tensor:
        """See :func:`ms_deform_attn` for the shapes; the list of shapes and ``im2col_step`` are ignored.

        Raises:
            ValueError: on other shapes.
        """
        return self.attend(value, value_spatial_shapes, level_start_index, sampling_locations, attention_weights)

    def attend(self, value: Tensor, *inputs: Tensor) -> Tensor:
        """Calls :func:`ms_deform_attn`."""
        return ms_deform_attn(value, *inputs)
