"""Wraps CPU tensors as ONNX Runtime values, without a copy and with little overhead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack as _to_dlpack

from svexport.runtime.engine import TensorSpec

__all__ = ["Feeds", "sharing"]

_STRIDED = torch.strided


class Feeds:
    """CPU inputs as ONNX Runtime values that share the tensors' memory.

    Args:
        inputs: the engine's inputs.
        share: wraps a tensor as a value.
    """

    def __init__(self, inputs: Sequence[TensorSpec], share: Callable[[Tensor], Any]) -> None:
        self._inputs = [(spec.name, spec.dtype, spec.accepts) for spec in inputs]
        self._share = share
        self._shapes: list[torch.Size | None] = [None] * len(inputs)  # the shapes accepted last

    def of(self, tensors: Sequence[Tensor]) -> dict[str, Any] | None:
        """The values by name, if all tensors fit and can be read in place; otherwise None."""
        if len(tensors) != len(self._inputs):
            return None
        values, shapes, share = {}, self._shapes, self._share
        for i, (name, dtype, accepts) in enumerate(self._inputs):
            tensor = tensors[i]
            if (
                type(tensor) is not Tensor
                or tensor.dtype is not dtype
                or not tensor.is_cpu
                or tensor.requires_grad
                or tensor.layout is not _STRIDED
                or tensor.is_nested
                or not tensor.is_contiguous()
                or tensor.is_neg()
            ):
                return None
            shape = tensor.shape
            if shape != shapes[i]:
                if not accepts(shape):
                    return None
                shapes[i] = shape
            values[name] = share(tensor)
        return values

    def made(self, ready: Sequence[Tensor]) -> dict[str, Any]:
        """The values of tensors that are known to fit."""
        return {name: self._share(tensor) for (name, _, _), tensor in zip(self._inputs, ready, strict=True)}


@cache
def sharing(ort_value: Any) -> Callable[[Tensor], Any] | None:
    """A function that wraps a CPU tensor as an ONNX Runtime value without a copy; None if this version has none.

    Up to 1.31 a bool is passed as uint8 with a flag; from 1.32 on DLPack carries the bool type.
    """

    def as_it_is(tensor: Tensor) -> Any:
        return ort_value.from_dlpack(_to_dlpack(tensor))

    def with_a_flag(tensor: Tensor) -> Any:
        if tensor.dtype is torch.bool:
            return ort_value.from_dlpack(_to_dlpack(tensor.view(torch.uint8)), True)
        return ort_value.from_dlpack(_to_dlpack(tensor), False)

    for make in (as_it_is, with_a_flag):
        try:
            if make(torch.ones(1, dtype=torch.bool)).data_type() == "tensor(bool)":
                make(torch.ones(1))
                return make
        except (AttributeError, TypeError, RuntimeError):
            continue
    return None
