"""``svexport.check``: the verdict on every node, findings on the file, and files that are no models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn import functional as F

import svexport
from svexport.errors import ExportError, SvexportError
from svexport.tensorrt.check import check
from svexport.tensorrt.check.report import CheckReport, Finding
from tests.support import calls

pytestmark = pytest.mark.core

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def info(name, dtype=FLOAT, shape=(2, 3)):
    return helper.make_tensor_value_info(name, dtype, shape)


def model(nodes, inputs=("x",), outputs=("y",), constants=None, *, opset=13, functions=(), domains=(), ir_version=8):
    given, results = ([v if isinstance(v, onnx.ValueInfoProto) else info(v) for v in vs] for vs in (inputs, outputs))
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "graph", given, results, tensors)
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=imports, functions=list(functions), ir_version=ir_version)


def node(op, inputs, outputs, **attributes):
    return helper.make_node(op, inputs.split(), outputs.split(), name=f"the_{op}", **attributes)


def found(report: CheckReport, rule: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.rule == rule]


class Sampler(nn.Module):
    """A node with a plugin, and three without."""

    example_inputs = (torch.randn(1, 4, 8, 8), torch.rand(1, 5, 5, 2) * 2 - 1)

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x, grid):
        y = F.grid_sample(x, grid, align_corners=False)
        return self.norm(torch.einsum("nchw,nkhw->nckh", y, y).transpose(2, 3).unflatten(1, (2, 2)).mean(-2))


TARGETS = [("8.4", 11), ("8.4", 13), ("8.6", 17), ("10.0", 17), ("10.12", 11), ("10.12", 18), ("11.0", 20)]


@pytest.mark.parametrize(("target", "opset"), TARGETS)
def test_what_we_write_for_a_target_is_parsed_by_it(tmp_path, target, opset):
    report = svexport.export(Sampler(), path=tmp_path / "m.onnx", opset=opset, target=target, verify=False)
    assert report.check.ok, report.check
    assert not report.check.warnings, report.check
    assert report.check.verdicts["plugin"] == 1
    assert set(report.check.verdicts) == {"native", "plugin"}
    again = check(tmp_path / "m.onnx", target)
    assert again.findings == report.check.findings
    assert report.to_dict()["check"]["ok"]


class Found(nn.Module):
    """What TensorRT has an op for from 8.5 on, which none of 8.4 stands for."""

    example_inputs = (torch.eye(3),)

    def forward(self, x):
        return x.nonzero()


def test_what_the_target_lacks_is_in_the_report_of_the_export(tmp_path):
    report = svexport.export(Found(), path=tmp_path / "m.onnx", opset=11, target="8.4", verify=False)
    (error,) = report.check.errors
    assert (error.rule, error.op, error.severity) == ("unsupported", "NonZero", "error")
    assert "TensorRT 8.5 or later" in error.expected
    assert any("TensorRT 8.4: 1 error (NonZero)" in note for note in report.notes)
    for shown in (" ".join(str(report).split()), report._repr_html_(), report.check._repr_html_()):
        assert "1 unsupported" in shown
    assert svexport.export(Found(), path=tmp_path / "m.onnx", opset=11, verify=False).check is None


BODIES = {"8.4": "plugin", "9.0": "unsupported", "10.1": "unsupported", "10.6": "unsupported", "10.7": "plugin"}


def test_bodies(tmp_path):
    """A portable file: before 9.0 bodies are ignored, up to 10.6 they are looked at before plugins, and refused."""
    svexport.export(Sampler(), path=tmp_path / "m.onnx", opset=11, verify=False)
    for target, verdict in BODIES.items():
        report = check(tmp_path / "m.onnx", target)
        assert set(report.verdicts) == {"native", verdict}
        (finding,) = [finding for finding in report.findings if finding.op == "SvGridSample"]
        if verdict == "plugin":
            assert report.ok
            assert (finding.severity, finding.rule) == ("note", "plugin")
            assert "register_plugins" in finding.todo
        else:
            assert (finding.severity, finding.rule) == ("error", "body")
            assert report.errors == [finding]
            assert f"target='{target}'" in finding.todo
            assert "load the plugins" in finding.todo
            assert "plugins=False" in finding.todo


def test_bodies_without_a_guard(tmp_path):
    """As other versions of svexport write them: TensorRT would run them for the plugin."""
    svexport.export(Sampler(), path=tmp_path / "m.onnx", opset=11, verify=False)
    old = onnx.load(tmp_path / "m.onnx")
    (body,) = old.functions
    del body.node[:]
    body.node.extend([helper.make_node("Identity", [body.input[0]], [body.output[0]])])
    (error,) = check(old, "10.1").errors
    assert "taken for the plugin" in error.came
    newer = check(old, "10.7")
    assert newer.ok
    assert [finding.rule for finding in newer.warnings] == ["body"]


def test_a_node_that_no_version_has_a_plugin_for(tmp_path):
    """It is in the file because it was asked for; its body is ONNX Runtime's all the same."""
    report = svexport.export(Sampler(), path=tmp_path / "m.onnx", opset=11, plugins=["einsum"], verify=False)
    assert [n.type for n in report.svexport_nodes if not n.lowered] == ["SvEinsum"]
    for target in ("8.4", "10.1", "11.0"):
        (error,) = check(tmp_path / "m.onnx", target).errors
        assert (error.rule, error.op) == ("svexport_node", "SvEinsum")
        assert "svexport lower FILE -o OUT --ops einsum" in error.todo


