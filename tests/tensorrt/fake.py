"""A TensorRT that computes nothing, made from the real bindings: a call of a member that they lack, or with a wrong
number of arguments, fails. So code that builds and runs engines is executed, except for values, without TensorRT.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["Fake"]


class Fake:
    """The module ``trt`` with :class:`Instance` for its objects.

    Args:
        answers: what ``Class.member`` gives: a value, or a function of the arguments of a method.
    """

    def __init__(self, trt: Any, answers: Mapping[str, Any]) -> None:
        self._trt, self._answers = trt, answers
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._trt, name)
        return Class(self, member) if isinstance(member, type) and not hasattr(member, "__members__") else member


class Class:
    def __init__(self, fake: Fake, cls: type) -> None:
        self._fake, self._cls = fake, cls

    def __call__(self, *args: Any) -> Any:
        _check(self._cls, "__init__", args)
        return Instance(self._fake, self._cls)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cls, name)


class Instance:
    def __init__(self, fake: Fake, cls: type) -> None:
        self._fake, self._cls = fake, cls

    def __getattr__(self, name: str) -> Any:
        key = f"{self._cls.__name__}.{name}"
        answers = self._fake._answers
        if isinstance(getattr(self._cls, name), property):
            return answers[key]

        def call(*args: Any) -> Any:
            returned = _check(self._cls, name, args)
            self._fake.called.append(key)
            if key in answers:
                return answers[key](*args) if callable(answers[key]) else answers[key]
            trt = self._fake._trt
            cls = getattr(trt, returned, getattr(trt, returned[1:], None))  # IParserError is bound as ParserError
            return Instance(self._fake, cls) if isinstance(cls, type) else returned == "bool"

        return call


def _check(cls: type, name: str, args: tuple) -> str:
    """The type that a method returns, by its documentation; fails if no overload takes so many arguments."""
    signatures = re.findall(rf"^\s*(?:\d+\. )?{name}\((.*)\) -> (\S+)", getattr(cls, name).__doc__, re.MULTILINE)
    assert signatures, f"{cls.__name__}.{name} says nothing of its arguments"
    for parameters, returned in signatures:
        depth = re.sub(r"\[[^\[\]]*\]|\([^()]*\)", "", parameters)  # commas of types and defaults
        given = [p for p in depth.split(",") if p.strip() and not p.strip().startswith("self")]
        if len([p for p in given if "=" not in p]) <= len(args) <= len(given):
            return re.split(r"\.|::", returned)[-1]
    raise TypeError(f"{cls.__name__}.{name} takes ({'), ('.join(p for p, _ in signatures)}), got {len(args)} arguments")
