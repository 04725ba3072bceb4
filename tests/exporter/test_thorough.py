"""Faults that ``verify="thorough"`` plants, and the inputs it finds for those that ordinary inputs do not reveal."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import svexport
from svexport.cli import main
from svexport.exporter import thorough
from svexport.exporter.faults import Fault, faults_of
from svexport.exporter.planted import Planted
from svexport.exporter.precise import Precise
from svexport.exporter.rounding import Rounding
from svexport.exporter.search import SEARCHES, Units, changed, near, reaching, searched, stepped
from svexport.exporter.verify import Verification
from svexport.tracing.quantizers import Copies

HELD = [(1e-3, 1e-4)]
BOTH_EXPORTERS = pytest.mark.parametrize("opset", [11, 18])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y = nn.functional.relu6(self.conv(x))
        y = torch.where(mask[:, None], y, y * 2)
        return self.head(y.mean((2, 3))).softmax(-1), y.clamp(max=100.0)


@BOTH_EXPORTERS
def test_faults_that_nothing_can_notice_are_named(opset, tmp_path) -> None:
    """No number is above 12 where the last clamp is: what is done to it is missed, and all else is noticed."""
    inputs = torch.randn(2, 3, 6, 6), torch.ones(2, 6, 6, dtype=torch.bool)
    report = svexport.export(Net().eval(), inputs, tmp_path / "m.onnx", opset=opset, verify="thorough")
    assert report.verified
    faults = report.faults
    assert faults.planted > 30
    assert faults.noticed + faults.found + len(faults.missed) == faults.planted
    assert faults.missed
    assert all(missed.startswith(("Min ", "Clip ")) for missed in faults.missed), faults.missed
    if opset == 18:
        assert all("test_thorough.py:" in missed for missed in faults.missed)
    assert f"{faults.noticed + faults.found} of {faults.planted} planted faults noticed" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["faults"]["planted"] == faults.planted


class Ends(nn.Module):
    """Has ends that default inputs do not reach; in the file a fault leaves one out."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        traced = self.fault if torch.jit.is_tracing() or torch.compiler.is_exporting() else ""
        x = self.linear(x)
        if self.fault == "large":
            return x * 2 if traced else x.clamp(max=5e3) * 2
        return x if traced else x + (x.mean() - 1e3).relu()


@pytest.mark.parametrize("fault", ["large", "steep"])
def test_inputs_are_searched_that_notice(fault, tmp_path) -> None:
    """A file that a default verification lets pass is refused."""
    torch.manual_seed(0)
    model, x = Ends(fault), torch.rand(3, 4)
    assert svexport.export(model, x, tmp_path / "m.onnx", opset=11).verified
    with pytest.raises(svexport.VerificationError, match=r"on searched \d+ inputs"):
        svexport.export(model, x, tmp_path / "other.onnx", opset=11, verify="thorough")
    assert not (tmp_path / "other.onnx").exists()
    model.fault = ""
    assert svexport.export(model, x, tmp_path / "m.onnx", opset=11, verify="thorough").faults.missed == []


def test_steps_reach_the_other_side() -> None:
    class Far(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.mean() - 40).relu() + (x[0] + 90).abs().clamp(max=500)

    x = torch.rand(2, 3)
    steps = list(stepped(Far(), [x]))
    assert any(s.mean() > 40 or (s[0] < -90).any() for (s,) in steps)
    assert not list(stepped(nn.Linear(3, 3), [x]))


