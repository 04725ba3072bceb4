"""Arithmetic that is done during conversion if its numbers are known, and by nodes otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from onnx import TensorProto

from svexport.symbolic._builder import Builder, Dim, Value

__all__ = ["Number", "Numbers"]

Number: TypeAlias = "np.ndarray | Value"

_FUNCTIONS: dict[str, Any] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Max": np.maximum,
    "Min": np.minimum,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Abs": np.abs,
    "Less": np.less,
    "Greater": np.greater,
    "Or": np.logical_or,
    "Where": np.where,
}


class Numbers:
    """``numbers("Add", x, 0.5)`` is an array where ``x`` is one, and a node's output where it is not.

    All is float32, as ONNX Runtime computes coordinates: in more digits some would round to another pixel.
    """

    def __init__(self, b: Builder) -> None:
        self.b = b

    def __call__(self, op_type: str, *inputs: Number | float) -> Number:
        known = [x if isinstance(x, Value) else _array(x) for x in inputs]
        if not any(isinstance(x, Value) for x in known):
            with np.errstate(divide="ignore", invalid="ignore"):
                return _array(_FUNCTIONS[op_type](*known))
        return self.b.op(op_type, *known)

    def size(self, dim: Dim) -> Number:
        """A size as a number, ``(1,)``."""
        return np.array([dim], np.float32) if isinstance(dim, int) else self.b.cast(dim, TensorProto.FLOAT)

    def count(self, dim: Dim) -> Number:
        """``0, 1, ..., dim - 1``."""
        if isinstance(dim, int):
            return np.arange(dim, dtype=np.float32)
        return self.b.cast(self.b.arange(dim), TensorProto.FLOAT)

    def column(self, x: Number) -> Number:
        """``(n,)`` -> ``(n, 1)``."""
        return self.b.unsqueeze(replace(x, shape=(None,)), 1) if isinstance(x, Value) else x[:, None]

    def row(self, x: Number) -> Number:
        """``(n,)`` -> ``(1, n)``."""
        return self.b.unsqueeze(replace(x, shape=(None,)), 0) if isinstance(x, Value) else x[None]

    def sums(self, x: Number) -> Number:
        """``(n, m)`` -> ``(n, 1)``."""
        if isinstance(x, Value):
            return self.b.reduce_sum(replace(x, shape=(None, None)), [1], keepdims=True)
        return x.sum(1, keepdims=True, dtype=np.float32)


def _array(x: Any) -> np.ndarray:
    array = np.asarray(x)
    return array if array.dtype == bool else array.astype(np.float32)
