"""``verify="thorough"``: verification that measures itself, by faults that it would have to notice."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import onnx
import torch
from torch import Tensor

from svexport.exporter.planted import Planted, Recording, Site
from svexport.exporter.precise import Precise
from svexport.exporter.report import Faults
from svexport.exporter.search import Units, changed, reaching, searched, stepped
from svexport.exporter.verify import SEARCHED, Verification
from svexport.progress import phase

__all__ = ["Planting", "plant", "thorough"]

SEARCHES = 90
"""Inputs that are drawn in search of faults; steps along gradients come to those."""

WALKS = 24
"""Towards the sides of borders that a channel has not been on."""

CHANGES = 100
"""Of inputs that came closest to showing a fault, tried without finding one more, or coming closer."""

CLOSER = 0.1
"""Of a tolerance: by so much."""

MOST_SECONDS = 300.0
"""Of CPU time, for walks and changes: at most."""


def thorough(verification: Verification, model: onnx.ModelProto, lines: Mapping[str, str]) -> Faults:
    """Plants faults in a file that has passed, and compares it on inputs that are searched for.

    Those may notice faults that no run has, and what the file lacks.

    Args:
        verification: that it passed.
        model: the file in standard ONNX, with its weights.
        lines: the user's, by name of a node.
    """
    planting = plant(verification, model, lines)
    agreeing = verification.condense()
    if planting is None:
        verification.notes.append("no faults planted: the values inside of the file are too large to keep")
        return Faults(0, 0, 0)
    count, by_default, left = len(planting.sites), len(planting.unnoticed), len(planting.missed)
    return Faults(count, count - by_default, by_default - left, [str(site) for site in planting.missed], agreeing)


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
        recording = planted.record(inputs, verification.held(run, inputs, expected))
        now = verification.held_to_rounding(run, inputs, expected)
        if recording is not None:
            runs.append(recording)
            closer.append((run, inputs, expected, replace(recording, held=now)))
    verification.raise_failed()
    if not runs:
        return None
    sites = list(planted.sites(runs[0]))
    unnoticed = _unnoticed(planted, sites, runs)
    precise = _precise(verification, model)
    hunt = _Hunt(planted, precise, unnoticed)
    for run, inputs, expected, recording in closer:
        precisely = _in_float64(verification, run, inputs, expected, precise)
        hunt.compare(inputs, recording, lambda found=precisely: found)  # type: ignore[misc]
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
                recording = planted.record(inputs, verification.held_to_rounding(run, inputs, expected))
                if recording is not None:
                    hunt.compare(inputs, recording, partial(_in_float64, verification, run, inputs, expected, precise))
            verification.raise_failed()
            verification.forget(run)

    search(_drawn(verification))
    ends = time.process_time() + MOST_SECONDS
    search(_walked(verification), ends)
    search(hunt.changed(verification.tensors, verification.ranges), ends)
    return Planting(planted, sites, unnoticed, hunt.left)


def _precise(verification: Verification, model: onnx.ModelProto) -> Precise | None:
    """None of a file that cannot be computed in float64, which is noted."""
    try:
        return Precise(model, verification.copies)
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's, of a node that it has no kernel for
        verification.notes.append(f"not compared in float64: {str(error).splitlines()[0]}")
        return None


def _in_float64(
    verification: Verification, run: str, inputs: list[Tensor], expected: tuple[Tensor, ...], precise: Precise | None
) -> Recording | None:
    return None if precise is None else verification.in_float64(run, inputs, expected, precise)


def _unnoticed(planted: Planted, sites: Sequence[Site], runs: Sequence[Recording]) -> list[Site]:
    """Those that none of the runs notices."""
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

    def __init__(self, planted: Planted, precise: Precise | None, left: Sequence[Site]) -> None:
        self._planted, self._precise, self.left = planted, precise, list(left)
        self._closest: dict[int, tuple[float, list[Tensor]]] = {}  # by id of a fault, how far it was off
        self._progress: dict[int, float] = {}  # how far that was when it last counted as closer
        self._since = 0  # inputs without any

    def compare(self, inputs: list[Tensor], recording: Recording, in_float64: Callable[[], Recording | None]) -> None:
        """``in_float64``: the same inputs there, asked for if a fault changes outputs by less than is told here."""
        phase(f"searching inputs for {len(self.left)} faults")
        left = []
        asked, precisely = False, None
        for site in self.left:
            off = self._planted.shown(site, recording)
            if self._precise is not None and 0 < off <= 1:
                if not asked:
                    asked, precisely = True, in_float64()
                if precisely is not None:
                    off = max(off, self._precise.shown(site, precisely))
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
