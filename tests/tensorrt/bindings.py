"""Prints as JSON, in a process of its own, how one version of TensorRT's real bindings sees the Python plugins.

``python -m tests.tensorrt.bindings FOLDER STUB``: FOLDER holds ``tensorrt_bindings``, STUB is the compiled stub.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

import numpy as np
import torch
from onnx import AttributeProto, helper

from svexport.ops._op import OPS, Op
from tests.support import op_model
from tests.tensorrt import engines
from tests.tensorrt.cases import arguments, inputs_of
from tests.tensorrt.engines import runnable
from tests.tensorrt.fake import Fake


def main(folder: str, stub: str) -> dict[str, Any]:
    library = ctypes.CDLL(stub, mode=ctypes.RTLD_GLOBAL)
    sys.path.insert(0, folder)
    import tensorrt_bindings as trt

    sys.modules["tensorrt"] = trt
    from svexport.tensorrt import aot, jit_plugin, plugins
    from svexport.tensorrt.nodes import plugin_ops

    nvcc = aot.available()
    aot.available = lambda: True  # all but compiling works without it
    kinds = dict(plugins.register_plugins().kinds)
    return {
        "build and run": build_and_run(trt),
        "version": trt.__version__,
        "subclasses": subclasses(trt),
        "kinds": kinds,
        "kinds again": dict(plugins.register_plugins().kinds),
        "registered": library.registered_creators(),
        "ops": {op.name: of_op(trt, jit_plugin, op) for op in plugin_ops()},
        "just in time": {op.name: in_time(library, op) for op in plugin_ops()},
        "ahead of time": {op.name: ahead(library, op, nvcc) for op in plugin_ops() if kinds[op.node_type] == "AOT"},
        "inverse of 9x9": [
            ask(library, OPS["inverse"], (torch.eye(9)[None], 9), True, 0, request=request)[0]
            for request in (0, STRICT_AOT)
        ],
        "requests": {op.node_type: requests(library, op) for op in plugin_ops() if kinds[op.node_type] == "AOT"},
    }


def subclasses(trt: Any) -> dict[str, Any]:
    """What svexport.build and engines implement of TensorRT's, as the real base classes take it."""
    from svexport.runtime import context
    from svexport.tensorrt import bindings, builder

    log = bindings.Log()
    logger = bindings.logger_for(trt, log)
    logger.log(trt.ILogger.ERROR, "an error")
    logger.log(trt.ILogger.WARNING, "a warning")
    logger.log(trt.ILogger.VERBOSE, "chatter")
    allocator = context._allocator(trt, lambda size: torch.zeros(size, dtype=torch.uint8))
    address = allocator.reallocate_output_async("y", None, 24, 256, 0)
    allocator.notify_shape("y", trt.Dims([2, 3]))
    monitors = [builder._monitor(trt, lambda cancelled=cancelled: cancelled) for cancelled in (False, True)]
    for monitor in monitors:
        monitor.phase_start("phase", None, 2)
    return {
        "bases": [isinstance(logger, trt.ILogger), isinstance(allocator, trt.IOutputAllocator)],
        "log": [log.errors, log.warnings],
        "output": [address != 0, list(allocator.take(torch.float32).shape)],
        "goes on": [monitor.step_complete("phase", 0) for monitor in monitors],
        "dtypes": sorted(str(dtype) for dtype in bindings.dtypes(trt).values()),
    }


def of_op(trt: Any, jit_plugin: Any, op: Op) -> dict[str, Any]:
    _, creator_class = jit_plugin.plugin_classes(op)
    creator = creator_class()
    generator = torch.Generator().manual_seed(0)
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


def build_and_run(trt: Any) -> dict[str, Any]:
    """What the tests with TensorRT do with it, done with one that makes nothing."""
    answers = {
        "INetworkDefinition.num_layers": 2,
        "ILayer.type": trt.LayerType.PLUGIN_V3,
        "OnnxParser.num_errors": 1,
        "ParserError.desc": "a reason",
        "Builder.build_serialized_network": b"plan",
        "ICudaEngine.num_io_tensors": 2,
        "ICudaEngine.get_tensor_name": lambda i: ("x", "y")[i],
        "ICudaEngine.get_tensor_mode": {"x": trt.TensorIOMode.INPUT, "y": trt.TensorIOMode.OUTPUT}.get,
        "ICudaEngine.get_tensor_dtype": trt.DataType.HALF,
        "IExecutionContext.get_tensor_shape": (2, 3),
    }
    fake = Fake(trt, answers)
    plan, layers = engines.build(fake, b"model", {"x": [(1, 2), (1, 2), (1, 2)]})
    outputs = engines.run(fake, plan, {"x": torch.zeros(1, 2)}, device="cpu")
    failures = {}
    for method, answer in [
        ("OnnxParser.parse", False),
        ("Builder.build_serialized_network", None),
        ("Runtime.deserialize_cuda_engine", None),
        ("IExecutionContext.set_input_shape", False),
        ("IExecutionContext.execute_async_v3", False),
    ]:
        broken = Fake(trt, {**answers, method: answer})
        try:
            engines.run(broken, engines.build(broken, b"model")[0], {"x": torch.zeros(1, 2)}, device="cpu")
        except RuntimeError as error:
            failures[method] = str(error)
    return {
        "plan": plan.decode(),
        "layers": layers,
        "outputs": {name: [list(t.shape), str(t.dtype)] for name, t in outputs.items()},
        "called": sorted(set(fake.called)),
        "failures": failures,
    }


