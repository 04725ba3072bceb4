"""Simplified models compute the same with fewer nodes, and keep everything else."""

from __future__ import annotations

import copy
from collections import Counter
from itertools import permutations

import numpy as np
import onnx
import onnxscript.optimizer
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper, parser
from torch import Tensor, nn

import svexport
from svexport.graph import attach
from svexport.graph.nodes import svexport_nodes
from svexport.graph.simplify import simplify
from svexport.graph.space_to_depth import fuse_space_to_depth
from svexport.graph.walk import graphs
from svexport.ops.add_bias_residual_layer_norm import OP as LAYER_NORM
from tests.graph.prove import prove
from tests.support import OPSETS, op_model, run_model


def types(model: onnx.ModelProto) -> dict[str, int]:
    return dict(Counter(n.op_type for g in graphs(model.graph) for n in g.node if n.op_type != "Constant"))


def check(model: onnx.ModelProto, *, plugins: bool = False, sizes: dict[str, int] | None = None) -> onnx.ModelProto:
    """Simplifies a model and holds the result to what never may change."""
    before = model.SerializeToString()
    after = simplify(model, plugins=plugins)
    assert model.SerializeToString() == before
    onnx.checker.check_model(after, full_check=True)
    assert after.ir_version == model.ir_version
    assert [e for e in after.opset_import if e.domain == ""] == [e for e in model.opset_import if e.domain == ""]
    for now, then in ((after.graph.input, model.graph.input), (after.graph.output, model.graph.output)):
        assert [v.name for v in now] == [v.name for v in then]
        assert [v.type.tensor_type.elem_type for v in now] == [v.type.tensor_type.elem_type for v in then]
    assert "onnxscript" not in str(after)
    prove(model, after, sizes=sizes)
    return after


def parsed(opset: int, signature: str, body: str, domains: str = "") -> onnx.ModelProto:
    imports = f'"": {opset}{domains}'
    return parser.parse_model(
        f"<ir_version: {8 if opset < 20 else 10}, opset_import: [{imports}]> g {signature} {{{body}}}"
    )


# ---------------------------------------------------------------- the library's part


@pytest.mark.parametrize("opset", [9, 11, 13])
def test_lists_of_numbers_are_tensors(opset: int) -> None:
    """The library writes Constants as they are from opset 12 on, and before that nothing was simplified."""
    model = parsed(opset, "(float[2, 3] x, float[3, 2] z) => (float[3, 2] y)", "s = Shape(z) y = Reshape(x, s)")
    assert types(check(model)) == {"Reshape": 1}


@pytest.mark.parametrize("opset", OPSETS)
def test_constants_equal_nodes_identities_and_unused_ones(opset: int) -> None:
    model = parsed(
        opset,
        "(float[2,3] x) => (float[2,3] y, float[2,3] z) <float[3] w = {1,2,3}, float[3] same = {1,2,3}>",
        """
        c = Constant <value = float[1] {2.0}> ()
        v = Mul(w, c)
        i = Identity(x)
        a = Add(i, v)
        b = Add(x, v)
        u = Exp(x)
        d = Mul(a, same)
        e = Mul(b, w)
        y = Sub(d, a)
        z = Add(e, y)
        """,
    )
    assert types(check(model)) == {"Add": 2, "Mul": 1, "Sub": 1}


@pytest.mark.parametrize("opset", OPSETS)
def test_outputs_that_are_constants_inputs_and_one_another(opset: int) -> None:
    model = parsed(
        opset,
        "(float[3] x) => (float[3] y, float[3] z, float[3] same, float[3] twice, float[3] c) <float[3] w = {1,2,3}>",
        "y = Identity(x) a = Relu(x) z = Identity(a) same = Identity(a) twice = Relu(x) c = Add(w, w)",
    )
    after = check(model)
    assert types(after)["Relu"] == 1


@pytest.mark.parametrize("opset", [11, 12, 17, 18])
def test_two_equal_clamps(opset: int) -> None:
    body = "a = Clip(x, lo, hi) b = Clip(x, lo, hi) c = Mul(b, hi) y = Add(a, c)"
    after = check(parsed(opset, "(float[2,3] x) => (float[2,3] y) <float lo = {0.0}, float hi = {6.0}>", body))
    assert types(after) == {"Clip": 1, "Add": 1, "Mul": 1}


