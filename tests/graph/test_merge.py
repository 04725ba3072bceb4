"""Factors and sums behind linear nodes are merged into their weights, if nothing else changes by that."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from svexport.graph.merge import merge_weights
from tests.support import run_model

LINEAR = {
    "Conv": ({"group": 1}, (2, 4, 5, 7), (6, 4, 3, 1), (6, 1, 1)),
    "grouped Conv": ({"group": 2}, (2, 4, 5, 7), (6, 2, 3, 1), (1, 6, 1, 1)),
    "Conv in one dimension": ({}, (1, 4, 9), (3, 4, 2), (3, 1)),
    "ConvTranspose": ({}, (2, 4, 5, 3), (4, 5, 2, 2), (5, 1, 1)),
    "grouped ConvTranspose": ({"group": 2}, (2, 4, 5, 3), (4, 5, 2, 2), (10, 1, 1)),
    "Gemm": ({"alpha": 0.5, "beta": 2.0}, (3, 4), (4, 7), (7,)),
    "Gemm of rows": ({"transB": 1}, (3, 4), (7, 4), (1, 7)),
    "MatMul": ({}, (2, 3, 4), (4, 7), (1, 7)),
}
"""Attributes, and the shapes of the input, the weights and a constant by channel."""
COUNTS = {name: int(np.prod(by_channel)) for name, (*_, by_channel) in LINEAR.items()}


def numbers(*shape: int) -> np.ndarray:
    return (np.random.uniform(0.5, 2, shape) * np.random.choice([-1, 1], shape)).astype(np.float32)


def model_of(
    nodes: list[onnx.NodeProto],
    x: tuple[int, ...],
    results: tuple[str, ...] = ("y",),
    rank: int = 0,
    **held: np.ndarray,
) -> onnx.ModelProto:
    """A model of nodes on ``x``, of which all sizes but that of channels are open; results have as many axes."""
    sizes = [size if place == (len(x) - 1 if len(x) < 3 else 1) else f"n{place}" for place, size in enumerate(x)]
    if any(node.op_type == "MatMul" for node in nodes):
        sizes = [*(f"n{place}" for place in range(len(x) - 1)), x[-1]]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * (rank or len(x))) for name in results],
        [numpy_helper.from_array(array, name) for name, array in held.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def left(model: onnx.ModelProto, *shape: int) -> dict[str, int]:
    """The nodes that are left, of a model that computes the same as before."""
    after = onnx.ModelProto()
    after.CopyFrom(model)
    merge_weights(after)
    x = torch.randn(shape)
    for ours, theirs in zip(run_model(after, [x]), run_model(model, [x]), strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
    return dict(Counter(node.op_type for node in after.graph.node))


def linear_nodes(name: str, bias: bool) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    attributes, _, weight, _ = LINEAR[name]
    kind = next(word for word in name.split() if word in ("Conv", "ConvTranspose", "Gemm", "MatMul"))
    held = {"w": numbers(*weight)} | ({"b": numbers(COUNTS[name])} if bias else {})
    if kind == "MatMul" and bias:
        added = helper.make_node("Add", ["b", "product"], ["h"])
        return [helper.make_node("MatMul", ["x", "w"], ["product"]), added], held
    return [helper.make_node(kind, ["x", *held], ["h"], **attributes)], held


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", ["number", "channels"])
@pytest.mark.parametrize("name", LINEAR)
def test_factors(name: str, shape: str, bias: bool) -> None:
    _, x, _, by_channel = LINEAR[name]
    nodes, held = linear_nodes(name, bias)
    held |= {"c": numbers(*by_channel) if shape == "channels" else numbers(1), "d": numbers()}
    behind = [helper.make_node("Mul", ["c", "h"], ["m"]), helper.make_node("Div", ["m", "d"], ["y"])]
    assert left(model_of([*nodes, *behind], x, **held), *x) == dict(Counter(node.op_type for node in nodes))


@pytest.mark.parametrize("kind", ["Add", "Sub"])
@pytest.mark.parametrize("name", [name for name in LINEAR if name != "MatMul"])
def test_sums_where_there_is_no_bias(name: str, kind: str) -> None:
    attributes, x, _, by_channel = LINEAR[name]
    nodes, held = linear_nodes(name, bias=False)
    behind = [helper.make_node(kind, ["h", "c"], ["y"])]
    merged = left(model_of([*nodes, *behind], x, **held, c=numbers(*by_channel)), *x)
    assert merged == ({nodes[0].op_type: 1} | ({kind: 1} if attributes.get("beta") else {}))
    nodes, held = linear_nodes(name, bias=True)
    assert left(model_of([*nodes, *behind], x, **held, c=numbers(*by_channel)), *x)[kind] == 1


def test_one_number_passes_what_moves() -> None:
    """As the scale of queries, that of each head does not."""
    moved = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Add", ["p", "b"], ["h"]),
        helper.make_node("Reshape", ["h", "heads"], ["r"]),
        helper.make_node("Transpose", ["r"], ["t"], perm=[0, 2, 1, 3]),
        helper.make_node("Mul", ["t", "c"], ["y"]),
    ]
    held = {"w": numbers(4, 6), "b": numbers(6), "heads": np.array([0, 0, 2, 3])}
    kinds = {"MatMul": 1, "Add": 1, "Reshape": 1, "Transpose": 1}
    assert left(model_of(moved, (2, 5, 4), rank=4, **held, c=numbers(1, 1)), 2, 5, 4) == kinds
    assert left(model_of(moved, (2, 5, 4), rank=4, **held, c=numbers(2, 1, 1)), 2, 5, 4) == {**kinds, "Mul": 1}


X, W = (2, 4, 5, 7), (6, 4, 1, 1)
CONV = helper.make_node("Conv", ["x", "w"], ["h"])
TIMES = helper.make_node("Mul", ["h", "c"], ["y"])
TINY = numbers(*W) * np.float32(1e-30)
KEPT = {
    "a weight that is read elsewhere": (
        [CONV, TIMES, helper.make_node("Conv", ["x", "w"], ["z"])],
        {"w": numbers(*W), "c": numbers(1)},
    ),
    "a result that is read elsewhere": (
        [CONV, TIMES, helper.make_node("Relu", ["h"], ["z"])],
        {"w": numbers(*W), "c": numbers(1)},
    ),
    "a constant of each column": ([CONV, TIMES], {"w": numbers(*W), "c": numbers(7)}),
    "a constant with more axes": ([CONV, TIMES], {"w": numbers(*W), "c": numbers(1, 1, 1, 1, 1)}),
    "too small": ([CONV, TIMES], {"w": TINY, "c": np.array(1e-10, np.float32)}),
    "too large": ([CONV, TIMES], {"w": numbers(*W) / TINY, "c": np.array(1e10, np.float32)}),
    "divided by nothing": (
        [CONV, helper.make_node("Div", ["h", "c"], ["y"])],
        {"w": numbers(*W), "c": np.zeros(1, np.float32)},
    ),
    "divided by it": ([CONV, helper.make_node("Div", ["c", "h"], ["y"])], {"w": numbers(*W), "c": numbers(1)}),
    "quantized weights": (
        [helper.make_node("DequantizeLinear", ["q", "s", "o"], ["w"]), CONV, TIMES],
        {"q": np.ones(W, np.int8), "s": numbers(1), "o": np.zeros(1, np.int8), "c": numbers(1)},
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_left_alone(name: str) -> None:
    nodes, held = KEPT[name]
    results = tuple(n for n in ("y", "z") if any(n in node.output for node in nodes))
    model = model_of(nodes, X, results, **held)
    before = model.SerializeToString()
    merge_weights(model)
    assert model.SerializeToString() == before
