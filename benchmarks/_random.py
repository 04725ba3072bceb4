"""Shapes at random, for ``--random``: as many small ones as large ones, round numbers more often than others."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import TypeVar

import torch

__all__ = ["LARGEST", "count", "dtype", "drawn", "layout", "size"]

LARGEST = 3e7  # elements of a tensor
T = TypeVar("T")


def count(r: Random, low: int, high: int) -> int:
    """Between ``low`` and ``high``, both included; its logarithm is evenly distributed."""
    return max(low, min(high, round(math.exp(r.uniform(math.log(low), math.log(high))))))


def size(r: Random, low: int, high: int) -> int:
    """Like :func:`count`, but two times in three a multiple of 4 or, from 32 on, of 8."""
    n = count(r, low, high)
    multiple = 4 if n < 32 else 8
    return n if r.random() < 1 / 3 else -(-n // multiple) * multiple


def dtype(r: Random) -> torch.dtype:
    return r.choice([torch.float32, torch.float32, torch.float32, torch.float16, torch.float16, torch.bfloat16])


def layout(r: Random) -> torch.memory_format:
    return r.choice([torch.contiguous_format, torch.contiguous_format, torch.channels_last])


def drawn(draw: Callable[[], T], fits: Callable[[T], bool]) -> T:
    """The first that fits."""
    while not fits(shape := draw()):
        pass
    return shape
