"""Proves that a replacement computes the same as the part of the model, with the same gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from svexport.parity import parity, tolerances
from svexport.tracing.arguments import leaves, rebuild

__all__ = ["Proof", "Random"]

_LOST: Any = getattr(torch, "AcceleratorError", ())  # torch >= 2.8
"""Error of a kernel, after which everything on the GPU fails in this process: neither proof nor torch can go on."""


@dataclass
class Proof:
    """The outcome of the comparisons of one replacement."""

    errors: list[float] = field(default_factory=list)
    fault: str = ""

    def add(self, expected: Any, ours: Callable[[], Any]) -> Any:
        """Compares ``expected`` with the result of ``ours``; returns the latter, or ``expected`` if it is unusable."""
        try:
            actual = ours()
        except _LOST:
            raise
        except Exception as error:  # noqa: BLE001 - what our op does not take is left to torch
            self.fault = f"svexport's raised {type(error).__name__}: {error}"
            return expected
        theirs, found = (dict(leaves(value)) for value in (expected, actual))
        pairs = [(t, found.get(path)) for path, t in theirs.items() if isinstance(t, Tensor)]
        if theirs.keys() != found.keys() or not all(isinstance(t, Tensor) for _, t in pairs):
            self.fault = "svexport's returned another structure"
            return expected
        results = []
        for e, a in pairs:
            rtol, atol = tolerances(None, None, {e.dtype})
            results.append(parity("", e, a, rtol=rtol, atol=atol))  # type: ignore[arg-type]
        self.errors.append(max((p.max_abs for p in results), default=0.0))
        if not all(p.ok for p in results):
            self.fault = f"svexport's differs by {self.errors[-1]:.1e} on the given inputs"
        return expected if self.fault else actual

    def add_other(self, theirs: Callable[[], Any], ours: Callable[[], Any]) -> None:
        """Compares the two on drawn inputs in float64; this does not count as a comparison on the model's inputs."""
        try:
            with torch.no_grad():
                pairs = list(zip(_tensors(theirs()), _tensors(ours()), strict=True))
        except _LOST:
            raise
        except Exception as error:  # noqa: BLE001 - what cannot be shown is not
            self.fault = f"other inputs cannot be compared: {type(error).__name__}: {error}"
            return
        for expected, actual in pairs:
            scale = float(expected.abs().amax()) if expected.numel() else 0.0
            if not scale > 0:
                self.fault = "its result is zero on all other inputs, which proves nothing"
            elif expected.shape != actual.shape or not parity("", expected, actual, rtol=1e-6, atol=1e-6 * scale).ok:
                self.fault = "svexport's differs on other inputs"

    def add_gradients(self, theirs: Callable[..., Any], ours: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Compares gradients in float64, slightly off the arguments: there are none at the edges of pixels."""
        random = Random(0)

        def near(t: Tensor) -> Tensor:
            if not t.is_floating_point():
                return t
            return (t.detach().double() + 1e-3 * random.uniform(t)).requires_grad_()

        given = rebuild(tuple(arguments), near)
        wanted = [t for _, t in leaves(given) if isinstance(t, Tensor) and t.requires_grad]
        found: list[list[Tensor | None]] = []
        try:
            with torch.enable_grad():
                for function in (theirs, ours):
                    outputs = [t for _, t in leaves(function(*given)) if isinstance(t, Tensor) and t.requires_grad]
                    cotangent = Random(1)
                    weights = [cotangent.uniform(t, t.dtype) for t in outputs]
                    total = sum(((t * w).sum() for t, w in zip(outputs, weights, strict=True)), torch.zeros(()))
                    if not outputs:
                        found.append([None] * len(wanted))
                        continue
                    found.append(list(torch.autograd.grad(total, wanted, allow_unused=True)))
        except _LOST:
            raise
        except Exception as error:  # noqa: BLE001 - what cannot be shown is not
            self.fault = f"its gradients cannot be compared: {type(error).__name__}: {error}"
            return
        for given_to, *gradients in zip(wanted, *found, strict=True):
            e, a = (torch.zeros_like(given_to) if g is None else g for g in gradients)
            rtol, atol = tolerances(None, None, {torch.float64})
            scale = max(1.0, float(e.abs().max())) if e.numel() else 1.0
            if not parity("", e, a, rtol=rtol, atol=atol * scale).ok:
                self.fault = f"svexport's gradient differs by {float((e - a).abs().max()):.1e} on the given inputs"

    def merge(self, other: Proof) -> None:
        """Adds the outcome of another proof."""
        self.errors += other.errors
        self.fault = self.fault or other.fault

    def words(self, given: bool) -> tuple[int, float, str]:
        """The number of comparisons, the largest error, and a text; ``given`` tells whether there were inputs."""
        unproven = "not proven: not reached" if given else "not proven: no inputs"
        error = max(self.errors, default=math.nan)
        return len(self.errors), error, f"max error {error:.1e}" if self.errors else unproven


class Random:
    """Random numbers from a seed, drawn on the device where they are used: large tensors take seconds on a CPU."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def _of(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    def uniform(self, like: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """The next numbers from 0 to 1, in the shape and on the device of ``like``."""
        return torch.rand(like.shape, generator=self._of(like.device), dtype=dtype, device=like.device)

    def normal(self, like: Tensor, *, scale: float = 1.0) -> Tensor:
        """The next normal numbers in float64, likewise."""
        numbers = torch.randn(like.shape, generator=self._of(like.device), dtype=torch.float64, device=like.device)
        return numbers.mul_(scale)


def _tensors(value: Any) -> list[Tensor]:
    return [t for _, t in leaves(value) if isinstance(t, Tensor)]
