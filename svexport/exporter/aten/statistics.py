"""Covariance and correlation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["FUNCTIONS"]


def _products(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """Covariance of variables in rows and observations in columns ``(rows, rows)``; torch's own branches on the
    weights' values."""
    x = input if input.dim() == 2 else input.reshape(1, -1)
    counts = x.new_ones(x.size(1), dtype=torch.int64) if fweights is None else fweights
    weights = counts if aweights is None else counts * aweights
    total = weights.sum()
    lost = correction if aweights is None else correction * (weights * aweights).sum() / total
    centred = x - ((x * weights).sum(1) / total).unsqueeze(1)
    products = centred @ (centred * weights).to(centred.dtype).T
    return products / (total - lost).clamp(min=0)


def _of_one(products: Tensor) -> Tensor:
    """Of one variable a number, also where values decide how many there are."""
    size = products.size(0)
    return products.squeeze() if isinstance(size, torch.SymInt) or size == 1 else products


def _cov(*args: Any, **kwargs: Any) -> Tensor:
    return _of_one(_products(*args, **kwargs))


def _correlation(input: Tensor) -> Tensor:
    products = _products(input)
    deviations = products.diagonal().sqrt()
    return _of_one((products / deviations.unsqueeze(1) / deviations).clamp(-1, 1))


FUNCTIONS: dict[str, Callable[..., Any]] = {"aten::corrcoef": _correlation, "aten::cov": _cov}
