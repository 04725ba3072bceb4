"""Lowers, attaches and strips bodies in hand-made models, in nested graphs and with few types known."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from onnx.shape_inference import infer_shapes

import svexport
from svexport import UnsupportedError
from svexport.graph import attach, bodies, lower, strip
from svexport.graph.bodies import state_types, without_overloads
from svexport.graph.nodes import set_attributes, svexport_nodes
from svexport.graph.types import infer_types, types_of
from svexport.graph.walk import graphs
from svexport.ops._einsum.labels import parse
from svexport.ops._op import OPS
from tests.support import run_model

pytestmark = pytest.mark.core

FLOAT, BOOL = TensorProto.FLOAT, TensorProto.BOOL


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], *attributes: Any, name: str = "") -> onnx.NodeProto:
    made = helper.make_node(OPS[op].node_type, inputs, outputs, name or f"the_{outputs[0]}", domain="svexport")
    set_attributes(made, OPS[op], attributes)
    return made


def einsum(equation: str, inputs: Sequence[str], output: str) -> onnx.NodeProto:
    ranks = tuple(len(term) for term in equation.partition("->")[0].split(","))
    return node("einsum", inputs, [output], *parse(equation, ranks))


def value(name: str, shape: Sequence[int | str] | None, dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    opset: int = 13,
    types: Sequence[onnx.ValueInfoProto] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, value_info=types)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("svexport", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8 if opset < 20 else 10)


def attached(model: onnx.ModelProto) -> onnx.ModelProto:
    result = copy.deepcopy(model)
    attach(result)
    return result


def check(
    model: onnx.ModelProto, *expected: torch.Tensor, given: Sequence[torch.Tensor], tolerance: float | None = None
) -> None:
    """Both the lowered model and the one with bodies compute what torch does."""
    before = model.SerializeToString()
    lowered, with_bodies = lower(model), attached(model)
    assert model.SerializeToString() == before
    assert not list(svexport_nodes(lowered))
    assert [entry.domain for entry in lowered.opset_import] == [""]
    assert [n.op_type for n in svexport_nodes(with_bodies)] == [n.op_type for n in svexport_nodes(model)]
    for made in (lowered, with_bodies):
        for actual, wanted in zip(run_model(made, given), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return svexport.ops.fast_sigmoid(x)


X = torch.linspace(-4, 4, 6).reshape(2, 3)


# ---------------------------------------------------------------- lower


def two_ops() -> onnx.ModelProto:
    nodes = [node("fast_sigmoid", ["x"], ["a"]), einsum("ij,kj->ik", ["a", "x"], "y")]
    nodes[0].doc_string = "model.py:7"
    return model_of(nodes, [value("x", [2, 3])], [value("y", [2, 2])])


@pytest.mark.parametrize("opset", [9, 11, 13, 17, 18, 20, 23])
def test_every_node(opset: int) -> None:
    model = two_ops()
    model.opset_import[0].version = opset
    model.ir_version = 8 if opset < 20 else 10
    check(model, torch.einsum("ij,kj->ik", sigmoid(X), X), given=[X])


def test_only_some() -> None:
    model = lower(two_ops(), ["fast_sigmoid"])
    assert [n.op_type for n in svexport_nodes(model)] == ["SvEinsum"]
    assert {n.doc_string for n in model.graph.node if n.domain != "svexport"} == {"model.py:7"}
    both = lower(attached(two_ops()), ["fast_sigmoid"])
    assert [f.name for f in both.functions] == ["SvEinsum"]
    torch.testing.assert_close(run_model(both, [X])[0], torch.einsum("ij,kj->ik", sigmoid(X), X))
    assert not lower(both).functions


def test_a_file(tmp_path) -> None:
    onnx.save(attached(two_ops()), tmp_path / "m.onnx")
    for path in (tmp_path / "m.onnx", str(tmp_path / "m.onnx")):
        assert lower(path) == lower(two_ops())


def test_nothing_to_lower() -> None:
    model = model_of([helper.make_node("Relu", ["x"], ["y"])], [value("x", [2])], [value("y", [2])])
    assert [entry.domain for entry in lower(model).opset_import] == [""]
    before = model.SerializeToString()
    attach(model)
    assert model.SerializeToString() == before


def test_equal_constants_of_bodies_are_one() -> None:
    nodes = [node("sigmoid_gt", ["x"], [name], 0.3, name=f"n{name}") for name in ("y", "z")]
    nodes.append(node("sigmoid_gt", ["x"], ["w"], 0.7, name="nw"))
    model = model_of(nodes, [value("x", [2, 3])], [value(name, [2, 3], BOOL) for name in "yzw"])
    lowered = lower(model)
    assert len(lowered.graph.initializer) == len({t.raw_data for t in lowered.graph.initializer})
    low, high = X.sigmoid() > 0.3, X.sigmoid() > 0.7
    assert not low.equal(high)
    check(model, low, low, high, given=[X])


def test_nodes_without_a_name() -> None:
    nodes = [node("sigmoid_gt", ["x"], ["y"], 0.3), node("sigmoid_gt", ["x"], ["z"], 0.7)]
    for each in nodes:
        each.name = ""
    model = model_of(nodes, [value("x", [2, 3])], [value("y", [2, 3], BOOL), value("z", [2, 3], BOOL)])
    check(model, X.sigmoid() > 0.3, X.sigmoid() > 0.7, given=[X])


def test_bodies_that_return_an_input() -> None:
    nodes = [einsum("ij->ij", ["x"], "y"), einsum("ij->ij", ["x"], "z"), helper.make_node("Add", ["y", "z"], ["w"])]
    model = model_of(nodes, [value("x", [2, 3])], [value("y", [2, 3]), value("w", [2, 3])])
    check(model, X, X + X, given=[X])


# ---------------------------------------------------------------- attach, strip


def functions(model: onnx.ModelProto) -> list[tuple[str, str]]:
    return [(f.name, f.overload) for f in model.functions]


def test_one_body_for_different_sizes() -> None:
    nodes = [node("space_to_depth", ["x"], ["y"]), node("space_to_depth", ["y"], ["z"])]
    model = model_of(nodes, [value("x", [1, 3, 8, 4])], [value("z", [1, 48, 2, 1])], types=[value("y", [1, 12, 4, 2])])
    assert functions(attached(model)) == [("SvSpaceToDepth", "")]
    x = torch.randn(1, 3, 8, 4)
    check(model, svexport.ops.space_to_depth(svexport.ops.space_to_depth(x)), given=[x])


def test_a_single_node_gets_a_body_for_its_sizes() -> None:
    sizes = []
    for shape in ([2, 3, 4, 6], ["n", "c", "h", "w"]):
        model = attached(
            model_of([node("space_to_depth", ["x"], ["y"])], [value("x", shape)], [value("y", [None] * 4)])
        )
        sizes.append(sum(n.op_type in ("Reshape", "Shape", "Concat") for n in lower(model).graph.node))
        own = {n.op_type for n in model.functions[0].node}
        assert ("Concat" in own) == (sizes[-1] > 2)
    assert sizes[0] == 2 < sizes[1]


def test_overloads() -> None:
    nodes = [einsum("ij,kj->ik", ["x", "x"], "a"), einsum("ij->ji", ["a"], "b"), einsum("ij,kj->ik", ["b", "b"], "y")]
    model = model_of(nodes, [value("x", [2, 3])], [value("y", [2, 2])], types=[value("a", [2, 2]), value("b", [2, 2])])
    made = attached(model)
    assert functions(made)[:2] == [("SvEinsum", ""), ("SvEinsum", "1")]
    assert made.ir_version == 10
    used = [(n.op_type, n.overload) for n in svexport_nodes(made)]
    assert set(used) == set(functions(made))
    assert used[0] != used[1]
    b = (X @ X.T).T
    check(model, b @ b.T, given=[X])
    for again in (attached(made), attached(attached(made))):
        assert again == made


@pytest.mark.parametrize("nested", [False, True])
def test_overloads_for_runtimes_without_them(nested: bool) -> None:
    nodes = [einsum("ij->ji", ["x"], "a"), einsum("ij->i", ["a"], "y")]
    if nested:
        branches = {
            f"{name}_branch": helper.make_graph([einsum("ij->i", ["a"], name)], name, [], [value(name, [3])])
            for name in ("then", "else")
        }
        nodes[1] = helper.make_node("If", ["c"], ["y"], **branches)
    inputs = [value("x", [2, 3]), value("c", [], BOOL)][: 1 + nested]
    made = attached(model_of(nodes, inputs, [value("y", [3])], types=[value("a", [3, 2])]))
    before = made.SerializeToString()
    assert functions(made) == [("SvEinsum", ""), ("SvEinsum", "1")]
    renamed = without_overloads(made)
    assert made.SerializeToString() == before
    assert functions(renamed) == [("SvEinsum", ""), ("SvEinsum_1", "")]
    given = [X, torch.tensor(True)][: 1 + nested]
    (actual,) = run_model(renamed, given)
    torch.testing.assert_close(actual, X.sum(0))
    assert without_overloads(renamed) is renamed


def test_strip() -> None:
    model = two_ops()
    model.ir_version = 10
    made = attached(model)
    assert len(made.functions) == 2
    strip(made)
    assert made == model
    nodes = [einsum("ij->ji", ["x"], "a"), einsum("ij->i", ["a"], "b"), node("fast_sigmoid", ["b"], ["y"])]
    model = model_of(nodes, [value("x", [2, 3])], [value("y", [3])], types=[value("a", [3, 2]), value("b", [3])])
    made = attached(model)
    strip(made, {"SvFastSigmoid"})
    assert functions(made) == [("SvEinsum", ""), ("SvEinsum", "1")]
    assert [n.overload for n in svexport_nodes(made)] == ["", "1", ""]
    assert made.ir_version == 10
    strip(made, {"SvEinsum"})
    assert not made.functions
    assert made.ir_version == model.ir_version == 8
    assert [n.overload for n in svexport_nodes(made)] == ["", "", ""]


def test_functions_of_others_stay() -> None:
    model = two_ops()
    imports = [helper.make_opsetid("", 13)]
    body = [helper.make_node("Relu", ["x"], ["y"])]
    model.functions.append(helper.make_function("my", "relu", ["x"], ["y"], body, imports))
    model.opset_import.append(helper.make_opsetid("my", 1))
    model.graph.node.append(helper.make_node("relu", ["y"], ["z"], domain="my"))
    model.graph.output.append(value("z", [2, 2]))
    y = torch.einsum("ij,kj->ik", sigmoid(X), X)
    for made in (lower(model), attached(model)):
        assert ("relu", "") in functions(made)
        for actual, expected in zip(run_model(made, [X]), (y, y.relu()), strict=True):
            torch.testing.assert_close(actual, expected)
    made = attached(model)
    strip(made)
    assert functions(made) == [("relu", "")]


# ---------------------------------------------------------------- nested graphs


def nested(opset: int) -> onnx.ModelProto:
    """An If whose branches hold nodes, one of them in an If of its own; ``a`` comes from outside."""
    then = helper.make_graph([node("fast_sigmoid", ["a"], ["t"])], "then", [], [value("t", [2, 3])])
    inner_then = helper.make_graph([einsum("ij->ij", ["f"], "p")], "inner then", [], [value("p", [2, 3])])
    gt = [node("sigmoid_gt", ["a"], ["g"], 0.6), helper.make_node("Cast", ["g"], ["q"], to=FLOAT)]
    inner_else = helper.make_graph(gt, "inner else", [], [value("q", [2, 3])])
    deep = [
        node("fast_sigmoid", ["x"], ["f"], name="f"),
        helper.make_node("If", ["d"], ["e"], then_branch=inner_then, else_branch=inner_else),
    ]
    other = helper.make_graph(deep, "else", [], [value("e", [2, 3])])
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other),
    ]
    inputs = [value("x", [2, 3]), value("c", [], BOOL), value("d", [], BOOL)]
    return model_of(nodes, inputs, [value("y", [2, 3])], opset)


@pytest.mark.parametrize("opset", [11, 13, 18, 20])
@pytest.mark.parametrize(("c", "d"), [(True, True), (False, True), (False, False)])
def test_nested_graphs(opset: int, c: bool, d: bool) -> None:
    a = X.relu()
    expected = sigmoid(a) if c else sigmoid(X) if d else (a.sigmoid() > 0.6).float()
    check(nested(opset), expected, given=[X, torch.tensor(c), torch.tensor(d)])


def test_nested_nodes_are_found() -> None:
    model = nested(13)
    assert sorted(n.op_type for n in svexport_nodes(model)) == [
        "SvEinsum",
        "SvFastSigmoid",
        "SvFastSigmoid",
        "SvSigmoidGt",
    ]
    assert len(list(graphs(model.graph))) == 5
    assert sorted(functions(attached(model))) == [("SvEinsum", ""), ("SvFastSigmoid", ""), ("SvSigmoidGt", "")]
    lowered = lower(model)
    assert lowered.graph.initializer  # constants of bodies are where every graph sees them
    assert not any(g.initializer for g in graphs(lowered.graph) if g is not lowered.graph)
    assert [n.op_type for n in svexport_nodes(lower(model, ["sigmoid_gt"]))].count("SvSigmoidGt") == 0


# ---------------------------------------------------------------- types


NEARLY_EQUAL = 1e-3
"""The chain's layer norm is over three numbers, whose rounding errors grow where they are close together."""


