"""Run in a process of its own: what the Python plugins are to one version of TensorRT's real bindings, as JSON.

``python -m tests.tensorrt.bindings FOLDER STUB``: the folder that holds ``tensorrt_bindings``, and the compiled stub.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
from typing import Any

import numpy as np
import torch
from onnx import AttributeProto, helper

from svexport.ops._op import Op
from tests.support import op_model


def main(folder: str, stub: str) -> dict[str, Any]:
    library = ctypes.CDLL(stub, mode=ctypes.RTLD_GLOBAL)
    sys.path.insert(0, folder)
    import tensorrt_bindings as trt

    sys.modules["tensorrt"] = trt
    from svexport.tensorrt import plugins
    from svexport.tensorrt.nodes import plugin_ops

    return {
        "version": trt.__version__,
        "kinds": dict(plugins.register_plugins().kinds),
        "registered": library.registered_creators(),
        "ops": {op.name: of_op(trt, plugins, op) for op in plugin_ops()},
    }


def of_op(trt: Any, plugins: Any, op: Op) -> dict[str, Any]:
    _, creator_class = plugins.plugin_classes(op)
    creator = creator_class()
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    args = next(iter(op.samples(lambda *shape: torch.randn(shape, generator=generator))))
    node = next(n for n in op_model(op, args, 11, lowered=False).graph.node if n.domain == "svexport")
    plugin = creator.create_plugin(node.name, fields(trt, node), trt.TensorRTPhase.BUILD)
    serialized = plugin.get_fields_to_serialize()
    again = creator.create_plugin(node.name, serialized, trt.TensorRTPhase.RUNTIME)

    tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
    kinds = {torch.float32: trt.DataType.FLOAT, torch.int64: trt.DataType.INT64, torch.int8: trt.DataType.INT8}
    inputs = [kinds[t.dtype] for t in tensors]
    halves = [trt.DataType.HALF if t == trt.DataType.FLOAT else t for t in inputs]
    return {
        "name": creator.name,
        "fields": [(f.name, str(f.type).rsplit(".", 1)[-1]) for f in creator.field_names],
        "attributes": plugin.attributes,
        "serialized": again.attributes,
        "outputs": [str(t).rsplit(".", 1)[-1] for t in plugin.get_output_data_types(inputs)],
        "half outputs": [str(t).rsplit(".", 1)[-1] for t in plugin.get_output_data_types(halves)],
        "supports": supports(trt, plugin, inputs),
        "supports half": supports(trt, plugin, halves),
        "supports channels last": supports(trt, plugin, inputs, trt.TensorFormat.HWC8),
        "supports mixed output": supports(trt, plugin, inputs, output=trt.DataType.HALF),
        "refused": refused(trt, creator, op, node),
    }


def fields(trt: Any, node: Any, **changed: Any) -> Any:
    """A node's attributes as the parser of TensorRT makes fields of them: those that the creator announces."""
    collection = []
    for attribute in node.attribute:
        if attribute.type == AttributeProto.STRING:
            continue
        value = changed.get(attribute.name, helper.get_attribute_value(attribute))
        if value is None:
            continue
        whole = attribute.type in (AttributeProto.INT, AttributeProto.INTS)
        array = np.atleast_1d(np.array(value, np.int32 if whole else np.float32))
        ALIVE.append(array)
        kind = trt.PluginFieldType.INT32 if whole else trt.PluginFieldType.FLOAT32
        collection.append(trt.PluginField(attribute.name, array, kind))
    return trt.PluginFieldCollection(collection)


ALIVE: list[np.ndarray] = []  # a field points to its array


def supports(trt: Any, plugin: Any, inputs: list, layout: Any = None, output: Any = None) -> bool:
    """Whether every tensor, in turn, is accepted with these types, as TensorRT asks."""
    types = [*inputs, *(output or t for t in plugin.get_output_data_types(inputs))]
    described = []
    for type_ in types:
        desc = trt.DynamicPluginTensorDesc()
        desc.desc.type = type_
        desc.desc.format = layout or trt.TensorFormat.LINEAR
        described.append(desc)
    return all(plugin.supports_format_combination(i, described, len(inputs)) for i in range(len(types)))


def refused(trt: Any, creator: Any, op: Op, node: Any) -> dict[str, str]:
    """The errors of collections that lack an attribute or have a foreign one."""
    found = {}

    def attempt(what: str, collection: Any) -> None:
        try:
            creator.create_plugin("x", collection, trt.TensorRTPhase.BUILD)
        except ValueError as error:
            found[what] = str(error)

    foreign = np.zeros(1, np.int32)
    ALIVE.append(foreign)
    more = fields(trt, node)
    more.append(trt.PluginField("no_such_attribute", foreign, trt.PluginFieldType.INT32))
    attempt("foreign", more)
    for attribute in op.attributes:
        attempt(f"without {attribute.name}", fields(trt, node, **{attribute.name: None}))
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:]), default=lambda value: np.asarray(value).tolist()))
    sys.stdout.flush()
    # The bindings tear down what the stub never built.
    os._exit(0)