@pytest.mark.parametrize("opset", [11, 18])
def test_ops_without_a_plugin_do_not_stay(tmp_path, opset):
    """Two products of one shape and different equations, of which TensorRT would make the first one twice."""

    class Net(nn.Module):
        def forward(self, x, y):
            return torch.einsum("bij,bjk->bik", x, y) + torch.einsum("bij,bkj->bik", x, y)

    args = (torch.randn(2, 4, 4), torch.randn(2, 4, 4))
    report = svexport.export(Net(), args, tmp_path / "m.onnx", opset=opset)
    assert report.verified
    assert all(n.lowered for n in report.svexport_nodes)
    assert not onnx.load(tmp_path / "m.onnx").functions
    assert check(tmp_path / "m.onnx", "10.1").ok


@pytest.mark.parametrize(
    ("change", "rule", "severities"),
    [
        ("plugin_namespace", "plugin_namespace", {"8.4": "error", "10.0": "error", "10.12": "warning"}),
        ("align_corners", "attributes", {"8.4": "error", "10.0": "error", "10.12": "error"}),
    ],
)
def test_attributes_that_a_plugin_needs(tmp_path, change, rule, severities):
    svexport.export(Sampler(), path=tmp_path / "m.onnx", opset=11, target="8.4", verify=False)
    changed = onnx.load(tmp_path / "m.onnx")
    (sample,) = [n for n in changed.graph.node if n.op_type == "SvGridSample"]
    kept = [a for a in sample.attribute if a.name != change]
    del sample.attribute[:]
    sample.attribute.extend(kept)
    for target, severity in severities.items():
        (finding,) = found(check(changed, target), rule)
        assert (finding.severity, finding.node) == (severity, sample.name)


def test_nodes_that_this_svexport_does_not_have():
    report = check(model([node("SvWarp", "x", "y", domain="svexport")], domains=["svexport"]), "8.4")
    assert report.verdicts == {"unsupported": 1}
    assert "upgrade svexport" in report.errors[0].todo


def test_plugins_of_others():
    nodes = [node("EfficientNMS_TRT", "x", "y", plugin_namespace=""), node("Warp", "y", "z", domain="mine")]
    report = check(model(nodes, outputs=["z"], domains=["mine"]), "8.4")
    assert report.ok
    assert report.verdicts == {"unknown plugin": 2}
    one, other = found(report, "unknown_plugin")
    assert one.severity == other.severity == "warning"
    assert "initLibNvInferPlugins" in one.todo
    assert other.came.startswith("mine::Warp")