def chain() -> list[onnx.NodeProto]:
    """Standard nodes between ours: the type of ``d`` takes the bodies of two nodes to tell."""
    return [
        einsum("nchw,cd->ndhw", ["x", "w"], "a"),
        helper.make_node("Relu", ["a"], ["b"]),
        node("space_to_depth", ["b"], ["c"]),
        helper.make_node("Neg", ["c"], ["d"]),
        node("layer_norm", ["d", "", "bias"], ["y"], [3], 1e-5),
    ]


@pytest.mark.parametrize("known", [(), ("a",), ("c",), ("a", "b", "c", "d")])
@pytest.mark.parametrize("opset", [9, 13, 17, 20])
def test_types_are_inferred_through_bodies(opset: int, known: tuple[str, ...]) -> None:
    shapes = {"a": [2, 5, 4, 6], "b": [2, 5, 4, 6], "c": [2, 20, 2, 3], "d": [2, 20, 2, 3]}
    inputs = [value("x", [2, 3, 4, 6]), value("w", [3, 5]), value("bias", [3])]
    types = [value(name, shapes[name]) for name in known]
    model = model_of(chain(), inputs, [value("y", [2, 20, 2, 3])], opset, types)
    x, w, bias = torch.randn(2, 3, 4, 6), torch.randn(3, 5), torch.randn(3)
    d = -svexport.ops.space_to_depth(torch.einsum("nchw,cd->ndhw", x, w).relu())
    check(model, F.layer_norm(d, [3], None, bias), given=[x, w, bias], tolerance=NEARLY_EQUAL)


