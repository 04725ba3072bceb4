"""The rules of the down-converter: they rewrite a node of one version of an op in ops of the opset below it.

A rule is one step down over one version of one op::

    @down("Softmax", 13)
    def softmax(b: Builder, node: Node) -> Value | None: ...

It is called with a node in the meaning of Softmax-13 and writes it in ops of opset 12: ``b`` is a builder of that
opset. It returns the values that replace the node's outputs (one, or a sequence of them), or None if the node stays,
with its attributes and inputs edited if necessary (``node.set``, ``node.remove``, ``node.give``). Rules of the opsets
below convert its result further, and casts are added for data types that those opsets do not take, so that a rule
handles one step only. If there is no exact form, it calls ``node.refuse``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np
import onnx
from onnx import AttributeProto, helper

from svexport.graph.opsets.known import Known
from svexport.graph.walk import remove_attribute
from svexport.symbolic._builder import Builder, Value

__all__ = ["BROKEN", "REFUSED", "RULES", "Node", "Refusal", "Rule", "down", "refused", "schema_of", "unchanged"]

Rule: TypeAlias = "Callable[[Builder, Node], Value | Sequence[Value | None] | None]"

RULES: dict[tuple[str, int], Rule] = {}
"""Rules by op and by the version (``since_version``) that the rule converts from."""

REFUSED: dict[tuple[str, int], str] = {}
"""Why there is no rule, likewise."""


BROKEN = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(MemoryError, RuntimeError, TypeError, ValueError),
)
"""Exceptions raised during conversion by nodes that violate ONNX's definitions."""


class Refusal(Exception):
    """A node has no exact form at the opset below; the message says why."""


def down(op_types: str | Iterable[str], *versions: int) -> Callable[[Rule], Rule]:
    """Registers a rule below the versions of ops, given as words of a string or one by one."""

    def add(rule: Rule) -> Rule:
        for key in _keys(op_types, versions):
            RULES[key] = rule
        return rule

    return add


def unchanged(op_types: str | Iterable[str], *versions: int) -> None:
    """Says that versions of ops differ from those before by data types or documentation only."""
    for key in _keys(op_types, versions):
        RULES[key] = _stays


def refused(op_types: str | Iterable[str], version: int, reason: str) -> None:
    """Says that a version of ops has no exact form at the opset below, and why."""
    for key in _keys(op_types, [version]):
        REFUSED[key] = reason


def _keys(op_types: str | Iterable[str], versions: Iterable[int]) -> list[tuple[str, int]]:
    names = op_types.split() if isinstance(op_types, str) else list(op_types)
    keys = [(name, version) for version in versions for name in names]
    for op_type, version in keys:
        if (op_type, version) in RULES or (op_type, version) in REFUSED:
            raise ValueError(f"{op_type}-{version} has a rule already")
    return keys


def _stays(b: Builder, node: Node) -> None:
    return None


@functools.cache
def schema_of(op_type: str, opset: int) -> onnx.defs.OpSchema | None:
    """The definition of a standard op at an opset; None where it has none."""
    try:
        return onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None


