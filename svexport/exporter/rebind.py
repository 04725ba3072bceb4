"""Copies functions and classes, with names in them bound to svexport's ops.

The functions that a model's forward reaches find others by names: globals (``F.grid_sample``, ``project``), closure
variables, defaults, attributes of their module. A copy of a function differs only in its code object: instructions that
load such a name load another one, which is added to the globals of the function's module and holds the op, or the copy
of the called function. This changes less than a copy of the text would. Lines, closures and globals stay, so
tracebacks, ``global`` and later changes of other names work as before, and a call costs the same.
"""

from __future__ import annotations

import functools
import sys
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from svexport.exporter import bytecode
from svexport.exporter.bytecode import Use
from svexport.exporter.functions import FUNCTIONS, whole
from svexport.tracing.source import is_library, shown_line

__all__ = ["Binder", "Key", "Plan", "bind_functions", "binder", "key_of", "objects", "unnamed"]

Key = tuple[str, str]
"""A function by its module and qualified name, for another process to find."""

_NAMES = {id(function.theirs): name for name, function in FUNCTIONS.items()}  # not everything that is called hashes


def key_of(code: CodeType, names: dict[str, Any]) -> Key:
    """The key of a code object with these globals; before Python 3.11 only its name."""
    return str(names.get("__name__")), getattr(code, "co_qualname", code.co_name)


@dataclass(frozen=True)
class Plan:
    """What is bound. Plain data, from which another process makes the same copies.

    Attributes:
        calls: functions and the names in :data:`FUNCTIONS` of what is an op where they call it. None: everything.
        wholes: functions that are an op as a whole. None: all that :func:`whole` knows.
        reached: functions to look into. None: those of the model's own methods and of what these call, outside torch.
        skipped: names in :data:`FUNCTIONS`, and of whole functions, that stay as they are.
        faulty: names in :data:`FUNCTIONS` that are no op somewhere, and so none where nobody knows who calls them.
        token: of its own for each plan: what names refer to may be another thing the next time.
    """

    calls: frozenset[tuple[Key, str]] | None = None
    wholes: frozenset[Key] | None = None
    reached: frozenset[Key] | None = None
    skipped: frozenset[str] = frozenset()
    faulty: frozenset[str] = frozenset()
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __deepcopy__(self, memo: Any) -> Plan:
        return self

    def __or__(self, other: Plan) -> Plan:
        """A plan with the bindings of both."""

        def either(name: str) -> Any:
            parts = getattr(self, name), getattr(other, name)
            return None if None in parts else parts[0] | parts[1]

        skipped, faulty = self.skipped & other.skipped, self.faulty | other.faulty
        return Plan(either("calls"), either("wholes"), either("reached"), skipped, faulty)

    def binds(self, name: str, key: Key | None) -> bool:
        """Whether a function of :data:`FUNCTIONS` is an op where ``key`` calls it; None is no place in particular."""
        if name in self.skipped:
            return False
        if self.calls is None:
            return True
        if key is None:
            return name not in self.faulty and any(call[1] == name for call in self.calls)
        return (key, name) in self.calls

    def whole(self, function: FunctionType) -> tuple[Callable[..., Any], str] | None:
        """A function with its branches put together, and its source; None where it stays as it is."""
        found = whole(function.__code__)
        if found is None or function.__code__.co_name in self.skipped:
            return None
        key = key_of(function.__code__, function.__globals__)
        return found if self.wholes is None or key in self.wholes else None

    def looks_into(self, code: CodeType, names: dict[str, Any]) -> bool:
        """Whether code, or what it calls by these names, has something to bind anew."""
        if unnamed(code, names):
            return False
        if self.reached is None:
            return code.co_filename.startswith("<") or not is_library(code.co_filename)
        return key_of(code, names) in self.reached


def unnamed(code: CodeType, names: dict[str, Any]) -> bool:
    """Whether code was executed from text in globals of no module: nothing finds it there again."""
    module = sys.modules.get(str(names.get("__name__")))
    return code.co_filename.startswith("<") and (module is None or vars(module) is not names)


# ------------------------------------------------------------------ copies


