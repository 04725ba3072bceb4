"""Transposes are removed wherever they cancel, never added, and no result changes."""

from __future__ import annotations

import copy
import re
from itertools import combinations
from math import prod

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper, parser

from svexport.errors import VerificationError
from svexport.graph.cut import Network
from svexport.graph.motion import FAMILIES
from svexport.graph.permutation import compose, extend, identity, inverse, restrict
from svexport.graph.transposes import remove_transposes
from svexport.graph.walk import graphs
from tests.graph.prove import prove
from tests.support import calls

SIZES = {"N": 2, "H": 4, "W": 5}


def model_of(body: str, inputs: str, opset: int = 13, ir_version: int = 8) -> onnx.ModelProto:
    """A model from ONNX text. ``T021(x)`` is a Transpose; values named ``y`` and up are the outputs."""
    body = re.sub(r"T(\d+)\(", lambda found: f"Transpose<perm=[{', '.join(found[1])}]>(", body)
    body = re.sub(r"\s(\w+ =|\w+, \w+ =)", r"\n\1", " " + body)
    names = sorted(set(re.findall(r"^([yz]\d?)\b|, ([yz]\d?) =", body, re.M)))
    outputs = ", ".join(f"float[] {a or b}" for a, b in names)
    inputs, _, constants = inputs.partition("|")
    text = f'<ir_version: {ir_version}, opset_import: ["": {opset}]> g ({inputs}) => ({outputs})'
    model = parser.parse_model(f"{text} <{constants}> {{{body}\n}}")
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
        output.type.tensor_type.elem_type = TensorProto.UNDEFINED
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


def transposes(model: onnx.ModelProto) -> tuple[int, int]:
    """How many there are, and how many elements they move (64 for a dynamic size)."""
    shapes = {}
    inferred = onnx.shape_inference.infer_shapes(model).graph
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        shapes[value.name] = [d.dim_value or 64 for d in value.type.tensor_type.shape.dim]
    found = [n for g in graphs(model.graph) for n in g.node if n.op_type == "Transpose"]
    return len(found), sum(prod(shapes.get(n.output[0], [0])) for n in found)


def check(model: onnx.ModelProto, *, exact: bool = False, seed: int = 0, sizes=SIZES) -> onnx.ModelProto:
    """Removes Transposes and holds the result to what never may change."""
    after = copy.deepcopy(model)
    remove_transposes(after)
    onnx.checker.check_model(after, full_check=True)
    assert [i.SerializeToString() for i in after.graph.input] == [i.SerializeToString() for i in model.graph.input]
    assert [o.name for o in after.graph.output] == [o.name for o in model.graph.output]
    assert (after.opset_import, after.ir_version) == (model.opset_import, model.ir_version)
    names = [node.name for node in after.graph.node if node.name]
    assert len(set(names)) == len(names)
    assert all(now <= before for now, before in zip(transposes(after), transposes(model), strict=True))
    prove(model, after, exact=exact, sizes=sizes, seed=seed)
    return after


X = "float[2,3,4,5] x"
XW = X + ", float[2,4,5,3] w"
DYNAMIC = 'float["N",3,"H","W"] x'

# ---------------------------------------------------------------- by hand

