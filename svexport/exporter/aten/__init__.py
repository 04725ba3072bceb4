"""ATen functions decomposed into others that the exporters support, for both tracers: one file per family.

TorchScript traces them in place of functions that it does not support (``decompose``); torch.export, in its
decompositions. Every file here is found automatically, by its ``FUNCTIONS``. Functions that TorchScript's exporter
supports, but computes differently from torch, are in ``OTHERWISE`` too.
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
"""By ATen overload, such as ``aten::div.Tensor_mode``."""

OTHERWISE = frozenset(name.partition(".")[0] for family in _FAMILIES for name in getattr(family, "OTHERWISE", ()))
"""Functions that TorchScript's exporter supports, but computes differently from torch."""


def overload_of(name: str) -> Any:
    """The overload of a name: ``torch.ops.aten.div.Tensor_mode`` for ``aten::div.Tensor_mode``."""
    function, _, form = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, function), form or "default")


def made_by_torch(name: str) -> Callable[..., Any]:
    """Torch's own decomposition of ``aten::div.Tensor_mode``: in Python if its table has one, else in C++."""
    overload = overload_of(name)
    composed = torch._C.DispatchKey.CompositeImplicitAutograd  # overload.decompose() may differ in torch.export
    return torch._decomp.decomposition_table.get(overload) or functools.partial(overload._op_dk, composed)


def as_called(name: str) -> list[Callable[..., Any]]:
    """The functions and methods that Python calls for ``"aten::median"``."""
    function = name.removeprefix("aten::")
    return [getattr(place, function) for place in (torch, F, Tensor) if hasattr(place, function)]


IN_PLACE_OF = {
    called: function
    for name, function in FUNCTIONS.items()
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    for called in as_called(name)
}
"""By Python callable. torch.export has to see these before C++ decomposes them into functions it may not trace."""
