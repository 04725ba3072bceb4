"""The tactics that were timed to be the fastest on a GPU, which ``svexport kernels tune`` keeps in the cache.

A table is as those of ``csrc/cuda/tuning``, with ``"winners": {op: [{"problem": {name: number}, "tactic": id}]}``: all
numbers of a problem, in the order of the planner's. Files there may have winners too; those of the cache go before.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from svexport._version import __version__

__all__ = ["cache_folder", "path", "read", "tell", "winner", "write"]

TABLES = Path(__file__).parents[1] / "csrc" / "cuda" / "tuning"

Table = dict[str, list[dict[str, Any]]]


def cache_folder() -> Path:
    """Where what was compiled or timed is kept: ``SVEXPORT_CACHE``, or the user's cache."""
    given = os.environ.get("SVEXPORT_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "svexport"


def path(gpu: str) -> Path:
    """Of the table in the cache: by device, and by version, for ids of tactics may change."""
    return cache_folder() / "tuning" / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower())}-{__version__}.json"


def read(gpu: str) -> Table:
    """By op, all that is known for a device of this name."""
    found: Table = {}
    for file in (*sorted(TABLES.glob("*.json")), path(gpu)):
        found = _merged(found, _winners_in(file, gpu))
    return found


def winner(gpu: str, op: str, problem: Mapping[str, int]) -> int:
    """The id of the tactic for a problem, all its numbers; 0 where none is known."""
    return next((int(row["tactic"]) for row in read(gpu).get(op, ()) if row["problem"] == problem), 0)


def write(gpu: str, winners: Table) -> Path:
    """Keeps winners beside those that the cache has already."""
    file = path(gpu)
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = _merged(_winners_in(file, gpu), winners)
    partial = file.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps({"gpu": gpu, "figures": {}, "winners": kept}, indent=1))
    os.replace(partial, file)
    return file


def _winners_in(file: Path, gpu: str) -> Table:
    """Of a table; none where it is another device's, or no table."""
    try:
        table = json.loads(file.read_text())
        winners = table.get("winners", {}) if gpu.startswith(table["gpu"]) else {}
        return {
            op: [{"problem": dict(row["problem"]), "tactic": int(row["tactic"])} for row in rows]
            for op, rows in winners.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        warnings.warn(f"{file} is no table of tactics, and left out: {error!r}", stacklevel=2)
        return {}


def _merged(before: Table, after: Table) -> Table:
    """Both, those after in place of those before for the same problem."""
    merged = dict(before)
    for op, rows in after.items():
        again = [row["problem"] for row in rows]
        merged[op] = [*(row for row in before.get(op, []) if row["problem"] not in again), *rows]
    return merged


def tell() -> None:
    """Tells the kernels, which are loaded, what is known for each device of this machine."""
    for device in range(torch.cuda.device_count()):
        lines = [
            " ".join(map(str, (op, *row["problem"].values(), row["tactic"])))
            for op, rows in read(torch.cuda.get_device_name(device)).items()
            for row in rows
        ]
        if lines:
            with torch.cuda.device(device):
                torch.ops.svexport._add_winners(lines)