CASES = {
    # permute algebra
    "identity": (X, "y = T0123(x)", 0),
    "opposite": (X, "a = T0231(x) y = T0312(a)", 0),
    "no permutation given": (X, "a = Transpose(x) y = T3210(a)", 0),
    "three make one": (X, "a = T0231(x) b = T0213(a) y = T1023(b)", 1),
    "four make none": (X, "a = T1230(x) b = T1230(a) c = T1230(b) y = T1230(c)", 0),
    "equal ones are shared": (X, "a = T0231(x) b = T0231(x) y = Relu(a) z = Flatten(b)", 1),
    "unused": (X, "a = T0231(x) y = Relu(x)", 0),
    "an output in the middle": (X, "y = T0231(x) z = T0312(y)", 1),
    "the same output twice": (X, "y = T0231(x) z = T0231(x)", 1),
    # elementwise
    "unary": (X, "a = T0231(x) b = Relu(a) y = T0312(b)", 0),
    "a chain": (X, "a = T0231(x) b = Relu(a) c = Exp(b) d = Neg(c) e = Cast<to=10>(d) y = T0312(e)", 0),
    "clip with bounds": (X + "| float lo = {-1}, float hi = {1}", "a = T0231(x) b = Clip(a, lo, hi) y = T0312(b)", 0),
    "one of two uses": (X, "a = T0231(x) b = Relu(a) y = T0312(b) z = Exp(b)", 1),
    "both operands": (XW, "a = T0231(x) b = Add(a, a) c = Sub(b, a) y = T0312(c)", 0),
    "one operand": (XW, "a = T0231(x) b = Add(a, w) y = T0312(b)", 1),
    "operands alike, transposed once": (X + ", float[2,3,4,5] v", "a = T0231(x) b = T0231(v) y = Mul(a, b)", 1),
    "broadcast vector": (X + "| float[3] w = {1,2,3}", "a = T0231(x) b = Mul(a, w) y = T0312(b)", 0),
    "broadcast channels": (X + "| float[3,1,1] w = {1,2,3}", "a = T0312(x) b = T0231(a) c = Add(b, w) y = T1023(c)", 1),
    "scalar of rank 1": (X + "| float[1] w = {2}", "a = T0231(x) b = Pow(a, w) y = T0312(b)", 0),
    "vector on the left": (X + "| float[3] w = {1,2,3}", "a = T0231(x) b = Sub(w, a) y = T0312(b)", 0),
    "vector computed": (X + ", float[3] v", "a = T0231(x) w = Exp(v) b = Add(a, w) y = T0312(b)", 0),
    "matrix computed": (X + ", float[5,3] v", "a = T0231(x) b = Add(a, v) y = T0312(b)", 1),
    "slope": (X + "| float[3] w = {1,2,3}", "a = T0231(x) b = PRelu(a, w) y = T0312(b)", 0),
    "comparison and Where": (
        X + "| float[3] w = {1,2,3}",
        "a = T0231(x) b = Less(a, w) n = Not(b) c = Where(n, a, w) y = T0312(c)",
        0,
    ),
    "three operands": (X + "| float[3] w = {0,1,-1}", "a = T0231(x) b = Max(a, w, a) y = T0312(b)", 0),
    # axes
    "Slice": (
        X + "| int64[2] s = {0,1}, int64[2] e = {2,3}, int64[2] i = {-1,1}",
        "a = T0231(x) b = Slice(a, s, e, i) y = T0312(b)",
        0,
    ),
    "Slice of the first axes": (
        X + "| int64[2] s = {0,1}, int64[2] e = {2,3}",
        "a = T2031(x) b = Slice(a, s, e) y = T1302(b)",
        0,
    ),
    "Slice with attributes": (X, "a = T0231(x) b = Slice<axes=[3], starts=[1], ends=[3]>(a) y = T0312(b)", 0, 9),
    "Split": (X + "| int64[2] s = {1,2}", "a = T0231(x) b, c = Split<axis=-1>(a, s) y = T0312(b) z = T0312(c)", 0),
    "Split with an attribute": (
        X,
        "a = T0231(x) b, c = Split<axis=3, split=[1,2]>(a) y = T0312(b) z = T0312(c)",
        0,
        11,
    ),
    "Concat": (X, "a = T0231(x) b = Relu(a) c = Concat<axis=-1>(a, b) y = T0312(c)", 0),
    "Concat, transposed once": (X + ", float[2,6,4,5] v", "a = T0231(x) b = T0231(v) y = Concat<axis=3>(a, b)", 1),
    "Concat with a constant": (
        "float[2,3] x | float[1,2] w = {1,2}",
        "a = T10(x) b = Concat<axis=0>(a, w) y = T10(b)",
        0,
    ),
    "Pad": (X + "| int64[8] p = {0,1,0,2,0,0,3,0}", "a = T0231(x) b = Pad(a, p) y = T0312(b)", 0),
    "Pad with an attribute": (X, "a = T0231(x) b = Pad<pads=[0,1,0,2,0,0,3,0]>(a) y = T0312(b)", 0, 10),
    "Pad some axes": (
        X + "| int64[2] p = {1,2}, int64[1] i = {-1}",
        "a = T0231(x) b = Pad(a, p, , i) y = T0312(b)",
        0,
        18,
    ),
    "Gather of rank 1": (X + "| int64[2] i = {2,0}", "a = T0231(x) b = Gather<axis=3>(a, i) y = T0312(b)", 0),
    "Gather of one": (X + "| int64 i = {2}", "a = T0231(x) b = Gather<axis=3>(a, i) y = T021(b)", 1),
    "Gather of one, cancelling": (X + "| int64 i = {2}", "a = T0321(x) b = Gather<axis=3>(a, i) y = T021(b)", 0),
    "ArgMax": (X, "a = T0231(x) b = ArgMax<axis=3>(a) y = T0312(b)", 0),
    "ArgMax without its axis": (X, "a = T0321(x) b = ArgMax<axis=3, keepdims=0>(a) y = T021(b)", 0),
    "TopK": (X + "| int64[1] k = {2}", "a = T0231(x) b, c = TopK(a, k) y = T0312(b) z = T0312(c)", 0),
    "CumSum": (X + "| int64 i = {-1}", "a = T0231(x) b = CumSum(a, i) y = T0312(b)", 0),
    "Tile": (X + "| int64[4] r = {1,1,2,3}", "a = T0231(x) b = Tile(a, r) y = T0312(b)", 0),
    "Expand": ("float[3,1] x | int64[3] s = {2,4,3}", "a = T10(x) b = Expand(a, s) y = T021(b)", 0),
    "GatherElements": (
        "float[2,3] x, int64[2,3] i",
        "a = T10(x) j = T10(i) b = GatherElements<axis=1>(a, j) y = T10(b)",
        0,
    ),
    # reductions
    "ReduceMean": (X, "a = T0231(x) b = ReduceMean<axes=[-1]>(a) y = T0312(b)", 0),
    "ReduceMean without its axes": (X, "a = T0231(x) y = ReduceMean<axes=[1,2], keepdims=0>(a)", 0),
    "ReduceMax of what is left in order": (X, "a = T0231(x) y = ReduceMax<axes=[3], keepdims=0>(a)", 0),
    "ReduceMax of what is left transposed": (X, "a = T0213(x) y = ReduceMax<axes=[3], keepdims=0>(a)", 1),
    "ReduceSum, axes an input": (
        X + "| int64[2] i = {1,3}",
        "a = T0321(x) b = ReduceSum<keepdims=0>(a, i) y = T10(b)",
        1,
    ),
    "ReduceMin, axes an input": (X + "| int64[1] i = {3}", "a = T0231(x) b = ReduceMin(a, i) y = T0312(b)", 0, 18),
    "ReduceL2 of all": (X, "a = T0231(x) y = ReduceL2<keepdims=0>(a)", 0),
    "ReduceSum of none": (X, "a = T0231(x) b = ReduceSum<noop_with_empty_axes=1>(a) y = T0312(b)", 0),
    "Softmax": (X, "a = T0231(x) b = Softmax<axis=-1>(a) y = T0312(b)", 0),
    "Softmax of old, other dimensions": (X, "a = T0231(x) b = Softmax<axis=3>(a) y = T0312(b)", 2, 11),
    "Softmax of old, over all of them": (X, "a = T0231(x) b = LogSoftmax<axis=1>(a) y = T0312(b)", 0, 11),
    "Softmax of old, dimensions before": (X, "a = T1023(x) b = Softmax<axis=2>(a) y = T1023(b)", 0, 11),
    "a layer norm of single nodes": (
        X + "| float[3] w = {1,2,3}",
        "a = T0231(x) m = ReduceMean<axes=[-1]>(a) d = Sub(a, m) q = Mul(d, d) v = ReduceMean<axes=[-1]>(q) "
        "s = Sqrt(v) n = Div(d, s) g = Mul(n, w) y = T0312(g)",
        0,
    ),
    # dimensions that come and go
    "Unsqueeze and Squeeze": (
        "float[2,3,4] x | int64[1] i = {3}, int64[1] j = {1}",
        "a = Unsqueeze(x, i) b = T0312(a) c = Relu(b) y = Squeeze(c, j)",
        0,
    ),
    "Squeeze": ("float[2,1,4,5] x | int64[1] i = {1}", "a = T2130(x) b = Squeeze(a, i) y = T201(b)", 0),
    "Squeeze of what is left transposed": ("float[2,1,4,5] x", "a = T2130(x) y = Squeeze<axes=[1]>(a)", 1, 11),
    "Unsqueeze": ("float[2,3,4] x", "a = T210(x) b = Unsqueeze<axes=[0,4]>(a) y = T03214(b)", 0, 11),
    "sizes of 1": ("float[2,3,1,1] x", "y = T0231(x)", 0),
    "sizes of 1 and a dynamic one": ('float["N",1,4] x', "y = T021(x)", 0),
    "sizes of 1 between others": ("float[2,1,4,1] x", "a = T2130(x) b = Relu(a) y = T3210(b)", 0),
    # nodes that need some dimensions where they are
    "a linear layer over rows": ("float[2,3,4] x, float[4,6] w", "a = T102(x) b = MatMul(a, w) y = T102(b)", 0),
    "a linear layer over channels": (X + ", float[3,6] w", "a = T0231(x) b = MatMul(a, w) y = T0312(b)", 2),
    "LayerNormalization": (
        "float[2,3,4] x, float[4] w",
        "a = T102(x) b = LayerNormalization(a, w) y = T102(b)",
        0,
        17,
    ),
    "BatchNormalization": (
        "float[2,3,4,5] x, float[3] w",
        "a = T0132(x) b = BatchNormalization(a, w, w, w, w) y = T0132(b)",
        0,
    ),
    "InstanceNormalization": (
        "float[2,3,4,5] x, float[3] w",
        "a = T0132(x) b = InstanceNormalization(a, w, w) y = T0132(b)",
        0,
    ),
    "quantization": (
        X + ", float[3] s | int8[3] z = {0,1,2}",
        "a = T0231(x) b = QuantizeLinear<axis=-1>(a, s, z) c = DequantizeLinear<axis=-1>(b, s, z) y = T0312(c)",
        0,
    ),
    # constants
    "a weight": ("float[2,3] x | float[2,3] w = {1,2,3,4,5,6}", "a = T10(w) y = MatMul(x, a)", 0),
    "a weight in both": (
        "float[2,3] x | float[2,3] w = {1,2,3,4,5,6}",
        "a = T10(w) b = MatMul(x, a) y = MatMul(b, w)",
        0,
    ),
    "a Constant node": (X, "c = Constant<value=float[3] {1.0, 2.0, 3.0}>() a = T0231(x) b = Add(a, c) y = T0312(b)", 0),
    "numbers of a Constant node": (
        X,
        "c = Constant<value_floats=[1.0, 2.0, 3.0]>() d = Constant<value_float=2.0>() a = T0231(x) b = Add(a, c) "
        "e = Mul(b, d) i = Constant<value_ints=[3]>() f = ReduceSum(e, i) y = T0312(f)",
        0,
    ),
    # shapes
    "Shape of a transposed tensor": (X, "a = T0231(x) y = Shape(a) b = Relu(a) z = T0312(b)", 0),
    "a part of it": (X, "a = T0231(x) y = Shape<start=1, end=-1>(a) b = Relu(a) z = T0312(b)", 0, 15),
    # what must stay
    "Dropout that drops": (
        X + "| float r = {0.0}, bool t = {1}",
        "a = T0231(x) b = Dropout(a, r, t) y = T0312(b)",
        2,
    ),
    "between reshapes": (
        "float[2,3,4] x | int64[3] s = {2,4,3}, int64[2] r = {2,12}",
        "a = Reshape(x, s) b = T021(a) y = Reshape(b, r)",
        1,
    ),
    # as in networks
    "a residual": (X, "a = T0231(x) b = Relu(a) c = Add(a, b) d = Exp(c) e = Add(c, d) y = T0312(e)", 0),
    "branches that meet": (
        XW,
        "a = T0231(x) b = Relu(a) c = Mul(b, w) d = T0312(c) e = Add(d, x) y = T0231(e)",
        1,
    ),
    "a frame there is anyway": (
        "float[4,4,4] x | float[4] w = {1,2,3,4}",
        "a = T102(x) y = Sub(x, a) b = Add(x, w) z = T102(b)",
        1,
    ),
    "dynamic sizes": (DYNAMIC + "| float[3] w = {1,2,3}", "a = T0231(x) b = Mul(a, w) y = T0312(b)", 0),
    "dynamic sizes, reduced": (DYNAMIC, "a = T0231(x) b = ReduceMean<axes=[-1]>(a) c = Sub(a, b) y = T0312(c)", 0),
}


