"""Searches inputs unlike all earlier runs: other scales, signs and masks, gradient steps to unreached branches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from svexport.exporter.inputs import is_mask

__all__ = ["SEARCHES", "Sides", "Units", "changed", "near", "reaching", "searched", "stepped"]

_SCALES = (1e-5, 1e-3, 0.1, 1.0, 10.0, 100.0, 1e3, 1e5, 1e-8, 1e-11)
_TINY = tuple(10.0**-power for power in range(13, 38, 2))
"""A norm makes small numbers some hundred times larger: the epsilon behind many norms shows only for tiny inputs."""

SEARCHES = 9 * len(_SCALES) + len(_TINY)
"""Number of inputs: each style at each scale, and some styles at each of the smallest scales."""

STEPS = 8
"""Steps of one search along a gradient."""


def searched(tensors: Sequence[Tensor], ranges: Mapping[int, int], count: int) -> Iterator[list[Tensor]]:
    """Yields ``count`` inputs: floats of one style or several, and integers and masks drawn anew or extreme."""
    scales = _SCALES * 9 + _TINY
    for index in range(count):
        styles = [_STYLES[(index + place * (index // len(_STYLES))) % len(_STYLES)] for place in range(len(tensors))]
        scale = scales[index % len(scales)]
        yield [_drawn(t, style, scale, ranges.get(i)) for i, (t, style) in enumerate(zip(tensors, styles, strict=True))]


def near(tensors: Sequence[Tensor], ranges: Mapping[int, int], count: int) -> Iterator[list[Tensor]]:
    """Yields ``count`` inputs: the given ones with only some tensors changed, as others may not fit together."""
    for other in searched(tensors, ranges, count):
        yield changed(tensors, other, tensors, ranges)


def _drawn(tensor: Tensor, style: Callable[[Tensor], Tensor], scale: float, size: int | None) -> Tensor:
    noise = torch.rand(tensor.shape, dtype=torch.float64, device=tensor.device)
    if not tensor.numel():
        return tensor
    if tensor.is_floating_point():
        most = torch.finfo(tensor.dtype).max
        given = float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).amax()) or 1.0
        return (style(2 * noise - 1) * given * scale).clamp(-most, most).to(tensor.dtype)
    share = float(torch.rand(()))
    if tensor.dtype == torch.bool:
        return noise < share
    low, high = int(tensor.min()), int(tensor.max())
    if size is not None or is_mask(tensor):
        low, high = 0, (size or 2) - 1
    numbers = low + (noise * (high - low + 1)).long().clamp(max=high - low)
    return torch.where(noise < share / 4, low, torch.where(noise > 1 - share / 4, high, numbers)).to(tensor.dtype)


def _few(noise: Tensor) -> Tensor:
    return torch.where(torch.rand_like(noise) < 0.1, noise, 0.0)


def _ramp(noise: Tensor) -> Tensor:
    return torch.linspace(-1, 1, noise.numel(), dtype=noise.dtype, device=noise.device).reshape(noise.shape)


def _along_the_last(noise: Tensor) -> Tensor:
    """Numbers that vary along the last axis, and hardly along the others."""
    return noise * 0.01 + noise.flatten()[: noise.shape[-1]] if noise.dim() else noise


_STYLES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda noise: noise,
    lambda noise: noise.abs(),
    lambda noise: -noise.abs(),
    _few,
    _ramp,
    torch.sign,
    lambda noise: torch.full_like(noise, float(noise.flatten()[0])),
    _along_the_last,
    lambda noise: noise**9,
)


def changed(
    one: Sequence[Tensor], other: Sequence[Tensor], given: Sequence[Tensor], ranges: Mapping[int, int]
) -> list[Tensor]:
    """``one`` with some of its tensors changed slightly or strongly, or mixed with those of ``other``."""
    chosen = torch.rand(len(one)) < 0.5
    chosen[int(torch.randint(len(one), ()))] = True
    return [
        _changed(a, b, g, ranges.get(place)) if chosen[place] and a.numel() else a.clone()
        for place, (a, b, g) in enumerate(zip(one, other, given, strict=True))
    ]


def _changed(one: Tensor, other: Tensor, given: Tensor, size: int | None) -> Tensor:
    noise = torch.rand(one.shape, dtype=torch.float64, device=one.device)
    some = noise <= noise.amin().maximum(torch.rand(()) ** 3)  # more often few elements than many
    if not one.is_floating_point():
        return torch.where(some, _drawn(given, _STYLES[0], 1.0, size) if torch.rand(()) < 0.7 else other, one)
    most = torch.finfo(one.dtype).max
    change = _CHANGES[int(torch.randint(len(_CHANGES), ()))]
    result = change(one.double(), other.double(), some)
    return result.nan_to_num(0.0).clamp(-most, most).to(one.dtype)


def _power(low: float, high: float) -> float:
    """A power of ten with a random exponent between ``low`` and ``high``."""
    return float(10 ** (low + (high - low) * torch.rand(())))


def _along_one_axis(x: Tensor) -> Tensor:
    """The mean of ``x`` along a random axis, expanded to its shape."""
    return x.mean(int(torch.randint(x.dim(), ())), keepdim=True).expand_as(x) if x.dim() else x


_CHANGES: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], ...] = (
    lambda x, other, some: x * _power(-1.5, 1.5),
    lambda x, other, some: x + torch.randn_like(x) * x.abs().mean() * _power(-3, 0.5),
    lambda x, other, some: x.lerp(other, float(torch.rand(()))),
    lambda x, other, some: torch.where(some, other, x),
    lambda x, other, some: torch.where(some, 0.0, x),
    lambda x, other, some: x.mean() + (x - x.mean()) * _power(-1.5, 0.5),
    lambda x, other, some: x + x.abs().mean() * torch.randn(()).to(x) * _power(-1, 1),
    lambda x, other, some: x.lerp(_along_one_axis(x), 1.0 if torch.rand(()) < 0.5 else float(torch.rand(()))),
    lambda x, other, some: torch.where(some, -x, x),
)


class Sides(TorchFunctionMode):
    """Records on which side of a border the operands of activations, comparisons and clamps lie.

    Attributes:
        margins: for each call, the operand minus the border.
        unreached: the margins whose elements all have one sign.
    """

    def __init__(self) -> None:
        super().__init__()
        self.margins: list[Tensor] = []
        self.unreached: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        if name in _BORDERS and args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            for border in _BORDERS[name](*args, **kwargs):
                self._see(args[0], border)
        return func(*args, **kwargs)

    def _see(self, x: Tensor, border: Any) -> None:
        if not isinstance(border, (int, float, Tensor)):
            return
        margin = x - border
        if not margin.numel() or not margin.requires_grad:
            return
        self.margins.append(margin)
        if bool((margin > 0).all() | (margin < 0).all()):
            self.unreached.append(margin)


def _other(x: Tensor, other: Any = None, *_: Any, **__: Any) -> tuple[Any, ...]:
    return (other,)


def _bounds(x: Tensor, min: Any = None, max: Any = None, *_: Any, **kwargs: Any) -> tuple[Any, ...]:
    return kwargs.get("min_val", min), kwargs.get("max_val", max)


_BORDERS: dict[str, Callable[..., tuple[Any, ...]]] = {
    **dict.fromkeys(("abs", "celu", "elu", "leaky_relu", "prelu", "relu", "selu", "sign"), lambda *_, **__: (0.0,)),
    **dict.fromkeys(("eq", "ge", "gt", "le", "lt", "maximum", "minimum", "ne"), _other),
    **dict.fromkeys(("clamp", "clip", "hardtanh"), _bounds),
    "clamp_max": _other,
    "clamp_min": _other,
    "relu6": lambda *_, **__: (0.0, 6.0),
    "hardswish": lambda *_, **__: (-3.0, 3.0),
    "hardsigmoid": lambda *_, **__: (-3.0, 3.0),
}
"""Borders by function: on either side of such a number, the function is a different one."""


def stepped(model: nn.Module, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Inputs stepped along the gradient towards the sides of borders that no number has reached."""
    now = [t.detach().clone() for t in tensors]
    for step in range(STEPS):
        if (moved := _step(model, now, step, _to_unreached)) is None:
            return
        now = moved
        yield [t.clone() for t in now]


