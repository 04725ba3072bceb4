"""Inputs that no run has been like: of other scales and signs, masks, and stepped towards unreached branches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["Sides", "searched", "stepped"]

_SCALES = (1e-3, 0.1, 1.0, 10.0, 100.0, 1000.0)

STEPS = 8
"""Of one search along a gradient."""


def searched(tensors: Sequence[Tensor], ranges: Mapping[int, int], count: int) -> Iterator[list[Tensor]]:
    """So many inputs: floating-point numbers of one style or of several, integers and masks drawn anew, or extreme."""
    for index in range(count):
        styles = [_STYLES[(index + place * (index // len(_STYLES))) % len(_STYLES)] for place in range(len(tensors))]
        scale = _SCALES[index % len(_SCALES)]
        yield [_drawn(t, style, scale, ranges.get(i)) for i, (t, style) in enumerate(zip(tensors, styles, strict=True))]


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
    if size is not None:
        low, high = 0, size - 1
    numbers = low + (noise * (high - low + 1)).long().clamp(max=high - low)
    return torch.where(noise < share / 4, low, torch.where(noise > 1 - share / 4, high, numbers)).to(tensor.dtype)


def _few(noise: Tensor) -> Tensor:
    return torch.where(torch.rand_like(noise) < 0.1, noise, 0.0)


def _ramp(noise: Tensor) -> Tensor:
    return torch.linspace(-1, 1, noise.numel(), dtype=noise.dtype, device=noise.device).reshape(noise.shape)


def _along_the_last(noise: Tensor) -> Tensor:
    """Unlike each other along the last axis, alike along the others."""
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


class Sides(TorchFunctionMode):
    """Sees on which side of a border the numbers are that activations, comparisons and bounds are given.

    Attributes:
        unreached: of each call that saw one side only, how far the numbers are from the border, all of one sign.
    """

    def __init__(self) -> None:
        super().__init__()
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
        if margin.numel() and margin.requires_grad and bool((margin > 0).all() | (margin < 0).all()):
            self.unreached.append(margin)


def _zero(*_: Any, **__: Any) -> tuple[float, ...]:
    return (0.0,)


def _other(x: Tensor, other: Any = None, *_: Any, **__: Any) -> tuple[Any, ...]:
    return (other,)


def _bounds(x: Tensor, min: Any = None, max: Any = None, *_: Any, **kwargs: Any) -> tuple[Any, ...]:
    return kwargs.get("min_val", min), kwargs.get("max_val", max)


_BORDERS: dict[str, Callable[..., tuple[Any, ...]]] = {
    **dict.fromkeys(("abs", "celu", "elu", "leaky_relu", "prelu", "relu", "selu", "sign"), _zero),
    **dict.fromkeys(("eq", "ge", "gt", "le", "lt", "maximum", "minimum", "ne"), _other),
    **dict.fromkeys(("clamp", "clip", "hardtanh"), _bounds),
    "clamp_max": _other,
    "clamp_min": _other,
    "relu6": lambda *_, **__: (0.0, 6.0),
    "hardswish": lambda *_, **__: (-3.0, 3.0),
    "hardsigmoid": lambda *_, **__: (-3.0, 3.0),
}
"""By function, the numbers on whose two sides it is another one."""


def stepped(model: nn.Module, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Inputs with steps along the gradient towards the sides of borders that no number has been on."""
    now = [t.detach().clone() for t in tensors]
    for step in range(STEPS):
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in now]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        with torch.enable_grad():
            with Sides() as sides:
                model(*(leaf * 1 if leaf.requires_grad else leaf.clone() for leaf in leaves))
            if not sides.unreached or not wanted:
                return
            lost = torch.stack([_distance(margin) for margin in sides.unreached]).sum()
            gradients = torch.autograd.grad(lost, wanted, allow_unused=True)
        steps = dict(zip(map(id, wanted), gradients, strict=True))
        moved = [_moved(t, steps.get(id(leaf)), step) for t, leaf in zip(now, leaves, strict=True)]
        if all(a is b for a, b in zip(moved, now, strict=True)):
            return
        now = moved
        yield [t.clone() for t in now]


def _distance(margin: Tensor) -> Tensor:
    """Of the number that is nearest to the border, in sizes of what there is."""
    nearest = margin.amin() if bool((margin > 0).all()) else -margin.amax()
    return nearest / (margin.detach().abs().mean() + 1e-30)


def _moved(tensor: Tensor, gradient: Tensor | None, step: int) -> Tensor:
    if gradient is None or not bool(gradient.isfinite().all()) or not bool(gradient.any()):
        return tensor
    size = float(tensor.abs().amax()) or 1.0
    return tensor - gradient / gradient.abs().amax() * size * 0.25 * 2**step
