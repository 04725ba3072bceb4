"""Replaces functions of an integer that torch.export would specialize, for integers that are dynamic sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["BY_SIZE"]


def _places(count: Any, dtype: torch.dtype | None, device: Any) -> tuple[Tensor, Tensor]:
    """0, 1, … as floating-point numbers ``(count,)``, and their number as a tensor."""
    places = torch.arange(count, dtype=dtype or torch.get_default_dtype(), device=device)
    return places, places.new_full((), count)


def _window(own: Callable[..., Tensor], shape: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A window function. ``shape`` computes it from each place's position, 0 to 1, and further positional arguments."""

    def window(
        window_length: Any,
        periodic: bool = True,
        *args: float,
        dtype: torch.dtype | None = None,
        device: Any = None,
        requires_grad: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        if not isinstance(window_length, torch.SymInt):
            options = {"dtype": dtype, "device": device, "requires_grad": requires_grad}
            return own(window_length, periodic, *args, **options, **kwargs)
        places, count = _places(window_length, dtype, device)
        steps = count if periodic else count - 1
        values = shape(places / steps.clamp(min=1), *args, **kwargs)
        return torch.where(count == 1, torch.ones_like(values), values)

    return window


def _hamming(along: Tensor, alpha: float = 0.54, beta: float = 0.46) -> Tensor:
    return alpha - beta * torch.cos(along * (2 * math.pi))


def _hann(along: Tensor) -> Tensor:
    return _hamming(along, 0.5, 0.5)


def _blackman(along: Tensor) -> Tensor:
    return 0.42 - 0.5 * torch.cos(along * (2 * math.pi)) + 0.08 * torch.cos(along * (4 * math.pi))


def _bartlett(along: Tensor) -> Tensor:
    return 1 - (2 * along - 1).abs()


def _fftfreq(n: Any, d: float = 1.0, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> Tensor:
    if not isinstance(n, torch.SymInt):
        return torch.fft.fftfreq(n, d, dtype=dtype, device=device, **kwargs)
    places, count = _places(n, dtype, device)
    return torch.where(2 * places >= count, places - count, places) / (count * d)


def _rfftfreq(n: Any, d: float = 1.0, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> Tensor:
    if not isinstance(n, torch.SymInt):
        return torch.fft.rfftfreq(n, d, dtype=dtype, device=device, **kwargs)
    size: Any = n
    places, _ = _places(size // 2 + 1, dtype, device)
    return places / (places.new_full((), size) * d)


def _roll(input: Tensor, shifts: Any, dims: Any = ()) -> Tensor:
    """``roll``; the exporter's own takes only constant shifts, and fails where values decide on a size of 0."""
    if isinstance(dims, (tuple, list)) and not dims:
        return _roll(input.flatten(), shifts, 0).reshape(input.shape)
    both = [x if isinstance(x, (tuple, list)) else [x] for x in (shifts, dims)]
    sizes = [input.shape[dim] for dim in both[1]] if len(both[0]) == len(both[1]) else []
    if not sizes or not (any(map(_is_of_values, sizes)) or any(isinstance(shift, torch.SymInt) for shift in both[0])):
        return torch.roll(input, shifts, dims)
    for shift, dim, size in zip(*both, sizes, strict=True):
        place = torch.arange(size, device=input.device) - shift
        input = input.index_select(dim, torch.remainder(place, place.new_full((), size).clamp(min=1)))
    return input


def _shifted(own: Callable[..., Tensor], more: int) -> Callable[..., Tensor]:
    """Rolls by half of each size, rounded up if ``more`` is 1."""

    def shifted(input: Tensor, dim: Any = None) -> Tensor:
        dims = _dims(input, dim)
        if not _is_dynamic(input, dims):
            return own(input, dim)
        return _roll(input, [(input.shape[d] + more) // 2 for d in dims], list(dims))

    return shifted


def _tensor_split(input: Tensor, indices_or_sections: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """``tensor_split``; torch's own specializes the sizes of the parts. The first parts get one more element each."""
    size, parts = input.shape[dim], indices_or_sections
    if not isinstance(parts, int) or not isinstance(size, torch.SymInt):
        return torch.tensor_split(input, parts, dim)
    ends = [part * (size // parts) + torch.sym_min(part, size % parts) for part in range(parts + 1)]
    return tuple(input.narrow(dim, start, end - start) for start, end in itertools.pairwise(ends))


def _gradient(
    input: Tensor, *, spacing: Any = 1, dim: Any = None, edge_order: int = 1, **kwargs: Any
) -> tuple[Tensor, ...]:
    """``gradient`` by differences of neighbours at a constant distance; for given coordinates, torch's own."""
    dims = _dims(input, dim)
    steps = list(spacing) if isinstance(spacing, (tuple, list)) else [spacing] * len(dims)
    if not _is_dynamic(input, dims) or len(steps) != len(dims) or any(isinstance(step, Tensor) for step in steps):
        return torch.gradient(input, spacing=spacing, dim=dim, edge_order=edge_order, **kwargs)
    return tuple(_slope(input, step, d, edge_order) for step, d in zip(steps, dims, strict=True))


def _slope(x: Tensor, step: float, dim: int, edge_order: int) -> Tensor:
    """The gradient along one dimension; at both ends it uses the next ``edge_order`` elements."""

    def at(place: int) -> Tensor:
        return x.narrow(dim, place if place >= 0 else x.shape[dim] + place, 1)

    inner = (x.narrow(dim, 2, x.shape[dim] - 2) - x.narrow(dim, 0, x.shape[dim] - 2)) / (2 * step)
    if edge_order == 1:
        first, last = at(1) - at(0), at(-1) - at(-2)
    else:
        first, last = 2 * at(1) - 1.5 * at(0) - 0.5 * at(2), 1.5 * at(-1) - 2 * at(-2) + 0.5 * at(-3)
    return torch.cat((first / step, inner, last / step), dim)


def _matrix_norm(
    A: Tensor, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The largest or smallest absolute sum of a column or a row, for ``ord`` of ±1 or ±inf; else torch's own."""
    if ord not in (1, -1, math.inf, -math.inf) or not _is_dynamic(A, dim):
        return torch.linalg.matrix_norm(A, ord, dim, keepdim, dtype=dtype)
    added, other = (dim[0], dim[1]) if abs(ord) == 1 else (dim[1], dim[0])
    sums = A.to(dtype or A.dtype).abs().sum(added, keepdim=True)
    norm = sums.amax(other, keepdim=True) if ord > 0 else sums.amin(other, keepdim=True)
    return norm if keepdim else norm.squeeze(tuple(dim))


def _dims(x: Tensor, dim: Any) -> Sequence[int]:
    """The dimensions as a sequence; None means all."""
    return range(x.dim()) if dim is None else dim if isinstance(dim, (tuple, list)) else [dim]


def _is_dynamic(x: Tensor, dims: Any) -> bool:
    return any(isinstance(x.shape[d], torch.SymInt) for d in dims) and not x.is_complex()


def _take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """``torch.gather`` of broadcast tensors; negative indices count from the end."""
    size = input.numel() if dim is None else input.shape[dim] if input.dim() else 1
    indices = torch.where(indices < 0, indices + size, indices)
    if dim is None:
        return input.flatten().gather(0, indices.flatten())
    along = dim % (input.dim() or 1)
    return _widened(input, indices, along).gather(dim, _widened(indices, input, along))


def _kron(input: Tensor, other: Tensor) -> Tensor:
    """``torch.kron``; torch's own makes numbers of the sizes."""
    rank = max(input.dim(), other.dim())
    first, second = (x.reshape([1] * (rank - x.dim()) + list(x.shape)) for x in (input, other))
    for dim in range(rank):
        first, second = first.unsqueeze(2 * dim + 1), second.unsqueeze(2 * dim)
    product = first * second  # each size of one beside that of the other
    for dim in range(rank):
        product = product.flatten(dim, dim + 1)
    return product


def _trapezoid(y: Tensor, x: Tensor | None = None, *, dx: float = 1, dim: int = -1) -> Any:
    """``torch.trapezoid``; torch's own takes the first and the last, of which there may be none where values decide."""
    if x is not None or not _is_of_values(y.shape[dim]):
        return NotImplemented
    along = y.movedim(dim, 0)
    return (along[1:] + along[:-1]).sum(0) * (dx / 2)


def _is_of_values(size: Any) -> bool:
    """Whether values decide a size."""
    return isinstance(size, torch.SymInt) and not size.node.has_hint()


def _widened(x: Tensor, other: Tensor, dim: int) -> Tensor:
    """``x`` with its axes of size 1 expanded to the sizes of ``other``, except along ``dim``."""
    ones = [isinstance(size, int) and size == 1 for size in x.shape]
    return x.expand([other.size(axis) if one and axis != dim else -1 for axis, one in enumerate(ones)])


BY_SIZE: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.tensor_split: _tensor_split,
    Tensor.tensor_split: _tensor_split,
    **dict.fromkeys((torch.kron, Tensor.kron), _kron),
    **dict.fromkeys((torch.roll, Tensor.roll), _roll),
    **dict.fromkeys((torch.take_along_dim, Tensor.take_along_dim), _take_along_dim),
    **dict.fromkeys((torch.trapezoid, torch.trapz), _trapezoid),
    torch.bartlett_window: _window(torch.bartlett_window, _bartlett),
    torch.blackman_window: _window(torch.blackman_window, _blackman),
    torch.hamming_window: _window(torch.hamming_window, _hamming),
    torch.hann_window: _window(torch.hann_window, _hann),
    torch.gradient: _gradient,
    torch.linalg.matrix_norm: _matrix_norm,
    torch.fft.fftfreq: _fftfreq,
    torch.fft.rfftfreq: _rfftfreq,
    torch.fft.fftshift: _shifted(torch.fft.fftshift, 0),
    torch.fft.ifftshift: _shifted(torch.fft.ifftshift, 1),
}
"""By function, what is traced in its place."""