@pytest.mark.parametrize(("inputs", "body", "left", "opset"), [(*c, 13)[:4] for c in CASES.values()], ids=CASES)
def test_what_is_left(inputs: str, body: str, left: int, opset: int) -> None:
    after = check(model_of(body, inputs, opset))
    assert transposes(after)[0] == left, onnx.printer.to_text(after)
    again = copy.deepcopy(after)
    remove_transposes(again)
    assert (transposes(again), len(again.graph.node)) == (transposes(after), len(after.graph.node))


W = "| float[3] w = {1,2,3}"
AXIS = "| int64[1] i = {3}"
LAST, SWAP, ROWS = ("0231", "0312"), ("0132", "0132"), ("0213", "0213")
EVERY_OP = {  # inputs, the nodes between the two Transposes, the Transposes (to channels last and back)
    **dict.fromkeys(FAMILIES, (X, "b = OP(a)")),
    **dict.fromkeys(["And", "Or", "Xor"], ("bool[2,3,4,5] x", "b = OP(a, a)")),
    **dict.fromkeys(["BitwiseAnd", "BitwiseOr", "BitwiseXor"], ("int32[2,3,4,5] x", "b = OP(a, a)")),
    **dict.fromkeys(["Add", "Div", "Equal", "Greater", "GreaterOrEqual", "Less"], (X + W, "b = OP(a, w)")),
    **dict.fromkeys(["LessOrEqual", "Mean", "Mul", "PRelu", "Pow", "Sub", "Sum"], (X + W, "b = OP(a, w)")),
    **dict.fromkeys(["Max", "Min"], (X + W, "b = OP(w, a, w)")),
    **dict.fromkeys([name for name in FAMILIES if name.startswith("Reduce")], (X, "b = OP<axes=[3]>(a)")),
    **dict.fromkeys(["ArgMax", "ArgMin", "Hardmax", "LogSoftmax", "LpNormalization"], (X, "b = OP<axis=3>(a)")),
    **dict.fromkeys(["GlobalAveragePool", "GlobalMaxPool"], (X, "b = OP(a)", SWAP)),
    "BatchNormalization": (X + W, "b = OP(a, w, w, w, w)", SWAP),
    "BitShift": ("uint8[2,3,4,5] x", 'b = OP<direction="LEFT">(a, a)'),
    "BitwiseNot": ("int32[2,3,4,5] x", "b = OP(a)"),
    "Cast": (X, "b = OP<to=7>(a)"),
    "CastLike": (X + AXIS, "b = OP(a, i)"),
    "Concat": (X, "c = Neg(a) b = OP<axis=3>(a, c)"),
    "CumSum": (X + "| int64 i = {3}", "b = OP<reverse=1>(a, i)"),
    "DequantizeLinear": ("int8[2,3,4,5] x | float[3] s = {1,2,3}, int8[3] o = {1,2,3}", "b = OP<axis=3>(a, s, o)"),
    "Expand": ("float[2,3,1,1] x | int64[4] i = {2,4,5,3}", "b = OP(a, i)"),
    "Gather": (X + "| int64[2] i = {2,1}", "b = OP<axis=3>(a, i)"),
    "GatherElements": (X + W, "c = Less(a, w) i = Cast<to=7>(c) b = OP<axis=3>(a, i)"),
    "InstanceNormalization": (X + W, "b = OP(a, w, w)", SWAP),
    "LayerNormalization": (X + "| float[5] w = {1,2,3,4,5}", "b = OP(a, w)", ROWS),
    "MatMul": (X + "| float[5,2] w = {0,1,2,3,4,5,6,7,8,9}", "b = OP(a, w)", ROWS),
    "Mod": (X + W, "b = OP<fmod=1>(a, w)"),
    "Not": ("bool[2,3,4,5] x", "b = OP(a)"),
    "Pad": (X + "| int64[8] i = {0,1,2,3,3,2,1,0}", "b = OP(a, i)"),
    "QuantizeLinear": (X + "| float[3] s = {1,2,3}, uint8[3] o = {1,2,3}", "b = OP<axis=3>(a, s, o)"),
    "RMSNormalization": (X + "| float[5] w = {1,2,3,4,5}", "b = OP(a, w)", ROWS),
    "ReduceSum": (X + AXIS, "b = OP(a, i)"),
    "ScatterElements": (X, "i = ArgMax<axis=3>(a) v = Cast<to=1>(i) b = OP<axis=3>(a, i, v)"),
    "Slice": (X + "| int64[1] s = {0}, int64[1] e = {2}, int64[1] i = {3}", "b = OP(a, s, e, i)"),
    "Split": (X + "| int64[2] i = {1,2}", "b, c = OP<axis=3>(a, i)"),
    "Squeeze": ("float[2,3,1,5] x | int64[1] i = {1}", "b = OP(a, i)", ("0231", "021")),
    "Tile": (X + "| int64[4] i = {1,2,1,3}", "b = OP(a, i)"),
    "TopK": (X + "| int64[1] i = {2}", "b, c = OP(a, i)"),
    "Unsqueeze": ("float[2,3,4] x | int64[1] i = {2}", "b = OP(a, i)", ("021", "0321")),
    "Where": (X + W, "c = Less(a, w) b = OP(c, a, w)"),
}


