"""``verify="thorough"``: verification that measures itself by planted faults that it must detect."""

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
"""Of the inputs that are drawn in search of faults: the given ones with some tensors changed."""

WALKS = 24
"""Towards the sides of borders that a channel has not been on."""

CHANGES = 100
"""Of inputs that came closest to showing a fault, tried without finding one more, or coming closer."""

CLOSER = 0.1
"""Of a tolerance: by so much."""

MOST_TOLD = 5
"""Maximum number of notes about searched inputs that are reported."""

MOST_SECONDS = 300.0
"""Maximum CPU time in seconds, for walks and changes."""


def thorough(verification: Verification, model: onnx.ModelProto, lines: Mapping[str, str]) -> Faults:
    """Plants faults in a file that has passed, and compares it on inputs that are searched for.

    Those may notice faults that no run has, and what the file lacks.

    Args:
        verification: that it passed.
        model: the file in standard ONNX, with its weights.
        lines: the user's, by name of a node.
    """
    planting = plant(verification, model, lines)
    agreeing = _condense(verification)
    if planting is None:
        verification.notes.append("no faults planted: the values inside of the file are too large to keep")
        return Faults(0, 0, 0)
    count, by_default, left = len(planting.sites), len(planting.unnoticed), len(planting.missed)
    return Faults(count, count - by_default, by_default - left, [str(site) for site in planting.missed], agreeing)


def _condense(verification: Verification) -> int:
    """Of runs that were searched for keeps the worst result of each output, the first notes and reasons to skip.

    Returns:
        how many such runs agree.
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
    """The file in float64; None, with a note, if it cannot be computed there."""
    try:
        return Precise(model, verification.copies)
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's, of a node that it has no kernel for
        verification.notes.append(f"not compared in float64: {str(error).splitlines()[0]}")
        return None


def _unnoticed(planted: Planted, sites: Sequence[Site], runs: Sequence[Recording]) -> list[Site]:
    """The faults that none of the runs reveals."""
    left = []
    for number, site in enumerate(sites):
        phase(f"planting faults, {number} of {len(sites)}")
        if not any(planted.shown(site, recording) > 1 for recording in runs):
            left.append(site)
    return left


class _Hunt:
    """Faults that no input has shown yet, and the inputs that came closest to it.

    Attributes:
        left: these faults.
    """

    def __init__(
        self, verification: Verification, planted: Planted, precise: Precise | None, left: Sequence[Site]
    ) -> None:
        """``precise`` is None where there is no float64."""
        self._verification, self._planted, self._precise, self.left = verification, planted, precise, list(left)
        self._closest: dict[int, tuple[float, list[Tensor]]] = {}  # by id of a fault, how far it was off
        self._progress: dict[int, float] = {}  # how far that was when it last counted as closer
        self._since = 0  # inputs without any

    def compare(self, run: str, inputs: list[Tensor], expected: tuple[Tensor, ...]) -> None:
        """Holds the file and its faults to torch's rounding: in float64, which has none to hide a fault or to look like
        one, and in float32 what is not computed there, or no floating-point number."""
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
        """Changes of the inputs that came closest, for as long as some come closer."""
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
    """Of a model without gradients, or one that does not take the inputs, none."""
    try:
        yield from inputs()
    except Exception:  # noqa: BLE001 - the user's code may raise anything
        return
