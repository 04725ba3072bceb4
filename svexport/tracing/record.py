"""Records the arguments of a model's last forward, so that an export needs none."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

__all__ = ["Recorder", "record", "recorded", "remember"]

_last: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = weakref.WeakKeyDictionary()


class Recorder:
    """The result of :func:`record`. It records until :meth:`remove`, or until the end of its ``with`` block."""

    def __init__(self, model: nn.Module) -> None:
        self._handle = model.register_forward_pre_hook(remember, with_kwargs=True)

    def remove(self) -> None:
        """Stops recording; recorded arguments stay available to :func:`svexport.export`."""
        self._handle.remove()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def record(model: nn.Module) -> Recorder:
    """Records the arguments of each forward of ``model`` for a later ``svexport.export(model)``.

    >>> with svexport.record(model):
    ...     model(images)
    >>> svexport.export(model, opset=11)
    """
    return Recorder(model)


def recorded(model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Positional and keyword arguments of the last recorded forward."""
    return _last.get(model)


def remember(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Makes these the last recorded arguments of ``model``."""
    _last[model] = (args, kwargs)