@pytest.mark.parametrize("op_type", EVERY_OP)
def test_every_op(op_type: str) -> None:
    inputs, between, (there, back) = (*EVERY_OP[op_type], LAST)[:3]
    opset = next(o for o in range(13, 24) if onnx.defs.has(op_type, o))
    body = f"a = T{there}(x) {between.replace('OP', op_type)} y = T{back}(b)"
    after = check(model_of(body, inputs, opset))
    assert transposes(after)[0] == 0, onnx.printer.to_text(after)


def test_moving_sizes_of_1_is_a_reshape() -> None:
    after = check(model_of("y = T0231(x)", "float[2,3,1,1] x"), exact=True)
    assert [node.op_type for node in after.graph.node] == ["Reshape"]
    after = check(model_of("y = T0231(x)", 'float["N",3,1,1] x'), exact=True)
    assert [node.op_type for node in after.graph.node] == ["Reshape"]
    after = check(model_of("y = T102(x)", 'float["N",1,"H"] x'), exact=True)  # two dynamic sizes
    assert [node.op_type for node in after.graph.node] == ["Transpose"]
    after = check(model_of("y = T102(x)", "float[0,1,3] x"), exact=True)  # where 0 would mean "copy"
    assert [node.op_type for node in after.graph.node] == ["Transpose"]


