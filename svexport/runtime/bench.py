"""Times engines and torch by interleaved runs in one process, and compares the outputs of each with torch's."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from svexport import html
from svexport.errors import SvexportError
from svexport.progress import phase
from svexport.report import Report
from svexport.runtime.compare import compare, feeds_of, named
from svexport.runtime.engine import Engine
from svexport.runtime.session import load
from svexport.text import table
from svexport.tracing.arguments import FlatModel, bind, eval_mode, given_arguments
from svexport.tracing.state import unchanged

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Bench", "Timing", "bench"]

_WARM_UP = 3
_MOST = 100_000
"""The maximum number of runs of each contender, however short a run is."""


@dataclass(frozen=True)
class Timing:
    """The run times and errors of one contender.

    Attributes:
        name: name of the contender.
        device: device that it ran on.
        milliseconds: time of every run, in order.
        error: the largest absolute difference from torch; None for torch itself.
        ok: whether all outputs are within :func:`svexport.compare`'s tolerances; None for torch itself.
        memory: peak GPU memory of torch's allocator during the runs minus that before, in bytes; None on the CPU. It
            does not count what TensorRT and ONNX Runtime allocate themselves.
    """

    name: str
    device: str
    milliseconds: tuple[float, ...]
    error: float | None = None
    ok: bool | None = None
    memory: int | None = None

    def percentile(self, percent: float) -> float:
        """The given percentile of the run times, in milliseconds."""
        ordered = sorted(self.milliseconds)
        return ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)]

    @property
    def median(self) -> float:
        """The median run time, in milliseconds."""
        return statistics.median(self.milliseconds)

    @property
    def throughput(self) -> float:
        """Runs per second, one run after the other."""
        return 1e3 * len(self.milliseconds) / sum(self.milliseconds)

    def to_dict(self) -> dict[str, Any]:
        """The times and the error, as JSON-serializable values."""
        percentiles = {f"p{p}": self.percentile(p) for p in (50, 90, 99)}
        return {**asdict(self), "milliseconds": {"min": min(self.milliseconds), **percentiles, "median": self.median},
                "runs": len(self.milliseconds), "throughput": self.throughput}  # fmt: skip


@dataclass(frozen=True, repr=False)
class Bench(Report):
    """Result of :func:`svexport.bench`; ``print`` shows it as a table, a notebook with a picture.

    Attributes:
        model: class name of the torch model.
        inputs: name -> ``"float32[1, 3, 224, 224]"``.
        timings: one per contender, torch's first.
        notes: how it was measured.
    """

    model: str
    inputs: Mapping[str, str]
    timings: list[Timing]
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every contender agrees with torch."""
        return all(t.ok is not False for t in self.timings)

    def __getitem__(self, name: str) -> Timing:
        found = next((t for t in self.timings if t.name == name), None)
        if found is None:
            raise SvexportError(f"nothing is named {name!r}; there are {', '.join(t.name for t in self.timings)}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """All results except the times of single runs, as plain JSON-serializable values."""
        return {
            "model": self.model,
            "ok": self.ok,
            "inputs": dict(self.inputs),
            "timings": [t.to_dict() for t in self.timings],
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        return f"Bench({self.model}: {', '.join(f'{t.name} {t.median:.3g} ms' for t in self.timings)})"

    def tables(self) -> list[Any]:
        """The table as a rich renderable."""
        header, *rows = self._rows()
        made = table(header, rows, f"{self.model}, {', '.join(self.inputs.values())}")
        for column in made.columns[1:]:
            column.justify = "right"
        return [made]

    def _title(self) -> str:
        return f"{self.model}: time and error"

    def html_body(self, picture: Callable[..., str] = html.picture) -> list[str]:
        """The result as pieces of a page; ``picture`` draws the figures."""
        header, *rows = self._rows()
        wrong = [i for i, t in enumerate(self.timings) if t.ok is False]
        drawn = picture("milliseconds of the runs of each", timing_figure, self.timings)
        notes = [html.section("Notes", *map(html.note, self.notes))] if self.notes else []
        return [html.section("Time and error", drawn, html.table(header, rows, marked=wrong)), *notes]

    def _rows(self) -> list[tuple[str, ...]]:
        header = ("", "device", "median ms", "p90", "p99", "runs/s", "times torch's", "max abs error", "")
        first = self.timings[0].median
        rows: list[tuple[str, ...]] = [header]
        for t in self.timings:
            times = [f"{ms:.3f}" for ms in (t.median, t.percentile(90), t.percentile(99))]
            error = "" if t.error is None else f"{t.error:.2e}"
            verdict = {None: "", True: "ok", False: "FAIL"}[t.ok]
            rows.append((t.name, t.device, *times, f"{t.throughput:,.0f}", f"{t.median / first:.3g}", error, verdict))
        return rows


@dataclass
class _Contender:
    name: str
    device: torch.device
    calls: list[Callable[[], Any]]  # one for each copy of the inputs
    error: float | None = None
    ok: bool | None = None
    times: list[float] = field(default_factory=list)
    memory: int | None = None

    def run(self, number: int) -> None:
        """Runs once, on input copy ``number``, and records the time until the device has finished."""
        started = time.perf_counter()
        self.calls[number % len(self.calls)]()
        self.wait()
        self.times.append(1e3 * (time.perf_counter() - started))

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def bench(
    model: nn.Module,
    others: Any = (),
    args: Any = None,
    *,
    seconds: float = 1.0,
    runs: int | None = None,
    compiled: bool = False,
    copies: int = 4,
) -> Bench:
    """Times a torch model and engines made from it, and compares their outputs.

    >>> print(svexport.bench(model, ["model.onnx", "model.engine"], (images,)))

    The contenders run in turn for many rounds, and the order rotates every round, so that a disturbance of the machine
    affects all of them. Each round uses another copy of the inputs, which is on the contender's device before its time
    starts. A time is wall-clock time from the call until the device has finished.

    Args:
        model: the torch model, run in eval mode without gradients.
        others: engines, paths for :func:`svexport.load`, torch models or functions of the same arguments: one, a
            sequence, or a dict from the names to show.
        args: as for :func:`svexport.export`.
        seconds: time for each contender, which makes at least 10 runs.
        runs: number of runs of each contender, instead of ``seconds``.
        compiled: also time ``torch.compile`` of the model.
        copies: number of copies of the inputs.

    Raises:
        ExportError: if the arguments do not fit ``forward``.
        EngineError: if they do not fit an engine, or it cannot be loaded or run.
        SvexportError: on duplicate names, or numbers below 1.
    """
    whole = [copies, *([] if runs is None else [runs])]
    if not all(isinstance(n, int) and n >= 1 for n in whole) or not (isinstance(seconds, (int, float)) and seconds > 0):
        raise SvexportError(
            f"runs and copies expect integers from 1 on, seconds more than 0; got {runs!r}, {copies!r}, {seconds!r}"
        )
    bound = bind(model, *given_arguments(model, args))
    arguments = bound.args, bound.kwargs
    flat = FlatModel(model, bound)
    names = dict(named(others))
    if compiled:
        names = {"torch.compile": torch.compile(model), **names}
    if "torch" in names:
        raise SvexportError("'torch' names the model itself; give another name")
    notes: list[str] = []
    with ExitStack() as stack:
        for context in (eval_mode(model), unchanged(model), torch.no_grad()):
            stack.enter_context(context)
        contenders = [_torch("torch", model, arguments, copies, _device_of(model, flat.tensors))]
        for name, other in names.items():
            phase(f"loading {name}")
            if isinstance(other, (str, os.PathLike)):
                other = stack.enter_context(load(other))
            compared = compare(model, other, args)
            notes += compared.notes
            contender = _contender(stack, name, other, flat, arguments, copies)
            contender.error, contender.ok = max(p.max_abs for p in compared.outputs), compared.ok
            contenders.append(contender)
        for contender in contenders:
            phase(f"warming up {contender.name}")
            contender.memory = _warm_up(contender)
        _measure(contenders, seconds, runs)
    timings = [Timing(c.name, str(c.device), tuple(c.times), c.error, c.ok, c.memory) for c in contenders]
    threads = f"torch's threads: {torch.get_num_threads()}"
    notes.append(f"{len(timings[0].milliseconds)} rounds, {copies} copies of the inputs, wall clock, {threads}")
    inputs = {
        name: f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
        for name, t in zip(flat.input_names, flat.tensors, strict=True)
    }
    return Bench(type(model).__name__, inputs, timings, list(dict.fromkeys(notes)))


def _device_of(model: nn.Module, tensors: Sequence[Tensor]) -> torch.device:
    return next((t.device for t in (*model.parameters(), *model.buffers(), *tensors)), torch.device("cpu"))


def _torch(
    name: str, function: Callable[..., Any], arguments: tuple[Any, dict[str, Any]], copies: int, device: torch.device
) -> _Contender:
    def call(args: Any, kwargs: dict[str, Any]) -> Callable[[], Any]:
        return lambda: function(*args, **kwargs)

    clone = lambda t: t.detach().clone()  # noqa: E731
    copied = [torch.utils._pytree.tree_map_only(Tensor, clone, arguments) for _ in range(copies)]
    return _Contender(name, device, [call(*one) for one in copied])


def _contender(
    stack: ExitStack, name: str, other: Any, flat: FlatModel, arguments: tuple[Any, dict[str, Any]], copies: int
) -> _Contender:
    if isinstance(other, Engine):
        feeds = feeds_of(other, flat.input_names, [t.detach() for t in flat.tensors], [])
        placed = [[t.to(other.device, copy=True).contiguous() for t in feeds] for _ in range(copies)]
        return _Contender(name, other.device, [partial(other.run, given) for given in placed])
    if isinstance(other, nn.Module):
        stack.enter_context(eval_mode(other))
    return _torch(name, other, arguments, copies, _device_of(flat, flat.tensors))


def _warm_up(contender: _Contender) -> int | None:
    before = None
    if contender.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(contender.device)
        before = torch.cuda.memory_allocated(contender.device)
    for number in range(max(_WARM_UP, len(contender.calls))):
        contender.run(number)
    contender.times.clear()
    return None if before is None else torch.cuda.max_memory_allocated(contender.device) - before


def _measure(contenders: Sequence[_Contender], seconds: float, runs: int | None) -> None:
    deadline = time.perf_counter() + seconds * len(contenders)
    number = 0
    while number < (runs or _MOST):
        if runs is None and number >= 10 and time.perf_counter() > deadline:
            break
        if number % 64 == 0:
            phase(f"measuring, round {number}")
        turned = number % len(contenders)
        for contender in (*contenders[turned:], *contenders[:turned]):
            contender.run(number)
        number += 1


def timing_figure(timings: Sequence[Timing]) -> Figure:
    """Draws every contender's runs as a bar from p10 to p90 with a tick at the median."""
    figure = html.blank(0.6 + 0.45 * len(timings))
    axes = figure.add_subplot()
    for row, timing in enumerate(timings):
        low, high = timing.percentile(10), timing.percentile(90)
        axes.barh(
            row, high - low, left=low, height=0.5, color="#e5484d" if timing.ok is False else "#3b82f6", alpha=0.5
        )
        axes.plot([timing.median] * 2, [row - 0.3, row + 0.3], color="#010203", linewidth=1.5)
    axes.set_yticks(range(len(timings)), [html.cut(t.name) for t in timings])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("ms: median, p10 to p90")
    return figure
