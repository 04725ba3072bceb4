"""Max pooling of an image without a batch; the exporter writes invalid files for it at opset 17 and below."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from svexport.ops._op import Op

__all__ = ["max_pool2d"]


def reference(
    input: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Tensor:
    return F.max_pool2d(  # type: ignore[call-overload]
        input, kernel_size, stride or None, padding, dilation, bool(ceil_mode)
    )


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    yield make(2, 7, 9), [3, 3], [1, 1], [1, 1], [1, 1], False
    yield make(1, 8, 9), [2, 3], [], [0, 1], [1, 1], False
    yield make(2, 3, 7, 9), [3, 2], [2, 1], [1, 0], [1, 1], False


OP = Op(
    name="max_pool2d",
    schema="(Tensor input, int[] kernel_size, int[] stride, int[] padding, int[] dilation, bool ceil_mode) -> Tensor",
    reference=reference,
    samples=samples,
    plugin=False,
    inline=True,
)


def max_pool2d(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """``F.max_pool2d``, for a single image and for a batch.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.max_pool2d.html

    Shape:
        - input: ``(C, H, W)`` or ``(N, C, H, W)``
        - output: ``(C, h, w)`` or ``(N, C, h, w)``
    """
    return F.max_pool2d(input, kernel_size, stride, padding, dilation, ceil_mode)  # type: ignore[arg-type]
