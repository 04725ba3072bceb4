"""ATen functions composed of functions that the exporters support, for both tracers; one file per family.

TorchScript traces the compositions in place of functions that its exporter does not know (``decompose``); torch.export
uses them as decompositions. Files here are found automatically by their ``FUNCTIONS``. Functions that TorchScript's
exporter knows but converts differently from torch are also in ``OTHERWISE``.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["FUNCTIONS", "IN_PLACE_OF", "OTHERWISE", "as_called", "made_by_torch", "overload_of"]

_FAMILIES = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]

FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: function for family in _FAMILIES for name, function in getattr(family, "FUNCTIONS", {}).items()
}
"""Compositions by ATen overload."""

OTHERWISE = frozenset(name.partition(".")[0] for family in _FAMILIES for name in getattr(family, "OTHERWISE", ()))
"""Functions that TorchScript's exporter knows, and makes something else of."""


def overload_of(name: str) -> Any:
    """``torch.ops.aten.div.Tensor_mode`` of ``aten::div.Tensor_mode``."""
    function, _, form = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, function), form or "default")


def made_by_torch(name: str) -> Callable[..., Any]:
    """torch's own decomposition of ``aten::div.Tensor_mode``, for example; in Python if its table has it, else C++."""
    overload = overload_of(name)
    composed = torch._C.DispatchKey.CompositeImplicitAutograd  # overload.decompose() may be another in torch.export
    return torch._decomp.decomposition_table.get(overload) or functools.partial(overload._op_dk, composed)


def as_called(name: str) -> list[Callable[..., Any]]:
    """The Python functions and methods that call an ATen function such as ``"aten::median"``."""
    function = name.removeprefix("aten::")
    return [getattr(place, function) for place in (torch, F, Tensor) if hasattr(place, function)]


IN_PLACE_OF = {
    called: function
    for name, function in FUNCTIONS.items()
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    for called in as_called(name)
}
"""Compositions by Python function: torch.export must see the call before C++ decomposes it into untraceable parts."""
