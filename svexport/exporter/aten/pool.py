"""Adaptive pools, whose windows may overlap or differ in size, and pools that an exporter gets wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from svexport.errors import ExportError
from svexport.tracing.swapped import untraced

__all__ = ["AS_CALLED", "FUNCTIONS", "is_known", "means"]


def _ends(size: int, windows: int) -> list[tuple[int, int]]:
    """Start (inclusive) and end (exclusive) of each window."""
    return [(i * size // windows, -(-(i + 1) * size // windows)) for i in range(windows)]


def _longest(size: int, windows: int) -> int:
    return max(end - start for start, end in _ends(size, windows))


def _bounds(size: int, windows: int) -> tuple[Tensor, Tensor]:
    """:func:`_ends` as two tensors, computed: a tensor made of numbers would be a constant of the trace."""
    window = torch.arange(windows)
    return window * size // windows, -(-(window + 1) * size // windows)


def _alike(size: int, windows: int) -> tuple[int, int] | None:
    """Length and stride of the windows if all are alike, else None."""
    ends = _ends(size, windows)
    lengths = {end - start for start, end in ends}
    steps = {b - a for (a, _), (b, _) in pairwise(ends)} or {size}
    return (lengths.pop(), steps.pop()) if len(lengths) == len(steps) == 1 else None


def _windows(
    input: Tensor, output_size: Sequence[int]
) -> tuple[list[tuple[int, int]], list[tuple[int, int] | None]] | None:
    """Size and number of windows for each axis, and their :func:`_alike`; None if some are dynamic."""
    sizes = (*input.shape[-len(output_size) :], *output_size)
    if not all(isinstance(size, int) and size for size in sizes):
        return None
    pairs = list(zip(sizes[: len(output_size)], output_size, strict=True))
    return pairs, [_alike(*pair) for pair in pairs]


def _average(input: Tensor, output_size: Sequence[int]) -> Tensor:
    """A plain average pool if all windows are alike, else one matrix product per dimension."""
    axes = len(output_size)
    with untraced():
        windows_of_axes = _windows(input, output_size)
        if windows_of_axes is None and not _is_dynamic(input, output_size):
            return NotImplemented
    if windows_of_axes is None:
        for axis, windows in enumerate(output_size, start=-axes):
            if _is_one(windows):
                input = input.mean(axis, keepdim=True)
            elif not is_known(input.shape[axis] == windows):
                matrix = means(input.shape[axis], windows, input)
                input = (input.transpose(axis, -1) @ matrix).transpose(axis, -1)
        return input
    with untraced():
        pairs, alike = windows_of_axes
        matrices = [
            None if None not in alike or size == windows else means(size, windows, input) for size, windows in pairs
        ]
    if None not in alike:
        kernel, stride = zip(*alike, strict=True)  # type: ignore[arg-type]
        return getattr(F, f"avg_pool{axes}d")(input, kernel, stride)
    if matrices[-1] is not None:
        input = input @ matrices[-1]
    if matrices[-2] is not None:
        input = matrices[-2].T @ input
    if axes == 3 and matrices[0] is not None:
        input = (matrices[0].T @ input.flatten(-2)).unflatten(-1, tuple(output_size[1:]))
    return input


def _is_dynamic(input: Tensor, output_size: Sequence[Any]) -> bool:
    """Whether some sizes are symbols of torch.export."""
    return any(isinstance(n, torch.SymInt) for n in (*input.shape[-len(output_size) :], *output_size))


def is_known(condition: Any) -> bool:
    """Whether a condition is known to hold for all sizes."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

    return statically_known_true(condition)


def _is_one(windows: Any) -> bool:
    return isinstance(windows, int) and windows == 1


