"""Temporarily replaces attributes of torch and its exporters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["applied_by", "swapped", "untraced"]


@contextmanager
def swapped(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replaces attributes of a module or class inside the context; on exit, those that it did not have are removed."""
    own = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in attributes:
            if name in own:
                setattr(owner, name, own[name])
            else:
                delattr(owner, name)


@contextmanager
def applied_by(apply: Callable[..., Any]) -> Iterator[None]:
    """Calls ``apply(own, cls, *args, **kwargs)`` for every ``autograd.Function``; ``own`` is torch's ``apply``."""
    function = torch.autograd.Function
    before = function.__dict__["apply"]

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return apply(before.__get__(None, cls), cls, *args, **kwargs)

    with swapped(function, apply=classmethod(applied)):
        yield


@contextmanager
def untraced() -> Iterator[None]:
    """Inside the context sizes are numbers, on which Python code may branch; the tracer would make them tensors."""
    state = torch._C._get_tracing_state()
    if state is None:  # torch.export does so already, and does not allow setting it
        yield
        return
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]
