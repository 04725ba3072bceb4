"""``SvSigmoidGt``: the body is one comparison with a constant."""

from __future__ import annotations

import math

import torch

from svexport.ops.sigmoid_gt import OP, logit_below
from svexport.symbolic._builder import Builder, Value, dtype_name
from svexport.symbolic._symbolic import Symbolic

__all__: list[str] = []


def body(b: Builder, x: Value, threshold: float) -> Value:
    def compare(op_type: str, bound: float) -> Value:
        return b.op(op_type, x, b.like(bound, x))

    if threshold < 0:  # true for all but NaN, for which every comparison is false
        return b.op("Or", compare("Greater", -math.inf), compare("Less", 0))
    return compare("Greater", logit_below(threshold, getattr(torch, dtype_name(x.dtype))))


Symbolic(OP, body)