def test_weights_are_not_merged_into_one_another() -> None:
    w, bias = (numpy_helper.from_array(t.numpy(), n) for t, n in ((torch.randn(4, 3, 1, 1), "w"), (torch.rand(4), "b")))
    body = "a = Conv(x, w, b) c = BatchNormalization(a, b, b, b, b) t = Transpose<perm=[0,2,3,1]>(c) y = Relu(t)"
    model = parsed(13, "(float[2,3,5,5] x) => (float[2,5,5,4] y)", body)
    model.graph.initializer.extend([w, bias])
    after = check(model)
    assert types(after) == {"Conv": 1, "BatchNormalization": 1, "Transpose": 1, "Relu": 1}
    assert {t.name: t.raw_data for t in after.graph.initializer} == {"w": w.raw_data, "b": bias.raw_data}


@pytest.mark.parametrize("opset", [11, 18, 20])
def test_svexport_nodes_and_their_bodies_stay(opset: int) -> None:
    args = [torch.randn(2, 3, 8), torch.randn(8), torch.randn(2, 3, 8), torch.randn(8), torch.randn(8), 1e-5, None]
    model = op_model(LAYER_NORM, args, opset, lowered=False)
    model.graph.node[0].doc_string = "model.py:3"
    model.graph.node.append(helper.make_node("Identity", ["y0"], ["z"]))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [2, 3, 8]))
    after = check(model)
    assert after.functions == model.functions
    (now,), (then,) = svexport_nodes(after), svexport_nodes(model)
    assert [name for name in now.input if name] == [name for name in then.input if name]
    assert (now.attribute, now.doc_string, now.overload) == (then.attribute, then.doc_string, then.overload)
    run_model(after, [t for t in args if isinstance(t, Tensor)])


def test_functions_of_others_stay() -> None:
    model = parsed(
        17,
        "(float[3] x) => (float[3] y)",
        "a = my.twice(x) b = Identity(a) y = my.twice(b)",
        ', "my": 1',
    )
    model.functions.append(
        helper.make_function(
            "my", "twice", ["x"], ["y"], [helper.make_node("Add", ["x", "x"], ["y"])], [helper.make_opsetid("", 17)]
        )
    )
    after = check(model)
    assert types(after) == {"twice": 2}
    assert after.functions == model.functions


def test_what_the_library_breaks_stays_as_it_was(monkeypatch) -> None:
    body = "a = Transpose<perm=[1,0]>(x) b = Relu(a) y = Transpose<perm=[1,0]>(b)"
    model = parsed(13, "(float[2,3] x) => (float[2,3] y)", body)

    def lose_an_input(graph, **options) -> None:
        graph.graph.node(1).replace_input_with(0, None)

    def rename_the_output(graph, **options) -> None:
        graph.graph.outputs[0].name = "other"

    def fail(graph, **options) -> None:
        raise KeyError("unheard of")

    for breaking in (lose_an_input, rename_the_output, fail):
        monkeypatch.setattr(onnxscript.optimizer, "fold_constants", breaking)
        assert types(check(model)) == {"Relu": 1}  # Transposes are removed all the same


def test_of_a_file(tmp_path) -> None:
    body = "a = Transpose<perm=[1,0]>(x) y = Transpose<perm=[1,0]>(a)"
    onnx.save(parsed(13, "(float[2,3] x) => (float[2,3] y)", body), tmp_path / "m.onnx")
    assert types(simplify(tmp_path / "m.onnx")) == types(simplify(str(tmp_path / "m.onnx"))) == {"Identity": 1}


# ---------------------------------------------------------------- space to depth

YOLOX = ((0, 0), (1, 0), (0, 1), (1, 1))


def sliced(
    order: tuple[tuple[int, int], ...],
    shape: tuple[int | str, ...] = (2, 3, 4, 6),
    axes: tuple[int, int] = (2, 3),
    axis: int = 1,
    opset: int = 13,
    at_once: bool = False,
    perm: tuple[int, ...] | None = None,
    end: int = 2**63 - 1,
    step: int = 2,
) -> onnx.ModelProto:
    """A Concat of slices, one axis after another or both at once."""
    constants: dict[str, onnx.TensorProto] = {}

    def ints(*values: int) -> str:
        name = "c" + "_".join(map(str, values)).replace("-", "m")
        constants[name] = numpy_helper.from_array(np.array(values, np.int64), name)
        return name

    nodes = [helper.make_node("Transpose", ["x"], ["t"], perm=perm)] if perm else []
    source = "t" if perm else "x"
    for i, (a, b) in enumerate(order):
        if at_once:
            inputs = [ints(a, b), ints(end, end), ints(*axes), ints(step, step)]
            nodes.append(helper.make_node("Slice", [source, *inputs], [f"s{i}"]))
        else:
            for from_, to, start, along in ((source, f"r{i}", a, axes[0]), (f"r{i}", f"s{i}", b, axes[1])):
                inputs = [ints(start), ints(end), ints(along), ints(step)]
                nodes.append(helper.make_node("Slice", [from_, *inputs], [to]))
    nodes.append(helper.make_node("Concat", [f"s{i}" for i in range(len(order))], ["y"], axis=axis))
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", shape), ("y", None)))
    graph = helper.make_graph(nodes, "g", [x], [y], list(constants.values()))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


