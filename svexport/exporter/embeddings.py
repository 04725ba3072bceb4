"""Embeddings as Python calls them, made of what both tracers take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["EMBEDDINGS"]


def _shortened(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``F.embedding(max_norm=...)`` that computes with all rows as they would be read, and writes none of them.

    torch shortens the rows that are looked up, in the weight itself: a trace has those of its own inputs only.
    """
    names = list(inspect.signature(own).parameters)[2:]

    def embedding(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = {**dict(zip(names, args)), **kwargs}
        if (longest := given.pop("max_norm", None)) is not None:
            norm = torch.linalg.vector_norm(weight, given.get("norm_type", 2.0), -1, keepdim=True)
            weight = torch.where(norm > longest, weight * (longest / (norm + 1e-7)), weight)
        if (given.get("padding_idx") or 0) < 0:  # the exporter takes -1 for none
            given["padding_idx"] += weight.size(0)
        if own is F.embedding_bag and input.dim() == 2 and given.get("padding_idx") is None:
            return _bags(F.embedding(input, weight), given.get("mode", "mean"), given.get("per_sample_weights"))
        return own(input, weight, **given)

    return embedding


def _bags(rows: Tensor, mode: str, weights: Tensor | None) -> Tensor:
    """Of bags of one size (B, L, D) -> (B, D). The exporters make loops over bags, which fail where there are none."""
    if weights is not None:
        rows = rows * weights.unsqueeze(-1)
    return rows.amax(1) if mode == "max" else getattr(rows, mode)(1)


EMBEDDINGS = {function: _shortened(function) for function in (F.embedding, F.embedding_bag)}
"""By what Python calls."""
