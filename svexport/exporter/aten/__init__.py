"""Functions of ATen made of others that the exporters take, for both tracers alike: a file per family.

TorchScript traces them in place of functions that it does not know (``decompose``), torch.export where it decomposes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from svexport.exporter.aten import order, pool

__all__ = ["FUNCTIONS"]

FUNCTIONS: dict[str, Callable[..., Any]] = {**order.FUNCTIONS, **pool.FUNCTIONS}
"""By the overload of ATen."""
