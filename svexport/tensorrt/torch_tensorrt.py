"""Torch-TensorRT converters of the ops, so that ``torch_tensorrt.compile`` puts a model with them into one engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from svexport.errors import BackendNotAvailableError
from svexport.ops._op import OPS, Op
from svexport.symbolic import SYMBOLICS
from svexport.tensorrt.nodes import plugin_ops
from svexport.tensorrt.plugins import Registered, create_plugin, register_plugins

__all__ = ["register_torch_tensorrt"]

_done: set[Any] = set()  # converters already registered; Torch-TensorRT would keep a second one too


def register_torch_tensorrt() -> Registered:
    """Registers every svexport op with Torch-TensorRT: ops with a plugin become the plugin, others are decomposed.

    ``F.grid_sample`` in an unedited model also becomes our plugin where TensorRT has no layer for it (5-D), and
    everywhere if the plugin runs without Python. Calling twice is fine. The plugins are registered first; the result
    says how they run.

    Raises:
        BackendNotAvailableError: without Torch-TensorRT, or TensorRT 10 or later.
    """
    try:
        from torch_tensorrt.dynamo import conversion
        from torch_tensorrt.dynamo.lowering import TORCH_TRT_DECOMPOSITIONS
    except ImportError as error:
        raise BackendNotAvailableError(
            f"converters need Torch-TensorRT, which does not import here ({error}); pip install torch-tensorrt"
        ) from error
    registered = register_plugins()

    def convert_with(op: Op, target: Any) -> None:
        if target not in _done:
            conversion.dynamo_tensorrt_converter(
                target,
                capability_validator=partial(_converts, op),
                supports_dynamic_shapes=True,
                priority=conversion.ConverterPriority.HIGH,
            )(partial(_convert, op))
            _done.add(target)

    for op in plugin_ops():
        convert_with(op, op.torch_op)
    grid_sample = OPS["grid_sample"]
    convert_with(grid_sample, torch.ops.aten.grid_sampler_3d.default)
    if registered.kinds[grid_sample.node_type] != "JIT":
        convert_with(grid_sample, torch.ops.aten.grid_sampler_2d.default)
    for op, function in decompositions().items():
        if op not in _done:
            torch._decomp.register_decomposition(op, registry=TORCH_TRT_DECOMPOSITIONS)(function)
            _done.add(op)
    return registered


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Decompositions of ops without a plugin into torch operators that Torch-TensorRT converts."""
    with_plugin = plugin_ops()
    return {op.torch_op: op.implementation or op.reference for op in OPS.values() if op not in with_plugin}


def _values(op: Op, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The op's arguments by name, from a call of the op or of an equivalent aten function."""
    if target != op.torch_op:
        args = SYMBOLICS[op.node_type].aten[target._schema.name.removeprefix("aten::")](*args, **kwargs) or ()
        kwargs = {}
    return dict(zip((a.name for a in op.arguments), args)) | dict(kwargs)


def _converts(op: Op, node: Any, settings: Any = None) -> bool:
    """Whether the op's plugin runs this node of a graph."""
    values = _values(op, node.target, node.args, node.kwargs)
    return not op.beyond_plugin({a.name: values[a.name] for a in op.attributes})


def _convert(op: Op, context: Any, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """The converter that Torch-TensorRT calls: it adds the op's plugin to the network under construction."""
    from torch_tensorrt.dynamo.conversion.converter_utils import get_trt_tensor

    values = _values(op, target, args, kwargs)
    tensors = [
        get_trt_tensor(context, tensor, f"{name}_{argument.name}_{i}")
        for argument in op.arguments
        if argument.is_tensor and values.get(argument.name) is not None
        for i, tensor in enumerate(values[argument.name] if argument.kind == "tensors" else [values[argument.name]])
    ]
    plugin = create_plugin(op, name, {a.name: values[a.name] for a in op.attributes})
    layer = context.net.add_plugin_v3(tensors, [], plugin)
    if layer is None:
        raise ValueError(f"TensorRT refused the plugin {op.node_type} for {name}; its log says why")
    layer.name = f"[{target}]-[{name}]"
    outputs = tuple(layer.get_output(i) for i in range(op.num_outputs))
    return outputs[0] if len(outputs) == 1 else outputs
