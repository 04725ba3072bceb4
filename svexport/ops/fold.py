"""Adds sliding blocks up to an image. ONNX has Col2Im only from opset 18 on, and TensorRT does not have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from svexport.ops._op import Op

__all__ = ["fold"]


def reference(
    input: Tensor,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    return F.fold(input, *map(tuple, (output_size, kernel_size, dilation, padding, stride)))  # type: ignore[arg-type]


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    yield make(2, 3 * 6, 12), (5, 6), (2, 3), (1, 1), (1, 0), (2, 1)
    yield make(2, 4, 9), (7, 7), (2, 2), (2, 2), (0, 0), (2, 2)
    yield make(9, 4), (4, 5), (3, 3), (1, 1), (1, 1), (3, 3)
    yield make(1, 2, 35), (5, 7), (1, 1), (1, 1), (0, 0), (1, 1)
    yield make(0, 4, 4), (3, 3), (2, 2), (1, 1), (0, 0), (1, 1)


OP = Op(
    name="fold",
    schema=(
        "(Tensor input, SymInt[] output_size, int[] kernel_size, int[] dilation, int[] padding, int[] stride) -> Tensor"
    ),
    reference=reference,
    samples=samples,
    plugin=False,
    inline=True,
)


def fold(
    input: Tensor,
    output_size: int | tuple[int, int],
    kernel_size: int | tuple[int, int],
    dilation: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    stride: int | tuple[int, int] = 1,
) -> Tensor:
    """``F.fold``: adds sliding blocks up to an image. In a file it is one ConvTranspose with one-hot kernels.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.fold.html

    Shape:
        - input: ``(N, C * kH * kW, L)`` or ``(C * kH * kW, L)``, L the number of blocks
        - output: ``(N, C, H, W)`` or ``(C, H, W)`` with ``(H, W) = output_size``, which may be dynamic

    Raises:
        RuntimeError: if the number of blocks or of channels does not fit.
    """
    return F.fold(input, output_size, kernel_size, dilation, padding, stride)
