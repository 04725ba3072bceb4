"""Finds by name the values that a model and its functions hold, to compare, set and restore them."""

from __future__ import annotations

import functools
import inspect
import itertools
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from svexport.tracing.source import calls_of_users, is_library, is_standard

__all__ = ["Place", "Reached", "Root", "bytes_of", "roots_of_users", "same"]

MOST_FAR = 20_000
"""Maximum number of values visited that are neither in a module nor in a container of its own: more of them is data."""

MOST_OF_ONE = 10_000
"""Maximum number of values visited in one container; of a larger one only the length is compared."""

MOST_COPIED = 2**26
"""Maximum bytes of copied tensors and arrays that are far from a module, such as example inputs."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, np.generic)
_FUNCTIONS = (types.MethodType, types.FunctionType, types.GeneratorType, functools.partial)
_OF_MODULES = ("_buffers", "_parameters", "_modules")


class Place(NamedTuple):
    """A value and its place.

    Attributes:
        value: the value; for a tensor or an array a copy.
        holder: dict, list, object, class or cell that holds it under ``key``; for a tensor or an array, that itself.
    """

    value: Any
    holder: Any
    key: Any

    def put(self, value: Any) -> None:
        """Sets another value at this place."""
        if isinstance(self.holder, Tensor):
            with torch.no_grad():
                self.holder.copy_(value)
        elif isinstance(self.holder, np.ndarray):
            self.holder[...] = value
        elif isinstance(self.holder, (dict, list, deque)):
            self.holder[self.key] = value
        elif self.holder is not None:
            setattr(self.holder, self.key, value)

    def holds(self) -> bool:
        """Whether an array still has these numbers, or any other holder still holds this very object."""
        if isinstance(self.holder, np.ndarray):
            return same(self.value, self.holder)
        return self.holder is None or getattr(self.holder, self.key, self) is self.value


class Root(NamedTuple):
    """A starting point of the search."""

    name: str
    holder: Any
    key: Any
    value: Any


class Content(NamedTuple):
    """A container, the name by which it is reached, and a copy of what it holds."""

    name: str
    container: Any
    held: Any


class Reached:
    """All values reached from roots: through modules, containers, objects of user classes and attributes of these
    classes, functions with their closures and defaults, and generators.

    Scripted and lazy modules are left out, and so are values far from a module beyond the limits above.

    Args:
        roots: the starting points.
        copied: selects the tensors to copy. Writes into other tensors are neither detected nor restored.
        functions: whether to search functions and generators.

    Attributes:
        places: values by name, such as ``head.memory`` or ``head.counts['n']``.
        contents: the contents of the containers.
    """

    def __init__(self, roots: Sequence[Root], copied: Callable[[Tensor], bool], functions: bool = True) -> None:
        self.places: dict[str, Place] = {}
        self._roots, self._copied, self._functions = roots, copied, functions
        self._named: dict[str, int] = {}
        self.contents: list[Content] = []
        self._copies: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by id: itself, a copy, and its storage
        self._near: set[int] = set()  # dicts of modules, and containers that are their attributes
        seen: dict[int, Any] = {}
        waiting, values, size = [*reversed(roots)], MOST_FAR, MOST_COPIED  # budgets that remain for far values
        while waiting:
            name, holder, key, value = waiting.pop()
            near = id(holder) in self._near or isinstance(value, nn.Module)
            values -= not near
            if not near and values < 0:
                continue
            if isinstance(value, (Tensor, np.ndarray)):
                needed = 0 if near else bytes_of(value)
                self._add(name, Place(self._copy(value) if needed <= size else value, value, None))
                size -= needed if needed <= size else 0
            elif isinstance(value, _PLAIN):
                self._add(name, Place(value, holder, key))
            elif id(value) not in seen:
                seen[id(value)] = value
                parts = self._parts(name, value)
                if parts is None:
                    self._add(name, Place(*_position(value, holder, key)))
                else:
                    waiting += reversed(parts)

    def _add(self, name: str, place: Place) -> None:
        count = self._named[name] = self._named.get(name, 0) + 1  # functions of one name may have the same arguments
        self.places[name if count == 1 else f"{name} ({count})"] = place

    def again(self) -> Reached:
        """The values reached from the same roots now."""
        return self._anew(self._copied)

    def changed(self) -> list[str]:
        """Names of values that have changed."""
        return self.differing(self._anew(lambda _: False))

    def _anew(self, copied: Callable[[Tensor], bool]) -> Reached:
        return Reached([_now(root) for root in self._roots], copied, self._functions)

    def differing(self, now: Reached) -> list[str]:
        """Names of values that differ, or exist on one side only."""
        names = dict.fromkeys([*self.places, *now.places])
        return [
            name
            for name in names
            if (name in self.places) != (name in now.places)
            or not same(self.places[name].value, now.places[name].value)
        ]

    def restore(self) -> None:
        """Restores what changed and touches nothing else, because another thread may run the model."""
        for _, holder, key, value in self._roots:
            if isinstance(holder, dict) and holder.get(key) is not value:
                holder[key] = value
        for content in self.contents:
            _refill(content.container, content.held)
        with torch.no_grad():
            for tensor, copy, storage in self._copies.values():
                if isinstance(tensor, nn.Parameter) and storage.data_ptr() != tensor.data_ptr():
                    tensor.data = storage
                if not same(copy, tensor):
                    tensor.copy_(copy)
        for place in self.places.values():
            if isinstance(place.value, _Drawing):
                place.value.restore()
            elif not isinstance(place.holder, (dict, list, deque, Tensor)) and not place.holds():
                place.put(place.value)

    def _copy(self, tensor: Any) -> Any:
        if isinstance(tensor, np.ndarray):
            return tensor.copy()
        if not self._copied(tensor):
            return tensor
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = tensor, tensor.detach().clone(), tensor.detach()
        return self._copies[id(tensor)][1]

    def _parts(self, name: str, value: Any) -> list[Root] | None:
        """The parts of a value; None if the search does not go into it."""
        if isinstance(value, (torch.jit.ScriptModule, LazyModuleMixin)):
            return []
        if isinstance(value, (dict, list, deque, set)):
            self.contents.append(Content(name, value, _kind(value)(value)))
        if isinstance(value, (dict, list, deque, tuple)) and len(value) > MOST_OF_ONE:
            return None
        if isinstance(value, dict):
            return [Root(f"{name}[{_key(k, n)}]", value, k, v) for n, (k, v) in enumerate(list(value.items()))]
        if isinstance(value, (list, deque, tuple)):
            holder = None if isinstance(value, tuple) else value
            return [Root(f"{name}[{n}]", holder, n, v) for n, v in enumerate(value)]
        if isinstance(value, _FUNCTIONS) and not self._functions:
            return None
        if isinstance(value, types.MethodType):
            return [Root(name, None, None, value.__self__), Root(f"{name}()", None, None, value.__func__)]
        if isinstance(value, functools.partial):
            parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
            return [Root(f"{name}.{key}", None, None, part) for key, part in parts.items()]
        if isinstance(value, types.FunctionType):
            self.contents.append(Content(f"{name}()", value.__dict__, value.__dict__.copy()))
            return _parts_of_function(name, value)
        if isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            return [] if frame is None else _named(f"{name}()", None, {"": frame.f_lasti, **frame.f_locals})
        if isinstance(value, type):
            return _parts_of_class(name, value)
        kind: Any = type(value)
        if not isinstance(value, nn.Module) and not _is_of_users(kind):
            return None
        return self._parts_of_object(name, value, kind)

    def _parts_of_object(self, name: str, value: Any, kind: Any) -> list[Root]:
        attributes = getattr(value, "__dict__", {})
        parts = []
        if isinstance(attributes, dict):
            self.contents.append(Content(name, attributes, attributes.copy()))
            if isinstance(value, nn.Module):
                self._near |= {id(attributes), *map(id, attributes.values())}
            for key, part in list(attributes.items()):  # another thread may write
                if key in _OF_MODULES and isinstance(value, nn.Module) and isinstance(part, dict):
                    self.contents.append(Content(_joined(name, key), part, part.copy()))
                    parts += _named(name, part, part)
                elif isinstance(part, (dict, list)) and not part:  # hooks, of which a module has ten dicts
                    self.contents.append(Content(_joined(name, key), part, part.copy()))
                else:
                    parts += _named(name, attributes, {key: part})
        for key in _slots(kind):
            with suppress(AttributeError):  # nothing there yet
                parts.append(Root(f"{name}.{key}", value, key, getattr(value, key)))
        for cls in filter(_is_of_users, kind.__mro__):
            own = {part.name for part in parts}
            parts += [part for part in _parts_of_class(name, cls) if part.name not in own]
        return parts


def _named(name: str, holder: Any, values: dict[str, Any]) -> list[Root]:
    return [Root(_joined(name, key), holder, key, value) for key, value in values.items()]


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _parts_of_function(name: str, function: types.FunctionType) -> list[Root]:
    if is_library(function.__code__.co_filename) or is_standard(function.__code__.co_filename):
        return []
    parts = _named(f"{name}()", function.__dict__, function.__dict__)
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):  # an empty one
            parts.append(Root(f"{name}().{key}", cell, "cell_contents", cell.cell_contents))
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    by_name = {**dict(zip(names, defaults, strict=True)), **(function.__kwdefaults__ or {})}
    return parts + _named(f"{name}()", None, by_name)


def _parts_of_class(name: str, cls: type) -> list[Root]:
    """The attributes of a user class, except functions, Python's own, and those that a property of its class hides."""
    if not _is_of_users(cls):
        return []
    return [
        part
        for part in _named(name, cls, dict(vars(cls)))
        if not (part.key.startswith("__") or callable(part.value) or inspect.isdatadescriptor(part.value))
        and not isinstance(part.value, (classmethod, staticmethod))
        and not inspect.isdatadescriptor(getattr(type(cls), part.key, None))
    ]


