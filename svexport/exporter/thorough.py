"""``verify="thorough"``: verification that measures itself, by faults that it would have to notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnx
from torch import Tensor

from svexport.exporter.planted import Planted, Recording, Site
from svexport.exporter.report import Faults
from svexport.exporter.search import searched, stepped
from svexport.exporter.verify import SEARCHED, Verification
from svexport.progress import phase

__all__ = ["thorough"]

SEARCHES = 36
"""Inputs that are drawn in search of faults; steps along gradients come to those."""


def thorough(verification: Verification, model: onnx.ModelProto, lines: Mapping[str, str]) -> Faults:
    """Plants faults in a file that has passed, and searches for inputs that notice those that no run has.

    The file is compared with torch on these inputs, too, which may notice what it lacks.

    Args:
        verification: that it passed.
        model: the file in standard ONNX, with its weights.
        lines: the user's, by name of a node.
    """
    phase("planting faults")
    planted = Planted(model, verification.held_to, lines)
    runs = [recording for run in verification.compared if (recording := planted.record(verification.inputs[run]))]
    if not runs:
        verification.notes.append("no faults planted: the values inside of the file are too large to keep")
        return Faults(0, 0, 0)
    sites = list(planted.sites(runs[0]))
    left = _left(planted, sites, runs, "planting faults")
    noticed = len(sites) - len(left)
    for number, inputs in enumerate(_inputs(verification), 1):
        run = f"{SEARCHED} {number}"
        expected = verification.computed(run, inputs)
        if expected is None or not verification.agrees(run, inputs, expected):
            continue
        if left and (recording := planted.record(inputs)):
            left = _left(planted, left, [recording], f"searching inputs for {len(left)} faults")
    verification.raise_failed()
    return Faults(len(sites), noticed, len(sites) - noticed - len(left), [str(site) for site in left])


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
