"""``verify="thorough"``: verification that measures itself, by faults that it would have to notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx
from torch import Tensor

from svexport.exporter.planted import Planted, Recording, Site
from svexport.exporter.report import Faults
from svexport.exporter.search import searched, stepped
from svexport.exporter.verify import SEARCHED, Verification
from svexport.progress import phase

__all__ = ["Planting", "plant", "thorough"]

SEARCHES = 36
"""Inputs that are drawn in search of faults; steps along gradients come to those."""


def thorough(verification: Verification, model: onnx.ModelProto, lines: Mapping[str, str]) -> Faults:
    """Plants faults in a file that has passed, and compares it on inputs that are searched for.

    Those may notice faults that no run has, and what the file lacks.

    Args:
        verification: that it passed.
        model: the file in standard ONNX, with its weights.
        lines: the user's, by name of a node.
    """
    planting = plant(verification, model, lines)
    if planting is None:
        verification.notes.append("no faults planted: the values inside of the file are too large to keep")
        return Faults(0, 0, 0)
    count, by_default, left = len(planting.sites), len(planting.unnoticed), len(planting.missed)
    return Faults(count, count - by_default, by_default - left, [str(site) for site in planting.missed])


@dataclass(frozen=True)
class Planting:
    """All faults of a file, those that no run noticed, and of them those that no searched input did."""

    planted: Planted
    sites: list[Site]
    unnoticed: list[Site]
    missed: list[Site]


def plant(verification: Verification, model: onnx.ModelProto, lines: Mapping[str, str]) -> Planting | None:
    """Plants them; None of a file whose values are too large to keep.

    Raises:
        VerificationError: if the file differs from torch on an input that was searched for.
    """
    phase("planting faults")
    planted = Planted(model, lines)
    runs, closer = [], []
    for run in verification.compared:
        inputs = verification.inputs[run]
        expected = verification.computed(run, inputs)
        if expected is None:
            continue
        before, now = verification.held_to_rounding(run, inputs, expected)
        recording = planted.record(inputs, before)
        if recording is not None:
            runs.append(recording)
            closer.append(replace(recording, held=now))
    verification.raise_failed()
    if not runs:
        return None
    sites = list(planted.sites(runs[0]))
    unnoticed = _left(planted, sites, runs, "planting faults")
    left = _left(planted, unnoticed, closer, "planting faults again")
    for number, inputs in enumerate(_inputs(verification), 1):
        run = f"{SEARCHED} {number}"
        expected = verification.computed(run, inputs)
        if expected is None or not verification.agrees(run, inputs, expected):
            continue
        recording = planted.record(inputs, verification.held_to_rounding(run, inputs, expected)[1]) if left else None
        if recording is not None:
            left = _left(planted, left, [recording], f"searching inputs for {len(left)} faults")
    verification.raise_failed()
    return Planting(planted, sites, unnoticed, left)


def _left(planted: Planted, sites: Sequence[Site], runs: Sequence[Recording], what: str) -> list[Site]:
    """Those that none of the runs notices."""
    left = []
    for number, site in enumerate(sites):
        phase(f"{what}, {number} of {len(sites)}")
        if not any(planted.notices(site, recording) for recording in runs):
            left.append(site)
    return left


def _inputs(verification: Verification) -> Iterator[list[Tensor]]:
    ranges = verification.ranges
    yield from searched(verification.tensors, ranges, SEARCHES)
    for start in (verification.tensors, *searched(verification.tensors, ranges, 1)):
        yield from _until_error(lambda start=start: stepped(verification.model, start))  # type: ignore[misc]


def _until_error(inputs: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Of a model without gradients, or one that does not take the inputs, none."""
    try:
        yield from inputs()
    except Exception:  # noqa: BLE001 - the user's code may raise anything
        return