class Field(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("type", ctypes.c_int), ("length", ctypes.c_int))


class Dims(ctypes.Structure):
    _fields_ = (("rank", ctypes.c_int), ("sizes", ctypes.c_int64 * 8))

    @property
    def shape(self) -> list[int]:
        return list(self.sizes[: self.rank])


class Answer(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_char * 64),
        ("shapes", Dims * 4),
        ("types", ctypes.c_int * 4),
        ("count_combinations", ctypes.c_int),
        ("combinations", (ctypes.c_int * 2) * 512),
        ("count_arguments", ctypes.c_int),
        ("code_size", ctypes.c_int),
        ("launch", ctypes.c_int64 * 7),
        ("arguments", ctypes.c_int64 * 128),
        ("name", ctypes.c_char * 128),
        ("code", ctypes.c_char * (1 << 20)),
    )


TYPES = {torch.float32: 0, torch.float16: 1, torch.int8: 2, torch.int64: 8}  # TensorRT's numbers of data types
PREFER_JIT, PREFER_AOT, STRICT_JIT, STRICT_AOT = range(1, 5)


def ask(
    library: Any, op: Op, args: tuple, known: bool, choice: int, *, request: int = 0, compile: bool = False
) -> tuple[int, Answer]:
    """What the plugin that the stub creates from a node's attributes answers to TensorRT's questions."""
    given, dims, types = question(op, args)
    answer = Answer()
    step = library.ask(
        op.node_type.encode(),
        given,
        len(given),
        request,
        dims,
        types,
        len(dims),
        known,
        choice,
        compile,
        ctypes.byref(answer),
    )
    return step, answer


def question(op: Op, args: tuple) -> tuple[Any, Any, Any]:
    """Fields, shapes and types of a node with these arguments."""
    attributes = [(a, v) for a, v in zip(op.arguments, args, strict=True) if not a.is_tensor]
    arrays = [np.atleast_1d(np.array(v, np.int32 if a.kind in ("int", "ints") else np.float32)) for a, v in attributes]
    given = [
        Field(a.name.encode(), array.ctypes.data, 5 if array.dtype == np.int32 else 1, array.size)
        for (a, _), array in zip(attributes, arrays, strict=True)
    ]
    tensors = [t for _, t in inputs_of(op, args)]
    ALIVE.extend(arrays)
    dims = [Dims(t.dim(), (ctypes.c_int64 * 8)(*t.shape)) for t in tensors]
    types = [TYPES[t.dtype] for t in tensors]
    return (Field * len(given))(*given), (Dims * len(dims))(*dims), (ctypes.c_int * len(types))(*types)


def in_time(library: Any, op: Op) -> list[dict[str, Any]]:
    found = []
    for case, args in enumerate(arguments(op)):
        if not runnable(op, args):
            continue
        for known in (True, False):
            given, dims, types = question(op, args)
            answer = Answer()
            step = library.ask_torch(
                op.node_type.encode(), given, len(given), dims, types, len(dims), known, ctypes.byref(answer)
            )
            found.append(
                {
                    "case": case,
                    "step": step,
                    "kind": answer.kind.decode(),
                    "shapes": [answer.shapes[i].shape for i in range(op.num_outputs)],
                    "types": list(answer.types[: op.num_outputs]),
                    "taken": [answer.combinations[i][0] for i in range(4)],
                }
            )
    return found


def ahead(library: Any, op: Op, nvcc: bool) -> list[dict[str, Any]]:
    found = []
    for case, args in enumerate(arguments(op)):
        combinations = ask(library, op, args, True, 0)[1].count_combinations
        for known, choice in ((True, 0), (False, 0), (True, combinations - 1), (False, combinations - 1)):
            step, answer = ask(library, op, args, known, choice, compile=nvcc and known and case == 0)
            outputs, count = op.num_outputs, len(inputs_of(op, args)) + op.num_outputs
            found.append(
                {
                    "case": case,
                    "known": known,
                    "step": step,
                    "kind": answer.kind.decode(),
                    "shapes": [answer.shapes[i].shape for i in range(outputs)],
                    "types": list(answer.types[:outputs]),
                    "combinations": [list(pair) for pair in answer.combinations[: answer.count_combinations * count]],
                    "choice": choice,
                    "launch": list(answer.launch),
                    "arguments": list(answer.arguments[: answer.count_arguments]),
                    "name": answer.name.decode(),
                    "code": answer.code[: answer.code_size].decode(),
                }
            )
    return found


def requests(library: Any, op: Op) -> dict[str, int]:
    """Where the stub stops for what may be asked of a creator: 0 if it got a plugin compiled ahead of time."""
    args = next(arguments(op))
    names = {"none": 0, "prefer JIT": PREFER_JIT, "prefer AOT": PREFER_AOT, "JIT": STRICT_JIT, "AOT": STRICT_AOT}
    return {name: ask(library, op, args, True, 0, request=request)[0] for name, request in names.items()}


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
