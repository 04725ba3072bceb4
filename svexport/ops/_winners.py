"""The tactics measured as fastest on a GPU, which ``svexport kernels tune`` stores in the cache.

A table has the format of those in ``csrc/cuda/tuning``, with ``"winners": {op: [{"problem": {name: number}, "tactic":
id}]}``: all numbers of a problem, in the planner's order. The cache takes precedence over winners in ``csrc``.
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
    """The folder for compiled kernels and timings: ``SVEXPORT_CACHE``, or the user's cache."""
    given = os.environ.get("SVEXPORT_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "svexport"


def path(gpu: str) -> Path:
    """The path of the table in the cache. It depends on the device and on the version, as tactic ids may change."""
    return cache_folder() / "tuning" / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower())}-{__version__}.json"


def read(gpu: str) -> Table:
    """All known winners for a device of this name, by op."""
    found: Table = {}
    for file in (*sorted(TABLES.glob("*.json")), path(gpu)):
        found = _merged(found, _winners_in(file, gpu))
    return found


def winner(gpu: str, op: str, problem: Mapping[str, int]) -> int:
    """The id of the fastest tactic for a problem, given with all its numbers; 0 if none is known."""
    return next((int(row["tactic"]) for row in read(gpu).get(op, ()) if row["problem"] == problem), 0)


def write(gpu: str, winners: Table) -> Path:
    """Adds winners to those that the cache already has."""
    file = path(gpu)
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = _merged(_winners_in(file, gpu), winners)
    partial = file.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps({"gpu": gpu, "figures": {}, "winners": kept}, indent=1))
    os.replace(partial, file)
    return file


def _winners_in(file: Path, gpu: str) -> Table:
    """The winners of a table; empty if the file is for another device or is not a table."""
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
    """Merges two tables; for the same problem, ``after`` replaces ``before``."""
    merged = dict(before)
    for op, rows in after.items():
        again = [row["problem"] for row in rows]
        merged[op] = [*(row for row in before.get(op, []) if row["problem"] not in again), *rows]
    return merged


def tell() -> None:
    """Passes the known winners for each device of this machine to the loaded kernels."""
    for device in range(torch.cuda.device_count()):
        lines = [
            " ".join(map(str, (op, *row["problem"].values(), row["tactic"])))
            for op, rows in read(torch.cuda.get_device_name(device)).items()
            for row in rows
        ]
        if lines:
            with torch.cuda.device(device):
                torch.ops.svexport._add_winners(lines)