def reaching(model: nn.Module, tensors: Sequence[Tensor], units: Units) -> Iterator[list[Tensor]]:
    """Inputs stepped along the gradient towards the side of a border that one channel or feature, drawn from ``units``,
    has never reached."""
    now = [t.detach().clone() for t in tensors]
    units.drawn = None
    for step in range(STEPS):
        if (moved := _step(model, now, step, units.distance)) is None:
            return
        now = moved
        yield [t.clone() for t in now]


class Units:
    """The channels and features that activations, comparisons and clamps get, and the sides they have reached.

    Attributes:
        drawn: call, axis, side and place of the channel that is to change sides; None if none is drawn yet.
    """

    def __init__(self) -> None:
        self._reached: dict[tuple[int, int, int], Tensor] = {}
        self.drawn: tuple[tuple[int, int, int], int] | None = None

    def distance(self, sides: Sides) -> Tensor | None:
        """Distance of the drawn channel to the border; None if it has crossed it, or no channel is left to draw."""
        keys = [
            (call, axis, side)
            for call, margin in enumerate(sides.margins)
            for axis in sorted({min(1, margin.dim() - 1), margin.dim() - 1} - {-1})
            for side in (1, -1)
        ]
        for key in keys:
            now = _of_units(sides.margins[key[0]].detach(), key) > 0
            before = self._reached.get(key)
            self._reached[key] = now if before is None or before.shape != now.shape else now | before
        if self.drawn is None:
            open_ = [key for key in keys if not bool(self._reached[key].all())]
            if not open_:
                return None
            key = open_[int(torch.randint(len(open_), ()))]
            self.drawn = key, int((~self._reached[key]).double().multinomial(1))
        key, place = self.drawn
        if key not in keys or bool(self._reached[key][place]):
            return None
        margin = sides.margins[key[0]]
        return -_of_units(margin, key)[place] / (margin.detach().abs().mean() + 1e-30)


