"""Compares models rewritten to float64, op by op, with torch in float64."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from svexport.errors import UnsupportedError
from svexport.graph.in_float64 import in_float64


def model_of(
    op: str, *constants: np.ndarray, kind: int = TensorProto.FLOAT, opset: int = 13, **attributes
) -> onnx.ModelProto:
    """One node of an input and constants; from opset 13 on, an empty one is left out."""
    names = [f"c{i}" if c.size or opset < 13 else "" for i, c in enumerate(constants)]
    graph = helper.make_graph(
        [helper.make_node(op, ["x", *names], ["y"], **attributes)],
        "g",
        [helper.make_tensor_value_info("x", kind, None)],
        [helper.make_tensor_value_info("y", kind, None)],
        [numpy_helper.from_array(c, n) for c, n in zip(constants, names, strict=True) if n],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def computed(model: onnx.ModelProto, x: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(in_float64(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


def check(model: onnx.ModelProto, x: Tensor, expected: Tensor) -> None:
    actual = computed(model, x)
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


CONVOLUTIONS = {
    "plain": ((2, 3, 7, 9), (4, 3, 3, 2), {}),
    "padded": ((1, 3, 8, 5), (4, 3, 3, 3), {"padding": (2, 1), "stride": (2, 1)}),
    "dilated": ((1, 2, 11, 9), (3, 2, 3, 2), {"dilation": (2, 3), "stride": (1, 2)}),
    "groups": ((2, 6, 6, 6), (9, 2, 3, 3), {"groups": 3, "padding": (1, 1)}),
    "depthwise": ((1, 5, 6, 6), (5, 1, 3, 3), {"groups": 5}),
    "one axis": ((2, 3, 12), (4, 3, 5), {"stride": (3,), "padding": (2,)}),
    "three axes": ((1, 2, 5, 4, 6), (3, 2, 2, 1, 3), {"padding": (1, 0, 1)}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_convolutions(name, bias) -> None:
    shape, weights, given = CONVOLUTIONS[name]
    x, weight = torch.randn(shape, dtype=torch.float64), torch.randn(weights)
    b = torch.randn(weights[0]) if bias else None
    rank = len(shape) - 2
    convolution = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    expected = convolution(x, weight.double(), None if b is None else b.double(), **given)
    attributes = {
        "pads": [*given.get("padding", [0] * rank)] * 2,
        "strides": given.get("stride", [1] * rank),
        "dilations": given.get("dilation", [1] * rank),
        "group": given.get("groups", 1),
    }
    constants = [weight.numpy(), *([b.numpy()] if b is not None else [])]
    check(model_of("Conv", *constants, **attributes), x, expected)


def test_convolution_padded_unevenly() -> None:
    x, weight = torch.randn(1, 2, 5, 6, dtype=torch.float64), torch.randn(3, 2, 2, 2)
    expected = F.conv2d(F.pad(x, (0, 3, 1, 2)), weight.double())
    check(model_of("Conv", weight.numpy(), pads=[1, 0, 2, 3]), x, expected)


POOLS = {
    "plain": ((2, 3, 7, 9), {"kernel_size": (3, 2), "stride": (1, 1)}),
    "counted": ((1, 2, 8, 5), {"kernel_size": (3, 3), "stride": (2, 1), "padding": (1, 1)}),
    "not counted": (
        (1, 2, 8, 5),
        {"kernel_size": (3, 2), "stride": (2, 3), "padding": (1, 0), "count_include_pad": False},
    ),
    "one axis": ((2, 3, 12), {"kernel_size": (5,), "stride": (3,), "padding": (2,)}),
    "three axes": ((1, 2, 5, 4, 6), {"kernel_size": (2, 1, 3), "stride": (2, 1, 3)}),
}


@pytest.mark.parametrize("name", POOLS)
def test_average_pools(name) -> None:
    shape, given = POOLS[name]
    x = torch.randn(shape, dtype=torch.float64)
    rank = len(shape) - 2
    attributes = {
        "kernel_shape": given["kernel_size"],
        "strides": given["stride"],
        "pads": [*given.get("padding", [0] * rank)] * 2,
        "count_include_pad": int(given.get("count_include_pad", True)),
    }
    expected = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[rank - 1](x, **given)
    check(model_of("AveragePool", **attributes), x, expected)


SLOPE = np.array([0.5, 0.125, -1.0], np.float32)
FUNCTIONS = {
    "Elu": (lambda x: F.elu(x, 0.75), {"alpha": 0.75}),
    "Erf": (torch.erf, {}),
    "HardSigmoid": (lambda x: (x * 0.25 + 0.5).clamp(0, 1), {"alpha": 0.25}),
    "LeakyRelu": (lambda x: F.leaky_relu(x, 0.125), {"alpha": 0.125}),
    "PRelu": (lambda x: torch.where(x < 0, x * torch.from_numpy(SLOPE), x), {}),
    "Softplus": (F.softplus, {}),
}


@pytest.mark.parametrize("op", FUNCTIONS)
def test_functions(op) -> None:
    function, attributes = FUNCTIONS[op]
    x = torch.cat([torch.randn(5, 3, dtype=torch.float64) * 10.0**k for k in range(-4, 3)])
    constants = [SLOPE] if op == "PRelu" else []
    check(model_of(op, *constants, **attributes), x, function(x))


@pytest.mark.parametrize("opset", [11, 13])
def test_nearest_pixels(opset) -> None:
    x = torch.randn(1, 2, 3, 5, dtype=torch.float64)
    none, scales = np.zeros(0, np.float32), np.array([1, 1, 2, 3], np.float32)
    attributes = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    check(model_of("Resize", none, scales, opset=opset, **attributes), x, F.interpolate(x, scale_factor=(2.0, 3.0)))
    sizes = np.array([1, 2, 6, 15], np.int64)
    check(model_of("Resize", none, none, sizes, opset=opset, **attributes), x, F.interpolate(x, (6, 15)))


def test_numbers_stay_as_the_file_has_them() -> None:
    """A constant that float32 rounds is that one in float64 too."""
    tenth = np.array(0.1, np.float32)
    x = torch.randn(7, dtype=torch.float64)
    check(model_of("Mul", tenth), x, x * float(tenth))
    assert (computed(model_of("Mul", tenth), x) != x * 0.1).any()


@pytest.mark.parametrize(
    "model",
    [
        model_of("Relu", kind=TensorProto.FLOAT16),
        model_of("Conv", np.ones((1, 1, 2, 2), np.float32), auto_pad="SAME_UPPER"),
        model_of("Resize", np.zeros(0, np.float32), np.array([1, 2], np.float32), mode="linear"),
        model_of("AveragePool", kernel_shape=[2, 2], ceil_mode=1),
    ],
    ids=["half", "padded by name", "interpolated", "pooled beyond the border"],
)
def test_what_has_no_form_is_refused(model) -> None:
    with pytest.raises(UnsupportedError, match="float64"):
        in_float64(model)