@pytest.mark.parametrize("known", ["ac", "a", ""])
@pytest.mark.parametrize("opset", [9, 13, 20])
def test_ranks_behind_dynamic_sizes(opset: int, known: str) -> None:
    inputs = [value("x", ["n", 3, "h", "w"]), value("w", [3, 5]), value("bias", [3])]
    ranks = [value(name, [None] * 4) for name in known]
    model = model_of(chain(), inputs, [value("y", ["n", 20, "p", "q"])], opset, ranks)
    for shape in ((2, 3, 4, 6), (1, 3, 8, 6)):
        x, w, bias = torch.randn(shape), torch.randn(3, 5), torch.randn(3)
        d = -svexport.ops.space_to_depth(torch.einsum("nchw,cd->ndhw", x, w).relu())
        check(model, F.layer_norm(d, [3], None, bias), given=[x, w, bias], tolerance=NEARLY_EQUAL)


def test_a_type_stated_without_a_shape_hides_none() -> None:
    untyped = [value(name, None) for name in "abcd"]
    inputs = [value("x", [2, 3, 4, 6]), value("w", [3, 5]), value("bias", [3])]
    model = model_of(chain(), inputs, [value("y", [2, 20, 2, 3])], types=untyped)
    x, w, bias = torch.randn(2, 3, 4, 6), torch.randn(3, 5), torch.randn(3)
    d = -svexport.ops.space_to_depth(torch.einsum("nchw,cd->ndhw", x, w).relu())
    check(model, F.layer_norm(d, [3], None, bias), given=[x, w, bias], tolerance=NEARLY_EQUAL)


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("c", [True, False])
def test_graphs_beside_each_other_share_names(c: bool, stated: bool) -> None:
    """The branches of an If have a ``t``, a ``u`` and an ``s`` each, of other types."""

    def branch(name: str, sizes: list[int], equation: str) -> onnx.GraphProto:
        nodes = [helper.make_node("Reshape", ["x", "s"], ["t"]), einsum(equation, ["t"], "u")]
        types = [value("t", sizes)] * stated
        shape = numpy_helper.from_array(np.array(sizes), "s")
        return helper.make_graph(nodes, name, [], [value("u", [None] * len(sizes))], [shape], value_info=types)

    then, other = branch("then", [1, 2, 3, 4], "nchw->nwhc"), branch("else", [6, 4], "ij->ji")
    nodes = [helper.make_node("If", ["c"], ["u_1"], then_branch=then, else_branch=other)]
    nodes.append(helper.make_node("Flatten", ["u_1"], ["y"], axis=0))
    model = model_of(nodes, [value("x", [24]), value("c", [], BOOL)], [value("y", [1, 24])])
    x = torch.rand(24)
    expected = torch.einsum("nchw->nwhc", x.reshape(1, 2, 3, 4)) if c else x.reshape(6, 4).T
    check(model, expected.reshape(1, 24), given=[x, torch.tensor(c)])