def test_op_types_that_shadow_those_of_onnx():
    nodes = [node("LayerNormalization", "x scale", "y", domain="com.example")]
    broken = model(nodes, constants={"scale": np.ones(3, np.float32)}, domains=["com.example"])
    report = check(broken, "8.6")
    (finding,) = found(report, "shadowing")
    assert "taken for ONNX's" in finding.came
    assert not found(check(broken, "8.4"), "shadowing")  # which looks for a plugin
    broken.graph.node[0].attribute.append(helper.make_attribute("plugin_namespace", "mine"))
    assert found(check(broken, "10.15"), "shadowing")
    assert check(broken, "10.16").verdicts == {"unknown plugin": 1}  # which is asked for first


def test_the_worst_of_a_node_counts():
    """Its rank is wrong in the first of two restrictions, of which the second is kept."""
    constants = {"w": np.ones((3, 4), np.float32)}
    report = check(model([node("Gemm", "x w", "y")], [info("x", shape=[1, 2, 3])], constants=constants), "8.4")
    assert report.verdicts == {"restricted": 1}
    assert report.nodes == {"Gemm": 1}


FUNCTION = helper.make_function("mine", "Twice", ["a"], ["b"], [node("Add", "a a", "b")], [helper.make_opsetid("", 13)])


def test_local_functions():
    twice = model([node("Twice", "x", "y", domain="mine")], functions=[FUNCTION], domains=["mine"])
    before, after = check(twice, "8.6"), check(twice, "9.0")
    assert (before.ok, before.verdicts) == (False, {"unsupported": 1})
    assert "inline" in before.errors[0].todo
    assert (after.ok, after.verdicts) == (True, {"native": 1, "body": 1})

    called = onnx.FunctionProto()
    called.CopyFrom(FUNCTION)
    called.node[0].op_type = "Det"
    (error,) = check(model(twice.graph.node, functions=[called], domains=["mine"]), "9.0").errors
    assert (error.op, error.where) == ("Det", "function mine::Twice")

    called.name = "Relu"
    shadowed = model([node("Relu", "x", "y", domain="mine")], functions=[called], domains=["mine"])
    assert found(check(shadowed, "9.0"), "shadowed_function")
    overloaded = model(twice.graph.node, functions=[FUNCTION, FUNCTION], domains=["mine"])
    (error,) = check(overloaded, "9.0").errors
    assert (error.rule, error.node) == ("overloads", "the_Twice")
    assert "the first is taken for all" in error.came


@pytest.mark.parametrize("formal", ["y", "z", "w"])
def test_inputs_of_functions_that_are_named_like_a_tensor_of_the_graph(formal):
    """The parser gives them that tensor, whatever the node has: an input, a constant, a result."""
    body = [node("Mul", f"{formal} {formal}", "b")]
    square = helper.make_function("mine", "Square", [formal], ["b"], body, [helper.make_opsetid("", 13)])
    nodes = [node("Relu", "y", "z"), node("Square", "x", "v", domain="mine"), node("Sum", "v z w", "u")]
    constants = {"w": np.ones((2, 3), np.float32)}
    made = model(nodes, ["x", "y"], ["u"], constants, functions=[square], domains=["mine"])
    (error,) = check(made, "10.1").errors
    assert (error.rule, error.node) == ("captured_names", "the_Square")
    assert repr(formal) in error.came
    nodes[1].input[0] = formal  # itself
    same = model(nodes, ["x", "y"], ["u"], constants, functions=[square], domains=["mine"])
    assert check(same, "10.1").ok


def test_functions_with_constants():
    """The parser reads them after the function is gone."""
    body = [helper.make_node("Constant", [], ["two"], value_float=2.0), node("Mul", "a two", "b")]
    double = helper.make_function("mine", "Double", ["a"], ["b"], body, [helper.make_opsetid("", 13)])
    made = model([node("Double", "x", "y", domain="mine")], functions=[double], domains=["mine"])
    errors = check(made, "10.1").errors
    assert {error.rule for error in errors} >= {"function_constants"}
    assert "inline" in errors[0].todo
    assert check(onnx.inliner.inline_local_functions(made), "10.1").ok