class Binder:
    """Makes the copies of one plan, each function's once.

    Attributes:
        refused: functions that could not be copied, and why.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.refused: dict[Key, str] = {}
        self._notes: dict[FunctionType, list[tuple[str, str]]] = {}
        self._called: dict[FunctionType, list[Any]] = {}
        self._copies: dict[FunctionType, FunctionType] = {}
        self._looked: set[FunctionType] = set()

    def __call__(self, value: Any, key: Key | None = None) -> Any:
        """What is to be in the place of a value: a copy that calls ops, or the value itself.

        Args:
            value: anything.
            key: of the function that refers to it.
        """
        if isinstance(value, property):
            getter = self(value.fget, key)
            return value if getter is value.fget else property(getter, value.fset, value.fdel, value.__doc__)
        inner = _inner(value)
        new = self._function(inner, key)
        if new is inner:
            return value
        return _around(value, new)

    def _function(self, function: Any, key: Key | None) -> Any:
        if (name := _NAMES.get(id(function))) is not None:
            return FUNCTIONS[name].ours if self.plan.binds(name, key) else function
        if not isinstance(function, FunctionType):
            return function
        if found := self.plan.whole(function):
            return found[0]
        self._look(function)
        return self._copies.get(function, function)

    def notes(self, values: Iterable[Any]) -> list[tuple[str, str]]:
        """The ops in copies and in functions they call: names (:data:`FUNCTIONS` or whole functions) and lines."""
        found: dict[tuple[str, str], None] = {}
        seen: set[Any] = set()
        pending = list(values)[::-1]
        while pending:
            value = pending.pop()
            copy = _inner(value.fget if isinstance(value, property) else value)
            if isinstance(copy, FunctionType) and copy not in seen:
                seen.add(copy)
                found.update(dict.fromkeys(self._notes.get(copy, ())))
                pending += self._called.get(copy, ())
        return list(found)

    def _is_op(self, value: Any, key: Key) -> bool:
        """Whether an op takes the place of a value, or of a method that is called."""
        if isinstance(value, Use):
            return self.plan.binds(value.value, key)
        inner = _inner(value)
        if (name := _NAMES.get(id(inner))) is not None:
            return self.plan.binds(name, key)
        return isinstance(inner, FunctionType) and self.plan.whole(inner) is not None

    def _look(self, function: FunctionType) -> None:
        """Copies a function, and those it refers to, as far as an op is reached."""
        graph: dict[FunctionType, list[tuple[Any, Key]]] = {}
        pending = [function]
        while pending:
            current = pending.pop()
            if current not in graph and current not in self._looked:
                graph[current] = list(self._references(current))
                inner = (_inner(value) for value, _ in graph[current])
                pending += [f for f in inner if isinstance(f, FunctionType) and not self.plan.whole(f)]
        self._looked.update(graph)
        changed = {f for f, values in graph.items() if any(self._is_op(*value) for value in values)}

        def calls_changed(values: list[tuple[Any, Key]]) -> bool:
            inner = [f for v, _ in values if isinstance(f := _inner(v), FunctionType)]
            return not changed.isdisjoint(inner) or not self._copies.keys().isdisjoint(inner)

        while more := {f for f, values in graph.items() if f not in changed and calls_changed(values)}:
            changed |= more
        # First all of them, then what they refer to: functions may call each other.
        fills = {}
        for original in graph:
            if original in changed:
                self._copies[original], fills[original] = self._copy(original, changed)
        for original, fill in fills.items():
            if not fill():
                key = key_of(original.__code__, original.__globals__)
                self.refused[key] = "its code has no room to load another name"

    def _references(self, function: FunctionType) -> Iterator[tuple[Any, Key]]:
        """The values that a function refers to, and by which of the functions in it."""
        key = key_of(function.__code__, function.__globals__)
        if self.plan.looks_into(function.__code__, function.__globals__):
            for use in bytecode.uses(function):
                yield (use if use.method else use.value), key_of(use.code, function.__globals__)
            for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
                yield value, key
        elif self.plan.reached is not None:
            return
        # Also of torch's decorators.
        for cell in function.__closure__ or ():
            content = _content(cell)
            for value in (v for _, v in _taken(function, content)) if isinstance(content, ModuleType) else (content,):
                yield value, key

    def _copy(self, function: FunctionType, changed: set[FunctionType]) -> tuple[FunctionType, Callable[[], bool]]:
        """A copy, and what gives it its references once all copies are there; false where that is not possible."""
        key = key_of(function.__code__, function.__globals__)

        def changes(value: Any) -> bool:
            if isinstance(value, ModuleType):
                return any(changes(attribute) for _, attribute in _taken(function, value))
            inner = _inner(value)
            copies = isinstance(inner, FunctionType) and (inner in changed or inner in self._copies)
            return copies or self._is_op(value, key)

        cells = function.__closure__ and tuple(
            CellType() if changes(_content(cell)) else cell for cell in function.__closure__
        )
        new = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
        for name in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(function, name):
                setattr(new, name, getattr(function, name))
        vars(new).update(vars(function), _svexport_original=function)
        notes, called = self._notes.setdefault(new, []), self._called.setdefault(new, [])

        def fill() -> bool:
            new.__defaults__ = function.__defaults__ and tuple(self(value, key) for value in function.__defaults__)
            keywords = function.__kwdefaults__
            new.__kwdefaults__ = keywords and {name: self(value, key) for name, value in keywords.items()}
            for cell, old in zip(cells or (), function.__closure__ or (), strict=True):
                if cell is not old:
                    cell.cell_contents = self._content(function, _content(old), key)
                    called.append(cell.cell_contents)
            uses: dict[CodeType, list[tuple[Use, str]]] = {}
            done: set[tuple[CodeType, int]] = set()
            looked = self.plan.looks_into(function.__code__, function.__globals__)
            for use in bytecode.uses(function) if looked else ():
                inner = key_of(use.code, function.__globals__)
                if use.method:
                    value = FUNCTIONS[use.value].ours if self.plan.binds(use.value, inner) else use.value
                else:
                    value = self(use.value, inner)
                if value is not use.value and (use.code, use.offset) not in done:
                    done.add((use.code, use.offset))
                    name = bytecode.inject(function.__globals__, use.names, value)
                    uses.setdefault(use.code, []).append((use, name))
                    called.append(value)
                    notes.extend(self._note(use))
            code = bytecode.rewritten(function.__code__, uses)
            if code is not None:
                new.__code__ = code
            return code is not None

        return new, fill

    def _content(self, function: FunctionType, content: Any, key: Key) -> Any:
        """The closure value for a function's copy; for a module, one with ops for the names that the function uses."""
        if not isinstance(content, ModuleType):
            return self(content, key)
        space = ModuleType(content.__name__)
        vars(space).update(vars(content))
        vars(space).update({name: self(value, key) for name, value in _taken(function, content)})
        return space

    def _note(self, use: Use) -> Iterator[tuple[str, str]]:
        inner = use.value if use.method else _inner(use.value)
        name = inner if use.method else _NAMES.get(id(inner))
        if name is None and self.plan.whole(inner):
            name = ".".join(key_of(inner.__code__, inner.__globals__))
        if name is not None:
            yield name, shown_line(use.code.co_filename, use.line, use.code.co_name)


