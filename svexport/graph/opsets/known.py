"""Known facts about the tensors of a graph under conversion: types, constants, and values that follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from svexport.errors import UnsupportedError
from svexport.graph.bodies import lower_in_place
from svexport.graph.nodes import svexport_nodes
from svexport.graph.scope import constant_value, is_standard, light_copy
from svexport.graph.types import MOST_NUMBERS, Inference, types_of
from svexport.graph.walk import STANDARD, graphs, refill
from svexport.logging import logger
from svexport.symbolic._builder import Value

__all__ = ["Known", "known_of"]


class Known:
    """Types and constants by name, of a graph and its nested graphs. Missing facts are inferred on demand.

    Args:
        types: types known from the start.
        ir_version: IR version of the model.
        kinds: "sequence", "optional" or "map", for values that are not tensors.
    """

    def __init__(self, types: Mapping[str, Value], ir_version: int, kinds: Mapping[str, str]) -> None:
        self.types = dict(types)
        self._kinds = dict(kinds)
        self._inference = Inference(self.types, 1, ir_version)
        self._tensors: dict[str, TensorProto] = {}
        self._producers: dict[str, tuple[onnx.NodeProto, int]] = {}
        self._met: set[tuple[str, bool]] = set()

    def add_tensors(self, tensors: Iterable[TensorProto]) -> None:
        """Initializers that no caller may override."""
        for tensor in tensors:
            self._tensors[tensor.name] = tensor
            self.types.setdefault(tensor.name, Value(tensor.name, tensor.data_type, tuple(tensor.dims)))

    def add_node(self, node: onnx.NodeProto, opset: int) -> None:
        """A node in the meaning of an opset, whose outputs later nodes may take."""
        tensor = constant_value(node) if is_standard(node, "Constant") else None
        if tensor is not None:
            name = node.output[0]
            self._tensors[name] = tensor
            self.types.setdefault(name, Value(name, tensor.data_type, tuple(tensor.dims)))
        elif node.domain in STANDARD:
            for name in filter(None, node.output):
                self._producers[name] = node, opset

    def value(self, name: str) -> Value:
        """A tensor with what is known of its data type and shape."""
        if not self._typed(name):
            self._infer(name, values=False)
        return self.types.get(name) or Value(name)

    def kind(self, name: str) -> str:
        """``"tensor"`` unless it is known to be something else: ``"sequence"``, ``"optional"``, ``"map"``."""
        return self._kinds.get(name, "tensor")

    def array(self, name: str) -> np.ndarray | None:
        """The numbers of a constant, or of a few that constants and static shapes decide; otherwise None."""
        if name in self._tensors:
            tensor = self._tensors[name]
            return None if tensor.data_location == TensorProto.EXTERNAL else numpy_helper.to_array(tensor)
        if name not in self._inference.values and not self._is_large(name):
            self._infer(name, values=True)
        return self._inference.values.get(name)

    def _typed(self, name: str) -> bool:
        value = self.types.get(name)
        return value is not None and value.dtype is not None and value.shape is not None

    def _is_large(self, name: str) -> bool:
        """Whether a tensor is known to have too many numbers to be a size."""
        value = self.types.get(name)
        if value is None or value.shape is None:
            return False
        return math.prod(size or 0 for size in value.shape) > MOST_NUMBERS

    def _infer(self, name: str, *, values: bool) -> None:
        """Infers the type of a tensor, or its numbers, from the nodes before it that tell more than is known."""
        stack = [(name, False)]  # not by recursion: a chain may be as long as the model
        while stack:
            each, ready = stack.pop()
            if ready:
                self._infer_node(*self._producers[each])
                continue
            enough = self._is_large(each) if values else self._typed(each)
            if each not in self._producers or enough or (each, values) in self._met:
                continue
            self._met.add((each, values))
            stack.append((each, True))
            stack.extend((input, False) for input in self._producers[each][0].input)

    def _infer_node(self, node: onnx.NodeProto, opset: int) -> None:
        for name in node.input:
            tensor = self._tensors.get(name)
            if tensor is None or tensor.data_location == TensorProto.EXTERNAL or self._is_large(name):
                continue
            if name not in self._inference.values and tensor.data_type != TensorProto.STRING:
                self._inference.values[name] = numpy_helper.to_array(tensor)
        self._inference.opset = opset
        self._inference.node(node)


def known_of(model: onnx.ModelProto) -> Known:
    """Types declared by the model or inferred. Initializers that a caller may override decide nothing."""
    light = light_copy(model)
    overridable = {value.name for value in model.graph.input}
    fixed = [
        tensor
        for tensor in light.graph.initializer
        if tensor.name not in overridable and min(tensor.dims, default=0) >= 0
    ]
    refill(light.graph.initializer, fixed)
    infos = [info for graph in graphs(light.graph) for info in (*graph.input, *graph.value_info, *graph.output)]
    for dim in (dim for info in infos for dim in info.type.tensor_type.shape.dim):
        if not 0 <= dim.dim_value < 2**40:  # no size; the library does not survive all of these
            dim.ClearField("dim_value")
    stated = types_of(light)
    if any(name not in stated for node in svexport_nodes(light) for name in node.output):
        try:
            lower_in_place(light, lambda _: True)  # inference knows no svexport nodes
        except (UnsupportedError, onnx.shape_inference.InferenceError) as error:
            logger.debug("no types of svexport nodes: {}", error)
    forgetful = onnx.ModelProto()
    forgetful.CopyFrom(light)
    for graph in graphs(forgetful.graph):
        _forget(graph)
    try:
        light = onnx.shape_inference.infer_shapes(forgetful, data_prop=not any(map(_is_long_list, infos)))
    except Exception as error:  # noqa: BLE001 - a library's; without it less is known
        logger.debug("no types are inferred: {}", error)
    types, kinds = {**stated, **types_of(light)}, {}
    for graph in graphs(light.graph):
        for info in (*graph.input, *graph.value_info, *graph.output):
            kind = info.type.WhichOneof("value")
            if kind not in ("tensor_type", None):
                kinds[info.name] = kind.removesuffix("_type")
            elif info.name in stated:
                types[info.name] = _completed(types[info.name], info, stated[info.name])
    return Known(types, model.ir_version, kinds)


def _forget(graph: onnx.GraphProto) -> None:
    """Removes what a file states of values that inference tells: it is often left behind where inputs were edited."""
    made = {name for node in graph.node if node.domain in STANDARD for name in node.output}
    kept = [info for info in graph.value_info if info.name not in made]
    refill(graph.value_info, kept)
    for info in graph.output:
        if info.name in made and info.type.HasField("tensor_type"):
            info.type.tensor_type.ClearField("shape")


def _completed(inferred: Value, info: onnx.ValueInfoProto, stated: Value) -> Value:
    """An inferred type with stated sizes where inference leaves them open, but not where it has a name for them."""
    if inferred.shape is None or stated.shape is None or len(inferred.shape) != len(stated.shape):
        return stated if inferred.shape is None else inferred
    dims = info.type.tensor_type.shape.dim  # none where a graph returns a value twice: inference fills in the first
    named = [dim.dim_param and not dim.dim_param.startswith("unk__") for dim in dims] or [False] * len(stated.shape)
    sizes = zip(inferred.shape, stated.shape, named, strict=True)
    return replace(inferred, shape=tuple(own if own is not None or name else other for own, other, name in sizes))


def _is_long_list(info: onnx.ValueInfoProto) -> bool:
    """Whether the library, which takes every list for sizes, would hold one of many of them."""
    dims = info.type.tensor_type.shape.dim
    return len(dims) == 1 and dims[0].dim_value > 2**16
