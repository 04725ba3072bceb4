"""Measures in place which replacements make a model faster."""

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
"""Rounds in which all are timed in turn, and the maximum seconds for them."""

MARGIN, WHOLE_MARGIN = 1.02, 1.01
"""What two timings of one model differ by; what a model with all its replacements may lose in what it gains least in.

A gain below the former may be noise, and what was replaced for it a loss. Of each kind of replacement a loss below it
may be noise, which the others make up for; of the whole nothing does.
"""

MOST = 0.75
"""In which part of the rounds a model has to be the faster one: medians of times that vary differ by more than 2 %."""


@dataclass(frozen=True)
class Times:
    """How long a call of a model takes, launches included.

    Attributes:
        inference: seconds of a forward without gradients, in each round.
        training: seconds of a forward and backward; none of a model without gradients, or of one too large for it.
    """

    inference: tuple[float, ...]
    training: tuple[float, ...] = ()

    def beside(self, other: Times) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
        """The times of both, round by round, in inference and in training, as far as both have them."""
        return [(a, b) for a, b in ((self.inference, other.inference), (self.training, other.training)) if a and b]

    def over(self, other: Times) -> tuple[float, ...]:
        """The ratio of this time to the other, in inference and in training."""
        return tuple(statistics.median(a) / statistics.median(b) for a, b in self.beside(other))

    def often(self, other: Times) -> tuple[float, ...]:
        """In which part of the rounds this took longer than the other, in inference and in training."""
        return tuple(sum(map(operator.gt, a, b)) / len(a) for a, b in self.beside(other))

    def words(self, other: Times) -> str:
        """How much faster the other is, in words."""
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
        margin: the ratio up to which slower counts as noise.
    """
    ratios = without.over(replaced)
    gained = any(ratio > MARGIN and part >= MOST for ratio, part in zip(ratios, without.often(replaced), strict=True))
    return gained and min(ratios) > 1 / margin


def measure(models: Mapping[str, nn.Module], call: Callable[[nn.Module], Any]) -> dict[str, Times]:
    """Times models in turn, several calls at a time, so that other load on the machine favours none of them.

    If the caller is under autocast, every call converts the weights again, as training steps do.

    Args:
        models: copies, which are in eval mode afterwards: in training mode norms would update their statistics.
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
    """Seconds a call, of each round."""
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