def _inner(value: Any) -> Any:
    """The function in a method, a partial, a static method."""
    while True:
        if isinstance(value, (MethodType, staticmethod, classmethod)):
            value = value.__func__
        elif type(value) is functools.partial:
            value = value.func
        else:
            return value


def _around(value: Any, function: Any) -> Any:
    """A value with another function in it."""
    if isinstance(value, MethodType):
        return MethodType(_around(value.__func__, function), value.__self__)
    if isinstance(value, (staticmethod, classmethod)):
        return type(value)(_around(value.__func__, function))
    if type(value) is functools.partial:
        return functools.partial(_around(value.func, function), *value.args, **value.keywords)
    return function


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _taken(function: FunctionType, module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The names that a function uses from a module in its closure."""
    mine = {
        name
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        if _content(cell) is module
    }
    for code in bytecode.codes(function.__code__):
        for (root, *attributes), _ in bytecode.loads(code):
            if root.argval in mine and root.opname == "LOAD_DEREF" and attributes:
                value = bytecode.attribute_of(module, attributes[0].argval)
                if value is not None:
                    yield attributes[0].argval, value


# ------------------------------------------------------------------ classes and objects


@functools.lru_cache(maxsize=64)
def binder(plan: Plan) -> Binder:
    """One binder per plan, so that copies of a copy of a model are the same."""
    return Binder(plan)


class _Bound:
    """Mixin of the class of an object whose methods are copies."""

    _svexport_base: type
    _svexport_plan: Plan

    def __init_subclass__(cls, **_: Any) -> None:
        """Keeps the class from those who collect the subclasses of its base."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles by the class it was made from: its own is no attribute of a module, where pickle could find it."""
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple):
            return reduced
        function, args, *rest = reduced
        args = tuple(self._svexport_base if arg is type(self) else arg for arg in args)
        if rest and isinstance(rest[0], dict):
            rest[0] = {**rest[0], **_changes(rest[0], _original)}
        return _rebound, (self._svexport_plan, function, args), *rest

    def __setstate__(self, state: Any) -> None:
        set_state = getattr(super(), "__setstate__", None)
        if set_state is not None:
            set_state(state)
        else:
            attributes, slots = state if isinstance(state, tuple) else (state, None)
            vars(self).update(attributes or {})
            for name, value in (slots or {}).items():
                setattr(self, name, value)
        vars(self).update(_changes(vars(self), binder(self._svexport_plan)))


