"""Conversion to lower opsets as a whole: nested graphs, functions, bodies, names, types, refusals."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser

import svexport
from svexport import SvexportError, UnsupportedError
from svexport.graph.nodes import svexport_nodes
from svexport.graph.walk import graphs, opset_of
from tests.graph.opsets.backend import run
from tests.support import calls

pytestmark = pytest.mark.core

LOWER = [17, 13, 11, 9]


def model(text: str, opset: int = 20, ir_version: int = 10) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: {ir_version}, opset_import: ["" : {opset}, "my" : 1]>\n{text}')


def check(given: onnx.ModelProto, opset: int, *inputs: np.ndarray, exactly: bool = False) -> onnx.ModelProto:
    """Converts a model and compares it with itself."""
    before = given.SerializeToString()
    converted = svexport.convert(given, opset)
    assert given.SerializeToString() == before
    assert opset_of(converted) == opset
    onnx.checker.check_model(converted, full_check=True)
    for actual, expected in zip(run(converted, inputs), run(given, inputs), strict=True):
        if exactly:
            np.testing.assert_array_equal(actual, expected, strict=True)
        else:
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6, strict=True)
    return converted


def types(converted: onnx.ModelProto) -> list[str]:
    return [node.op_type for graph in graphs(converted.graph) for node in graph.node]


def floats(*shape: int) -> np.ndarray:
    return torch.randn(*shape).numpy()


# ---------------------------------------------------------------- graphs in graphs

BRANCHES = """
g (float[2,3] x, bool c) => (float[2] y) <int64[1] axes = {-1}> {
   y = If(c) <
      then_branch = t () => (float[2] a) { a = ReduceMax<keepdims = 0>(x, axes) },
      else_branch = e () => (float[2] b) {
         s = ReduceMin(x, axes)
         b = Squeeze(s, axes)
      }
   >
}
"""


@pytest.mark.parametrize("opset", LOWER)
@pytest.mark.parametrize("condition", [True, False])
def test_branches(opset: int, condition: bool) -> None:
    converted = check(model(BRANCHES), opset, floats(2, 3), np.array(condition), exactly=True)
    assert bool(converted.graph.initializer) == (opset >= 13)  # the axes of Squeeze


LOOP = """
g (float[2,4] x, int64 n) => (float[2,4] last, float[N,2,4] all) <bool go = {1}, float[2,4] zero = {0,0,0,0,0,0,0,0}> {
   last, all = Loop(n, go, zero) <body = b (int64 i, bool c, float[2,4] s) => (bool d, float[2,4] t, float[2,4] u) {
      d = Identity(c)
      g = Gelu(x)
      t = Add(s, g)
      u = Identity(t)
   }>
}
"""


@pytest.mark.parametrize("opset", LOWER)
def test_loop(opset: int) -> None:
    converted = check(model(LOOP), opset, floats(2, 4), np.array(3))
    assert "Gelu" not in types(converted)
    assert "Loop" in types(converted)


SCAN = """
g (float[2] s, float[5,2] x) => (float[2] r, float[5,2] y) {
   r, y = Scan<num_scan_inputs = 1, body = b (float[2] a, float[2] e) => (float[2] c, float[2] d) {
      m = Mish(e)
      c = Add(a, m)
      d = Clip(c)
   }>(s, x)
}
"""


@pytest.mark.parametrize("opset", LOWER)
def test_scan(opset: int) -> None:
    check(model(SCAN), opset, floats(2), floats(5, 2))


def test_one_name_in_two_branches() -> None:
    text = BRANCHES.replace("s = Reduce", "a = Reduce").replace("Squeeze(s", "Squeeze(a")
    for condition in (True, False):
        check(model(text), 11, floats(2, 3), np.array(condition), exactly=True)


# ---------------------------------------------------------------- functions

FUNCTIONS = """
g (float[2,3] x, float[4,3] z) => (float[2] y, float[4] w) {
   a = my.act<approximate = "none">(x)
   b = my.act<approximate = "tanh">(z)
   y = my.total(a)
   w = my.total(b)
}
<domain: "my", opset_import: ["" : 20]>
act <approximate> (x) => (y) { y = Gelu<approximate: string = @approximate>(x) }
<domain: "my", opset_import: ["" : 20, "my" : 1]>
total (x) => (y) {
   axes = Constant<value_ints = [-1]>()
   squares = ReduceSumSquare<keepdims = 0>(x, axes)
   y = my.root(squares)
}
<domain: "my", opset_import: ["" : 20]>
root (x) => (y) { y = Sqrt(x) }
"""


@pytest.mark.parametrize("opset", LOWER)
def test_functions_whose_attributes_decide_are_inlined(opset: int) -> None:
    converted = check(model(FUNCTIONS), opset, floats(2, 3), floats(4, 3))
    assert not converted.functions


@pytest.mark.parametrize("opset", LOWER)
def test_functions(opset: int) -> None:
    given = model(FUNCTIONS.replace("approximate: string = @approximate", 'approximate = "tanh"'))
    converted = check(given, opset, floats(2, 3), floats(4, 3))
    assert {f.name for f in converted.functions} == {"act", "total", "root"}
    assert {entry.version for f in converted.functions for entry in f.opset_import if not entry.domain} == {opset}


def test_defaults_of_attributes_of_functions() -> None:
    given = model(FUNCTIONS.replace('a = my.act<approximate = "none">', "a = my.act"))
    given.functions[0].attribute_proto.append(helper.make_attribute("approximate", "tanh"))
    del given.functions[0].attribute[:]
    check(given, 11, floats(2, 3), floats(4, 3))


class Sampled(torch.nn.Module):
    def forward(self, image: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        sampled = torch.nn.functional.grid_sample(image, grid, align_corners=False)
        return torch.nn.functional.gelu(sampled).mean(dim=(2, 3))


def test_bodies_are_written_anew(tmp_path) -> None:
    args = torch.randn(1, 3, 6, 5), torch.rand(1, 4, 4, 2) * 2 - 1
    svexport.export(Sampled(), args, tmp_path / "m.onnx", opset=20, verify=False)
    for opset in LOWER:
        converted = svexport.convert(tmp_path / "m.onnx", opset, tmp_path / "lower.onnx")
        assert [entry.version for entry in converted.functions[0].opset_import if not entry.domain] == [opset]
        assert [node.op_type for node in svexport_nodes(converted)] == ["SvGridSample"]
        actual = svexport.load(tmp_path / "lower.onnx")(*args)
        torch.testing.assert_close(actual, Sampled()(*args), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- data types


def test_types_that_fall_away_are_cast() -> None:
    given = model("g (int8[4] x, int8[4] y) => (int8[4] z) { z = Add(x, y) }")
    x = np.array([127, -128, 3, 100], np.int8)
    converted = check(given, 13, x, x, exactly=True)  # the sums overflow alike
    assert types(converted) == ["Cast", "Cast", "Add", "Cast"]


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.float16, np.uint8])
@pytest.mark.parametrize("op_type", ["Max", "Min"])
def test_the_larger_of_any_type(op_type: str, dtype: Any) -> None:
    name = TensorProto.DataType.Name(helper.np_dtype_to_tensor_dtype(np.dtype(dtype))).lower()
    given = model(f"g ({name}[3] x, {name}[3] y) => ({name}[3] z) {{ z = {op_type}(x, y) }}")
    info = np.iinfo(dtype) if np.dtype(dtype).kind in "iu" else np.finfo(dtype)
    x = np.array([info.max, info.min, 1], dtype)
    y = np.array(
        [np.nextafter(info.max, dtype(0)) if np.dtype(dtype).kind == "f" else info.max - 1, info.max, 0], dtype
    )
    # Not beside itself before: an old ONNX Runtime has these of few types.
    (actual,) = run(svexport.convert(given, 9), (x, y))
    np.testing.assert_array_equal(actual, getattr(np, f"{op_type.lower()}imum")(x, y), strict=True)


def test_bfloat16_is_refused_where_nothing_casts_it() -> None:
    given = model("g (bfloat16[2] x) => (bfloat16[2] y) { y = Sin(x) }", opset=23)
    assert types(svexport.convert(given, 20)) == ["Cast", "Sin", "Cast"]
    with pytest.raises(UnsupportedError, match=r"lowest that has one is 13:\n.*'y' \(Sin\).*takes no bfloat16"):
        svexport.convert(given, 11)


# ---------------------------------------------------------------- names, constants, what is kept


def test_new_names_are_new() -> None:
    given = model("g (float[2,3] x) => (float[2,3] z) { y = Gelu(x)\n z = Gelu(y) }")
    given.graph.node.append(helper.make_node("Neg", ["z"], ["y/Mul_0"], "z/Erf_0"))
    given.graph.output.append(helper.make_tensor_value_info("y/Mul_0", TensorProto.FLOAT, [2, 3]))
    converted = check(given, 11, floats(2, 3))
    made = [name for node in converted.graph.node for name in node.output]
    assert len(made) == len(set(made))


def test_sources_are_kept() -> None:
    given = model("g (float[2,3] x) => (float[2,3] y) { y = Gelu(x) }")
    given.graph.node[0].doc_string = "model.py:7"
    given.graph.node[0].metadata_props.add(key="pkg.torch.name_scopes", value="layer")
    for node in svexport.convert(given, 11).graph.node:
        assert node.doc_string == "model.py:7"
        assert [entry.value for entry in node.metadata_props] == ["layer"]


def test_constants_that_a_caller_may_override_decide_nothing() -> None:
    given = model("g (float[2,3] x, int64[1] axes) => (float[M] y) { y = ReduceMax<keepdims = 0>(x, axes) }")
    given.graph.initializer.append(numpy_helper.from_array(np.array([1]), "axes"))
    with pytest.raises(UnsupportedError, match="its axes are computed"):
        svexport.convert(given, 11)
    given.graph.input.pop()
    converted = check(given, 11, floats(2, 3), exactly=True)
    assert not converted.graph.initializer


def test_constants_that_are_computed() -> None:
    given = model(
        """g (float[2,3] x) => (float[3] y) <int64[1] one = {1}> {
        shape = Shape(x)
        rank = Size(shape)
        axis = Sub(rank, one)
        less = Sub(axis, one)
        y = ReduceMax<keepdims = 0>(x, less)
        }"""
    )
    assert types(check(given, 11, floats(2, 3), exactly=True)) == ["ReduceMax"]


def test_other_domains_and_values_outside() -> None:
    given = model("g (float[2] x) => (float[2] y) { a = Softplus(x)\n y = my.f(a) }", opset=22)
    converted = svexport.convert(given, 9)
    assert [(node.domain, node.op_type) for node in converted.graph.node] == [("", "Softplus"), ("my", "f")]
    assert {entry.domain: entry.version for entry in converted.opset_import} == {"": 9, "my": 1}


@pytest.mark.parametrize(("opset", "ir_version"), [(20, 10), (18, 8), (9, 8)])
def test_ir_version(opset: int, ir_version: int) -> None:
    given = model("g (float[2] x) => (float[2] y) { y = Relu(x) }", opset=23, ir_version=11)
    assert svexport.convert(given, opset).ir_version == ir_version
    given.ir_version = 3
    assert svexport.convert(given, opset).ir_version == 4


def test_weights_beside_the_file(tmp_path) -> None:
    given = model("g (float[64,64] x) => (float[64,64] y) { a = Add(x, w)\n y = Gelu(a) }")
    given.graph.initializer.append(numpy_helper.from_array(floats(64, 64), "w"))
    onnx.save(copy.deepcopy(given), tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    converted = svexport.convert(tmp_path / "m.onnx", 11, tmp_path / "lower" / "m.onnx")
    x = floats(64, 64)
    expected = run(given, [x])[0]
    np.testing.assert_allclose(run(converted, [x])[0], expected, rtol=1e-5, atol=1e-5)
    actual = svexport.load(tmp_path / "lower" / "m.onnx")(torch.from_numpy(x))
    torch.testing.assert_close(actual, torch.from_numpy(expected), rtol=1e-5, atol=1e-5)


def test_sizes_that_were_left_behind() -> None:
    """A batch made dynamic by hand, with what the exporter stated of the sizes after it."""
    given = model(
        """g (float[batch,4] x) => (float[batch,2] y, float[1,2] z, int64[1] n) {
        a = Gelu(x)
        y, z = Split<axis = 1, num_outputs = 2>(a)
        n = Shape<end = 1>(a)
        }"""
    )
    given.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, [1, 4]))
    lower = svexport.convert(given, 9)
    assert "Shape" in types(lower)  # is no constant
    del lower.graph.value_info[:], lower.graph.output[1:]  # ONNX Runtime would believe them
    y = torch.nn.functional.gelu(torch.from_numpy(x := floats(3, 4)))[:, :2].numpy()
    np.testing.assert_allclose(run(lower, [x])[0], y, atol=1e-6)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("opset", LOWER)
def test_nodes_in_another_order(opset: int) -> None:
    """As edited files have them, and as ONNX Runtime takes them; captured values count."""
    given = model("""
    g (float[2,3] x, bool c) => (float[2,3] y) {
       b = Neg(a)
       z = Softmax(b)
       a = HardSwish(x)
       y = If(c) <then_branch = t () => (float[2,3] r) { r = Add(q, z) q = Abs(b) },
                  else_branch = e () => (float[2,3] s) { s = Sub(z, b) }>
    }""")
    nodes = list(given.graph.node)
    del given.graph.node[:]
    given.graph.node.extend([nodes[3], *nodes[:3]])
    converted = svexport.convert(given, opset)
    onnx.checker.check_model(converted, full_check=True)
    x = floats(2, 3)
    a = torch.nn.functional.hardswish(torch.from_numpy(x))
    for condition, expected in ((True, a.abs() + (-a).softmax(-1)), (False, (-a).softmax(-1) + a)):
        (actual,) = run(converted, (x, np.array(condition)))
        np.testing.assert_allclose(actual, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_nodes_that_wait_for_one_another() -> None:
    given = model("g (float[4] x) => (float[4] y) { y = Add(x, z) z = HardSwish(y) }")
    with pytest.raises(UnsupportedError, match=r"'y' \(Add\) waits for its own result"):
        svexport.convert(given, 11)


def test_what_cannot_be_asked_for() -> None:
    given = model("g (float[2] x) => (float[2] y) { y = Relu(x) }", opset=13)
    with pytest.raises(UnsupportedError, match=r"from 9 to the model's own, 13, got 20; onnx.version_converter"):
        svexport.convert(given, 20)
    with pytest.raises(UnsupportedError, match="from 9 to the model's own, 13, got 8"):
        svexport.convert(given, 8)
    given.opset_import[0].version = 99
    with pytest.raises(UnsupportedError, match="a model of an opset up to"):
        svexport.convert(given, 11)
    assert svexport.convert(model("g (float[2] x) => (float[2] y) { y = Relu(x) }", opset=13), 13).graph.node


def test_refusals_name_node_op_reason_and_the_lowest_opset(tmp_path) -> None:
    given = model(
        """g (float[6] x, string[2] s) => (float[N] y, bool[2] e, uint8[H,W,3] i) <uint8[3] bytes = {1, 2, 3}> {
        y, p, q, r = Unique(x)
        e = Equal(s, s)
        i = ImageDecoder(bytes)
        }"""
    )
    with pytest.raises(UnsupportedError) as caught:
        svexport.convert(given, 10, tmp_path / "lower.onnx")
    assert not list(tmp_path.iterdir())
    lines = str(caught.value).splitlines()
    assert lines[0] == "the model (opset 20) has no exact form at opset 10; the lowest that has one is 20:"
    assert [line.partition(":")[0] for line in lines[1:]] == [
        "  node 'i' (ImageDecoder) cannot be written below opset 20",
        "  node 'e' (Equal) cannot be written below opset 19",
        "  node 'y' (Unique) cannot be written below opset 11",
    ]


@pytest.mark.parametrize("content", [None, b"", b"not a model", b"\x08\x07"])
def test_files_that_are_none(content: bytes | None, tmp_path) -> None:
    if content is not None:
        (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(SvexportError, match=r"m\.onnx|imports none"):
        svexport.convert(tmp_path / "m.onnx", 11)


# ---------------------------------------------------------------- cost


def test_the_work_grows_with_the_nodes() -> None:
    def chain(length: int) -> onnx.ModelProto:
        names = [f"x{i}" for i in range(length)]
        kinds = ["Gelu", "Relu", "Add"]
        nodes = [
            helper.make_node(kinds[i % 3], [a, a] if i % 3 == 2 else [a], [b])
            for i, (a, b) in enumerate(itertools.pairwise(names))
        ]
        ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in (names[0], names[-1])]
        graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)

    few, many = chain(40), chain(400)
    svexport.convert(few, 11)
    assert calls(lambda: svexport.convert(many, 11)) < 12 * calls(lambda: svexport.convert(few, 11))


@pytest.mark.parametrize("opset", LOWER)
def test_an_output_twice(opset: int) -> None:
    given = model("g (float[2, n] x) => (float[2, n] y) { y = Add (x, x) }")
    given.graph.output.append(given.graph.output[0])
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    converted = svexport.convert(given, opset)
    assert [value.name for value in converted.graph.output] == ["y", "y"]
    del converted.graph.output[1]  # ONNX Runtime takes no such file
    np.testing.assert_array_equal(run(converted, (x,))[0], x + x)
