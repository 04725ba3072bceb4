"""Fake quantizers: traces torch's in ONNX's form, and bounds how they amplify rounding errors."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from svexport.errors import ExportError
from svexport.parity import Parity, parity

__all__ = [
    "ROUNDING",
    "Copies",
    "FullRanges",
    "allow_steps",
    "computes_again",
    "frozen",
    "full_range",
    "largest",
    "repeats",
    "shapes_known",
]

MOST = 2.0**-18
"""Relative to the largest element: a few times the difference of float32 sums in another order."""

REPEATED = 2.0**-20
"""Relative to the largest element: how far a model may differ from itself when it computes the same again."""

NUDGES = 16
"""The number of random tries that shows a value within a rounding error of a border on both sides of it."""

FULL_RANGES = (-128, 127), (0, 255)
"""Ranges of the types that QuantizeLinear supports at every opset, in TensorRT's order of preference."""


def full_range(low: int, high: int) -> tuple[int, int] | None:
    """The full range of the type that holds ``low`` to ``high``, or None; a clamp before keeps the narrower range."""
    return next(((least, most) for least, most in FULL_RANGES if least <= low < high <= most), None)


class FullRanges(TorchFunctionMode):
    """Traces a fake quantizer with a subrange, such as -127 to 127, as a clamp and a quantizer with the full range."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _PARAMETERS:
            return func(*args, **kwargs)
        given = {**dict(zip(_PARAMETERS[func], args, strict=False)), **kwargs}
        low, high = given["quant_min"], given["quant_max"]
        if (full := full_range(low, high)) is not None and full != (low, high):
            x, scale, zero_point = given["input"], given["scale"], given["zero_point"]
            if "axis" in given:
                scale, zero_point = (_along(v, given["axis"], x.dim()) for v in (scale, zero_point))
            for bound, function, limit in zip((low, high), (torch.maximum, torch.minimum), full, strict=True):
                if bound != limit:
                    x = function(x, torch.as_tensor((bound - zero_point) * scale, dtype=x.dtype, device=x.device))
            given |= {"input": x, "quant_min": full[0], "quant_max": full[1]}
        return func(**given)


_PARAMETERS: dict[Callable[..., Tensor], tuple[str, ...]] = {
    torch.fake_quantize_per_tensor_affine: ("input", "scale", "zero_point", "quant_min", "quant_max"),
    torch.fake_quantize_per_channel_affine: ("input", "scale", "zero_point", "axis", "quant_min", "quant_max"),
}


def _along(values: Tensor, axis: int, dim: int) -> Tensor:
    return values.reshape([-1 if i == axis % dim else 1 for i in range(dim)])


@contextmanager
def shapes_known() -> Iterator[None]:
    """Lets fake quantizers be traced with dynamic sizes, for which torch has no meta kernels."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about replaced kernels, if a later torch has them
            for name in _WITHOUT_SHAPES:
                library.impl(name, _shapes, "Meta")
        yield
    finally:
        library._destroy()


_WITHOUT_SHAPES = (
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "fake_quantize_per_channel_affine_cachemask",
    "fake_quantize_per_tensor_affine_cachemask",
)


