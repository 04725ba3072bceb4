"""The outputs of an engine: tensors by position, by name, and in the structure that the model returned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree

from svexport.errors import EngineError
from svexport.graph.returned import Returned

__all__ = ["Outputs"]


class Outputs(tuple[Any, ...]):
    """The outputs of a run: a tuple of tensors with access by name.

    >>> boxes, scores = engine(images)
    >>> engine(images)["boxes"]
    >>> dict(engine(images))  # what a model that returns a dict returned

    If the model returned a dict, the names are its keys, and nested dicts and lists are rebuilt. The names of the
    file's outputs also give tensors.
    """

    _names: Sequence[str]
    _returned: Returned | None

    def __new__(cls, tensors: Sequence[Tensor], names: Sequence[str], returned: Returned | None = None) -> Outputs:
        """Takes tensors in the order of ``names``, and how to rebuild the model's dict from them."""
        made = super().__new__(cls, tensors)
        made._names, made._returned = names, returned
        return made

    def keys(self) -> list[str]:
        """The keys of the model's dict, else the names of the outputs."""
        return list(self._names if self._returned is None else self._returned)

    def values(self) -> list[Any]:
        """The values in the order of :meth:`keys`."""
        return [self[key] for key in self.keys()]

    def items(self) -> list[tuple[str, Any]]:
        """Pairs of key and value in the order of :meth:`keys`."""
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
        return any(key is tensor for tensor in self)  # compare identities, not elements

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


# Without this, tree_map and other pytree functions would treat all outputs as one leaf.
_pytree.register_pytree_node(
    Outputs,
    lambda outputs: (list(outputs), (outputs._names, outputs._returned)),
    lambda tensors, context: Outputs(list(tensors), *context),
    serialized_type_name="svexport.runtime.outputs.Outputs",
)
