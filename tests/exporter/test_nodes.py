"""What TensorRT's parser and plugins require of nodes."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport.graph.nodes import svexport_nodes

pytestmark = pytest.mark.core

opsets = pytest.mark.parametrize("opset", [11, 18])


class Optional(nn.Module):
    """Ops with inputs that may be left out."""

    def forward(self, x: Tensor, offset: Tensor, mask: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        vector = weight[:, 0, 0, 0]
        return (
            svexport.ops.deform_conv2d(x, offset, weight),
            svexport.ops.deform_conv2d(x, offset, weight, mask=mask),
            svexport.ops.deform_conv2d(x, offset, weight, vector),
            *svexport.ops.add_bias_residual_layer_norm(x[..., :3], vector, x[..., 1:4], vector, vector),
        )


@opsets
def test_no_input_is_empty(opset: int, tmp_path: Path) -> None:
    """Older parsers of TensorRT know none that is left out."""
    args = torch.randn(1, 2, 4, 5), torch.randn(1, 2, 4, 5), torch.rand(1, 1, 4, 5), torch.randn(3, 2, 1, 1)
    svexport.export(Optional(), args, tmp_path / "m.onnx", opset=opset)
    nodes = list(svexport_nodes(onnx.load(tmp_path / "m.onnx")))
    assert sorted((n.op_type, len(n.input)) for n in nodes) == [
        ("SvAddBiasResidualLayerNorm", 5),
        ("SvDeformConv2d", 3),
        ("SvDeformConv2d", 4),
        ("SvDeformConv2d", 5),
    ]
    assert all(name for node in nodes for name in node.input)


class Inverses(nn.Module):
    def forward(self, small: Tensor, large: Tensor) -> tuple[Tensor, Tensor]:
        return torch.linalg.inv(small), torch.linalg.inv(large)


@opsets
@pytest.mark.parametrize("target", [None, "8.6", "10.12"])
def test_what_a_plugin_does_not_run_is_standard_onnx(opset: int, target: str | None, tmp_path: Path) -> None:
    if opset == 18 and target == "8.6":
        opset = 17
    args = torch.eye(8) + 0.1 * torch.randn(8, 8), torch.eye(9) + 0.1 * torch.randn(9, 9)
    report = svexport.export(Inverses(), args, tmp_path / "m.onnx", opset=opset, target=target)
    (node,) = svexport_nodes(onnx.load(report.path))
    assert [a.i for a in node.attribute if a.name == "n"] == [8]
    assert [n.lowered for n in report.svexport_nodes] == [False, True]
