"""Files for a TensorRT version hold only forms that it reads correctly, and give the same numbers as torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport.exporter.trace import torch_export_first
from svexport.graph.nodes import svexport_nodes
from svexport.graph.walk import graphs


class Net(nn.Module):
    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> object:
        return self.function(x, y)


FLOATS = torch.linspace(-3, 3, 24).reshape(2, 3, 4), torch.linspace(2, -1, 4)
INTEGERS = torch.arange(-6, 6).reshape(3, 4), torch.tensor([3, -3, 4, -5])

FORMS = {
    "logsumexp": ("10.1", 18, FLOATS, lambda x, y: torch.logsumexp(x, 1), None),
    "vector": ("10.1", 18, FLOATS[::-1], lambda x, y: x @ y.transpose(1, 2), None),
    "triu": ("8.5", 14, FLOATS, lambda x, y: x.triu(1) + y, None),
    "triu_8.4": ("8.4", 14, FLOATS, lambda x, y: x.triu(1) + y, "Trilu"),
    "argsort": ("8.4", 11, FLOATS, lambda x, y: (x.argsort(-1), x.sort(1).values), None),
    "remainder": ("8.4", 11, INTEGERS, lambda x, y: x % y, "Mod"),
    "layer_norm": ("8.4", 17, FLOATS, lambda x, y: nn.functional.layer_norm(x, (4,), y), "LayerNormalization"),
    "one_hot": ("8.4", 11, INTEGERS, lambda x, y: nn.functional.one_hot(x.abs(), 7), "OneHot"),
    "gathered_mask": ("8.4", 11, FLOATS, lambda x, y: (x > 0)[:, [2, 0]], None),
    "half_clamp": ("8.4", 11, tuple(t.half() for t in FLOATS), lambda x, y: x.clamp(-1, 1) + y, "Clip"),
    "no_permute": ("8.4", 11, FLOATS, lambda x, y: (x.permute(0, 1, 2), y.sigmoid()), None),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(tmp_path: Path, name: str) -> None:
    target, opset, args, function, replaced = FORMS[name]
    with torch_export_first(name not in ("one_hot", "half_clamp")):  # of which that makes something else
        report = svexport.export(Net(function), args, tmp_path / "m.onnx", opset=opset, target=target)
        plain = svexport.export(Net(function), args, tmp_path / "any.onnx", opset=opset)
    assert report.verified
    assert report.check is not None
    assert report.check.ok, report.check
    assert replaced not in report.nodes
    if replaced:  # which it is without a target
        assert replaced in plain.nodes


@pytest.mark.parametrize("opset", [11, 18, 20])
def test_constants_are_tensors_and_attributes_written_out(tmp_path: Path, opset: int) -> None:
    """Without a target as well: it is the same to every runtime."""
    sizes = {"x": {1: "rows"}}

    def function(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.selu(x).tril().flatten(1)[:, : x.shape[1]] + x.new_zeros(2, x.shape[1])

    svexport.export(Net(function), FLOATS, tmp_path / "m.onnx", opset=opset, dynamic_shapes=sizes)
    model = onnx.load(tmp_path / "m.onnx")
    for graph in graphs(model.graph):
        for node in graph.node:
            given = {attribute.name for attribute in node.attribute}
            assert node.op_type != "Constant" or given == {"value"}
            assert node.op_type != "Trilu" or "upper" in given
            assert node.op_type != "Selu" or given >= {"alpha", "gamma"}


def test_an_input_that_is_returned_has_a_name_of_its_own(tmp_path: Path) -> None:
    """The parser would rename it."""
    report = svexport.export(Net(lambda x, y: (x, y + 1)), FLOATS, tmp_path / "m.onnx", target="8.4")
    assert not report.inputs.keys() & report.outputs.keys()
    model = onnx.load(tmp_path / "m.onnx")
    assert [n.op_type for n in model.graph.node if "x" in n.input] == ["Identity"]


@pytest.mark.parametrize("target", ["10.1", "10.7", None])
def test_bodies_stand_where_plugins_are_looked_for_first(tmp_path: Path, target: str | None) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        grid = torch.stack([y, y.flip(0)], -1).expand(2, 1, 4, 2)
        sampled = nn.functional.grid_sample(x[:, None], grid, align_corners=False)
        return sampled + nn.functional.grid_sample(x[:, None], grid, mode="nearest", align_corners=False)

    report = svexport.export(Net(function), FLOATS, tmp_path / "m.onnx", target=target)
    assert report.verified
    model = onnx.load(tmp_path / "m.onnx")
    assert len(list(svexport_nodes(model))) == 2
    assert len(model.functions) == (0 if target == "10.1" else 2)
    assert report.check is None or report.check.ok
    assert not any("bodies" in note for note in report.notes)
