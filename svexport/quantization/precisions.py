"""Compares float, half and int8: the noise in each layer's result, and the effect on a metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from svexport import html
from svexport.errors import SvexportError
from svexport.progress import phase
from svexport.report import Report
from svexport.text import table
from svexport.tracing.arguments import bind, called, eval_mode

__all__ = ["LayerSignal", "Precisions", "precisions"]


@dataclass(frozen=True)
class LayerSignal:
    """The noise in one module's result, for each precision.

    Attributes:
        name: name of the module; empty for the model as a whole.
        kind: its class in the float model.
        signal: signal-to-noise ratio against the float model in decibels, by precision; infinite if nothing differs,
            NaN if a value is not finite.
    """

    name: str
    kind: str
    signal: Mapping[str, float]


@dataclass(frozen=True, repr=False)
class Precisions(Report):
    """Result of :func:`svexport.precisions`; ``print`` shows it as a table, a notebook with a picture.

    Attributes:
        model: class name of the float model.
        names: names of the precisions.
        layers: modules in order of execution.
        result: the model as a whole.
        metric: metric of the float model (``"float"``) and of each precision; empty without a metric.
    """

    model: str
    names: list[str]
    layers: list[LayerSignal]
    result: LayerSignal
    metric: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values; what is not finite is None."""
        return _finite(asdict(self))

    def __repr__(self) -> str:
        return f"Precisions({self.model}: {self._verdict()})"

    def tables(self) -> list[Any]:
        """The result as rich renderables: a line and a table."""
        from rich.text import Text

        header, *rows = self._rows()
        return [Text(f"{self.model}: {self._verdict()}", "bold"), table(header, rows)]

    def _title(self) -> str:
        return f"{self.model} in {', '.join(self.names)}"

    def html_body(self, picture: Callable[..., str] = html.picture) -> list[str]:
        """The result as pieces of a page; ``picture`` draws the figures."""
        header, *rows = self._rows()
        series = {name: [layer.signal[name] for layer in self.layers] for name in self.names}
        return [
            html.note(f"{self.model}: {self._verdict()}"),
            html.section(
                "Signal over noise, layer by layer",
                picture("signal over noise of each layer", html.signal_figure, series),
                html.table(header, rows),
            ),
        ]

    def _verdict(self) -> str:
        signals = ", ".join(f"{name} {_shown(self.result.signal[name])}" for name in self.names)
        measured = ", ".join(f"{name} {value:.4g}" for name, value in self.metric.items())
        return f"{signals} of the result" + (f"; metric {measured}" if measured else "")

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("layer", "type", *self.names)]
        for layer in (*self.layers, self.result):
            rows.append((layer.name or "result", layer.kind, *(_shown(layer.signal[name]) for name in self.names)))
        return rows


def precisions(
    model: nn.Module,
    others: Mapping[str, nn.Module],
    batches: Iterable[Any],
    metric: Callable[[Any, Any], float] | None = None,
) -> Precisions:
    """Runs a float model and copies of it in other precisions, and compares the results of each module.

    Args:
        model: the model in float32.
        others: models with modules of the same names, by the name to show: ``{"half": copy.deepcopy(model).half(),
            "int8": svexport.quantize(model, batches)}``. They get the batches in the type of their parameters.
        batches: held-out batches, as for :func:`svexport.quantize`.
        metric: ``metric(outputs, batch)`` returns a number for a batch; its mean is shown for each model.

    Raises:
        SvexportError: without others or batches, or if one of the others shares no module name with the model.
        ExportError: if a batch does not fit ``forward``.
    """
    if not others:
        raise SvexportError(
            "expected models to compare with, got none; give copies by name: {'half': copy.deepcopy(model).half()}"
        )
    noise: dict[str, dict[_Key, list[float]]] = {name: {} for name in others}
    kinds: dict[_Key, str] = {}
    scores: dict[str, list[float]] = {name: [] for name in ("float", *others)}
    count = 0
    with ExitStack() as stack, torch.no_grad():
        for each in (model, *others.values()):
            stack.enter_context(eval_mode(each))
        for count, batch in enumerate(batches, 1):
            phase(f"comparing precisions, batch {count}")
            expected, outputs = _returned(model, batch)
            kinds |= {key: type(model.get_submodule(key[0])).__name__ for key in expected}
            if metric is not None:
                scores["float"].append(float(metric(outputs, batch)))
            for name, other in others.items():
                actual, outputs = _returned(other, batch)
                for key in expected.keys() & actual.keys():
                    _add(noise[name].setdefault(key, [0.0, 0.0]), expected[key], actual[key])
                if metric is not None:
                    scores[name].append(float(metric(outputs, batch)))
    if not count:
        raise SvexportError("batches is empty; give an iterable of what forward is called with, such as a DataLoader")
    for name, found in noise.items():
        if not found.keys() - {_WHOLE}:
            raise SvexportError(f"{name}: expected modules named as the model's, got none; give a copy of the model")
    signals = {
        key: LayerSignal(_text(key), kind, {name: _decibels(found.get(key)) for name, found in noise.items()})
        for key, kind in kinds.items()
    }
    means = {name: math.fsum(values) / len(values) for name, values in scores.items() if values}
    whole = signals.pop(_WHOLE)
    return Precisions(type(model).__name__, list(others), list(signals.values()), whole, means)


_Key = tuple[str, int]
"""A module, and which of its calls in a forward."""

_WHOLE: _Key = ("", 0)


def _returned(model: nn.Module, batch: Any) -> tuple[dict[_Key, list[Tensor]], Any]:
    """The results of each module, and of the model."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    bound = bind(model, batch)
    bound.arguments = tree_map(
        lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, dict(bound.arguments)
    )
    found: dict[_Key, list[Tensor]] = {}
    with _observed(model, found):
        outputs = called(model, bound, "a batch")
    return found, outputs


@contextmanager
def _observed(model: nn.Module, found: dict[_Key, list[Tensor]]) -> Iterator[None]:
    counts: dict[str, int] = {}

    def observe(name: str, output: Any) -> None:
        tensors = [t.detach().clone() for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
        if tensors:  # cloned: a later function may work on them in place
            found[name, counts.get(name, 0)] = tensors
        counts[name] = counts.get(name, 0) + 1

    handles = [
        module.register_forward_hook(lambda _, args, output, name=name: observe(name, output))
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _add(sums: list[float], expected: list[Tensor], actual: list[Tensor]) -> None:
    """Adds the power of a signal and of its noise."""
    for e, a in zip(expected, actual, strict=False):
        if e.shape == a.shape:
            e, a = e.double(), a.double()
            sums[0] += float(e.square().sum())
            sums[1] += float((a - e).square().sum())


def _decibels(sums: list[float] | None) -> float:
    if sums is None or not all(map(math.isfinite, sums)):
        return math.nan
    power, noise = sums
    return math.inf if not noise else -math.inf if not power else 10 * math.log10(power / noise)


def _shown(signal: float) -> str:
    if math.isnan(signal):
        return "not finite"
    return "equal" if signal == math.inf else f"{signal:.1f} dB"


def _text(key: _Key) -> str:
    name, call = key
    return f"{name}, call {call + 1}" if call else name


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