def fused(model: onnx.ModelProto, node: bool = False, sizes: dict[str, int] | None = None) -> dict[str, int]:
    """Types of the nodes after the fusion, which is proven."""
    after = copy.deepcopy(model)
    count = fuse_space_to_depth(after, node=node)
    assert count == (types(after) != types(model))
    onnx.checker.check_model(after, full_check=True)
    prove(model, after, exact=True, sizes=sizes)
    return types(after)


STANDARD = {"Reshape": 2, "Transpose": 1}


@pytest.mark.parametrize("order", list(permutations(YOLOX)))
def test_any_order_of_the_slices(order: tuple) -> None:
    straight = order in (YOLOX, tuple(sorted(YOLOX)))
    assert fused(sliced(order)) == (STANDARD if straight else {"Reshape": 3, "Transpose": 1, "Gather": 1})
    gathered = {"SvSpaceToDepth": 1, "Reshape": 2, "Gather": 1}
    assert fused(sliced(order), node=True) == ({"SvSpaceToDepth": 1} if order == YOLOX else gathered)


@pytest.mark.parametrize(
    ("shape", "axes", "axis"),
    [
        ((2, 4, 6, 3), (1, 2), 3),
        ((2, 4, 6, 3), (1, 2), 0),
        ((4, 6, 3), (1, 0), 2),
        ((2, 3, 4, 5, 6), (-1, 2), 1),
        ((2, 3, 4, 5, 6), (4, 2), -2),
    ],
)
def test_any_dimensions(shape: tuple, axes: tuple, axis: int) -> None:
    for order in (YOLOX, tuple(sorted(YOLOX))):
        assert fused(sliced(order, shape, axes, axis)) == STANDARD
        assert fused(sliced(order, shape, axes, axis), node=True) == STANDARD


@pytest.mark.parametrize("opset", [10, 11, 13, 18])
@pytest.mark.parametrize("at_once", [False, True])
def test_slices_of_one_axis_or_both(opset: int, at_once: bool) -> None:
    for node, expected in ((False, STANDARD), (True, {"SvSpaceToDepth": 1})):
        assert fused(sliced(YOLOX, opset=opset, at_once=at_once), node) == expected
        assert fused(sliced(YOLOX, opset=opset, at_once=at_once, end=2**31 - 1), node) == expected


def test_dynamic_sizes() -> None:
    assert fused(sliced(YOLOX, ("n", 3, 4, 6))) == STANDARD
    assert fused(sliced(YOLOX, (2, 3, "h", 6)), sizes={"h": 8}) == STANDARD
    everything = ("n", "c", "h", "w")
    assert fused(sliced(YOLOX, everything), sizes={"h": 8, "w": 4})["Transpose"] == 1
    assert fused(sliced(YOLOX, everything), node=True, sizes={"h": 8, "w": 4}) == {"SvSpaceToDepth": 1}


def test_a_transpose_before_is_the_one() -> None:
    assert fused(sliced(YOLOX, axes=(1, 2), axis=3, perm=(0, 2, 3, 1))) == STANDARD
    assert fused(sliced(YOLOX, (4, 6, 3, 2), axes=(2, 3), axis=1, perm=(3, 2, 0, 1)), node=True) == STANDARD


@pytest.mark.parametrize(
    "model",
    [
        sliced(YOLOX[:3]),
        sliced((*YOLOX[:3], (0, 0))),
        sliced(YOLOX, (2, 3, 6, 6), end=4),
        sliced(YOLOX, (2, 3, 7, 7), end=-1),
        sliced(YOLOX, (2, 3, 6, 6), step=3),
        sliced(YOLOX, (2, 3, 4, 4), axis=2),
        sliced(YOLOX, ("n", 3, 8, "w"), end=8),
    ],
    ids=["three", "twice the same", "short", "short from the end", "every third", "a sliced axis", "perhaps short"],
)
def test_other_slices_stay(model: onnx.ModelProto) -> None:
    before = model.SerializeToString()
    assert fuse_space_to_depth(model) == 0
    assert model.SerializeToString() == before


