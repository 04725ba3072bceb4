"""What a forward does to its model, and undoing it: counters, memories of the last frame, cached grids."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

__all__ = ["State", "unchanged"]

_CONTAINERS = (list, dict, set, deque)


class State:
    """The attributes and buffers of a model's modules as they were, one level into their lists and dicts.

    Parameters are left out, which no forward changes, and so are scripted modules and lazy ones.
    """

    def __init__(self, model: nn.Module) -> None:
        self._attributes: list[tuple[str, nn.Module, dict[str, Any], dict[str, Any]]] = []
        self._values: dict[int, tuple[Tensor, Tensor]] = {}  # by id; a tensor may be in several places
        for name, module in model.named_modules():
            if isinstance(module, (torch.jit.ScriptModule, LazyModuleMixin)):
                continue
            attributes = dict(vars(module))
            contents = {key: value.copy() for key, value in attributes.items() if isinstance(value, _CONTAINERS)}
            self._attributes.append((name, module, attributes, contents))
            for value in _flat(attributes, contents).values():
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and id(value) not in self._values:
                    self._values[id(value)] = (value, value.detach().clone())

    def restore(self) -> None:
        """Puts back what changed; nothing else is touched, for another thread may run the model."""
        for _, module, attributes, contents in self._attributes:
            now = vars(module)
            for key in now.keys() - attributes.keys():
                del now[key]
            now.update(attributes)
            for key, content in contents.items():
                container = attributes[key]
                if (container or content) and [*map(id, _items(container))] != [*map(id, _items(content))]:
                    container.clear()
                    (container.extend if isinstance(container, (list, deque)) else container.update)(content)
        with torch.no_grad():
            for value, before in self._values.values():
                if not _same(value, before):
                    value.copy_(before)

    def changed(self) -> list[str]:
        """Names of what is not as it was: ``head.memory``."""
        names = []
        for name, module, attributes, contents in self._attributes:
            now = dict(vars(module))
            new = _flat(now, {key: value for key, value in now.items() if isinstance(value, _CONTAINERS)})
            old = _flat(attributes, contents)
            for key in dict.fromkeys([*old, *new]):
                before, after = old.get(key), new.get(key)
                if id(before) in self._values:
                    before = self._values[id(before)][1]
                if (key in old) != (key in new) or not _same(before, after):
                    names.append(f"{name}.{key}" if name else key)
        return list(dict.fromkeys(names))


def _items(container: Any) -> list[Any]:
    return [part for item in container.items() for part in item] if isinstance(container, dict) else list(container)


def _flat(attributes: dict[str, Any], contents: dict[str, Any]) -> dict[str, Any]:
    """Attributes and, under ``key[0]``, what their containers have; the dicts that nn.Module keeps have its names."""
    flat = {key: value for key, value in attributes.items() if key not in contents}
    for key, content in contents.items():
        own = key in ("_buffers", "_parameters", "_modules")
        items = content.items() if isinstance(content, dict) else enumerate(content)
        flat |= {str(item) if own else f"{key}[{item!r}]": value for item, value in items}
    return flat


def _same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    try:
        if not isinstance(before, Tensor) or not isinstance(after, Tensor):
            return bool(before == after)
        same = before.shape == after.shape and before.dtype == after.dtype and before.device == after.device
        return same and (before.is_meta or torch.equal(before.nan_to_num(), after.nan_to_num()))
    except Exception:  # noqa: BLE001 - arrays and quantized tensors, say, which have no single answer
        return False


@contextmanager
def unchanged(model: nn.Module) -> Iterator[State]:
    """Undoes what forwards in here do to the model's attributes and buffers; gives the state before."""
    state = State(model)
    try:
        yield state
    finally:
        state.restore()