def test_functions_of_which_an_input_is_absent():
    body = [node("Clip", "a low", "b")]
    clip = helper.make_function("mine", "AtLeast", ["a", "low"], ["b"], body, [helper.make_opsetid("", 13)])
    made = model([node("AtLeast", "x", "y", domain="mine")], functions=[clip], domains=["mine"])
    (error,) = check(made, "10.1").errors
    assert (error.rule, error.came) == ("function_inputs", "1 of them")


def test_functions_that_call_themselves():
    again = onnx.FunctionProto()
    again.CopyFrom(FUNCTION)
    again.node.append(node("Twice", "b", "c", domain="mine"))
    report = check(model([node("Twice", "x", "y", domain="mine")], functions=[again], domains=["mine"]), "10.0")
    assert report.verdicts["body"] == 2


def test_nested_graphs():
    inner = helper.make_graph([node("Det", "x", "z")], "inner", [], [info("z", shape=[])])
    other = helper.make_graph(
        [helper.make_node("ReduceSum", ["x"], ["w"], keepdims=0)], "other", [], [info("w", shape=[])]
    )
    given = ["x", info("go", TensorProto.BOOL, [])]
    report = check(model([node("If", "go", "y", then_branch=inner, else_branch=other)], given), "8.4")
    (error,) = report.errors
    assert (error.op, error.node, error.where) == ("Det", "the_Det", "the_If")
    assert report.nodes == {"Det": 1, "If": 1, "ReduceSum": 1}


def test_constants_of_the_graph_around():
    """A branch may take its bias from outside."""
    weights = {"w": np.ones((2, 3, 1, 1), np.float32), "b": np.ones(2, np.float32)}
    conv = helper.make_graph([node("Conv", "x w b", "z")], "conv", [], [info("z", shape=[1, 2, 4, 4])])
    other = helper.make_graph([node("Conv", "x w", "u")], "other", [], [info("u", shape=[1, 2, 4, 4])])
    given = [info("x", shape=[1, 3, 4, 4]), info("go", TensorProto.BOOL, [])]
    nested = model([node("If", "go", "y", then_branch=conv, else_branch=other)], given, constants=weights)
    assert not found(check(nested, "8.4"), "constant_B")
    conv.node[0].input[2] = "x"
    nested = model([node("If", "go", "y", then_branch=conv, else_branch=other)], given, constants=weights)
    assert found(check(nested, "8.4"), "constant_B")


@pytest.mark.parametrize(
    ("opset", "target", "severity"),
    [(18, "8.4", "warning"), (17, "8.4", None), (21, "10.0", "warning"), (24, "10.15", None), (8, "8.4", "warning")],
)
def test_opset(opset, target, severity):
    findings = found(check(model([node("Relu", "x", "y")], opset=opset), target), "opset")
    assert [finding.severity for finding in findings] == [severity] * (severity is not None)
    assert all("export with opset=" in finding.todo for finding in findings)


@pytest.mark.parametrize(
    ("dtype", "target", "severity"),
    [
        *[(TensorProto.BFLOAT16, "8.6", "error"), (TensorProto.BFLOAT16, "9.0", None)],
        *[(TensorProto.FLOAT8E4M3FN, "8.6", "error"), (TensorProto.FLOAT8E4M3FN, "10.0", None)],
        *[(TensorProto.UINT8, "8.4", "error"), (TensorProto.UINT8, "8.5", None)],
        *[
            (TensorProto.INT16, "11.0", "error"),
            (TensorProto.STRING, "11.0", "error"),
            (TensorProto.INT4, "9.3", "error"),
        ],
        *[(TensorProto.DOUBLE, "10.0", "warning"), (TensorProto.FLOAT16, "8.4", None)],
    ],
)
def test_data_types(dtype, target, severity):
    report = check(model([node("Identity", "x", "y")], [info("x", dtype)], [info("y", dtype)]), target)
    findings = found(report, "data_type")
    assert [finding.severity for finding in findings] == [severity] * (severity is not None)
    assert all("'x'" in finding.came for finding in findings)


