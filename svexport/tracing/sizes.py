"""Dynamic sizes that hang together: ``2 * Dim("k") + 1`` is 7 where ``k`` is 3."""

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
        symbol: an identifier, as the exporters want it.
        root: of the size that this one is computed from; ``symbol`` itself of one that stands alone.
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
        """From a name, or a ``torch.export.Dim``, which may be computed from another."""
        symbol = _identifier(given if isinstance(given, str) else getattr(given, "__name__", "")) or default
        root = getattr(given, "root", given)
        if isinstance(given, str) or not hasattr(root, "__name__"):
            return cls(symbol, symbol)
        formula = getattr(given, "fn", int)  # increasing and linear
        return cls(symbol, _identifier(root.__name__), formula(1) - formula(0), formula(0), root.min, root.max)

    @property
    def formula(self) -> str:
        """How a file spells it: ``32*k``."""
        factor = f"{self.factor}*{self.root}" if self.factor != 1 else self.root
        return self.symbol if self.root == self.symbol else f"{factor}{self.offset:+}" if self.offset else factor

    def size(self, root: int) -> int:
        """What it is where the root is that large."""
        return self.factor * root + self.offset

    def root_for(self, size: int) -> int:
        """The smallest root of sizes from this one on."""
        return -((self.offset - size) // self.factor)

    def other(self, size: int, larger: Callable[[int], int]) -> int:
        """A root larger than that of a size, or as much smaller where it would be out of its range; none of nothing."""
        root = self.root_for(size)
        other = larger(root) if root else 0
        return other if other <= self.high else max(2 * root - other or root // 2, self.low, 1)


def _identifier(name: str) -> str:
    return re.sub(r"^(?=\d)|\W", "_", name) if name else ""


def tiled(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor repeated, or cut, to sizes; zeros where there is nothing to repeat."""
    tensor = tensor.detach()
    for axis, size in enumerate(shape):
        if size and not tensor.shape[axis]:
            return tensor.new_zeros(shape)
        if size != tensor.shape[axis]:
            tensor = tensor.index_select(axis, torch.arange(size, device=tensor.device) % tensor.shape[axis])
    return tensor
