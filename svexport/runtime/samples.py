"""Compares engines with torch over many samples: running statistics, the worst sample, a user's metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from svexport.errors import SvexportError
from svexport.parity import Parity, parity, tolerances
from svexport.progress import phase
from svexport.report import Printed
from svexport.runtime.engine import Engine
from svexport.runtime.layers import converted
from svexport.runtime.outputs import Outputs
from svexport.text import table
from svexport.tracing.arguments import FlatModel, bind, eval_mode
from svexport.tracing.as_in_files import AsInFiles
from svexport.tracing.state import unchanged

__all__ = ["OutputStatistics", "SampleComparison", "compare_samples"]

_LOW, _HIGH, _FINE = -12, 4, 50
"""The histogram of absolute errors: lowest and highest decade, and bins per decade. Quantiles are accurate to 5 %."""


@dataclass
class OutputStatistics:
    """How close one output of one engine is to torch's, over all samples.

    Attributes:
        engine: name of the engine.
        output: name of the output.
        samples: number of samples.
        max_abs: largest absolute difference.
        mean_abs: mean absolute difference of all finite elements.
        cosine: the smallest cosine similarity of a sample.
        mismatched: total number of elements outside the tolerances.
        failed: number of samples with such elements.
        worst: index of the sample with the largest ``max_abs``.
    """

    engine: str
    output: str
    samples: int = 0
    max_abs: float = 0.0
    cosine: float = 1.0
    mismatched: int = 0
    failed: int = 0
    worst: int = 0
    _sum: float = field(default=0.0, repr=False)
    _count: int = field(default=0, repr=False)
    _counts: Tensor = field(default_factory=lambda: torch.zeros((_HIGH - _LOW) * _FINE, dtype=torch.long), repr=False)

    @property
    def ok(self) -> bool:
        """Whether no sample failed."""
        return not self.failed

    @property
    def mean_abs(self) -> float:
        """The mean absolute difference over all elements of all samples."""
        return self._sum / self._count if self._count else 0.0

    def quantile(self, fraction: float) -> float:
        """The absolute error that this fraction of all elements does not exceed, accurate to 5 %; zero reads 1e-12."""
        total = int(self._counts.sum())
        if not total:
            return 0.0
        place = int(torch.searchsorted(self._counts.cumsum(0), math.ceil(fraction * total)))
        return float(10.0 ** (_LOW + (min(place, len(self._counts) - 1) + 1) / _FINE))

    def add(self, number: int, p: Parity, expected: Tensor, actual: Tensor) -> None:
        """Adds the output of one more sample to the statistics."""
        if not self.samples or p.max_abs > self.max_abs:
            self.worst = number
        self.samples += 1
        self.max_abs = max(self.max_abs, p.max_abs)
        self.cosine = min(self.cosine, p.cosine)
        self.mismatched += p.mismatched
        self.failed += not p.ok
        if expected.shape != actual.shape or not expected.numel():
            return
        wide = torch.complex128 if expected.is_complex() or actual.is_complex() else torch.float64
        error = (expected.detach().cpu().to(wide) - actual.detach().cpu().to(wide)).abs().flatten()
        error = error[error.isfinite()]
        self._sum += float(error.sum())
        self._count += error.numel()
        bins = ((error.clamp(10.0**_LOW, 10.0**_HIGH * 0.999).log10() - _LOW) * _FINE).floor().long()
        self._counts += torch.bincount(bins, minlength=len(self._counts))

    def to_dict(self) -> dict[str, Any]:
        """The statistics, as JSON-serializable values."""
        names = ("engine", "output", "samples", "max_abs", "mean_abs", "cosine", "mismatched", "failed", "worst", "ok")
        quantiles = {f"p{round(100 * f, 1):g}": self.quantile(f) for f in (0.5, 0.9, 0.99)}
        return {**{name: getattr(self, name) for name in names}, **quantiles}


@dataclass(frozen=True, repr=False)
class SampleComparison(Printed):
    """Result of :func:`svexport.compare` over samples; ``print`` shows it as tables.

    Attributes:
        model: class name of the torch model.
        samples: number of samples.
        rtol: relative tolerance.
        atol: absolute tolerance.
        outputs: one entry per engine and output.
        worst: by engine, the sample with the largest error, as it was given; None without samples.
        metrics: by engine (torch's under ``"torch"``), the mean of each number that ``metric`` returned.
        notes: remarks.
    """

    model: str
    samples: int
    rtol: float
    atol: float
    outputs: list[OutputStatistics]
    worst: Mapping[str, Any]
    metrics: Mapping[str, Mapping[str, float]]
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every output of every engine is within the tolerances on every sample."""
        return all(one.ok for one in self.outputs)

    def to_dict(self) -> dict[str, Any]:
        """All fields except the samples, as plain JSON-serializable values."""
        return {
            "model": self.model,
            "ok": self.ok,
            "samples": self.samples,
            "rtol": self.rtol,
            "atol": self.atol,
            "outputs": [one.to_dict() for one in self.outputs],
            "metrics": {name: dict(values) for name, values in self.metrics.items()},
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        return f"SampleComparison({self._verdict()})"

    def _verdict(self) -> str:
        failed = sorted({one.engine for one in self.outputs if not one.ok})
        verdict = f"{', '.join(failed)} differ" if failed else "all agree"
        return f"{self.model}, {self.samples} samples: {verdict} (rtol {self.rtol:g}, atol {self.atol:g})"

    def tables(self) -> list[Any]:
        """The comparison as rich renderables."""
        from rich.text import Text

        rows = []
        for one in self.outputs:
            errors = (f"{value:.2e}" for value in (one.max_abs, one.mean_abs, one.quantile(0.99)))
            verdict = "ok" if one.ok else f"FAIL in {one.failed}"
            cells = (*errors, f"{one.cosine:.8f}", f"{one.mismatched:,}", f"sample {one.worst}", verdict)
            rows.append((one.engine, one.output, *cells))
        header = ("engine", "output", "max abs", "mean abs", "p99", "cosine", "outside", "worst", "")
        tables: list[Any] = [Text(self._verdict(), "bold"), table(header, rows)]
        if self.metrics:
            names = list(dict.fromkeys(name for values in self.metrics.values() for name in values))
            measured = (
                (engine, *(f"{values[name]:.6g}" if name in values else "" for name in names))
                for engine, values in self.metrics.items()
            )
            tables.append(table(("", *names), measured))
        return tables


class _Metrics:
    """Running means of the numbers that the user's metric returns."""

    def __init__(self, function: Callable[[Any, Any], Any] | None) -> None:
        self._function = function
        self._sums: dict[str, dict[str, list[float]]] = {}

    def add(self, name: str, outputs: Any, batch: Any) -> None:
        if self._function is None:
            return
        made = self._function(outputs, batch)
        numbers = made if isinstance(made, Mapping) else {"metric": made}
        for key, value in numbers.items():
            try:
                number = float(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise SvexportError(
                    f"metric must return a number or a dict of numbers, got {type(value).__name__} for {key!r}"
                ) from error
            total = self._sums.setdefault(name, {}).setdefault(str(key), [0.0, 0.0])
            total[0] += number
            total[1] += 1

    def means(self) -> dict[str, dict[str, float]]:
        return {name: {key: s / n for key, (s, n) in values.items()} for name, values in self._sums.items()}


def compare_samples(
    model: nn.Module,
    engines: Mapping[str, Engine | nn.Module],
    samples: Iterable[Any],
    *,
    rtol: float | None,
    atol: float | None,
    metric: Callable[[Any, Any], Any] | None,
) -> SampleComparison:
    """:func:`svexport.compare` over samples. It holds one sample at a time, plus the worst sample of each engine.

    Raises:
        SvexportError: without samples, if the model cannot be called with one, or if an engine has another number of
            outputs than torch. Errors of the iterable are not caught.
    """
    from svexport.runtime.compare import feeds_of, paired

    if not isinstance(samples, Iterable):
        raise SvexportError(f"samples expects an iterable such as a DataLoader, got {type(samples).__name__}")
    statistics: dict[tuple[str, str], OutputStatistics] = {}
    worst: dict[str, tuple[float, Any]] = {}
    metrics = _Metrics(metric)
    notes: list[str] = []
    number = -1
    bounds: tuple[float, float] | None = None
    with ExitStack() as stack:
        for module in (model, *(one for one in engines.values() if isinstance(one, nn.Module))):
            stack.enter_context(eval_mode(module))
        stack.enter_context(unchanged(model))
        stack.enter_context(torch.no_grad())
        as_files = stack.enter_context(AsInFiles())
        for number, sample in enumerate(samples):
            phase(f"comparing sample {number}")
            bound = bind(model, sample)
            flat = FlatModel(model, bound)
            tensors = [t.detach() for t in flat.tensors]
            try:
                expected = flat(*(t.clone() for t in tensors))
            except Exception as error:
                hint = "; what a DataLoader yields as a list is given as (tuple(batch) for batch in loader)"
                raise SvexportError(
                    f"{type(model).__name__} cannot be called with sample {number}, a {type(sample).__name__}: "
                    f"{type(error).__name__}: {str(error).strip()}. A sample is a tensor, a tuple of arguments or a "
                    f"dict of them{hint if isinstance(sample, list) else ''}"
                ) from error
            metrics.add("torch", _as_returned(expected, flat.output_names, bool(flat.output_keys)), sample)
            for name, other in engines.items():
                if isinstance(other, Engine):
                    names, dtypes = other.output_names, other.dtypes
                    actual: Sequence[Tensor] = other.run(feeds_of(other, flat.input_names, tensors, notes))
                else:
                    second = FlatModel(other, bind(other, bound.args, bound.kwargs))
                    actual = second(*(t.detach().clone() for t in second.tensors))
                    names, dtypes = second.output_names, second.dtypes
                metrics.add(name, _as_returned(actual, names, bool(flat.output_keys)), sample)
                kinds = {t.dtype for t in (*expected, *actual)} | flat.dtypes | dtypes
                held = tolerances(rtol, atol, kinds)
                bounds = held if bounds is None else (max(bounds[0], held[0]), max(bounds[1], held[1]))
                for output, e, a in paired(flat.output_names, expected, names, actual, name):
                    a = converted(e, a)
                    p = parity(output, e, a, rtol=held[0], atol=held[1])
                    key = name, output
                    statistics.setdefault(key, OutputStatistics(name, output)).add(number, p, e, a)
                    if name not in worst or p.max_abs > worst[name][0]:
                        worst[name] = p.max_abs, sample
        notes += as_files.notes
    if bounds is None:
        raise SvexportError("samples is empty; give an iterable of what forward is called with, such as a DataLoader")
    found = list(statistics.values())
    kept = {name: sample for name, (_, sample) in worst.items()}
    notes = list(dict.fromkeys(notes))
    return SampleComparison(type(model).__name__, number + 1, *bounds, found, kept, metrics.means(), notes)


def _as_returned(tensors: Sequence[Tensor], names: Sequence[str], in_dict: bool) -> Any:
    """Gives the results of torch and of engines the same form: a tensor, or :class:`Outputs`."""
    return tensors[0] if len(tensors) == 1 and not in_dict else Outputs(tensors, names)