def test_a_transpose_goes_where_it_moves_less() -> None:
    after = check(model_of("a = T0231(x) y = ReduceMean<axes=[1], keepdims=0>(a)", X))
    assert transposes(after) == (1, 2 * 3 * 5)
    after = check(model_of("a = Relu(x) b = Expand(a, s) y = T210(b)", "float[2,3,1] x | int64[3] s = {2,3,9}"))
    assert transposes(after) == (1, 2 * 3)


@pytest.mark.parametrize(("coordinates", "points", "left"), [(2, 1500, 2), (2, 60, 0), (16, 1500, 0), (1, 5000, 0)])
def test_rows_of_broadcast_inputs_stay_long(coordinates: int, points: int, left: int) -> None:
    """A factor for each coordinate is one for all points, not one of two: that runs four times as fast."""
    body = f"""s = Constant<value=float[{coordinates},1] {{{", ".join(["0.5"] * coordinates)}}}>()
    a = T021(x) b = Mul(a, s) c = Add(b, s) y = T021(c)"""
    after = check(model_of(body, f"float[3,{points},{coordinates}] x"), exact=True)
    assert transposes(after)[0] == left


@pytest.mark.parametrize(
    ("parts", "number", "elements"),
    [
        (0, 2, 20),  # one behind the Add would do, but it would move 500
        (1, 1, 4),
        (2, 2, 8),  # as many, behind the parts
        (3, 2, 20),  # three would move less, but they are more
    ],
)
def test_neither_number_nor_bytes_grow_for_the_other(parts: int, number: int, elements: int) -> None:
    inputs = "float[2,5] x, float[2,5] v | int64[1] c0 = {0}, int64[1] c1 = {1}, int64[1] c2 = {2}, "
    body = "a = T10(x) b = T10(v) c = Expand(a, s) d = Expand(b, s) e = Add(c, d)"
    for i in range(parts):
        body += f" p{i} = Gather<axis=0>(e, c{i}) y{i} = Slice(p{i}, c0, c2, c1)"
    after = check(model_of(body if parts else f"{body} y = Relu(e)", inputs + "int64[3] s = {50,5,2}"))
    assert transposes(after) == (number, elements)


def test_constants_stay_and_are_stored_once() -> None:
    rng = np.random.default_rng(0)
    for uses, left, names in [
        ("a = T10(w) y = MatMul(x, a)", 0, {"w_transposed"}),  # in no other frame
        ("a = T10(w) b = MatMul(x, a) y = MatMul(b, w)", 1, {"w"}),  # large: not stored twice
    ]:
        model = model_of(uses, "float[2,300] x, float[300,300] w")
        del model.graph.input[1]
        weight = rng.standard_normal((300, 300)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
        after = check(model)
        assert transposes(after)[0] == left
        assert {tensor.name for tensor in after.graph.initializer} == names


def test_an_initializer_that_is_an_input_is_no_constant() -> None:
    model = model_of("a = T0231(x) b = Add(a, w) y = T0312(b)", X + ", float[4,5,3] w", ir_version=3)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((4, 5, 3), np.float32), "w"))
    after = check(model)
    assert transposes(after)[0] == 1
    model = model_of("a = T0231(x) b = ReduceSum<axes=[3]>(a) y = T0312(b)", X, opset=9, ir_version=3)
    after = check(model)
    assert transposes(after)[0] == 0


def test_new_constants_of_old_files_are_nodes() -> None:
    body = "i = Constant<value=int64[1] {3}>() a = T0231(x) b = Slice(a, j, k, i) y = T0312(b)"
    body = "j = Constant<value=int64[1] {1}>() k = Constant<value=int64[1] {2}>() " + body
    after = check(model_of(body, X, opset=10, ir_version=3))
    assert transposes(after)[0] == 0
    assert not after.graph.initializer
    assert sum(node.op_type == "Constant" for node in after.graph.node) == 3  # the old axis is gone


def test_nodes_keep_their_names_and_metadata() -> None:
    model = model_of("a = T0231(x) b = Relu(a) y = Softmax<axis=-1>(b)", X, opset=11)
    for node in model.graph.node:
        node.name, node.doc_string = f"my {node.op_type}", f"line of {node.op_type}"
        node.metadata_props.add(key="namespace", value=node.op_type)
    after = check(model)
    for node in after.graph.node:
        assert (node.name, node.doc_string) == (f"my {node.op_type}", f"line of {node.op_type}")
        assert node.metadata_props[0].value == node.op_type
    assert len(after.graph.node) == 3


def test_new_values_are_typed_and_old_types_go() -> None:
    model = model_of("a = T0231(x) b = Relu(a) c = Exp(b) y = T0312(c)", DYNAMIC)
    after = check(model)
    made = {name for node in after.graph.node for name in node.output}
    types = {info.name: info.type.tensor_type for info in after.graph.value_info}
    assert types.keys() == made - {"y"}
    assert [d.dim_param or d.dim_value for d in types["b_transposed"].shape.dim] == ["N", 3, "H", "W"]


NESTED = """
    a = T0231(x)
    b = Relu(a)
    y = If (c) <
        then_branch = then () => (float[2,3,4,5] t) { s = Neg(b) t = Transpose<perm=[0,3,1,2]>(s) },
        else_branch = other () => (float[2,3,4,5] t) { s = Exp(x) r = Transpose<perm=[0,2,3,1]>(s)
            q = Relu(r) t = Transpose<perm=[0,3,1,2]>(q) }
    >
"""


def test_nested_graphs() -> None:
    model = model_of(NESTED + " z = T0312(b)", X + ", bool c")
    after = check(model)
    branches = {a.name: a.g for node in after.graph.node for a in node.attribute if node.op_type == "If"}
    assert [node.op_type for node in branches["else_branch"].node] == ["Exp", "Relu"]
    assert [node.op_type for node in branches["then_branch"].node] == ["Neg", "Transpose"]
    assert transposes(after)[0] == 2  # and the one for b, which the branch reads as it was


