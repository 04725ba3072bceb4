"""``SvBilinearSample``: the body gathers rows of an NHWC image, four per point."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from svexport.ops.bilinear_sample import OP
from svexport.symbolic._builder import Builder, Value
from svexport.symbolic._symbolic import Symbolic

__all__: list[str] = []


def body(b: Builder, image: Value, grid: Value) -> tuple[Value, Value]:
    raise NotImplementedError


Symbolic(OP, body)