def test_nothing_else_is_left_of_the_slices() -> None:
    model = sliced(YOLOX, opset=11)
    fuse_space_to_depth(model)
    assert [tensor.name.partition("/")[0] for tensor in model.graph.initializer] == ["y", "y"]
    assert not model.graph.value_info


def test_slices_that_others_use_stay() -> None:
    model = sliced(YOLOX)
    model.graph.output.append(helper.make_tensor_value_info("s1", TensorProto.FLOAT, [2, 3, 2, 3]))
    assert fused(model) == {**STANDARD, "Slice": 2}


class Focus(nn.Module):
    """As in YOLOX."""

    def forward(self, x: Tensor) -> Tensor:
        top_left, top_right = x[..., ::2, ::2], x[..., ::2, 1::2]
        bottom_left, bottom_right = x[..., 1::2, ::2], x[..., 1::2, 1::2]
        return F.relu(torch.cat((top_left, bottom_left, top_right, bottom_right), dim=1))


class PatchMerging(nn.Module):
    """As in Swin."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1).relu()


@pytest.mark.parametrize(("opset", "dynamic"), [(11, None), (13, {"x": {0: "n"}}), (18, {"x": {0: "n"}})])
def test_space_to_depth_as_exported(opset: int, dynamic: dict | None, tmp_path) -> None:
    x = (torch.randn(2, 3, 6, 8),)
    for model, plugins, expected in [
        (Focus(), False, STANDARD),
        (Focus(), ["space_to_depth"], {"SvSpaceToDepth": 1}),
        (PatchMerging(), True, STANDARD),
    ]:
        report = svexport.export(
            model, x, tmp_path / "m.onnx", opset=opset, plugins=plugins, dynamic_axes=dynamic, simplify=True
        )
        assert report.verified
        assert report.nodes == {**expected, "Relu": 1}
        assert bool(onnx.load(report.path).functions) == ("SvSpaceToDepth" in expected)


@pytest.mark.core
@pytest.mark.parametrize("opset", [11, 18])
def test_export_says_what_it_simplified(opset: int, tmp_path) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = x.permute(0, 2, 3, 1).sigmoid().permute(0, 3, 1, 2)
            return torch.einsum("nchw,cd->ndhw", x, y).relu()

    args = (torch.randn(2, 3, 4, 5), torch.randn(3, 6))
    plain = svexport.export(Net(), args, tmp_path / "m.onnx", opset=opset, plugins=["einsum"])
    simple = svexport.export(Net(), args, tmp_path / "m.onnx", opset=opset, plugins=["einsum"], simplify=True)
    assert plain.nodes == {"Transpose": 2, "Sigmoid": 1, "SvEinsum": 1, "Relu": 1}
    assert simple.nodes == {"Sigmoid": 1, "SvEinsum": 1, "Relu": 1}
    assert simple.verified
    assert not plain.notes
    assert simple.notes == ["simplify: 5 nodes became 3, 2 Transposes 0"]
    assert simple.notes[0] in str(simple)
    lowered = svexport.export(Net(), args, tmp_path / "m.onnx", opset=opset, plugins=False, simplify=True)
    assert lowered.verified
    assert lowered.nodes["Transpose"] < 4


def test_nested_graphs_are_simplified_too() -> None:
    branch = helper.make_graph(list(sliced(YOLOX).graph.node), "then", [], [sliced(YOLOX).graph.output[0]])
    branch.output[0].name = "y"
    constants = sliced(YOLOX).graph.initializer
    other = helper.make_graph(
        [helper.make_node("ConstantOfShape", ["s"], ["y"])], "else", [], [sliced(YOLOX).graph.output[0]]
    )
    node = helper.make_node("If", ["c"], ["z"], then_branch=branch, else_branch=other)
    inputs = [sliced(YOLOX).graph.input[0], helper.make_tensor_value_info("c", TensorProto.BOOL, [])]
    output = helper.make_tensor_value_info("z", TensorProto.FLOAT, [2, 12, 2, 3])
    shape = numpy_helper.from_array(np.array([2, 12, 2, 3], np.int64), "s")
    graph = helper.make_graph([node], "g", inputs, [output], [*constants, shape])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    for seed in range(4):  # both branches
        after = copy.deepcopy(model)
        assert fuse_space_to_depth(after) == 1
        prove(model, after, exact=True, seed=seed)
    assert types(after) == {"If": 1, "ConstantOfShape": 1, **STANDARD}
    assert types(simplify(model, plugins=True))["SvSpaceToDepth"] == 1
    attached = simplify(model, plugins=True)
    attach(attached)
    prove(model, attached, exact=True)