def test_uint8_inside():
    nodes = [node("Cast", "x", "bytes", to=TensorProto.UINT8), node("Cast", "bytes", "y", to=FLOAT)]
    (finding,) = found(check(model(nodes), "8.6"), "data_type")
    assert "'bytes'" in finding.came
    nodes = [node("QuantizeLinear", "x s z", "bytes"), node("DequantizeLinear", "bytes s z", "y")]
    quantized = model(nodes, constants={"s": np.float32(0.5), "z": np.uint8(0)})
    assert not found(check(quantized, "8.6"), "data_type")


def test_sequences_as_inputs():
    sequence = helper.make_tensor_sequence_value_info("x", FLOAT, [2])
    report = check(model([node("SequenceAt", "x i", "y")], [sequence], constants={"i": np.int64(0)}), "10.0")
    assert found(report, "data_type")[0].came == "'x' is a sequence"
    assert report.verdicts == {"unsupported": 1}


def test_int64_that_int32_does_not_hold():
    limits = {"start": [0], "end": [2**63 - 1], "axis": [0], "large": [5, -(2**40)], "small": [2**31 - 1]}
    constants = {name: np.array(value, np.int64) for name, value in limits.items()}
    nodes = [node("Slice", "x start end axis", "y"), node("Add", "large small", "z")]
    narrow = model(nodes, [info("x", INT64)], [info("y", INT64, None), info("z", INT64, [2])], constants)
    (finding,) = found(check(narrow, "8.6"), "int64_range")  # and not the end of a slice, which the clamped one is too
    assert finding.came == f"'large' holds {-(2**40)}, which is clamped"
    assert [f.severity for f in found(check(narrow, "8.6"), "int64_binding")] == ["note"]
    assert not [f for f in check(narrow, "9.0").findings if f.rule.startswith("int64")]
    inline = model([helper.make_node("Constant", [], ["y"], value_ints=[2**31])], [], [info("y", INT64, [1])])
    assert "2147483648" in found(check(inline, "8.4"), "int64_range")[0].came


