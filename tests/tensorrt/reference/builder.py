"""The builder, network and parser of the reference."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from svexport.tensorrt.nodes import plugin_ops
from tests.tensorrt.reference.objects import Object, made, numbers, say

# ------------------------------------------------------------------------------------------------------ the builder


class Registry(Object):
    def _init(self) -> None:
        self._creators: dict[str, Any] = {}

    def load_library(self, plugin_path: str) -> Any:
        self._trt.loaded.append(plugin_path)
        self._creators |= {op.node_type: object() for op in plugin_ops()}
        return object()

    def get_creator(self, type: str, version: str, plugin_namespace: str = "") -> Any:
        return self._creators.get(type)

    get_plugin_creator = get_creator

    def register_creator(self, creator: Any, plugin_namespace: str = "") -> bool:
        self._creators[creator.name] = creator
        return True


class Builder(Object):
    def _init(self, logger: Any) -> None:
        self._logger = logger

    def create_network(self, flags: int = 0) -> Any:
        kinds = self._trt.NetworkDefinitionCreationFlag
        network = made(self._trt, "INetworkDefinition", Network)
        network._typed = hasattr(kinds, "STRONGLY_TYPED") and bool(flags >> int(kinds.STRONGLY_TYPED) & 1)
        if not hasattr(kinds, "STRONGLY_TYPED"):
            assert flags >> int(kinds.EXPLICIT_BATCH) & 1, "the ONNX parser supports explicit batches only"
        return network

    def create_builder_config(self) -> Any:
        return made(self._trt, "IBuilderConfig", Config)

    def create_optimization_profile(self) -> Any:
        return made(self._trt, "IOptimizationProfile", OptimizationProfile)

    def build_serialized_network(self, network: Any, config: Any) -> Any:
        trt, log = self._trt, partial(say, self._logger, "ERROR")
        trt.built.append(config)
        trt.during_build()
        if "raise" in trt.faults:
            raise trt.faults["raise"]
        monitor = getattr(config, "progress_monitor", None) if "progress_monitor" in config._members else None
        if monitor is not None:
            assert monitor._ready
            monitor.phase_start("Building Engine", None, 4)
            for step in range(4):
                if not monitor.step_complete("Building Engine", step):
                    return log("builder was cancelled by its progress monitor")
            monitor.phase_finish("Building Engine")
        if "build" in trt.faults:
            return log(trt.faults["build"])
        inputs = {v.name: [d.dim_value if d.HasField("dim_value") else -1 for d in v.type.tensor_type.shape.dim]
                  for v in network._inputs()}  # fmt: skip
        unsaid = [n for n, s in inputs.items() if -1 in s and not all(n in p._shapes for p in config._profiles)]
        if unsaid or (any(-1 in s for s in inputs.values()) and not config._profiles):
            return log(f"Network has dynamic or shape inputs, but no optimization profile has been defined: {unsaid}")
        for profile in config._profiles:
            for name, (low, usual, high) in profile._shapes.items():
                if not all(a <= b <= c for a, b, c in zip(low, usual, high)):
                    return log(f"{name}: kMIN <= kOPT <= kMAX is not satisfied")
        if not network._typed:
            half = any(t.data_type == 10 for t in network._model.graph.initializer)
            if half and "FP16" not in config._flags:
                return log("half precision is not allowed: set BuilderFlag.FP16")
        say(self._logger, "WARNING", "Using PyTorch's numbers in place of kernels")
        trt.finished += 1
        return HostMemory(network._plan(trt.__version__, config))


class HostMemory(bytes):
    nbytes = property(len)


class Network(Object):
    def _init(self) -> None:
        self.name = "Unnamed Network 0"
        self._typed = False
        self._model = onnx.ModelProto()

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        constants = {t.name for t in self._model.graph.initializer}
        return [v for v in self._model.graph.input if v.name not in constants]

    num_inputs = property(lambda self: len(self._inputs()))
    num_outputs = property(lambda self: len(self._model.graph.output))

    def get_input(self, index: int) -> Any:
        value = self._inputs()[index]
        tensor = made(self._trt, "ITensor", Described)
        tensor.name = value.name
        tensor.is_shape_tensor = value.name in host_inputs(self._model)
        return tensor

    def _plan(self, version: str, config: Any) -> bytes:
        facts = {
            "name": self.name,
            "profiles": [{k: [list(s) for s in r] for k, r in p._shapes.items()} for p in config._profiles],
            "refittable": bool({"REFIT", "REFIT_IDENTICAL"} & config._flags),
            "sharing": config._sharing or version[0] != "8",
            "stripped": "STRIP_PLAN" in config._flags,
        }
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        if "kernel" in self._trt.faults:
            self._trt.faults["kernel"](model)
        text = json.dumps(facts).encode()
        body = model.SerializeToString()
        return b"ftrt" + bytes(20) + bytes(numbers(version)) + len(text).to_bytes(4, "little") + text + body


class Described(Object):
    def _init(self) -> None:
        pass


def host_inputs(model: onnx.ModelProto) -> set[str]:
    """Inputs that are the shape of a Reshape or Expand: TensorRT reads them on the CPU."""
    used = {n.input[1] for n in model.graph.node if n.op_type in ("Reshape", "Expand") and len(n.input) > 1}
    return used & {v.name for v in model.graph.input}


class OptimizationProfile(Object):
    def _init(self) -> None:
        self._shapes: dict[str, Any] = {}
        self._values: dict[str, Any] = {}

    def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:
        self._shapes[input] = tuple(min), tuple(opt), tuple(max)

    def set_shape_input(self, input: str, min: Any, opt: Any, max: Any) -> None:
        self._values[input] = tuple(min), tuple(opt), tuple(max)


class Config(Object):
    def _init(self) -> None:
        self._flags = {"TF32"}
        self._profiles: list[Any] = []
        self._sharing = False
        self._pools: dict[str, int] = {}
        self._cache: Any = None

    def set_flag(self, flag: Any) -> None:
        self._flags.add(flag.name)

    def clear_flag(self, flag: Any) -> None:
        self._flags.discard(flag.name)

    def set_preview_feature(self, feature: Any, enable: bool) -> None:
        self._sharing = feature.name == "PROFILE_SHARING_0806" and enable

    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
        self._pools[pool.name] = pool_size

    def add_optimization_profile(self, profile: Any) -> int:
        self._profiles.append(profile)
        return len(self._profiles) - 1

    def create_timing_cache(self, serialized_timing_cache: Any) -> Any:
        cache = made(self._trt, "ITimingCache", TimingCache)
        cache._content = bytes(serialized_timing_cache)
        return cache

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        if cache._content not in (b"", b"timings of " + self._trt.__version__.encode()):
            return False
        self._cache = cache
        return True

    def get_timing_cache(self) -> Any:
        return self._cache


class TimingCache(Object):
    def _init(self) -> None:
        self._content = b""

    def serialize(self) -> Any:
        return HostMemory(b"timings of " + self._trt.__version__.encode())


class OnnxParser(Object):
    def _init(self, network: Any, logger: Any) -> None:
        self._network, self._logger = network, logger
        self._errors: list[Any] = []

    num_errors = property(lambda self: len(self._errors))

    def get_error(self, index: int) -> Any:
        return self._errors[index]

    def parse(self, model: bytes, path: str | None = None) -> bool:
        loaded = onnx.load_from_string(model)
        if path is not None:
            onnx.external_data_helper.load_external_data_for_model(loaded, str(Path(path).parent))
        version = tuple(map(int, self._trt.__version__.split(".")[:2]))
        creators = self._trt._registry._creators
        for index, node in enumerate(loaded.graph.node):
            if node.domain != "svexport":
                continue
            body = any(f.name == node.op_type for f in loaded.functions)
            if body and version < (10, 7):
                self._fail(index, node, f"TensorRT needs the plugin {node.op_type}")
            elif node.op_type not in creators:
                self._fail(index, node, f"No importer registered for op: {node.op_type}")
        if "parse" in self._trt.faults:
            index, node = max(enumerate(loaded.graph.node), key=lambda numbered: numbered[1].domain == "svexport")
            self._fail(index, node, self._trt.faults["parse"])
        self._network._model = loaded
        return not self._errors

    def _fail(self, index: int, node: onnx.NodeProto, text: str) -> None:
        error = made(self._trt, "ParserError", ParserError)
        error._facts = index, node.name, text
        self._errors.append(error)
        say(self._logger, "ERROR", f"In node {index}: {text}")


class ParserError(Object):
    def _init(self) -> None:
        self._facts = (-1, "", "")

    def desc(self) -> str:
        return self._facts[2]

    def node(self) -> int:
        return self._facts[0]

    def node_name(self) -> str:
        return self._facts[1]
