"""Measures, inside the model, which replacements make it faster."""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from svexport.tracing.arguments import leaves

__all__ = ["WHOLE_MARGIN", "Times", "gains", "measure", "on_gpu"]

ROUNDS, SECONDS = 12, 4.0
"""Most rounds in which all models are timed in turn, and the seconds that all rounds may take, about."""

MARGIN, WHOLE_MARGIN = 1.02, 1.01
"""Ratio by which two timings of one model may differ; ratio by which a model with all replacements may be slower.

A gain below the first may be noise, and a replacement kept for it may be a loss. A loss of one kind of replacement
below it may be noise, and the others make up for it; nothing makes up for a loss of the whole.
"""

MOST = 0.75
"""Fraction of the rounds in which a model has to be faster: medians of varying times differ by more than 2 %."""


@dataclass(frozen=True)
class Times:
    """Times of a call of a model, launches included.

    Attributes:
        inference: seconds of a forward without gradients, in each round.
        training: seconds of a forward and backward; empty for a model without gradients, or too large for it.
    """

    inference: tuple[float, ...]
    training: tuple[float, ...] = ()

    def beside(self, other: Times) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
        """The times of both, by round, in inference and in training, if both have them."""
        return [(a, b) for a, b in ((self.inference, other.inference), (self.training, other.training)) if a and b]

    def over(self, other: Times) -> tuple[float, ...]:
        """The ratio of this one's median time to the other's, in inference and in training."""
        return tuple(statistics.median(a) / statistics.median(b) for a, b in self.beside(other))

    def often(self, other: Times) -> tuple[float, ...]:
        """The fraction of rounds in which this took longer than the other, in inference and in training."""
        return tuple(sum(map(operator.gt, a, b)) / len(a) for a, b in self.beside(other))

    def words(self, other: Times) -> str:
        """The speedup of the other over this, in words."""
        return " ".join(
            f"{ratio:.2f}x{'' if name == 'inference' else ' trained'}"
            for name, ratio in zip(("inference", "training"), self.over(other), strict=False)
        )

    def sentence(self, other: Times) -> str:
        """The same for a report, with the times."""
        return f"{self.words(other)} as fast: " + ", ".join(
            f"{name} {1e3 * statistics.median(theirs):.2f} ms to {1e3 * statistics.median(ours):.2f}"
            for name, (theirs, ours) in zip(("inference", "training"), self.beside(other), strict=False)
        )


def on_gpu(arguments: Any) -> bool:
    """Whether any tensor among the arguments is on a CUDA device."""
    return any(isinstance(leaf, Tensor) and leaf.is_cuda for _, leaf in leaves(arguments))


def gains(without: Times, replaced: Times, margin: float = MARGIN) -> bool:
    """Whether a replacement makes a model faster: faster in inference or training beyond noise, and slower in neither.

    Args:
        margin: ratio of times up to which being slower counts as noise.
    """
    ratios = without.over(replaced)
    gained = any(ratio > MARGIN and part >= MOST for ratio, part in zip(ratios, without.often(replaced), strict=True))
    return gained and min(ratios) > 1 / margin


def measure(models: Mapping[str, nn.Module], call: Callable[[nn.Module], Any]) -> dict[str, Times]:
    """Times models in turn, several calls at once, so that other load on the machine favours none.

    If the caller is under autocast, every call converts the weights again, as training steps do.

    Args:
        models: copies, which are left in eval mode: training mode would change the running statistics of norms.
        call: runs a model on its inputs.
    """
    for module in (module for model in models.values() for module in model.modules()):
        module.training = False
    inference = _in_turn({name: _forward(model, call) for name, model in models.items()})
    steps = {name: _step(model, call) for name, model in models.items()}
    training: Mapping[str, tuple[float, ...]] = dict.fromkeys(models, ())
    if any(p.requires_grad for model in models.values() for p in model.parameters()):
        try:
            training = _in_turn(steps)
        except RuntimeError:  # out of memory, or there is no gradient
            for model in models.values():
                model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
    return {name: Times(inference[name], training[name]) for name in models}


def _forward(model: nn.Module, call: Callable[[nn.Module], Any]) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            call(model)
        torch.clear_autocast_cache()

    return run


def _step(model: nn.Module, call: Callable[[nn.Module], Any]) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        outputs = [t for _, t in leaves(call(model)) if isinstance(t, Tensor) and t.requires_grad]
        torch.stack([t.float().mean() for t in outputs]).sum().backward()
        model.zero_grad(set_to_none=True)
        torch.clear_autocast_cache()

    return run


def _in_turn(functions: Mapping[str, Callable[[], None]]) -> dict[str, tuple[float, ...]]:
    """Seconds per call, for each round."""
    for function in functions.values():
        for _ in range(2):
            function()
    _wait()
    start = time.perf_counter()
    for function in functions.values():
        function()
    _wait()
    each = (time.perf_counter() - start) / len(functions)
    calls = max(1, min(5, int(0.05 / each)))
    rounds = max(3, min(ROUNDS, int(SECONDS / (each * calls * len(functions)))))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds):
        for name, function in list(functions.items())[:: -1 if turn % 2 else 1]:
            start = time.perf_counter()
            for _ in range(calls):
                function()
            _wait()
            times[name].append((time.perf_counter() - start) / calls)
    return {name: tuple(t) for name, t in times.items()}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
