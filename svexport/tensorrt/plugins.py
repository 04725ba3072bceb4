"""Plugins in Python: the ops as TensorRT layers; they need only pip's tensorrt.

The plugins are derived from the definitions of the ops: fields from the schema, shapes and types from the fake. They
run in two ways. Just in time (:mod:`svexport.tensorrt.jit_plugin`): torch computes on TensorRT's stream. Ahead of time
(:mod:`svexport.tensorrt.aot_plugin`): a kernel is embedded in the engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from svexport.errors import BackendNotAvailableError, PluginBuildError
from svexport.logging import logger
from svexport.ops._op import DOMAIN, Op
from svexport.tensorrt import aot, aot_plugin, jit_plugin
from svexport.tensorrt.bindings import load_tensorrt, load_tensorrt_for_plugins
from svexport.tensorrt.fields import fields_of
from svexport.tensorrt.library import libraries
from svexport.tensorrt.nodes import plugin_ops
from svexport.tensorrt.python_plugin import VERSION

__all__ = ["Registered", "create_plugin", "register_plugins"]


@dataclass(frozen=True)
class Registered:
    """The result of :func:`register_plugins`.

    Attributes:
        kinds: how each node type runs: ``"C++"`` in the plugin library, ``"AOT"`` as a kernel compiled into the engine,
            ``"JIT"`` in torch, from Python.
        library: the plugin library that was loaded.
    """

    kinds: Mapping[str, str]
    library: Path | None = None

    def __str__(self) -> str:
        by_kind = {kind: [n for n, k in self.kinds.items() if k == kind] for kind in sorted(set(self.kinds.values()))}
        text = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in by_kind.items())
        return f"{text} ({self.library})" if self.library else text


_registered: dict[str, tuple[Any, str]] = {}  # keeps creators alive, because TensorRT's registry only points to them


def register_plugins(library: str | os.PathLike[str] | None = None) -> Registered:
    """Registers every svexport node with TensorRT: from the C++ plugin library if it has the node, else in Python.

    In Python, an op whose forward is one kernel becomes a plugin that is compiled into the engine, if nvcc is installed
    and TensorRT is 10.8 or later. torch computes the others, which need torch and this package where the engine runs.
    torch also computes a node with an attribute ``aot`` of 0. Nodes that already have a creator keep it; calling twice
    is fine.

    Args:
        library: the plugin library; by default the one that ``svexport plugins build`` left in the cache.

    Raises:
        BackendNotAvailableError: without TensorRT 10 or later (8.6 or later with a library).
        PluginBuildError: if the given library cannot be loaded.
    """
    trt = load_tensorrt()
    registry = trt.get_plugin_registry()
    if registry is None:
        raise BackendNotAvailableError("TensorRT has no plugin registry here; is libnvinfer complete?")
    major = int(trt.__version__.split(".")[0])
    path = Path(library) if library else next((lib.path for lib in libraries() if lib.major == major), None)
    if path is not None and (not path.is_file() or registry.load_library(str(path)) is None):
        raise PluginBuildError(f"{path} is no plugin library that TensorRT {trt.__version__} loads; build it again")
    if not hasattr(registry, "get_creator"):
        return _registered_in_library(load_tensorrt_for_plugins() if path is None else trt, registry, path)
    ahead = hasattr(trt, "IPluginV3QuickAOTBuild") and aot.available()
    kinds = {}
    for op in plugin_ops():
        if registry.get_creator(op.node_type, VERSION, DOMAIN) is not None:
            kinds[op.node_type] = _registered[op.node_type][1] if op.node_type in _registered else "C++"
            continue
        kinds[op.node_type] = "AOT" if ahead and op.name in aot.AOT_OPS else "JIT"
        creator = (aot_plugin if kinds[op.node_type] == "AOT" else jit_plugin).plugin_classes(op)[1]()
        if not registry.register_creator(creator, DOMAIN):
            raise PluginBuildError(f"TensorRT {trt.__version__} refused the plugin {op.node_type}")
        _registered[op.node_type] = creator, kinds[op.node_type]
    registered = Registered(kinds, path)
    logger.info("plugins: {}", registered)
    return registered


def _registered_in_library(trt: ModuleType, registry: Any, path: Path | None) -> Registered:
    """Before 10 only the library provides plugins: that TensorRT has none in Python."""
    lacking = [
        op.node_type for op in plugin_ops() if registry.get_plugin_creator(op.node_type, VERSION, DOMAIN) is None
    ]
    if lacking:
        raise PluginBuildError(f"{path} has no {', '.join(lacking)} for TensorRT {trt.__version__}; build it again")
    registered = Registered({op.node_type: "C++" for op in plugin_ops()}, path)
    logger.info("plugins: {}", registered)
    return registered


def create_plugin(op: Op, name: str, attributes: Mapping[str, Any]) -> Any:
    """Makes the op's plugin for a network under construction, with the registered creator.

    Raises:
        ValueError: if the creator refuses the attributes.
    """
    trt = load_tensorrt_for_plugins()
    creator = trt.get_plugin_registry().get_creator(op.node_type, VERSION, DOMAIN)
    fields, phase = fields_of(trt, op, attributes), trt.TensorRTPhase.BUILD
    if hasattr(trt, "IPluginCreatorV3Quick") and isinstance(creator, trt.IPluginCreatorV3Quick):
        plugin = creator.create_plugin(name, DOMAIN, fields, phase, trt.QuickPluginCreationRequest.PREFER_AOT)
    else:
        plugin = creator.create_plugin(name, fields, phase)
    if plugin is None:
        raise ValueError(f"the plugin {op.node_type} refuses the attributes of {name}; TensorRT's log says why")
    return plugin
