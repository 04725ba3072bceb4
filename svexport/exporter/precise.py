"""Compares a file and its model in float64, which shows differences that rounding hides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from svexport.exporter.planted import Planted, Recording, Site
from svexport.graph.in_float64 import in_float64
from svexport.tracing.quantizers import Copies

__all__ = ["Precise", "Precisely"]

MOST = 8.0
"""Times what torch in float32 is from float64: files that are right keep below 5, most of them far below 1."""

BORDER = 2.0**-24
"""Relative to the inputs: if so small a change changes a result as much as the file differs, it is at a border."""


@dataclass(frozen=True)
class Precisely:
    """One input in float64.

    Attributes:
        inputs: of any type, those of floating point in float64.
        expected: what torch makes of them.
        held: rtol and atol of each output.
    """

    inputs: list[Tensor]
    expected: list[Tensor]
    held: list[tuple[float, float]]


class Precise:
    """Compares a file with its model in float64, and its planted faults.

    The model's numbers are rounded to float32 there as a file has them: those in its source, and what is computed of
    nothing but its parameters. What else a file has otherwise, factors merged into one for instance, stays a few
    rounding errors of float32; results are held to :data:`MOST` times what torch itself differs by there between
    float32 and float64, and whole numbers are not compared, which verification does in float32.
    """

    def __init__(self, model: onnx.ModelProto, copies: Copies) -> None:
        """``model``: the file in standard ONNX, with its weights.

        Raises:
            Exception: ONNX Runtime's, or UnsupportedError, of a model that cannot be computed in float64.
        """
        self._planted, self._copies = Planted(model, {}, in_float64), copies

    def expected(self, inputs: Sequence[Tensor], single: Sequence[Tensor]) -> Precisely | None:
        """What torch makes of inputs, of which it makes ``single`` in float32; None where float64 says nothing: the
        model rounds to float32 itself, or there is no finite result."""
        precise = [t.detach().cpu().double() if t.is_floating_point() else t.detach().cpu().clone() for t in inputs]
        exact = self._call(precise, None)
        numbers = _NumbersOfFiles()
        rounded = self._call(precise, numbers)
        if numbers.narrowed or not len(exact) == len(rounded) == len(single):
            return None
        held = []
        for s, e, r in zip(single, exact, rounded, strict=True):
            if s.shape != e.shape or e.shape != r.shape or e.is_complex():
                return None
            if not e.is_floating_point() or not e.numel():
                held.append((0.0, float("inf")))
                continue
            s = s.detach().cpu().double()
            if not all(bool(t.isfinite().all()) for t in (s, e, r)):
                return None
            least = torch.finfo(torch.float32).eps * float(e.abs().amax())
            own = max(float((s - e).abs().amax()), float((r - e).abs().amax()), least)
            held.append((0.0, MOST * own))
        return Precisely(precise, list(rounded), held)

    def _call(self, inputs: Sequence[Tensor], numbers: _NumbersOfFiles | None) -> Sequence[Tensor]:
        arguments = [t.clone() for t in inputs]
        if numbers is None:
            return self._copies.double()(*arguments)
        model = self._copies.double()
        with numbers.of(arguments):
            return model(*arguments)

    def record(self, there: Precisely) -> Recording | None:
        """Runs the file on the inputs; None if the values are too large."""
        return self._planted.record(there.inputs, there.held)

    def differing(self, there: Precisely, recording: Recording) -> list[int]:
        """Outputs of the file that differ from torch's, but not where those jump."""
        found = []
        for index, (expected, actual, (_, atol)) in enumerate(
            zip(there.expected, recording.outputs, there.held, strict=True)
        ):
            off = (expected - torch.from_numpy(actual)).abs()
            if atol < float("inf") and float(off.nan_to_num(float("inf")).amax()) > atol:
                found.append(index)
        return found if found and not self._jumps(there, recording, found) else []

    def _jumps(self, there: Precisely, recording: Recording, found: Sequence[int]) -> bool:
        for sign in (1, -1):
            near = [
                t * (1 + sign * BORDER * (2 * torch.rand_like(t) - 1)) if t.is_floating_point() else t
                for t in there.inputs
            ]
            others = self._call(near, _NumbersOfFiles())
            for index in found:
                e, o, a = there.expected[index], others[index], torch.from_numpy(recording.outputs[index])
                if e.shape != o.shape or float((e - o).abs().amax()) > float((e - a).abs().amax()) / 4:
                    return True
        return False

    def shown(self, site: Site, recording: Recording) -> float:
        """The error of outputs with a fault, in units of their tolerances; NaN for a fault that cannot be computed."""
        return self._planted.shown(site, recording, failing=math.nan)


class _NumbersOfFiles(TorchDispatchMode):
    """Rounds to float32 what a file has as a number: scalars beside what depends on an input, and what depends on none.

    Attributes:
        narrowed: whether the model itself makes float32 of a float64 that depends on an input.
    """

    def __init__(self) -> None:
        super().__init__()
        self.narrowed = False
        self._following: dict[int, Tensor] = {}

    def of(self, inputs: Sequence[Tensor]) -> _NumbersOfFiles:
        """The same, of those inputs."""
        self._following = {id(t): t for t in inputs}
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not any(id(t) in self._following for t in tensors):
            result = func(*args, **kwargs)
            return tree_map(_rounded, result) if all(r.alias_info is None for r in func._schema.returns) else result
        result = func(*tree_map(_number, args), **tree_map(_number, kwargs))
        results = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self._following.update((id(t), t) for t in results)
        if any(t.dtype == torch.float64 for t in tensors):
            self.narrowed |= any(t.is_floating_point() and t.dtype != torch.float64 for t in results)
        return result


def _number(value: Any) -> Any:
    if type(value) is not float or value != value or abs(value) == float("inf"):
        return value
    most = torch.finfo(torch.float32).max
    return float(torch.tensor(min(max(value, -most), most), dtype=torch.float32))


def _rounded(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dtype != torch.float64:
        return value
    return value.float().double()
