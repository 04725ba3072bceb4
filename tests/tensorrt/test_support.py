"""What each TensorRT parses: one model breaks each restriction in the table, and another keeps it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import svexport
from svexport.errors import ExportError
from svexport.tensorrt.check.nodes import VERDICTS
from svexport.tensorrt.check.report import Finding
from svexport.tensorrt.support.datatypes import type_name
from svexport.tensorrt.support.documented import allowed_types
from svexport.tensorrt.support.operators import INSTEAD, OPERATORS
from svexport.tensorrt.support.opsets import newer_than
from svexport.tensorrt.support.target import KNOWN, Target, dotted

FLOAT, HALF, INT32, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT32, TensorProto.INT64
INT8, UINT8, BOOL = TensorProto.INT8, TensorProto.UINT8, TensorProto.BOOL


def from_int(value: int) -> TensorProto:
    return numpy_helper.from_array(np.array(value), "value")


class Computed(NamedTuple):
    """An input that an Identity makes of a constant."""

    value: np.ndarray


def numbers(*values: float, dtype: Any = np.int64) -> np.ndarray:
    return np.array(values, dtype)


def one_node(op: str, *inputs: Any, opset: int = 13, outputs: int = 1, **attributes: Any) -> onnx.ModelProto:
    """A model of one node. An input is (dtype, shape), an array for an initializer, Computed, or None for none."""
    names, given, constants, nodes = [], [], [], []
    for index, value in enumerate(inputs):
        name = f"x{index}"
        if isinstance(value, Computed):
            constants.append(numpy_helper.from_array(value.value, f"{name}_of"))
            nodes.append(helper.make_node("Identity", [f"{name}_of"], [name], name=f"make_{name}"))
        elif isinstance(value, np.ndarray):
            constants.append(numpy_helper.from_array(value, name))
        elif value is not None:
            given.append(helper.make_tensor_value_info(name, *value))
        names.append("" if value is None else name)
    made = [f"y{i}" for i in range(outputs)]
    nodes.append(helper.make_node(op, names, made, name="it", **attributes))
    results = [helper.make_empty_tensor_value_info(name) for name in made]
    graph = helper.make_graph(nodes, "graph", given, results, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def branch(rank: int, name: str) -> onnx.GraphProto:
    value = numpy_helper.from_array(np.ones((2,) * rank, np.float32), "value")
    node = helper.make_node("Constant", [], [name], value=value)
    return helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, FLOAT, [2] * rank)])


def body(shape: list[int], made: list[int], scans: bool = False, counted: bool = False) -> onnx.GraphProto:
    """Of a Loop with one state of this shape, which an iteration gives that shape."""
    given = [("i", INT64, []), ("go", BOOL, []), ("state", FLOAT, shape)]
    nodes = [helper.make_node("Identity", ["go"], ["again"]), helper.make_node("Tile", ["state", "times"], ["next"])]
    times = numpy_helper.from_array(np.array([b // a for a, b in zip(shape, made)]), "times")
    results = [("again", BOOL, []), ("next", FLOAT, made)]
    if scans:
        nodes.append(helper.make_node("Identity", ["next"], ["scanned"]))
        results.append(("scanned", FLOAT, made))
    if counted:
        nodes.append(helper.make_node("Unsqueeze", ["i", "first"], ["number"]))
        results.append(("number", INT64, [1]))
    infos = [[helper.make_tensor_value_info(*value) for value in values] for values in (given, results)]
    return helper.make_graph(nodes, "body", *infos, [times, numpy_helper.from_array(numbers(0), "first")])


IMAGE, ROW = (FLOAT, [1, 4, 8, 8]), (FLOAT, [1, 4, 8])
CUBE = (FLOAT, [1, 2, 4, 4, 4])
GRID = (FLOAT, [1, 6, 6, 2])
SQUARE = (FLOAT, [3, 3])
TRUE = np.array(True)
WEIGHT, BIAS = np.ones((4, 4, 3, 3), np.float32), np.ones(4, np.float32)
SCALE, ZERO = np.float32([0.5]), np.zeros(1, np.int8)
QUERY = (FLOAT, [1, 2, 4, 8])
RECURRENT = ((FLOAT, [5, 1, 4]), np.ones((2, 12, 4), np.float32), np.ones((2, 12, 3), np.float32))
LSTM = ((FLOAT, [5, 1, 4]), np.ones((1, 12, 4), np.float32), np.ones((1, 12, 3), np.float32))


class Case(NamedTuple):
    """A restriction by the name of its rule, a version where it holds, a model that breaks it and one that does not."""

    rule: str
    target: str
    broken: onnx.ModelProto
    kept: onnx.ModelProto
    severity: str = "error"


CASES = [
    # Inputs that have to be constants.
    Case(
        "constant_B",
        "8.4",
        one_node("Conv", IMAGE, WEIGHT, Computed(BIAS)),
        one_node("Conv", IMAGE, WEIGHT, BIAS),
    ),
    Case(
        "constant_axes",
        "8.4",
        one_node("ReduceSum", IMAGE, Computed(numbers(1))),
        one_node("ReduceSum", IMAGE, numbers(1)),
    ),
    Case("constant_axes", "10.6", one_node("Squeeze", ROW, (INT64, [1])), one_node("Squeeze", ROW, numbers(0))),
    Case(
        "constant_axis",
        "10.7",
        one_node("CumSum", ROW, Computed(np.array(1))),
        one_node("CumSum", ROW, np.array(1)),
    ),
    Case(
        "constant_training_mode",
        "8.4",
        one_node("Dropout", ROW, None, Computed(np.array(False))),
        one_node("Dropout", ROW, None, np.array(False)),
    ),
    Case(
        "constant_scale",
        "8.4",
        one_node("InstanceNormalization", IMAGE, Computed(BIAS), BIAS),
        one_node("InstanceNormalization", IMAGE, BIAS, BIAS),
    ),
    Case(
        "constant_K",
        "8.5",
        one_node("TopK", ROW, (INT64, [1]), outputs=2),
        one_node("TopK", ROW, numbers(3), outputs=2),
    ),
    *(
        Case(
            f"constant_{name}",
            "8.4",
            one_node("NonMaxSuppression", *NMS[:i], Computed(NMS[i]), *NMS[i + 1 :]),
            one_node("NonMaxSuppression", *NMS),
        )
        for NMS in [((FLOAT, [1, 9, 4]), (FLOAT, [1, 3, 9]), numbers(5), np.float32([0.5]), np.float32([0.1]))]
        for i, name in [(2, "max_output_boxes_per_class"), (3, "iou_threshold"), (4, "score_threshold")]
    ),
    Case(
        "constant_scales",
        "8.2",
        one_node("Resize", IMAGE, None, Computed(np.float32([1, 1, 2, 2]))),
        one_node("Resize", IMAGE, None, np.float32([1, 1, 2, 2])),
    ),
    Case(
        "constant_frame_step",
        "10.5",
        one_node("STFT", (FLOAT, [1, 64, 1]), Computed(np.array(8)), np.ones(16, np.float32), opset=17),
        one_node("STFT", (FLOAT, [1, 64, 1]), np.array(8), np.ones(16, np.float32), opset=17),
        "warning",
    ),
    Case(
        "constant_window",
        "10.5",
        one_node("STFT", (FLOAT, [1, 64, 1]), np.array(8), (FLOAT, [16]), opset=17),
        one_node("STFT", (FLOAT, [1, 64, 1]), np.array(8), np.ones(16, np.float32), opset=17),
        "warning",
    ),
    Case(
        "known_axes",
        "10.2",
        one_node("Slice", ROW, numbers(0), numbers(1), (INT64, [1])),
        one_node("Slice", ROW, numbers(0), numbers(1), numbers(1)),
    ),
    Case(
        "known_axes",
        "8.4",
        one_node("Unsqueeze", ROW, Computed(numbers(0))),  # the parser may work it out
        one_node("Unsqueeze", ROW, numbers(0)),
        "warning",
    ),
    Case(
        "known_depth",
        "8.5",
        one_node("OneHot", (INT64, [3]), (INT64, []), np.float32([0, 1])),
        one_node("OneHot", (INT64, [3]), np.array(5), np.float32([0, 1])),
    ),
    Case("computed_input", "8.5", one_node("RandomNormalLike", BIAS), one_node("RandomNormalLike", ROW)),
    Case(
        "needs_zero_point",
        "8.4",
        one_node("DequantizeLinear", (INT8, [4]), SCALE),
        one_node("DequantizeLinear", (INT8, [4]), SCALE, ZERO),
    ),
    # Ranks and shapes.
    Case("rank", "8.4", one_node("DepthToSpace", CUBE, blocksize=2), one_node("DepthToSpace", IMAGE, blocksize=2)),
    Case(
        "rank",
        "8.5",
        one_node("GridSample", CUBE, (FLOAT, [1, 4, 4, 4, 3]), opset=17),
        one_node("GridSample", IMAGE, GRID, opset=17),
    ),
    Case("rank", "8.5", one_node("Trilu", IMAGE, opset=14, upper=1), one_node("Trilu", ROW, opset=14, upper=1)),
    Case("static_shape", "8.4", one_node("EyeLike", (FLOAT, ["n", 3])), one_node("EyeLike", (FLOAT, [3, 3]))),
    Case("squeeze_axes", "8.4", one_node("Squeeze", (FLOAT, ["n", 1])), one_node("Squeeze", (FLOAT, [2, 1]))),
    Case(
        "resize",
        "8.4",
        one_node("Resize", IMAGE, None, np.float32([2, 1, 2, 2]), mode="linear"),
        one_node("Resize", IMAGE, None, np.float32([1, 2, 2, 2]), mode="linear"),
    ),
    Case(
        "resize",
        "8.6",
        one_node("Resize", IMAGE, None, np.float32([1, 2, 2, 2]), mode="cubic"),
        one_node("Resize", IMAGE, None, np.float32([1, 1, 2, 2]), mode="cubic"),
    ),
    Case(
        "resize",
        "10.0",
        one_node("Resize", IMAGE, None, Computed(np.float32([2, 2])), opset=18, axes=[2, 3]),
        one_node("Resize", IMAGE, None, Computed(np.float32([1, 1, 2, 2])), opset=18, axes=[0, 1, 2, 3]),
    ),
    Case(
        "loop_shapes",
        "8.4",
        *(one_node("Loop", np.array(3), TRUE, (FLOAT, [2]), body=body([2], [n])) for n in (4, 2)),
        "warning",
    ),
    Case(
        "loop_scans",
        "8.4",
        one_node("Loop", (INT64, []), TRUE, (FLOAT, [2]), outputs=2, body=body([2], [2], scans=True)),
        one_node("Loop", np.array(3), TRUE, (FLOAT, [2]), outputs=2, body=body([2], [2], scans=True)),
        "warning",
    ),
    *(
        Case(
            rule,
            "8.4",
            one_node("If", (BOOL, []), then_branch=branch(1, "then"), else_branch=wrong),
            one_node("If", (BOOL, []), then_branch=branch(1, "then"), else_branch=branch(1, "else")),
            severity,
        )
        for rule, wrong, severity in [
            ("if_outputs", helper.make_graph([], "none", [], []), "error"),
            ("if_outputs", branch(2, "else"), "error"),
            ("if_names", branch(1, "then"), "warning"),
        ]
    ),
    # Types.
    Case("type", "8.4", one_node("Add", (BOOL, [2]), (BOOL, [2])), one_node("Add", (INT64, [2]), (INT64, [2]))),
    Case("type", "8.4", one_node("MatMul", (INT64, [2, 2]), (INT64, [2, 2])), one_node("MatMul", IMAGE, IMAGE)),
    Case("type", "10.1", one_node("Mish", (TensorProto.BFLOAT16, [2]), opset=18), one_node("Mish", ROW, opset=18)),
    Case("type", "8.4", one_node("CumSum", (INT32, [2]), np.array(0)), one_node("CumSum", ROW, np.array(0)), "warning"),
    Case(
        "same_types",
        "10.1",
        one_node("DeformConv", IMAGE, WEIGHT.astype(np.float16), (FLOAT, [1, 18, 6, 6]), opset=19),
        one_node("DeformConv", IMAGE, WEIGHT, (FLOAT, [1, 18, 6, 6]), opset=19),
    ),
    Case("fmod", "8.5", one_node("Mod", ROW, ROW), one_node("Mod", ROW, ROW, fmod=1)),
    Case(
        "rounded_quotient",
        "10.1",
        one_node("Mod", ROW, ROW, fmod=1),
        one_node("Mod", numbers(7, 8), numbers(2, 3), fmod=1),
        "warning",
    ),
    Case("to", "8.4", one_node("Cast", ROW, to=UINT8), one_node("Cast", ROW, to=INT8)),
    Case(
        "dtype",
        "8.5",
        one_node("RandomNormal", shape=[2], dtype=TensorProto.DOUBLE),
        one_node("RandomNormal", shape=[2], dtype=FLOAT),
    ),
    # Outputs and inputs that there may not be.
    Case(
        "no_Indices",
        "8.4",
        one_node("MaxPool", IMAGE, outputs=2, kernel_shape=[2, 2]),
        one_node("MaxPool", IMAGE, kernel_shape=[2, 2]),
    ),
    Case(
        "no_running_mean",
        "8.4",
        one_node("BatchNormalization", IMAGE, BIAS, BIAS, BIAS, BIAS, outputs=3, opset=14),
        one_node("BatchNormalization", IMAGE, BIAS, BIAS, BIAS, BIAS, opset=14),
    ),
    *(
        Case(
            rule,
            "8.6",
            one_node("LayerNormalization", ROW, np.ones(8, np.float32), outputs=outputs, opset=17),
            one_node("LayerNormalization", ROW, np.ones(8, np.float32), opset=17),
        )
        for rule, outputs in [("no_Mean", 2), ("no_InvStdDev", 3)]
    ),
    *(
        Case(
            rule,
            "10.15",
            one_node("Attention", QUERY, QUERY, QUERY, *more, opset=23, outputs=outputs, **attributes),
            one_node("Attention", QUERY, QUERY, QUERY, opset=23),
            "error" if attributes else "warning",
        )
        for rule, more, outputs, attributes in [
            ("no_past_key", (None, QUERY, QUERY), 1, {}),
            ("no_past_value", (None, QUERY, QUERY), 1, {}),
            ("no_nonpad_kv_seqlen", (None, None, None, (INT64, [1])), 1, {}),
            ("no_present_key", (), 2, {}),
            ("no_present_value", (), 3, {}),
            ("no_qk_matmul_output", (), 4, {}),
            ("softcap", (), 1, {"softcap": 2.0}),
            ("attribute", (), 1, {"softmax_precision": FLOAT}),
        ]
    ),
    # Attributes.
    Case(
        "training_mode",
        "8.4",
        one_node("Dropout", ROW, None, np.array(True)),
        one_node("Dropout", ROW, None, np.array(False)),
    ),
    Case(
        "training_mode",
        "8.4",
        one_node("BatchNormalization", IMAGE, BIAS, BIAS, BIAS, BIAS, opset=15, training_mode=1),
        one_node("BatchNormalization", IMAGE, BIAS, BIAS, BIAS, BIAS, opset=15),
    ),
    Case(
        "dilations",
        "8.4",
        one_node("MaxPool", IMAGE, kernel_shape=[2, 2], dilations=[1, 2]),
        one_node("MaxPool", IMAGE, kernel_shape=[2, 2], dilations=[1, 1]),
    ),
    Case(
        "pads",
        "8.4",
        one_node("AveragePool", IMAGE, kernel_shape=[4, 4], pads=[0, 0, 2, 2]),
        one_node("AveragePool", IMAGE, kernel_shape=[4, 4], pads=[1, 1, 2, 2]),
    ),
    Case(
        "pads",
        "10.1",
        one_node("DeformConv", IMAGE, WEIGHT, (FLOAT, [1, 18, 7, 7]), opset=19, pads=[0, 0, 1, 1]),
        one_node("DeformConv", IMAGE, WEIGHT, (FLOAT, [1, 18, 8, 8]), opset=19, pads=[1, 1, 1, 1]),
    ),
    Case("p", "8.4", one_node("LpNormalization", ROW, p=3), one_node("LpNormalization", ROW, p=1)),
    Case("attribute", "8.4", one_node("Constant", value_string="words"), one_node("Constant", value_float=1.0)),
    Case(
        "mode",
        "8.4",
        one_node("Resize", IMAGE, None, np.float32([1, 1, 2, 2]), mode="cubic"),
        one_node("Resize", IMAGE, None, np.float32([1, 1, 2, 2])),
    ),
    Case(
        "mode",
        "10.0",
        one_node("GridSample", IMAGE, GRID, opset=20, mode="cubic"),
        one_node("GridSample", IMAGE, GRID, opset=20),
    ),
    Case(
        "mode",
        "8.6",
        one_node("Pad", ROW, numbers(0, 0, 0, 0, 0, 1), mode="wrap"),
        one_node("Pad", ROW, numbers(0, 0, 0, 0, 0, 1), mode="edge"),
    ),
    Case(
        "coordinate_transformation_mode",
        "8.4",
        one_node("Resize", IMAGE, None, np.float32([1, 1, 2, 2]), coordinate_transformation_mode="tf_crop_and_resize"),
        one_node("Resize", IMAGE, None, np.float32([1, 1, 2, 2]), coordinate_transformation_mode="align_corners"),
    ),
    Case(
        "nearest_mode",
        "8.4",
        *(
            one_node(
                "Resize",
                IMAGE,
                None,
                np.float32([1, 1, 2, 2]),
                coordinate_transformation_mode="tf_half_pixel_for_nn",
                **mode,
            )
            for mode in ({"nearest_mode": "floor"}, {})
        ),
    ),
    Case(
        "antialias",
        "10.0",
        *(
            one_node("Resize", IMAGE, None, np.float32([1, 1, 0.5, 0.5]), opset=18, mode="linear", antialias=n)
            for n in (1, 0)
        ),
    ),
    Case(
        "keep_aspect_ratio_policy",
        "10.0",
        *(
            one_node("Resize", IMAGE, None, None, numbers(1, 4, 9, 9), opset=18, keep_aspect_ratio_policy=policy)
            for policy in ("not_larger", "stretch")
        ),
    ),
    Case("equation", "8.4", one_node("Einsum", ROW, equation="Bcd->Bdc"), one_node("Einsum", ROW, equation="bcd->bdc")),
    *(
        Case(
            "equation",
            target,
            one_node("Einsum", *broken, equation=one),
            one_node("Einsum", *kept, equation=other),
            severity,
        )
        for target, broken, one, kept, other, severity in [
            ("8.6", [ROW], "...d->d...", [ROW], "bcd->dbc", "error"),
            ("8.6", [SQUARE] * 3, "ij,jk,kl->il", [SQUARE] * 2, "ij,jk->ik", "error"),
            ("10.11", [SQUARE], "ii->i", [SQUARE], "ij->i", "error"),
            ("8.6", [(FLOAT, [1, 3]), SQUARE], "ij,ij->i", [SQUARE, SQUARE], "ij,ij->i", "warning"),
        ]
    ),
    Case(
        "topk_k",
        "10.0",
        one_node("TopK", (FLOAT, [9000]), numbers(4000), outputs=2),
        one_node("TopK", (FLOAT, [9000]), numbers(300), outputs=2),
        "warning",
    ),
    Case(
        "largest",
        "8.4",
        one_node("TopK", ROW, numbers(3), outputs=2, largest=0),
        one_node("TopK", ROW, numbers(3), outputs=2, largest=1),
    ),
    Case(
        "sorted",
        "8.4",
        one_node("TopK", ROW, numbers(3), outputs=2, sorted=0),
        one_node("TopK", ROW, numbers(3), outputs=2),
        "warning",
    ),
    Case(
        "zero_point",
        "8.4",
        one_node("DequantizeLinear", (INT8, [4]), SCALE, ZERO + 1),
        one_node("DequantizeLinear", (INT8, [4]), SCALE, ZERO),
    ),
    Case(
        "zero_point_type",
        "8.6",
        one_node("QuantizeLinear", ROW, SCALE, ZERO.astype(np.uint8)),
        one_node("QuantizeLinear", ROW, SCALE, ZERO),
    ),
    Case(
        "zero_point_type", "8.6", one_node("QuantizeLinear", ROW, SCALE), one_node("QuantizeLinear", ROW, SCALE, ZERO)
    ),
    Case("scales", "8.4", one_node("QuantizeLinear", ROW, -SCALE, ZERO), one_node("QuantizeLinear", ROW, SCALE, ZERO)),
    Case(
        "input_forget",
        "8.4",
        one_node("LSTM", *LSTM, hidden_size=3, input_forget=1),
        one_node("LSTM", *LSTM, hidden_size=3),
    ),
    Case(
        "clip",
        "8.4",
        one_node("LSTM", *LSTM, hidden_size=3, clip=0.5),
        one_node("LSTM", *LSTM, hidden_size=3),
        "warning",
    ),
    Case(
        "layout",
        "8.4",
        one_node("LSTM", *LSTM, hidden_size=3, opset=14, layout=1),
        one_node("LSTM", *LSTM, hidden_size=3, opset=14),
    ),
    Case(
        "activations",
        "8.4",
        *(
            one_node(
                "GRU",
                *RECURRENT,
                hidden_size=3,
                direction="bidirectional",
                activations=["Sigmoid", "Tanh", "Sigmoid", last],
            )
            for last in ("Relu", "Tanh")
        ),
    ),
    *(
        Case(
            "reduction",
            target,
            one_node(op, ROW, np.zeros(shape, np.int64), np.ones((1, 1, 1), np.float32), opset=16, reduction="add"),
            one_node(op, ROW, np.zeros(shape, np.int64), np.ones((1, 1, 1), np.float32), opset=16),
        )
        for op, target, shape in [
            ("ScatterElements", "8.6", (1, 1, 1)),
            ("ScatterND", "8.6", (1, 1, 1, 3)),
            ("ScatterND", "10.1", (1, 1, 1, 3)),
        ]
    ),
    # What the parser takes for something else, or refuses, as seen in it.
    *(
        Case("old_broadcast", target, one_node(op, *inputs, opset=6), one_node(op, *inputs, opset=13))
        for op, target, inputs in [
            ("Add", "8.6", (ROW, (FLOAT, [8]))),
            ("Mul", "10.1", (ROW, ROW)),
            ("Gemm", "8.4", (SQUARE, SQUARE, (FLOAT, [3]))),
        ]
    ),
    Case("type", "8.6", one_node("Clip", (INT8, [4]), (INT8, []), opset=13), one_node("Clip", ROW, opset=13)),
    Case(
        "type",
        "10.1",
        one_node("DequantizeLinear", (UINT8, [4]), SCALE),
        one_node("DequantizeLinear", (INT8, [4]), SCALE),
    ),
    Case(
        "type",
        "8.5",
        *(one_node("OneHot", (INT64, [3]), np.array(5, kind), np.float32([0, 1])) for kind in (np.float32, np.int64)),
    ),
    Case("type", "10.1", one_node("Celu", (HALF, [4])), one_node("Celu", (FLOAT, [4]))),
    Case(
        "bounds",
        "8.4",
        one_node("Clip", (HALF, [4]), np.array(0, np.float16)),
        one_node("Clip", (FLOAT, [4]), np.array(0, np.float32)),
    ),
    Case("upper", "10.1", one_node("Trilu", ROW, opset=14), one_node("Trilu", ROW, opset=14, upper=0)),
    Case("upper", "10.1", one_node("Trilu", ROW, opset=14), one_node("Trilu", (FLOAT, [0, 5]), opset=14)),
    Case("value_int", "8.6", one_node("Constant", value_int=3), one_node("Constant", value=from_int(3))),
    Case("value_int", "9.1", one_node("Constant", value_ints=[3, 4]), one_node("Constant", value_int=0)),
    Case("shape_part", "9.3", one_node("Shape", ROW, opset=15, start=1), one_node("Shape", ROW, opset=15, start=-3)),
    Case("shape_part", "8.6", one_node("Shape", ROW, opset=15, end=0), one_node("Shape", ROW, opset=15, end=3)),
    Case(
        "axes_after_exp",
        "10.1",
        one_node("ReduceLogSumExp", ROW, numbers(1), opset=18),
        one_node("ReduceLogSumExp", ROW, (INT64, [0]), opset=18),
    ),
    Case(
        "vector_first",
        "10.1",
        one_node("MatMul", (FLOAT, [4]), (FLOAT, [2, 4, 3])),
        one_node("MatMul", (FLOAT, [4]), (FLOAT, [4, 3])),
    ),
    Case(
        "computed_scales",
        "10.1",
        one_node("Resize", IMAGE, None, (FLOAT, [4])),
        one_node("Resize", IMAGE, None, None, (INT64, [4])),
    ),
    Case(
        "computed_scales",
        "8.6",
        one_node("Upsample", IMAGE, Computed(np.float32([1, 1, 2, 2])), opset=9),  # they may be whole numbers
        one_node("Upsample", IMAGE, np.float32([1, 1, 2, 2]), opset=9),
        "warning",
    ),
    Case(
        "sizes",
        "8.6",
        *(
            one_node("Resize", IMAGE, None, *given, coordinate_transformation_mode="tf_half_pixel_for_nn")
            for given in ((None, numbers(1, 4, 16, 16)), (np.float32([1, 1, 2, 2]),))
        ),
    ),
    Case(
        "corners",
        "10.1",
        *(
            one_node(
                "Resize",
                IMAGE,
                None,
                np.float32([1, 1, n, n]),
                mode="linear",
                coordinate_transformation_mode="align_corners",
            )
            for n in (0.6, 0.75)
        ),
    ),
    Case(
        "mode",
        "10.1",
        *(
            one_node(
                "Resize",
                IMAGE,
                None,
                np.float32([1, 1, 2, 2]),
                opset=11,
                mode=mode,
                coordinate_transformation_mode="tf_half_pixel_for_nn",
            )
            for mode in ("linear", "nearest")
        ),
    ),
    *(
        Case(
            "output_shape",
            target,
            *(
                one_node(
                    "ConvTranspose",
                    (FLOAT, [1, 2, 6, 5]),
                    np.linspace(-1, 1, 54, dtype=np.float32).reshape(2, 3, 3, 3),
                    strides=[2, 2],
                    output_shape=shape,
                    **attributes,
                )
                for shape in shapes
            ),
        )
        for target in ("8.6", "10.1")
        for shapes, attributes in (
            (([12, 10], [11, 9]), {}),
            (([13, 10], [12, 10]), {"auto_pad": "SAME_LOWER"}),
        )
    ),
    Case(
        "type",
        "8.6",
        *(
            one_node("InstanceNormalization", (kind, [1, 2, 3, 4]), *(np.linspace(1, 2, 2, dtype=dtype) for _ in "ab"))
            for kind, dtype in ((HALF, np.float16), (FLOAT, np.float32))
        ),
    ),
    Case(
        "type",
        "10.1",
        *(
            one_node(
                "GRU", (kind, [3, 1, 2]), *(np.ones(shape, dtype) for shape in ((1, 6, 2), (1, 6, 2))), hidden_size=2
            )
            for kind, dtype in ((HALF, np.float16), (FLOAT, np.float32))
        ),
    ),
    Case(
        "statistics",
        "8.6",
        *(
            one_node("BatchNormalization", (HALF, [1, 2, 3, 4]), *np.float16([[0, 0], [1, 2], [1, 1]]), last)
            for last in ((HALF, [2]), np.ones(2, np.float16))
        ),
    ),
    Case(
        "factors",
        "8.6",
        *(one_node("Gemm", *[(HALF, [3, 3])] * 3, alpha=alpha) for alpha in (2.0, 1.0)),
    ),
    Case("p", "10.1", *(one_node("GlobalLpPool", (FLOAT, [2, 3, 4, 5]), p=p) for p in (1, 2))),
    Case(
        "slice_axes",
        "8.6",
        *(one_node("Slice", (FLOAT, [3, 4]), numbers(*[1] * n), numbers(*[2] * n)) for n in (1, 2)),
    ),
    *(
        Case(
            "noop_with_empty_axes",
            target,
            *(one_node(op, (FLOAT, [3, 4]), opset=opset, noop_with_empty_axes=n) for n in (1, 0)),
        )
        for target, op, opset in (
            ("8.6", "ReduceSum", 13),
            ("10.1", "ReduceLogSum", 18),
            ("10.1", "ReduceSumSquare", 18),
        )
    ),
    *(
        Case("negative_pads", target, *(one_node("Pad", (FLOAT, [3, 4]), numbers(0, n, 1, 0)) for n in (-1, 2)))
        for target in ("8.4", "10.1")
    ),
    Case("type", "10.1", one_node("ReduceMax", (BOOL, [4]), opset=20), one_node("ReduceMax", (FLOAT, [4]), opset=20)),
    Case(
        "uneven_split",
        "10.1",
        one_node("Split", (FLOAT, [5]), opset=18, outputs=4, num_outputs=4),
        one_node("Split", (FLOAT, [6]), opset=18, outputs=4, num_outputs=4),
    ),
    Case(
        "loop_counter",
        "8.5",
        one_node("Loop", np.array(3), TRUE, (FLOAT, [2]), outputs=2, body=body([2], [2], counted=True)),
        one_node("Loop", np.array(3), TRUE, (FLOAT, [2]), body=body([2], [2])),
    ),
    Case(
        "loop_given",
        "10.1",
        *(one_node("Loop", np.array(3), given, (FLOAT, [2]), body=body([2], [2])) for given in (None, TRUE)),
    ),
    Case(
        "renamed_input",
        "10.1",
        one_node("Loop", np.array(3), (BOOL, []), (FLOAT, [2]), body=body([2], [2])),
        one_node("Loop", np.array(3), TRUE, (FLOAT, [2]), body=body([2], [2])),
    ),
    Case(
        "kernel_shape",
        "8.6",
        one_node("Conv", IMAGE, Computed(WEIGHT)),
        one_node("Conv", IMAGE, Computed(WEIGHT), kernel_shape=[3, 3]),
    ),
    Case(
        "kernel_shape",
        "8.6",
        one_node("Conv", IMAGE, WEIGHT, Computed(BIAS)),
        one_node("Conv", IMAGE, WEIGHT, Computed(BIAS), kernel_shape=[3, 3]),
    ),
    Case(
        "ceil_mode",
        "10.1",
        *(one_node("MaxPool", IMAGE, kernel_shape=[n, n], strides=[2, 2], ceil_mode=1) for n in (1, 2)),
    ),
    Case(
        "ceil_mode",
        "8.6",
        one_node("AveragePool", (FLOAT, [1, 2, "h", 4]), kernel_shape=[2, 2], strides=[3, 2], ceil_mode=1),
        one_node("AveragePool", (FLOAT, [1, 2, "h", 4]), kernel_shape=[3, 2], strides=[3, 2], ceil_mode=1),
        "warning",
    ),
    Case(
        "int4",
        "10.1",
        *(
            one_node("DequantizeLinear", (TensorProto.INT4, [n]), SCALE, (TensorProto.INT4, [1]), opset=21)
            for n in (5, 6)
        ),
    ),
    Case(
        "scattered",
        "10.1",
        *(
            one_node("ScatterElements", (FLOAT, [4]), np.zeros(n, np.int64), np.zeros(n, np.float32), opset=16)
            for n in (5, 4)
        ),
    ),
    Case("scalar", "10.1", *(one_node("QuantizeLinear", (FLOAT, n), SCALE, ZERO) for n in ([], [1]))),
    Case(
        "reduction",
        "10.1",
        one_node(
            "ScatterND",
            ROW,
            np.zeros((1, 1, 1, 3), np.int64),
            np.ones((1, 1, 1), np.float32),
            reduction="none",
            opset=16,
        ),
        one_node("ScatterND", ROW, np.zeros((1, 1, 1, 3), np.int64), np.ones((1, 1, 1), np.float32), opset=16),
    ),
    Case("empty_axes", "8.6", one_node("ReduceSum", ROW, numbers()), one_node("ReduceSum", ROW)),
    Case("empty_axes", "10.1", one_node("Unsqueeze", ROW, numbers()), one_node("Unsqueeze", ROW, numbers(0))),
    Case(
        "axis",
        "10.15",
        *(one_node("TensorScatter", QUERY, (FLOAT, [1, 2, 1, 8]), opset=24, axis=axis) for axis in (-1, -2)),
        "warning",
    ),
]


def findings(model: onnx.ModelProto, target: str, rule: str) -> list[Finding]:
    return [finding for finding in svexport.check(model, target).findings if finding.rule == rule and finding.op]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.rule}-{case.broken.graph.node[-1].op_type}-{case.target}"
)
def test_restriction(case):
    found = findings(case.broken, case.target, case.rule)
    assert [finding.severity for finding in found] == [case.severity]
    assert found[0].node == "it"
    assert all((found[0].expected, found[0].came, found[0].todo))
    assert not findings(case.kept, case.target, case.rule)
    assert svexport.check(case.kept, case.target).ok


def test_every_restriction_has_a_model():
    named = {(op, rule.name) for op, entry in OPERATORS.items() for rule in entry.rules}
    assert {rule for _, rule in named} - {case.rule for case in CASES} == {
        "padded"
    }  # of each NonMaxSuppression before 8.5


# Versions from which on a restriction is lifted, as the changelog of the parser says.
LIFTED = [
    ("constant_K", "8.6", one_node("TopK", ROW, (INT64, [1]), outputs=2)),
    ("constant_axes", "10.7", one_node("Squeeze", ROW, (INT64, [1]))),
    ("constant_axis", "10.8", one_node("CumSum", ROW, (INT64, []))),
    ("known_axes", "10.3", one_node("Slice", ROW, numbers(0), numbers(1), (INT64, [1]))),
    ("equation", "10.12", one_node("Einsum", SQUARE, equation="ii->i")),
    ("equation", "9.0", one_node("Einsum", ROW, equation="...d->d...")),
    (
        "reduction",
        "10.0",
        one_node(
            "ScatterElements",
            ROW,
            np.zeros((1, 1, 1), np.int64),
            np.ones((1, 1, 1), np.float32),
            opset=16,
            reduction="add",
        ),
    ),
    ("mode", "10.0", one_node("Pad", ROW, numbers(0, 0, 0, 0, 0, 1), mode="wrap")),
    ("largest", "8.5", one_node("TopK", ROW, numbers(3), outputs=2, largest=0)),
    ("type", "10.12", one_node("Pow", (INT32, [2]), (INT32, [2]))),
]


@pytest.mark.parametrize(("rule", "target", "model"), LIFTED, ids=lambda value: value if isinstance(value, str) else "")
def test_lifted(rule, target, model):
    major, minor = map(int, target.split("."))
    before = dotted(KNOWN[KNOWN.index((major, minor)) - 1])
    assert findings(model, before, rule)
    assert not findings(model, target, rule)


@pytest.mark.parametrize(
    ("op", "first", "before"),
    [
        *[("Einsum", "8.2", ""), ("HardSwish", "8.4", "8.2"), ("GridSample", "8.5", "8.4"), ("NonZero", "8.5", "8.4")],
        *[
            ("LayerNormalization", "8.6", "8.5"),
            ("IsInf", "8.6", "8.5"),
            ("Gelu", "10.0", "9.3"),
            ("DeformConv", "10.1", "10.0"),
        ],
        *[
            ("STFT", "10.5", "10.4"),
            ("Attention", "10.14", "10.13"),
            ("Swish", "11.0", "10.16"),
            ("AffineGrid", "", "11.5"),
        ],
    ],
)
def test_first_versions(op, first, before):
    model = one_node(op, IMAGE, opset=9)
    verdicts = [list(svexport.check(model, target).verdicts) for target in (first, before) if target]
    if first:
        assert verdicts.pop(0) != ["unsupported"]
    if before:
        assert verdicts == [["unsupported"]]
        (finding,) = findings(model, before, "unsupported")
        assert (f"TensorRT {first} or later" if first else "no version has AffineGrid") in finding.expected


def test_ops_of_tensorrt():
    """In a domain of their own, as the tools that quantize for it write them."""
    model = one_node("TRT_FP8QuantizeLinear", ROW, SCALE)
    model.graph.node[0].domain = "trt"
    assert svexport.check(model, "8.6").verdicts == {"native": 1}
    assert not {finding.rule for finding in svexport.check(model, "8.6").warnings} & {"shadowing", "unknown_plugin"}
    assert svexport.check(model, "8.5").verdicts == {"unsupported": 1}


def test_every_op_of_onnx_has_a_verdict():
    """At each of its versions and with nothing that a node should have: there is no telling what files hold."""
    schemas = onnx.defs.get_all_schemas_with_history()
    assert len(schemas) > 400
    for schema in schemas:
        inputs = [(FLOAT, [2, 3, 4, 5])] * max(schema.min_input, 1)
        model = one_node(schema.name, *inputs, opset=max(schema.since_version, 1), outputs=max(schema.min_output, 1))
        model.graph.node[0].domain = schema.domain
        for target in ("8.4", "10.12", "11.5"):
            report = svexport.check(model, target)
            assert sum(report.verdicts.values()) == 1
            assert set(report.verdicts) <= set(VERDICTS) - {"plugin", "body"}
            if schema.name not in OPERATORS:
                assert set(report.verdicts) == {"unsupported"}, schema.name


def test_the_table_names_ops_of_onnx():
    """But for those that ONNX never had, or had before its releases."""
    schemas = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == ""}
    newer = {"TensorScatter", "Swish", "Attention", "RMSNormalization", "RotaryEmbedding"}  # than an old onnx
    others = {name for name in set(OPERATORS) - schemas - newer if not name.startswith("TRT_")}
    assert others == {"ImageScaler", "ParametricSoftplus", "ScaledTanh", "DistCollective"}
    assert set(INSTEAD) <= schemas
    own = list(OPERATORS).index("DistCollective")  # TensorRT's come last
    for names in (list(OPERATORS)[:own], list(OPERATORS)[own:], list(INSTEAD)):
        assert names == sorted(names, key=str.lower)


def test_types():
    assert allowed_types("float int@8.6 int8", (8, 4)) == ["FLOAT", "FLOAT16", "INT8"]
    assert allowed_types("float int@8.6 int8", (8, 6)) == ["FLOAT", "FLOAT16", "INT32", "INT8"]
    assert allowed_types("float int@8.6 int8", (10, 0)) == ["FLOAT", "FLOAT16", "BFLOAT16", "INT32", "INT64"]
    assert [type_name(INT64, version) for version in ((8, 6), (9, 0))] == ["INT32", "INT64"]
    assert type_name(TensorProto.DOUBLE, (11, 0)) == "FLOAT"


def test_targets():
    assert Target.parse("8.4").opsets == (9, 17)
    assert [Target.parse(text).bodies for text in ("10.6", "10.7", "11")] == [False, True, True]
    assert Target.parse("10.15").opsets == (9, 24)
    assert Target.parse("8.6.1").version == (8, 6)


@pytest.mark.parametrize("text", ["7.2", "8.3", "86", "99", "10.17", "", "ten"])
def test_unknown_targets_are_refused_with_the_list(text):
    with pytest.raises(
        ExportError, match=r"8\.2, 8\.4, 8\.5, 8\.6, 9\.0 to 9\.3, 10\.0 to 10\.16, 11\.0 to 11\.5"
    ) as error:
        Target.parse(text)
    assert repr(text) in str(error.value)


# What a node of a newer opset says that an older one does not know.
NEWER = [
    (one_node("Relu", ROW, opset=14), 13, ""),  # more types alone
    (one_node("ReduceMean", ROW, numbers(1), opset=18), 17, "axes as an input"),
    (one_node("ReduceMean", ROW, opset=18), 17, ""),
    (one_node("Split", ROW, opset=18, num_outputs=2, outputs=2), 17, "the attribute num_outputs"),
    (one_node("Cast", ROW, opset=19, to=HALF, saturate=1), 17, ""),  # at its default
    (one_node("Cast", ROW, opset=19, to=HALF, saturate=0), 17, "the attribute saturate"),
    (one_node("GridSample", IMAGE, GRID, opset=20), 17, ""),  # linear is bilinear's new name
    (one_node("GroupNormalization", IMAGE, BIAS, BIAS, num_groups=2, opset=21), 20, "GroupNormalization of opset 21"),
    (one_node("Swish", ROW, opset=24), 17, ""),  # which has no such op: that is told of elsewhere
]


@pytest.mark.parametrize(
    ("model", "known", "text"), NEWER, ids=lambda v: v.graph.node[0].op_type if isinstance(v, onnx.ModelProto) else ""
)
def test_newer_than(model, known, text):
    assert newer_than(model.graph.node[-1], model.opset_import[0].version, known) == text


def test_newer_opsets():
    """No parser looks at the number: what counts is whether a node says something that older opsets do not know."""
    report = svexport.check(one_node("Relu", ROW, opset=22), "8.6")
    assert report.ok
    assert "opset" in [finding.rule for finding in report.warnings]
    report = svexport.check(one_node("ReduceMax", ROW, numbers(1), opset=18), "8.6")
    assert [(finding.rule, finding.came) for finding in report.errors] == [
        ("opset", "opset 18, in which ReduceMax has axes as an input")
    ]


@pytest.mark.parametrize(
    ("axes", "attributes", "ok"),
    [
        (numbers(0, 1, 2), {}, True),
        (numbers(0, 1, 2), {"keepdims": 0}, True),
        ((INT64, [3]), {}, True),  # whichever they are
        ((INT64, [2]), {}, False),
        ((INT64, [0]), {}, True),
        ((INT64, [0]), {"noop_with_empty_axes": 1}, False),
        (numbers(1, 2), {}, True),  # the other has one element
        (numbers(1, 2), {"keepdims": 0}, False),
        (numbers(0, 1), {}, False),
    ],
)
def test_axes_that_are_not_read(axes, attributes, ok):
    """Before opset 18 all axes are reduced where the node has none as an attribute."""
    assert svexport.check(one_node("ReduceMax", ROW, axes, opset=18, **attributes), "8.6").ok is ok
    assert svexport.check(one_node("ReduceLogSumExp", ROW, axes, opset=18, **attributes), "10.1").ok is ok


@pytest.mark.parametrize(("first", "ok"), [(0, True), (1, False)])
def test_axes_that_are_counted(first, ok):
    """Axes from one to the last: how many is known where the rank is, which is the size of a shape."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Size", ["shape"], ["rank"]),
        helper.make_node("Add", ["first", "rank"], ["behind"]),
        helper.make_node("Sub", ["behind", "rank"], ["begin"]),
        helper.make_node("Range", ["begin", "rank", "one"], ["axes"]),
        helper.make_node("ReduceMax", ["x", "axes"], ["y"]),
    ]
    scalars = [numpy_helper.from_array(np.array(n), name) for n, name in ((first, "first"), (1, "one"))]
    infos = [
        [helper.make_tensor_value_info(name, FLOAT, sizes)] for name, sizes in (("x", [3, 4, 5]), ("y", [None] * 3))
    ]
    graph = helper.make_graph(nodes, "counted", *infos, scalars)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    assert svexport.check(model, "8.6").ok is ok


@pytest.mark.parametrize(
    ("model", "target", "renamed"),
    [
        (one_node("Transpose", ROW, perm=[0, 1, 2]), "8.4", True),
        (one_node("Transpose", ROW, perm=[0, 1, 2]), "8.5", False),
        (one_node("Transpose", ROW, perm=[0, 2, 1]), "8.4", False),
        (one_node("Dropout", ROW, outputs=2), "8.6", True),
        (one_node("Dropout", ROW, outputs=2), "9.1", False),
    ],
)
def test_renamed_inputs(model, target, renamed):
    """A node that returns its input as it is gives the name of its output to it."""
    found = [finding.came for finding in svexport.check(model, target).errors if finding.rule == "renamed_input"]
    assert found == ["'x0', which is 'y0' too, and becomes '__y0' as an input"] * renamed


@pytest.mark.parametrize("target", ["8.4", "10.1"])
def test_inputs_that_are_outputs(target):
    model = one_node("Relu", ROW)
    model.graph.output.append(model.graph.input[0])
    (finding,) = svexport.check(model, target).errors
    assert finding.came == "'x0', which is 'x0' too, and becomes '__x0' as an input"
