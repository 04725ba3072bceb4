"""Losses."""

from __future__ import annotations

from dataclasses import replace

from onnx import TensorProto

from svexport.graph.opsets._float import at_least_float
from svexport.graph.opsets.rules import Node, down, unchanged
from svexport.symbolic._builder import Builder, Value

__all__: list[str] = []

unchanged("NegativeLogLikelihoodLoss", 22, 13)
unchanged("SoftmaxCrossEntropyLoss", 13)


@down("NegativeLogLikelihoodLoss", 12)
def negative_log_likelihood(b: Builder, node: Node) -> Value:
    node.rank()
    return b.cast(_likelihood(b, node, at_least_float(b, node.typed())), node.dtype())


@down("SoftmaxCrossEntropyLoss", 12)
def softmax_cross_entropy(b: Builder, node: Node) -> tuple[Value | None, ...]:
    node.rank()
    x = at_least_float(b, node.typed())
    centred = b.op("Sub", x, b.reduce("ReduceMax", x, [1], keepdims=True))
    total = b.reduce_sum(b.op("Exp", centred), [1], keepdims=True)
    log = b.op("Sub", centred, b.op("Log", total))
    loss = b.cast(_likelihood(b, node, log), node.dtype())
    return loss, None if node.output(1) is None else b.cast(log, node.dtype())


def _likelihood(b: Builder, node: Node, x: Value) -> Value:
    """The loss of log-probabilities ``(N, C, ...)``: what is not of the target, or ignored, counts as zero."""
    target, weight, ignored = node.typed(1), node.given(2), node.attribute("ignore_index")
    reduction = node.attribute("reduction")
    if reduction not in ("none", "sum", "mean"):
        node.refuse(f"its reduction {reduction!r} is not one of ONNX")
    rank = x.rank
    target = b.cast(replace(target, shape=target.shape or (None,) * (rank - 1)), TensorProto.INT64)
    classes = b.reshape(b.arange(b.dim(x, 1)), -1, *[1] * (rank - 2))
    of_target = b.op("Equal", b.unsqueeze(target, 1), classes, shape=x.shape)
    counted: Value | None = None
    if ignored is not None:
        counted = b.op("Not", b.op("Equal", target, b.ints(ignored)))
        of_target = b.op("And", of_target, b.unsqueeze(counted, 1))
    zero = b.like(0, x)

    def chosen(values: Value) -> Value:
        return b.reduce_sum(b.op("Where", of_target, values, zero), [1])

    loss = b.op("Neg", chosen(x), shape=target.shape)
    weights = None
    if weight is not None:
        weight = b.cast(node.typed(2), x.dtype)
        weights = chosen(b.reshape(weight, -1, *[1] * (rank - 2)))
        loss = b.op("Mul", loss, weights)
    if reduction == "none":
        return loss
    every = range(rank - 1)
    if reduction == "mean" and weights is None and counted is None:
        return b.reduce("ReduceMean", loss, every)
    total = b.reduce_sum(loss, every)
    if reduction == "sum":
        return total
    if weights is None:
        assert counted is not None
        weights = b.cast(replace(counted, shape=target.shape), x.dtype)
    return b.op("Div", total, b.reduce_sum(weights, every))
