"""Notices, while a forward is recorded, what it does besides calling functions of torch."""

from __future__ import annotations

import builtins
import dis
import functools
import os
import random
from collections import Counter, OrderedDict, defaultdict, deque
from types import CodeType, FrameType
from typing import Any

import torch

from svexport.tracing.source import is_library

__all__ = ["Guard", "NotTraced"]


class NotTraced(Exception):
    """A forward cannot be recorded, and stays as its author wrote it."""


# These decide or compute something that the graph would not hold.
_CONTEXTS = {
    f.__code__: name
    for f, name in (
        *((c.__enter__, f"torch.{c.__name__}") for c in (torch.no_grad, torch.enable_grad, torch.inference_mode)),
        (torch.set_grad_enabled.__init__, "torch.set_grad_enabled"),
        (torch.autocast.__enter__, "torch.autocast"),
        (torch.autograd.Function.apply.__func__, "torch.autograd.Function"),  # type: ignore[attr-defined]
    )
}
_CALLS: dict[Any, str] = {
    torch.is_grad_enabled: "torch.is_grad_enabled",
    torch.is_inference_mode_enabled: "torch.is_inference_mode_enabled",
    torch.is_autocast_enabled: "torch.is_autocast_enabled",
    builtins.print: "print",
    builtins.open: "open",
    builtins.input: "input",
}


class Guard:
    """Profiler that notices what a graph cannot hold while a forward is recorded.

    Attributes:
        found: what it noticed, in words; empty if nothing.
        asleep: whether it is off.
        asks_whether_compiling: whether the author's code called ``torch.compiler.is_compiling``.
    """

    def __init__(self) -> None:
        self.found = ""
        self.asks_whether_compiling = False
        self.asleep = False

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        """Called by ``sys.setprofile`` on every call and return."""
        if self.asleep or self.found:
            return
        if event == "call":
            name = _CONTEXTS.get(frame.f_code, "")
            caller = frame.f_back.f_code.co_filename if frame.f_back else ""
            if frame.f_code is torch.compiler.is_compiling.__code__:
                self.asks_whether_compiling |= not is_library(caller)
            elif name:
                self.found = name
            elif _is_authors(frame.f_code) and _assigns_outside(frame.f_code):
                self.found = "a variable that it assigns outside of itself"
        elif event == "c_call":
            owner = getattr(value, "__self__", None)
            fills = type(owner) in _CONTAINERS and value.__name__ in _FILLS and _is_authors(frame.f_code)
            if fills and _is_outside(owner, frame):
                self.found = "a container that it fills outside of itself"
            elif isinstance(owner, random.Random) or type(owner).__module__.startswith("numpy.random"):
                self.found = "random numbers"
            elif getattr(value, "__module__", None) == "time":
                self.found = "the time"
            else:
                try:
                    self.found = _CALLS.get(value, "")
                except TypeError:  # not hashable
                    self.found = ""


_CONTAINERS = {list, dict, set, OrderedDict, Counter, defaultdict, deque}
_FILLS = {"append", "extend", "insert", "update", "setdefault", "add"}
_FILLS |= {"pop", "popleft", "appendleft", "clear", "remove"}


_STANDARD = os.path.dirname(os.__file__) + os.sep


def _is_authors(code: CodeType) -> bool:
    """Whether code belongs to the model's author, not to torch, svexport or Python."""
    path = code.co_filename
    return not is_library(path) and (not path.startswith(_STANDARD) or "site-packages" in path)


def _is_outside(container: Any, frame: FrameType) -> bool:
    """Whether a container comes from a function's globals, or from an enclosing function."""
    around = [frame.f_locals.get(name) for name in frame.f_code.co_freevars]
    return any(container is value for value in (*around, *frame.f_globals.values()))


@functools.lru_cache(maxsize=4096)
def _assigns_outside(code: CodeType) -> bool:
    """Whether code assigns a global, or a variable of an enclosing function."""
    return any(
        i.opname == "STORE_GLOBAL" or (i.opname == "STORE_DEREF" and i.argval in code.co_freevars)
        for i in dis.get_instructions(code)
    )
