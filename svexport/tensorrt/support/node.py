"""A node with the facts that are known without running the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from svexport.tensorrt.support.datatypes import type_name
from svexport.tensorrt.support.target import Version

__all__ = ["Node", "Undecided", "UnknownTensor", "reduces_everything"]

_MOST_NUMBERS = 4096
"""The largest constant that a rule reads; TensorRT's required constants are axes, sizes, thresholds and scales."""


class Undecided(Exception):
    """A fact about a node is unknown without running the model; the message says which."""


class UnknownTensor(Undecided):
    """The type or rank of a tensor is not known."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the type and rank of {name!r} are not known")
        self.name = name


@dataclass(frozen=True)
class Node:
    """A node and the known facts about its inputs. A query for an unknown fact raises :class:`Undecided`.

    Attributes:
        proto: the node.
        opset: opset of the default domain in the node's graph or function.
        version: TensorRT version.
        types: inferred or declared types of tensors, by name.
        constants: initializers and values of ``Constant`` nodes, by name.
        makers: by tensor name, the node that outputs it.
        in_function: whether names without a producer are inputs of a local function, which may be constants.
    """

    proto: onnx.NodeProto
    opset: int
    version: Version
    types: Mapping[str, onnx.TypeProto.Tensor]
    constants: Mapping[str, TensorProto]
    makers: Mapping[str, onnx.NodeProto]
    in_function: bool = False

    def has_input(self, index: int) -> bool:
        """Whether an input is present; an empty name omits an optional one."""
        return index < len(self.proto.input) and bool(self.proto.input[index])

    def has_output(self, index: int) -> bool:
        """Whether an output is requested."""
        return index < len(self.proto.output) and bool(self.proto.output[index])

    def attribute(self, name: str, default: Any = None) -> Any:
        """The value of an attribute; strings are returned as ``str``."""
        for attribute in self.proto.attribute:
            if attribute.name != name:
                continue
            if attribute.ref_attr_name:
                raise Undecided(f"the attribute {name} is given where the function is called")
            if attribute.type == AttributeProto.STRING:
                return attribute.s.decode(errors="replace")
            if attribute.type == AttributeProto.STRINGS:
                return [text.decode(errors="replace") for text in attribute.strings]
            return helper.get_attribute_value(attribute)
        return default

    def dtype(self, index: int) -> str:
        """The type that an input has in TensorRT, by ONNX's name."""
        number = self._type(self.proto.input[index]).elem_type
        if not number:
            raise UnknownTensor(self.proto.input[index])
        return type_name(number, self.version)

    def shape(self, index: int) -> tuple[int | None, ...]:
        """Sizes of an input, None for a dynamic one."""
        return self.shape_of(self.proto.input[index])

    def shape_of(self, name: str) -> tuple[int | None, ...]:
        """The sizes of a value, with None for unknown ones."""
        type_ = self._type(name)
        if not type_.HasField("shape"):
            raise UnknownTensor(name)
        return tuple(d.dim_value if d.HasField("dim_value") else None for d in type_.shape.dim)

    def is_constant(self, index: int) -> bool:
        """Whether an input is an initializer or a ``Constant``, which the parser accepts as weights.

        A value that another node computes is not, not even the ``Identity`` of an initializer.
        """
        name = self.proto.input[index]
        if name in self.constants:
            return True
        if self.in_function and name not in self.makers:
            raise Undecided(f"{name!r} is given where the function is called")
        return False

    def origin(self, index: int) -> str:
        """The origin of an input that is not a constant, in words."""
        name = self.proto.input[index]
        maker = self.makers.get(name)
        if maker is None:
            return f"{name!r}, an input of the graph"
        return f"{name!r}, computed by {maker.op_type}{f' {maker.name!r}' if maker.name else ''}"

    def value(self, index: int) -> np.ndarray:
        """The values of a constant input."""
        name = self.proto.input[index]
        tensor = self.constants.get(name)
        if tensor is None:
            raise Undecided(f"{self.origin(index)}, is known only at run time")
        if tensor.data_location == TensorProto.EXTERNAL or math.prod(tensor.dims) > _MOST_NUMBERS:
            raise Undecided(f"the numbers of {name!r} are not read")
        try:
            return numpy_helper.to_array(tensor)
        except Exception as error:  # a malformed tensor
            raise Undecided(f"the numbers of {name!r} cannot be read: {error}") from error

    def _type(self, name: str) -> onnx.TypeProto.Tensor:
        if name not in self.types:
            raise UnknownTensor(name)
        return self.types[name]


def reduces_everything(node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto.Tensor]) -> bool:
    """Whether a reduction gives the same result without its axes input: the axes are none or all, or the result has one
    element."""
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    if attributes.get("noop_with_empty_axes", 0):
        return False
    data, axes, result = (_sizes(types, name) for name in (*node.input[:2], *node.output[:1]))
    if axes == [0] or (data is not None and axes == [len(data)]):
        return True
    ranks = bool(attributes.get("keepdims", 1) or not result)  # the result has the same rank with and without axes
    return ranks and result is not None and all(size == 1 for size in result)


def _sizes(types: Mapping[str, onnx.TypeProto.Tensor], name: str) -> list[int | None] | None:
    if name not in types or not types[name].HasField("shape"):
        return None
    return [d.dim_value if d.HasField("dim_value") else None for d in types[name].shape.dim]