def test_steps_reach_every_channel() -> None:
    """Of eight three are dead on all inputs but those far along one direction, and the call itself sees both sides."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 8)
            with torch.no_grad():
                self.linear.bias[:3] = -20.0

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).relu()

    model, x, units = Hidden(), torch.randn(4, 16), Units()
    assert not (model(x) > 0).any(0)[:3].any()
    found = [y for _ in range(24) for (y,) in reaching(model, [x], units)]
    assert torch.stack([(model(y) > 0).any(0) for y in found]).any(0).all()
    assert not list(reaching(nn.Linear(16, 8), [x], Units()))


def test_changes_stay_of_the_kind() -> None:
    given = [torch.randn(2, 3), torch.randint(0, 5, (4,)), torch.ones(3, dtype=torch.int64), torch.ones(2, 2) > 0]
    now, seen = given, set()
    for _ in range(200):
        now = changed(now, given, given, {1: 7})
        assert [(t.shape, t.dtype) for t in now] == [(t.shape, t.dtype) for t in given]
        assert now[0].isfinite().all()
        assert now[1].min() >= 0
        seen.update(now[1].tolist())
        assert set(now[2].tolist()) <= {0, 1}
    assert seen == set(range(7))


class Slightly(nn.Module):
    """Sums, of which the file leaves out a factor just below 1: by some rounding errors."""

    def __init__(self, traced: float) -> None:
        super().__init__()
        self.traced, self.linear = traced, nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x.tanh())
        return x * (self.traced if torch.jit.is_tracing() or torch.compiler.is_exporting() else 0.999997)


def test_faults_just_above_the_rounding(tmp_path) -> None:
    """What no tolerance of a default verification tells from rounding."""
    torch.manual_seed(0)
    x = torch.randn(3, 32)
    assert svexport.export(Slightly(1.0), x, tmp_path / "m.onnx", opset=13).verified
    with pytest.raises(svexport.VerificationError):
        svexport.export(Slightly(1.0), x, tmp_path / "other.onnx", opset=13, verify="thorough")
    assert svexport.export(Slightly(0.999997), x, tmp_path / "m.onnx", opset=13, verify="thorough").verified


class Deep(nn.Module):
    """Layers whose rounding hides what a slightly larger ``eps`` makes of one of them."""

    def __init__(self, narrow: bool = False) -> None:
        super().__init__()
        self.layers, self.narrow = nn.ModuleList(nn.Linear(16, 16) for _ in range(6)), narrow

    def forward(self, x: Tensor) -> tuple[Tensor]:
        for layer in self.layers:
            x = layer(x).tanh()
        x = x.float() if self.narrow else x
        return (x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt(),)


def deep_file(model: Deep, eps: float) -> onnx.ModelProto:
    nodes, constants, x = [], {"eps": np.array(eps, np.float32)}, "x"
    for i, layer in enumerate(model.layers):
        constants |= {f"w{i}": layer.weight.detach().numpy().T.copy(), f"b{i}": layer.bias.detach().numpy()}
        nodes.append(helper.make_node("MatMul", [x, f"w{i}"], [f"m{i}"]))
        nodes.append(helper.make_node("Add", [f"m{i}", f"b{i}"], [f"a{i}"]))
        nodes.append(helper.make_node("Tanh", [f"a{i}"], [x := f"x{i + 1}"]))
    nodes += [
        helper.make_node("Mul", [x, x], ["square"]),
        helper.make_node("ReduceMean", ["square"], ["mean"], axes=[-1], keepdims=1),
        helper.make_node("Add", ["mean", "eps"], ["more"], "eps_node"),
        helper.make_node("Sqrt", ["more"], ["root"]),
        helper.make_node("Div", [x, "root"], ["y"]),
    ]
    return model_of(*nodes, inputs={"x": TensorProto.FLOAT}, outputs=["y"], **constants)


def test_files_in_float64() -> None:
    """A file that is right differs by far less than torch's rounding, and one with another constant by more."""
    torch.manual_seed(0)
    model, x = Deep(), torch.randn(3, 16)
    copies = Copies(model, changes=False, random=False)
    with torch.no_grad():
        single = model(x)
        precise = Precise(deep_file(model, 1e-3), copies)
        there = precise.expected([x], single)
        recording = precise.record(there)
        (atol,) = (held[1] for held in there.held)
        assert atol < 1e-4
        assert float((there.expected[0] - torch.from_numpy(recording.outputs[0])).abs().max()) < atol / 1000
        assert precise.differing(there, recording) == []
        wrong = Precise(deep_file(model, 1.01e-3), copies)
        assert wrong.differing(there, wrong.record(there)) == [0]


