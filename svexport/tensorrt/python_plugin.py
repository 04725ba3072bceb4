"""The base of plugins in Python, just-in-time and ahead-of-time: everything that follows from the op's definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from svexport.ops._op import DOMAIN, Op
from svexport.tensorrt.bindings import dtypes
from svexport.tensorrt.fields import fields_of
from svexport.tensorrt.signature import output_dtypes, output_shapes

__all__ = ["VERSION", "PythonCreator", "PythonPlugin", "derived"]

VERSION = "1"


class PythonPlugin:
    """The first base class of an op's plugin, before TensorRT's interfaces (see :func:`derived`).

    Attributes:
        trt: the bindings.
        op: the op.
        interfaces: TensorRT's interfaces that the plugin implements.
        dtypes: maps TensorRT's dtypes to torch's; ``types`` is the inverse.
        attributes: attributes of the node.
        declared: dtypes of the inputs in the network; empty until TensorRT passes them.
    """

    trt: ModuleType
    op: Op
    interfaces: tuple[type, ...]
    dtypes: Mapping[Any, torch.dtype]
    types: Mapping[torch.dtype, Any]

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        for interface in self.interfaces:
            interface.__init__(self)  # type: ignore[misc]
        self.plugin_name, self.plugin_version, self.plugin_namespace = self.op.node_type, VERSION, DOMAIN
        self.num_outputs = self.op.num_outputs
        self.attributes = dict(attributes)
        self.declared: list[torch.dtype] = []

    def clone(self) -> Any:
        cloned = type(self)(self.attributes)
        for name, value in vars(self).items():
            setattr(cloned, name, value)
        return cloned

    def get_capability_interface(self, type: Any) -> Any:
        return self

    def get_fields_to_serialize(self) -> Any:
        return fields_of(self.trt, self.op, self.attributes)

    def get_output_data_types(self, input_types: Sequence[Any], ranks: Sequence[int] = ()) -> list[Any]:
        self.declared = [self.dtypes[t] for t in input_types]
        return [self.types[d] for d in output_dtypes(self.op, self.declared, self.attributes)]

    def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], expr_builder: Any) -> list[Any]:
        return output_shapes(self.trt, self.op, inputs, self.attributes, expr_builder)

    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None: ...

    def get_valid_tactics(self) -> list[int]:
        return []

    def set_tactic(self, tactic: int) -> None: ...


class PythonCreator:
    """The first base class of the creator of an op's plugin, before TensorRT's interface.

    Attributes:
        trt: the bindings.
        op: the op.
        interfaces: TensorRT's interface that the creator implements.
        plugin: the plugin class that it creates.
    """

    trt: ModuleType
    op: Op
    interfaces: tuple[type, ...]
    plugin: type

    def __init__(self) -> None:
        for interface in self.interfaces:
            interface.__init__(self)  # type: ignore[misc]
        self.name, self.plugin_version, self.plugin_namespace = self.op.node_type, VERSION, DOMAIN
        self.field_names = fields_of(self.trt, self.op)


def derived(
    base: type, name: str, trt: ModuleType, op: Op, interfaces: Sequence[type], bases: Sequence[type] = (), **more: Any
) -> type:
    """Makes a class from ``base`` and TensorRT's interfaces; a function, as these exist only with the bindings.

    Args:
        bases: TensorRT's base classes; by default the interfaces.
        more: further attributes of the class.
    """
    known = dtypes(trt)
    members = {
        "trt": trt,
        "op": op,
        "interfaces": tuple(interfaces),
        "dtypes": known,
        "types": {dtype: type_ for type_, dtype in known.items()},
        **more,
    }
    return type(name, (base, *(bases or interfaces)), members)
