"""Dynamic sizes that depend on one another: ``2 * Dim("k") + 1`` is 7 if ``k`` is 3."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Size", "tiled"]


@dataclass(frozen=True)
class Size:
    """A dynamic size, ``factor * root + offset``.

    Attributes:
        symbol: an identifier, as the exporters require.
        root: symbol of the size that this one is computed from; ``symbol`` itself for an independent size.
        factor: see above.
        offset: see above.
        low: smallest value of the root.
        high: largest value of the root.
    """

    symbol: str
    root: str
    factor: int = 1
    offset: int = 0
    low: int = 0
    high: float = math.inf

    @classmethod
    def of(cls, given: Any, default: str) -> Size:
        """Makes a size from a name, or from a ``torch.export.Dim``, which may be derived from another."""
        symbol = _identifier(given if isinstance(given, str) else getattr(given, "__name__", "")) or default
        root = getattr(given, "root", given)
        if isinstance(given, str) or not hasattr(root, "__name__"):
            return cls(symbol, symbol)
        formula = getattr(given, "fn", int)  # increasing and linear
        return cls(symbol, _identifier(root.__name__), formula(1) - formula(0), formula(0), root.min, root.max)

    @property
    def formula(self) -> str:
        """The size as written in a file: ``32*k``."""
        factor = f"{self.factor}*{self.root}" if self.factor != 1 else self.root
        return self.symbol if self.root == self.symbol else f"{factor}{self.offset:+}" if self.offset else factor

    def size(self, root: int) -> int:
        """The size for a value of the root."""
        return self.factor * root + self.offset

    def root_for(self, size: int) -> int:
        """The smallest root that gives at least this size."""
        return -((self.offset - size) // self.factor)

    def other(self, size: int, larger: Callable[[int], int]) -> int:
        """A root larger than that of a size, or as much smaller where it would be out of its range; none of nothing."""
        root = self.root_for(size)
        other = larger(root) if root else 0
        return other if other <= self.high else max(2 * root - other or root // 2, self.low, 1)


def _identifier(name: str) -> str:
    return re.sub(r"^(?=\d)|\W", "_", name) if name else ""


def tiled(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor repeated or cut to the given shape; zeros if it is empty."""
    tensor = tensor.detach()
    for axis, size in enumerate(shape):
        if size and not tensor.shape[axis]:
            return tensor.new_zeros(shape)
        if size != tensor.shape[axis]:
            tensor = tensor.index_select(axis, torch.arange(size, device=tensor.device) % tensor.shape[axis])
    return tensor
