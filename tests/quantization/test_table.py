"""TensorRT's calibration tables: their exact text, and their effect on a file."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from torch import Tensor, nn

import svexport
from svexport import CalibrationTable, SvexportError
from svexport.quantization.layers import quantized_layers

SAMPLE = """TRT-7000-EntropyCalibration2
data: 3c008912
conv1: 3c88edfc
(Unnamed Layer* 48) [Constant]_output: 3ddc858b
a: b: 1
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 8, 3, bias=False), nn.ConvTranspose2d(8, 6, 2, 2)
        self.linear, self.head = nn.Linear(6, 9, bias=False), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.conv(x).relu()).flatten(2).transpose(1, 2)
        return self.head(self.linear(x).mean(1))


def test_the_format_of_tensorrt(tmp_path: Path) -> None:
    path = tmp_path / "CalibrationTable"
    path.write_text(SAMPLE)
    table = CalibrationTable.read(path)
    assert (table.version, table.algorithm) == (7000, "EntropyCalibration2")
    assert list(table.scales) == ["data", "conv1", "(Unnamed Layer* 48) [Constant]_output", "a: b"]
    assert table.scales["data"] == np.uint32(0x3C008912).view(np.float32)
    assert table.scales["a: b"] == np.uint32(1).view(np.float32)
    again = tmp_path / "again"
    table.write(again)
    assert again.read_text() == SAMPLE.replace(": 1\n", ": 00000001\n")


def test_random_scales_come_back(tmp_path: Path) -> None:
    bits = np.random.default_rng().integers(0, 0x7F800000, 500, np.uint32)
    table = CalibrationTable(
        {f"t{i}": float(b.view(np.float32)) for i, b in enumerate(bits)}, 100100, "MinMaxCalibration"
    )
    table.write(tmp_path / "t")
    assert CalibrationTable.read(tmp_path / "t") == table


@pytest.mark.parametrize("opset", [13, 17, 20])
def test_of_a_file_and_into_one(opset: int, tmp_path: Path) -> None:
    """A float file quantized by the table of a quantized one computes what that does."""
    net, x = Net().eval(), torch.randn(2, 3, 9, 7)
    quantized = svexport.quantize(net, [x], method="minmax")
    svexport.export(quantized, x, tmp_path / "int8.onnx", opset=opset)
    table = CalibrationTable.of(tmp_path / "int8.onnx")
    own = [float(layer.input_quantizer.scale) for _, layer in quantized_layers(quantized)]
    assert sorted(table.scales.values()) == sorted(own)

    plain = copy.deepcopy(quantized)
    for _, layer in quantized_layers(plain):
        layer.switch(on=False)
    svexport.export(plain, x, tmp_path / "float.onnx", opset=opset)
    inputs = {}
    for node in onnx.load(tmp_path / "float.onnx").graph.node:
        if node.op_type in ("Conv", "ConvTranspose", "MatMul", "Gemm"):
            inputs[node.input[0]] = own[len(inputs)]
    assert len(inputs) == 4
    given = CalibrationTable(inputs)
    given.write(tmp_path / "table")
    made = CalibrationTable.read(tmp_path / "table").quantized(tmp_path / "float.onnx", tmp_path / "made.onnx")
    onnx.checker.check_model(made, full_check=True)
    assert [node.op_type for node in made.graph.node].count("DequantizeLinear") == 8
    assert svexport.check(tmp_path / "made.onnx", "10.1").ok
    options = onnxruntime.SessionOptions()  # as written: fused int8 products saturate on CPUs without VNNI
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    (actual,) = onnxruntime.InferenceSession(tmp_path / "made.onnx", options).run(None, {"x": x.numpy()})
    expected = quantized(x).detach().numpy()
    step = np.abs(expected).max() / 127
    assert np.abs(actual - expected).max() < step
    assert np.abs(net(x).detach().numpy() - expected).max() > 1e-6
    assert np.mean(np.abs(actual - expected) < 1e-5) > 0.9


def test_weights_that_two_products_share() -> None:
    """One has its output channels along the first axis, the other along the second."""
    w = np.random.default_rng().standard_normal((4, 4)).astype(np.float32)
    w[0] *= 50
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "quantize_w"),
        helper.make_node("Gemm", ["a", "w"], ["y"], transB=1),
    ]
    given, made = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [3, 4]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [given], [made], [onnx.numpy_helper.from_array(w, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    result = CalibrationTable({"x": 0.02, "a": 0.5}).quantized(model)
    onnx.checker.check_model(result, full_check=True)
    x = np.random.default_rng().standard_normal((3, 4)).astype(np.float32)

    def int8(v: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
        return np.clip(np.rint(v / np.float32(scale)), -128, 127) * np.float32(scale)

    a = int8(x, 0.02) @ int8(w, np.abs(w).max(0) / np.float32(127))
    expected = int8(a, 0.5) @ int8(w, np.abs(w).max(1, keepdims=True) / np.float32(127)).T
    options = onnxruntime.SessionOptions()  # as written: fused int8 products saturate on CPUs without VNNI
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    (actual,) = onnxruntime.InferenceSession(result.SerializeToString(), options).run(None, {"x": x})
    assert np.mean(np.abs(actual - expected) <= 1e-3 * np.abs(expected).max()) >= 0.75  # a step of a now and then


@pytest.mark.parametrize(
    "text",
    ["", "TRT-8601", "data: 3c008912\n", "TRT-8601-Entropy\nx\n", "TRT-8601-Entropy\nx: 3c0089121\n", "\x00",
     "TRT-8601-Entropy\nx: zz\n", "TRT-8601-Entropy\nx: 7fc00000\n", "TRT-8601-Entropy\nx: bf800000\n",
     "TRT-8601-Entropy\nx: 7f800000\n", "TRT-8601-Entropy\nx: 1\nx: 2\n"],
)  # fmt: skip
def test_damaged(text: str, tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.write_text(text)
    with pytest.raises(SvexportError, match="is no calibration table of TensorRT"):
        CalibrationTable.read(path)


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(SvexportError, match=r"no calibration table of TensorRT: .*No such file"):
        CalibrationTable.read(tmp_path / "none")
    with pytest.raises(SvexportError, match="cannot hold the name"):
        CalibrationTable({"a\nb": 1.0})
    with pytest.raises(SvexportError, match="expected version as 8601"):
        CalibrationTable({}, version=8)
    svexport.export(Net(), torch.randn(1, 3, 5, 5), tmp_path / "m.onnx", opset=11)
    with pytest.raises(SvexportError, match="quantize the model first"):
        CalibrationTable.of(tmp_path / "m.onnx")
    with pytest.raises(SvexportError, match="come with opset 13, and the file has 11"):
        CalibrationTable({"x": 1.0}).quantized(tmp_path / "m.onnx")
    svexport.export(Net(), torch.randn(1, 3, 5, 5), tmp_path / "m.onnx", opset=13)
    with pytest.raises(SvexportError, match="is it of this file"):
        CalibrationTable({"y": 1.0}).quantized(tmp_path / "m.onnx")