def test_models_that_round_to_float32_are_not_compared_in_float64() -> None:
    model, x = Deep(narrow=True), torch.randn(3, 16)
    precise = Precise(deep_file(model, 1e-3), Copies(model, changes=False, random=False))
    with torch.no_grad():
        assert precise.expected([x], model(x)) is None


class Above(nn.Module):
    """Counts what no default input reaches, beside numbers that float64 compares."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh(), (x > 500).to(torch.int64)


def test_some_inputs_are_like_the_given_ones() -> None:
    """What fits together stays so: of a projection and points one is as it was, and neither always."""
    torch.manual_seed(0)
    given = [torch.eye(4), torch.rand(20, 4), torch.arange(5)]
    kept = [[torch.equal(a, b) for a, b in zip(found, given, strict=True)] for found in near(given, {2: 9}, 40)]
    assert not any(map(all, kept))
    for place in range(3):
        assert 8 < sum(each[place] for each in kept) < 36
    for found in near(given, {2: 9}, 40):
        assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(found, given, strict=True))
        assert 0 <= int(found[2].min()) <= int(found[2].max()) < 9


def test_inputs_get_as_small_as_floating_point_numbers() -> None:
    """Each norm on the way makes them some hundred times as large, and its epsilon shows below that only."""
    torch.manual_seed(0)
    largest = sorted(float(x.abs().amax()) for (x,) in searched([torch.randn(64)], {}, SEARCHES))
    below = [x for x in largest if 0 < x < 1e-11]
    assert min(below) < 1e-35
    assert all(later / earlier < 1e4 for earlier, later in itertools.pairwise(below))
    assert sum(1e-3 < x < 1e4 for x in largest) > len(largest) / 2


def search_little(monkeypatch) -> None:
    for name, few in {"SEARCHES": 20, "NEAR": 1, "WALKS": 1, "CHANGES": 1}.items():
        monkeypatch.setattr(thorough, name, few)


def test_whole_numbers_beside_others(tmp_path, monkeypatch) -> None:
    """Float64 does not compare whole numbers: their faults are looked for in float32."""
    torch.manual_seed(0)
    search_little(monkeypatch)
    report = svexport.export(Above(), torch.rand(8, 32), tmp_path / "m.onnx", opset=13, verify="thorough")
    assert report.faults.found
    assert not [missed for missed in report.faults.missed if "a tenth larger" in missed]


class Remembers(nn.Module):
    """Keeps a size, of which its results do not depend."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.shape[0]
        return self.linear(x).tanh()


def test_models_that_remember_are_compared_in_float64(tmp_path, monkeypatch) -> None:
    torch.manual_seed(0)
    search_little(monkeypatch)
    seen, own = [], Verification.in_float64
    monkeypatch.setattr(Verification, "in_float64", lambda *args: seen.append(own(*args)) or seen[-1])
    assert svexport.export(Remembers(), torch.randn(3, 4), tmp_path / "m.onnx", opset=13, verify="thorough").verified
    assert seen
    assert None not in seen


def test_faults_without_float64() -> None:
    """Resize that interpolates is not computed there, and one that takes the nearest is."""
    scales = np.array([1, 1, 2, 2], np.float32)
    mode = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], "resize", **mode)

    class Larger(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (nn.functional.interpolate(x, scale_factor=2.0),)

    model, x = Larger(), torch.randn(1, 2, 3, 5)
    file = model_of(node, inputs={"x": TensorProto.FLOAT}, outputs=["y"], scales=scales)
    precise, planted = Precise(file, Copies(model, changes=False, random=False)), Planted(file, {})
    there = precise.expected([x], model(x))
    recording = precise.record(there)
    off = {site.fault.kind: precise.shown(site, recording) for site in planted.sites(planted.record([x], HELD))}
    assert math.isnan(off["mode=linear"])
    assert off["nearest_mode=ceil"] > 1


def test_rounding_of_numbers_that_nearly_overflow() -> None:
    """The sum of their sizes does."""

    class Total(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x.sum(0),)

    x = torch.tensor([3e38, -3e38, 2e38, -2e38, 1e38]).repeat(4, 1).T.contiguous()
    (own,) = Rounding(Total(), [x], [x.sum(0)], errors=1.0).measured()
    assert own > 1e-7 * 3e38


def test_rounding_of_numbers_that_cancel() -> None:
    """What float32 may make of their mean in another order, beside torch's own measure of it."""

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x.mean(0),)

    x = torch.cat([torch.linspace(1e3, 3e3, 64), -torch.linspace(1e3, 3e3, 64)])[:, None].repeat(1, 4)
    x = x + torch.rand(128, 4)
    (own,) = Rounding(Mean(), [x], [x.mean(0)], errors=1.0).measured()
    in_order = torch.from_numpy(np.cumsum(x.numpy(), axis=0, dtype=np.float32)[-1] / 128)
    off = float((in_order - x.double().mean(0)).abs().max())
    assert 5 * own > off > 20 * torch.finfo(torch.float32).eps * x.mean(0).abs().max()


