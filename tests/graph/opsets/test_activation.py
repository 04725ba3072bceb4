"""Activations at lower opsets."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F

import svexport
from svexport import UnsupportedError
from tests.graph.opsets.nodes import check, node_model

X = np.linspace(-4, 4, 2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)


@pytest.mark.parametrize("target", [12, 10, 9])
@pytest.mark.parametrize("axis", [-4, -1, 0, 1, 3])
@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax", "Hardmax"])
def test_one_axis(op_type: str, axis: int, target: int) -> None:
    x = np.random.default_rng(axis + 9).standard_normal(X.shape).astype(np.float32)
    model = node_model(op_type, 13, [x], axis=axis)
    expected = {"Softmax": F.softmax, "LogSoftmax": F.log_softmax}.get(op_type)
    wanted = None if expected is None else [expected(torch.from_numpy(x), axis).numpy()]
    result = check(model, [x], target, wanted)
    assert len(result.graph.node) == (1 if axis in (-1, 3) else 3)


def test_one_axis_before_sizes_of_one() -> None:
    x = X.reshape(2, 60, 1, 1)
    result = check(node_model("Softmax", 13, [x], axis=1), [x], 9, [F.softmax(torch.from_numpy(x), 1).numpy()])
    assert len(result.graph.node) == 1


def test_last_axis_of_any_rank() -> None:
    model = node_model("Softmax", 13, [X])
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    result = svexport.convert(model, 11)
    assert onnx.helper.get_attribute_value(result.graph.node[0].attribute[0]) == -1
    with pytest.raises(UnsupportedError, match=r"cannot be written below opset 11: the rank of its input"):
        svexport.convert(model, 10)


@pytest.mark.parametrize("target", [19, 13, 9])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(approximate: str, dtype: type, target: int) -> None:
    x = X.astype(dtype)
    wanted = F.gelu(torch.from_numpy(x).double(), approximate=approximate).numpy().astype(dtype)
    model = node_model("Gelu", 20, [x], approximate=approximate)
    check(model, [x], target, [wanted], tolerance=1e-5 if dtype == np.float32 else 1e-3)


@pytest.mark.parametrize(
    ("op_type", "opset", "attributes", "function"),
    [
        ("HardSwish", 14, {}, F.hardswish),
        ("Mish", 18, {}, F.mish),
        ("Celu", 12, {"alpha": 2.0}, lambda x: F.celu(x, 2.0)),
        ("Celu", 12, {}, F.celu),
        ("ThresholdedRelu", 10, {"alpha": 1.5}, lambda x: F.threshold(x, 1.5, 0.0)),
        ("Swish", 24, {"alpha": 0.5}, lambda x: x * torch.sigmoid(0.5 * x)),
        ("Elu", 22, {"alpha": 0.5}, lambda x: F.elu(x, 0.5)),
        ("LeakyRelu", 16, {"alpha": 0.1}, lambda x: F.leaky_relu(x, 0.1)),
    ],
)
def test_composed(op_type: str, opset: int, attributes: dict, function) -> None:
    wanted = function(torch.from_numpy(X).double()).float().numpy()
    check(node_model(op_type, opset, [X], **attributes), [X], 9, [wanted])
