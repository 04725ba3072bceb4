"""Nodes that change nothing are removed, and values stay the same to the last bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import permutations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser

from svexport.graph.idle import remove_idle
from svexport.graph.walk import graphs
from tests.support import run_model

SPECIAL = [0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e-42, -1e-42, 3.4e38]


def parsed(signature: str, body: str, opset: int = 17) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g {signature} {{{body}}}')


def bits(tensors: Sequence[torch.Tensor]) -> list[tuple]:
    return [(t.dtype, tuple(t.shape), t.numpy().tobytes()) for t in tensors]


def drawn(value: onnx.ValueInfoProto, size: int) -> torch.Tensor:
    """Zeros of both signs, NaN, infinities and the smallest numbers among others; ``size`` where a size is open."""
    shape = [d.dim_value if d.HasField("dim_value") else size for d in value.type.tensor_type.shape.dim]
    dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    if dtype.kind != "f":
        return torch.from_numpy(np.random.default_rng(0).integers(-9, 9, shape).astype(dtype))
    numbers = np.random.default_rng(size).standard_normal(shape)
    numbers.flat[: len(SPECIAL)] = SPECIAL[: numbers.size]
    with np.errstate(over="ignore"):
        return torch.from_numpy(numbers.astype(dtype))


def left(model: onnx.ModelProto, sizes: Sequence[int] = (3,)) -> dict[str, int]:
    """The nodes that are left, constants aside, of a model that computes the same bits as before."""
    after = onnx.ModelProto()
    after.CopyFrom(model)
    remove_idle(after)
    for now, then in ((after.graph.input, model.graph.input), (after.graph.output, model.graph.output)):
        assert list(now) == list(then)
    for size in sizes:
        inputs = [drawn(value, size) for value in model.graph.input]
        assert bits(run_model(after, inputs)) == bits(run_model(model, inputs))
    return dict(Counter(n.op_type for g in graphs(after.graph) for n in g.node if n.op_type != "Constant"))


@pytest.mark.parametrize(
    "body",
    [
        "b = Reshape(a, shape)",
        "b = Reshape(a, open)",
        "b = Flatten<axis=1>(a)",
        "b = Expand(a, shape)",
        "b = Slice(a, zeros, ends)",
        "b = Pad(a, none)",
        "b = Concat<axis=1>(a)",
        "b = Cast<to=1>(a)",
        "b = Mul(one, a)",
        "b = Mul(a, ones)",
        "b = Div(a, ones)",
        "b = Sub(a, zero)",
        "b = Add(minus, a)",
        "c = Reshape(a, flat) b = Reshape(c, shape)",
        "c = Unsqueeze(a, axis) d = Squeeze(c, axis) b = Mul(d, one)",
        "c = Transpose<perm=[1,0]>(a) d = Reshape(c, four) b = Transpose<perm=[1,2,0]>(d) e = Reshape(b, shape) ",
    ],
)
@pytest.mark.parametrize("where", ["between", "first", "last"])
def test_what_changes_nothing(body: str, where: str) -> None:
    constants = """<int64[2] shape = {4,6}, int64[2] open = {-1,6}, int64[2] zeros = {0,0}, int64[2] ends = {9,6},
        int64[4] none = {0,0,0,0}, float one = {1}, float[1,6] ones = {1,1,1,1,1,1}, float zero = {0},
        int64[1] flat = {24}, int64[1] axis = {0}, int64[3] four = {6,2,2}>"""
    last = "e" if "e = " in body else "b"
    before, after = (
        ("a = Neg(x)", f"y = Neg({last})") if where == "between" else ("a = Neg(x)", f"y = Identity({last})")
    )
    if where == "first":
        before, after = "a = Identity(x)", f"y = Neg({last})"
    model = parsed(f"(float[4,6] x) => (float[4,6] y) {constants}", f"{before} {body} {after}")
    for graph in graphs(model.graph):  # names instead of the Identities that stand for them
        names = {n.output[0]: n.input[0] for n in graph.node if n.op_type == "Identity"}
        nodes = [node for node in graph.node if node.op_type != "Identity"]
        for node in nodes:
            node.input[:] = ["x" if name == "a" and where == "first" else name for name in node.input]
            node.output[:] = ["y" if name == last and names.get("y") == last else name for name in node.output]
        del graph.node[:]
        graph.node.extend(nodes)
    model.graph.initializer.append(numpy_helper.from_array(np.array(-0.0, np.float32), "minus"))
    assert left(model) == {"Neg": 2 if where == "between" else 1}


@pytest.mark.parametrize(
    "body",
    [
        "y = Add(x, zero)",  # -0 becomes 0
        "y = Sub(x, minus)",
        "y = Mul(x, two)",
        "y = Mul(x, wide)",  # has more axes
        "y = Mul(x, column)",  # has larger ones
        "y = Div(one, x)",
        "y = Sub(zero, x)",
        "y = Slice(x, last, first, axis, back)",  # backwards, of the same sizes
        "y = Pad(x, shifted)",  # of the same sizes
        "y = Expand(x, six)",
        "y = Concat<axis=0>(x, x)",
        "y = Cast<to=11>(x)",
    ],
)
def test_what_changes_something_stays(body: str) -> None:
    constants = """<float zero = {0}, float one = {1}, float two = {2}, float[1,1,1] wide = {1},
        float[2,1] column = {1,1}, int64[1] last = {5}, int64[1] first = {-9}, int64[1] axis = {1},
        int64[1] back = {-1}, int64[4] shifted = {0,1,0,-1}, int64[2] six = {6,6}>"""
    rank, dtype = (3 if "wide" in body else 2), "double" if "Cast" in body else "float"
    sizes = ",".join("abc"[:rank])
    model = parsed(f"(float[1,6] x) => ({dtype}[{sizes}] y) {constants}", body)
    model.graph.initializer.append(numpy_helper.from_array(np.array(-0.0, np.float32), "minus"))
    assert sum(left(model).values()) == 1


def test_zero_is_added_to_what_softmax_reads() -> None:
    zeros = "<float[1,6] zeros = {0,-0.0,0,0,0,0}>"
    model = parsed(
        f"(float[4,6] x) => (float[4,6] y, float[4,6] z) {zeros}", "a = Add(x, zeros) y = Softmax(a) z = Exp(a)"
    )
    assert left(model) == {"Softmax": 1, "Exp": 1}
    model = parsed(
        f"(float[4,6] x) => (float[4,6] y, float[4,6] z) {zeros}", "a = Add(x, zeros) y = Softmax(a) z = Neg(a)"
    )
    assert left(model) == {"Add": 1, "Softmax": 1, "Neg": 1}
    model = parsed(f"(float[4,6] x) => (float[4,6] y, float[4,6] a) {zeros}", "a = Add(x, zeros) y = Softmax(a)")
    assert left(model) == {"Add": 1, "Softmax": 1}


def test_whole_numbers() -> None:
    body = "a = Add(x, zero) b = Mul(a, one) c = Sub(b, zero) d = Div(c, one) y = Neg(d)"
    assert left(parsed("(int64[5] x) => (int64[5] y) <int64 zero = {0}, int64 one = {1}>", body)) == {"Neg": 1}


@pytest.mark.parametrize("opset", [9, 11, 13])
def test_dynamic_sizes(opset: int) -> None:
    """A view of a view, to the same sizes and to others; no size is zero, one or another."""
    constants = "<int64[2] flat = {-1,6}, int64[3] back = {-1,2,3}, float one = {1}>"
    body = "a = Reshape(x, flat) b = Reshape(a, back) c = Mul(b, one) y = Relu(c)"
    assert left(parsed(f"(float[n,2,3] x) => (float[n,2,3] y) {constants}", body, opset), (1, 4, 0)) == {"Relu": 1}
    kept = left(parsed(f"(float[n,3,2] x) => (float[n,2,3] y) {constants}", body, opset), (1, 4, 0))
    assert kept == {"Reshape": 1, "Relu": 1}


def test_sizes_that_are_not_known_to_be_equal() -> None:
    body = "a = Shape(z) b = Expand(x, a) c = Reshape(b, a) y = Relu(c)"
    model = parsed("(float[n,m] x, float[n,m] z) => (float[n,m] y)", body)
    assert left(model, (1, 3))["Expand"] == 1


def test_zeros_in_a_shape_are_sizes_of_what_it_reads() -> None:
    constants = "<int64[2] flat = {4,6}, int64[3] copied = {0,2,-1}>"
    body = "a = Reshape(x, flat) y = Reshape(a, copied)"
    assert left(parsed(f"(float[2,12] x) => (float[4,2,3] y) {constants}", body)) == {"Reshape": 1}
    empty = "<int64[2] flat = {0,6}, int64[2] copied = {0,3}>"
    assert left(parsed(f"(float[0,6] x) => (float[0,3] y) {empty}", "a = Reshape(x, flat) y = Reshape(a, copied)"))


@pytest.mark.parametrize("batch", [pytest.param(5, marks=pytest.mark.exhaustive), "n"])
def test_transposes_around_a_view(batch: int | str) -> None:
    """Any two permutations around it: a Reshape where no element moves, and only there, as bits tell."""
    for first in permutations(range(3)):
        split = {0: [-1 if batch == "n" else batch], 1: [2, 3], 2: [4]}
        shape = [size for i in first for size in split[i]]
        for second in permutations(range(4)):
            nodes = [
                helper.make_node("Transpose", ["x"], ["a"], perm=first),
                helper.make_node("Reshape", ["a", "shape"], ["b"]),
                helper.make_node("Transpose", ["b"], ["c"], perm=second),
                helper.make_node("Relu", ["c"], ["y"]),
            ]
            constant = helper.make_tensor("shape", TensorProto.INT64, [4], shape)
            x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 6, 4])
            y = helper.make_tensor_value_info("y", TensorProto.FLOAT, list("abcd"))
            graph = helper.make_graph(nodes, "g", [x], [y], [constant])
            kept = left(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), (5,))
            elements = np.arange(120).reshape(5, 6, 4).transpose(first).reshape(shape).transpose(second).ravel()
            assert ("Transpose" in kept) == bool((np.diff(elements) < 0).any())
            assert kept["Reshape"] == 1


def test_slices_of_other_axes() -> None:
    constants = """<int64[1] one = {1}, int64[1] last = {-1}, int64[1] zero = {0}, int64[1] two = {2},
        int64[1] back = {-1}, int64[1] least = {-9223372036854775807}>"""
    body = "a = Slice(x, one, last, zero) y = Slice(a, last, least, two, back)"
    assert left(parsed(f"(float[n,m,5] x) => (float[k,m,5] y) {constants}", body), (0, 1, 2, 7)) == {"Slice": 1}
    body = "a = Slice(x, one, last, zero) y = Slice(a, one, last, one) z = Slice(a, zero, one, last)"
    assert left(parsed(f"(float[4,6,5] x) => (float[2,4,5] y, float[2,6,1] z) {constants}", body)) == {"Slice": 2}
    body = "a = Slice(x, one, last, zero) y = Slice(a, one, last, zero)"  # of the same
    assert left(parsed(f"(float[6,5] x) => (float[2,5] y) {constants}", body)) == {"Slice": 2}
    body = "a = Slice(x, one, last, zero) y = Slice(a, one, last, one) z = Neg(a)"
    assert left(parsed(f"(float[6,5] x) => (float[4,3] y, float[4,5] z) {constants}", body)) == {"Slice": 2, "Neg": 1}


def test_results_keep_their_names() -> None:
    """Of inputs, constants and other results: there a node has to stay."""
    body = "y = Mul(x, one) a = Neg(x) z = Mul(a, one) w = Mul(a, one) v = Mul(z, one)"
    model = parsed("(float[3] x) => (float[3] y, float[3] z, float[3] w, float[3] v) <float one = {1}>", body)
    assert left(model)["Neg"] == 1


def test_nested_graphs() -> None:
    body = """a = Mul(x, one) y = If(c) <then_branch = t () => (float[4] r) {b = Mul(a, one) r = Neg(b)},
        else_branch = e () => (float[4] s) {s = Mul(a, one)}> z = Neg(a)"""
    model = parsed("(float[4] x, bool[1] c) => (float[4] y, float[4] z) <float one = {1}>", body)
    assert left(model)["Neg"] == 2


def test_constants_that_went_are_made_anew() -> None:
    """Sizes that one round makes, drops with their only reader, and the next one makes again."""
    body = """a = Flatten<axis=1>(x) b = Sub(a, zero) c = Transpose<perm=[0,1]>(b) d = Reshape(c, sizes)
        e = Transpose<perm=[0,1]>(c) y = Slice(e, last, end, axis)"""
    constants = """<float zero = {0}, int64[2] sizes = {-1,18}, int64[1] last = {-2}, int64[1] end = {99},
        int64[1] axis = {1}>"""
    kept = left(parsed(f"(float[n,3,6] x) => (float[n,2] y) {constants}", body), (1, 5))
    assert kept == {"Reshape": 1, "Slice": 1}