@functools.lru_cache(maxsize=4096)
def _slots(cls: type) -> list[str]:
    held = [(key, value) for c in cls.__mro__ if _is_of_users(c) for key, value in vars(c).items()]
    return [key for key, value in held if isinstance(value, types.MemberDescriptorType) and not key.startswith("__")]


@functools.lru_cache(maxsize=4096)
def _is_of_users(cls: type) -> bool:
    """Whether a class is not torch's, NumPy's, svexport's or Python's; plain namespaces count as the user's."""
    if issubclass(cls, types.SimpleNamespace):
        return True
    root = cls.__module__.partition(".")[0]
    if root in {"builtins", "numpy"} or (root in sys.stdlib_module_names and root != "__main__"):
        return False
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return file is None or not is_library(file)


class _Drawing(NamedTuple):
    """The state of a source of random numbers, which decides what it draws next."""

    state: Any
    set: Callable[[Any], Any]

    def restore(self) -> None:
        self.set(self.state)


def _position(value: Any, holder: Any, key: Any) -> tuple[Any, Any, Any]:
    """The value, holder and key of a place that is compared as a whole."""
    if isinstance(value, (set, frozenset)):
        return frozenset(value), None, None
    if isinstance(value, random.Random):
        return _Drawing(value.getstate(), value.setstate), None, None
    if isinstance(value, np.random.RandomState):
        return _Drawing(value.get_state(), value.set_state), None, None
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return _Drawing(bits.state, functools.partial(setattr, bits, "state")), None, None
    if isinstance(value, torch.Generator):
        return _Drawing(value.get_state(), value.set_state), None, None
    if isinstance(value, itertools.count):
        return repr(value), None, None
    if isinstance(value, (dict, list, deque, tuple)):
        return len(value), None, None
    if isinstance(value, Iterator) and hasattr(value, "__length_hint__"):
        return value.__length_hint__(), None, None
    return value, holder, key


