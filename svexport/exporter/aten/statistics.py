"""Covariance and correlation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["FUNCTIONS"]


def _cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """The covariance of variables in rows, observations in columns; torch's own reads the values of the weights."""
    x = input if input.dim() == 2 else input.reshape(1, -1)
    counts = x.new_ones(x.size(1), dtype=torch.int64) if fweights is None else fweights
    weights = counts if aweights is None else counts * aweights
    total = weights.sum()
    lost = correction if aweights is None else correction * (weights * aweights).sum() / total
    centred = x - ((x * weights).sum(1) / total).unsqueeze(1)
    products = centred @ (centred * weights).to(centred.dtype).T
    result = products / (total - lost).clamp(min=0)
    return result if x.size(0) != 1 else result.reshape(())


def _correlation(input: Tensor) -> Tensor:
    products = _cov(input)
    if not products.dim():
        return products / products
    deviations = products.diagonal().sqrt()
    return (products / deviations.unsqueeze(1) / deviations).clamp(-1, 1)


FUNCTIONS: dict[str, Callable[..., Any]] = {"aten::corrcoef": _correlation, "aten::cov": _cov}