def test_nested_graphs_get_no_copy_of_large_constants() -> None:
    body = """y = If (c) <
        then_branch = then () => (float[2,300] t) { a = Transpose<perm=[1,0]>(w) t = MatMul(x, a) },
        else_branch = other () => (float[2,300] t) { t = MatMul(x, w) }
    >"""
    model = model_of(body, "float[2,300] x, bool c, float[300,300] w")
    del model.graph.input[2]
    weight = np.random.default_rng(0).standard_normal((300, 300)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    after = check(model)
    assert transposes(after)[0] == 1
    assert after.ByteSize() < 1.1 * model.ByteSize()


def test_unknown_ranks_are_left_alone() -> None:
    model = model_of("y = T0231(x)", X)
    custom = helper.make_node("Custom", ["x"], ["u"], domain="my")
    relu = helper.make_node("Relu", ["u"], ["r"])
    back = [
        helper.make_node("Transpose", [n], [o], perm=p)
        for n, o, p in [("r", "t", [0, 2, 3, 1]), ("w", "z", [0, 3, 1, 2])]
    ]
    exp = helper.make_node("Exp", ["t"], ["w"])
    model.graph.node.extend([custom, relu, back[0], exp, back[1]])
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [2, 3, 4, 5]))
    model.opset_import.append(helper.make_opsetid("my", 1))
    remove_transposes(model)
    onnx.checker.check_model(model)
    assert sorted(node.op_type for node in model.graph.node) == ["Custom", "Exp", "Relu", "Transpose"]


def test_a_model_without_transposes_is_not_touched() -> None:
    model = model_of("a = Relu(x) y = Exp(a)", X)
    before = model.SerializeToString()
    remove_transposes(model)
    assert model.SerializeToString() == before


# ---------------------------------------------------------------- permutations


@settings(deadline=None)
@given(st.permutations(range(5)), st.permutations(range(5)))
def test_permutations_are_what_numpy_does(a: list[int], b: list[int]) -> None:
    x = np.arange(2 * 3 * 4 * 5 * 6).reshape(2, 3, 4, 5, 6)
    both = x.transpose(a).transpose(b)
    np.testing.assert_array_equal(x.transpose(compose(tuple(a), tuple(b))), both)
    np.testing.assert_array_equal(x.transpose(a).transpose(inverse(tuple(a))), x)
    assert compose(tuple(a), inverse(tuple(a))) == identity(5)


@settings(deadline=None)
@given(st.permutations(range(5)), st.sets(st.integers(0, 4), min_size=1), st.data())
def test_permutations_of_some_dimensions(a: list[int], chosen: set[int], data: st.DataObject) -> None:
    dims = tuple(sorted(chosen))
    x = np.arange(2 * 3 * 4 * 5 * 6).reshape(2, 3, 4, 5, 6)
    rest = tuple(i for i in range(5) if i not in dims)
    part = x.transpose(a).max(axis=tuple(a.index(i) for i in rest))
    np.testing.assert_array_equal(part, x.max(axis=rest).transpose(restrict(tuple(a), dims)))
    order = tuple(data.draw(st.permutations(range(len(dims)))))
    assert restrict(extend(order, dims, tuple(a)), dims) == order
    assert restrict(extend(order, dims, tuple(a)), rest) == restrict(tuple(a), rest)


