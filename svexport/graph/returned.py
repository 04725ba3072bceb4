"""Keeps in the file how a model returned its outputs; otherwise the keys of a dict would be lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from svexport.untrusted import parse_json

if TYPE_CHECKING:
    import onnx

__all__ = ["KEY", "RETURNED", "Returned", "note_returned", "parse_returned", "returned_of"]

KEY = "svexport.outputs"
"""Key of the entry in the model's metadata."""

Returned = dict[str, Any]
"""Maps each key of the returned dict to the number of an output, or to a dict or list of these."""
RETURNED = 4000
"""Upper bound on the characters of the entry; a longer one is not kept."""
_DEPTH = 16


def note_returned(model: onnx.ModelProto, paths: Sequence[tuple[str, ...]]) -> None:
    """Records in the model's metadata the structure of the dict that it returned, in place.

    Args:
        paths: for each output, the keys and positions that lead to it in the dict.
    """
    tree: Returned = {}
    for number, path in enumerate(paths):
        place = tree
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = number
    text = json.dumps({key: _listed(value) for key, value in tree.items()}, separators=(",", ":"))
    if len(text) <= RETURNED:
        model.metadata_props.add(key=KEY, value=text)


def _listed(value: Any) -> Any:
    """The value with lists in place of dicts whose keys are positions."""
    if not isinstance(value, dict):
        return value
    values = [_listed(one) for one in value.values()]
    return values if list(value) == [str(i) for i in range(len(value))] else dict(zip(value, values))


def returned_of(model: onnx.ModelProto) -> Returned | None:
    """The structure that :func:`note_returned` recorded; None if there is none, or it is invalid."""
    text = next((entry.value for entry in model.metadata_props if entry.key == KEY), "")
    return parse_returned(text, len(model.graph.output))


def parse_returned(text: str, outputs: int) -> Returned | None:
    """Parses an untrusted text; None unless it is a dict that names each of ``outputs`` outputs once."""
    if len(text) > RETURNED or not text.startswith("{"):
        return None
    try:
        tree = parse_json(text)
        numbers = sorted(_numbers(tree, _DEPTH))
    except (ValueError, TypeError, RecursionError):
        return None
    return tree if numbers == list(range(outputs)) else None


def _numbers(value: Any, depth: int) -> list[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    if not depth or not isinstance(value, (dict, list)):
        raise TypeError(value)
    return [n for one in (value.values() if isinstance(value, dict) else value) for n in _numbers(one, depth - 1)]
