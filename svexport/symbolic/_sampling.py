"""What the bodies of the sampling ops share: the taps of every point, gathered from the flattened image and weighted.

Coordinates and weights are laid out ``(N, A, *taps, *out)``: A image axes, x first, then the taps of a point, then the
points. With the points last, the inner loops of a runtime are long while axes and taps broadcast from constants. Cubic
ones are laid out ``(N, A, y taps, rows, x taps, columns)``, so that one MatMul turns powers into weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from svexport.symbolic._builder import Builder, Dim, Value

__all__ = ["CUBIC", "LINEAR", "NEAREST", "Sampler", "values"]

NEAREST, LINEAR, CUBIC = (0,), (0, 1), (-1, 0, 1, 2)
"""The taps of a point along one axis, counted from its first pixel: the coordinate, rounded (NEAREST) or floored."""

# Cubic convolution with a = -0.75: the weight of each of the four taps as a polynomial in the fraction, lowest power
# first.
_CUBIC_WEIGHTS = np.array([[0, -0.75, 1.5, -0.75], [1, 0, -2.25, 1.25], [0, 0.75, 1.5, -1.25], [0, 0, -0.75, 0.75]])

_OUTSIDE = -(2**29)  # in place of an axis's share of an index: the sum is negative whatever the other axes add
_INT32, _INT64 = TensorProto.INT32, TensorProto.INT64


def values(b: Builder, codes: Value, scale: float, dtype: int) -> Value:
    """What int8 is worth, ``scale`` a step."""
    return b.op("Mul", b.cast(codes, dtype), b.constant(np.float32(scale), dtype))


class Sampler:
    """Samples an image ``(N, C, [D,] H, W)`` at points: every sampling method returns ``(N, C, *out)``.

    Indices are int32 and count within one channel, which has less than 2**29 pixels. Whatever the coordinates, NaN
    included, no index leaves the image, and nothing relies on what a runtime makes of NaN in Min, Max or Clip.

    Args:
        b: the graph under construction.
        image: of known rank and data type.
        out: sizes of the output after ``(N, C)``, as many as the image has axes.
        taps: NEAREST, LINEAR or CUBIC.
    """

    def __init__(self, b: Builder, image: Value, out: Sequence[Dim], taps: tuple[int, ...]) -> None:
        assert image.dtype is not None
        self.b, self.image, self.out, self.taps = b, image, list(out), taps
        self.axes = image.rank - 2
        self.static = _sizes(image)
        self.image_dtype = image.dtype
        # Coordinates and sums: float32 for half images too.
        self.dtype = TensorProto.DOUBLE if image.dtype == TensorProto.DOUBLE else TensorProto.FLOAT
        # `steps` (A, *taps) lead from a point's first pixel to its taps. The taps of all axes make one dimension, but
        # cubic ones two, because 4 + 4 positions and weights, combined last, are less work than 16.
        if taps == CUBIC:
            self.tap_shape: tuple[int, ...] = (4, 4)
            self.steps = np.array(CUBIC).reshape(1, 1, 1, 4, 1)
        else:
            self.tap_shape = () if taps == NEAREST else (len(taps) ** self.axes,)
            steps = np.array([*itertools.product(taps, repeat=self.axes)]).T[::-1]  # x varies fastest
            self.steps = steps.reshape(self.axes, *self.tap_shape)

    # ------------------------------------------------------------------ constants

    def number(self, value: float) -> Value:
        return self.b.constant(value, self.dtype)

    def spread(self, array: Sequence[float] | np.ndarray, dtype: int | None = None) -> Value:
        """A constant ``(A,)`` or ``(A, *taps)``, to broadcast with coordinates."""
        array = np.asarray(array)
        trailing = 1 + len(self.tap_shape) + self.axes - array.ndim
        return self.b.constant(array.reshape(1, *array.shape, *[1] * trailing), dtype or self.dtype)

    def size(self, scale: float = 1, offset: float = 0) -> Value:
        """``scale * size + offset`` of every axis."""
        if self.static:
            return self.spread([scale * size + offset for size in self.static])
        size = self._dynamic([self.b.dim(self.image, -1 - axis) for axis in range(self.axes)], self.dtype)
        if scale != 1:
            size = self.op("Mul", size, self.number(scale))
        return self.op("Add", size, self.number(offset)) if offset else size

    def strides(self, sizes: Sequence[int] | None = None) -> Value:
        """How many pixels lie between neighbours along every axis, x first; ``sizes`` if not those of the image."""
        if sizes := sizes or self.static:
            return self.spread([math.prod(sizes[:axis]) for axis in range(self.axes)], _INT32)
        dims = [self.b.dim(self.image, -1 - axis) for axis in range(self.axes)]
        return self._dynamic([self.b.product(*dims[:axis]) for axis in range(self.axes)], _INT32)

    def _dynamic(self, dims: Sequence[Dim], dtype: int) -> Value:
        ones = [1] * (len(self.tap_shape) + self.axes)
        return self.b.reshape(self.b.cast(self.b.shape(*dims), dtype), 1, self.axes, *ones)

    # ------------------------------------------------------------------ arithmetic

    def op(self, op_type: str, x: Value, *others: Value) -> Value:
        """An elementwise node."""
        return self.b.op(op_type, x, *others)

    def where(self, condition: Value, x: Value, y: Value) -> Value:
        return self.b.op("Where", condition, x, y)

    def round(self, x: Value) -> Value:
        """To the nearest integer, halves to even."""
        if self.b.opset >= 11:
            return self.op("Round", x)
        # So large a number leaves no bits for a fraction. What is larger itself lies outside of any image.
        large = self.number(1.5 * 2.0 ** (52 if self.dtype == TensorProto.DOUBLE else 23))
        return self.op("Sub", self.op("Add", x, large), large)

    def clip(self, x: Value, low: Value, high: Value, nan_is_high: bool = False) -> Value:
        """Clamps to [low, high], NaN to one of them."""
        if nan_is_high:
            return self.op("Max", self.where(self.op("Less", x, high), x, high), low)
        return self.op("Min", self.where(self.op("Greater", x, low), x, low), high)

    def reflect(self, x: Value, quotient: Value, period: Value) -> Value:
        """The distance of x to the nearest multiple of ``period``, given ``quotient = x / period``."""
        return self.op("Abs", self.op("Sub", x, self.op("Mul", self.round(quotient), period)))

    def combine(self, op_type: str, x: Value) -> Value:
        """Adds or multiplies over the axes: ``(N, A, ...)`` -> ``(N, 1, *taps, *out)``."""
        if op_type == "Add" and self.taps != CUBIC:
            return self.b.reduce_sum(x, [1], keepdims=True)
        result, *rest = self.b.split(x, 1, [1] * self.axes)
        for part in rest:
            if self.taps == CUBIC:
                part = self.b.transpose(part, (0, 1, 4, 3, 2, 5))
            result = self.op(op_type, result, part)
        return result

    # ------------------------------------------------------------------ sampling

    def coordinates(self, grid: Value) -> Value:
        """``(N, *out, A)`` -> ``(N, A, 1, .., *out)``, or ``(N, A, 1, rows, 1, columns)``."""
        x = self.b.cast(grid, self.dtype)
        if self.tap_shape:
            x = self.b.unsqueeze(x, *((1, 3) if self.taps == CUBIC else (1,)))
        return self.b.transpose(x, (0, x.rank - 1, *range(1, x.rank - 1)))

    def inside(self, x: Value) -> Value:
        """Samples at coordinates in [0, size - 1]; NEAREST or LINEAR."""
        if self.taps == NEAREST:
            return self.finish(self.image, self.tap_index(self.round(x)))
        first = self.op("Floor", x)
        if self.static:  # at the far end take the last two pixels, so that both taps exist
            first = self.op("Min", first, self.spread([max(size - 2, 0) for size in self.static]))
            return self.finish(self.image, self.first_index(self.static, first), self.op("Sub", x, first))
        positions = self.op("Min", self.positions(first), self.size(1, -1))
        return self.finish(self.image, self.tap_index(positions), self.op("Sub", x, first))

    def zeros(self, x: Value, clipped: bool = False) -> Value:
        """Samples anywhere, zero outside of the image; ``clipped`` coordinates are from -2 to the size."""
        # Padding copies the image, a mask passes over the gathered values, sharing pixels takes more nodes. Each time a
        # pixel outside is exactly zero, whatever the one that is read for it, and a weight of NaN remains: masked
        # weights would do neither.
        if self.static and (self.taps == CUBIC or self.dense):
            return self.padded("constant", *self.split(x))
        return self.shared(x, clipped) if self.taps == LINEAR else self.masked(x)

    def masked(self, x: Value) -> Value:
        """As :meth:`zeros`, by a mask on the pixels."""
        first, fraction = self.split(x)
        positions = self.positions(first)
        within = self.b.op(
            "And", self.op("Greater", positions, self.number(-0.5)), self.op("Less", positions, self.size(1, -0.5))
        )
        index, zero = self.tap_index(positions, within), self.b.constant(0, _INT32)
        outside = self.op("Less", index, zero)
        return self.finish(self.image, self.where(outside, zero, index), fraction, outside)

    def shared(self, x: Value, clipped: bool = False) -> Value:
        """As :meth:`zeros`, LINEAR, by a mask on the points, of which there are fewer by taps.

        A tap outside reads the nearest pixel. Where the other tap of its axis reads that one too, each has half of its
        weight, which adds up to the same number exactly, be it finite or not. Where both are outside, so is the point.
        """
        b, first = self.b, self.op("Floor", x)
        taps = self.positions(first if clipped else self.clip(first, self.number(-2), self.size()))
        positions = self.op("Max", self.op("Min", taps, self.size(1, -1)), self.number(0))
        # The sum of squares of an axis's taps: 1 where one of them is outside, 5 or more where both are; each is so
        # often among the taps of all axes. By ReduceSum alone: the axes of others became an input at opset 18, which
        # parsers of before then pass over.
        times, apart = 2 ** (self.axes - 1), self.op("Sub", taps, positions)
        moved = b.reduce_sum(self.op("Mul", apart, apart), [2], keepdims=True)
        share = self.op("Sub", self.number(1), self.op("Mul", moved, self.number(0.5 / times)))
        near = self.op("Sub", self.number(1), self.op("Abs", self.op("Sub", x, positions)))
        weights = self.combine("Mul", self.op("Mul", near, share))
        pixels = b.cast(self.gather(self.image, self.tap_index(positions)), self.dtype)
        total = b.reduce_sum(self.op("Mul", pixels, weights), [2])
        outside = self.op("Greater", b.reduce_sum(moved, [1]), self.number(4 * times))
        nothing = self.number(0)
        if not clipped:  # NaN of what is not finite
            nothing = b.reduce_sum(self.op("Mul", x, nothing), [1])
        return b.cast(self.where(outside, nothing, total), self.image_dtype)

    def padded(self, mode: str, first: Value, fraction: Value | None) -> Value:
        """Samples anywhere in an image, of static sizes, that ONNX's Pad continues: ``mode`` constant or edge."""
        assert self.image.shape is not None
        assert self.static
        ring = self.ring
        first = self.clip(first, self.number(-1 - self.taps[-1]), self.size(1, -self.taps[0]))
        pads = 2 * [0, 0, *[ring] * self.axes]
        shape = [*self.image.shape[:2], *(size + 2 * ring for size in self.static[::-1])]
        if self.b.opset >= 11:
            image = self.b.op("Pad", self.image, self.b.ints(*pads), mode=mode, shape=shape)
        else:
            image = self.b.op("Pad", self.image, pads=pads, mode=mode, shape=shape)
        return self.finish(image, self.first_index([size + 2 * ring for size in self.static], first, ring), fraction)

    def mirrored(self, x: Value, edges: bool) -> Value:
        """Cubic samples at coordinates in the image, of static sizes, that its mirror images continue.

        Args:
            x: counted from where the image is mirrored.
            edges: whether that is at the far edges of its outer pixels; otherwise at their centres.
        """
        assert self.static
        ring = self.ring
        # Counted from an edge, half a pixel before the first centre, the second of the four taps is that left of x
        # rounded, and the fraction is half a pixel more than what rounding takes away.
        first = self.round(x) if edges else self.op("Floor", x)
        fraction = self.op("Sub", x, first)
        first = self.clip(first, self.number(0), self.size())
        mirrors = []
        for size in self.static:
            period = 2 * size if edges else max(2 * size - 2, 1)
            pixels = np.arange(-ring, size + ring) % period
            mirrors.append(np.minimum(pixels, period - edges - pixels))
        pixels = (mirrors[1][:, None] * self.static[0] + mirrors[0]).flatten()
        planes = self.b.op("Flatten", self.image, axis=2, shape=(None, math.prod(self.static)))
        planes = self.b.op("Gather", planes, self.b.ints(*pixels.tolist()), axis=1, shape=(None, len(pixels)))
        index = self.first_index([size + 2 * ring for size in self.static], first, ring - edges)
        return self.finish(planes, index, fraction, start=0.5 if edges else 0)

    @property
    def ring(self) -> int:
        """How many pixels around an image hold all taps of a point that has none in it."""
        return len(self.taps)

    @property
    def dense(self) -> bool:
        """Whether the image, of static sizes, is small beside all that is gathered from it."""
        gathered = self.b.product(*self.tap_shape, *self.out)
        return isinstance(gathered, int) and math.prod(self.static or ()) <= gathered

    def split(self, x: Value) -> tuple[Value, Value | None]:
        """First pixels and fractions; the fraction of a coordinate that is not finite is NaN."""
        if self.taps == NEAREST:
            return self.round(x), None
        first = self.op("Floor", x)
        return first, self.op("Sub", x, first)

    def positions(self, first: Value, offset: float = 0) -> Value:
        """The taps of every point along every axis, plus ``offset``."""
        if self.taps == NEAREST:
            return first
        return self.op("Add", first, self.spread(self.steps + offset))

    def tap_index(self, positions: Value, within: Value | None = None) -> Value:
        """The index of every tap, negative where it is not ``within`` along all axes: ``(N, 1, *taps, *out)``."""
        index = self.op("Mul", self.b.cast(positions, _INT32), self.strides())
        if within is not None:  # what Cast made of NaN and infinity goes here
            index = self.where(within, index, self.b.constant(_OUTSIDE, _INT32))
        return self.combine("Add", index)

    def first_index(self, sizes: Sequence[int], first: Value, ring: int = 0) -> Value:
        """The index of every tap, where all exist, by one addition to that of the first: ``(N, C, *taps, *out)``.

        Args:
            sizes: of the image that the index is for, x first.
            first: counted from ``ring`` pixels inside of it.
        """
        assert self.image.shape is not None
        index = self.op("Mul", self.b.cast(first, _INT32), self.strides(sizes))
        index = self.b.reduce_sum(index, [1], keepdims=True)
        if self.taps == CUBIC:
            steps = [self.steps[0], self.steps[0].swapaxes(0, 2)]
        else:
            steps = [step.reshape(*step.shape, *[1] * self.axes) for step in self.steps]
        shifts = sum(
            (np.minimum(step, size - 1) + ring) * math.prod(sizes[:axis])
            for axis, (step, size) in enumerate(zip(steps, sizes, strict=True))
        )
        channels = 1 if self.image.shape[1] is None else self.image.shape[1]
        shifts = np.broadcast_to(shifts, (1, channels, *np.shape(shifts)))
        [None, channels, *(None if size == 1 else size for size in shifts.shape[2:])]
        return self.b.op("Add", index, self.b.constant(shifts, _INT32))

    def gather(self, image: Value, index: Value) -> Value:
        """``(N, C, *taps, *out)``, the pixels at ``index`` of an image or of its planes ``(N * C, pixels)``."""
        b = self.b
        n, c = (b.dim(self.image, axis) for axis in range(2))
        points = [4, self.out[0], 4, self.out[1]] if self.taps == CUBIC else [*self.tap_shape, *self.out]
        ones = [1] * len(points)
        if b.opset < 11:  # no GatherElements yet: from the image as a whole
            axes = range(1, 2) if image.rank == 2 else range(2, image.rank)
            pixels, planes = b.product(*(b.dim(image, axis) for axis in axes)), b.product(n, c)
            starts = b.op("Mul", b.arange(planes), b.ints(pixels) if isinstance(pixels, int) else pixels)
            index = b.op("Add", b.cast(index, _INT64), b.reshape(starts, n, c, *ones))
            return b.op("Gather", b.reshape(image, b.product(planes, pixels)), index, axis=0)
        if c != 1 and (index.shape is None or index.shape[1] != c):
            index = b.op("Expand", index, b.shape(1, c, *ones))
        planes = image if image.rank == 2 else b.op("Flatten", image, axis=2)  # (N * C, pixels)
        index = b.op("Flatten", index, axis=2)
        return b.reshape(b.op("GatherElements", planes, index, axis=1), n, c, *points)

    def weights(self, fraction: Value, start: float = 0) -> Value:
        """``(N, 1, *taps, *out)``; for ``start`` see :meth:`finish`."""
        if self.taps == LINEAR:
            weights = self.op("Mul", fraction, self.spread(2 * self.steps - 1))
            return self.combine("Mul", self.op("Add", weights, self.spread(1 - self.steps)))
        shift = np.polynomial.Polynomial([start, 1])
        polynomials = np.array([np.polynomial.Polynomial(row)(shift).coef for row in _CUBIC_WEIGHTS])  # (taps, powers)
        assert self.image.shape is not None
        if all(isinstance(size, int) and size for size in (self.image.shape[0], *self.out)):
            powers = self.op("Pow", fraction, self.b.constant(np.arange(4).reshape(4, 1), self.dtype))
            # (N, A, 1, rows, taps, columns)
            weights = self.b.op("MatMul", self.b.constant(polynomials, self.dtype), powers)
            return self.combine("Mul", weights)
        # ONNX Runtime's MatMul does not broadcast beside an empty batch.
        weights, *rest = (self.b.constant(row.reshape(4, 1), self.dtype) for row in polynomials.T[::-1])
        for coefficients in rest:
            weights = self.op("Add", self.op("Mul", fraction, weights), coefficients)
        return self.combine("Mul", weights)

    def finish(
        self, image: Value, index: Value, fraction: Value | None = None, outside: Value | None = None, start: float = 0
    ) -> Value:
        """The weighted sum of the taps at ``index``; the fraction of a pixel is counted from ``start``."""
        pixels = self.gather(image, index)
        if outside is not None:
            pixels = self.where(outside, self.b.constant(0, self.image_dtype), pixels)
        if fraction is None:
            return pixels
        weighted = self.op("Mul", self.b.cast(pixels, self.dtype), self.weights(fraction, start))
        total = self.b.reduce_sum(weighted, (2, 4) if self.taps == CUBIC else (2,))
        return self.b.cast(total, self.image_dtype)


def _sizes(image: Value) -> tuple[int, ...] | None:
    """The sizes of an image, x first, where all are static."""
    assert image.shape is not None
    sizes = [size for size in image.shape[:1:-1] if size is not None]
    return tuple(sizes) if len(sizes) == image.rank - 2 else None
