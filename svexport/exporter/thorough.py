"""``verify="thorough"``: measures the verification itself, by planting faults that it has to notice."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from torch import Tensor

from svexport.exporter.planted import Planted, Recording, Site
from svexport.exporter.precise import Precise
from svexport.exporter.report import Faults
from svexport.exporter.search import SEARCHES, Units, changed, near, reaching, searched, stepped
from svexport.exporter.verify import SEARCHED, Verification
from svexport.parity import Parity
from svexport.progress import phase

__all__ = ["Planting", "plant", "thorough"]

NEAR = 48
"""Number of searched inputs that are the given ones with some tensors changed."""

WALKS = 24
"""Number of searches towards a side of a border that a channel has not reached."""

CHANGES = 100
"""Changes of the closest inputs that are tried in a row without finding a fault or coming closer to one."""

CLOSER = 0.1
"""Fraction of a tolerance by which an input has to come closer to a fault to count as progress."""

MOST_TOLD = 5
"""Most notes, and most reasons to skip, that the report gives about searched inputs."""

MOST_SECONDS = 300.0
"""Limit on the CPU time of walks and changes."""


def thorough(verification: Verification, model: onnx.ModelProto, lines: Mapping[str, str]) -> Faults:
    """Plants faults in a file that has passed verification, and searches for inputs that show them.

    Searched inputs may show faults that no earlier run noticed, and also where the file itself is wrong.

    Args:
        verification: the verification that the file has passed.
        model: the file in standard ONNX, with its weights.
        lines: the user's source lines, by node name.
    """
    planting = plant(verification, model, lines)
    agreeing = _condense(verification)
    if planting is None:
        verification.notes.append("no faults planted: the values inside of the file are too large to keep")
        return Faults(0, 0, 0)
    count, by_default, left = len(planting.sites), len(planting.unnoticed), len(planting.missed)
    return Faults(count, count - by_default, by_default - left, [str(site) for site in planting.missed], agreeing)


def _condense(verification: Verification) -> int:
    """Keeps, of the runs on searched inputs, the worst result of each output, and the first notes and reasons to skip.

    Returns:
        The number of such runs that agree.
    """
    worst: dict[str, Parity] = {}
    for p in verification.results:
        if p.run.startswith(SEARCHED) and (p.name not in worst or p.max_rel > worst[p.name].max_rel):
            worst[p.name] = p
    usual = [p for p in verification.results if not p.run.startswith(SEARCHED)]
    verification.results = [*usual, *worst.values()]
    for lines in (verification.notes, verification.skipped):
        told = [line for line in lines if re.search(rf"\b{SEARCHED} \d", line)]
        if more := told[MOST_TOLD:]:
            lines[:] = [line for line in lines if line not in more]
            lines.append(f"{SEARCHED} inputs: {len(more)} more of the kind")
    return sum(run.startswith(SEARCHED) for run in verification.compared)


@dataclass(frozen=True)
class Planting:
    """All faults of a file; ``unnoticed`` by the usual runs; and of these, ``missed`` by the searched inputs too."""

    planted: Planted
    sites: list[Site]
    unnoticed: list[Site]
    missed: list[Site]


def plant(verification: Verification, model: onnx.ModelProto, lines: Mapping[str, str]) -> Planting | None:
    """Plants the faults. Returns None for a file whose values are too large to keep.

    Raises:
        VerificationError: if the file differs from torch on a searched input.
    """
    phase("planting faults")
    planted = Planted(model, lines)
    runs, again = [], []
    for run in verification.compared:
        inputs = verification.inputs[run]
        expected = verification.computed(run, inputs)
        if expected is None:
            continue
        recording = planted.record(inputs, verification.held(run, inputs, expected))
        if recording is not None:
            runs.append(recording)
            again.append((run, inputs, expected))
    verification.raise_failed()
    if not runs:
        return None
    sites = list(planted.sites(runs[0]))
    unnoticed = _unnoticed(planted, sites, runs)
    hunt = _Hunt(verification, planted, _precise(verification, model), unnoticed)
    for run, inputs, expected in again:
        hunt.compare(run, inputs, expected)
    verification.raise_failed()
    number = 0

    def search(found: Iterable[list[Tensor]], ends: float = math.inf) -> None:
        nonlocal number
        for inputs in found:
            if time.process_time() > ends:
                return
            number += 1
            run = f"{SEARCHED} {number}"
            expected = verification.computed(run, inputs)
            if expected is not None and verification.agrees(run, inputs, expected) and hunt.left:
                hunt.compare(run, inputs, expected)
            verification.raise_failed()
            verification.forget(run)

    search(_drawn(verification))
    ends = time.process_time() + MOST_SECONDS
    search(_walked(verification), ends)
    search(hunt.changed(verification.tensors, verification.ranges), ends)
    return Planting(planted, sites, unnoticed, hunt.left)


def _precise(verification: Verification, model: onnx.ModelProto) -> Precise | None:
    """The file computed in float64; None, with a note, if that is not possible."""
    try:
        return Precise(model, verification.copies)
    except Exception as error:  # noqa: BLE001 - ONNX Runtime has no kernel for some node
        verification.notes.append(f"not compared in float64: {str(error).splitlines()[0]}")
        return None


def _unnoticed(planted: Planted, sites: Sequence[Site], runs: Sequence[Recording]) -> list[Site]:
    """The faults that none of the runs notices."""
    left = []
    for number, site in enumerate(sites):
        phase(f"planting faults, {number} of {len(sites)}")
        if not any(planted.shown(site, recording) > 1 for recording in runs):
            left.append(site)
    return left


class _Hunt:
    """The faults that no input has shown yet, and the inputs that came closest to showing them.

    Attributes:
        left: the faults not shown yet.
    """

    def __init__(
        self, verification: Verification, planted: Planted, precise: Precise | None, left: Sequence[Site]
    ) -> None:
        """``precise`` is None if the file cannot be computed in float64."""
        self._verification, self._planted, self._precise, self.left = verification, planted, precise, list(left)
        self._closest: dict[int, tuple[float, list[Tensor]]] = {}  # by id of a site: how far it was off, and the inputs
        self._progress: dict[int, float] = {}  # by id of a site: how far off at its last progress
        self._since = 0  # inputs since the last progress

    def compare(self, run: str, inputs: list[Tensor], expected: tuple[Tensor, ...]) -> None:
        """Compares the faults within torch's rounding. In float64 rounding neither hides a fault nor looks like one;
        float32 is used for what has no float64 result, or is not a floating-point number."""
        phase(f"searching inputs for {len(self.left)} faults")
        there = None
        if self._precise is not None:
            there = self._verification.in_float64(run, inputs, expected, self._precise)
        numbers = there is not None and all(e.is_floating_point() for e in expected)
        left, recorded, recording = [], False, None
        for site in self.left:
            off = math.nan if there is None else self._precise.shown(site, there)  # type: ignore[union-attr]
            if math.isnan(off) or (off <= 1 and not numbers):
                if not recorded:
                    recorded = True
                    held = self._verification.held_to_rounding(run, inputs, expected)
                    recording = self._planted.record(inputs, held)
                off = max(off if off > 0 else 0.0, 0.0 if recording is None else self._planted.shown(site, recording))
            if off >= self._progress.get(id(site), 0.0) + CLOSER:
                self._progress[id(site)] = off
                self._since = 0
            if off > 1:
                continue
            left.append(site)
            if off > self._closest.get(id(site), (0.0,))[0]:
                self._closest[id(site)] = off, inputs
        self.left = left

    def changed(self, given: list[Tensor], ranges: Mapping[int, int]) -> Iterator[list[Tensor]]:
        """Yields changes of the closest inputs, for as long as some come closer."""
        self._since = 0
        while self._since < CHANGES:
            self._since += 1
            closest = [self._closest[id(site)] for site in self.left if id(site) in self._closest]
            if not closest:
                return
            weights = torch.tensor([off**2 + 1e-4 for off, _ in closest], dtype=torch.float64)
            (_, one), (_, other) = (closest[int(weights.multinomial(1))] for _ in range(2))
            if _shapes(one) == _shapes(other) == _shapes(given):
                yield changed(one, other, given, ranges)
            else:
                yield changed(one, one, one, ranges)


def _shapes(tensors: Sequence[Tensor]) -> list[torch.Size]:
    return [t.shape for t in tensors]


def _drawn(verification: Verification) -> Iterator[list[Tensor]]:
    ranges = verification.ranges
    yield from searched(verification.tensors, ranges, SEARCHES)
    yield from near(verification.tensors, ranges, NEAR)
    for start in (verification.tensors, *searched(verification.tensors, ranges, 1)):
        yield from _until_error(lambda start=start: stepped(verification.model, start))  # type: ignore[misc]


def _walked(verification: Verification) -> Iterator[list[Tensor]]:
    units = Units()
    for start in searched(verification.tensors, verification.ranges, WALKS):
        yield from _until_error(lambda start=start: reaching(verification.model, start, units))  # type: ignore[misc]


def _until_error(inputs: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Yields inputs until an error: a model may have no gradients, or refuse the inputs."""
    try:
        yield from inputs()
    except Exception:  # noqa: BLE001 - the user's code may raise anything
        return
