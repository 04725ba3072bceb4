"""Where in the user's source a traced operator came from."""

from __future__ import annotations

import inspect
import linecache
import os
import re
from pathlib import Path
from types import CodeType, FrameType

import torch

__all__ = ["definition", "is_library", "is_own", "shown_line", "user_frame", "user_line"]

# "path(12): forward" in traced graphs; 'File "path", line 12, in forward' in torch.export and scripted code.
_FRAME = re.compile(
    r'^\s*(?:File "(?P<file>[^"]+)", line (?P<no>\d+)(?:, in (?P<in>\S+))?'
    r"|(?P<path>.+?)\((?P<line>\d+)\): (?P<func>\S+))"
)
_PACKAGE = Path(__file__).parent.parent
_LIBRARIES = (str(Path(torch.__file__).parent) + os.sep, str(_PACKAGE) + os.sep)
_EXAMPLES = str(_PACKAGE / "examples") + os.sep  # where an installed svexport has them; user code all the same


def is_library(path: str) -> bool:
    """Whether a source file belongs to torch or svexport, or is no file."""
    return path.startswith(("<", *_LIBRARIES)) and not path.startswith(_EXAMPLES)


def is_own(path: str) -> bool:
    """Whether a source file is one of svexport."""
    return path.startswith(_LIBRARIES[1]) and not path.startswith(_EXAMPLES)


def user_frame(trace: str) -> str:
    """The innermost frame of a stack trace outside torch and svexport: ``model.py:12 in forward: z = einsum(...)``.

    Empty where the trace names none. Paths below the working directory are relative to it.
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
    """A line of source as errors name it: ``model.py:12 in forward: z = einsum(...)``."""
    code = linecache.getline(path, number).strip()
    return f"{_shown(path)}:{number}" + (f" in {function}" if function else "") + (f": {code}" if code else "")


def user_line(frame: FrameType | None, outside: CodeType) -> tuple[str, int, str] | None:
    """What :func:`shown_line` takes, of the innermost of the running frames that is the user's, up to ``outside``."""
    while frame is not None and frame.f_code is not outside:
        code = frame.f_code
        if not is_library(code.co_filename):
            return code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back
    return None


def definition(kind: type) -> str:
    """Where a class is defined: ``model.py:12``, or its module where that has no source."""
    try:
        return f"{_shown(inspect.getsourcefile(kind) or '')}:{inspect.getsourcelines(kind)[1]}"
    except (OSError, TypeError):
        return kind.__module__


def _shown(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
