"""Constant folding gives the same results with fewer nodes, and keeps the nodes that have to stay."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import numpy_helper

from svexport.graph.fold import fold_constants

pytestmark = pytest.mark.core


def parsed(text: str, opset: int = 17, **constants: np.ndarray) -> onnx.ModelProto:
    """A model with a graph in onnx's own notation; ``constants`` are initializers."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}, "other" : 1]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    return model


def run(model: onnx.ModelProto, **feeds: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def ops(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def folded(model: onnx.ModelProto) -> onnx.ModelProto:
    result = onnx.ModelProto()
    result.CopyFrom(model)
    fold_constants(result)
    assert not fold_constants(result)  # a fixed point
    onnx.checker.check_model(result, full_check=True)
    return result


SIZES = """g (float[2, 3, n] x) => (float[a, b] y) {
    shape = Shape(x)
    rows = Gather(shape, zero)
    columns = Gather(shape, one)
    product = Mul(rows, columns)
    flat = Concat<axis = 0>(product, rest)
    y = Reshape(x, flat)
}"""


def test_static_sizes_are_numbers() -> None:
    numbers = {"zero": np.array([0]), "one": np.array([1]), "rest": np.array([-1])}
    model = parsed(SIZES.replace("n]", "4]"), **numbers)
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    assert ops(folded(model)) == ["Reshape"]
    assert [t.name for t in folded(model).graph.initializer] == ["flat"]
    np.testing.assert_array_equal(run(folded(model), x=x)[0], run(model, x=x)[0])


def test_dynamic_sizes_stay() -> None:
    numbers = {"zero": np.array([0]), "one": np.array([2]), "rest": np.array([-1])}
    model = parsed(SIZES, **numbers)
    result = folded(model)
    for n in (1, 4, 7):
        x = np.random.default_rng(n).random((2, 3, n), np.float32)
        np.testing.assert_array_equal(run(result, x=x)[0], run(model, x=x)[0])


def test_a_part_of_a_shape() -> None:
    model = parsed("g (float[n, 3, 4] x) => (int64[2] y, int64[1] z) { y = Shape<start = 1>(x) z = Shape<end = 1>(x) }")
    assert ops(folded(model)) == ["Shape", "Shape"]  # results of a graph are made by nodes
    model = parsed(
        "g (float[n, 3, 4] x) => (int64[2] y, int64[1] z) "
        "{ s = Shape<start = -2>(x) t = Shape<end = -2>(x) y = Abs(s) z = Abs(t) }"
    )
    assert sorted(ops(folded(model))) == ["Abs", "Abs", "Shape"]
    y, z = run(folded(model), x=np.zeros((5, 3, 4), np.float32))
    assert (y.tolist(), z.tolist()) == ([3, 4], [5])


@pytest.mark.parametrize(
    "nodes",
    [
        "q = QuantizeLinear(w, scale) d = DequantizeLinear(q, scale) y = Add(x, d)",
        "r = RandomNormalLike(w) y = Add(x, r)",
        "r = RandomUniform<shape = [3]>() y = Add(x, r)",
        "r = other.Thing(w) y = Add(x, r)",
        "r = Expand(w, large) s = ReduceSum<keepdims = 0>(r) y = Add(x, s)",
    ],
    ids=["quantized", "random", "random-shape", "other-domain", "large"],
)
def test_what_stays(nodes: str) -> None:
    constants = {
        "w": np.float32([1, 2, 3]),
        "scale": np.float32(0.5),
        "large": np.array([1000, 500, 3]),
    }
    model = parsed(f"g (float[3] x) => (float[3] y) {{ {nodes} }}", **constants)
    result = onnx.ModelProto()
    result.CopyFrom(model)
    assert not fold_constants(result)
    assert ops(result) == ops(model)


def test_a_result_that_no_input_decides_is_a_node() -> None:
    model = parsed(
        "g (float[3] x) => (float[3] y, float[3] z) { a = Neg(w) y = Exp(a) z = Add(x, y) }", w=np.ones(3, np.float32)
    )
    result = folded(model)
    assert ops(result) == ["Exp", "Add"]
    for before, after in zip(run(model, x=np.float32([1, 2, 3])), run(result, x=np.float32([1, 2, 3])), strict=True):
        np.testing.assert_array_equal(before, after)


def test_what_only_a_graph_within_a_node_uses() -> None:
    text = """g (float[3] x, bool c) => (float[3] y) {
        a = Neg(w)
        unused = Exp(w)
        y = If(c) <
            then_branch = t () => (float[3] s) { s = Add(x, a) },
            else_branch = e () => (float[3] s) { s = Sub(x, a) }
        >
    }"""
    model = parsed(text, w=np.float32([1, 2, 3]))
    result = folded(model)
    assert ops(result) == ["If"]
    for c in (True, False):
        feeds = {"x": np.float32([4, 5, 6]), "c": np.array(c)}
        np.testing.assert_array_equal(run(model, **feeds)[0], run(result, **feeds)[0])


def test_what_a_caller_may_override_is_no_constant() -> None:
    model = parsed("g (float[3] x, float[3] w) => (float[3] y) { a = Neg(w) y = Add(x, a) }", w=np.ones(3, np.float32))
    assert ops(folded(model)) == ["Neg", "Add"]


def test_constants_that_cannot_be_computed_stay() -> None:
    """ONNX Runtime does not add numbers of two types."""
    model = parsed("g (float[3] x) => (float[3] y) { a = Add(w, v) y = Add(x, a) }", w=np.ones(3, np.float32))
    model.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float16), "v"))
    assert not fold_constants(model)
    assert ops(model) == ["Add", "Add"]
