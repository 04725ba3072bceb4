"""Linear NCHW to NC/32HW32, TensorRT's layout of int8 tensors: 32 channels of a pixel are contiguous."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from svexport.ops._op import Op

__all__ = ["to_chw32"]


def reference(x: Tensor, pool: bool) -> Tensor:
    if pool:
        x = F.max_pool2d(x if x.is_floating_point() else x.float(), 2).to(x.dtype)
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % 32))
    n, c, h, w = x.shape
    blocks = x.reshape(n, c // 32, 32, h, w).permute(0, 1, 3, 4, 2)
    return blocks.clone(memory_format=torch.contiguous_format)


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    for shape, pool in [
        ((2, 3, 5, 7), False),
        ((1, 33, 2, 3), False),
        ((2, 32, 1, 4), False),
        ((1, 70, 5, 4), True),
        ((0, 5, 3, 2), False),
    ]:
        yield make(*shape), pool


OP = Op(name="to_chw32", schema="(Tensor x, bool pool) -> Tensor", reference=reference, samples=samples, plugin=False)


def to_chw32(x: Tensor, pool: bool = False) -> Tensor:
    """NCHW to NC/32HW32: element ``(n, c, h, w)`` is at ``((n*ceil(C/32) + c//32)*H*W + h*W + w)*32 + c%32``.

    This is TensorRT's ``nvinfer1::TensorFormat::kCHW32``; channels beyond ``C`` are 0. The inverse is
    :func:`svexport.ops.from_chw32`.

    Args:
        x: ``(N, C, H, W)``, any dtype; floating point or int8 for ``pool``.
        pool: also max-pool 2x2 blocks of pixels, dropping an odd last row or column: ``F.max_pool2d(x, 2)``.

    Returns:
        ``(N, ceil(C/32), H, W, 32)``, contiguous, ``H//2`` and ``W//2`` with ``pool``.

    Raises:
        ValueError: if ``x`` is not 4-D.
        TypeError: if ``pool`` is set for another dtype.
    """
    if x.dim() != 4:
        raise ValueError(f"to_chw32 expects (N, C, H, W), got {tuple(x.shape)}")
    if pool and not (x.is_floating_point() or x.dtype == torch.int8):
        raise TypeError(f"to_chw32 pools floating-point and int8 tensors, got {x.dtype}")
    return OP(x, pool)
