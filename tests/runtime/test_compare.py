"""Comparisons of torch with engines: agreement, injected errors, and the layer where errors begin."""

from __future__ import annotations

import copy
import json
import re
import sys
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

import svexport
from svexport.errors import ExportError, SvexportError, UnsupportedError
from svexport.exporter.trace import torch_export_first
from svexport.runtime import EngineError, OnnxEngine, load
from svexport.runtime import layers as layers_module
from svexport.runtime.compare import Comparison, compare

pytestmark = pytest.mark.core


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.act(self.bn(self.conv(x)))) + x


class Waves(nn.Module):
    """Outputs of one shape, returned in another order than they are computed in."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second, third = x * 2, x.sin(), x.cos()
        return second, first, third


class Result(NamedTuple):
    scores: Tensor
    mask: Tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        activation = nn.Sequential(nn.ReLU(), nn.Identity())
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), activation)
        self.blocks = nn.ModuleList([Block(8), Block(8)])
        self.shared = nn.Conv2d(8, 8, 1)
        self.functional = nn.Conv2d(8, 8, 1)  # its batch norm is not a module
        self.norm = nn.LayerNorm(8)
        self.waves = Waves()
        self.unused = nn.Linear(4, 4)
        self.head = nn.ModuleDict({"fc": nn.Linear(8, 5)})

    def forward(self, image: Tensor, scale: Tensor) -> Result:
        x = self.stem(image)
        for block in self.blocks:
            x = block(x)
        x = self.shared(self.shared(x))
        x = F.batch_norm(self.functional(x), self.mean, self.var)
        a, b, c = self.waves(self.norm(x.permute(0, 2, 3, 1)))
        x = self.head["fc"]((a + b * 0.1 - c).mean((1, 2))) * scale
        return Result(x, x > 0)


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    model = Net()
    model.register_buffer("mean", torch.randn(8) * 0.1)
    model.register_buffer("var", torch.rand(8) + 0.5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    return model.eval()


@pytest.fixture(scope="module")
def args() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 3, 13, 11), torch.tensor([[1.5]])


@pytest.fixture(scope="module", params=[("torchscript", 11), ("converted", 11), ("exported", 18)], ids=lambda p: p[0])
def file(request, net, args, tmp_path_factory):
    way, opset = request.param
    path = tmp_path_factory.mktemp("net") / f"net_{way}.onnx"
    with torch_export_first(way != "torchscript"):
        svexport.export(net, args, path, opset=opset, verify=False)
    return path


def last_node(model: onnx.ModelProto, module: str, fits: Any) -> onnx.NodeProto:
    """The last fitting node that a module computes with."""
    found = []
    for node in model.graph.node:
        spaces = [entry.value for entry in node.metadata_props if entry.key == "namespace"]
        if module in (spaces[0] if spaces else node.name.replace("/", ".")) and fits(node):
            found.append(node)
    return found[-1]


def disturbed(path: Any, module: str, tmp_path: Any) -> Any:
    """A copy of the file in which one weight of one module is off by a third."""
    model = onnx.load(str(path))
    weights = {tensor.name: tensor for tensor in model.graph.initializer if tensor.dims and tensor.data_type == 1}
    node = last_node(model, module, lambda node: any(name in weights for name in node.input))
    name = next(name for name in node.input if name in weights)
    values = numpy_helper.to_array(weights[name]).copy()
    values.flat[0] += 0.3
    fresh = numpy_helper.from_array(values, f"{name}_disturbed")
    model.graph.initializer.append(fresh)
    node.input[list(node.input).index(name)] = fresh.name
    wrong = tmp_path / f"{module}.onnx"
    onnx.save(model, str(wrong))
    return wrong


# ------------------------------------------------------------------------------------------------------- agreement


def test_outputs(net, args, file):
    comparison = compare(net, load(file), args)
    assert isinstance(comparison, Comparison)
    assert comparison.ok
    assert [p.name for p in comparison.outputs] == ["scores", "mask"]
    assert comparison.outputs[0].shape == (2, 5)
    assert comparison.outputs[1].dtype == "bool"
    assert comparison.layers == []
    assert comparison.first is None
    assert comparison.worst.name == "scores"
    assert comparison.notes == []
    assert (comparison.model, comparison.engine) == ("Net", file.name)


def test_every_way_to_give_arguments(net, args, file):
    image, scale = args
    for given in (args, {"image": image, "scale": scale}, (image, {"scale": scale})):
        assert compare(net, file, given).ok
    assert compare(net, str(file), args).ok
    assert compare(net, onnx.load(str(file)), args).ok


LAYERS = {
    "stem.0+1",
    "stem.2",
    "stem",
    "blocks.0.conv+bn",
    "blocks.0.act",
    "blocks.0",
    "blocks.1.conv+bn",
    "blocks.1.act",
    "blocks.1",
    "shared (1)",
    "shared (2)",
    "norm",
    "waves[0]",
    "waves[1]",
    "waves[2]",
    "head.fc",
}


def test_every_layer(net, args, file):
    comparison = compare(net, file, args, layers=True)
    names = [p.name for p in comparison.layers]
    assert LAYERS.issubset(names)
    assert [p.name for p in comparison.layers if not p.ok] == []
    assert comparison.first is None
    assert max(p.max_abs for p in comparison.layers) < 1e-4
    # In order of execution, and the folded ones once.
    order = ["stem.0+1", "stem", "blocks.0.conv+bn", "blocks.0", "blocks.1", "shared (1)", "shared (2)", "norm"]
    assert [name for name in names if name in order] == order
    assert not {"stem.0", "stem.1", "blocks.0.conv", "blocks.0.bn", "blocks.0.drop"}.intersection(names)


def test_a_conv_folded_with_something_that_is_no_module_is_no_error(net, args, file):
    comparison = compare(net, file, args, layers=["functional", "norm"])
    assert [p.name for p in comparison.layers] == ["norm"]
    assert any("functional" in note for note in comparison.notes)


def test_chosen_layers(net, args, file):
    comparison = compare(net, file, args, layers=["blocks.1", "stem.1", "unused"])
    assert [p.name for p in comparison.layers] == ["stem.0+1", "blocks.1"]
    assert comparison.notes == ["not compared: unused (never called, or scripted)"]


def test_scripted_submodules_are_passed_over():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scripted = torch.jit.script(nn.ReLU())
            self.eager = nn.Tanh()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"b": self.scripted(x) - torch.relu(x) + self.eager(x) - torch.tanh(x) + x + 1, "a": x * 2}

    model = Mixed()
    comparison = compare(model, copy.deepcopy(model), torch.randn(3), layers=True)
    assert comparison.ok
    assert [p.name for p in comparison.layers] == ["eager"]
    comparison = compare(model, two_outputs("b", "a"), torch.randn(3), layers=["scripted"])
    assert comparison.notes == ["not compared: scripted (never called, or scripted)"]


def test_groups_of_layers_give_the_same(net, args, file, monkeypatch):
    whole = compare(net, file, args, layers=True)
    monkeypatch.setattr(layers_module, "CHUNK_BYTES", 10_000)
    assert compare(net, file, args, layers=True).layers == whole.layers


def test_the_model_is_left_as_it_was(net, args, file):
    net.stem.train()
    try:
        before = {name: value.clone() for name, value in net.state_dict().items()}
        modes = [module.training for module in net.modules()]
        image = args[0].clone().requires_grad_()
        assert compare(net, file, (image, args[1]), layers=True).ok  # batch norm in eval mode all the same
        assert [module.training for module in net.modules()] == modes
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
        assert image.grad is None
        assert torch.is_grad_enabled()
    finally:
        net.eval()


def test_hooks_are_removed_after_an_error(net, args, file):
    with pytest.raises(RuntimeError, match="to have 3 channels, but got 2"):
        compare(net, file, (args[0][:, :2], args[1]), layers=True)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("module", "begins"),
    [
        ("stem.0", "stem.0+1"),
        ("blocks.1.conv", "blocks.1.conv+bn"),
        ("shared", "shared (2)"),
        ("norm", "norm"),
        ("fc", "head.fc"),
    ],
)
def test_an_error_is_found_where_it_begins(net, args, file, module, begins, tmp_path):
    nodes = onnx.load(file).graph.node
    if any(entry.key == "namespace" for node in nodes for entry in node.metadata_props):
        # by torch.export, which an old torch may refuse: there the folded Conv is its norm's
        module = {"stem.0": "stem.1", "blocks.1.conv": "blocks.1.bn"}.get(module, module)
    comparison = compare(net, disturbed(file, module, tmp_path), args, layers=True)
    assert not comparison.ok
    assert comparison.worst.name == "scores"
    assert comparison.first is not None
    assert comparison.first.name == begins
    before = [p.name for p in comparison.layers[: comparison.layers.index(comparison.first)]]
    after = comparison.layers[comparison.layers.index(comparison.first) :]
    assert all(name != begins for name in before)
    assert sum(not p.ok for p in after) >= len(after) // 2
    shown = str(comparison)
    assert re.search(rf"{re.escape(begins)} .*FAIL <- first", shown)
    assert shown.count("<- first") == 1


def test_a_missing_operator_is_found(net, args, file, tmp_path):
    model = onnx.load(str(file))
    last_node(model, "blocks.0.act", lambda node: node.op_type == "Relu").op_type = "Abs"
    onnx.save(model, str(tmp_path / "abs.onnx"))
    first = compare(net, tmp_path / "abs.onnx", args, layers=True).first
    assert first is not None
    assert first.name == "blocks.0.act"


def test_a_wrong_output_alone(net, args, file, tmp_path):
    model = onnx.load(str(file))
    next(node for node in model.graph.node if "mask" in node.output).op_type = "Less"
    onnx.save(model, str(tmp_path / "less.onnx"))
    comparison = compare(net, tmp_path / "less.onnx", args)
    assert [p.ok for p in comparison.outputs] == [True, False]
    assert comparison.worst.name == "mask"
    assert "1 of 2 outputs differ" in str(comparison)


def test_tolerances(net, args, file):
    assert not compare(net, file, args, rtol=0, atol=0).ok
    assert compare(net, file, args, rtol=0, atol=1.0).ok


class Named(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"b": x + 1, "a": x * 2}


def two_outputs(first: str, second: str) -> onnx.ModelProto:
    """``first`` is x + 1 and ``second`` x * 2."""
    constants = [numpy_helper.from_array(np.float32(number), name) for number, name in ((1, "one"), (2, "two"))]
    nodes = [helper.make_node("Add", ["x", "one"], [first]), helper.make_node("Mul", ["x", "two"], [second])]
    infos = [helper.make_tensor_value_info(name, 1, [3]) for name in ("x", first, second)]
    model = helper.make_model(
        helper.make_graph(nodes, "graph", infos[:1], infos[1:], constants), opset_imports=[helper.make_opsetid("", 13)]
    )
    model.ir_version = 8
    return model


def test_outputs_are_matched_by_name_then_by_position():
    x = torch.randn(3)
    assert compare(Named(), two_outputs("b", "a"), x).ok
    assert compare(Named(), two_outputs("p", "q"), x).ok
    assert not compare(Named(), two_outputs("a", "b"), x).ok  # the names say otherwise
    swapped = two_outputs("b", "a")
    swapped.graph.output.insert(0, swapped.graph.output.pop())
    assert compare(Named(), swapped, x).ok


def test_other_numbers_of_inputs_or_outputs():
    engine = OnnxEngine(two_outputs("b", "a"))
    with pytest.raises(SvexportError, match=r"torch returns 1 tensors \(output\), .* returns 2 \(b, a\)"):
        compare(nn.Identity(), engine, torch.randn(3))

    class Two(nn.Module):
        def forward(self, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
            return p, q

    with pytest.raises(SvexportError, match=r"takes 1 inputs \(x\), the model 2 \(p, q\)"):
        compare(Two(), engine, (torch.randn(3), torch.randn(3)))
    with pytest.raises(EngineError, match=r"expects float32\[3\], got float32\[4\]"):
        compare(Named(), engine, torch.randn(4))
    with pytest.raises(ExportError, match="do not fit"):
        compare(Named(), engine, (torch.randn(3), torch.randn(3)))
    with pytest.raises(SvexportError, match=r"expected a torch\.nn\.Module first"):
        compare(engine, Named(), torch.randn(3))  # type: ignore[arg-type]


def test_an_engine_of_another_precision():
    half = two_outputs("b", "a")
    for info in (*half.graph.input, *half.graph.output):
        info.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    for tensor in half.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    comparison = compare(Named(), half, torch.randn(3))
    assert comparison.ok
    assert comparison.rtol == comparison.atol == 16 * torch.finfo(torch.float16).eps
    assert comparison.outputs[0].max_abs > 0
    assert comparison.notes == [
        "input x is float16, float32 in torch",
        "output b is float16, float32 in torch",
        "output a is float16, float32 in torch",
    ]


def test_a_model_that_works_on_its_input_in_place():
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"b": x.add_(1), "a": x.sub(1).mul(2)}

    x = torch.randn(3)
    before = x.clone()
    assert compare(InPlace(), two_outputs("b", "a"), x).ok
    assert torch.equal(x, before)


# ----------------------------------------------------------------------------------------------------- torch models


def test_a_second_torch_model(net, args):
    other = copy.deepcopy(net)
    other.train()
    same = compare(net, other, args, layers=True)
    assert same.ok
    assert same.engine == "Net"
    assert other.training
    assert {"stem.0", "blocks.0.bn", "shared (2)", "head.fc"}.issubset(p.name for p in same.layers)
    with torch.no_grad():
        other.blocks[1].bn.bias += 0.5
    assert compare(net, other, args).layers == []
    different = compare(net, other, args, layers=True)
    assert not different.ok
    assert different.first is not None
    assert different.first.name == "blocks.1.bn"


def test_a_function(net, args):
    assert compare(net, lambda image, scale: net(image, scale), args).ok
    assert compare(net, net.forward, {"image": args[0], "scale": args[1]}).engine == "forward"
    assert not compare(net, lambda image, scale: net(image, scale * 2), args).ok
    with pytest.raises(UnsupportedError, match="layers needs"):
        compare(net, lambda image, scale: net(image, scale), args, layers=True)


def test_unknown_layers(net, args, file):
    with pytest.raises(SvexportError, match=r"no submodule 'block\.1'; did you mean blocks\.1"):
        compare(net, file, args, layers=["block.1"])


# --------------------------------------------------------------------------------------------------------- showing


@pytest.fixture(scope="module")
def comparison(net, args) -> Comparison:
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.norm.weight[0] += 0.3
    return compare(net, other, args, layers=True)


def test_text(comparison):
    lines = str(comparison).splitlines()
    assert lines[0] == "Net and Net: 1 of 2 outputs differ (rtol 0.001, atol 0.0001), beginning at norm"
    assert any(line.split()[:1] == ["mask"] and line.endswith("ok") for line in lines)
    assert all(line == line.rstrip() and "\x1b" not in line for line in lines)


class Hidden(nn.Module):
    """What the inner layer computes is of no consequence for inputs below 10."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        nn.init.constant_(self.inner.weight, factor)

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 10, self.inner(x), x)


