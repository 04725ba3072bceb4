"""Functions of torch that an exporter does not know, traced as those they are made of: torch's own decompositions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["decomposable", "decomposed"]


def decomposable(name: str) -> bool:
    """Whether torch has a decomposition of ``aten::outer``, say."""
    return any(_decomposition(overload) is not None for overload in _overloads(name))


@contextmanager
def decomposed(names: Collection[str]) -> Iterator[None]:
    """While torch.jit traces, records in place of each function of these names (``aten::outer``) what it is made of.

    By kernels for the tracer's dispatch key, which sees a call whatever Python it came through. Calls in scripted code are
    no calls to it and stay.
    """
    if not names:
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kernels that are replaced
            for overload in (overload for name in names for overload in _overloads(name)):
                if (function := _decomposition(overload)) is not None:
                    library.impl(overload, function, "Tracer", allow_override=True)
        yield
    finally:
        library._destroy()  # which puts torch's kernels back


def _overloads(name: str) -> list[torch._ops.OpOverload]:
    """Every overload of a function and of its in-place form, without those that write to an argument ``out``."""
    namespace, _, function = name.partition("::")
    packets = [getattr(getattr(torch.ops, namespace), n, None) for n in (function, f"{function}_")]
    overloads = [getattr(packet, overload) for packet in packets if packet is not None for overload in packet.overloads()]
    return [o for o in overloads if namespace == "aten" and not any(a.is_out for a in o._schema.arguments)]


def _decomposition(overload: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """What stands for the function in a trace: its composition of others in C++, or one of Python's as a graph."""
    if overload._can_decompose():
        return overload.decompose
    from torch._decomp import decomposition_table

    python = decomposition_table.get(overload)
    if python is None or overload._schema.is_mutable:
        return None

    def function(*args: Any, **kwargs: Any) -> Any:
        from torch.fx.experimental.proxy_tensor import make_fx

        tracing = torch._C._get_tracing_state()
        torch._C._set_tracing_state(None)  # which makes tensors of sizes, on which Python code may branch
        try:
            graph = make_fx(lambda *tensors: python(*tensors, **kwargs))(*args)
        finally:
            torch._C._set_tracing_state(tracing)
        return _Aten(graph).run(*args)

    return function


class _Aten(torch.fx.Interpreter):
    """Runs a graph with the functions of ATen that torch's primitives (``prims::rsqrt``) stand for."""

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        return super().call_function(getattr(target, "impl_aten", target), args, kwargs)