def test_external_data(tmp_path):
    large = model([node("Add", "x w", "y")], constants={"w": np.ones((2, 3), np.float32)})
    onnx.save(large, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    (finding,) = found(check(tmp_path / "m.onnx", "8.4"), "external_data")
    assert finding.severity == "note"
    (tmp_path / "w.bin").unlink()
    (finding,) = found(check(tmp_path / "m.onnx", "8.4"), "external_data")
    assert (finding.severity, finding.came) == ("error", "no such file")
    outside = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    for entry in outside.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = "../../etc/passwd"
    assert found(check(outside, "8.4"), "external_data")[0].severity == "error"


def test_types_that_nothing_tells():
    """One finding for the tensor, which names who makes it and who would have to know."""
    nodes = [
        node("Warp", "x", "z", domain="mine"),
        node("MaxPool", "z", "y", kernel_shape=[2, 2]),
        node("Gemm", "z y", "w"),
    ]
    report = check(model(nodes, outputs=["y"], domains=["mine"]), "8.4")
    (finding,) = [f for f in found(report, "unknown_type") if f.op == "Warp"]
    assert (finding.severity, finding.node) == ("warning", "the_Warp")
    assert "'the_MaxPool', 'the_Gemm' depend on it" in finding.came
    assert report.verdicts["undecided"] == 2


@pytest.mark.parametrize("opset", [11, 17])
def test_ranks_behind_sizes_that_are_computed(opset):
    """As torch writes a group norm: back to the shape of before, which the library does not follow before opset 13."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Reshape", ["x", "groups"], ["grouped"]),
        helper.make_node("Reshape", ["grouped", "shape"], ["back"]),
        helper.make_node("Mul", ["scale", "back"], ["scaled"]),
        helper.make_node("Relu", ["scaled"], ["active"]),
        node("MaxPool", "active", "y", kernel_shape=[2, 2]),
        node("Gemm", "active active", "z"),
    ]
    constants = {"groups": np.array([0, 2, -1]), "scale": np.ones((4, 1, 1), np.float32)}
    report = check(model(nodes, [info("x", shape=[1, 4, 8, 8])], ["y", "z"], constants, opset=opset), "8.4")
    assert not found(report, "unknown_type")
    assert {(error.op, error.came) for error in report.errors} == {("Gemm", "4 dimensions ('active')")}


def test_inputs_of_unknown_rank():
    assert found(check(model([node("Relu", "x", "y")], [info("x", shape=None)]), "8.4"), "rank")


def test_clean():
    report = check(model([node("Relu", "x", "y")]), "8.4")
    assert (report.ok, report.findings, report.verdicts) == (True, [], {"native": 1})
    assert "no problem found" in str(report)
    assert repr(report) == "CheckReport(graph for TensorRT 8.4: no problem found)"


def test_equal_findings_are_one_line():
    nodes = [helper.make_node("Det", ["x"], [f"y{i}"], name=f"det_{i}") for i in range(7)]
    report = check(model([*nodes, node("Relu", "x", "y")]), "8.4")
    assert len(report.errors) == len(report.to_dict()["findings"]) == 7
    shown = str(report)
    assert "…" not in shown
    assert [name in shown for name in ("det_0", "det_2", "det_3", "and 4 more")] == [True, True, False, True]
    assert report.verdicts == {"native": 1, "unsupported": 7}
    assert report.verdict == "7 errors"


def test_the_model_stays_as_it_is(tmp_path):
    svexport.export(Sampler(), path=tmp_path / "m.onnx", opset=11, verify=False)
    loaded = onnx.load(tmp_path / "m.onnx")
    before = loaded.SerializeToString(deterministic=True)
    check(loaded, "10.12")
    assert loaded.SerializeToString(deterministic=True) == before


# What is no model -----------------------------------------------------------------------------------------------------


def bad(change):
    one = model(
        [node("Conv", "x w", "y")], [info("x", shape=[1, 3, 8, 8])], constants={"w": np.ones((2, 3, 1, 1), np.float32)}
    )
    change(one)
    return one


MALFORMED = {
    "no graph": lambda m: m.ClearField("graph"),
    "no ir_version": lambda m: m.ClearField("ir_version"),
    "no opset of the default domain": lambda m: m.ClearField("opset_import"),
    "data type 77": lambda m: setattr(m.graph.initializer[0], "data_type", 77),
    r"dimensions \[-3": lambda m: m.graph.initializer[0].dims.__setitem__(0, -3),
}


@pytest.mark.parametrize("message", MALFORMED)
def test_refused(message):
    with pytest.raises(SvexportError, match=f"not a valid ONNX file.*{message}"):
        check(bad(MALFORMED[message]), "8.4")


def test_files_that_are_no_models(tmp_path):
    good = bad(lambda m: None).SerializeToString()
    (tmp_path / "empty.onnx").touch()
    (tmp_path / "text.onnx").write_text("not a model")
    (tmp_path / "cut.onnx").write_bytes(good[:-40])
    for name in ("empty", "text", "cut"):
        with pytest.raises(SvexportError, match=f"{name}.onnx is not a valid ONNX file"):
            check(tmp_path / f"{name}.onnx", "8.4")
    with (tmp_path / "large.onnx").open("wb") as file:
        file.truncate(2**31)
    with pytest.raises(SvexportError, match="nothing reads a protobuf above 2 GiB"):
        check(tmp_path / "large.onnx", "8.4")
    with pytest.raises(SvexportError, match="no such file"):
        check(tmp_path / "absent.onnx", "8.4")
    with pytest.raises(SvexportError, match="got the folder"):
        check(tmp_path, "8.4")
    with pytest.raises(SvexportError, match="got a Sampler; export it first"):
        check(Sampler(), "8.4")
    with pytest.raises(ExportError, match="expects a TensorRT version"):
        check(tmp_path / "cut.onnx", "seven")


def huge(m):
    """A constant that says it has 2**62 numbers, and has 4 bytes."""
    tensor = m.graph.initializer[0]
    del tensor.dims[:]
    tensor.dims.extend([2**31, 2**31])
    tensor.raw_data = b"1234"


SUSPECT = {
    "missing_input": lambda m: m.graph.node[0].input.__setitem__(1, "nowhere"),
    "onnx": lambda m: m.graph.node[0].ClearField("input"),
    "opset": lambda m: setattr(m.opset_import[0], "version", 10**9),
    "": huge,
}


@pytest.mark.parametrize("rule", SUSPECT)
def test_models_that_are_not_valid_are_told_of(rule):
    report = check(bad(SUSPECT[rule]), "8.4")
    assert not rule or found(report, rule)


def test_random_bytes(tmp_path):
    """Changed anywhere, a file is refused with an error of ours, or checked."""
    svexport.export(Sampler(), path=tmp_path / "m.onnx", opset=11, verify=False)
    good = (tmp_path / "m.onnx").read_bytes()
    generator = np.random.default_rng(0)
    reports = 0
    for _ in range(150):
        changed = bytearray(good)
        for place in generator.integers(0, len(good), generator.integers(1, 4)):
            changed[place] = generator.integers(0, 256)
        (tmp_path / "changed.onnx").write_bytes(changed)
        try:
            report = check(tmp_path / "changed.onnx", str(generator.choice(["8.4", "10.0", "10.12"])))
        except SvexportError:
            continue
        reports += 1
        str(report)
        report.to_dict()
    assert reports > 5


# Cost -----------------------------------------------------------------------------------------------------------------


def work_of_a_check(count):
    """Of a file of so many nodes."""
    nodes, last = [], "x"
    kinds = [
        "Conv w b",
        "Relu",
        "Add x",
        "Resize  s",
        "Transpose",
        "MatMul m",
        "Softmax",
        "Clip low",
        "Sigmoid",
        "ReduceMean",
    ]
    for index in range(count):
        kind, *others = kinds[index % len(kinds)].split(" ")
        nodes.append(helper.make_node(kind, [last, *others], [f"t{index}"], name=f"n{index}"))
        last = f"t{index}"
    shapes = {"w": (8, 8, 1, 1), "b": (8,), "s": (4,), "m": (8, 8), "low": ()}
    constants = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    large = model(nodes, [info("x", shape=[1, 8, 8, 8])], [info(last, shape=None)], constants)
    assert sum(check(large, "8.4").nodes.values()) == count
    return calls(lambda: check(large, "8.4"))


def test_large_files_take_no_more_a_node():
    assert work_of_a_check(2000) < 2.1 * work_of_a_check(1000)


def test_files_without_our_nodes_are_checked_without_torch(tmp_path):
    onnx.save(model([node("Relu", "x", "y")]), tmp_path / "m.onnx")
    code = "import sys; from svexport.cli import main; code = main(['check', 'm.onnx', '--target', '8.4']); "
    code += "sys.exit(code or 'torch' in sys.modules)"
    root = Path(svexport.__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(root)}, check=False)
    assert run.returncode == 0


def test_file_exported_without_the_target_is_told_so(tmp_path):
    """svexport's own files alone, and only where something stands against them."""

    class Sorted(nn.Module):
        def forward(self, x):
            return x.sort(-1).values  # in ascending order, which 8.4 reads as descending

    svexport.export(Sorted(), torch.randn(2, 3), tmp_path / "m.onnx", opset=11)
    report = svexport.check(tmp_path / "m.onnx", "8.4")
    assert [finding.todo for finding in report.findings if finding.rule == "target"] == [
        'if it was exported without: svexport.export(..., target="8.4") writes nodes as this version reads them'
    ]
    other = onnx.load(tmp_path / "m.onnx")
    other.producer_name = "another"
    for file, target in ((other, "8.4"), (tmp_path / "m.onnx", "11.4")):
        report = svexport.check(file, target)
        assert report.ok == (target == "11.4")
        assert not [finding for finding in report.findings if finding.rule == "target"]