def _of_units(margin: Tensor, key: tuple[int, int, int]) -> Tensor:
    """The largest margin towards a side, for each place of an axis."""
    _, axis, side = key
    return (margin * side).transpose(0, axis).flatten(1).amax(1) if margin.dim() > 1 else margin * side


def _to_unreached(sides: Sides) -> Tensor | None:
    return torch.stack([_distance(margin) for margin in sides.unreached]).sum() if sides.unreached else None


def _step(
    model: nn.Module, now: Sequence[Tensor], step: int, distance: Callable[[Sides], Tensor | None]
) -> list[Tensor] | None:
    """Inputs at which the distance is smaller; None if there is no distance, or no gradient."""
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in now]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    with torch.enable_grad():
        with Sides() as sides:
            model(*(leaf * 1 if leaf.requires_grad else leaf.clone() for leaf in leaves))
        if not wanted or (lost := distance(sides)) is None:
            return None
        gradients = torch.autograd.grad(lost, wanted, allow_unused=True)
    steps = dict(zip(map(id, wanted), gradients, strict=True))
    moved = [_moved(t, steps.get(id(leaf)), step) for t, leaf in zip(now, leaves, strict=True)]
    return None if all(a is b for a, b in zip(moved, now, strict=True)) else moved


def _distance(margin: Tensor) -> Tensor:
    """Distance to the border of the number nearest to it, relative to the mean magnitude of the margins."""
    nearest = margin.amin() if bool((margin > 0).all()) else -margin.amax()
    return nearest / (margin.detach().abs().mean() + 1e-30)


def _moved(tensor: Tensor, gradient: Tensor | None, step: int) -> Tensor:
    if gradient is None or not bool(gradient.isfinite().all()) or not bool(gradient.any()):
        return tensor
    size = float(tensor.abs().amax()) or 1.0
    return tensor - gradient / gradient.abs().amax() * size * 0.25 * 2**step