def model_of(*nodes: onnx.NodeProto, inputs: dict[str, int], outputs: list[str], **constants: np.ndarray):
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(name, kind, None) for name, kind in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def test_faults_are_carried_on_through_the_graph() -> None:
    """Each output beside that of a graph which has the fault from the start."""
    scale = np.array([1.0, -2.0, 3.0], np.float32)
    nodes = [
        helper.make_node("Mul", ["x", "scale"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["b"], "second"),
        helper.make_node("Sub", ["b", "x"], ["y"], "third"),
    ]
    model = model_of(*nodes, inputs={"x": TensorProto.FLOAT}, outputs=["y"], scale=scale)
    planted = Planted(model, {"second": "m.py:3"})
    x = torch.tensor([[-1.0, 2.0, 0.5], [3.0, -1.0, 0.0], [0.3, 0.2, 0.1]])
    recording = planted.record([x], HELD)
    np.testing.assert_array_equal(recording.outputs[0], (np.maximum(x.numpy() * scale, 0) - x.numpy()))
    found = {f"{site.node}: {site.fault.kind}": planted.outputs(site, recording) for site in planted.sites(recording)}
    x, scaled = x.numpy(), x.numpy() * scale
    one = scale.copy()
    one[2] = 3 * 0.5 + 0.1
    expected = {
        "first: dropped": np.maximum(x, 0) - x,
        "first: axes 0 and 1 of the result transposed": np.maximum(scaled.T, 0) - x,
        "first: constant 1 a tenth larger": np.maximum(x * (scale * 1.1 + 1e-3), 0) - x,
        "first: an element of constant 1": np.maximum(x * one, 0) - x,
        "second: dropped": scaled - x,
        "second: LeakyRelu instead": np.where(scaled < 0, scaled * 0.01, scaled) - x,
        "third: inputs 0 and 1 swapped": x - np.maximum(scaled, 0),
        "third: Add instead": x + np.maximum(scaled, 0),
    }
    assert expected.keys() <= found.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name][0], value, rtol=1e-5, err_msg=name)
    assert "m.py:3" in {str(site).rpartition(", ")[2] for site in planted.sites(recording)}
    tame = planted.record([torch.tensor([[1.0, -1.0, 2.0]])], HELD)
    assert not any(planted.shown(s, tame) > 1 for s in planted.sites(tame) if s.node == "second")


def test_values_used_inside_of_branches() -> None:
    """The branch that a fault makes another one reads values that do not depend on it, and are outputs too."""
    branches = [
        helper.make_graph(
            [helper.make_node(op, ["a", "b"], [f"{op}_taken"])],
            op,
            [],
            [helper.make_tensor_value_info(f"{op}_taken", TensorProto.FLOAT, None)],
        )
        for op in ("Add", "Sub")
    ]
    nodes = [
        helper.make_node("Neg", ["x"], ["a"]),
        helper.make_node("Relu", ["x"], ["b"]),
        helper.make_node("Not", ["c"], ["other"], "turned"),
        helper.make_node("If", ["other"], ["d"], then_branch=branches[0], else_branch=branches[1]),
        helper.make_node("Exp", ["d"], ["y"]),
    ]
    model = model_of(*nodes, inputs={"x": TensorProto.FLOAT, "c": TensorProto.BOOL}, outputs=["y", "a", "b"])
    planted, x = Planted(model, {}), torch.randn(2, 3)
    for c in (True, False):
        recording = planted.record([x, torch.tensor(c)], 3 * HELD)
        site = next(s for s in planted.sites(recording) if s.node == "turned" and s.fault.kind == "dropped")
        for _ in range(2):
            y, a, b = planted.outputs(site, recording)
            relu = x.numpy().clip(min=0)
            np.testing.assert_allclose(y, np.exp(-x.numpy() + relu if c else -x.numpy() - relu), rtol=1e-5)
            np.testing.assert_array_equal(a, -x.numpy())
            np.testing.assert_array_equal(b, relu)


