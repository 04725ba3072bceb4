"""Plugins that torch computes on TensorRT's stream: ``IPluginV3``, of TensorRT 10 or later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from svexport.ops._op import Op, as_tuple
from svexport.tensorrt.bindings import load_tensorrt_for_plugins
from svexport.tensorrt.fields import attributes_of
from svexport.tensorrt.python_plugin import PythonCreator, PythonPlugin, derived
from svexport.tensorrt.signature import dtype_combinations

__all__ = ["plugin_classes", "tensor_at"]


def plugin_classes(op: Op) -> tuple[type, type]:
    """The just-in-time plugin class of an op and its creator class, derived from the installed TensorRT's interfaces.

    Raises:
        BackendNotAvailableError: without TensorRT 10 or later.
    """
    trt = load_tensorrt_for_plugins()
    interfaces = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime)
    plugin = derived(_JitPlugin, op.node_type, trt, op, interfaces)
    creators = (trt.IPluginCreatorV3One,)
    return plugin, derived(_JitCreator, f"{op.node_type}Creator", trt, op, creators, plugin=plugin)


class _JitPlugin(PythonPlugin):
    def supports_format_combination(self, pos: int, in_out: Sequence[Any], num_inputs: int) -> bool:
        here = [desc.desc for desc in in_out[: pos + 1]]
        if here[pos].format != self.trt.TensorFormat.LINEAR or any(d.type not in self.dtypes for d in here):
            return False
        chosen = [self.dtypes[d.type] for d in here]
        declared = self.declared or [self.dtypes[d.desc.type] for d in in_out[:num_inputs]]
        return any(chosen == c[: pos + 1] for c in dtype_combinations(self.op, declared, self.attributes))

    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        return 0  # torch allocates its own memory

    def attach_to_context(self, resource_context: Any) -> Any:
        return self.clone()

    def enqueue(
        self,
        input_desc: Sequence[Any],
        output_desc: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            given = [tensor_at(p, tuple(d.dims), self.dtypes[d.type]) for p, d in zip(inputs, input_desc, strict=True)]
            results = as_tuple(self.op(*self.op.bind(given, self.attributes)))
            for result, pointer, desc in zip(results, outputs, output_desc, strict=True):
                tensor_at(pointer, tuple(desc.dims), self.dtypes[desc.type]).copy_(result)


class _JitCreator(PythonCreator):
    def create_plugin(self, name: str, field_collection: Sequence[Any], phase: Any) -> Any:
        return self.plugin(attributes_of(self.op, field_collection))


class _Memory:
    """Device memory with another owner, in a form that torch accepts (``__cuda_array_interface__``)."""

    def __init__(self, pointer: int, shape: tuple[int, ...], typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": shape,
            "typestr": typestr,
            "strides": None,
            "version": 3,
        }


_TYPESTR = {
    torch.float32: "<f4",
    torch.float16: "<f2",
    torch.bfloat16: "<i2",  # numpy has no bfloat16: viewed afterwards
    torch.int8: "|i1",
    torch.int32: "<i4",
    torch.int64: "<i8",
    torch.bool: "|b1",
}


def tensor_at(pointer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Device memory at an address as a tensor, without a copy."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device="cuda")
    return torch.as_tensor(_Memory(pointer, shape, _TYPESTR[dtype]), device="cuda").view(dtype)
