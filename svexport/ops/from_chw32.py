"""NC/32HW32, TensorRT's layout of int8 tensors, back to linear NCHW."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from svexport.ops._op import Op

__all__ = ["from_chw32"]


def reference(x: Tensor, channels: int) -> Tensor:
    n, blocks, h, w, _ = x.shape
    planes = x.permute(0, 1, 4, 2, 3).reshape(n, 32 * blocks, h, w)[:, :channels]
    return planes.clone(memory_format=torch.contiguous_format)


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    for (n, c, h, w), channels in [
        ((2, 1, 5, 7), 3),
        ((1, 2, 2, 3), 33),
        ((2, 1, 1, 4), 32),
        ((1, 3, 1, 1), 70),
        ((0, 1, 3, 2), 5),
    ]:
        yield make(n, c, h, w, 32), channels


OP = Op(
    name="from_chw32", schema="(Tensor x, int channels) -> Tensor", reference=reference, samples=samples, plugin=False
)


def from_chw32(x: Tensor, channels: int) -> Tensor:
    """The inverse of :func:`svexport.ops.to_chw32`: NC/32HW32 to NCHW, without the padding of the last channel block.

    Args:
        x: ``(N, ceil(channels/32), H, W, 32)``, any dtype.
        channels: ``C``.

    Returns:
        ``(N, C, H, W)``, contiguous.

    Raises:
        ValueError: on another shape of ``x``, or a number of channels that does not end in its last block.
    """
    if x.dim() != 5 or x.shape[-1] != 32 or channels < 1 or x.shape[1] != -(-channels // 32):
        raise ValueError(
            f"from_chw32 expects (N, {-(-channels // 32)}, H, W, 32) for {channels} channels, got {tuple(x.shape)}"
        )
    return OP(x, channels)
