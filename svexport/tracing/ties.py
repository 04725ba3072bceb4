"""Gives equal values a defined order: torch may return them in any order, ONNX returns them by position."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from svexport.tracing.source import shown_line, user_line

__all__ = ["ORDERING", "StableOrder"]


class StableOrder(TorchFunctionMode):
    """Makes ``topk``, ``sort`` and ``argsort`` return equal values by position, as ONNX's TopK does.

    Attributes:
        where: each call whose result differs from torch's own: ``topk at model.py:12 in forward: ...``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.where: list[str] = []

    def __enter__(self) -> StableOrder:
        self._outside = sys._getframe(1).f_code
        return super().__enter__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        result = func(*args, **kwargs)
        if name not in _ORDERS or kwargs.get("out") is not None:
            return result
        values, indices = _ORDERS[name](*args, **kwargs)
        if torch.equal(indices, result if name == "argsort" else result[1]):
            return result
        line = user_line(sys._getframe(1), self._outside)
        where = f"{name} at {shown_line(*line)}" if line else name
        if where not in self.where:
            self.where.append(where)
        return indices if name == "argsort" else type(result)((values, indices))


def _topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    values, indices = torch.sort(input, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


def _sort(input: Tensor, dim: int = -1, descending: bool = False, stable: bool | None = None) -> tuple[Tensor, Tensor]:
    return torch.sort(input, dim=dim, descending=descending, stable=True)


_ORDERS: dict[str, Any] = {"topk": _topk, "sort": _sort, "argsort": _sort}

ORDERING = frozenset(_ORDERS)
"""Names of the functions whose results are ordered."""