def _shapes(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Makes the fake quantizers of ``torch.ao`` use their current scales, or nothing if they are disabled.

    In every forward they read from tensors whether they are enabled, which a file cannot do.

    Raises:
        ExportError: if any of them still observes.
    """
    base = getattr(sys.modules.get("torch.ao.quantization"), "FakeQuantizeBase", ())
    quantizers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, base) and not getattr(module, "is_dynamic", False)
    }
    if observing := [name for name, module in quantizers.items() if module.observer_enabled.any()]:
        raise ExportError(
            f"{len(observing)} fake quantizers observe, {observing[0]} for one: their scales change in every forward, "
            "which a file cannot do; call model.apply(torch.ao.quantization.disable_observer) before the export"
        )
    own = {module: vars(module).get("forward") for module in quantizers.values()}
    try:
        for module in own:
            module.forward = _quantize(module)  # type: ignore[method-assign]
        yield
    finally:
        for module, forward in own.items():
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward  # type: ignore[method-assign]


def _quantize(module: Any) -> Callable[[Tensor], Tensor]:
    if not module.fake_quant_enabled.any():
        return lambda x: x
    low, high = module.activation_post_process.quant_min, module.activation_post_process.quant_max
    if module.is_per_channel:
        rest = {"scale": module.scale, "zero_point": module.zero_point, "axis": module.ch_axis}
        return partial(torch.fake_quantize_per_channel_affine, **rest, quant_min=low, quant_max=high)
    rest = {"scale": float(module.scale), "zero_point": int(module.zero_point)}
    return partial(torch.fake_quantize_per_tensor_affine, **rest, quant_min=low, quant_max=high)


class Copies:
    """A model to run again: the model itself if forward does not change it, otherwise a fresh copy each time."""

    def __init__(self, model: nn.Module, *, changes: bool = True, random: bool = True) -> None:
        """``changes`` says whether forward may change the model, ``random`` whether it may draw random numbers."""
        self._model, self._changes = model, changes
        self._double: nn.Module | None = None
        self.repeats = not changes and not random

    def single(self) -> nn.Module:
        """The model, in its own precision; a fresh copy if forward changes it."""
        return copy.deepcopy(self._model) if self._changes else self._model

    def double(self) -> nn.Module:
        """A copy in float64; a fresh one if forward changes it."""
        if self._double is None or self._changes:
            self._double = copy.deepcopy(self._model).double()
        return self._double


def allow_steps(
    found: list[Parity],
    model: nn.Module | Copies,
    inputs: Sequence[Tensor],
    pairs: Sequence[tuple[str, Tensor, Tensor]],
    notes: list[str],
) -> bool:
    """Accepts, in ``found``, the steps that quantizers make of rounding errors, and notes them; False if others remain.

    A value on the border of two steps may change by a whole step in a runtime that adds up in another order. Elements
    may differ if torch's own do in a few :class:`_Nudged` runs, by at most twice as much.

    Args:
        found: how each of ``pairs`` (name, expected, actual) agrees.
        inputs: the inputs that the model computed the expected tensors from.
    """
    copies = model if isinstance(model, Copies) else Copies(model)
    failed = [index for index, p in enumerate(found) if not p.ok]
    apart = {index: _apart(*pairs[index][1:]) for index in failed}
    try:
        rounding = _rounding(copies, inputs)
        if not rounding or not repeats(copies, inputs, [e for _, e, _ in pairs]):
            return False
    except Exception:  # noqa: BLE001 - a model that cannot be copied; the plain tolerance stands
        return False
    reach = {index: torch.zeros_like(apart[index]) for index in failed}
    typical = dict.fromkeys(failed, 0.0)
    explained: set[int] = set()
    for seed in range(NUDGES):
        try:
            with _Nudged(seed, rounding):
                again = copies.single()(*(t.clone() for t in inputs))
        except Exception:  # noqa: BLE001 - as above
            break
        for index in failed:
            own = _apart(pairs[index][1], again[index])
            if own.shape == reach[index].shape:
                reach[index] = torch.maximum(reach[index], own)
                typical[index] = max(typical[index], _root_mean_square(own))
            allowed = 2 * reach[index] + found[index].atol + found[index].rtol * _magnitude(pairs[index][1])
            if bool((apart[index] <= allowed).all()) and _root_mean_square(apart[index]) <= 2 * typical[index]:
                explained.add(index)
        if len(explained) == len(failed):
            break
    for index in sorted(explained):
        (name, e, a), before = pairs[index], found[index]
        most, torchs = float(apart[index].amax()), float(reach[index].amax())
        found[index] = parity(name, e, a, run=before.run, rtol=before.rtol, atol=before.atol + most)
        notes.append(
            f"{name} on {before.run} inputs differs by {most:.1e}, and torch differs from itself by {torchs:.1e}"
            " in the same elements when what is quantized changes by rounding errors"
        )
    return True


def repeats(copies: Copies, inputs: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether a copy computes the same again, unless that is known already. The difference of a random or stateful
    model from itself is no excuse for an engine."""
    return copies.repeats or computes_again(copies, inputs, expected)


def computes_again(copies: Copies, inputs: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether a copy computes the same again. A model that does not change may still keep state elsewhere.

    Sums may be added up in another order, because some kernels depend on the alignment of memory.
    """
    again = copies.single()(*(t.clone() for t in inputs))
    return all(
        a.shape == e.shape
        and bool((_apart(e, a) <= REPEATED * largest(e)).all() if e.is_floating_point() else torch.equal(a, e))
        for a, e in zip(again, expected, strict=True)
    )


def _apart(expected: Tensor, actual: Tensor) -> Tensor:
    """The absolute difference of each element, as float64 on the CPU; infinite if the two tensors do not match."""
    e, a = expected.detach().cpu().double(), actual.detach().cpu().double()
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return torch.full_like(e, math.inf)
    return torch.where((e == a) | (e.isnan() & a.isnan()), 0.0, (e - a).abs().nan_to_num(nan=math.inf))


def _magnitude(expected: Tensor) -> Tensor:
    return expected.detach().cpu().double().abs().nan_to_num(0.0, 0.0, 0.0)


def _root_mean_square(values: Tensor) -> float:
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def _rounding(copies: Copies, inputs: Sequence[Tensor]) -> list[float]:
    """The rounding error of the input of each quantizer and ``torch.round``; empty for a model without them.

    It is a multiple of the typical difference of float32 from float64 there, without elements that differ by steps of
    earlier quantizers. If that cannot be measured, it is the most that sums in another order differ by.
    """
    with _Given() as given:
        copies.single()(*(t.clone() for t in inputs))
    if not given.values:
        return []
    most = [largest(x) * max(MOST, 2 * torch.finfo(x.dtype).eps) for x in given.values]
    precise = _Given()
    try:
        with precise:
            copies.double()(*(t.double() if t.is_floating_point() else t.clone() for t in inputs))
    except Exception:  # noqa: BLE001 - a model tied to one dtype
        return most
    if [x.shape for x in precise.values] != [x.shape for x in given.values]:
        return most
    rounding = []
    for own, exact, limit in zip(given.values, precise.values, most, strict=True):
        off = (own.double() - exact.double()).abs()
        small = off[off <= limit]
        known = small.numel() > off.numel() // 100
        rounding.append(min(8 * _root_mean_square(small), limit) if known else limit)
    return rounding


def largest(x: Tensor) -> float:
    """The largest finite magnitude."""
    return float(x.abs().nan_to_num(0.0, 0.0, 0.0).amax()) if x.numel() else 0.0


class _AtRounding(TorchFunctionMode):
    """Intercepts the inputs of quantizers and ``torch.round``."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "").partition(".")[0]
        if name in ROUNDING:
            x = kwargs.pop("input") if "input" in kwargs else args[0]
            if isinstance(x, Tensor) and x.is_floating_point():
                with torch.no_grad():
                    x = self._see(x, name)
            args = (x, *args[1:])
        return func(*args, **kwargs)

    def _see(self, x: Tensor, name: str) -> Tensor:
        raise NotImplementedError


class _Given(_AtRounding):
    """Records the inputs.

    Attributes:
        values: the input of each call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Tensor] = []

    def _see(self, x: Tensor, name: str) -> Tensor:
        self.values.append(x.detach().clone())
        return x


class _Nudged(_AtRounding):
    """Changes the inputs at random, by at most the amount given for each call.

    Inputs of quantizers, which divide by the scale or multiply by its reciprocal, change by one more rounding error.
    """

    def __init__(self, seed: int, rounding: Sequence[float]) -> None:
        super().__init__()
        self._calls = 0
        self._seed = seed
        self._rounding = rounding

    def _see(self, x: Tensor, name: str) -> Tensor:
        most = self._rounding[min(self._calls, len(self._rounding) - 1)]
        self._calls += 1
        generator = torch.Generator(x.device).manual_seed(1000 * self._seed + self._calls)
        by = 2 * torch.rand(x.shape, generator=generator, device=x.device, dtype=x.dtype) - 1
        by *= most + (0.0 if name.startswith("round") else 2 * torch.finfo(x.dtype).eps * x.abs())
        return x.add_(by) if name.endswith("_") else x + by


ROUNDING = {
    "round",
    "round_",
    "quantize",  # svexport's
    "fake_quantize_fp8",
    "fake_quantize_per_tensor_affine",
    "fake_quantize_per_channel_affine",
    "_fake_quantize_learnable_per_tensor_affine",
    "_fake_quantize_learnable_per_channel_affine",
    "fused_moving_avg_obs_fake_quant",
}
