"""Text that anybody may have written, read with bounds."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["parse_json"]

_DEEPEST = 200
_MARKS = re.compile(r'[\[\]{}"\\]')


def parse_json(text: str) -> Any:
    """``json.loads``, whose C code ends the process on lists in lists without end where somebody has raised Python's
    recursion limit.

    Raises:
        ValueError: if it is no JSON, or lists and objects are nested more than 200 deep.
    """
    depth, is_string, escaped = 0, False, -1
    for mark in _MARKS.finditer(text):
        place, found = mark.start(), mark.group()
        if place == escaped:
            continue
        if found == "\\":
            escaped = place + 1
        elif found == '"':
            is_string = not is_string
        elif not is_string:
            depth += 1 if found in "[{" else -1
            if depth > _DEEPEST:
                raise ValueError(f"lists and objects are nested more than {_DEEPEST} deep")
    return json.loads(text)
