"""Quantization at lower opsets."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import svexport
from svexport import UnsupportedError
from tests.graph.opsets.backend import run
from tests.graph.opsets.nodes import check, converted, node_model

X = np.linspace(-70, 70, 2 * 6 * 4, dtype=np.float32).reshape(2, 6, 4)


def parameters(axis: int | None, dtype: type, block: int = 0) -> list[np.ndarray]:
    """Scale and zero point of a whole tensor, of every place along an axis, or of its blocks."""
    shape: tuple[int, ...] = () if axis is None else (X.shape[axis],)
    if block and axis is not None:
        shape = tuple(-(-n // block) if i == axis else n for i, n in enumerate(X.shape))
    scale = np.linspace(0.2, 0.7, max(int(np.prod(shape)), 1), dtype=np.float32).reshape(shape)
    zero = (np.arange(scale.size) % 9).astype(dtype).reshape(shape)
    return [scale, zero]


CASES: list[tuple[int | None, type, int]] = [
    *((axis, dtype, 0) for axis in (None, 1, -1) for dtype in (np.int8, np.uint8, np.int16, np.uint16)),
    *((1, np.uint8, 2), (1, np.int8, 4), (2, np.int16, 3)),
]


def attributes(axis: int | None, block: int) -> dict[str, Any]:
    return {"axis": 1 if axis is None else axis, "block_size": block}


@pytest.mark.parametrize("target", [20, 18, 12, 10, 9])
@pytest.mark.parametrize(("axis", "dtype", "block"), CASES)
def test_to_integers(axis: int | None, dtype: type, block: int, target: int) -> None:
    inputs = [X, *parameters(axis, dtype, block)]
    check(node_model("QuantizeLinear", 21, inputs, **attributes(axis, block)), inputs, target, tolerance=0)


@pytest.mark.parametrize("target", [20, 18, 12, 10, 9])
@pytest.mark.parametrize(("axis", "dtype", "block"), [*CASES, (None, np.int32, 0)])
def test_from_integers(axis: int | None, dtype: type, block: int, target: int) -> None:
    x = np.clip(X, 0 if np.dtype(dtype).kind == "u" else -128, 70).astype(dtype)
    inputs = [x, *parameters(axis, dtype, block)][: 2 if dtype == np.int32 else 3]
    check(node_model("DequantizeLinear", 21, inputs, **attributes(axis, block)), inputs, target, tolerance=1e-6)


def test_halves_are_rounded_to_even() -> None:
    x = np.arange(-5.5, 6, dtype=np.float32)
    inputs = [x, np.array(1, np.float32), np.array(3, np.int8)]
    check(node_model("QuantizeLinear", 13, inputs), inputs, 9, [(np.round(x) + 3).astype(np.int8)], tolerance=0)


@pytest.mark.parametrize("target", [18, 9])
def test_short_floats(target: int) -> None:
    x, scale = X.astype(np.float16), np.array(0.25, np.float16)
    model = node_model("QuantizeLinear", 19, [x, scale, np.array(1, np.int8)])
    wanted = np.clip(np.round(x / scale) + 1, -128, 127).astype(np.int8)
    check(model, [x, scale, np.array(1, np.int8)], target, [wanted], tolerance=0)
    inputs = [wanted, scale, np.array(1, np.int8)]
    check(node_model("DequantizeLinear", 19, inputs), inputs, target, [(wanted.astype(np.float16) - 1) * scale])


def test_result_types() -> None:
    x, scale = X.astype(np.int8), np.array(0.3, np.float32)
    model = node_model("DequantizeLinear", 23, [x, scale], output_dtype=TensorProto.FLOAT16)
    check(model, [x, scale], 9, [(x * scale).astype(np.float16)], tolerance=1e-3)
    model = node_model("QuantizeLinear", 21, [X, scale], output_dtype=TensorProto.INT8)
    check(model, [X, scale], 9, [np.clip(np.round(X / scale), -128, 127).astype(np.int8)], tolerance=0)


def weights(x: np.ndarray, scale: np.ndarray, **attributes: Any) -> onnx.ModelProto:
    """Constants that are dequantized and added to an input."""
    dtype = helper.np_dtype_to_tensor_dtype(x.dtype)
    packed = helper.make_tensor("w", dtype, x.shape, x.astype(np.float32).ravel())
    kept = [packed, onnx.numpy_helper.from_array(scale, "s")]
    info = helper.make_tensor_value_info("x0", TensorProto.FLOAT, x.shape)
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["v"], **attributes),
        helper.make_node("Add", ["x0", "v"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "graph", [info], [helper.make_tensor_value_info("y", 1, x.shape)], kept)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("target", [20, 18, 13, 9])
@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("block", [0, 2])
def test_constants_of_few_bits(block: int, dtype: type, target: int) -> None:
    x = (np.arange(24).reshape(4, 6) % 8).astype(dtype)
    scale = np.linspace(0.2, 0.7, 12 if block else 4, dtype=np.float32).reshape((2, 6) if block else (4,))
    model = weights(x, scale, axis=0, block_size=block) if block else weights(x, scale, axis=0)
    added = np.ones(x.shape, np.float32)
    factors = np.repeat(scale, 2, 0) if block else scale[:, None]
    check(model, [added], target, [added + x.astype(np.float32) * factors])


@pytest.mark.parametrize(("dtype", "opset"), [(ml_dtypes.int4, 21), (ml_dtypes.float8_e4m3fn, 19)])
def test_other_tensors_of_few_bits_are_refused(dtype: type, opset: int) -> None:
    model = node_model("QuantizeLinear", 21, [X, np.array(1, np.float32), np.array(0, dtype)], constant=(1, 2))
    with pytest.raises(UnsupportedError, match=f"the lowest that has one is {opset}.*\n.*there are no tensors of"):
        svexport.convert(model, 11)


@pytest.mark.parametrize("target", [10, 9])
@pytest.mark.parametrize("x", [X, np.abs(X) + 1, np.zeros_like(X)])
def test_at_run_time(x: np.ndarray, target: int) -> None:
    model = node_model("DynamicQuantizeLinear", 11, [x], outputs=3)
    check(model, [x], target, run(model, [x]), tolerance=1e-6)


@pytest.mark.parametrize("block", [2, 4])
def test_blocks_of_any_size(block: int) -> None:
    inputs = [X, *parameters(1, np.int8, block)]
    check(node_model("QuantizeLinear", 21, inputs, dynamic=True, **attributes(1, block)), inputs, 9, tolerance=0)


def test_unknown_scales_are_spread() -> None:
    inputs = [X, *parameters(1, np.int8)]
    model = node_model("QuantizeLinear", 13, inputs)
    wanted = run(model, inputs)
    for value in model.graph.input[1:]:
        value.type.tensor_type.shape.dim[0].ClearField("dim_value")
    check(model, inputs, 9, wanted, tolerance=0)
    assert "DequantizeLinear" not in {node.op_type for node in converted(model, 9).graph.node}
