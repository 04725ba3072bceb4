"""Classes that have exactly the members that the bindings of a version have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.tensorrt.reference import Reference

API: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("api.json").read_text())


class Subclassed:
    """A class that Python implements: TensorRT takes it only if its own constructor was called."""

    _ready = False

    def __init__(self) -> None:
        self._ready = True


def enumeration(name: str, members: Sequence[str]) -> Any:
    class Member(int):
        def __repr__(self) -> str:
            return f"{name}.{members[self]}"

        __str__ = __repr__

        @property
        def name(self) -> str:
            return members[self]

    made = SimpleNamespace(**{member: Member(i) for i, member in enumerate(members)})
    made.__name__ = name
    return made


class Object:
    """What the version's bindings have of a class; everything else is private to these tests."""

    _class: str
    _members: dict[str, list[str]]
    _trt: Reference

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_"):
            return object.__getattribute__(self, name)
        members = self._members
        if name not in members:
            raise AttributeError(
                f"{self._class!r} object of TensorRT {self._trt.__version__} has no attribute {name!r}"
            )
        try:
            value = object.__getattribute__(self, name)
        except AttributeError:
            if members[name]:
                raise NotImplementedError(f"{self._class}.{name} is not in the reference") from None
            value = None  # a property that nobody has set
        return partial(called, value, f"{self._class}.{name}", members[name]) if members[name] else value

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and (name not in self._members or self._members[name]):
            raise AttributeError(f"{self._class!r} object of TensorRT {self._trt.__version__} has no {name!r} to set")
        object.__setattr__(self, name, value)


def called(method: Any, name: str, signatures: Sequence[str], *args: Any, **kwargs: Any) -> Any:
    for signature in signatures:
        parameters = [p for p in signature.split(",") if p]
        names = [p.rstrip("=") for p in parameters]
        required = [p for p in parameters[len(args) :] if not p.endswith("=")]
        if len(args) <= len(names) and set(required) <= set(kwargs) <= set(names[len(args) :]):
            return method(*args, **kwargs)
    raise TypeError(f"{name} takes ({'), ('.join(signatures)}), got {len(args)} arguments and {sorted(kwargs)}")


def made(trt: Reference, name: str, cls: type, *args: Any, **kwargs: Any) -> Any:
    made = object.__new__(cls)
    object.__setattr__(made, "_class", name)
    object.__setattr__(made, "_trt", trt)
    object.__setattr__(made, "_members", trt._api[name])
    made._init(*args, **kwargs)
    return made


def say(logger: Any, severity: str, text: str) -> None:
    assert logger._ready, "TypeError: __init__() must be called when overriding __init__"
    logger.log(severity, text)


def numbers(version: str) -> list[int]:
    """The four numbers of a version."""
    return [*(int(part) for part in version.split(".")), 0, 0][:4]
