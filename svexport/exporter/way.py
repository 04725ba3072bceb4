"""The way a forward takes: what its Python calls, and learns of its tensors. A traced file has one way for all."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch.overrides import TorchFunctionMode

from svexport.exporter.source import is_library, shown_line

__all__ = ["Way"]

_VALUES = {
    *("__array__", "__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__", "allclose", "equal"),
    *("is_nonzero", "item", "numpy", "tolist"),
}
"""Functions that give Python the values of tensors."""


class Way(TorchFunctionMode):
    """Records the functions of torch that are called in here, the values that Python gets of tensors, and errors.

    Sizes are left out: those that depend on values (``x[x > 0]``) may be another each time, and no way for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[str, str]] = []
        self._lines: dict[int, tuple[str, int, str]] = {}  # in the user's code, of steps that saw something

    def __enter__(self) -> Way:
        self._outside = sys._getframe(1).f_code
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "")
        seen = ""
        try:
            result = func(*args, **(kwargs or {}))
            if name in _VALUES:
                seen = _written(result)
            return result
        except Exception as error:
            seen = type(error).__name__
            raise
        finally:
            if seen and (line := self._user_line(sys._getframe(1))):
                self._lines[len(self._steps)] = line
            self._steps.append((name, seen))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Way) and self._steps == other._steps

    __hash__ = None  # type: ignore[assignment]

    @property
    def takes_values(self) -> bool:
        """Whether a line of the user's code took values out of tensors, or caught an error that may come of them."""
        return bool(self._lines)

    def parting(self, other: Way) -> str:
        """The user's line of the first value that was another there; empty where the ways part by something else."""
        for index, (step, others) in enumerate(zip(self._steps, other._steps, strict=False)):
            if step != others:
                return shown_line(*self._lines[index]) if index in self._lines and step[0] == others[0] else ""
        return ""

    def _user_line(self, frame: FrameType | None) -> tuple[str, int, str] | None:
        while frame is not None and frame.f_code is not self._outside:
            code = frame.f_code
            if not is_library(code.co_filename):
                return code.co_filename, frame.f_lineno, code.co_name
            frame = frame.f_back
        return None


def _written(value: Any) -> str:
    """A number, list or array, whole, with NaN equal to itself."""
    return str(value.tolist() if hasattr(value, "tolist") else value)