def test_faults_come_and_go() -> None:
    """Each is computed as itself, also where it lies in the memory of one before it."""
    model = model_of(helper.make_node("Relu", ["x"], ["y"], "only"), inputs={"x": TensorProto.FLOAT}, outputs=["y"])
    planted, x = Planted(model, {}), torch.tensor([-1.0, 2.0])
    recording = planted.record([x], HELD)
    site = next(iter(planted.sites(recording)))
    for _ in range(5):
        for kind, expected in (("Abs", x.abs()), ("Neg", -x)):
            fault = Fault(kind, helper.make_node(kind, ["x"], ["y"], "only"))
            outputs = planted.outputs(dataclasses.replace(site, fault=fault), recording)
            np.testing.assert_array_equal(outputs[0], expected.numpy())
            del fault


def test_sizes_are_left_alone() -> None:
    """A fault before what sizes are computed from might ask for any memory."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Mul", ["s", "two"], ["t"], "sizes"),
        helper.make_node("Expand", ["x", "t"], ["y"], "expand"),
    ]
    model = model_of(*nodes, inputs={"x": TensorProto.FLOAT}, outputs=["y"], two=np.array([2], np.int64))
    planted = Planted(model, {})
    sites = list(planted.sites(planted.record([torch.rand(1)], HELD)))
    assert "sizes" not in {site.node for site in sites}


def test_faults_of_a_convolution() -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], kernel_shape=[3, 3], pads=[1, 0, 1, 0], strides=[2, 1])
    values = {"x": np.zeros((1, 4, 8, 8), np.float32), "y": np.zeros((1, 4, 4, 6), np.float32)}
    kinds = {fault.kind for fault in faults_of(node, {"w": np.ones((4, 4, 3, 3), np.float32)}, values)}
    assert {"pads=[0, 1, 0, 1]", "strides=[1, 2]", "constant 1 transposed"} <= kinds


def test_changes_without_effect_are_no_faults() -> None:
    """Momentum is of training, the dilation of one tap is at no place, and equal constants may be swapped."""
    x = np.ones((1, 4, 5, 5), np.float32)
    zeros, ones = np.zeros(4, np.float32), np.ones(4, np.float32)
    norm = helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y"], epsilon=0.5, momentum=0.9)
    constants = {"s": ones, "b": zeros, "m": zeros, "v": ones * 2}
    kinds = {fault.kind for fault in faults_of(norm, constants, {"x": x, "y": x})}
    assert not [kind for kind in kinds if kind.startswith("momentum")]
    assert {kind for kind in kinds if "swapped" in kind} == {"inputs 1 and 2 swapped"}
    assert [kind for kind in kinds if kind.startswith("epsilon")]
    conv = helper.make_node("Conv", ["x", "w"], ["y"], kernel_shape=[3, 1], pads=[2, 0, 2, 0], dilations=[2, 1])
    kinds = {fault.kind for fault in faults_of(conv, {"w": np.ones((4, 4, 3, 1), np.float32)}, {"x": x, "y": x})}
    assert {kind for kind in kinds if kind.startswith("dilations")} == {"dilations=[1, 1]"}


def test_command_line(tmp_path, capsys) -> None:
    arguments = [
        "export",
        "torch.nn:ReLU",
        "--input",
        "input=2x3",
        "-o",
        str(tmp_path / "m.onnx"),
        "--verify",
        "thorough",
    ]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["faults"]["planted"] > 0
