"""Every data type for which ONNX Runtime runs an op at opset 20 or 23, at lower opsets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

import svexport
from svexport import UnsupportedError
from svexport.graph.opsets.rules import schema_of
from tests.graph.opsets.backend import attempt, difference
from tests.graph.opsets.nodes import node_model

TYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
AXIS, PADS = np.array([1]), np.array([0, 1, 0, 1])
ONE = "Abs Ceil Cos Erf Exp Floor Identity IsInf IsNaN Log Neg NonZero Not Reciprocal Relu Round Sign Sigmoid Sin Sqrt"
TWO = "Add And Div Equal Greater GreaterOrEqual Less LessOrEqual Max Min Mod Mul Or Pow Sub Sum Mean Xor BitwiseAnd"
REDUCE = (
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare"
)

CASES: dict[str, tuple[str, list[Any], dict[str, Any], int]] = {
    **{op: (op, ["x"], {}, 1) for op in (*ONE.split(), "Flatten", "Shape", "Size", "Softplus", "Tanh", "Transpose")},
    **{op: (op, ["x", "y"], {}, 1) for op in (*TWO.split(), "BitwiseOr", "BitwiseXor")},
    **{op: (op, ["x", AXIS], {}, 1) for op in (*REDUCE.split(), "Unsqueeze")},
    "ArgMax": ("ArgMax", ["x"], {"axis": 1, "select_last_index": 1}, 1),
    "ArgMin": ("ArgMin", ["x"], {"axis": -1}, 1),
    "BitwiseNot": ("BitwiseNot", ["x"], {}, 1),
    "BitShift": ("BitShift", ["x", "y"], {"direction": "LEFT"}, 1),
    "Clip": ("Clip", ["x", "low", "high"], {}, 1),
    "Clip above": ("Clip", ["x", None, "high"], {}, 1),
    "Compress": ("Compress", ["x", np.array([True, False, True])], {"axis": -2}, 1),
    "Concat": ("Concat", ["x", "y"], {"axis": -1}, 1),
    "CumSum": ("CumSum", ["x", np.array(1)], {}, 1),
    "DepthToSpace": ("DepthToSpace", ["z"], {"blocksize": 2, "mode": "CRD"}, 1),
    "Expand": ("Expand", ["x", np.array([2, 3, 4])], {}, 1),
    "Gather": ("Gather", ["x", np.array([0, -1])], {"axis": 1}, 1),
    "GatherElements": ("GatherElements", ["x", np.array([[0, -1], [1, 1]])], {"axis": 1}, 1),
    "GatherND": ("GatherND", ["x", np.array([[0, -1], [1, 1]])], {}, 1),
    "OneHot": ("OneHot", [np.array([0, -1, 5]), np.array(3), "pair"], {}, 1),
    "Pad": ("Pad", ["x", PADS, "low"], {}, 1),
    "Pad edge": ("Pad", ["x", PADS], {"mode": "edge"}, 1),
    "Pad wrap": ("Pad", ["x", PADS], {"mode": "wrap"}, 1),
    "Range": ("Range", ["low", "high", "low"], {}, 1),
    "Reshape": ("Reshape", ["x", np.array([2, -1])], {}, 1),
    "ReverseSequence": ("ReverseSequence", ["x", np.array([1, 2, 3, 1])], {"time_axis": 0, "batch_axis": 1}, 1),
    "ScatterElements": ("ScatterElements", ["x", np.array([[0, -1]]), "row"], {"axis": 1}, 1),
    **{
        f"ScatterElements {r}": ("ScatterElements", ["x", np.array([[0, 0]]), "row"], {"axis": 1, "reduction": r}, 1)
        for r in ("add", "mul", "max", "min")
    },
    "ScatterND": ("ScatterND", ["x", np.array([[0, -1], [1, 1]]), "low2"], {}, 1),
    "Slice": ("Slice", ["x", np.array([3]), np.array([-9]), np.array([-1]), np.array([-2])], {}, 1),
    "Split": ("Split", ["x"], {"axis": -2, "num_outputs": 2}, 2),
    "Squeeze": ("Squeeze", ["s", np.array([-1])], {}, 1),
    "Tile": ("Tile", ["x", np.array([2, 1])], {}, 1),
    "TopK": ("TopK", ["x", np.array([2])], {"axis": 0, "largest": 0}, 2),
    "Trilu": ("Trilu", ["x", np.array(1)], {"upper": 0}, 1),
    "Unique": ("Unique", ["x"], {}, 1),
    "Where": ("Where", [np.array([[True], [False], [True]]), "x", "y"], {}, 1),
}


def arrays(names: list[Any], dtype: str) -> list[np.ndarray | None]:
    rng = np.random.default_rng(0)
    kind = np.dtype(dtype)

    def numbers(*shape: int, low: int = 1, high: int = 9) -> np.ndarray:
        signed = kind.kind in "if"
        values = rng.integers(-high if signed else low, high, shape)
        return (values + (0.25 if kind.kind == "f" else 0)).astype(kind)

    made = {
        "x": numbers(3, 4),
        "y": np.where(numbers(3, 4) == 0, 1, numbers(3, 4, high=4)).astype(kind),
        "z": numbers(1, 8, 2, 3),
        "s": numbers(3, 1),
        "row": numbers(1, 2),
        "pair": np.array([0, 1]).astype(kind),
        "low": np.array(1).astype(kind),
        "high": np.array(5).astype(kind),
        "low2": numbers(2),
    }
    made["y"] = np.where(made["y"] == 0, np.array(1, kind), made["y"])
    return [made[name] if isinstance(name, str) else name for name in names]


def wrong(case: str, dtype: str, targets: tuple[int, ...]) -> list[str]:
    op_type, names, attributes, outputs = CASES[case]
    inputs = arrays(names, dtype)
    opset = 23 if schema_of(op_type, 20) != schema_of(op_type, 23) and dtype != "float64" else 20
    constant = [i for i, name in enumerate(names) if not isinstance(name, str) or name in ("low", "high")]
    try:
        model = node_model(op_type, opset, inputs, constant=constant, outputs=outputs, **attributes)
    except Exception:  # noqa: BLE001 - not a type of the op
        return []
    fed = [x for i, x in enumerate(inputs) if x is not None and i not in constant]
    expected = attempt(model, fed, reference=False)
    if isinstance(expected, str):
        return []
    found = []
    for target in targets:
        try:
            converted = svexport.convert(model, target)
        except UnsupportedError:
            continue
        actual = attempt(converted, fed, reference=False)
        differs = (
            actual if isinstance(actual, str) else difference(actual, expected, 1e-3 if "16" in dtype else 1e-5, 1e-6)
        )
        if differs:
            found.append(f"{case} {dtype} {target}: {differs}")
    return found


OFTEN = ("bool", "int8", "int64", "float16", "float32")


@pytest.mark.parametrize(
    "dtype", [dtype if dtype in OFTEN else pytest.param(dtype, marks=pytest.mark.exhaustive) for dtype in TYPES]
)
def test_types(dtype: str) -> None:
    assert helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    assert [line for case in CASES for line in wrong(case, dtype, (17, 11, 9))] == []
