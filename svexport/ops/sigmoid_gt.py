"""Comparison of a sigmoid with a threshold, without the sigmoid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from ctypes import c_float
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from svexport.ops._op import Op, check_floating_point

__all__ = ["logit_below", "sigmoid_gt"]


@lru_cache(maxsize=4096)
def logit_below(threshold: float, dtype: torch.dtype) -> float:
    """The largest number of ``dtype`` that is at most ``log(t/(1-t))``; infinite for a threshold outside (0, 1).

    A number of ``dtype`` is greater than the result exactly if it is greater than the logit itself.
    """
    if not 0 < threshold < 1:
        return math.copysign(math.inf, threshold - 0.5)
    info = torch.finfo(dtype)
    with localcontext() as context:
        context.prec = 60  # only the logit 0 is a binary fraction, so these digits decide the side of any other
        t = Decimal(threshold)
        logit = (t / (1 - t)).ln()
        exponent = int(abs(logit) * 2**80).bit_length() - 81  # 2**exponent <= |logit| < 2**(exponent + 1)
        step = info.eps * max(2.0**exponent, info.smallest_normal)
        return math.floor(logit / Decimal(step)) * step


def reference(x: Tensor, threshold: float) -> Tensor:
    threshold = c_float(threshold).value  # rounded as the node's attribute is
    if threshold < 0:
        return x == x  # true for all but NaN, including -inf
    return x > logit_below(threshold, x.dtype)


def fake(x: Tensor, threshold: float) -> Tensor:
    return torch.empty_like(x, dtype=torch.bool)


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    for shape, threshold in [
        ((2, 3, 5, 7), 0.3),
        ((1,), 0.5),
        ((), 0.05),
        ((0, 3), 0.3),
        ((11, 13), 0.0),
        ((7, 2), 1.0),
        ((3,), -0.25),
    ]:
        yield make(*shape) * 3, threshold


OP = Op(
    name="sigmoid_gt",
    schema="(Tensor x, float threshold) -> Tensor",
    reference=reference,
    samples=samples,
    fake=fake,
    plugin=False,
)


def sigmoid_gt(x: Tensor, threshold: float) -> Tensor:
    """``sigmoid(x) > threshold`` as ``x > log(t/(1-t))``: one comparison, no exponential.

    Exact: the real-number sigmoid of each ``x`` as stored is compared with ``t``, the float32 nearest to ``threshold``
    (an ONNX attribute holds a float32). The logit is rounded down to the dtype of ``x``, which changes no comparison.
    ``torch.sigmoid(x) > threshold`` differs where torch's sigmoid rounds: close to the threshold, and where a large
    ``|x|`` makes it 0 or 1.

    At infinity the sigmoid has its limits, 0 and 1. With ``t < 0`` all but NaN is above, with ``t = 0`` all but NaN and
    -inf, with ``t >= 1`` nothing.

    Shape:
        - x: any, floating point
        - output: like ``x``, bool

    Raises:
        ValueError: if ``threshold`` is NaN.
        TypeError: if ``x`` is not floating point.
    """
    if math.isnan(threshold):
        raise ValueError("sigmoid_gt expects a number as threshold, got NaN")
    check_floating_point("sigmoid_gt", "tensor", x)
    return OP(x, threshold)
