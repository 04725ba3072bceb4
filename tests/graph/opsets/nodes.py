"""Makes models of one node, converts and runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

import svexport
from tests.graph.opsets.backend import run

__all__ = ["check", "converted", "node_model"]


def node_model(
    op_type: str,
    opset: int,
    inputs: Sequence[np.ndarray | None],
    *,
    constant: Sequence[int] = (),
    outputs: int = 1,
    dynamic: bool = False,
    **attributes: Any,
) -> onnx.ModelProto:
    """A model of one node.

    Args:
        inputs: arrays as they will be fed, None for an absent one.
        constant: which of them are initializers.
        outputs: how many the node has.
        dynamic: leaves every dimension of the first input open.
    """
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    node = helper.make_node(op_type, names, [f"y{i}" for i in range(outputs)], name="node", **attributes)
    fed, kept = [], []
    for i, (name, x) in enumerate(zip(names, inputs, strict=True)):
        if x is None:
            continue
        if i in constant:
            kept.append(numpy_helper.from_array(x, name))
            continue
        shape = [f"{name}_{j}" for j in range(x.ndim)] if dynamic and i == 0 else list(x.shape)
        fed.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), shape))
    results = [helper.make_empty_tensor_value_info(name) for name in node.output]
    graph = helper.make_graph([node], "graph", fed, results, kept)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = 8 if opset < 19 else 10
    inferred = onnx.shape_inference.infer_shapes(model)
    del model.graph.output[:]
    model.graph.output.extend(inferred.graph.output)
    for value in model.graph.output:
        if not value.type.tensor_type.elem_type:  # nothing is inferred of some functions: they return what is like x0
            value.type.CopyFrom(model.graph.input[0].type)
    return model


def converted(model: onnx.ModelProto, target: int) -> onnx.ModelProto:
    """The model at another opset, which it states and is valid at."""
    result = svexport.convert(model, target)
    assert result.opset_import[0].version == target
    onnx.checker.check_model(result, full_check=True)
    return result


def check(
    model: onnx.ModelProto,
    inputs: Sequence[np.ndarray | None],
    target: int,
    expected: Sequence[np.ndarray] | None = None,
    tolerance: float = 1e-5,
) -> onnx.ModelProto:
    """Converts and compares with what is expected: by default, what ONNX Runtime computes before."""
    fed = {value.name for value in model.graph.input}
    arrays = [x for i, x in enumerate(inputs) if f"x{i}" in fed]
    if expected is None:
        expected = run(model, arrays)
    for value, wanted in zip(model.graph.output, expected, strict=True):
        if not value.type.tensor_type.HasField("shape"):  # of some functions it is not inferred
            for i in range(wanted.ndim):
                value.type.tensor_type.shape.dim.add().dim_param = f"{value.name}_{i}"
            value.type.tensor_type.shape.SetInParent()
    result = converted(model, target)
    for actual, wanted in zip(run(result, arrays), expected, strict=True):
        assert actual.dtype == wanted.dtype
        np.testing.assert_allclose(actual, wanted, rtol=tolerance, atol=tolerance)
    return result
