"""Proof of an exported file: ONNX Runtime against torch, on the given inputs and on others worth trying."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from svexport.errors import EngineError, VerificationError
from svexport.exporter import causes
from svexport.exporter.agreement import (
    CLOSEST,
    allow_rounding,
    by_place,
    closely,
    held,
    hold_closely,
    jumps,
    mostly_unlike,
    same_way,
    ties,
)
from svexport.exporter.assumed import sizes_against
from svexport.exporter.beside import AHEAD, FileBeside
from svexport.exporter.borders import ANYWAY, MOST_RUNS, WITHOUT_NUMBERS, Borders, refuse_beyond
from svexport.exporter.counted import refuse_counted
from svexport.exporter.drawn import refuse_drawn
from svexport.exporter.empty import compare_empty
from svexport.exporter.finish import Signature
from svexport.exporter.followed import Sizes
from svexport.exporter.inputs import FAR, FIRST, KINDS, NEXT, NOTHING, Resized, far, of_kind, random
from svexport.exporter.memory import kept_memory, old_objects_left_alone
from svexport.exporter.rounding import Rounding, Tolerances
from svexport.exporter.sizes_of_file import SizesOfFile
from svexport.exporter.values import Unproven, refuse_unfollowed, refuse_valueless, refuse_values, user_numbers
from svexport.exporter.way import Guards, Way
from svexport.parity import Parity, parity
from svexport.progress import phase
from svexport.tracing.arguments import own_failure
from svexport.tracing.as_in_files import AsInFiles
from svexport.tracing.quantizers import ROUNDING, Copies, allow_steps, repeats
from svexport.tracing.reach import Reached, roots_of_users
from svexport.tracing.source import asks_for_export, shown_line
from svexport.tracing.state import State, random_state, same_random_state

if TYPE_CHECKING:
    from svexport.exporter.planted import Recording
    from svexport.exporter.precise import Precise

__all__ = ["verify"]

SEARCHED = "searched"
"""Inputs that were looked for, far from the given ones."""

MOST_AT_BORDERS = 2**20
"""Elements of inputs whose sizes are to turn a comparison."""

MOST_CALLS = 3000
"""Of functions of torch, to look for sizes with which forward goes another way."""

Run = tuple[str, list[Tensor]]


class _NotFinite(Exception):
    """Inputs of which a model makes no numbers."""


@kept_memory()
def verify(
    model: nn.Module,
    file: FileBeside[Any],
    signature: Signature,
    *,
    held_to: Tolerances,
    warned: Sequence[str],
    state: State,
    guarded: Guards,
    kind: str = "default",
) -> Verification:
    """Compares every output on the given inputs, on others of the same kind, and with every dynamic size changed.

    Of the others floating-point numbers are of several scales and both signs, then zero; integers are drawn anew,
    within what they index; masks are all true (or mixed, where they were), then all false. Where that says little (the
    model does not take it, or makes the same of both), numbers are a little off the given ones as well. Runs that the
    model itself raises on, or makes numbers of that are not finite, are ``skipped``, which names them. With
    ``kind="quick"`` there are the given inputs alone.

    What an output is held to is relative to its own scale. Where torch in float32 is itself further from float64 than
    that, a file cannot do better: what it differs by is allowed as far as torch's own rounding explains it, and noted
    of inputs that are not the given ones, for those may be what a model was never meant for.

    A quantizer makes a whole step of a rounding error on the border of two. Elements that torch, too, takes for the
    other step once what it rounds changes by some rounding errors are allowed, and noted.

    ``F.grid_sample`` in half precision is torch's as on CUDA, and ``topk(sorted=False)`` sorts (:class:`AsInFiles`),
    which is noted.

    If Python takes values out of tensors, inputs of more kinds are tried as well,
    and compared where forward goes a way with them that it has not gone before. Then nothing may follow from a value
    that a line took out of what depends on an input, whatever it is, but what has been compared (see
    :class:`Unproven`); ``guarded`` says whether the tracer has seen to those that ``torch.export`` knows of.

    Of dynamic sizes that Python compares, or counts by, some on both sides are tried (:class:`Borders`). Where it
    rounds a float made of them, sizes at which that is next to another whole number are tried, those first at which
    the file computes another one than Python.

    Raises:
        ExportError: naming the lines that take values of inputs from which something follows, or compare sizes that
            cannot be tried on both sides.
        VerificationError: if any output differs, the worst one named, or the file does not run.
    """
    verification = Verification(model, file, signature, held_to, warned, state)
    verification.compare(kind == "quick", guarded)
    verification.raise_failed()
    if kind != "quick":
        verification.raise_unproven(guarded)
    return verification


class Verification:
    """One file beside its model; see :func:`verify`.

    Attributes:
        file: in ONNX Runtime.
        results: of every output in every run.
        inputs: of the runs that torch computed.
        notes: for the report.
        skipped: runs that were not compared, and why.
        from_one: dynamic sizes that may not be 0, though the model takes that.
    """

    def __init__(
        self,
        model: nn.Module,
        file: FileBeside[Any],
        signature: Signature,
        held_to: Tolerances,
        warned: Sequence[str],
        state: State,
    ) -> None:
        self.file = file
        self._pending: deque[tuple[str, list[Tensor], tuple[Tensor, ...], Future[list[Tensor]]]] = deque()
        self.model, self.tensors = model, list(signature.inputs.values())
        self.input_names, self.output_names = list(signature.inputs), signature.outputs
        self.held_to, self.warned, self.state = held_to, warned, state
        self.results: list[Parity] = []
        self.inputs: dict[str, list[Tensor]] = {}
        self.notes: list[str] = []
        self.skipped: list[str] = []
        self.from_one: list[str] = []
        self.as_files = AsInFiles()
        self._held = [*model.parameters(), *model.buffers()]
        self._numbers = partial(user_numbers, model, self.tensors)
        self._resized = Resized(self.tensors, self.input_names, signature.axes, signature.sizes)
        self._borders = Borders(self._resized, MOST_AT_BORDERS)
        self._sizes_of_file = SizesOfFile(file.path, self.input_names, self.tensors, self._resized.shapes)
        self._ways: dict[str, Way] = {}
        self._sizes: dict[str, Sizes] = {}
        self._compared: dict[str, Way] = {}
        self._agreed: dict[str, None] = {}
        self._far: dict[str, tuple[Tensor, ...]] = {}  # what torch made of far inputs
        self._failing: dict[str, tuple[list[Tensor], list[Tensor]]] = {}  # inputs and what the file made of them
        self._infinite: dict[Parity, tuple[int, int]] = {}  # how many elements of torch's result and of the file's
        self._random = self._sized = False  # whether forward draws random numbers, and some run had other sizes

    def compare(self, quick: bool, guarded: Guards) -> None:
        """Compares on all inputs, of which torch may compute the next ones while the file still runs."""
        with self.file, old_objects_left_alone():
            for alternatives in self._runs(quick, guarded):
                if (taken := self._first_taken(alternatives)) is not None:
                    self._begin(*taken)
                    self._finish(AHEAD if taken[0] in ("given", *FAR, "random") and self._goes_ahead else 0)
            self._finish()
            self.file.load()
        if not quick and not self._failing:
            self.from_one = compare_empty(self, self._resized.empty())
        self.notes += self.as_files.notes

    def _runs(self, quick: bool, guarded: Guards) -> Iterator[Iterable[Run]]:
        """Each as alternatives, of which the first that the model takes counts."""
        tensors = self.tensors
        yield [("given", list(tensors))]
        if quick:
            return
        for name in FAR:
            yield ((name, inputs) for inputs in far(name, tensors, self.ranges))
        if not self._changes and not self._far_tell():
            yield (("random", inputs) for inputs in random(tensors, [t.shape for t in tensors]))
        self._finish()
        self.file.end()
        yield from self._resized.runs()
        given = self._ways["given"]
        if given.takes_values or given.counts or (self.warned and given.finds):
            yield from ([(name, [of_kind(name, t) for t in tensors])] for name in KINDS)
        if self._changes:
            self.state.restore()
            for name in (*FIRST, *NEXT):
                yield ((name, inputs) for inputs in random(tensors, [t.shape for t in tensors]))
        borders, near_numbers = self._borders, self._borders.runs_near_numbers(self._numbers, not guarded.sizes)
        rounded, others = borders.runs_at_roundings(self._sizes_of_file), self._sizes_of_other_ways(guarded)
        for alternatives in itertools.chain(borders.runs(), near_numbers, rounded, borders.runs(), others):
            if self._failing:
                return
            yield alternatives

    def _sizes_of_other_ways(self, guarded: Guards) -> Iterator[Iterator[Run]]:
        """Sizes that the tracer has not assumed; where it does not guard them, those of other nearest pixels, and with
        which forward goes a way that has not been compared."""
        most, calls = MOST_RUNS, 0
        if not guarded.sizes:
            yield from self._borders.runs_of_nearest()
            calls = MOST_CALLS // max(self._ways["given"].length, 1)
        against = ((sizes, True) for sizes in sizes_against(guarded.assumed, self._resized, MOST_AT_BORDERS))
        near = ((sizes, False) for sizes in itertools.islice(self._borders.near(), calls))
        for sizes, anyway in itertools.takewhile(lambda _: most, itertools.chain(against, near)):  # noqa: B023
            with suppress(Exception):  # sizes that the model does not take
                _, inputs = next(self._resized.at(sizes, MOST_AT_BORDERS, tried=False))
                _, way, _ = self._gone(inputs)
                if anyway or not any(way.same_flow(other) for other in self._compared.values()):
                    most -= 1
                    yield self._resized.at(sizes, MOST_AT_BORDERS)

    def _far_tell(self) -> bool:
        """Whether the far inputs say what inputs like the given ones would: computed they were, and to results of their
        own, unlike those of zeros. Where torch's results already say no, the file's are not waited for."""
        far = [self._far[name] for name in FAR if name in self._far]
        pairs = zip(*far, strict=True)
        if len(far) < len(FAR) or not all(e.shape == z.shape and mostly_unlike(e, z) for e, z in pairs):
            return False
        self._finish()
        return all(name in self._agreed for name in FAR)

    @cached_property
    def _changes(self) -> bool:
        """Whether forward changes the model; asked once it has run."""
        return bool(self.state.changed())

    @cached_property
    def copies(self) -> Copies:
        """The model, to compute with once more."""
        return Copies(self.model, changes=self._changes, random=self._random)

    def forward(self, run: str, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        phase(f"verifying, {run} inputs")
        before = random_state()
        expected, way, learned = self._gone(inputs)
        self._random |= not same_random_state(before, random_state())
        if _is_far(run) and not all(bool(e.isfinite().all()) for e in expected if e.is_floating_point()):
            raise _NotFinite("what torch computes there is not finite")
        self._ways[run] = way
        if learned is not None:
            self._sizes[run] = learned
        return expected

    def _gone(self, inputs: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Way, Sizes | None]:
        """What torch computes, the way that it goes, and the sizes that Python gets there."""
        arguments = [t.clone() for t in inputs]  # a model may work on its inputs in place
        learned = self._borders.new_run(inputs) if self._resized.given else None
        look = nullcontext if self._ways else roots_of_users
        with self.as_files, Way(arguments, self._held, sizes=learned) as way, look() as roots:
            expected = self.model(*arguments)
        way.end(expected)
        if roots is not None:
            self._reached = Reached([self.state.root, *roots], lambda t: not isinstance(t, nn.Parameter))
        return expected, way, learned

    @property
    def compared(self) -> list[str]:
        """Runs on which the file computes what torch does."""
        return list(self._agreed)

    @property
    def ranges(self) -> Mapping[int, int]:
        """How many there are of what an input's integers index."""
        return self._ways["given"].ranges

    def computed(self, run: str, inputs: list[Tensor]) -> tuple[Tensor, ...] | None:
        """What torch makes of inputs; None where that is no numbers."""
        try:
            return self.forward(run, inputs)
        except Exception:  # noqa: BLE001 - not what the model is for
            return None

    def agrees(self, run: str, inputs: list[Tensor], expected: tuple[Tensor, ...]) -> bool:
        """Whether the file computes on one more run what torch does."""
        self._begin(run, inputs, expected)
        self._finish()
        return run in self._agreed

    def forget(self, run: str) -> None:
        """Lets go of the tensors of a run, whose results stay."""
        for known in (self.inputs, self._ways, self._sizes, self._compared):
            known.pop(run, None)  # type: ignore[attr-defined]

    def held(self, run: str, inputs: list[Tensor], expected: tuple[Tensor, ...]) -> list[tuple[float, float]]:
        """rtol and atol that each output of a run which agrees was held to."""
        usual = [self.held_to.held(e, _is_far(run)) for e in expected]
        if not self._closely(run) or not self.held_to.fine:
            return usual
        with self.as_files:
            measured = Rounding(self.model, inputs, expected, self.copies).measured()
        return [closely(e, whole, own) for e, whole, own in zip(expected, usual, measured, strict=True)]

    def held_to_rounding(
        self, run: str, inputs: list[Tensor], expected: tuple[Tensor, ...]
    ) -> list[tuple[float, float]]:
        """The same of a few times torch's own rounding, however little that is.

        Where that is unknown, or more than usual, and with quantizers, which make steps of it, the usual ones. The file
        is held to it at once; :meth:`raise_failed` tells.
        """
        usual = [self.held_to.held(e, _is_far(run)) for e in expected]
        if not self._closely(run):
            return usual
        with self.as_files:
            measured = Rounding(self.model, inputs, expected, self.copies, errors=1.0).measured()
        actual = self._computed(run, inputs, len(expected))
        result = []
        for name, e, a, whole, own in zip(self.output_names, expected, actual, usual, measured, strict=True):
            result.append(closely(e, whole, own, CLOSEST, close=0.0))
            rtol, atol = result[-1]
            if not rtol and not (found := parity(name, e, a, run=run, rtol=rtol, atol=atol)).ok:
                self.results.append(found)
                self._failing[run] = inputs, actual
        return result

    def in_float64(
        self, run: str, inputs: list[Tensor], expected: tuple[Tensor, ...], precise: Precise
    ) -> Recording | None:
        """The file's results on one more run in float64, recorded; None where float64 says nothing of it.

        The file is held to it at once; :meth:`raise_failed` tells.
        """
        if not self._closely(run) or not self.held_to.fine:
            return None
        try:
            with self.as_files:
                if not repeats(self.copies, inputs, expected):
                    return None
                there = precise.expected(inputs, expected)
                recording = None if there is None else precise.record(there)
                if there is None or recording is None:
                    return None
                found = precise.differing(there, recording)
        except Exception:  # noqa: BLE001 - a model tied to float32, or sizes that ONNX Runtime has no kernel for
            return None
        for index in found:
            name, (rtol, atol) = self.output_names[index], there.held[index]
            actual = torch.from_numpy(recording.outputs[index])
            label = f"{name} in float64"
            self.results.append(parity(label, there.expected[index], actual, run=run, rtol=rtol, atol=atol))
            self._failing[run] = inputs, self._computed(run, inputs, len(expected))
        return recording

    def _closely(self, run: str) -> bool:
        """Whether torch's rounding says what outputs are held to: no tolerance that was given does, no quantizer."""
        given = self.held_to.rtol is not None or self.held_to.atol is not None
        return not given and not self._ways[run].calls(ROUNDING)

    def _first_taken(self, alternatives: Iterable[Run]) -> tuple[str, list[Tensor], tuple[Tensor, ...]] | None:
        """The first of them that the model computes, with what it does; None, and why, if that is none."""
        refusals: dict[str, Exception] = {}
        for run, inputs in alternatives:
            try:
                return run, inputs, self.forward(run, inputs)
            except Exception as error:  # noqa: BLE001 - the user's code may raise anything
                if run == "given":
                    self.file.written  # noqa: B018 - first what has kept it from being written
                    refuse_unfollowed(error, own_failure(self.model, inputs))
                refusals.setdefault(run, error)
                self._borders.fails(error)
        if not refusals or refusals.keys() <= KINDS.keys():  # those are not what the model is for
            return None
        self._finish()  # which may skip runs before these
        tried, first = " or ".join(refusals), next(iter(refusals.values()))
        failure = f"the model itself fails there ({type(first).__name__}: {first})"
        why = str(first) if isinstance(first, _NotFinite) else failure
        self.skipped.append(f"{tried}: {why}")
        if self._resized.given and not self._sized and refusals.keys().isdisjoint({"random", *FAR, *FIRST, *NEXT}):
            self.notes.append(f"not verified with {tried}: {why}")
        return None

    @cached_property
    def _goes_ahead(self) -> bool:
        """Whether torch may compute inputs before those before them are compared: not a model that forward changes."""
        return not self.file.waits and not self.state.changed()

    def _begin(self, run: str, inputs: list[Tensor], expected: tuple[Tensor, ...]) -> None:
        """Has the file computed what torch makes of inputs; :meth:`_finish` compares."""
        refuse_valueless(expected)
        self._sized |= run not in {"given", "random", *FAR, *FIRST, *NEXT, *KINDS}
        self.inputs[run] = list(inputs)
        if run in FAR:
            self._far[run] = expected
        if not (run in KINDS and any(self._ways[run] == way for way in self._compared.values())):
            self._pending.append((run, inputs, expected, self.file.start(inputs)))

    def _finish(self, but: int = 0) -> None:
        """Compares what has begun, but for so many."""
        while len(self._pending) > but:
            run, inputs, expected, computed = self._pending.popleft()
            self._compare(run, inputs, expected, self._results(run, computed, len(expected)))

    def _compare(self, run: str, inputs: list[Tensor], expected: tuple[Tensor, ...], actual: list[Tensor]) -> None:
        pairs = list(zip(self.output_names, expected, actual, strict=True))
        found = self.judged(run, inputs, pairs)
        if found is None:
            return
        if all(p.ok for p in found):
            self._agreed[run] = None
        else:
            self._failing[run] = inputs, actual
        self.results += found
        if run not in NOTHING:
            self._compared[run] = self._ways[run]
        if run in self._sizes:
            self._borders.add(self._sizes[run])
        for p, (_, e, a) in zip(found, pairs, strict=True):
            if math.isinf(p.max_abs) and e.shape == a.shape and e.dtype == a.dtype:
                self._infinite[p] = int((~e.isfinite()).sum()), int((~a.isfinite()).sum())

    def _computed(self, run: str, inputs: Sequence[Tensor], count: int) -> list[Tensor]:
        """What the file computes, which has so many outputs."""
        return self._results(run, self.file.start(inputs), count)

    def _results(self, run: str, computed: Future[list[Tensor]], count: int) -> list[Tensor]:
        try:
            actual = computed.result()
        except EngineError as error:
            usual = (
                "Usual cause: a number that the tracer kept as a constant, such as int(x.shape[0]), len(x) or the "
                "groups of a convolution"
            )
            raise VerificationError(
                f"torch computes {run} inputs, the exported file does not: {error}. No file was written.\n"
                + self._causes(run, usual)
                + ANYWAY
            ) from error
        if len(actual) != count:
            raise VerificationError(
                f"torch returns {count} tensors on {run} inputs, the exported file always {len(actual)}. "
                "No file was written.\n"
                + self._causes(run, "Their number must not depend on the inputs or their sizes")
                + ANYWAY
            )
        return actual

    def judged(
        self, run: str, inputs: Sequence[Tensor], pairs: Sequence[tuple[str, Tensor, Tensor]]
    ) -> list[Parity] | None:
        """How each output agrees; None, and why, where torch's own results say nothing."""
        found = [held(name, e, a, run, self.held_to, _is_far(run)) for name, e, a in pairs]
        fails = not all(p.ok for p in found)

        def again(rounding: Rounding, model: nn.Module, near: Sequence[Tensor]) -> Sequence[Tensor]:
            sizes = partial(self._borders.new_run, near) if self._resized.given else None
            like = [t.dtype for t in near] == [t.dtype for t in inputs]
            results, steady = same_way(self._ways[run], model, near, sizes, fails and self.copies.repeats, like)
            if steady is not None:
                rounding.steady = steady and rounding.steady is not False
            return results

        # Of failing given inputs how far torch is from itself counts, not only whether that explains it.
        any_order = run != "given" or all(p.ok for p in found)
        rounding = Rounding(self.model, inputs, [e for _, e, _ in pairs], self.copies, again, perturbed_first=any_order)
        with self.as_files:
            if all(p.ok for p in found):
                if self.held_to.fine and self._closely(run):
                    hold_closely(found, rounding, pairs)
            else:
                by_place(found, self._ways[run], self.model, inputs, pairs, self.notes)
                if self._ways[run].calls(ROUNDING):
                    allow_steps(found, self.copies, inputs, pairs, self.notes)
                if not all(p.ok for p in found):
                    allow_rounding(found, rounding, pairs, self.held_to, self.notes)
                    if _is_far(run) and rounding.sizes:
                        self.skipped.append(
                            f"{run}: how large torch's results are there depends on its rounding errors"
                        )
                        return None
        if _is_far(run) and not all(p.ok for p in found) and rounding.repeats:
            with self.as_files:
                if jumps(lambda *near: again(rounding, self.model, near), inputs, pairs, found):
                    self.skipped.append(
                        f"{run}: torch's results there jump where inputs change by a millionth, as with equal values"
                    )
                    return None
        return found

    def raise_failed(self) -> None:
        """Raises :class:`VerificationError` if any output differs, or would of other random numbers."""
        failed = sorted((p for p in self.results if not p.ok), key=lambda p: p.max_rel, reverse=True)
        if self._random:
            with self.as_files:
                refuse_drawn(self.model, self.tensors, self.held_to, self.state.restore, failed)
        if not failed:
            return
        worst = failed[0]
        changed = ", ".join(self.state.changed())
        kept = f"  forward changes {changed} of the model, which a file cannot do: pass and return it instead.\n"
        raise VerificationError(
            f"the exported file does not compute what torch computes: output {worst.name!r} differs by up to "
            f"{worst.max_abs:.3g} (relative {worst.max_rel:.3g}, cosine {worst.cosine:.6f}) on {worst.run} inputs, "
            f"{worst.mismatched} elements outside rtol={worst.rtol:g}, atol={worst.atol:.3g}; "
            f"{len(failed)} of {len(self.results)} comparisons fail. No file was written.\n"
            f"{kept if changed else ''}{self._causes(worst.run, self._usual(worst))}"
            f"{ANYWAY}; svexport.compare(..., layers=True) then shows the first layer that differs",
            failed,
        )

    def _usual(self, worst: Parity) -> str:
        """The usual cause of an output that differs."""
        with self.as_files:
            found = ties(self.model, *self._failing[worst.run], self.held_to)
        if found:
            return causes.EQUAL.format(found)
        if worst in self._infinite:
            return causes.NOT_FINITE.format(*self._infinite[worst])
        if "(came as " in worst.name:
            return causes.OTHER_TYPE.format(f"{worst.dtype}{list(worst.shape)}")
        if worst.run in self._sizes and not self._random:
            return f"{causes.SIZES}. {WITHOUT_NUMBERS} with a range that leaves others out"
        if line := asks_for_export(lambda: self.model(*(t.clone() for t in self.tensors))):
            return causes.EXPORTED.format(line)
        kinds = {str(t.dtype) for t in self._held} | {f"torch.{worst.dtype}"}
        half = causes.HALF if kinds & {"torch.float16", "torch.bfloat16"} else ""
        return f"Usual causes: {half}{causes.OTHERS}"

    def _causes(self, run: str, usual: str) -> str:
        """What an error says of its causes: where forward went another way than with the given inputs, or guesses."""
        given = self._ways["given"]
        if run in self._sizes and (lines := self._borders.other_way(self._sizes[run])):
            where = "".join(f"\n    {shown_line(*line)}" for line in lines[:5])
            return (
                "  forward compares dynamic sizes or uses them as numbers, and the outcome there is another one than "
                f"on the given inputs:{where}\n"
                f"  A file takes the same branches for all. {WITHOUT_NUMBERS} with a range that leaves those out. "
            )
        if (line := self._borders.rounded(run)) is not None:
            return (
                "  forward rounds a float computed from dynamic sizes; the tracer computes it in another order or "
                f"type, and rounds it to another number there:\n    {shown_line(*line)}\n"
                "  Compute with whole numbers alone: size * 7 // 10 instead of int(size * 0.7). "
            )
        if where := given.parting(self._ways[run]):
            return (
                f"  forward takes values out of tensors, and gets others there than on the given inputs, at {where}\n"
                "  A file takes the same branches for all inputs: compute both and choose by torch.where, or make a "
                "constant of it. "
            )
        taken = [shown_line(*line) for line in given.exits if not any(f":{line[1]}: " in w for w in self.warned)]
        lines_of_sizes = self._borders.reads(self._sizes[run]) if run in self._sizes else []
        guesses = [
            *self.warned[:5],
            *(f"values of inputs are taken out of tensors at {line}" for line in taken[:5]),
            *(f"sizes that values decide are asked for at {shown_line(*line)}" for line in list(given.counts)[:5]),
            *(f"dynamic sizes are asked for at {shown_line(*line)}" for line in lines_of_sizes[:5]),
        ]
        return "".join(f"  {guess}\n" for guess in guesses) + f"  {usual}. "

    def raise_unproven(self, guarded: Guards) -> None:
        """Raises :class:`ExportError` of values of inputs, and of sizes, that decide on what has not been compared."""
        with self.as_files:
            unproven = Unproven(self.model, self.inputs, self._ways, self._compared.values(), self._held)
            found = unproven.values(guarded.values) or ([] if guarded.sizes else unproven.counts())
            reached = self._reached
            self.notes += refuse_counted(self.model, self.tensors, self.held_to, self.state, reached, self._numbers)
        if found:
            refuse_values(found, self.input_names)
        if turns := self._borders.beyond():
            refuse_beyond(turns, next(iter(self._resized.given)))
        for line, sizes in self._borders.turned.items():
            self.notes.append(f"compared on both sides ({sizes}): {shown_line(*line)}")


def _is_far(run: str) -> bool:
    return run in FAR or run.startswith(SEARCHED)