def _key(key: Any, number: int) -> str:
    return repr(key) if isinstance(key, _PLAIN) else f"{type(key).__name__} {number}"


def _items(container: Any) -> list[Any]:
    return [part for item in container.items() for part in item] if isinstance(container, dict) else list(container)


def bytes_of(array: Tensor | np.ndarray) -> int:
    """Bytes of the elements; for a sparse tensor those of a dense tensor of its shape."""
    return array.nbytes if isinstance(array, np.ndarray) else array.numel() * array.element_size()


def _refill(container: Any, content: Any) -> None:
    if [*map(id, _items(container))] == [*map(id, _items(content))]:
        return
    kind: Any = _kind(container)
    if issubclass(kind, dict):
        for key in container.keys() - content.keys():
            kind.__delitem__(container, key)
        if list(container) != [key for key in content if key in container]:  # kept where another thread may look
            kind.clear(container)
        kind.update(container, content)
    else:
        kind.clear(container)
        (kind.update if kind is set else kind.extend)(container, content)


def _kind(container: Any) -> type:
    """Python's own class of a container: methods of a user's subclass may take other arguments, or refuse changes."""
    return next(kind for kind in (OrderedDict, dict, list, deque, set) if isinstance(container, kind))


def same(before: Any, after: Any) -> bool:
    """Whether two values are equal; two NaNs are."""
    if before is after:
        return True
    try:
        if isinstance(before, _Drawing):
            return isinstance(after, _Drawing) and same(before.state, after.state)
        if isinstance(before, tuple) and isinstance(after, tuple):
            return len(before) == len(after) and all(map(same, before, after))
        if isinstance(before, dict) and isinstance(after, dict):
            return before.keys() == after.keys() and all(same(before[key], after[key]) for key in before)
        if isinstance(before, np.ndarray):
            return bool(np.array_equal(before, after, equal_nan=before.dtype.kind in "fc"))
        if not isinstance(before, Tensor) or not isinstance(after, Tensor):
            return type(before) is type(after) and bool(before == after or (before != before and after != after))
        alike = before.shape == after.shape and before.dtype == after.dtype and before.device == after.device
        if not alike or before.is_meta:
            return alike
        if before.layout is not torch.strided:
            before, after = before.to_dense(), after.to_dense()
        return torch.equal(before, after) or torch.equal(before.nan_to_num(), after.nan_to_num())
    except Exception:  # noqa: BLE001 - quantized tensors, say, which have no single answer
        return False


@contextmanager
def roots_of_users() -> Iterator[list[Root]]:
    """Collects what user functions called inside the context hold besides their tensors: arguments and their defaults,
    closure variables, and the globals that they name."""
    roots: list[Root] = []

    def look(frame: types.FrameType) -> None:
        code, known = frame.f_code, frame.f_globals
        for key, value in frame.f_locals.items():
            if not isinstance(value, (Tensor, nn.Module, *_PLAIN)):
                roots.append(Root(f"{code.co_name}().{key}", None, None, value))
        for key in code.co_names:
            value = known.get(key)
            if isinstance(value, types.ModuleType):
                file = getattr(value, "__file__", None) or "<"
                if not (is_library(file) or is_standard(file)):
                    held = vars(value)
                    roots.extend(Root(f"global {key}.{k}", held, k, held[k]) for k in code.co_names if k in held)
            elif key in known:
                roots.append(Root(f"global {key}", known, key, value))

    with calls_of_users(look):
        yield roots


def _now(root: Root) -> Root:
    return root._replace(value=root.holder.get(root.key)) if isinstance(root.holder, dict) else root
