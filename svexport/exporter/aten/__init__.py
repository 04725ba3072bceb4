"""Functions of ATen made of others that the exporters take, for both tracers alike: a file per family.

TorchScript traces them in place of functions that it does not know (``decompose``), torch.export where it decomposes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from svexport.exporter.aten import norm, order, pair, place, pool, product, span

__all__ = ["FUNCTIONS", "OTHERWISE"]

FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: function
    for family in (norm, order, pair, place, pool, product, span)
    for name, function in family.FUNCTIONS.items()
}
"""By the overload of ATen."""

OTHERWISE = frozenset(name.partition(".")[0] for family in (norm, span) for name in family.FUNCTIONS)
"""Functions that TorchScript's exporter knows, and makes something else of."""
