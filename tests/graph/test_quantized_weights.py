"""Weights stored as the int8 numbers that QuantizeLinear computes give the same results in a quarter of the bytes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import svexport
from svexport.graph.quantized_weights import store_quantized


def model(
    weight: np.ndarray,
    scale: np.ndarray,
    *,
    axis: int | None = None,
    zero: np.ndarray | None = None,
    also: list[onnx.NodeProto] | None = None,
    outputs: tuple[str, ...] = ("y",),
) -> onnx.ModelProto:
    """``y = DequantizeLinear(QuantizeLinear(w)) + x``."""
    zero = np.zeros(scale.shape, np.int8) if zero is None else zero
    options = {} if axis is None else {"axis": axis}
    nodes = [
        helper.make_node("QuantizeLinear", ["w", "s", "z"], ["q"], **options),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], **options),
        helper.make_node("Add", ["d", "x"], ["y"]),
        *(also or ()),
    ]
    constants = [numpy_helper.from_array(a, n) for a, n in ((weight, "w"), (scale, "s"), (zero, "z"))]
    infos = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, weight.shape) for name in ("x", "y", "other")}
    infos["q"] = helper.make_tensor_value_info("q", TensorProto.INT8, weight.shape)
    graph = helper.make_graph(nodes, "g", [infos["x"]], [infos[name] for name in outputs], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def run(made: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return list(onnxruntime.InferenceSession(made.SerializeToString(), options).run(None, {"x": x}))


def types(made: onnx.ModelProto) -> dict[str, int]:
    return {tensor.name: tensor.data_type for tensor in made.graph.initializer}


@pytest.mark.parametrize(
    ("shape", "axis"), [((7, 5), 0), ((7, 5), 1), ((7, 5), -1), ((3, 2, 5), 1), ((5,), 0), ((7, 5), None), ((), None)]
)
def test_same_numbers(shape: tuple[int, ...], axis: int | None) -> None:
    """Halves between steps, numbers beyond both ends, zeros of both signs."""
    rng = np.random.default_rng(len(shape))
    scale = np.float32(2.0**-5) if axis is None else rng.choice([2.0**-5, 0.013], shape[axis]).astype(np.float32)
    steps = rng.integers(-300, 300, shape) / 2
    weight = np.asarray(steps * (2.0**-5), np.float32)
    weight.flat[0] = -0.0
    made, x = model(weight, np.asarray(scale), axis=axis), np.zeros(shape, np.float32)
    expected = run(made, x)
    assert store_quantized(made) == 1
    onnx.checker.check_model(made, full_check=True)
    assert [node.op_type for node in made.graph.node] == ["DequantizeLinear", "Add"]
    assert "w" not in types(made)
    assert types(made)["w_int8"] == TensorProto.INT8
    np.testing.assert_array_equal(run(made, x), expected)


def test_what_stays() -> None:
    """Weights that something else reads, numbers of others than int8 around zero, and what a caller sees."""
    weight, scale = np.ones((2, 3), np.float32), np.float32(0.1)
    identity = [helper.make_node("Identity", ["w"], ["other"])]
    made = [
        model(weight, np.asarray(scale), also=identity, outputs=("y", "other")),
        model(weight, np.asarray(scale), zero=np.asarray(3, np.int8)),
        model(weight, np.asarray(scale), zero=np.asarray(128, np.uint8)),
        model(weight, np.asarray(scale), outputs=("y", "q")),
        model(np.full((2, 3), np.nan, np.float32), np.asarray(scale)),
        model(weight, np.asarray(np.float32(0))),
    ]
    given = model(weight, np.asarray(scale))
    given.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, (2, 3)))  # a caller may override it
    for one in (*made, given):
        before = one.SerializeToString()
        assert store_quantized(one) == 0
        assert one.SerializeToString() == before


def test_one_weight_of_several_products() -> None:
    """Quantized twice alike it is stored once."""
    again = [
        helper.make_node("QuantizeLinear", ["w", "s", "z"], ["q2"]),
        helper.make_node("DequantizeLinear", ["q2", "s", "z"], ["other"]),
    ]
    made = model(np.ones((2, 3), np.float32), np.asarray(np.float32(0.1)), also=again, outputs=("y", "other"))
    x = np.ones((2, 3), np.float32)
    expected = run(made, x)
    assert store_quantized(made) == 2
    assert types(made).keys() == {"w_int8", "s", "z"}
    np.testing.assert_array_equal(run(made, x), expected)


@pytest.mark.parametrize(("opset", "target", "small"), [(17, "8.6", False), (13, "10.1", True), (19, "11.0", True)])
def test_files(opset: int, target: str, small: bool, tmp_path: Path) -> None:
    """Of a quantized model, verified as they are; TensorRT reads int8 weights from 10.0 on."""
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.ConvTranspose2d(64, 96, 3), nn.Flatten(2), nn.Linear(36, 9))
    x = torch.randn(2, 3, 6, 6)
    quantized = svexport.quantize(net.eval(), [x])
    path = tmp_path / "m.onnx"
    report = svexport.export(quantized, (x,), path, opset=opset, target=target)
    assert report.verified
    assert svexport.check(path, target).ok
    weights = sum(layer.weight.numel() for layer in net if hasattr(layer, "weight"))
    stored = types(onnx.load(path))
    assert sum(stored[name] == TensorProto.INT8 for name in stored if name.endswith("weight_int8")) == 3 * small
    assert (os.path.getsize(path) < 1.2 * weights) == small
    with torch.no_grad():
        step = float(quantized[4].input_quantizer.scale * quantized[4].weight_quantizer.scale.max() * 127)
        assert float((svexport.load(path)(x) - quantized(x)).abs().le(step).float().mean()) >= 0.999