@pytest.mark.parametrize("shape", [[2, 3, 4, 6], ["n", 3, "h", "w"]])
def test_types_written_down_are_enough(shape: list, monkeypatch) -> None:
    inputs = [value("x", shape), value("w", [3, 5]), value("bias", [3])]
    model = model_of(chain(), inputs, [value("y", [None] * 4)], types=[value("d", None), value("b", None)])
    expected = lower(model)
    state_types(model)
    assert [info.name for info in model.graph.value_info] == ["b", "d"]
    monkeypatch.setattr("svexport.graph.bodies.infer_types", None)
    attach(model)
    assert [n.op_type for n in lower(model).graph.node] == [n.op_type for n in expected.graph.node]
    once = model.SerializeToString()
    state_types(model)
    assert model.SerializeToString() == once


class Windows(torch.nn.Module):
    """Pads an image to whole windows, as Swin does, and computes within each of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, height, width, channels = x.shape
        x = F.pad(x, (0, 0, 0, (4 - width % 4) % 4, 0, (4 - height % 4) % 4))
        rows, columns = x.shape[1] // 4, x.shape[2] // 4
        x = x.view(n, rows, 4, columns, 4, channels).transpose(2, 3)
        x = x.reshape(-1, 16, channels)
        mask = torch.zeros(x.shape[:2]).masked_fill(torch.arange(x.shape[0])[:, None] < 2, 1.0)
        repeated = F.interpolate(x[None] * mask[..., None], scale_factor=(0.5, 2.0))
        return repeated.expand(3, *repeated.shape[1:]) * x.shape[0]


@pytest.mark.filterwarnings("ignore:.*legacy TorchScript:DeprecationWarning")
@pytest.mark.parametrize("opset", [11, 13, 17])
def test_inferred_types_are_those_of_a_run(opset: int, tmp_path) -> None:
    path, x = tmp_path / "m.onnx", torch.randn(2, 7, 10, 5)
    torch.onnx.export(Windows(), (x,), str(path), dynamo=False, opset_version=opset, input_names=["x"])
    model = onnx.load(str(path))
    types = infer_types(model)
    names = [name for node in model.graph.node for name in node.output]
    assert any(type_.shape is None or None in type_.shape for type_ in types_of(infer_shapes(model)).values())
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for name, array in zip(names, session.run(None, {"x": x.numpy()}), strict=True):
        assert (types[name].shape, types[name].dtype) == (array.shape, helper.np_dtype_to_tensor_dtype(array.dtype))


def test_equal_nodes_have_one_body_built(monkeypatch) -> None:
    nodes = [node("space_to_depth", [f"x{i}"], [f"y{i}"]) for i in range(5)]
    shapes = [[1, 2, 4, 6]] * 3 + [[1, 2, 4, 8]] * 2
    inputs = [value(f"x{i}", shape) for i, shape in enumerate(shapes)]
    model = model_of(nodes, inputs, [value(f"y{i}", [None] * 4) for i in range(5)])
    built = []
    function = bodies._function
    monkeypatch.setattr(bodies, "_function", lambda node, *rest: built.append(node) or function(node, *rest))
    attach(model)
    assert len(built) == 3  # of two shapes, and one that serves both


def test_what_cannot_be_inferred_is_named() -> None:
    nodes = [helper.make_node("Custom", ["x"], ["a"], domain="my"), node("space_to_depth", ["a"], ["y"], name="focus")]
    model = model_of(nodes, [value("x", [2, 3])], [value("y", [None] * 4)])
    model.opset_import.append(helper.make_opsetid("my", 1))
    for function in (lower, attach):
        with pytest.raises(
            UnsupportedError, match=r"of 'a', input of 'focus' \(svexport::SvSpaceToDepth\), cannot be .* value_info"
        ):
            function(model)
    model.graph.value_info.append(value("a", [2, 3, 4, 4]))
    assert len(attached(model).functions) == 1


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("opset", [11, 17])
def test_optional_inputs(weight: bool, bias: bool, opset: int) -> None:
    w, b = torch.randn(3), torch.randn(3)
    inputs = ["x", "w" if weight else "", "b" if bias else ""]
    given = [X] + [w] * weight + [b] * bias
    infos = [value(name, list(t.shape)) for name, t in zip(filter(None, inputs), given, strict=True)]
    expected = F.layer_norm(X, [3], w if weight else None, b if bias else None)
    short = inputs[: 3 if bias else 2 if weight else 1]
    for names in (inputs, short):
        model = model_of([node("layer_norm", names, ["y"], [3], 1e-5)], infos, [value("y", [2, 3])], opset)
        check(model, expected, given=given)


@pytest.mark.parametrize("outputs", [["y"], ["y", ""], ["", "y"], ["y", "z"]])
def test_unused_outputs(outputs: list[str]) -> None:
    names = ["x", "bias", "residual", "weight", "norm_bias"]
    made = node("add_bias_residual_layer_norm", names, outputs, 1e-5, name="norm")
    given = [torch.randn(2, 3), torch.randn(3), torch.randn(2, 3), torch.randn(3), torch.randn(3)]
    infos = [value(name, list(t.shape)) for name, t in zip(names, given, strict=True)]
    model = model_of([made], infos, [value(name, [2, 3]) for name in outputs if name])
    results = svexport.ops.add_bias_residual_layer_norm(*given)
    check(model, *(r for r, name in zip(results, outputs, strict=False) if name), given=given)


# ---------------------------------------------------------------- errors


def broken(change: str) -> onnx.ModelProto:
    model = two_ops()
    first = model.graph.node[0]
    if change == "type":
        first.op_type = "SvTomorrow"
    elif change == "inputs":
        first.input.append("x")
    elif change == "no inputs":
        del first.input[:]
    elif change == "attribute":
        del model.graph.node[1].attribute[:]
    elif change == "opset":
        del model.opset_import[0]
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("type", r"'the_a' is svexport::SvTomorrow, which this svexport does not have \(it has .*\); .*: upgrade it"),
        ("inputs", r"'the_a' \(svexport::SvFastSigmoid\) expects 1 inputs, got 2"),
        ("no inputs", r"'the_a' \(svexport::SvFastSigmoid\) expects 1 inputs, got 0"),
        ("attribute", r"'the_y' \(svexport::SvEinsum\) lacks the attribute 'labels'; it should have labels, ranks"),
        ("opset", r"expected a model that imports the default ONNX domain; this one imports none"),
    ],
)
def test_broken_models(change: str, message: str) -> None:
    for function in (attach, lower):
        with pytest.raises(UnsupportedError, match=message):
            function(broken(change))


def test_attributes_out_of_range() -> None:
    sample = node("grid_sample", ["x", "grid"], ["y"], 0, 0, 1, 1.0)
    next(a for a in sample.attribute if a.name == "interpolation_mode").i = 2**40
    model = model_of([sample], [value("x", [1, 2, 3, 3]), value("grid", [1, 2, 2, 2])], [value("y", [1, 2, 2, 2])])
    for function in (attach, lower):
        with pytest.raises(
            UnsupportedError, match=r"\(svexport::SvGridSample\) has attributes .* KeyError: 1099511627776"
        ):
            function(model)


def test_unknown_ops() -> None:
    with pytest.raises(UnsupportedError, match=r"expected names of ops \(.*einsum, .*\), got 'gelu', 'tanh'"):
        lower(two_ops(), ["tanh", "einsum", "gelu"])


def test_nodes_of_one_name_keep_their_own_constants():
    nodes = [
        node("sigmoid_gt", ["x"], ["low"], 0.3, name="same"),
        node("sigmoid_gt", ["x"], ["high"], 0.7, name="same"),
    ]
    outputs = [value("low", [3, 5], BOOL), value("high", [3, 5], BOOL)]
    x = torch.randn(3, 5)
    low, high = run_model(lower(model_of(nodes, [value("x", [3, 5])], outputs)), [x])
    assert torch.equal(low, x.sigmoid() > 0.3)
    assert torch.equal(high, x.sigmoid() > 0.7)