def test_a_green_verdict_above_a_red_layer_explains_itself() -> None:
    torch.manual_seed(0)
    model = Hidden(1.0)
    other = copy.deepcopy(model)
    nn.init.constant_(other.inner.weight, 2.0)
    x = torch.randn(2, 3)
    found = compare(model, other, (x,), layers=True)
    assert found.ok
    line = found.sources["inner"]
    assert re.search(r"test_compare\.py:\d+ in forward: return torch\.where", line)
    assert (
        str(found)
        .splitlines()[0]
        .startswith("Hidden and Hidden: the output agrees (rtol 0.001, atol 0.0001), although")
    )
    assert f"although inner ({line}) differs: what comes after makes up for it on these inputs" in found._verdict()
    assert "although" not in compare(model, model, (x,), layers=True)._verdict()


def test_the_line_that_called_a_module(net, args, file) -> None:
    """Of any engine, in whatever of torch's containers it is."""
    for other in (file, copy.deepcopy(net)):
        sources = compare(net, other, args, layers=True).sources
        assert re.search(r"test_compare\.py:\d+ in forward: .*self\.stem\(image\)", sources["stem"])
        assert "self.norm(x.permute" in sources["norm"]
        assert "block(x)" in sources["blocks.0"]


def test_where_an_error_lies(net, args) -> None:
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.head["fc"].bias[3] += 1
    found = compare(net, other, args, layers=True)
    assert [one.name for one in found.where] == ["scores", "head.fc"]
    assert all(str(one) == "on axis 1 only at 3 (of 5)" for one in found.where)
    assert "head.fc differs on axis 1 only at 3 (of 5)" in str(found)
    assert [one["outside"] for one in found.to_dict()["where"]] == [[[[0, 1]], [[3, 3]]]] * 2


