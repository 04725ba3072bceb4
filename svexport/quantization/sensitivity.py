"""Finds the layers that hurt a quantized model most, and those to keep unquantized for a given loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from svexport import html
from svexport.errors import SvexportError
from svexport.progress import phase
from svexport.quantization.layers import QuantizedLayer, quantized_layers
from svexport.report import Report
from svexport.text import table
from svexport.tracing.arguments import bind, called, eval_mode

__all__ = ["LayerSensitivity", "Sensitivity", "sensitivity"]

_DRAWN = 40
"""Layers in a picture."""
_HEADER = ("layer", "it alone", "all below it")


@dataclass(frozen=True)
class LayerSensitivity:
    """The effect of one layer on the results.

    Attributes:
        name: name of the layer.
        loss: the loss with only this layer quantized.
        rest: the loss with this layer and all before it in the ranking unquantized, and the others quantized.
    """

    name: str
    loss: float
    rest: float


@dataclass(frozen=True, repr=False)
class Sensitivity(Report):
    """Result of :func:`svexport.sensitivity`; ``print`` shows it as a table, a notebook with a picture.

    Attributes:
        model: class name of the model.
        loss: the loss of the model with all its layers quantized.
        unit: the kind of losses: ``"metric"``, the decrease of the user's metric, or ``"noise"``, the share of noise in
            the results' power.
        layers: the layers, the most sensitive first.
    """

    model: str
    loss: float
    unit: str
    layers: list[LayerSensitivity]

    def keep(self, loss: float) -> list[str]:
        """The fewest layers from the top of the ranking to keep unquantized so that the loss is at most ``loss``, for
        ``svexport.quantize(model, batches, keep=…)``.

        Raises:
            SvexportError: if the loss is larger even without any quantized layer: the metric differs from run to run.
        """
        if self.loss <= loss:
            return []
        for count, layer in enumerate(self.layers, 1):
            if layer.rest <= loss:
                return [one.name for one in self.layers[:count]]
        raise SvexportError(
            f"keep: expected a loss of at most {loss:.3g} with no layer quantized, got {self.layers[-1].rest:.3g}; "
            "check that the metric returns the same number for the same outputs"
        )

    def to_dict(self) -> dict[str, Any]:
        """The result as plain JSON-serializable values."""
        layers = [{"name": one.name, "loss": one.loss, "rest": one.rest} for one in self.layers]
        return {"model": self.model, "loss": self.loss, "unit": self.unit, "layers": layers}

    def __repr__(self) -> str:
        first = f", {self.layers[0].name} first" if self.layers else ""
        return f"Sensitivity({self.model}: {self.unit} {self.loss:.3g}{first})"

    def _title(self) -> str:
        return f"{self.model}: what int8 costs"

    def html_body(self, picture: Callable[..., str] = html.picture) -> list[str]:
        """The ranking as pieces of a page: picture and table; ``picture`` draws the first of many layers."""
        shown = self.layers[:_DRAWN]
        columns = [one.name for one in shown], [one.loss for one in shown], [one.rest for one in shown]
        return [
            html.note(f"{self.model}: {self.unit} {self.loss:.3g} with all layers quantized"),
            html.section(
                "Layers by what is lost",
                picture("what is lost by layer", html.ranking_figure, *columns, self.loss),
                html.table(_HEADER, self._rows()),
            ),
        ]

    def tables(self) -> list[Any]:
        """The ranking as rich renderables."""
        from rich.text import Text

        said = f"{self.model}: {self.unit} {self.loss:.3g} with all layers quantized"
        return [Text(said, "bold"), table(_HEADER, self._rows())]

    def _rows(self) -> list[tuple[str, str, str]]:
        return [(one.name, f"{one.loss:.3g}", f"{one.rest:.3g}") for one in self.layers]


def sensitivity(
    model: nn.Module, batches: Iterable[Any], metric: Callable[[Any, Any], float] | None = None
) -> Sensitivity:
    """Ranks the layers of a quantized model by the loss when each layer alone is quantized.

    The model runs over the batches twice for each quantized layer.

    Args:
        model: a model from :func:`svexport.quantize`. It is not changed.
        batches: held-out batches, which are kept in memory.
        metric: ``metric(outputs, batch)`` returns a number for a batch, larger is better; its mean is used. ``None``
            measures noise: the squared difference from the outputs without quantization, relative to their square.

    Raises:
        SvexportError: if nothing is quantized, or without batches.
        ExportError: if a batch does not fit ``forward``.
    """
    layers = dict(quantized_layers(model))
    if not layers:
        raise SvexportError(f"{type(model).__name__}: expected the result of svexport.quantize, got no quantized layer")
    held = list(batches)
    if not held:
        raise SvexportError("batches is empty; give an iterable of what forward is called with, such as a DataLoader")
    with torch.no_grad(), eval_mode(model), _kept(layers.values()):
        loss = _Loss(model, layers, held, metric)
        count = len(layers)
        everything = loss(layers, "all layers")
        alone = {name: loss([name], f"layer {i} of {count} alone") for i, name in enumerate(layers, 1)}
        ranking = sorted(layers, key=lambda name: -alone[name])
        rest = [loss(ranking[i:], f"all layers but {i} of {count}") for i in range(1, count + 1)]
    ranked = [LayerSensitivity(name, alone[name], left) for name, left in zip(ranking, rest, strict=True)]
    return Sensitivity(type(model).__name__, everything, "metric" if metric else "noise", ranked)


@contextmanager
def _kept(layers: Iterable[QuantizedLayer]) -> Iterator[None]:
    """Which quantizers are on afterwards."""
    quantizers = [each for layer in layers for each in layer.quantizers()]
    before = [quantizer.enabled for quantizer in quantizers]
    try:
        yield
    finally:
        for quantizer, enabled in zip(quantizers, before, strict=True):
            quantizer.enabled = enabled


class _Loss:
    """The loss with some layers quantized, relative to none."""

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, QuantizedLayer],
        batches: Sequence[Any],
        metric: Callable[[Any, Any], float] | None,
    ) -> None:
        self._model, self._layers, self._metric = model, layers, metric
        self._batches = [(batch, bind(model, batch)) for batch in batches]
        outputs = self._outputs((), "no layer")
        if metric is None:
            self._expected = [_tensors(one) for one in outputs]
            self._power = sum(_power(expected) for expected in self._expected)
        else:
            self._reference = self._mean(outputs)

    def __call__(self, quantized: Iterable[str], said: str) -> float:
        outputs = self._outputs(quantized, said)
        if self._metric is not None:
            return self._reference - self._mean(outputs)
        pairs = zip(self._expected, map(_tensors, outputs), strict=True)
        noise = sum(_power([a - e for e, a in zip(expected, actual, strict=True)]) for expected, actual in pairs)
        return noise / self._power if self._power and math.isfinite(noise) else (math.inf if noise else 0.0)

    def _outputs(self, quantized: Iterable[str], said: str) -> Iterator[Any]:
        phase(f"measuring, {said} quantized")
        on = set(quantized)
        for name, layer in self._layers.items():
            layer.switch(name in on)
        return (called(self._model, bound, f"batch {number}") for number, (_, bound) in enumerate(self._batches, 1))

    def _mean(self, outputs: Iterable[Any]) -> float:
        assert self._metric is not None
        numbers = [self._metric(one, batch) for one, (batch, _) in zip(outputs, self._batches, strict=True)]
        try:
            mean = math.fsum(map(float, numbers)) / len(numbers)
        except (TypeError, ValueError, RuntimeError) as error:
            raise SvexportError(f"metric must return a number, got {type(numbers[0]).__name__}") from error
        if not math.isfinite(mean):
            raise SvexportError(f"metric must return finite numbers, got a mean of {mean}")
        return mean


def _tensors(outputs: Any) -> list[Tensor]:
    return [t.double() for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.is_floating_point()]


def _power(tensors: Iterable[Tensor]) -> float:
    return math.fsum(float(t.square().sum()) for t in tensors)
