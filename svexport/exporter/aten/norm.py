"""Normalizations that also return their statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["FUNCTIONS", "OTHERWISE"]


def _layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """In float32 at least. On a CPU the statistics have the type of the input, if the parameters have it, too."""
    axes = list(range(-len(normalized_shape), 0))
    precise = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = precise.mean(axes, keepdim=True)
    centred = precise - mean
    scale = torch.rsqrt((centred * centred).mean(axes, keepdim=True) + eps)
    normal = centred * scale
    normal = normal if weight is None else normal * weight.to(normal.dtype)
    normal = normal if bias is None else normal + bias.to(normal.dtype)
    mixed = any(p is not None and p.dtype != x.dtype for p in (weight, bias))
    kind = x.dtype if x.device.type == "cpu" and not mixed else precise.dtype
    return normal.to(x.dtype), mean.to(kind), scale.to(kind)


FUNCTIONS: dict[str, Callable[..., Any]] = {"aten::native_layer_norm": _layer_norm}

OTHERWISE = FUNCTIONS.keys()
