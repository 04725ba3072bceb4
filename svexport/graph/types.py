"""Infers the data type and shape of every tensor in a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from svexport.errors import UnsupportedError
from svexport.graph.scope import constants_in
from svexport.graph.walk import graphs, opset_of
from svexport.logging import logger
from svexport.symbolic._builder import Value

__all__ = ["MOST_NUMBERS", "Inference", "infer_types", "infer_values", "types_of"]


def types_of(model: onnx.ModelProto) -> dict[str, Value]:
    """The data types and shapes that the file states, by name: inputs, outputs, initializers, value_info."""
    types: dict[str, Value] = {}
    for graph in graphs(model.graph):
        for info in (*graph.input, *graph.value_info, *graph.output):
            tensor = info.type.tensor_type
            if not tensor.elem_type:
                continue
            shape = None
            if tensor.HasField("shape"):
                shape = tuple(d.dim_value or (0 if d.HasField("dim_value") else None) for d in tensor.shape.dim)
            types[info.name] = Value(info.name, tensor.elem_type, shape)
        for name, constant in constants_in(graph).items():
            types[name] = Value(name, constant.data_type, tuple(constant.dims))
    return types


OutputsOf = Callable[[onnx.NodeProto, Mapping[str, Value], Mapping[str, np.ndarray]], Iterable[Value]]
"""A function that infers the outputs of a non-standard node from the types and values known before it."""


def infer_types(model: onnx.ModelProto, outputs_of: OutputsOf | None = None) -> dict[str, Value]:
    """:func:`types_of` completed by shape inference, which also computes arithmetic on static shapes.

    ``outputs_of`` is called for nodes of domains other than the default one.
    """
    return _inferred(model, outputs_of).types


def infer_values(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The values of small tensors that follow from static shapes and constants, by name."""
    return _inferred(model).values


def _inferred(model: onnx.ModelProto, outputs_of: OutputsOf | None = None) -> Inference:
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except onnx.shape_inference.InferenceError as error:  # a node of a domain that the file does not import, say
        raise UnsupportedError(f"the types of the model cannot be inferred: {str(error).strip()}") from error
    inference = Inference(types_of(inferred), opset_of(model), model.ir_version, outputs_of)
    inference.graph(inferred.graph)
    return inference