def _rebound(plan: Plan, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    value = function(*args)
    value.__class__ = _bound_class(type(value), plan)  # type: ignore[arg-type]
    return value


def _overrides(base: type, plan: Plan) -> dict[type, dict[str, Any]]:
    """The attributes of a class and its bases that are to be others."""
    bind, found = binder(plan), {}
    for owner in base.__mro__:
        if owner not in (nn.Module, object):
            new = {name: other for name, v in vars(owner).items() if (other := bind(v)) is not v}
            if new:
                found[owner] = new
    return found


@functools.lru_cache(maxsize=1024)
def _bound_class(base: type, plan: Plan) -> type:
    """A class like ``base`` with the functions of ``plan`` bound; what its bases define is between it and them."""
    overrides = _overrides(base, plan)
    names = {
        **overrides.pop(base, {}),
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_svexport_base": base,
        "_svexport_plan": plan,
    }
    # So super() in a method of the class finds the copy of the method it is about.
    between = [
        type(owner)(owner.__name__, (owner,), {**new, "__module__": owner.__module__})
        for owner, new in overrides.items()
    ]
    return type(base)(base.__name__, (_Bound, base, *between), names)


def _changes(attributes: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The attributes of an object that are other ones in the place of functions, those of its hooks too."""
    found: dict[str, Any] = {}
    for name, value in attributes.items():
        if name.endswith("_hooks") and type(value) in (dict, OrderedDict):
            new = type(value)((key, change(hook)) for key, hook in value.items())
            if any(new[key] is not hook for key, hook in value.items()):
                found[name] = new
        elif (other := change(value)) is not value:
            found[name] = other
    return found


def _original(value: Any) -> Any:
    inner = _inner(value)
    original = vars(inner).get("_svexport_original") if isinstance(inner, FunctionType) else None
    return value if original is None else _around(value, original)


def _bind_object(value: Any, plan: Plan) -> list[Any]:
    """Binds what an object has itself; returns the copies."""
    base = type(value)
    changes, overrides = _changes(vars(value), binder(plan)), _overrides(base, plan)
    if not changes and not overrides:
        return []
    if issubclass(base, _Bound):  # a copy's copy
        base, plan = base._svexport_base, base._svexport_plan | plan
        vars(value).update(_changes(vars(value), _original))
        changes, overrides = _changes(vars(value), binder(plan)), _overrides(base, plan)
    value.__class__ = _bound_class(base, plan)  # type: ignore[arg-type]
    vars(value).update(changes)
    hooks = [hook for new in changes.values() if isinstance(new, dict) for hook in new.values()]
    return [*changes.values(), *hooks, *(new for names in overrides.values() for new in names.values())]


def objects(model: nn.Module) -> Iterator[Any]:
    """The modules of a model, and the objects that they hold which have attributes and may have methods that sample."""
    seen: set[int] = set()
    pending: list[Any] = list(model.modules())
    while pending:
        value = pending.pop()
        if id(value) in seen or isinstance(value, (Tensor, type, ModuleType, FunctionType, MethodType)):
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, (list, tuple)):
            pending += value
        elif isinstance(getattr(value, "__dict__", None), dict):
            pending += vars(value).values()
            yield value


def bind_functions(model: nn.Module, plan: Plan, shared: set[int]) -> list[Any]:
    """Binds the functions of a plan in a model and in what it holds, but not in objects that others hold too.

    Args:
        model: changed in place.
        shared: ids of those objects.

    Returns:
        The copies of functions.
    """
    copies = []
    for value in list(objects(model)):
        if id(value) not in shared and not isinstance(value, torch.jit.ScriptModule):
            with suppress(TypeError):  # a class that cannot be assigned
                copies += _bind_object(value, plan)
    return copies
