"""Infers the types of a file's tensors, and finds svexport's ops in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import onnx
from onnx import helper, numpy_helper

from svexport.graph.scope import constant_value, is_standard
from svexport.graph.walk import graphs
from svexport.logging import logger

if TYPE_CHECKING:
    from svexport.ops._op import Op

__all__ = ["OURS", "known_types", "our_ops"]

OURS = "svexport"  # svexport.ops._op.DOMAIN, repeated because importing it needs torch


def our_ops(model: onnx.ModelProto) -> dict[str, Op]:
    """Our ops by node type, if the file has svexport nodes; empty for other files, which are checked without torch."""
    if not any(node.domain == OURS for graph in graphs(model.graph) for node in graph.node):
        return {}
    import svexport.ops  # noqa: F401 - fills OPS
    from svexport.ops._op import DOMAIN, OPS

    assert DOMAIN == OURS
    return {op.node_type: op for op in OPS.values()}


def known_types(light: onnx.ModelProto) -> Mapping[str, onnx.TypeProto.Tensor]:
    """Types by tensor name, inferred through the bodies of our nodes; names used for several tensors are left out."""
    model = _lowered(light)
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
        if ranks := _counted_dimensions(inferred):
            inferred = onnx.shape_inference.infer_shapes(_with_constants(model, ranks), data_prop=True)
        model = inferred
    except Exception as error:  # noqa: BLE001 - the library's; less is known then
        logger.debug("types as stated: {}", error)
    types: dict[str, onnx.TypeProto.Tensor] = {}
    ambiguous = set()
    for graph in graphs(model.graph):
        own = {t.name: helper.make_tensor_type_proto(t.data_type, t.dims).tensor_type for t in graph.initializer}
        own |= {v.name: v.type.tensor_type for v in (*graph.input, *graph.value_info, *graph.output)}
        ambiguous |= {name for name in own.keys() & types.keys() if own[name] != types[name]}
        types |= own
    types = {name: type_ for name, type_ in types.items() if name not in ambiguous}
    for graph in graphs(model.graph):
        for node in graph.node:
            _complete_rank(node, types)
    return types


_OF_SCALARS: Mapping[str, Callable[..., int]] = {
    "Identity": lambda a: a,
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
}


def _counted_dimensions(model: onnx.ModelProto) -> dict[str, int]:
    """Values of ``Size`` of a ``Shape``, by name: the rank, which onnx would confuse with the number of elements.

    Values computed from ranks and constants are included, such as bounds of axes counted from the last.
    """
    makers = {name: node for node in model.graph.node for name in node.output}
    values = {v.name: v.type.tensor_type for v in (*model.graph.input, *model.graph.value_info)}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    ranks: dict[str, int] = {}

    def number(name: str) -> int | None:
        tensor = constants.get(name)
        if tensor is not None and tensor.data_type == onnx.TensorProto.INT64 and not tensor.dims:
            return int(numpy_helper.to_array(tensor))
        return ranks.get(name)

    for node in model.graph.node:
        if is_standard(node, "Constant") and (constant := constant_value(node)) is not None:
            constants[node.output[0]] = constant
        elif node.op_type == "Size" and node.input:
            shape = makers.get(node.input[0])
            if shape is not None and shape.op_type == "Shape" and not shape.attribute and shape.input:
                rank = _rank(values.get(shape.input[0]))
                if rank is not None:
                    ranks[node.output[0]] = rank
        elif ranks and node.op_type in _OF_SCALARS:
            given = [number(name) for name in node.input]
            if None not in given:
                ranks[node.output[0]] = _OF_SCALARS[node.op_type](*given)
    return ranks


def _with_constants(model: onnx.ModelProto, numbers: Mapping[str, int]) -> onnx.ModelProto:
    """A copy of the model in which the given scalars are constants."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in copy.graph.node:
        if len(node.output) == 1 and node.output[0] in numbers:
            value = helper.make_tensor("", onnx.TensorProto.INT64, (), [numbers[node.output[0]]])
            node.CopyFrom(helper.make_node("Constant", [], node.output, value=value))
    return copy


def _complete_rank(node: onnx.NodeProto, types: dict[str, onnx.TypeProto.Tensor]) -> None:
    """Adds the rank of a node's output if onnx lost it with the sizes: before opset 13 it does not compute ranks."""
    for name in node.output[:1]:
        if name not in types or types[name].HasField("shape"):
            continue
        ranks = [_rank(types.get(given)) for given in node.input]
        rank = None
        if node.op_type in _AS_THE_FIRST and ranks:
            rank = ranks[0]
        elif node.op_type in _BROADCASTING and ranks and None not in ranks:
            rank = max(rank or 0 for rank in ranks)
        elif node.op_type == "Reshape" and len(ranks) == 2 and ranks[1] == 1:
            (dim,) = types[node.input[1]].shape.dim
            rank = dim.dim_value if dim.HasField("dim_value") else None
        if rank is not None and rank <= _MOST_DIMENSIONS:
            known = onnx.TypeProto.Tensor(elem_type=types[name].elem_type)
            known.shape.dim.extend([onnx.TensorShapeProto.Dimension() for _ in range(rank)])
            types[name] = known


def _rank(type_: onnx.TypeProto.Tensor | None) -> int | None:
    return len(type_.shape.dim) if type_ is not None and type_.HasField("shape") else None


_MOST_DIMENSIONS = 64
_AS_THE_FIRST = {
    *("AveragePool", "BatchNormalization", "Cast", "Ceil", "Clip", "Concat", "Conv", "ConvTranspose", "CumSum"),
    *("DepthToSpace", "Dropout", "Elu", "Erf", "Exp", "Floor", "HardSigmoid", "HardSwish", "Identity"),
    *("InstanceNormalization", "LRN", "LayerNormalization", "LeakyRelu", "Log", "LogSoftmax", "MaxPool", "Neg"),
    *("PRelu", "Pad", "Relu", "Resize", "Selu", "Sigmoid", "Slice", "Softmax", "Softplus", "Sqrt", "Tanh", "Tile"),
    *("Transpose", "Upsample"),
}
_BROADCASTING = {"Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod"}
_BROADCASTING |= {"Mul", "Or", "Pow", "Sub", "Sum", "Where"}


def _lowered(light: onnx.ModelProto) -> onnx.ModelProto:
    ops = our_ops(light)
    if not ops:
        return light
    from svexport.graph.bodies import lower

    try:
        return lower(light, [op.name for op in ops.values()])
    except Exception as error:  # noqa: BLE001 - nodes of ours that are not as they should be, which the check tells
        logger.debug("types without bodies: {}", error)
        return light