class Inference:
    """Shape inference node by node for what the library's inference, which knows no values, leaves open.

    Attributes:
        types: types by name; completed in place.
        values: values of constants, and of tensors that follow from them and from static shapes, by name.
        opset: the opset of the nodes.
    """

    def __init__(
        self, types: dict[str, Value], opset: int, ir_version: int, outputs_of: OutputsOf | None = None
    ) -> None:
        self.types = types
        self._outputs_of = outputs_of
        self.values: dict[str, np.ndarray] = {}
        self._shapes: dict[str, tuple[int | None, ...]] = {}  # partly static shapes, by the output of their Shape
        self.opset = opset
        self._ir_version = ir_version

    def graph(self, graph: onnx.GraphProto) -> None:
        """Infers the types of the values of a graph and of the graphs nested in it."""
        overridable = {value.name for value in graph.input}
        for tensor in graph.initializer:
            here = tensor.data_location != TensorProto.EXTERNAL and tensor.name not in overridable
            if here and math.prod(tensor.dims) <= MOST_NUMBERS and tensor.data_type in _COMPUTED:
                self.values[tensor.name] = numpy_helper.to_array(tensor)
        for node in graph.node:
            for attribute in node.attribute:
                for inner in (attribute.g, *attribute.graphs):
                    self.graph(inner)
            if node.domain == "":
                self.node(node)
            elif self._outputs_of is not None:
                for value in self._outputs_of(node, self.types, self.values):
                    if value.shape is not None and self.types.get(value.name, _UNKNOWN).shape is None:
                        self.types[value.name] = value

    def node(self, node: onnx.NodeProto) -> None:
        """Infers the outputs of a standard node, whose inputs must have been inferred before."""
        given = [self.types.get(name, _UNKNOWN) for name in node.input]
        if not all(_is_static(self.types.get(name, _UNKNOWN)) for name in node.output if name):
            self._infer(node, given)
        name = node.output[0]
        if node.op_type == "Reshape" and given[0].dtype and self.types.get(name, _UNKNOWN).shape is None:
            target = given[1].shape  # gives at least the rank, which is enough to infer more
            if target and target[0] is not None:
                self.types[name] = Value(name, given[0].dtype, (None,) * target[0])
        if node.op_type == "Shape" and _is_static(given[0]) and not node.attribute:
            self.values[name] = np.array(given[0].shape, np.int64)
        elif node.op_type == "Shape" and given[0].shape is not None and not node.attribute:
            self._shapes[name] = given[0].shape
        elif node.op_type == "Gather" and self._gathers_sizes(node):
            sizes, index = self._shapes[node.input[0]], self.values[node.input[1]]
            self.values[name] = np.array([sizes[i] for i in index.flat], np.int64).reshape(index.shape)
        elif node.op_type == "Size" and _is_static(given[0]):
            self.values[name] = np.array(math.prod(size or 0 for size in given[0].shape or ()), np.int64)
        elif self._is_computed(node):
            self._compute(node)

    def _gathers_sizes(self, node: onnx.NodeProto) -> bool:
        """Whether a Gather takes only static sizes out of a partly static shape."""
        sizes, index = self._shapes.get(node.input[0]), self.values.get(node.input[1])
        return (
            sizes is not None
            and index is not None
            and all(-len(sizes) <= i < len(sizes) and sizes[i] is not None for i in index.flat)
        )

    def _is_computed(self, node: onnx.NodeProto) -> bool:
        """Whether a node computes a few numbers from known values."""
        if node.op_type in _NOT_COMPUTED or len(node.output) != 1:
            return False
        known = self.types.get(node.output[0], _UNKNOWN)
        few = node.op_type == "NonZero" or (
            _is_static(known) and math.prod(size or 0 for size in known.shape or ()) <= MOST_NUMBERS
        )
        return few and known.dtype in _COMPUTED and all(not name or name in self.values for name in node.input)

    def _compute(self, node: onnx.NodeProto) -> None:
        feeds = {name: self.values[name] for name in node.input if name}
        alone = onnx.GraphProto(
            node=[node],
            input=[onnx.ValueInfoProto(name=name) for name in feeds],
            output=[onnx.ValueInfoProto(name=node.output[0])],
        )
        try:
            (value,) = ReferenceEvaluator(alone, opsets={"": self.opset}).run(None, feeds)
        except Exception as error:  # noqa: BLE001 - a library's; without it less is known
            logger.debug("{} is not computed: {}", node.name, error)
            return
        if isinstance(value, np.ndarray | np.generic) and np.size(value) <= MOST_NUMBERS:
            name, value = node.output[0], np.asarray(value)
            self.values[name] = value
            if not _is_static(self.types.get(name, _UNKNOWN)):
                self.types[name] = Value(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)

    def _infer(self, node: onnx.NodeProto, given: Sequence[Value]) -> None:
        try:
            schema = onnx.defs.get_schema(node.op_type, self.opset)
            found = onnx.shape_inference.infer_node_outputs(
                schema,
                node,
                {v.name: helper.make_tensor_type_proto(v.dtype, v.shape) for v in given if v.dtype},
                {n: numpy_helper.from_array(self.values[n], n) for n in node.input if n in self.values},
                opset_imports=[helper.make_opsetid("", self.opset)],
                ir_version=self._ir_version,
            )
        except Exception as error:  # noqa: BLE001 - as above
            logger.debug("no types of {}: {}", node.name, error)
            return
        for name, type_ in found.items():
            tensor, before = type_.tensor_type, self.types.get(name, _UNKNOWN)
            if tensor.elem_type and tensor.HasField("shape"):
                sizes = [d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim]
                known = before.shape if before.shape is not None else (None,) * len(sizes)
                if len(known) != len(sizes):  # the stated rank is wrong
                    known = (None,) * len(sizes)
                shape = tuple(size if k is None else k for size, k in zip(sizes, known, strict=True))
                self.types[name] = Value(name, tensor.elem_type, shape)
            elif tensor.elem_type and before.dtype is None:
                self.types[name] = Value(name, tensor.elem_type, before.shape)


def _is_static(value: Value) -> bool:
    return value.shape is not None and None not in value.shape


_UNKNOWN = Value("")
MOST_NUMBERS = 1024
"""Upper bound on the numbers in a computed tensor; larger tensors hold no sizes."""

_COMPUTED = {TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64, TensorProto.FLOAT, TensorProto.DOUBLE}
_NOT_COMPUTED = {"If", "Loop", "Scan", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
_NOT_COMPUTED |= {"Bernoulli", "Multinomial", "Dropout", "Shape"}
