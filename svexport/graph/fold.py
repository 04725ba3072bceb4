"""Folds constants: computes nodes that depend on no input and stores their results as initializers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from svexport.graph.scope import drop_unused, light_copy, used_inside, used_names
from svexport.graph.types import infer_types
from svexport.graph.walk import STANDARD, graphs_of, refill
from svexport.logging import logger
from svexport.symbolic._builder import Value

__all__ = ["MOST_BYTES", "fold_constants"]

MOST_BYTES = 16 * 2**20
"""Upper bound in bytes on a folded tensor."""

_MOST_NEW_BYTES = 2**20
"""The same for tensors more than 4 times as large as their inputs: a file should not store what a node repeats."""

_TYPES = {TensorProto.BOOL, TensorProto.DOUBLE, TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT8}
_TYPES |= {TensorProto.INT16, TensorProto.INT32, TensorProto.INT64, TensorProto.UINT8}

_KEPT = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}  # these make a network explicitly quantized
_KEPT |= {"Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform"}
_KEPT |= {"RandomUniformLike"}


def fold_constants(model: onnx.ModelProto, standard: onnx.ModelProto | None = None) -> bool:
    """Replaces the nodes of a graph that depend on no input by constants, in place, up to a fixed point.

    ONNX Runtime computes them if it is installed, as it would compute the nodes themselves. svexport nodes, random
    nodes and those of explicit quantization stay, as do nodes that hold graphs.

    Args:
        model: the model, changed in place.
        standard: the same model in standard ONNX, with or without its large weights; types are inferred from it.

    Returns:
        Whether any node was replaced.
    """
    types = infer_types(light_copy(model) if standard is None else standard)
    graph = model.graph
    overridable = {value.name for value in graph.input}
    constants = {t.name for t in graph.initializer if t.data_location != TensorProto.EXTERNAL} - overridable
    kept = {value.name for value in graph.output}
    numbers: dict[str, np.ndarray] = {}
    folded: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type == "Constant" and node.domain in STANDARD:
            constants.update(node.output)
        elif not kept.isdisjoint(node.output) or node.domain not in STANDARD:
            continue
        elif (number := _of_sizes(node, types)) is not None:
            numbers[node.output[0]] = number
            constants.add(node.output[0])
        elif constants.issuperset(filter(None, node.input)) and _is_computed(node, types):
            folded.append(node)
            constants.update(filter(None, node.output))
    gone = {name for node in folded for name in node.output} | set(numbers)
    if not gone:
        return False
    rest = [node for node in graph.node if gone.isdisjoint(node.output)]
    wanted = [name for node in rest for name in (*node.input, *used_inside(node))]
    wanted = [name for name in dict.fromkeys(wanted) if name in gone]
    computed = _computed(model, folded, numbers, [name for name in wanted if name not in numbers], types)
    if computed is None:
        folded, computed = [], {}
        gone = set(numbers)
    _replace(graph, gone, {name: value for name, value in (numbers | computed).items() if name in gone})
    return bool(gone)


def _of_sizes(node: onnx.NodeProto, types: Mapping[str, Value]) -> np.ndarray | None:
    """The value of a Shape or Size of a static shape; None for anything else."""
    if node.op_type not in ("Shape", "Size"):
        return None
    shape = types[node.input[0]].shape if node.input[0] in types else None
    if shape is None:
        return None
    if node.op_type == "Size":
        return None if None in shape else np.array(math.prod(s or 0 for s in shape), np.int64)
    ends = {attribute.name: attribute.i for attribute in node.attribute}
    part = shape[ends.get("start", 0) : ends.get("end", len(shape))]
    return None if None in part else np.array(part, np.int64)


def _is_computed(node: onnx.NodeProto, types: Mapping[str, Value]) -> bool:
    """Whether a node whose inputs are constants may be folded, and its outputs are not too large."""
    if node.op_type in _KEPT or next(graphs_of(node), None) is not None or not node.input:
        return False
    given = sum(_bytes(types.get(name)) or 0 for name in node.input if name)
    made = [_bytes(types.get(name)) for name in node.output if name]
    most = MOST_BYTES if given > MOST_BYTES else max(4 * given, _MOST_NEW_BYTES)
    return all(size is not None and size <= min(most, MOST_BYTES) for size in made)


def _bytes(value: Value | None) -> int | None:
    """The size of a tensor in bytes; None if a size is dynamic or the type is not one that is folded."""
    if value is None or value.shape is None or None in value.shape or value.dtype not in _TYPES:
        return None
    itemsize = helper.tensor_dtype_to_np_dtype(value.dtype).itemsize
    return itemsize * math.prod(size or 0 for size in value.shape)


def _computed(
    model: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    numbers: Mapping[str, np.ndarray],
    wanted: Sequence[str],
    types: Mapping[str, Value],
) -> dict[str, np.ndarray] | None:
    """The values of nodes that depend on no input; None if they cannot be computed."""
    if not wanted:
        return {}
    made = {name for node in nodes for name in node.output}
    read = {name for node in nodes for name in node.input} - made - set(numbers)
    alone = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    alone.graph.name = "constants"
    alone.graph.initializer.extend(t for t in model.graph.initializer if t.name in read)
    used = {name for node in nodes for name in node.input}
    alone.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in numbers.items() if n in used)
    alone.graph.node.extend(n for n in model.graph.node if n.op_type == "Constant" and n.output[0] in read)
    alone.graph.node.extend(nodes)
    alone.graph.output.extend(
        helper.make_tensor_value_info(name, types[name].dtype or 0, types[name].shape) for name in wanted
    )
    try:
        return dict(zip(wanted, _run(alone), strict=True))
    except Exception as error:  # noqa: BLE001 - a library's; the nodes stay then
        logger.info("constants are not folded: {}", (str(error) or type(error).__name__).splitlines()[0])
        return None


def _run(model: onnx.ModelProto) -> Sequence[np.ndarray]:
    try:
        import onnxruntime
    except ImportError:
        from onnx.reference import ReferenceEvaluator

        return ReferenceEvaluator(model).run(None, {})  # type: ignore[return-value]
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {})


def _replace(graph: onnx.GraphProto, gone: set[str], values: Mapping[str, np.ndarray]) -> None:
    before = used_names(graph)
    nodes = [node for node in graph.node if gone.isdisjoint(node.output)]
    refill(graph.node, nodes)
    used = used_names(graph)
    graph.initializer.extend(
        numpy_helper.from_array(np.ascontiguousarray(v).reshape(v.shape), n) for n, v in values.items() if n in used
    )
    infos = [info for info in graph.value_info if info.name not in gone]
    refill(graph.value_info, infos)
    drop_unused(graph, before)