# ---------------------------------------------------------------- cuts


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_cuts_are_minimal(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes = list(range(5))
    arcs = []
    for _ in range(8):
        tails, heads = (set(rng.choice(nodes, int(rng.integers(1, 4)), replace=False).tolist()) for _ in range(2))
        tails = {"source"} if rng.random() < 0.3 else tails
        heads = {"sink"} if rng.random() < 0.3 else heads
        arcs.append((tails, heads, int(rng.integers(1, 9))))
    network = Network()
    for arc in arcs:
        network.arc(*arc)

    def cost(side: set) -> int:
        return sum(c for tails, heads, c in arcs if tails & side and heads - side)

    side = {node for node in network.source_side("source", "sink") if node in nodes} | {"source"}
    every = [{"source", *chosen} for size in range(6) for chosen in combinations(nodes, size)]
    least = min(map(cost, every))
    assert cost(side) == least
    assert all(side <= other for other in every if cost(other) == least)


# ---------------------------------------------------------------- at random


class Random:
    """A random graph of nodes that Transposes commute with, and some they do not, over tensors of 1 to 4 dimensions."""

    MOVING = ("transpose", "slice", "concat", "split", "pad", "squeeze", "unsqueeze", "gather", "fixed")
    OTHER = ("transpose", "unary", "binary", "binary", "reduce", "constant_operand", "softmax", "where", "shape")

    def __init__(self, seed: int, opset: int, dynamic: bool, kinds: tuple[str, ...] = MOVING + OTHER) -> None:
        self.rng = np.random.default_rng(seed)
        self.opset, self.dynamic, self.kinds = opset, dynamic, kinds
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[TensorProto] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        sizes = self.rng.choice([1, 2, 3, 4, 5], 4).tolist()
        self.inputs = {f"x{i}": tuple(self.rng.permutation(sizes).tolist()) for i in range(2)}
        self.inputs["v"] = (sizes[int(self.rng.integers(4))],)
        self.shapes.update(self.inputs)

    def model(self, nodes: int) -> onnx.ModelProto:
        while len(self.nodes) < nodes:
            self.step()
        used = {name for node in self.nodes for name in node.input}
        ends = [n for n in self.shapes if n not in used and n not in self.inputs]
        middles = self.rng.choice([n for n in self.shapes if n not in self.inputs], 2).tolist()
        outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in dict.fromkeys(ends + middles)]
        dims = {n: [f"d{s}" if self.dynamic else s for s in shape] for n, shape in self.inputs.items()}
        inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in dims.items()]
        graph = helper.make_graph(self.nodes, "g", inputs, outputs, self.constants)
        imports = [helper.make_opsetid("", self.opset)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=8 if self.opset < 20 else 10)
        inferred = onnx.shape_inference.infer_shapes(model)
        if self.rng.random() < 0.5:  # as exporters leave it, or with every type stated
            del inferred.graph.value_info[:]
        return inferred

    def add(self, op_type: str, inputs: list[str], *shapes: tuple[int, ...], **attributes: object) -> None:
        names = [f"{op_type.lower()}{len(self.nodes)}_{i}" for i in range(len(shapes))]
        self.nodes.append(helper.make_node(op_type, inputs, names, names[0], **attributes))
        self.shapes.update(zip(names, shapes, strict=True))

    def constant(self, values: object, dtype: type = np.int64) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def integers(self, name: str, values: list[int], since: int, inputs: list[str]) -> dict[str, list[int]]:
        """An attribute before an opset, an input from it on."""
        if self.opset < since:
            return {name: values}
        inputs.append(self.constant(values))
        return {}

    def pick(self, least: int = 1) -> str:
        names = [name for name, shape in self.shapes.items() if len(shape) >= least]
        recent = names[-6:] if self.rng.random() < 0.7 else names
        return str(self.rng.choice(recent))

    def perm(self, rank: int) -> list[int]:
        return self.rng.permutation(rank).tolist()

    def step(self) -> None:
        kind = "transpose" if self.rng.random() < 0.2 else str(self.rng.choice(self.kinds))
        getattr(self, kind)()

    def transpose(self) -> None:
        x = self.pick(2)
        perm = self.perm(len(self.shapes[x]))
        if self.rng.random() < 0.4:  # back again
            earlier = [tuple(n.attribute[0].ints) for n in self.nodes if n.op_type == "Transpose"]
            perm = next((list(inverse(p)) for p in earlier[::-1] if len(p) == len(perm)), perm)
        self.add("Transpose", [x], tuple(self.shapes[x][i] for i in perm), perm=perm)

    def unary(self) -> None:
        x = self.pick()
        self.add(str(self.rng.choice(["Relu", "Sigmoid", "Neg", "Identity", "Abs", "Floor"])), [x], self.shapes[x])

    def binary(self) -> None:
        x, y = self.pick(2), self.pick()
        a, b = self.shapes[x], self.shapes[y]
        if sorted(a) == sorted(b):  # as one is, so will the other be
            perm: list[int] = []
            for size in a:
                perm.append(next(i for i, s in enumerate(b) if s == size and i not in perm))
            self.add("Transpose", [y], a, perm=perm)
            y, b = self.nodes[-1].output[0], a
        try:
            shape = np.broadcast_shapes(a, b)
        except ValueError:
            return
        if prod(shape) <= 600:
            self.add(
                str(self.rng.choice(["Add", "Mul", "Sub", "Max"])), [x, y] if self.rng.random() < 0.5 else [y, x], shape
            )

    def constant_operand(self) -> None:
        x = self.pick()
        shape = self.shapes[x]
        sizes = [s if self.rng.random() < 0.5 else 1 for s in shape][int(self.rng.integers(len(shape))) :]
        w = self.constant(self.rng.standard_normal(sizes), np.float32)
        self.add("Add", [x, w] if self.rng.random() < 0.5 else [w, x], shape)

    def where(self) -> None:
        x = self.pick()
        self.nodes.append(helper.make_node("Less", [x, self.constant(0.1, np.float32)], [f"less{len(self.nodes)}"]))
        condition = self.nodes[-1].output[0]
        self.add("Where", [condition, x, self.constant(0.5, np.float32)], self.shapes[x])

    def reduce(self) -> None:
        x = self.pick()
        shape = self.shapes[x]
        axes = sorted(self.rng.choice(len(shape), int(self.rng.integers(1, len(shape) + 1)), replace=False).tolist())
        keepdims = int(self.rng.integers(2))
        op_type = str(self.rng.choice(["ReduceSum", "ReduceMax", "ReduceMean"]))
        inputs = [x]
        given = [a - len(shape) if self.rng.random() < 0.5 else a for a in axes] if self.opset >= 11 else axes
        attributes = self.integers("axes", given, 13 if op_type == "ReduceSum" else 18, inputs)
        left = tuple(1 if i in axes else s for i, s in enumerate(shape) if keepdims or i not in axes)
        self.add(op_type, inputs, left, keepdims=keepdims, **attributes)

    def slice(self) -> None:
        x = self.pick()
        shape = list(self.shapes[x])
        axis = int(self.rng.integers(len(shape)))
        if shape[axis] > 1:
            inputs = [x]
            attributes: dict[str, object] = {}
            for name, value in (("starts", 1), ("ends", 2**31 - 1), ("axes", axis)):
                attributes |= self.integers(name, [value], 10, inputs)
            shape[axis] -= 1
            self.add("Slice", inputs, tuple(shape), **attributes)

    def split(self) -> None:
        x = self.pick()
        shape = self.shapes[x]
        axis = int(self.rng.integers(len(shape)))
        if shape[axis] > 1:
            inputs = [x]
            sizes = [1, shape[axis] - 1]
            attributes = self.integers("split", sizes, 13, inputs)
            parts = [tuple(size if i == axis else s for i, s in enumerate(shape)) for size in sizes]
            self.add("Split", inputs, *parts, axis=axis, **attributes)

    def concat(self) -> None:
        x = self.pick()
        shape = self.shapes[x]
        axis = int(self.rng.integers(len(shape)))
        others = [
            n for n, s in self.shapes.items() if (*s[:axis], *s[axis + 1 :]) == (*shape[:axis], *shape[axis + 1 :])
        ]
        others = [n for n in others if len(self.shapes[n]) == len(shape)]
        y = str(self.rng.choice(others))
        total = shape[axis] + self.shapes[y][axis]
        if total <= 10:
            self.add("Concat", [x, y], (*shape[:axis], total, *shape[axis + 1 :]), axis=axis)

    def pad(self) -> None:
        x = self.pick()
        shape = self.shapes[x]
        pads = self.rng.integers(0, 2, 2 * len(shape)).tolist()
        padded = tuple(s + pads[i] + pads[i + len(shape)] for i, s in enumerate(shape))
        if prod(padded) <= 600:
            inputs = [x]
            attributes = self.integers("pads", pads, 11, inputs)
            self.add("Pad", inputs, padded, **attributes)

    def softmax(self) -> None:
        x = self.pick(2)
        axis = int(self.rng.integers(len(self.shapes[x])))
        self.add(str(self.rng.choice(["Softmax", "LogSoftmax"])), [x], self.shapes[x], axis=axis)

    def squeeze(self) -> None:
        x = self.pick(2)
        shape = self.shapes[x]
        if 1 in shape and not self.dynamic:
            inputs = [x]
            axis = shape.index(1)
            attributes = self.integers("axes", [axis], 13, inputs)
            self.add("Squeeze", inputs, (*shape[:axis], *shape[axis + 1 :]), **attributes)

    def unsqueeze(self) -> None:
        x = self.pick()
        shape = self.shapes[x]
        if len(shape) < 4:
            axis = int(self.rng.integers(len(shape) + 1))
            inputs = [x]
            attributes = self.integers("axes", [axis], 13, inputs)
            self.add("Unsqueeze", inputs, (*shape[:axis], 1, *shape[axis:]), **attributes)

    def gather(self) -> None:
        x = self.pick(2)
        shape = self.shapes[x]
        axis = int(self.rng.integers(len(shape)))
        self.add("Gather", [x, self.constant(0)], (*shape[:axis], *shape[axis + 1 :]), axis=axis)

    def shape(self) -> None:
        x = self.pick()
        self.nodes.append(helper.make_node("Shape", [x], [f"shape{len(self.nodes)}"]))
        self.add("Cast", [self.nodes[-1].output[0]], (len(self.shapes[x]),), to=TensorProto.FLOAT)

    def fixed(self) -> None:
        x = self.pick(2)
        self.add("Flatten", [x], (self.shapes[x][0], prod(self.shapes[x][1:])), axis=1)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("opset", [9, 11, 13, 18, 21])
