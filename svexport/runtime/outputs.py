"""What an engine returns: tensors by position, by name, and as the model returned them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree

from svexport.errors import EngineError
from svexport.graph.returned import Returned

__all__ = ["Outputs"]


class Outputs(tuple[Any, ...]):
    """The outputs of a run: a tuple of tensors that are found by name as well.

    >>> boxes, scores = engine(images)
    >>> engine(images)["boxes"]
    >>> dict(engine(images))  # what a model that returns a dict returned

    Of a model that returned a dict, names are its keys, and dicts and lists in it are what they were; the names of the
    file's outputs lead to tensors all the same.
    """

    _names: Sequence[str]
    _returned: Returned | None

    def __new__(cls, tensors: Sequence[Tensor], names: Sequence[str], returned: Returned | None = None) -> Outputs:
        """Tensors in the order of ``names``, and how a dict that the model returned is rebuilt of them."""
        made = super().__new__(cls, tensors)
        made._names, made._returned = names, returned
        return made

    def keys(self) -> list[str]:
        """Of the model's dict, else the names of the outputs."""
        return list(self._names if self._returned is None else self._returned)

    def values(self) -> list[Any]:
        """By :meth:`keys`, in their order."""
        return [self[key] for key in self.keys()]

    def items(self) -> list[tuple[str, Any]]:
        """By :meth:`keys`, in their order, each with its value."""
        return [(key, self[key]) for key in self.keys()]

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return tuple.__getitem__(self, key)
        if self._returned is not None and key in self._returned:
            return self._rebuilt(self._returned[key])
        if key in self._names:
            return tuple.__getitem__(self, list(self._names).index(key))
        raise EngineError(f"no output is named {key!r}; there are {', '.join(dict.fromkeys(self._all_names()))}")

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str):
            return key in self._all_names()
        return any(key is tensor for tensor in self)  # tensors are not compared by numbers here

    def __reduce__(self) -> Any:
        return Outputs, (tuple(self), list(self._names), self._returned)

    def _all_names(self) -> Iterator[str]:
        yield from self.keys()
        yield from self._names

    def _rebuilt(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._rebuilt(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self._rebuilt(one) for one in value]
        return tuple.__getitem__(self, value)

    def __repr__(self) -> str:
        listed = ", ".join(f"{name}: {list(t.shape)}" for name, t in zip(self._names, self, strict=True))
        return f"Outputs({listed})"


# Without it, tree_map and its like would take all outputs for one leaf.
_pytree.register_pytree_node(
    Outputs,
    lambda outputs: (list(outputs), (outputs._names, outputs._returned)),
    lambda tensors, context: Outputs(list(tensors), *context),
    serialized_type_name="svexport.runtime.outputs.Outputs",
)
