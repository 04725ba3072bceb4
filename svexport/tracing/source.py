"""Finds the line of the user's source that a traced operator came from."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import linecache
import math
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from svexport.tracing.swapped import swapped

__all__ = [
    *("around", "asks_for_export", "caller", "calls_of_users", "definition", "is_library", "is_own", "is_standard"),
    *("lines_of_helpers", "near", "numbers_of_users", "raising_line", "shown_line", "shown_path", "user_frame"),
    "user_line",
]

# "path(12): forward" in traced graphs; 'File "path", line 12, in forward' in torch.export and scripted code.
_FRAME = re.compile(
    r'^\s*(?:File "(?P<file>[^"]+)", line (?P<no>\d+)(?:, in (?P<in>\S+))?'
    r"|(?P<path>.+?)\((?P<line>\d+)\): (?P<func>\S+))"
)
_PACKAGE = Path(__file__).parent.parent
_LIBRARIES = (str(Path(torch.__file__).parent) + os.sep, str(_PACKAGE) + os.sep)
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_MODES = {str(_PACKAGE / "exporter" / f"{name}.py") for name in ("coordinates", "precision", "typed")}
_EXAMPLES = str(_PACKAGE / "examples") + os.sep  # examples of an installed svexport count as user code


def is_library(path: str) -> bool:
    """Whether a source file belongs to torch or svexport, or is not a file."""
    return path.startswith(("<", *_LIBRARIES)) and not path.startswith(_EXAMPLES)


def is_standard(path: str) -> bool:
    """Whether a source file belongs to Python."""
    return path.startswith(_STANDARD) and "site-packages" not in path


def is_own(path: str) -> bool:
    """Whether a source file is one of svexport."""
    return path.startswith(_LIBRARIES[1]) and not path.startswith(_EXAMPLES)


def caller(frame: FrameType) -> FrameType:
    """The frame that calls a torch function, skipping frames of modes that compute it in another type."""
    while frame.f_code.co_filename in _MODES and frame.f_back is not None:
        frame = frame.f_back
    return frame


def user_frame(trace: str) -> str:
    """The innermost frame of a stack trace outside torch and svexport: ``model.py:12 in forward: z = einsum(...)``.

    Empty if the trace names none. Paths are written as by :func:`shown_path`.
    """
    frames = []
    innermost_first = True
    for line in trace.splitlines():
        match = _FRAME.match(line)
        if match is None:
            continue
        innermost_first = match["path"] is not None  # torch.export prints as Python does, innermost last
        frames.append((match["file"] or match["path"], int(match["no"] or match["line"]), match["in"] or match["func"]))
    for path, number, function in frames if innermost_first else reversed(frames):
        if is_library(path):
            continue
        return shown_line(path, number, function)
    return ""


def shown_line(path: str, number: int, function: str | None) -> str:
    """A source line as written in errors: ``model.py:12 in forward: z = einsum(...)``."""
    code = linecache.getline(path, number).strip()
    return f"{shown_path(path)}:{number}" + (f" in {function}" if function else "") + (f": {code}" if code else "")


def user_line(frame: FrameType | None, outside: CodeType) -> tuple[str, int, str] | None:
    """Arguments of :func:`shown_line` for the innermost user frame that is running, up to the frame of ``outside``."""
    while frame is not None and frame.f_code is not outside:
        code = frame.f_code
        if not is_library(code.co_filename):
            return code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back
    return None


class _FunctionsOfUsers:
    """Whether ``(path, name)`` is a function of the user's that the model calls. Installed packages are left out:
    their forward says more than their helpers, and so does the user's call."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], bool] = {}
        frame: FrameType | None = sys._getframe()
        while frame is not None:  # what calls the exporter is no part of the model
            self._known[frame.f_code.co_filename, frame.f_code.co_name] = False
            frame = frame.f_back

    def __contains__(self, function: tuple[str, str]) -> bool:
        if function not in self._known:
            path, _ = function
            self._known[function] = not (is_library(path) or is_standard(path) or "site-packages" in path)
        return self._known[function]


@contextmanager
def lines_of_helpers() -> Iterator[None]:
    """Has torch.export record frames of the user's functions beside those of ``forward``: the line of a node is where a
    helper calls torch then, not where forward calls the helper. A torch without such anchors records forward alone."""
    with swapped(torch.fx.proxy, _STACK_TRACE_ANCHORS=_FunctionsOfUsers()):
        yield


