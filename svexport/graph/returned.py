"""Records in the file how a model returned its outputs; output names alone would lose a dict's keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from svexport.untrusted import parse_json

if TYPE_CHECKING:
    import onnx

__all__ = ["KEY", "RETURNED", "Returned", "note_returned", "parse_returned", "returned_of"]

KEY = "svexport.outputs"
"""The key of the entry in the file's metadata."""

Returned = dict[str, Any]
"""For each key of the dict, the number of an output, or a nested dict or list of them."""
RETURNED = 4000
"""Maximum characters of the entry; a longer one is not stored."""
_DEPTH = 16


def note_returned(model: onnx.ModelProto, paths: Sequence[tuple[str, ...]]) -> None:
    """Records in the file, in place, the structure of the dict that a model returned.

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
    """Lists in place of dicts of positions."""
    if not isinstance(value, dict):
        return value
    values = [_listed(one) for one in value.values()]
    return values if list(value) == [str(i) for i in range(len(value))] else dict(zip(value, values))


def returned_of(model: onnx.ModelProto) -> Returned | None:
    """Reads what :func:`note_returned` wrote."""
    text = next((entry.value for entry in model.metadata_props if entry.key == KEY), "")
    return parse_returned(text, len(model.graph.output))


def parse_returned(text: str, outputs: int) -> Returned | None:
    """The dict in a text that may be anything; None unless it names each of so many outputs once."""
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
