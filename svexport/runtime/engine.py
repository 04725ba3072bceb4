"""The base of all engines: typed inputs and outputs, and a call that checks its arguments before anything runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from svexport.errors import EngineError
from svexport.graph.returned import Returned
from svexport.runtime.outputs import Outputs
from svexport.text import dtype_text, shape_text

__all__ = ["Engine", "TensorSpec"]

E = TypeVar("E", bound="Engine")


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of an engine; ``str`` shows it as ``float32[batch, 3, ?, 224]``.

    Attributes:
        name: name in the file.
        dtype: data type of the tensor.
        shape: an int for a static size, a str for a dynamic one, None for a dynamic one without a name; None instead
            of the tuple for an unknown rank.
        from_one: dynamic sizes that must not be 0.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int | str | None, ...] | None
    from_one: frozenset[str] = frozenset()

    def accepts(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of that shape fits: same rank, same static sizes, no 0 that :attr:`from_one` forbids."""
        if self.shape is None:
            return True
        if len(shape) != len(self.shape):
            return False
        for want, got in zip(self.shape, shape, strict=True):
            if want != got and (isinstance(want, int) or (got == 0 and want in self.from_one)):
                return False
        return True

    def __str__(self) -> str:
        if self.shape is None:
            return f"{dtype_text(self.dtype)}[...]"
        return dtype_text(self.dtype) + shape_text(self.shape)


class Engine(ABC):
    """Runs an exported model on torch tensors. Any number of threads may call one engine.

    As a context manager it is closed on exit, which frees TensorRT's memory at once.

    Attributes:
        path: the file it was loaded from; None for a model given in memory.
        device: where it runs and where its outputs are; inputs on another device are copied there.
        inputs: specifications of its inputs, in order.
        outputs: specifications of its outputs, in order.
        returned: how the dict that the model returned holds the outputs; None for no dict, or a file without a record.
    """

    path: Path | None
    device: torch.device
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    returned: Returned | None = None

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Data types of the weights, as far as the engine tells."""
        return set()

    @property
    def input_names(self) -> list[str]:
        """Names of the inputs, in the engine's order."""
        return [spec.name for spec in self.inputs]

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs, in the engine's order."""
        return [spec.name for spec in self.outputs]

    def __call__(self, /, *tensors: Tensor, **named: Tensor) -> Any:
        """Runs the model on tensors given in order, by input name, or both.

        Returns:
            A tensor if the model has one output, else :class:`Outputs`: a tuple with access by name. A model that
            returned a dict always gives :class:`Outputs`. Tensors are on :attr:`device`, without gradients.

        Raises:
            EngineError: if number, names, data types or shapes do not fit :attr:`inputs`, or the run fails.
        """
        if named or len(tensors) != len(self.inputs):
            tensors = self._in_order(tensors, named)
        outputs = self.run(tensors)
        if len(outputs) == 1 and self.returned is None:
            return outputs[0]
        return Outputs(outputs, self.output_names, self.returned)

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Runs the model on one tensor per input, in order; always returns a list.

        Raises:
            EngineError: as for calling the engine.
        """
        if len(tensors) != len(self.inputs):
            raise EngineError(f"{self} expects {len(self.inputs)} inputs, got {len(tensors)}. {self._signature()}")
        for spec, tensor in zip(self.inputs, tensors, strict=True):
            self._check(spec, tensor)
        return self._run(tensors)

    @abstractmethod
    def _run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """:meth:`run` on tensors that fit."""

    def info(self) -> dict[str, Any]:
        """A description of the engine, as plain JSON-serializable values."""
        return {
            "path": None if self.path is None else str(self.path),
            "device": str(self.device),
            "inputs": {spec.name: str(spec) for spec in self.inputs},
            "outputs": {spec.name: str(spec) for spec in self.outputs},
        }

    def close(self) -> None:  # noqa: B027 - most hold nothing that has to be freed
        """Frees the engine's resources; it cannot run again."""

    def __enter__(self: E) -> E:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise EngineError(f"{self} is an engine, which is not copied or pickled: hand on its path, and load it there")

    def _in_order(self, tensors: tuple[Tensor, ...], named: dict[str, Tensor]) -> tuple[Tensor, ...]:
        names = self.input_names
        unknown = [name for name in named if name not in names]
        if unknown:
            raise EngineError(f"{self} has no input named {', '.join(map(repr, unknown))}. {self._signature()}")
        twice = [name for name in names[: len(tensors)] if name in named]
        if twice:
            raise EngineError(f"{self} got {', '.join(map(repr, twice))} twice: by position and by name")
        missing = [name for name in names[len(tensors) :] if name not in named]
        if missing:
            raise EngineError(f"{self} lacks the input {', '.join(map(repr, missing))}. {self._signature()}")
        return (*tensors, *(named[name] for name in names[len(tensors) :]))

    def _check(self, spec: TensorSpec, tensor: Any) -> None:
        if not isinstance(tensor, Tensor):
            advice = "; use torch.from_numpy" if type(tensor).__module__ == "numpy" else ""
            raise EngineError(f"{self} expects torch tensors, got {type(tensor).__name__} for {spec.name!r}{advice}")
        wrong = None
        if (
            tensor.dtype is spec.dtype
            and tensor.layout is torch.strided
            and not tensor.is_nested
            and spec.accepts(tensor.shape)
            and not tensor.is_meta
            and _has_values(tensor)
        ):
            return
        if tensor.layout != torch.strided or tensor.is_nested:
            wrong = f"a {'nested' if tensor.is_nested else 'sparse'} tensor; pass a dense one that has values"
        elif tensor.is_meta or not _has_values(tensor):
            kind = "meta tensor" if tensor.is_meta else type(tensor).__name__
            wrong = f"a {kind}, whose memory holds no values; pass a dense tensor that has values"
        elif tensor.dtype != spec.dtype:
            wrong = f"{_describe(tensor)}; convert it with .to(torch.{dtype_text(spec.dtype)})"
        elif not spec.accepts(tensor.shape):
            fixed = spec.shape is not None and len(spec.shape) == tensor.dim()
            wrong = _describe(tensor)
            if fixed and spec.from_one and 0 in tensor.shape:
                wrong += f"; this file is for {', '.join(sorted(spec.from_one))} from 1 on, as its doc_string says"
            else:
                wrong += "; export the model with dynamic_shapes to run other sizes" if fixed else "; the rank differs"
        if wrong:
            raise EngineError(f"{self}: input {spec.name!r} expects {spec}, got {wrong}")

    def _signature(self) -> str:
        return "Its inputs are " + (", ".join(f"{spec.name}: {spec}" for spec in self.inputs) or "none")

    def __str__(self) -> str:
        return self.path.name if self.path else "the model"

    def __repr__(self) -> str:
        inputs, outputs = (", ".join(f"{s.name}: {s}" for s in specs) for specs in (self.inputs, self.outputs))
        return f"{type(self).__name__}({self}, {self.device}, ({inputs}) -> ({outputs}))"


def _has_values(tensor: Tensor) -> bool:
    """Whether the tensor has real memory; a FakeTensor, or any subclass dispatching in Python, may have address 0."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def _describe(tensor: Tensor) -> str:
    return f"{dtype_text(tensor.dtype)}{list(tensor.shape)}"
