"""Products of all that comes before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["FUNCTIONS"]


def _cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Of twice as many at each step; ReduceProd of integers is of doubles in ONNX Runtime."""
    integers = torch.int64 if not x.is_floating_point() else x.dtype
    x = x.to(dtype or integers)
    if not x.dim():
        return x.clone()
    size = x.size(dim)
    if not isinstance(size, int) or isinstance(size, Tensor):
        return _from_pairs(x, dim)
    done = 1
    while done < size:
        products = x.narrow(dim, done, size - done) * x.narrow(dim, 0, size - done)
        x = torch.cat((x.narrow(dim, 0, done), products), dim)
        done *= 2
    return x.clone() if done == 1 else x


def _from_pairs(x: Tensor, dim: int) -> Tensor:
    """Along a dynamic size."""
    x = x.transpose(dim, -1)
    place = torch.arange(x.size(-1), device=x.device)
    ahead = place > place.unsqueeze(-1)
    return torch.where(ahead, 1, x.unsqueeze(-2)).to(x.dtype).prod(-1).transpose(dim, -1)


FUNCTIONS: dict[str, Callable[..., Any]] = {"aten::cumprod": _cumprod}