def test_dict_is_json(comparison):
    fields = json.loads(json.dumps(comparison.to_dict()))
    assert fields["ok"] is False
    assert fields["first"] == "norm"
    assert [output["name"] for output in fields["outputs"]] == ["scores", "mask"]
    assert len(fields["layers"]) == len(comparison.layers)


def test_page(comparison, tmp_path):
    path = tmp_path / "reports" / "net.html"
    comparison.to_html(path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "beginning at norm" in text
    assert len(comparison.layers) > 8
    table, everything = text[text.index("Layers</h2>") :].split("<details>")
    assert text.count("<tr class=marked>") == 3  # the output that failed, and twice the layer where it begins
    assert everything.count("<tr") == 1 + len(comparison.layers)
    rows = re.findall(r"<tr.*?>(?:<td.*?>)(.*?)</td>", table.replace("<wbr>", ""))
    names = [p.name for p in comparison.layers]
    start = min(names.index("norm") - 2, len(names) - 8)
    assert rows == names[start : start + 8]
    assert "norm" in rows
    assert text.count("<svg") == 2 * 4  # outputs, layers, and where the error lies in one of either
    assert [f.name for f in path.parent.iterdir()] == ["net.html"]
    assert "<table" in comparison._repr_html_()
    assert "<html" not in comparison._repr_html_()
    assert comparison._repr_html_().count("<img") == 4
    assert "<svg" not in comparison._repr_html_()


def test_page_of_many_layers_that_agree(net, args):
    """The worst of them, in order of execution; few are all shown."""
    comparison = compare(net, copy.deepcopy(net), args, layers=True)
    errors = torch.rand(len(comparison.layers)).tolist()
    layers = [replace(p, max_abs=error) for p, error in zip(comparison.layers, errors, strict=True)]
    text = replace(comparison, layers=layers)._repr_html_()
    table = text[text.index("Layers</h2>") : text.index("<details>")].replace("<wbr>", "")
    rows = re.findall(r"<tr.*?>(?:<td.*?>)(.*?)</td>", table)
    worst = sorted(errors)[-8]
    assert rows == [p.name for p in layers if p.max_abs >= worst]
    assert f"8 of {len(layers)} layers" in table
    few = replace(comparison, layers=layers[:8])._repr_html_()
    assert "<details>" not in few
    assert few.count("<tr>") == 1 + 2 + 1 + 8


def test_repr_is_one_line(comparison):
    assert "\n" not in repr(comparison)
    assert repr(comparison).startswith(f"Comparison({str(comparison).splitlines()[0]}")


def test_nothing_is_printed_into_a_pipe(net, args, file, capfd):
    compare(net, file, args, layers=True)
    assert capfd.readouterr() == ("", "")


def test_page_without_matplotlib(comparison, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = comparison._repr_html_()
    assert "pip install matplotlib" in text
    assert "beginning at norm" in text
    assert "<svg" not in text


def test_arguments_as_export_finds_them(tmp_path) -> None:
    model = nn.Linear(3, 2)
    path = svexport.export(model, torch.randn(4, 3), tmp_path / "m.onnx").path
    with pytest.raises(ExportError, match="Linear came without arguments to call it with"):
        compare(model, path)
    with svexport.record(model):
        model(torch.randn(4, 3))
    assert compare(model, path).ok
    assert compare(nn.DataParallel(model), model).ok


@pytest.mark.parametrize("back", [False, True])
def test_what_export_has_verified_agrees_by_default(back, tmp_path) -> None:
    """Also where nothing in the file but its weights is half."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layers(x)
            return y.float() if back else y

    torch.manual_seed(0)
    model, x = Layers(), 10 * torch.randn(16, 8)
    report = svexport.export(model, x, tmp_path / "m.onnx", dtype=torch.float16)
    comparison = compare(model, report.path, x)
    assert comparison.ok
    assert comparison.outputs[0].max_abs > 1e-4
    assert (comparison.rtol, comparison.atol) == (report.rtol, report.atol)
    assert not compare(model, report.path, x, rtol=1e-6, atol=1e-6).ok


def test_tolerances_follow_the_coarsest_type() -> None:
    model, x = nn.Linear(8, 3), torch.randn(4, 8)
    assert (compare(model, copy.deepcopy(model), x).rtol, compare(model, model, x).atol) == (1e-3, 1e-4)
    assert compare(model, lambda x: model(x).bfloat16(), x).atol == 16 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("tolerances", [{"rtol": float("nan")}, {"atol": -1e-3}, {"atol": float("inf")}])
def test_tolerances_that_mean_nothing(tolerances, tmp_path) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(SvexportError, match="rtol and atol must be finite and 0 or more"):
        compare(model, copy.deepcopy(model), torch.randn(4, 3), **tolerances)
