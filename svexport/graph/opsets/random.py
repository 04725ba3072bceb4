"""Random numbers. The numbers drawn differ between runtimes anyway; the rules preserve their distribution."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from onnx import TensorProto

from svexport.graph.opsets.rules import Node, down, unchanged
from svexport.symbolic._builder import Builder, Value

__all__: list[str] = []

unchanged("RandomNormal RandomNormalLike RandomUniform RandomUniformLike Multinomial Bernoulli Dropout", 22)
unchanged("Dropout", 13)


@down("Bernoulli", 15)
def bernoulli(b: Builder, node: Node) -> Value:
    x, dtype = node.input(), node.attribute("dtype") or node.dtype()
    drawn = _uniform(b, node, x)
    return b.cast(b.op("Less", drawn, b.cast(x, TensorProto.FLOAT)), dtype)


def _uniform(b: Builder, node: Node, x: Value) -> Value:
    """Uniform random numbers from 0 to 1, in the shape of ``x``."""
    seed = node.attribute("seed")
    seed = None if seed is None else float(seed)
    (drawn,) = b.ops("RandomUniformLike", x, outputs=1, dtype=TensorProto.FLOAT, seed=seed)
    return replace(drawn, dtype=TensorProto.FLOAT, shape=x.shape)


@down("Dropout", 12)
def dropout(b: Builder, node: Node) -> tuple[Value | None, ...]:
    """Outside of training nothing is dropped. In training the remaining elements are scaled up."""
    x, ratio = node.input(), node.given(1)
    training = np.array(False) if node.given(2) is None else node.constant(2)
    if training is not None and not training.any():
        kept = None if node.output(1) is None else _everywhere(b, x)
        return b.op("Identity", x), kept
    node.dtype()
    share = b.constant(np.float32(0.5)) if ratio is None else b.cast(ratio, TensorProto.FLOAT)
    lost = b.op("Less", _uniform(b, node, x), share)
    factor = b.op("Reciprocal", b.op("Sub", b.constant(np.float32(1)), share))
    scaled = b.op("Mul", x, b.cast(factor, x.dtype))
    y = b.op("Where", lost, b.like(0, x), scaled)
    kept = b.op("Not", lost)
    if training is None:  # the run tells
        y = b.op("Where", node.input(2), y, x)
        kept = b.op("Or", kept, b.op("Not", node.input(2)))
    return y, kept


def _everywhere(b: Builder, x: Value) -> Value:
    """True in the shape of ``x``."""
    shape = b.op("Shape", x)
    return b.op("Expand", b.constant(np.array(True)), shape, shape=x.shape)


@down("Dropout", 10)
def dropout_mask(b: Builder, node: Node) -> tuple[Value | None, ...]:
    """The mask was of the type of the data."""
    x = node.input()
    return b.op("Identity", x), None if node.output(1) is None else _everywhere(b, x)
