"""Standard nodes rewritten as every version of TensorRT reads them give the same results in ONNX Runtime."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import svexport
from svexport.graph.types import infer_types
from svexport.tensorrt.forms import write_for, write_plainly
from svexport.tensorrt.support.target import Target
from tests.support import run_model

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
TYPES = {torch.float32: FLOAT, torch.int64: INT64, torch.int32: TensorProto.INT32, torch.bool: BOOL}
TYPES[torch.float16] = TensorProto.FLOAT16


def model_of(
    op: str,
    inputs: Sequence[torch.Tensor],
    opset: int,
    constants: Sequence[np.ndarray] = (),
    output: int = FLOAT,
    outputs: int = 1,
    **attributes: Any,
) -> onnx.ModelProto:
    names = [f"x{i}" for i in range(len(inputs))]
    tensors = [numpy_helper.from_array(array, f"c{i}") for i, array in enumerate(constants)]
    results = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op, [*names, *(t.name for t in tensors)], results, name="n", **attributes)
    given = [helper.make_tensor_value_info(n, TYPES[x.dtype], x.shape) for n, x in zip(names, inputs, strict=True)]
    types = [output, INT64][:outputs]
    made = [helper.make_tensor_value_info(n, kind, None) for n, kind in zip(results, types, strict=True)]
    graph = helper.make_graph([node], "g", given, made, tensors)
    imports = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8 if opset < 20 else 10)
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def written(model: onnx.ModelProto, target: str) -> onnx.ModelProto:
    result = copy.deepcopy(model)
    write_for(result, Target.parse(target), infer_types(result))
    onnx.checker.check_model(result)
    return result


def op_types(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def same(model: onnx.ModelProto, given: Sequence[torch.Tensor], target: str) -> onnx.ModelProto:
    """What the target gets: other nodes, of the same results, which the target parses."""
    result = written(model, target)
    assert op_types(result) != op_types(model)
    for actual, expected in zip(run_model(result, given), run_model(model, given), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert svexport.check(result, target).ok
    return result


INTEGERS = torch.tensor([7, -7, 7, -7, 0, 6, -6, 1, -1, 2**31 - 1, -(2**31), 2**31 - 1])
DIVISORS = torch.tensor([3, 3, -3, -3, 5, 3, -3, 2**31 - 1, 2**31 - 1, 2**31 - 2, 2**31 - 1, -(2**31)])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_mod_has_the_sign_of_the_divisor(dtype: torch.dtype) -> None:
    given = [INTEGERS.to(dtype), DIVISORS.to(dtype)]
    model = model_of("Mod", given, 13, output=TYPES[dtype])
    result = same(model, given, "8.4")
    torch.testing.assert_close(run_model(result, given)[0], torch.remainder(*given))
    assert op_types(written(model, "8.5")) == ["Mod"]
    fmod = same(model_of("Mod", given, 13, output=TYPES[dtype], fmod=1), given, "8.4")
    torch.testing.assert_close(run_model(fmod, given)[0], torch.fmod(*given))


@pytest.mark.parametrize(("start", "end"), [(1, None), (0, 2), (-2, None), (1, -1)])
def test_parts_of_a_shape(start: int, end: int | None) -> None:
    x = torch.zeros(2, 3, 4, 5)
    model = model_of("Shape", [x], 15, output=INT64, start=start, **({} if end is None else {"end": end}))
    same(model, [x], "8.6")
    assert op_types(written(model, "10.0")) == ["Shape"]


@pytest.mark.parametrize("batch", [(2,), (2, 3)])
def test_a_vector_before_matrices(batch: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    given = [torch.randn(4), torch.randn(*batch, 4, 5)]
    result = same(model_of("MatMul", given, 11), given, "10.1")
    torch.testing.assert_close(run_model(result, given)[0], given[0] @ given[1])
    for shapes in (([4], [4, 5]), ([3, 4], [2, 4, 5]), ([2, 3, 4], [4])):
        plain = model_of("MatMul", [torch.zeros(shape) for shape in shapes], 11)
        assert op_types(written(plain, "10.1")) == ["MatMul"]


def test_half_between_bounds() -> None:
    x = torch.linspace(-2, 2, 9, dtype=torch.float16)
    low, high = np.array(-1, np.float16), np.array(0.5, np.float16)
    result = same(model_of("Clip", [x], 11, [low, high], output=TensorProto.FLOAT16), [x], "8.4")
    assert op_types(result) == ["Max", "Min"]
    assert op_types(written(model_of("Clip", [x.float()], 11), "8.4")) == ["Clip"]


def test_dimensions_in_their_order() -> None:
    x = torch.zeros(2, 3)
    assert op_types(same(model_of("Transpose", [x], 11, perm=[0, 1]), [x], "8.4")) == ["Identity"]
    assert op_types(written(model_of("Transpose", [x], 11, perm=[1, 0]), "8.4")) == ["Transpose"]


def test_the_smallest() -> None:
    x = torch.tensor([[3.0, -1.0, 3.0, 2.0], [0.5, 0.5, -torch.inf, torch.inf]])
    model = model_of("TopK", [x], 11, [np.array([3])], outputs=2, largest=0)
    same(model, [x], "8.4")
    assert op_types(written(model, "8.5")) == ["TopK"]
    assert op_types(written(model_of("TopK", [x], 11, [np.array([3])], outputs=2), "8.4")) == ["TopK"]


def test_masks() -> None:
    torch.manual_seed(0)
    x, y = (torch.rand(3, 4) > 0.5 for _ in range(2))
    same(model_of("Equal", [x, y], 11, output=BOOL), [x, y], "8.4")
    same(model_of("Gather", [x], 11, [np.array([2, 0])], output=BOOL, axis=1), [x], "8.4")
    assert op_types(written(model_of("Equal", [x.float(), y.float()], 11, output=BOOL), "8.4")) == ["Equal"]


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_one_hot(axis: int) -> None:
    x = torch.tensor([[0, 4], [-1, -5], [3, 9]])
    model = model_of("OneHot", [x], 11, [np.array([5]), np.array([0.5, 2.0], np.float32)], axis=axis)
    same(model, [x], "8.4")
    assert op_types(written(model, "8.5")) == ["OneHot"]


@pytest.mark.parametrize("diagonal", [None, -1, 2])
def test_triangles(diagonal: int | None) -> None:
    x = torch.randn(2, 3, 4)
    constants = [] if diagonal is None else [np.array(diagonal)]
    for attributes in ({}, {"upper": 0}):
        same(model_of("Trilu", [x], 14, constants, **attributes), [x], "8.4")


def test_layer_norm() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 3, 5), np.linspace(1, 2, 15), np.linspace(-1, 1, 15)
    constants = [array.reshape(3, 5).astype(np.float32) for array in (weight, bias)]
    same(model_of("LayerNormalization", [x], 17, constants, axis=1), [x], "8.5")
    assert op_types(written(model_of("LayerNormalization", [x], 17, constants[:1], axis=1), "8.6")) == [
        "LayerNormalization"
    ]


@pytest.mark.parametrize("op", ["BitwiseAnd", "BitwiseOr", "BitwiseXor"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bits(op: str, dtype: torch.dtype) -> None:
    """No TensorRT has them: written as at opset 17, also beside a constant mask of low bits."""
    bounds = torch.iinfo(dtype)
    x = torch.tensor([[bounds.min, -1, 0], [1, 12345678, bounds.max]], dtype=dtype)
    y = torch.randint(bounds.min, bounds.max, (2, 1), dtype=dtype)
    result = getattr(torch, "bitwise_" + op.removeprefix("Bitwise").lower())
    for given, constants, expected in (
        ([x, y], [], result(x, y)),
        ([x], [np.array(255, y.numpy().dtype)], result(x, torch.tensor(255, dtype=dtype))),
    ):
        model = same(model_of(op, given, 20, constants, output=TYPES[dtype]), given, "10.1")
        assert not [name for name in op_types(model) if name.startswith("Bitwise")]
        assert torch.equal(run_model(model, given)[0], expected)


def test_bits_turned_over() -> None:
    x = torch.tensor([-(2**31), -1, 0, 7, 2**31 - 1], dtype=torch.int32)
    model = same(model_of("BitwiseNot", [x], 18, output=TensorProto.INT32), [x], "10.1")
    assert torch.equal(run_model(model, [x])[0], ~x)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("opset", [13, 17])
def test_losses(reduction: str, opset: int) -> None:
    """No TensorRT has them."""
    x, target = torch.randn(5, 4, 3), torch.randint(0, 4, (5, 3))
    for op, function, given in (
        ("NegativeLogLikelihoodLoss", torch.nn.functional.nll_loss, x.log_softmax(1)),
        ("SoftmaxCrossEntropyLoss", torch.nn.functional.cross_entropy, x),
    ):
        for ignored in ({}, {"ignore_index": 2}):
            model = model_of(op, [given, target], opset, reduction=reduction, **ignored)
            plain = same(model, [given, target], "10.1")
            expected = function(given, target, reduction=reduction, **ignored)
            torch.testing.assert_close(run_model(plain, [given, target])[0], expected)


def test_nothing_that_is_not_known_is_changed() -> None:
    x = torch.zeros(3, 3)
    model = model_of("Trilu", [x], 14)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    before = model.SerializeToString()
    write_for(model, Target.parse("8.4"), infer_types(model))
    assert model.SerializeToString() == before


def test_defaults_of_the_parser_are_plainout() -> None:
    x = torch.randn(3, 3)
    for op, attribute, value in (("Trilu", "upper", 1), ("Selu", "alpha", 1.6732631921768188)):
        model = model_of(op, [x], 14)
        expected = run_model(model, [x])[0]
        write_plainly(model)
        given = {a.name: helper.get_attribute_value(a) for a in model.graph.node[0].attribute}
        assert given[attribute] == value
        torch.testing.assert_close(run_model(model, [x])[0], expected)
    lower = model_of("Trilu", [x], 14, upper=0)
    write_plainly(lower)
    assert [a.i for a in lower.graph.node[0].attribute] == [0]


@pytest.mark.parametrize("opset", [16, 18])
def test_a_scatter_without_reduction_does_not_say_so(opset: int) -> None:
    """TensorRT 10.1 refuses the attribute even where it says nothing; one that says something stays."""
    given = torch.randn(5, 2), torch.tensor([[3], [0]]), torch.randn(2, 2)
    for reduction, left in (("none", []), ("add", ["reduction"])):
        model = model_of("ScatterND", given, opset, reduction=reduction)
        expected = run_model(model, given)[0]
        assert not svexport.check(model, "10.1").ok
        write_plainly(model)
        assert [a.name for a in model.graph.node[0].attribute] == left
        assert svexport.check(model, "10.1").ok == (reduction == "none")
        torch.testing.assert_close(run_model(model, given)[0], expected)


@pytest.mark.parametrize(
    "number", [{"value_int": 3}, {"value_ints": [1, 2]}, {"value_float": 0.5}, {"value_floats": [0.5, 1.5]}]
)
def test_constants_are_tensors(number: dict[str, Any]) -> None:
    model = model_of("Constant", [], 12, output=INT64 if "int" in next(iter(number)) else FLOAT, **number)
    expected = run_model(model, [])[0]
    write_plainly(model)
    assert [a.name for a in model.graph.node[0].attribute] == ["value"]
    torch.testing.assert_close(run_model(model, [])[0], expected)


@pytest.mark.parametrize("target", ["8.4", "10.1"])
@pytest.mark.parametrize("pads", [[0, -1, 2, 0, 0, -3], [-1, 0, -2, 0, 0, 0]])
def test_padding_with_less_than_nothing_cuts(pads: list[int], target: str) -> None:
    x = torch.randn(2, 3, 7)
    given = model_of("Pad", [x], 13, [np.array(pads), np.float32(1.5)])
    result = same(given, [x], target)
    assert op_types(result).count("Pad") == (max(pads) > 0)
    same(model_of("Pad", [x], 9, pads=pads, value=1.5), [x], target)
    if target == "10.1":
        chosen = [np.array([-2, 1, 1, -1]), np.float32(0), np.array([2, 0])]
        same(model_of("Pad", [x], 18, chosen), [x], target)


def test_padding_that_mirrors_stays() -> None:
    model = model_of("Pad", [torch.randn(2, 3, 7)], 13, [np.array([0, 0, -1, 0, 0, 2])], mode="reflect")
    assert op_types(written(model, "10.1")) == ["Pad"]
    assert [finding.rule for finding in svexport.check(model, "10.1").errors] == ["negative_pads"]


@pytest.mark.parametrize("opset", [11, 17])
def test_aligned_corners_are_those_of_sizes(opset: int) -> None:
    x, attributes = torch.randn(2, 3, 6, 5), {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    none = np.zeros(0, np.float32)
    result = written(model_of("Resize", [x], opset, [none, np.float32([1, 1, 1.7, 0.6])], **attributes), "8.6")
    assert svexport.check(result, "8.6").ok
    expected = torch.nn.functional.interpolate(x, scale_factor=(1.7, 0.6), mode="bilinear", align_corners=True)
    torch.testing.assert_close(run_model(result, [x])[0], expected, rtol=1e-5, atol=1e-6)
    whole = model_of("Resize", [x], opset, [none, np.float32([1, 1, 2, 3])], **attributes)
    assert written(whole, "8.6") == whole


@pytest.mark.parametrize("gain", [1.0, 1.5])
@pytest.mark.parametrize("channels", [3, 70])
def test_half_instance_norm_has_gains_of_float(channels: int, gain: float) -> None:
    """The parser takes the bytes of the others for FLOAT, and reads beyond their end."""
    x = torch.randn(2, channels, 5, 4).half()
    gains = [np.full(channels, value, np.float16) for value in (gain, gain - 1)]
    result = written(model_of("InstanceNormalization", [x], 13, gains, output=TYPES[torch.float16]), "8.6")
    assert svexport.check(result, "8.6").ok
    expected = torch.nn.functional.instance_norm(x.double()) * gain + gain - 1
    torch.testing.assert_close(run_model(result, [x])[0].double(), expected, rtol=1e-2, atol=4e-3)
    count = 1 if gain == 1 and channels == 3 else 3  # of constants that are large nothing is known
    assert len([op for op in op_types(result) if op not in ("Cast", "Reshape")]) == count
    assert op_types(written(model_of("InstanceNormalization", [x], 13, gains, output=10), "10.1")) == [
        "InstanceNormalization"
    ]


def test_numbers_of_float_beside_half() -> None:
    """The parser multiplies by alpha and beta, and subtracts from 1, in FLOAT."""
    half = TYPES[torch.float16]
    x, y, z = (torch.randn(3, 3).half() for _ in range(3))
    gemm = written(model_of("Gemm", [x, y, z], 13, output=half, alpha=2.0, beta=0.5, transB=1), "10.1")
    assert svexport.check(gemm, "10.1").ok
    expected = 2 * x.double() @ y.double().T + z.double() / 2
    torch.testing.assert_close(run_model(gemm, [x, y, z])[0].double(), expected, rtol=1e-2, atol=1e-2)
    plain = model_of("Gemm", [x, y, z], 13, output=half)
    assert written(plain, "10.1") == plain
    sequence, weights = torch.randn(4, 2, 3).half(), [np.random.randn(1, 6, n).astype(np.float16) for n in (3, 2)]
    gru = written(model_of("GRU", [sequence], 13, weights, output=half, hidden_size=2), "8.6")
    assert svexport.check(gru, "8.6").ok
    assert op_types(gru).count("Cast") == 4