@dataclass
class Node:
    """A node that a rule converts one step down, with the known facts about it.

    Attributes:
        proto: the node itself; a rule that returns None may edit it.
        version: the version of the op that defines the node's meaning.
        known: types and values of the tensors around it.
    """

    proto: onnx.NodeProto
    version: int
    known: Known

    # ------------------------------------------------------------------ inputs and outputs

    @property
    def inputs(self) -> list[Value | None]:
        """The inputs with what is known of their types; None for absent ones."""
        return [self.known.value(name) if name else None for name in self.proto.input]

    def given(self, index: int) -> Value | None:
        """An input; None where the node does not have it."""
        if index >= len(self.proto.input) or not self.proto.input[index]:
            return None
        return self.known.value(self.proto.input[index])

    def input(self, index: int = 0) -> Value:
        """An input that the op demands."""
        value = self.given(index)
        if value is None:
            self.refuse(f"it lacks input {index}")
        return value

    def output(self, index: int = 0) -> Value | None:
        """An output with what is known of its type; None where the node does not have it."""
        if index >= len(self.proto.output) or not self.proto.output[index]:
            return None
        return self.known.value(self.proto.output[index])

    def dtype(self, index: int = 0) -> int:
        """The data type of an input, without which the node is refused."""
        value = self.input(index)
        if value.dtype is None:
            self.refuse(f"the data type of its input {value.name!r} is not known")
        return value.dtype

    def typed(self, index: int = 0) -> Value:
        """An input of a known data type, without which the node is refused."""
        self.dtype(index)
        return self.input(index)

    def tensor(self, index: int = 0) -> Value:
        """An input of a known data type and rank, without which the node is refused."""
        self.rank(index)
        return self.typed(index)

    def rank(self, index: int = 0) -> int:
        """The rank of an input, without which the node is refused."""
        value = self.input(index)
        if value.shape is None:
            self.refuse(f"the rank of its input {value.name!r} is not known")
        return len(value.shape)

    def sizes(self, index: int = 0) -> tuple[int, ...]:
        """The static sizes of an input, without which the node is refused."""
        value = self.input(index)
        if value.shape is None or None in value.shape:
            self.refuse(f"the sizes of its input {value.name!r} are not known")
        return value.shape  # type: ignore[return-value]

    def constant(self, index: int) -> np.ndarray | None:
        """The numbers of an input that is a constant, or that static shapes and constants decide; otherwise None."""
        if index >= len(self.proto.input) or not self.proto.input[index]:
            return None
        return self.known.array(self.proto.input[index])

    def ints(self, index: int) -> list[int] | None:
        """:meth:`constant` as a list of numbers."""
        array = self.constant(index)
        return None if array is None else [int(i) for i in array.ravel().tolist()]

    def give(self, *inputs: Value | None) -> None:
        """Replaces the inputs of a node that stays; trailing None are left out."""
        names = ["" if value is None else value.name for value in inputs]
        while names and not names[-1]:
            names.pop()
        self.proto.input[:] = names

    # ------------------------------------------------------------------ attributes

    def has(self, name: str) -> bool:
        """Whether the node states an attribute."""
        return any(attribute.name == name for attribute in self.proto.attribute)

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute: as the node states it, else the default of the op's definition, else ``default``."""
        for attribute in self.proto.attribute:
            if attribute.name == name:
                break
        else:
            schema = schema_of(self.proto.op_type, self.version)
            if schema is None or name not in schema.attributes:
                return default
            attribute = schema.attributes[name].default_value
            if attribute.type == AttributeProto.UNDEFINED:
                return default
        if attribute.ref_attr_name:
            self.refuse(f"its attribute {name!r} is an argument of the function around it")
        value = helper.get_attribute_value(attribute)
        if isinstance(value, bytes):
            return value.decode(errors="replace")
        if attribute.type == AttributeProto.STRINGS:
            return [item.decode(errors="replace") for item in value]
        return list(value) if attribute.type in (AttributeProto.INTS, AttributeProto.FLOATS) else value

    def attributes(self) -> dict[str, Any]:
        """The attributes that the node states."""
        return {attribute.name: self.attribute(attribute.name) for attribute in self.proto.attribute}

    def set(self, **attributes: Any) -> None:
        """Writes attributes of a node that stays, in place of what it states; None removes one."""
        for name, value in attributes.items():
            remove_attribute(self.proto, name)
            if value is not None:
                kind = AttributeProto.INTS if isinstance(value, list) and not value else None
                self.proto.attribute.append(helper.make_attribute(name, value, attr_type=kind))

    def remove(self, *names: str) -> None:
        """Leaves attributes of a node that stays to their defaults."""
        for name in names:
            remove_attribute(self.proto, name)

    # ------------------------------------------------------------------

    def refuse(self, reason: str) -> NoReturn:
        """Says that the node has no exact form below its version.

        Args:
            reason: completes "... cannot be written below opset 13: ".
        """
        raise Refusal(reason)
