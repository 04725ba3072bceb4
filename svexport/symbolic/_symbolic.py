"""The ONNX side of an op: its body, and the equivalent aten functions in unedited models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from svexport.errors import ExportError
from svexport.ops._op import Argument, Op
from svexport.symbolic._builder import Builder, Value

__all__ = ["COMPUTED", "SYMBOLICS", "Symbolic", "TensorInfo", "node_of", "qualified", "taken_over"]

SYMBOLICS: dict[str, Symbolic] = {}
"""Every symbolic by node type (``SvGridSample``), filled as the files of ``svexport.symbolic`` are imported."""

COMPUTED = -(2**31)
"""In an attribute of sizes, marks a size that the model computes; that size is a node input, after the tensors."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor seen while tracing, in the same form for both exporters.

    Attributes:
        value: the exporter's own object, which becomes a node input again.
        shape: sizes, with None for dynamic ones; None if the rank is unknown.
    """

    value: Any
    shape: tuple[int | None, ...] | None


def node_of(op: Op, arguments: Sequence[Any]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """The inputs and attributes of an op's node, from arguments in schema order (tensors as :class:`TensorInfo`).

    Returns:
        The tensors as the exporter's own objects, None for an absent one; the sizes that the model computes, which
        become inputs after the tensors; the attributes. Empty lists have no type and are not attributes yet: they are
        written when the file is cleaned.

    Raises:
        ExportError: if the model computes a number that is an attribute.
    """
    tensors: list[Any] = []
    computed: list[Any] = []
    attributes: dict[str, Any] = {}
    for argument, value in zip(op.arguments, arguments, strict=True):
        if argument.symbolic:
            value = _without_computed(value, computed)
        if argument.is_tensor:
            given = value if argument.kind == "tensors" else [value]
            tensors += [info and info.value for info in given]
        elif not isinstance(value, (list, tuple)):
            attributes[argument.name] = _number(argument, value)
        elif value:
            attributes[argument.name] = [_number(argument, each) for each in value]
    return tensors, computed, attributes


def _number(argument: Argument, value: Any) -> float:
    if isinstance(value, TensorInfo):
        raise ExportError(f"expected a constant {argument.name}, got a computed value: make it a Python number")
    return float(value) if argument.kind.startswith("float") else int(value)


def _without_computed(sizes: Any, computed: list[Any]) -> Any:
    """Replaces the sizes that the model computes by :data:`COMPUTED`, and appends them to ``computed``."""
    if isinstance(sizes, (list, tuple)):
        return [_without_computed(size, computed) for size in sizes]
    if not isinstance(sizes, TensorInfo):
        return sizes
    computed.append(sizes.value)
    return COMPUTED


def qualified(name: str) -> str:
    """The name of an operator with its namespace: ``"aten::einsum"`` for ``"einsum"``."""
    return name if "::" in name else f"aten::{name}"


def taken_over() -> set[str]:
    """Names, without overloads, of the torch functions in unedited models that become nodes of ops."""
    return {qualified(name).partition(".")[0] for symbolic in SYMBOLICS.values() for name in symbolic.aten}


@dataclass
class Symbolic:
    """The ONNX side of an op.

    Args:
        op: the op that the node belongs to.
        body: ``body(builder, *arguments) -> Value | tuple[Value, ...]``: the standard-ONNX definition, called with the
            op's arguments in schema order, tensors as :class:`Value`, lists as lists, attributes as int/float/list. It
            must be correct for any dimension that is None; it may specialize on known dimensions.
        aten: maps an aten function name, with its overload if only that one is meant (``"grid_sampler"``,
            ``"scatter.reduce"``), or another library's qualified operator (``"torchvision::deform_conv2d"``, if it is
            imported) to ``convert(*arguments) -> op arguments | None``. It is called with that function's arguments
            (tensors as :class:`TensorInfo`, others as Python values). None leaves the call to the exporter.
        until: the last opset at which the aten functions are taken over. At later opsets the exporter's own conversion
            is correct, and only calls that it refuses are taken over. None: at every opset.
    """

    op: Op
    body: Callable[..., Any]
    aten: dict[str, Callable[..., Sequence[Any] | None]] = field(default_factory=dict)
    until: int | None = None

    def __post_init__(self) -> None:
        SYMBOLICS[self.op.node_type] = self

    def build(self, builder: Builder, arguments: Sequence[Any]) -> tuple[Value, ...]:
        """Runs the body; returns one :class:`Value` per output of the op."""
        outputs = self.body(builder, *arguments)
        return (outputs,) if isinstance(outputs, Value) else tuple(outputs)
