"""What an op has to say to ONNX: its body, and the aten functions of unedited models that mean the same."""

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
"""In an attribute of sizes: one that the model computes. It is an input of the node, after the tensors."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor met while tracing, the same for both exporters.

    Attributes:
        value: the exporter's own object, put back into the node's inputs.
        shape: sizes with None for dynamic ones; None where the rank is not known.
    """

    value: Any
    shape: tuple[int | None, ...] | None


def node_of(op: Op, arguments: Sequence[Any]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """What the node of an op is given, of arguments in schema order (tensors as :class:`TensorInfo`).

    Returns:
        Its tensors as the exporter has them, None for one that is absent; the sizes that the model computes, which
        become inputs after them; its attributes. Empty lists are none, for they have no type: they are written when
        the file is cleaned.

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
    """A size or a list of them with :data:`COMPUTED` for those that the model computes, which join ``computed``."""
    if isinstance(sizes, (list, tuple)):
        return [_without_computed(size, computed) for size in sizes]
    if not isinstance(sizes, TensorInfo):
        return sizes
    computed.append(sizes.value)
    return COMPUTED


def qualified(name: str) -> str:
    """The name of an operator with its library: ``"aten::einsum"`` for ``"einsum"``."""
    return name if "::" in name else f"aten::{name}"


def taken_over() -> set[str]:
    """Names, without overloads, of the functions of unedited models that become nodes of ops."""
    return {qualified(name).partition(".")[0] for symbolic in SYMBOLICS.values() for name in symbolic.aten}


@dataclass
class Symbolic:
    """The ONNX side of an op.

    Args:
        op: whose node this is.
        body: ``body(builder, *arguments) -> Value | tuple[Value, ...]``: the standard-ONNX definition, called with the
            op's arguments in schema order, tensors as :class:`Value`, lists as lists, attributes as int/float/list. It
            must be right for any dimension that is None, and is specialized by every dimension that is known.
        aten: aten function name, with its overload if one alone is meant (``"grid_sampler"``, ``"scatter.reduce"``), or
            the qualified name of another library's operator (``"torchvision::deform_conv2d"``, where that is imported)
            -> ``convert(*arguments) -> op arguments | None``, called with that function's arguments (tensors as
            :class:`TensorInfo`, the rest as Python values). None leaves the call to the exporter's own conversion.
        until: the last opset at which the aten functions are taken over; from the next one on the exporter's own
            conversion is right, and only calls that it refuses are still taken over. None: at every opset.
    """

    op: Op
    body: Callable[..., Any]
    aten: dict[str, Callable[..., Sequence[Any] | None]] = field(default_factory=dict)
    until: int | None = None

    def __post_init__(self) -> None:
        SYMBOLICS[self.op.node_type] = self

    def build(self, builder: Builder, arguments: Sequence[Any]) -> tuple[Value, ...]:
        """Runs the body; one :class:`Value` per output of the op."""
        outputs = self.body(builder, *arguments)
        return (outputs,) if isinstance(outputs, Value) else tuple(outputs)
