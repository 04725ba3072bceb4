"""Approximate sigmoid and tanh without an exponential."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from svexport.ops._op import Op, check_floating_point

__all__ = ["FastSigmoid", "FastTanh", "fast_sigmoid", "fast_tanh"]


def reference(x: Tensor) -> Tensor:
    precise = x.to(torch.promote_types(x.dtype, torch.float32))
    # 0.5*(1 + x*|x|/(x*x + 0.975)), rewritten for either side of 0: no cancellation on the left, and the right limits
    # where x*x overflows.
    tail = 0.4875 / (precise * precise + 0.975)
    return torch.where(precise < 0, tail, 1 - tail).to(x.dtype)


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    for shape in [(2, 3, 5, 7), (1,), (), (0, 3), (11, 13)]:
        yield (make(*shape) * 3,)


OP = Op(name="fast_sigmoid", schema="(Tensor x) -> Tensor", reference=reference, samples=samples, plugin=False)


def fast_sigmoid(x: Tensor) -> Tensor:
    """``0.5*(1 + x*|x|/(x*x + 0.975))``: a sigmoid within 0.0324 of the true one, with the same limits.

    It is monotone, 0.5 at 0, and symmetric: ``fast_sigmoid(-x) == 1 - fast_sigmoid(x)``. It replaces
    ``torch.sigmoid`` only on request: the error is too large for a model that was not trained with it.

    Shape:
        - x: any, floating point; half is computed in float32
        - output: like ``x``; 0 and 1 at -inf and inf, NaN for NaN

    Raises:
        TypeError: if ``x`` is not floating point.
    """
    check_floating_point("fast_sigmoid", "tensor", x)
    return OP(x)


def fast_tanh(x: Tensor) -> Tensor:
    """``2*fast_sigmoid(2*x) - 1``: a tanh within 0.0647 of the true one; shapes and dtypes as for the sigmoid."""
    return 2 * fast_sigmoid(2 * x) - 1


class FastSigmoid(nn.Module):
    """Module form of :func:`fast_sigmoid`, to use instead of ``nn.Sigmoid``."""

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise, of any shape."""
        return fast_sigmoid(x)


class FastTanh(nn.Module):
    """Module form of :func:`fast_tanh`, to use instead of ``nn.Tanh``."""

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise, of any shape."""
        return fast_tanh(x)