def test_random_graphs(opset: int, dynamic: bool) -> None:
    sizes = {f"d{size}": size for size in range(1, 6)}
    before = after = 0
    for seed in range(60):
        model = Random(seed, opset, dynamic).model(8 + seed % 17)
        onnx.checker.check_model(model, full_check=True)
        try:
            result = check(model, seed=seed, sizes=sizes)
        except Exception as error:
            raise AssertionError(f"seed {seed}:\n{onnx.printer.to_text(model)}") from error
        before, after = before + transposes(model)[0], after + transposes(result)[0]
    assert after < 0.7 * before


@pytest.mark.parametrize("opset", [9, 13, 18])
def test_random_graphs_that_only_move_data(opset: int) -> None:
    sizes = {f"d{size}": size for size in range(1, 6)}
    for seed in range(40):
        model = Random(1000 + seed, opset, dynamic=seed % 2 == 1, kinds=Random.MOVING).model(8 + seed % 17)
        check(model, exact=True, seed=seed, sizes=sizes)


# ---------------------------------------------------------------- time, proof


def large(kind: str, count: int) -> onnx.ModelProto:
    """Blocks that transpose and transpose back: around nothing, a fixed node in a chain, or one beside a residual."""
    nodes: list[onnx.NodeProto] = []

    def add(op_type: str, *inputs: str, **attributes: object) -> str:
        nodes.append(helper.make_node(op_type, inputs, [f"v{len(nodes)}"], **attributes))
        return nodes[-1].output[0]

    x = "x"
    while len(nodes) < count:
        y = add("Relu", add("Transpose", x, perm=[0, 2, 3, 1]))
        if kind != "chain":
            y = add("MaxPool", y, kernel_shape=[1, 1])
        y = add("Transpose", add("Softmax", y, axis=-1), perm=[0, 3, 1, 2])
        x = add("Add", x, y) if kind == "residual" else add("MaxPool", y, kernel_shape=[1, 1])
    value = helper.make_tensor_value_info
    x, y = value("x", TensorProto.FLOAT, [2, 3, 4, 5]), value(x, TensorProto.FLOAT, [2, 3, 4, 5])
    imports = [helper.make_opsetid("", 13)]
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y]), opset_imports=imports, ir_version=8)


@pytest.mark.parametrize(("kind", "left"), [("chain", 0), ("fixed", None), ("residual", 2)])
def test_large_graphs_take_no_more_a_node(kind: str, left: int | None) -> None:
    def work(count: int) -> int:
        model = large(kind, count)
        before = transposes(model)[0]
        result = calls(lambda: remove_transposes(model))
        assert transposes(model)[0] == (before if left is None else left)
        return result

    assert work(2000) < 2.1 * work(1000)


def test_a_wrong_rewrite_does_not_pass() -> None:
    before = model_of("a = T10(x) y = Relu(a)", "float[3,3] x")
    wrong = model_of("a = T01(x) y = Relu(a)", "float[3,3] x")
    with pytest.raises(VerificationError, match=r"changed output 'y' of shape \[3, 3\]: \d elements differ, by up to"):
        prove(before, wrong)
    other = model_of("a = T10(x) z = Relu(a)", "float[3,3] x")
    with pytest.raises(VerificationError, match=r"\['y'\]\) and are \(\['x'\], \['z'\]\)"):
        prove(before, other)
    close = model_of("a = T10(x) b = Add(a, e) y = Relu(b)", "float[3,3] x | float e = {1e-6}")
    prove(before, close)
    with pytest.raises(VerificationError, match=r"changed output 'y' of shape \[3, 3\]: \d elements differ"):
        prove(before, close, exact=True)
