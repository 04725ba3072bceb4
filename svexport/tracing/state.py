"""What a forward does to its model, and undoing it: counters, memories of the last frame, cached grids."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

__all__ = ["Counter", "State", "derivative_levels", "random_state", "same_random_state", "unchanged"]

MAX_PARAMETER_BYTES = 2**30

_CONTAINERS = (list, dict, set, deque)


class Counter(NamedTuple):
    """A number of a model that forward makes larger or smaller.

    Attributes:
        now: its value.
        advance: sets it to so many more than it was, or less.
    """

    now: float
    advance: Callable[[int], None]


class State:
    """The attributes, buffers and parameters of a model's modules as they were, one level into their lists and dicts,
    and what is global: the state of random numbers and the default type.

    Scripted modules and lazy ones are left out, and parameters of more than a gibibyte in all, which hardly a forward
    changes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._attributes: list[tuple[str, nn.Module, dict[str, Any], dict[str, Any]]] = []
        self._values: dict[int, tuple[Tensor, Tensor]] = {}  # by id; a tensor may be in several places
        self._storages: dict[int, Tensor] = {}
        self._random = random_state()
        self._dtype = torch.get_default_dtype()
        held = sum(p.numel() * p.element_size() for p in model.parameters() if not nn.parameter.is_lazy(p))
        for name, module in model.named_modules():
            if isinstance(module, (torch.jit.ScriptModule, LazyModuleMixin)):
                continue
            attributes = dict(vars(module))
            contents = {key: value.copy() for key, value in attributes.items() if isinstance(value, _CONTAINERS)}
            self._attributes.append((name, module, attributes, contents))
            for value in _flat(attributes, contents).values():
                if not isinstance(value, Tensor) or id(value) in self._values:
                    continue
                if isinstance(value, nn.Parameter):
                    if held > MAX_PARAMETER_BYTES:
                        continue
                    self._storages[id(value)] = value.detach()
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
            for place, (value, before) in self._values.items():
                storage = self._storages.get(place)
                if storage is not None and storage.data_ptr() != value.data_ptr():
                    value.data = storage
                if not _same(value, before):
                    value.copy_(before)
        _set_random_state(self._random)
        if torch.get_default_dtype() != self._dtype:
            torch.set_default_dtype(self._dtype)

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

    def counters(self) -> dict[str, Counter]:
        """Numbers that are others now, by a whole one, by name."""
        found: dict[str, Counter] = {}
        for name, module, attributes, contents in self._attributes:
            now = vars(module)
            for key, before in {**attributes, **contents.get("_buffers", {})}.items():
                place = f"{name}.{key}" if name else key
                if isinstance(before, Tensor) and before.numel() == 1 and id(before) in self._values:
                    was, after = self._values[id(before)][1].item(), before.item()
                    if step := _step(was, after):
                        found[place] = Counter(after, partial(_fill, before, was, step))
                elif step := _step(before, now.get(key)):
                    found[place] = Counter(now[key], partial(_set, now, key, before, step))
        return found


def _step(before: Any, after: Any) -> int:
    """1 or -1 where a number became larger or smaller by a whole one, 0 of anything else."""
    if type(before) is not type(after) or type(before) not in (int, float):
        return 0
    change = after - before
    return int(math.copysign(1, change)) if change and math.isfinite(change) and change == round(change) else 0


def _fill(tensor: Tensor, was: float, step: int, count: int) -> None:
    with torch.no_grad():
        tensor.fill_(was + step * count)


def _set(attributes: dict[str, Any], key: str, was: float, step: int, count: int) -> None:
    attributes[key] = was + step * count


def random_state() -> dict[str, Any]:
    """Of torch on a CPU and on the GPUs that are in use, of Python, and of NumPy."""
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def same_random_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two states of random numbers would draw the same."""
    numbers, others = (state["numpy"] for state in (one, other))
    same = torch.equal(one["torch"], other["torch"]) and one["python"] == other["python"]
    same &= all(np.array_equal(a, b) for a, b in zip(numbers, others, strict=True))
    return same and all(map(torch.equal, one.get("cuda", []), other.get("cuda", [])))


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


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
        if not same or before.is_meta:
            return same
        return torch.equal(before, after) or torch.equal(before.nan_to_num(), after.nan_to_num())
    except Exception:  # noqa: BLE001 - arrays and quantized tensors, say, which have no single answer
        return False


@contextmanager
def derivative_levels() -> Iterator[None]:
    """Leaves those levels of ``torch.func`` that a failed capture was in, which dynamo does not: in one of forward
    derivatives every later one would fail."""
    functorch: Any = torch._C._functorch
    depth = functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        if functorch.get_dynamic_layer_stack_depth() > depth:
            functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
            with suppress(RuntimeError):  # it may have been in none of forward derivatives, of which there is only one
                torch._C._exit_dual_level(level=0)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[State]:
    """Undoes what forwards in here do to the model's attributes, buffers and parameters; gives the state before."""
    state = State(model)
    try:
        yield state
    finally:
        state.restore()
