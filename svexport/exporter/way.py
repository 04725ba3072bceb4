"""The way a forward takes: what its Python calls, and learns of its tensors. A traced file has one way for all."""

from __future__ import annotations

import sys
import weakref
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from svexport.exporter.source import shown_line, user_line

__all__ = ["Way"]

_VALUES = {
    *("__array__", "__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__", "allclose", "equal"),
    *("is_nonzero", "item", "numpy", "tolist"),
}
"""Functions that give Python the values of tensors."""


class Way(TorchFunctionMode):
    """Records the functions of torch that are called in here, the values that Python gets of tensors, and errors.

    Two ways are one where values and functions are the same, or where Python did nothing with values that are others:
    the same functions, of the same arguments or the results of the same steps (as where a value is only logged).
    Sizes are left out: those that depend on values (``x[x > 0]``) may be another each time, and no way for it.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        """``known`` are arguments and parameters, in an order that is the same each time."""
        super().__init__()
        self._origins: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        for index, tensor in enumerate(known):
            self._note(tensor, ("known", index))
        self._steps: list[tuple[str, str]] = []
        self._flow: list[Any] = []  # each step with what it was given
        self._lines: dict[int, tuple[str, int, str]] = {}  # in the user's code, of steps that saw something

    def __enter__(self) -> Way:
        self._outside = sys._getframe(1).f_code
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "")
        seen = ""
        flow = (str(func) if name == "__get__" else name, self._given(args), self._given(kwargs))
        try:
            result = func(*args, **(kwargs or {}))
            self._note(result, ("step", len(self._steps)))
            if name in _VALUES:
                seen = _written(result)
            return result
        except Exception as error:
            seen = type(error).__name__
            raise
        finally:
            if seen and (line := user_line(sys._getframe(1), self._outside)):
                self._lines[len(self._steps)] = line
            self._steps.append((name, seen))
            self._flow.append(flow)

    def end(self, results: Iterable[Tensor]) -> None:
        """Takes what forward returned as the last step: a branch may be no more than which tensor that is."""
        self._flow.append(self._given(list(results)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Way) and (self._steps == other._steps or self._flow == other._flow)

    __hash__ = None  # type: ignore[assignment]

    @property
    def takes_values(self) -> bool:
        """Whether a line of the user's code took values out of tensors, or caught an error that may come of them."""
        return bool(self._lines)

    def parting(self, other: Way) -> str:
        """The user's line of the last value that was another there before the ways part; empty if they part by else."""
        line = ""
        for index, (step, others) in enumerate(zip(self._steps, other._steps, strict=False)):
            if step[0] != others[0] or (line and self._flow[index] != other._flow[index]):
                return line
            if step != others and index in self._lines:
                line = shown_line(*self._lines[index])
        return line if self._flow != other._flow else ""

    def _note(self, result: Any, origin: Any) -> None:
        if isinstance(result, Tensor):
            self._origins[id(result)] = (weakref.ref(result), origin)
        elif isinstance(result, (list, tuple)) and not isinstance(result, torch.Size):
            for index, item in enumerate(result):
                self._note(item, (*origin, index))

    def _given(self, value: Any) -> Any:
        """Tensors by where they are from, or by what is in them where that is unknown; anything else by its value."""
        if isinstance(value, Tensor):
            reference, origin = self._origins.get(id(value), (None, None))
            return origin if reference is not None and reference() is value else _content(value)
        if isinstance(value, (list, tuple)):
            return type(value).__name__, *map(self._given, value)
        if isinstance(value, dict):
            return [(str(key), self._given(item)) for key, item in value.items()]
        if isinstance(value, slice):
            return "slice", *map(self._given, (value.start, value.stop, value.step))
        return _written(value)


def _written(value: Any) -> str:
    """A number, list or array, whole, with NaN equal to itself."""
    return str(value.tolist() if isinstance(value, (Tensor, np.ndarray, np.generic)) else value)


def _content(tensor: Tensor) -> Any:
    try:
        values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return str(tensor.dtype), tuple(tensor.shape), zlib.crc32(values.tobytes())
    except Exception:  # noqa: BLE001 - sparse, quantized: like no other
        return object()