def _inside(size: Any, windows: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mask ``(size, windows)`` of the pixels in each window, and their number ``(windows,)``; sizes may be dynamic."""
    pixel, window = (torch.arange(n, device=like.device) for n in (size, windows))
    length, count = (torch.full((), n, dtype=torch.int64, device=like.device) for n in (size, windows))
    count = count.clamp(min=1)
    start, end = window * length // count, ((window + 1) * length + count - 1) // count
    return (pixel[:, None] >= start) & (pixel[:, None] < end), end - start


def means(size: Any, windows: Any, like: Tensor) -> Tensor:
    """``(size, windows)``, dtype of ``like``: a column averages the pixels of one window. Sizes may be dynamic."""
    inside, count = _inside(size, windows, like)
    precise = torch.promote_types(like.dtype, torch.float32)  # bfloat16 cannot represent 257
    shares = inside.to(precise) / count.to(precise)
    return shares if precise == like.dtype else shares.to(like.dtype)


def _largest_of_dynamic(input: Tensor, output_size: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Maximum over each axis, with pixels outside of a window masked to the least value. The last axis comes first, so
    that among equal pixels the index is the first one in row-major order."""
    axes = len(output_size)
    least = -math.inf if input.is_floating_point() else torch.iinfo(input.dtype).min
    values, places, stride = input, None, 1
    for axis in range(-1, -axes - 1, -1):
        size, windows = input.shape[axis], output_size[axis]
        if _is_one(windows):
            values, index = values.amax(axis, keepdim=True), values.argmax(axis, keepdim=True)
        else:
            inside, _ = _inside(size, windows, input)
            rows = values.transpose(axis, -1).unsqueeze(-1)  # (..., size, 1)
            rows = torch.where(inside, rows, least)  # (..., size, windows)
            values, index = rows.amax(-2).transpose(axis, -1), rows.argmax(-2).transpose(axis, -1)
        place = index * stride
        places, stride = place if places is None else place + places.gather(axis, index), stride * size
    return values, places  # type: ignore[return-value]


def _largest(input: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """A plain max pool. Windows that are not alike are laid side by side and padded by repeating their last pixel."""
    axes = len(output_size)
    with untraced():
        windows_of_axes = _windows(input, output_size)
        if windows_of_axes is None and not _is_dynamic(input, output_size):
            return NotImplemented
    if windows_of_axes is None:
        return _largest_of_dynamic(input, output_size)
    with untraced():
        pairs, alike = windows_of_axes
        places = [None if known else _side_by_side(*pair) for known, pair in zip(alike, pairs, strict=True)]
        kernel, stride = zip(
            *(known or 2 * (_longest(*pair),) for known, pair in zip(alike, pairs, strict=True)), strict=True
        )
        sizes = [size for size, _ in pairs]
        of = torch.arange(math.prod(sizes)).reshape(sizes)
        for axis, index in enumerate(places):
            of = of if index is None else of.index_select(axis, index)
    filled = input
    for axis, index in enumerate(places, start=-axes):
        if index is not None:
            filled = filled.index_select(filled.dim() + axis, index.to(input.device))
    pool = getattr(F, f"max_pool{axes}d")
    _, found = getattr(F, f"max_pool{axes}d_with_indices")(filled, kernel, stride)
    if any(index is not None for index in places):
        found = of.flatten().to(input.device)[found]
    return pool(filled, kernel, stride), found


def _side_by_side(size: int, windows: int) -> Tensor:
    """Indices of all windows, one after the other, each padded to the longest by repeating its last index."""
    start, end = _bounds(size, windows)
    return torch.minimum(start[:, None] + torch.arange(_longest(size, windows)), end[:, None] - 1).flatten()


def _each(numbers: Any, axes: int) -> list[Any]:
    """An argument of a pool for each axis: one may stand for all, and be a list."""
    numbers = list(numbers) if isinstance(numbers, Sequence) else [numbers]
    return numbers * (axes if len(numbers) == 1 else 1)


def _over_all(input: Tensor, kernel: Sequence[Any], steps: Sequence[Any], pads: Sequence[Any]) -> list[int] | None:
    """The axes of a pool whose only window is all of a dynamic size, ``x.shape[2:]``; None if other axes are pooled.

    Pools of ONNX have numbers as windows: torch.export would make one of the size.
    """
    if not _is_dynamic(input, kernel):
        return None
    found = []
    for axis, (window, step, pad) in enumerate(zip(kernel, steps, pads, strict=True), start=-len(kernel)):
        if pad != 0:
            return None
        if is_known(window == input.shape[axis]):
            found.append(axis)
        elif not (_is_one(window) and _is_one(step)):
            return None
    return found or None


def _averages(axes: int) -> Callable[..., Any]:
    """Average pool over dynamic sizes, or with ``divisor_override``, which the exporters' own ignore."""
    pool = getattr(torch.ops.aten, f"avg_pool{axes}d")

    def function(
        input: Tensor,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        sizes, steps, pads = (_each(n, axes) for n in (kernel_size, stride or kernel_size, padding))
        if divisor_override is None:
            whole = _over_all(input, sizes, steps, pads)
            return NotImplemented if whole is None else input.mean(whole, keepdim=True)
        if ceil_mode:
            raise ExportError(
                f"avg_pool{axes}d with ceil_mode and divisor_override is not exported; pad the input, without ceil_mode"
            )
        return pool(input, sizes, steps, pads, False, True) * (math.prod(sizes) / divisor_override)

    return function


def _largest_as_called(axes: int) -> Callable[..., Any]:
    """Max pool over dynamic sizes. Of a row torch's own for CPUs is one function that specializes the size."""

    def function(
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        if return_indices:
            return NotImplemented
        whole = _over_all(input, *(_each(n, axes) for n in (kernel_size, stride or kernel_size, padding)))
        if whole is not None:
            return input.amax(whole, keepdim=True)
        if axes > 1 or not _is_dynamic(input, (1,)):
            return NotImplemented
        return torch.max_pool1d_with_indices(input, kernel_size, stride or kernel_size, padding, dilation, ceil_mode)[0]

    return function


AS_CALLED: dict[Callable[..., Any], Callable[..., Any]] = {
    **{getattr(F, f"avg_pool{axes}d"): _averages(axes) for axes in (1, 2, 3)},
    **{getattr(place, f"max_pool{axes}d"): _largest_as_called(axes) for axes in (1, 2, 3) for place in (F, torch)},
}
"""By Python callable."""

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"aten::_adaptive_avg_pool{axes}d": _average for axes in (2, 3)},
    **{f"aten::adaptive_max_pool{axes}d": _largest for axes in (2, 3)},
}
