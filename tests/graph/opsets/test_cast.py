"""Casts at lower opsets."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

import svexport
from svexport import UnsupportedError
from tests.graph.opsets.nodes import check, node_model

X = np.linspace(-3, 300, 50, dtype=np.float32)


@pytest.mark.parametrize("target", [22, 18, 12, 9])
@pytest.mark.parametrize("to", [TensorProto.INT32, TensorProto.FLOAT16, TensorProto.BOOL, TensorProto.DOUBLE])
def test_types_of_all_opsets(to: int, target: int) -> None:
    check(node_model("Cast", 23, [X], to=to), [X], target)
    like = np.zeros(1, {TensorProto.INT32: np.int32, TensorProto.FLOAT16: np.float16}.get(to, np.float64))
    result = check(node_model("CastLike", 23, [X, like]), [X, like], target)
    assert [node.op_type for node in result.graph.node] == ["Cast"]


@pytest.mark.parametrize(
    ("to", "lowest"),
    [
        (TensorProto.BFLOAT16, 13),
        (TensorProto.FLOAT8E4M3FN, 19),
        (TensorProto.INT4, 21),
        (TensorProto.FLOAT4E2M1, 23),
        (TensorProto.FLOAT8E8M0, 24),
    ],
)
def test_types_that_are_newer_are_refused(to: int, lowest: int) -> None:
    model = node_model("Cast", max(lowest, 23), [X], to=to)
    with pytest.raises(
        UnsupportedError, match=rf"the lowest that has one is {lowest}:\n.*\(Cast\).* there are no tensors"
    ):
        svexport.convert(model, 9)


@pytest.mark.parametrize(("op_type", "count"), [("StringConcat", 2), ("RegexFullMatch", 1)])
def test_strings_are_refused(op_type: str, count: int) -> None:
    text = np.array(["a", "b"], object)
    attributes = {"pattern": "a"} if op_type == "RegexFullMatch" else {}
    with pytest.raises(UnsupportedError, match="no older op makes strings of strings"):
        svexport.convert(node_model(op_type, 20, [text] * count, **attributes), 19)
