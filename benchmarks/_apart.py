"""Inputs for ``benchmarks.faults``, which share neither code nor random numbers with verification's own search."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Apart"]

Array = Any


class Apart:
    """Draws inputs of many distributions, and changes those again that turned out well.

    Of three inputs one is new, one is the given one changed, one a change of an input, or a mixture of two, that
    showed a fault which none before it had.

    Args:
        tensors: the given inputs.
        ranges: how many there are of what an input's integers index, by its place.
    """

    def __init__(self, tensors: Sequence[Tensor], ranges: Mapping[int, int], seed: int = 0) -> None:
        self._given, self._ranges = [t.detach().cpu().numpy() for t in tensors], ranges
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._good: list[list[Array]] = []

    def next(self) -> list[Tensor]:
        r = self._random
        way = r.integers(3)
        if way == 2 and self._good:
            one, other = (self._good[r.integers(len(self._good))] for _ in range(2))
            arrays = [self._mixed(a, b) for a, b in zip(one, other, strict=True)]
        elif way == 1:
            arrays = [a.copy() for a in self._given]
        else:
            arrays = [self._new(a, self._ranges.get(i)) for i, a in enumerate(self._given)]
        if way and len(arrays):
            for place in np.flatnonzero(r.random(len(arrays)) < max(0.5, 1 / len(arrays))):
                arrays[place] = self._changed(arrays[place], self._given[place], self._ranges.get(int(place)))
        return [torch.from_numpy(np.ascontiguousarray(a, g.dtype)) for a, g in zip(arrays, self._given, strict=True)]

    def good(self, inputs: Sequence[Tensor]) -> None:
        """They showed what none before them had."""
        self._good.append([t.numpy() for t in inputs])

    def _new(self, given: Array, size: int | None) -> Array:
        r = self._random
        if given.dtype == bool:
            return _mask(r, given.shape)
        if given.dtype.kind != "f":
            return self._integers(given, size)
        kinds: list[Callable[[], Array]] = [
            lambda: r.standard_normal(given.shape),
            lambda: r.standard_cauchy(given.shape),
            lambda: r.lognormal(0, 2, given.shape) * r.choice([-1, 1], given.shape),
            lambda: r.exponential(1, given.shape) * r.choice([-1, 1]),
            lambda: r.integers(-2, 3, given.shape).astype(float),
            lambda: _waves(r, given.shape),
            lambda: _broadcast(r, given.shape),
            lambda: np.cumsum(r.standard_normal(given.size)).reshape(given.shape),
            lambda: np.where(r.random(given.shape) < 2 / max(given.size, 2), 1.0, 0.0) * r.standard_normal(),
        ]
        drawn = kinds[r.integers(len(kinds))]()
        if r.random() < 0.3:
            drawn = drawn + r.normal() * 3
        return _bounded(drawn * _size(given) * 10 ** r.uniform(-4, 4), given.dtype)

    def _integers(self, given: Array, size: int | None) -> Array:
        r = self._random
        low, high = (
            (0, size) if size is not None else (int(given.min()), int(given.max()) + 1) if given.size else (0, 1)
        )
        if size is None and low >= 0 and high <= 2:  # a mask
            low, high = 0, 2
        kind = r.integers(4)
        if kind == 0:
            drawn = r.integers(low, high, given.shape)
        elif kind == 1:
            drawn = np.full(given.shape, r.integers(low, high))
        elif kind == 2:
            drawn = np.sort(r.integers(low, high, given.shape), axis=-1 if given.ndim else None)
        else:
            drawn = low + (r.pareto(1, given.shape) * 2).clip(0, high - low - 1).astype(np.int64)
        return drawn

    def _changed(self, array: Array, given: Array, size: int | None) -> Array:
        r = self._random
        if array.dtype.kind != "f":
            fresh = _mask(r, array.shape) if array.dtype == bool else self._integers(given, size)
            return np.where(r.random(array.shape) < r.random(), fresh, array)
        x = array.astype(np.float64)
        kind = r.integers(7)
        if kind == 0:
            x = x * 10 ** r.uniform(-3, 3) * r.choice([-1, 1])
        elif kind == 1:
            x = x + r.standard_normal(x.shape) * _size(given) * 10 ** r.uniform(-4, 2)
        elif kind == 2:
            x = r.permutation(x.ravel()).reshape(x.shape)
        elif kind == 3:
            x = x + r.normal() * _size(given) * 10 ** r.uniform(-2, 2)
        elif kind == 4:
            x = np.where(r.random(x.shape) < r.random(), 0.0, x)
        elif kind == 5 and x.ndim:
            x = np.roll(np.flip(x, r.integers(x.ndim)), r.integers(7), r.integers(x.ndim))
        else:
            x = np.sign(x) * np.abs(x) ** r.uniform(0.2, 4)
        return _bounded(x, given.dtype)

    def _mixed(self, one: Array, other: Array) -> Array:
        r = self._random
        kind = r.integers(3)
        if kind == 0 or (kind == 1 and one.dtype.kind != "f"):
            return np.where(r.random(one.shape) < r.random(), one, other)
        if kind == 1:
            share = r.random()
            return _bounded(one.astype(np.float64) * share + other.astype(np.float64) * (1 - share), one.dtype)
        return one


def _size(given: Array) -> float:
    return float(np.nan_to_num(np.abs(given.astype(np.float64))).mean()) or 1.0 if given.size else 1.0


def _bounded(x: Array, dtype: Any) -> Array:
    most = np.finfo(dtype).max
    return np.nan_to_num(x, nan=0.0, posinf=most, neginf=-most).clip(-most, most).astype(dtype)


def _mask(r: np.random.Generator, shape: Sequence[int]) -> Array:
    """Each by chance, one of them, or those up to a place of the last axis."""
    kind = r.integers(3)
    if kind == 0 or not shape or not all(shape):
        return r.random(shape) < r.random()
    if kind == 1:
        mask = np.zeros(shape, bool)
        mask.reshape(-1)[r.integers(mask.size)] = True
        return mask ^ bool(r.integers(2))
    return np.arange(shape[-1]) < r.integers(shape[-1] + 1, size=(*shape[:-1], 1))


def _waves(r: np.random.Generator, shape: Sequence[int]) -> Array:
    wave = np.ones(shape)
    for axis, size in enumerate(shape):
        along = np.sin(np.arange(size) * r.uniform(0, np.pi) + r.uniform(0, 2 * np.pi))
        wave = wave * along.reshape([-1 if a == axis else 1 for a in range(len(shape))])
    return wave


def _broadcast(r: np.random.Generator, shape: Sequence[int]) -> Array:
    """The same along some axes."""
    return np.broadcast_to(r.standard_normal([s if r.random() < 0.5 else 1 for s in shape]), shape)
