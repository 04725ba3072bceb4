"""``F.grid_sample``: an image sampled at normalized coordinates. ONNX has it from opset 16 on, 5-D from 20 on."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from svexport.ops._op import Op
from svexport.ops.dequantize import result_dtype, values_of

__all__ = ["GridSample", "grid_sample"]

# The numbers that ATen uses.
BILINEAR, NEAREST, BICUBIC = 0, 1, 2
ZEROS, BORDER, REFLECTION = 0, 1, 2
_MODES = {"bilinear": BILINEAR, "nearest": NEAREST, "bicubic": BICUBIC}
_PADDINGS = {"zeros": ZEROS, "border": BORDER, "reflection": REFLECTION}

# A tap on one axis: its index, clamped to the image; where it lies inside (None: everywhere); its weight (None: 1).
_Tap = tuple[Tensor, "Tensor | None", "Tensor | None"]


def reference(
    input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool, scale: float
) -> Tensor:
    sizes = input.shape[2:]
    dtype = result_dtype(input, grid)
    precise = torch.promote_types(dtype, torch.float32)
    x_first = grid.to(torch.promote_types(grid.dtype, torch.float32)).unbind(-1)  # (N, *out) each
    axes = [  # of the image, in its order
        _taps(x, size, interpolation_mode, padding_mode, align_corners, len(sizes))
        for x, size in zip(reversed(x_first), sizes)
    ]
    pixels = values_of(input, scale, precise).flatten(2)  # (N, C, pixels)
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    output = pixels.new_zeros(())
    for taps in itertools.product(*axes):
        index = torch.stack([index * stride for (index, _, _), stride in zip(taps, strides)]).sum(0)
        tap = pixels.gather(2, index.flatten(1)[:, None].expand(-1, pixels.shape[1], -1))
        tap = tap.unflatten(2, grid.shape[1:-1])  # (N, C, *out)
        for _, inside, _ in taps:
            if inside is not None:
                tap = torch.where(inside[:, None], tap, 0)
        weight = math.prod(weight for _, _, weight in taps if weight is not None)
        output = output + tap * (weight[:, None].to(precise) if isinstance(weight, Tensor) else weight)
    return output.to(dtype)


def _taps(x: Tensor, size: int, mode: int, padding: int, align_corners: bool, axes: int) -> list[_Tap]:
    """The pixels along one axis that a point is interpolated from, by the arithmetic of ATen's kernels.

    NaN coordinates give what ATen's CPU kernels give. In 4-D: the first pixel with border and reflection; with zeros
    NaN, or zero if nearest; NaN if bicubic. In 5-D: the last pixel, or zero.
    """
    last = size - 1
    # -1 and 1 are the centres of the outer pixels with align_corners, otherwise their outer edges.
    x = (x + 1) * (last / 2) if align_corners else (x + 1) * (size / 2) - 0.5

    def reflect(x: Tensor) -> Tensor:
        edge, period = (0.0, 2 * last) if align_corners else (0.5, 2 * size)
        x = (x + edge).abs()
        x = x - (x / max(period, 1)).trunc() * period
        return torch.minimum(x, period - x) - edge

    def clip(x: Tensor) -> Tensor:
        if axes == 3:
            x = torch.where(x < last, x, last)
            return torch.where(x > 0, x, 0)
        x = torch.where(x > 0, x, 0)
        return torch.where(x < last, x, last)

    def tap(x: Tensor, weight: Tensor | None) -> _Tap:
        if mode == BICUBIC and padding != ZEROS:
            return clip(reflect(x) if padding == REFLECTION else x).long(), None, weight
        inside = (x >= 0) & (x <= last)
        return torch.where(inside, x, 0).long(), inside, weight

    if mode == BICUBIC:
        first = x.floor()
        weights = _cubic_weights(x - first)
        return [tap(first + step, weight) for step, weight in zip((-1, 0, 1, 2), weights)]
    if padding == REFLECTION:
        x = reflect(x)
    if padding != ZEROS:
        x = clip(x)
    elif axes == 3:
        x = torch.where(x > -2, x, -2)  # NaN: outside
        x = torch.where(x < size + 1, x, size + 1)
    if mode == NEAREST:
        return [tap(x.round(), None)]
    first = x.floor()
    return [tap(first, 1 - (x - first)), tap(first + 1, x - first)]


def _cubic_weights(t: Tensor) -> list[Tensor]:
    """Cubic convolution with a = -0.75: the weights of the pixels at -1, 0, 1 and 2 from the one left of the point."""
    a = -0.75

    def near(x: Tensor) -> Tensor:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Tensor) -> Tensor:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def implementation(
    input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool, scale: float
) -> Tensor:
    # Compute half in float32: ATen's CPU kernels would round coordinates to half, 3 pixels off in an image 3000 wide.
    dtype = result_dtype(input, grid)
    precise = torch.promote_types(dtype, torch.float32)
    values = values_of(input, scale, precise)
    output = torch.grid_sampler(values, grid.to(precise), interpolation_mode, padding_mode, align_corners)
    return output.to(dtype)


def fake(input: Tensor, grid: Tensor, *_: object) -> Tensor:
    return input.new_empty((*input.shape[:2], *grid.shape[1:-1]), dtype=result_dtype(input, grid))


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    def at(shape: tuple[int, ...], out: tuple[int, ...], align_corners: bool) -> tuple[Tensor, Tensor]:
        """An image, and a grid around it away from the middles and edges of pixels, where gradients jump."""
        sizes = make(1).new_tensor(shape[:1:-1])
        grid = make(shape[0], *out, len(out))
        pixel = (grid * sizes).floor() + 0.1 + 0.3 * make(*grid.shape).sigmoid()
        return make(*shape), 2 * pixel / (sizes - 1) - 1 if align_corners else (2 * pixel + 1) / sizes - 1

    for mode, padding, align_corners, shape, out in [
        (BILINEAR, ZEROS, False, (2, 3, 5, 7), (3, 2)),
        (BILINEAR, BORDER, True, (1, 1, 2, 11), (1, 5)),
        (BILINEAR, REFLECTION, False, (2, 2, 3, 4), (2, 3)),
        (NEAREST, ZEROS, True, (2, 1, 3, 5), (4, 1)),
        (NEAREST, REFLECTION, False, (1, 3, 4, 3), (2, 2)),
        (BICUBIC, ZEROS, False, (2, 1, 5, 4), (2, 2)),
        (BICUBIC, REFLECTION, True, (1, 2, 3, 5), (1, 3)),
        (BILINEAR, ZEROS, True, (2, 1, 2, 3, 4), (1, 2, 3)),
        (BILINEAR, REFLECTION, False, (1, 2, 3, 2, 5), (2, 1, 2)),
        (NEAREST, BORDER, False, (1, 2, 2, 4, 3), (1, 3, 1)),
    ]:
        yield *at(shape, out, align_corners), mode, padding, align_corners, 1.0
    for mode, padding, shape, out in [
        (BILINEAR, ZEROS, (2, 5, 4, 6), (3, 4)),
        (NEAREST, BORDER, (1, 3, 2, 4, 3), (1, 3, 2)),
    ]:
        image, grid = at(shape, out, False)
        yield (image * 40).clamp(-128, 127).to(torch.int8), grid, mode, padding, False, 0.03


OP = Op(
    name="grid_sample",
    schema="(Tensor input, Tensor grid, int interpolation_mode, int padding_mode, bool align_corners, "
    "float scale) -> Tensor",
    reference=reference,
    samples=samples,
    implementation=implementation,
    fake=fake,
)


def grid_sample(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
    *,
    scale: float = 1.0,
) -> Tensor:
    """``torch.nn.functional.grid_sample``, with coordinates and sums in float32 also for half inputs.

    It also reads int8 images directly, without a dequantized copy.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.grid_sample.html

    Shape:
        - input: ``(N, C, H, W)`` or ``(N, C, D, H, W)``, floating point, or int8 with a step worth ``scale``; TensorRT
          may hold it in any of its int8 formats
        - grid: ``(N, gH, gW, 2)`` or ``(N, gD, gH, gW, 3)``, coordinates ``(x, y[, z])``, -1 to 1 across the image; the
          dtype of ``input``, or float32 with a half input
        - output: ``(N, C, gH, gW)`` or ``(N, C, gD, gH, gW)``, the dtype of ``input``, or of ``grid`` if it is int8

    Args:
        mode: ``"bilinear"`` (trilinear in 5-D), ``"nearest"`` or, in 4-D, ``"bicubic"``.
        padding_mode: ``"zeros"``, ``"border"`` or ``"reflection"``: the values outside of the image.
        align_corners: whether -1 and 1 are the centres of the outer pixels, or their outer edges. None warns: False.
        scale: value of one step of an int8 input; ignored for any other input.

    Raises:
        ValueError: on an unknown ``mode`` or ``padding_mode``.
        RuntimeError: on shapes, dtypes or devices other than these.
    """
    for name, value, known in (("mode", mode, _MODES), ("padding_mode", padding_mode, _PADDINGS)):
        if value not in known:
            raise ValueError(f"grid_sample expects {name} to be one of {', '.join(map(repr, known))}; got {value!r}")
    if align_corners is None and not torch.compiler.is_compiling():  # a warning would break its graph
        warnings.warn(
            "grid_sample takes align_corners=None for False, as torch does since 1.3; say False or True", stacklevel=2
        )
    if not input.is_meta and torch.is_autocast_enabled(input.device.type):  # to one dtype, as torch does
        dtype = torch.promote_types(input.dtype, grid.dtype)
        if input.device.type == "cpu":
            dtype = torch.promote_types(dtype, torch.float32)
        input, grid = input.to(dtype) if input.is_floating_point() else input, grid.to(dtype)
    _check(input, grid, mode)
    scale = 1.0 if input.is_floating_point() else scale
    return OP(input, grid, _MODES[mode], _PADDINGS[padding_mode], bool(align_corners), float(scale))


def _check(input: Tensor, grid: Tensor, mode: str) -> None:
    image, points, axes = input.shape, grid.shape, input.dim() - 2

    def got() -> str:
        return f"got input {tuple(image)} and grid {tuple(points)}"

    if axes not in (2, 3) or len(points) != len(image):
        raise RuntimeError(
            f"grid_sample expects input (N, C, H, W) with grid (N, gH, gW, 2), or input (N, C, D, H, W) with grid "
            f"(N, gD, gH, gW, 3); {got()}"
        )
    if points[-1] != axes or points[0] != image[0]:
        raise RuntimeError(
            f"grid_sample expects the grid of a {axes + 2}-D input to have its batch size and {axes} "
            f"coordinates in the last dimension; {got()}"
        )
    if 0 in image[2:]:
        raise RuntimeError(f"grid_sample expects an input with at least one pixel; {got()}")
    if mode == "bicubic" and axes != 2:
        raise RuntimeError(f"grid_sample has mode 'bicubic' for 4-D input only; {got()}; use 'bilinear' or 'nearest'")
    if input.device != grid.device:
        raise RuntimeError(
            f"grid_sample expects input and grid on one device; got {input.device} and {grid.device}; move one by .to()"
        )
    if not (input.is_floating_point() or input.dtype == torch.int8):
        raise NotImplementedError(
            f"grid_sample expects a floating-point or int8 input; got {input.dtype}; convert it first"
        )
    if input.dtype == torch.int8:
        if not grid.is_floating_point():
            raise RuntimeError(f"grid_sample expects a floating-point grid; got {grid.dtype}; convert it with .to()")
    elif grid.dtype != input.dtype:
        half = input.dtype in (torch.float16, torch.bfloat16)
        if not (half and grid.dtype == torch.float32):
            raise RuntimeError(
                f"grid_sample expects the grid in {input.dtype}{' or torch.float32' if half else ''}, as its input is "
                f"{input.dtype}; got {grid.dtype}; convert one with .to()"
            )


class GridSample(nn.Module):
    """Module form of :func:`grid_sample`; it has no parameters."""

    def __init__(
        self,
        mode: str = "bilinear",
        padding_mode: str = "zeros",
        align_corners: bool | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.mode, self.padding_mode, self.align_corners, self.scale = mode, padding_mode, align_corners, scale

    def extra_repr(self) -> str:
        """The options, as ``print(module)`` shows them."""
        options = {"mode": self.mode, "padding_mode": self.padding_mode, "align_corners": self.align_corners}
        return ", ".join(f"{name}={value!r}" for name, value in (options | {"scale": self.scale}).items())

    def forward(self, input: Tensor, grid: Tensor) -> Tensor:
        """``(N, C, H, W)`` at ``(N, gH, gW, 2)``, or in 3-D; as :func:`grid_sample`."""
        return self.sample(input, grid, self.scale)

    def sample(self, input: Tensor, grid: Tensor, scale: float) -> Tensor:
        """Calls :func:`grid_sample` with the module's options and the given ``scale``."""
        return grid_sample(input, grid, self.mode, self.padding_mode, self.align_corners, scale=scale)