@contextmanager
def calls_of_users(look: Callable[[FrameType], None]) -> Iterator[None]:
    """Calls ``look`` with the frame of each user function, when it is first called inside the context."""
    seen: set[CodeType] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code in seen:
            return
        seen.add(code)
        if not (is_library(code.co_filename) or code.co_filename.startswith(_STANDARD)):
            look(frame)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextmanager
def numbers_of_users() -> Iterator[set[float]]:
    """Collects the numbers in user functions called inside the context, and in attributes of their modules. Values and
    sizes may be compared with these numbers, or divided by them."""
    numbers: set[float] = set()

    def look(frame: FrameType) -> None:
        code = frame.f_code
        held = [*code.co_consts, *map(frame.f_globals.get, code.co_names)]
        for value in [*held, *frame.f_locals.values()]:
            if isinstance(value, nn.Module):
                held += vars(value).values()
            elif isinstance(value, (dict, frozenset, list, set, tuple)) and len(value) <= MOST_HELD:
                held += value
        for value in held:
            if type(value) in (int, float) and math.isfinite(value):
                numbers.add(value)
            elif isinstance(value, str) and len(value) <= MOST_HELD:
                numbers.update(map(int, _WHOLE.findall(value)))

    with calls_of_users(look):
        yield numbers


_ASKS = {"is_compiling", "is_dynamo_compiling", "is_exporting", "is_in_onnx_export", "is_tracing"}


def asks_for_export(call: Callable[[], Any]) -> str:
    """The user's line that asks whether it is traced or exported, of all functions that a call runs; empty if there is
    none."""
    lines: list[str] = []

    def look(frame: FrameType) -> None:
        code, line = frame.f_code, frame.f_code.co_firstlineno
        if _ASKS.isdisjoint(code.co_names):
            return
        for instruction in dis.get_instructions(code):
            positions = getattr(instruction, "positions", None)
            line = (positions.lineno if positions else instruction.starts_line) or line
            if instruction.argval in _ASKS:
                lines.append(shown_line(code.co_filename, line, code.co_name))

    with suppress(Exception), calls_of_users(look):
        call()
    return next(iter(lines), "")


def around(numbers: Iterable[float]) -> list[float]:
    """The numbers, values slightly below and above each, and values between neighbours."""
    found = sorted(set(numbers))
    between = [(a + b) / 2 for a, b in itertools.pairwise(found)]
    return sorted({*(n + by for n in found for by in (-1, -0.25, 0, 0.25, 1)), *between}, key=abs)


def raising_line(error: BaseException) -> tuple[str, int, str] | None:
    """The line that raised an error by a statement, such as an assertion, or called ``torch._assert``; None for errors
    that Python or torch raised themselves."""
    trace = error.__traceback__
    frames = []
    while trace is not None:
        frames.append((trace.tb_frame.f_code, trace.tb_lasti, trace.tb_lineno))
        trace = trace.tb_next
    if not frames or frames[-1][0].co_code[frames[-1][1]] != dis.opmap["RAISE_VARARGS"]:
        return None
    code, _, number = frames[-2 if frames[-1][0] is torch._assert.__code__ and len(frames) > 1 else -1]
    return code.co_filename, number, code.co_name


def near(line: tuple[str, int, str], raising: tuple[str, int, str]) -> bool:
    """Whether a raising line belongs to the line that reads a value; the error's message may read more values."""
    return (line[0], line[2]) == (raising[0], raising[2]) and 0 <= raising[1] - line[1] <= 3


MOST_HELD = 64
"""Containers and texts with more elements are not searched for numbers."""

_WHOLE = re.compile(r"\b[1-9][0-9]{0,6}\b")


def definition(kind: type) -> str:
    """The place where a class is defined: ``model.py:12``, or its module if there is no source."""
    try:
        path, number = _start(kind)
    except (OSError, TypeError):
        return kind.__module__
    return f"{shown_path(path)}:{number}"


@functools.lru_cache(maxsize=64)  # Python parses the whole file for each class
def _start(kind: type) -> tuple[str, int]:
    return inspect.getsourcefile(kind) or "", inspect.getsourcelines(kind)[1]


def shown_path(path: str) -> str:
    """The path of a source file as written in reports and files, independent of where it is installed.

    It is relative to the working directory if the file is below it. Otherwise, and for installed packages, it is
    relative to the folder that contains the package: ``torchvision/models/resnet.py``.
    """
    installed = path.replace(os.sep, "/").rpartition("-packages/")[2]
    if installed != path.replace(os.sep, "/"):
        return installed
    relative = os.path.relpath(path)
    if not relative.startswith(".."):
        return relative
    folder = Path(path).parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return str(Path(path).relative_to(folder))
