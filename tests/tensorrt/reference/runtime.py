"""The engines and execution contexts of the reference."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor

from svexport.graph import lower, strip
from svexport.graph.nodes import svexport_nodes
from svexport.runtime.session import OnnxEngine
from tests.tensorrt.reference.builder import ParserError, host_inputs
from tests.tensorrt.reference.objects import Object, made, numbers, say

_ONNX = {1: "FLOAT", 2: "UINT8", 3: "INT8", 6: "INT32", 7: "INT64", 9: "BOOL", 10: "HALF", 11: "FLOAT", 16: "BF16"}
_TORCH = {"FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16, "INT8": torch.int8, "BOOL": torch.bool}
_TORCH |= {"UINT8": torch.uint8, "INT32": torch.int32, "INT64": torch.int64}


# ------------------------------------------------------------------------------------------------------ the runtime


class Runtime(Object):
    def _init(self, logger: Any) -> None:
        self._logger = logger
        self.engine_host_code_allowed = False

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> Any:
        trt, log = self._trt, partial(say, self._logger, "ERROR")
        if "deserialize" in trt.faults:
            return log(trt.faults["deserialize"])
        if serialized_engine[:4] != b"ftrt":
            return log("magicTagRead == kMAGIC_TAG failed. Magic tag does not match")
        if list(serialized_engine[24:28]) != numbers(trt.__version__):
            return log("The engine plan file is not compatible with this version of TensorRT")
        try:
            size = int.from_bytes(serialized_engine[28:32], "little")
            facts = json.loads(serialized_engine[32 : 32 + size])
            model = onnx.load_from_string(serialized_engine[32 + size :])
            onnx.checker.check_model(model)
        except Exception:  # noqa: BLE001 - whatever a plan that was cut short runs into
            return log("Serialization assertion failed")
        missing = {n.op_type for n in svexport_nodes(model)} - set(trt._registry._creators)
        if missing:
            return log(f"Cannot find plugin: {min(missing)}, version: 1, namespace: svexport")
        engine = made(trt, "ICudaEngine", CudaEngine, facts, model, self._logger)
        trt.alive.add(engine)
        return engine


class CudaEngine(Object):
    def _init(self, facts: Any, model: onnx.ModelProto, logger: Any) -> None:
        self._facts, self._model, self._logger = facts, model, logger
        plain = onnx.ModelProto()
        plain.CopyFrom(model)
        strip(plain)
        self._runner = OnnxEngine(lower(plain), device="cpu")
        constants = {t.name for t in model.graph.initializer}
        self._names = [v.name for v in model.graph.input if v.name not in constants]
        self._outputs = [v.name for v in model.graph.output]
        self._known: dict[Any, list[tuple[int, ...]]] = {}  # shapes of outputs
        self._values = {v.name: v for v in (*model.graph.input, *model.graph.output)}
        self._types = {spec.name: spec.dtype for spec in (*self._runner.inputs, *self._runner.outputs)}
        self.name = facts["name"]
        self.num_io_tensors = len(self._names) + len(self._outputs)
        self.num_optimization_profiles = max(len(facts["profiles"]), 1)
        self.num_layers = len(model.graph.node)
        self.refittable = facts["refittable"]
        name = "device_memory_size_v2" if "device_memory_size_v2" in self._members else "device_memory_size"
        setattr(self, name, 4096)

    def get_tensor_name(self, index: int) -> str:
        return [*self._names, *self._outputs][index]

    def get_tensor_mode(self, name: str) -> Any:
        return self._trt.TensorIOMode.INPUT if name in self._names else self._trt.TensorIOMode.OUTPUT

    def _kind(self, name: str) -> str:
        kind = _ONNX[self._values[name].type.tensor_type.elem_type]
        return "INT32" if kind == "INT64" and not hasattr(self._trt.DataType, "INT64") else kind

    def get_tensor_dtype(self, name: str) -> Any:
        return getattr(self._trt.DataType, self._kind(name))

    def get_tensor_format(self, name: str) -> Any:
        return self._trt.TensorFormat.CHW32 if self._trt.faults.get("chw32") == name else self._trt.TensorFormat.LINEAR

    def get_tensor_format_desc(self, name: str) -> str:
        return "Thirty-two wide channel vectorized row major Int8 format"

    def get_tensor_location(self, name: str) -> Any:
        where = self._trt.TensorLocation
        return where.HOST if name in host_inputs(self._model) else where.DEVICE

    def get_tensor_shape(self, name: str) -> Any:
        dims = self._values[name].type.tensor_type.shape.dim
        return tuple(d.dim_value if d.HasField("dim_value") else -1 for d in dims)

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> Any:
        return [tuple(shape) for shape in self._facts["profiles"][profile_index][name]]

    def create_engine_inspector(self) -> Any:
        inspector = made(self._trt, "EngineInspector", Inspector)
        inspector._engine = self
        return inspector

    def create_execution_context(self, strategy: Any = None) -> Any:
        mine = [c for c in self._trt.alive if isinstance(c, Context) and c._engine is self]
        if len(mine) >= self.num_optimization_profiles and not self._facts["sharing"]:
            return say(self._logger, "ERROR", "no optimization profile is free for another context")
        if "context" in self._trt.faults:
            return say(self._logger, "ERROR", self._trt.faults["context"])
        context = made(self._trt, "IExecutionContext", Context, self)
        self._trt.alive.add(context)
        return context


class Inspector(Object):
    def _init(self) -> None:
        self._engine: Any = None

    def get_engine_information(self, format: Any) -> str:
        if "layers" in self._trt.faults:
            return self._trt.faults["layers"]
        layers = [
            {
                "Name": node.name or node.output[0],
                "LayerType": "PluginV3" if node.domain == "svexport" else node.op_type,
                "Inputs": [{"Name": name, "Format/Datatype": "Row major linear FP32"} for name in node.input],
                "Outputs": [{"Name": name, "Format/Datatype": "Row major linear FP32"} for name in node.output],
                "TacticName": "reference",
                "Metadata": f"[ONNX Layer: {node.name}]",
            }
            for node in self._engine._model.graph.node
        ]
        return json.dumps({"Layers": layers, "Bindings": []})


class Context(Object):
    def _init(self, engine: Any) -> None:
        self._engine = engine
        self.profiler = None
        self._profile = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, Any] = {}
        self._results: list[Tensor] | None = None

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._profile = profile_index
        self._shapes.clear()
        return True

    def set_input_shape(self, name: str, shape: Any) -> bool:
        ranges = (self._engine._facts["profiles"] or [{}])[self._profile].get(name)
        if ranges and not all(a <= s <= b for a, s, b in zip(ranges[0], shape, ranges[2], strict=True)):
            return False
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return bool(memory)

    def set_output_allocator(self, name: str, output_allocator: Any) -> bool:
        assert output_allocator._ready
        self._allocators[name] = output_allocator
        return True

    def infer_shapes(self) -> list[str]:
        return [name for name in self._engine._names if name not in self._shapes]

    def _inputs(self) -> list[Tensor]:
        tensors = []
        for name in self._engine._names:
            tensor = _view(self._addresses[name], self._shapes[name], _TORCH[self._engine._kind(name)])
            tensors.append(tensor.to(self._engine._types[name]))
        return tensors

    def get_tensor_shape(self, name: str) -> Any:
        if name in self._engine._names:
            return self._shapes[name]
        if _data_dependent(self._engine._model):
            return tuple(-1 for _ in self._engine.get_tensor_shape(name))
        host = host_inputs(self._engine._model)
        zeros = [x if n in host else torch.zeros_like(x) for n, x in zip(self._engine._names, self._inputs())]
        key = (*self._shapes.items(), *(tuple(x.tolist()) for n, x in zip(self._engine._names, zeros) if n in host))
        if key not in self._engine._known:
            self._engine._known[key] = [tuple(y.shape) for y in self._engine._runner.run(zeros)]
        return self._engine._known[key][self._engine._outputs.index(name)]

    def execute_async_v3(self, stream_handle: int) -> bool:
        engine, trt = self._engine, self._trt
        if "execute" in trt.faults:
            say(engine._logger, "ERROR", trt.faults["execute"])
            return False
        assert not self.infer_shapes()
        for name, result in zip(engine._outputs, engine._runner.run(self._inputs())):
            result = result.to(_TORCH[engine._kind(name)]).contiguous()
            address = self._addresses.get(name)
            if name in self._allocators:
                allocator = self._allocators[name]
                size = result.numel() * result.itemsize
                if "reallocate_output_async" in dir(allocator) and trt.__version__ >= "10":
                    address = allocator.reallocate_output_async(name, None, size, 256, stream_handle)
                else:
                    address = allocator.reallocate_output(name, None, size, 256)
                if not address:
                    say(engine._logger, "ERROR", "no memory for an output")
                    return False
                allocator.notify_shape(name, tuple(result.shape))
            if result.numel():
                ctypes.memmove(address, result.data_ptr(), result.numel() * result.itemsize)
        if self.profiler is not None:
            for node in engine._model.graph.node:
                self.profiler.report_layer_time(node.name or node.output[0], 0.25)
        return True


def _data_dependent(model: onnx.ModelProto) -> bool:
    return any(node.op_type == "NonZero" for node in model.graph.node)


def _view(address: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    size = int(np.prod(shape)) * dtype.itemsize
    if not size:
        return torch.empty(tuple(shape), dtype=dtype)
    memory = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).reshape(tuple(shape)).clone()


class Refitter(Object):
    def _init(self, engine: Any, logger: Any) -> None:
        self._engine = engine

    def refit_cuda_engine(self) -> bool:
        return True


class OnnxParserRefitter(Object):
    def _init(self, refitter: Any, logger: Any) -> None:
        self._refitter, self._logger, self._said = refitter, logger, ""

    num_errors = property(lambda self: int(bool(self._said)))

    def get_error(self, index: int) -> Any:
        error = made(self._trt, "ParserError", ParserError)
        error._facts = 0, "", self._said
        return error

    def refit_from_bytes(self, model: bytes, path: str | None = None) -> bool:
        loaded = onnx.load_from_string(model)
        engine = self._refitter._engine
        shapes = {t.name: list(t.dims) for t in engine._model.graph.initializer}
        given = {t.name: list(t.dims) for t in loaded.graph.initializer}
        if shapes != given:
            self._said = "weights do not match those of the engine"
            return False
        made(self._trt, "ICudaEngine", CudaEngine, engine._facts, loaded, self._logger)
        engine._init(engine._facts, loaded, self._logger)
        return True

    def refit_from_file(self, model: str) -> bool:
        return self.refit_from_bytes(Path(model).read_bytes())
