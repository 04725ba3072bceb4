"""Transposes are removed wherever they cancel, never added, and no result changes."""

from __future__ import annotations

import copy
import re
import time
from math import prod

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from svexport.graph.nodes import graphs
from svexport.graph.permutation import compose, extend, identity, inverse, restrict
from svexport.graph.prove import prove
from svexport.graph.transposes import remove_transposes

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
    """How many there are, and how many elements they move (3 for a dynamic size)."""
    shapes = {}
    inferred = onnx.shape_inference.infer_shapes(model).graph
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        shapes[value.name] = [d.dim_value or SIZES.get(d.dim_param, 3) for d in value.type.tensor_type.shape.dim]
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
    assert all(now <= before for now, before in zip(transposes(after), transposes(model), strict=True))
    prove(model, after, exact=exact, sizes=sizes, seed=seed)
    once = after.SerializeToString()
    remove_transposes(after)
    assert after.SerializeToString() == once, "a second run found something to do"
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
    "equal ones are shared": (X, "a = T0231(x) b = T0231(x) y = Relu(a) z = MatMul(b, b)", 1),
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
    "Pad some axes": (X + "| int64[2] p = {1,2}, int64[1] i = {-1}", "a = T0231(x) b = Pad(a, p, , i) y = T0312(b)", 0, 18),
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
    "ReduceMax of what is left transposed": (X, "a = T0312(x) y = ReduceMax<axes=[1], keepdims=0>(a)", 1),
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
        "a = T0231(x) m = ReduceMean<axes=[-1]>(a) d = Sub(a, m) q = Mul(d, d) v = ReduceMean<axes=[-1]>(q) s = Sqrt(v) "
        "n = Div(d, s) g = Mul(n, w) y = T0312(g)",
        0,
    ),
    # dimensions that come and go
    "Unsqueeze and Squeeze": (
        "float[2,3,4] x | int64[1] i = {3}, int64[1] j = {1}",
        "a = Unsqueeze(x, i) b = T0312(a) c = Relu(b) y = Squeeze(c, j)",
        0,
    ),
    "Squeeze": ("float[2,1,4,5] x | int64[1] i = {1}", "a = T2130(x) b = Squeeze(a, i) y = T201(b)", 1),
    "Squeeze, cancelling": ("float[2,1,4,5] x", "a = T2130(x) b = Squeeze<axes=[1]>(a) y = T210(b)", 1, 11),
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
    "InstanceNormalization": ("float[2,3,4,5] x, float[3] w", "a = T0132(x) b = InstanceNormalization(a, w, w) y = T0132(b)", 0),
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
    # shapes
    "Shape of a transposed tensor": (X, "a = T0231(x) y = Shape(a) b = Relu(a) z = T0312(b)", 0),
    "a part of it": (X, "a = T0231(x) y = Shape<start=1, end=-1>(a) b = Relu(a) z = T0312(b)", 0, 15),
    # what must stay
    "between reshapes": (
        "float[2,3,4] x | int64[3] s = {2,4,3}, int64[2] r = {2,12}",
        "a = Reshape(x, s) b = T021(a) y = Reshape(b, r)",
        1,
    ),
    "two that do not cancel": (X, "a = T0231(x) b = MatMul(a, a1) y = T0312(b) a1 = T0213(a)", None),
    # as in networks
    "a residual": (X, "a = T0231(x) b = Relu(a) c = Add(a, b) d = Exp(c) e = Add(c, d) y = T0312(e)", 0),
    "branches that meet": (
        XW,
        "a = T0231(x) b = Relu(a) c = Mul(b, w) d = T0312(c) e = Add(d, x) y = T0231(e)",
        1,
    ),
    "dynamic sizes": (DYNAMIC + "| float[3] w = {1,2,3}", "a = T0231(x) b = Mul(a, w) y = T0312(b)", 0),
    "dynamic sizes, reduced": (DYNAMIC, "a = T0231(x) b = ReduceMean<axes=[-1]>(a) c = Sub(a, b) y = T0312(c)", 0),
}
del CASES["two that do not cancel"]


@pytest.mark.parametrize(("inputs", "body", "left", "opset"), [(*c, 13)[:4] for c in CASES.values()], ids=CASES)
def test_what_is_left(inputs: str, body: str, left: int, opset: int) -> None:
    after = check(model_of(body, inputs, opset))
    assert transposes(after)[0] == left, onnx.printer.to_text(after)
