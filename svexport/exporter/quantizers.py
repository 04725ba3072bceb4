"""Fake quantizers: torch's, as ONNX has them, and what they make of rounding errors."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from svexport.errors import ExportError
from svexport.parity import Parity, parity

__all__ = ["FullRanges", "Nudged", "allow_steps", "frozen", "full_range", "repeats"]

FULL_RANGES = (-128, 127), (0, 255)
"""Of the types that QuantizeLinear has at every opset, in the order in which TensorRT likes them."""


def full_range(low: int, high: int) -> tuple[int, int] | None:
    """Of the type that holds ``low`` to ``high``, or None: what is clamped to them first is never beyond them then."""
    return next(((least, most) for least, most in FULL_RANGES if least <= low < high <= most), None)


class FullRanges(TorchFunctionMode):
    """Has fake quantizers of -127 to 127, say, traced as a clamp before one of all numbers of the type."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
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
def frozen(model: nn.Module) -> Iterator[None]:
    """Has the fake quantizers of ``torch.ao`` quantize with the scales they have, or not at all where they are off.

    They read in every forward, out of tensors, whether they do, which no file can.

    Raises:
        ExportError: if any observes.
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
            "which a file cannot have; call model.apply(torch.ao.quantization.disable_observer) before"
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


def allow_steps(
    found: list[Parity],
    model: nn.Module,
    inputs: Sequence[Tensor],
    pairs: Sequence[tuple[str, Tensor, Tensor]],
    rtol: float,
    atol: float,
    notes: list[str],
) -> bool:
    """Of ``found``, allows and notes what a model may make of rounding errors that rounds to steps; else it is False.

    A value on the border of two steps becomes a whole step in every runtime that adds up in another order. What is
    allowed is twice what torch differs from itself by, typically and at most, once :class:`Nudged`, in four times as
    many elements.

    Args:
        found: how each of ``pairs`` (name, expected, actual) agrees.
        inputs: what the model computed the expected tensors of.
    """
    own = _apart(model, inputs, [e for _, e, _ in pairs], rtol, atol)
    for index, (name, e, a) in enumerate(pairs if own else ()):
        apart, most, run = _distance(e, a, rtol, atol), own[index], found[index].run
        allowed = _Distance(2 * most.typical, 2 * most.most, 4 * most.outside)
        if not found[index].ok and all(x <= limit for x, limit in zip(apart, allowed, strict=True)):
            found[index] = parity(name, e, a, run=run, rtol=rtol, atol=atol + apart.most)
            notes.append(
                f"{name} on {run} inputs differs by {apart.most:.1e}, torch from itself by {most.most:.1e} where what "
                "is rounded to steps changes by some rounding errors"
            )
    return bool(own)


def repeats(model: nn.Module, inputs: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether a copy computes the same once more: how far a random or stateful model is from itself excuses nothing."""
    again = copy.deepcopy(model)(*(t.clone() for t in inputs))
    return all(torch.equal(a, e) for a, e in zip(again, expected, strict=True))


class _Distance(NamedTuple):
    typical: float  # the root of the mean square
    most: float
    outside: float  # of the tolerances: so many elements


def _distance(expected: Tensor, actual: Tensor, rtol: float, atol: float) -> _Distance:
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return _Distance(math.inf, math.inf, math.inf)
    e, a = expected.detach().cpu().double(), actual.detach().cpu().double()
    if not e.numel():
        return _Distance(0, 0, 0)
    apart = torch.where((e == a) | (e.isnan() & a.isnan()), 0.0, (e - a).abs().nan_to_num(nan=math.inf))
    outside = (apart > atol + rtol * e.abs().nan_to_num()).sum()
    return _Distance(float(apart.square().mean().sqrt()), float(apart.amax()), float(outside))


def _apart(
    model: nn.Module, inputs: Sequence[Tensor], expected: Sequence[Tensor], rtol: float, atol: float
) -> list[_Distance]:
    """Per output, the most of some times; nothing if the model rounds nothing, or that cannot be told."""
    found = []
    try:
        for seed in range(4):
            with Nudged(seed) as nudged:
                again = copy.deepcopy(model)(*(t.clone() for t in inputs))
            if not nudged.calls or (seed == 0 and not repeats(model, inputs, expected)):
                return []
            found.append([_distance(e, a, rtol, atol) for e, a in zip(expected, again, strict=True)])
    except Exception:  # noqa: BLE001 - a model that cannot be copied; the plain tolerance stands
        return []
    return [_Distance(*map(max, zip(*of, strict=True))) for of in zip(*found, strict=True)]


class Nudged(TorchFunctionMode):
    """Changes what quantizers and ``torch.round`` are given, at random: by up to 2**-18 of the largest element.

    That is some times what sums in another order differ by in float32; of half types it is twice their own precision.

    Attributes:
        calls: how many there were.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.calls = 0
        self._seed = seed

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "").partition(".")[0]
        if name in _ROUNDING:
            x = kwargs.pop("input") if "input" in kwargs else args[0]
            if isinstance(x, Tensor) and x.is_floating_point():
                self.calls += 1
                x = self._moved(x, in_place=name.endswith("_"))
            args = (x, *args[1:])
        return func(*args, **kwargs)

    def _moved(self, x: Tensor, *, in_place: bool) -> Tensor:
        generator = torch.Generator(x.device).manual_seed(1000 * self._seed + self.calls)
        with torch.no_grad():
            most = x.abs().amax() if x.numel() else x.sum()
            by = 2 * torch.rand(x.shape, generator=generator, device=x.device, dtype=x.dtype) - 1
            by *= most * max(2.0**-18, 2 * torch.finfo(x.dtype).eps)
            return x.add_(by) if in_place else x + by


_ROUNDING = {
    "round",
    "round_",
    "quantize",  # svexport's
    "fake_quantize_per_tensor_affine",
    "fake_quantize_per_channel_affine",
    "_fake_quantize_learnable_per_tensor_affine",
    "_fake_quantize_learnable_per_channel_affine",
    "fused_moving_avg_obs_fake_quant",
}
