"""Plugins whose kernel is embedded in the engine: ``IPluginV3QuickAOTBuild``, of TensorRT 10.8 or later.

``tensorrt.plugin.aot_impl`` is built on this interface, but supports no optional inputs. The kernels are those of
:mod:`svexport.tensorrt.aot`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from svexport.errors import BackendNotAvailableError
from svexport.logging import logger
from svexport.ops._op import Op
from svexport.tensorrt import aot, jit_plugin
from svexport.tensorrt.bindings import load_tensorrt_for_plugins
from svexport.tensorrt.fields import attributes_of
from svexport.tensorrt.python_plugin import PythonCreator, PythonPlugin, derived
from svexport.tensorrt.signature import FLOATS, IMAGES, dtype_combinations, expression, input_names, shape_expressions

__all__ = ["plugin_classes"]


def plugin_classes(op: Op) -> tuple[type, type]:
    """The ahead-of-time plugin class of an op of :data:`svexport.tensorrt.aot.AOT_OPS`, and its creator class.

    For a node with ``aot=0`` the creator makes the plugin that torch computes.

    Raises:
        BackendNotAvailableError: without a TensorRT that supports such plugins (10.8 or later).
    """
    trt = load_tensorrt_for_plugins()
    if not hasattr(trt, "IPluginV3QuickAOTBuild"):
        raise BackendNotAvailableError(
            f"plugins compiled ahead of time need TensorRT 10.8 or later, this is {trt.__version__}"
        )

    class Quick(trt.IPluginV3, trt.IPluginV3QuickCore, trt.IPluginV3QuickBuild):  # type: ignore[name-defined, misc]
        """Fixes the order of the base classes that the last interface shares, so that Python finds an MRO."""

    ahead = trt.IPluginV3QuickAOTBuild
    plugin = derived(
        _AotPlugin, f"{op.node_type}Aot", trt, op, (*Quick.__bases__, ahead), (Quick, ahead), integer=_integer(trt)
    )
    creators = (trt.IPluginCreatorV3Quick,)
    return plugin, derived(_AotCreator, f"{op.node_type}AotCreator", trt, op, creators, plugin=plugin)


def _integer(trt: ModuleType) -> type:
    """The class for 32-bit integer arguments of a kernel."""

    class Integer(trt.ISymExpr):  # type: ignore[name-defined, misc]
        def __init__(self, value: Any) -> None:
            trt.ISymExpr.__init__(self)
            self.type, self.dtype, self.expr = trt.PluginArgType.INT, trt.PluginArgDataType.INT32, value

    return Integer


class _AotPlugin(PythonPlugin):
    integer: type

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        super().__init__(attributes)
        self.kernels: dict[Any, aot.Kernel] = {}
        self.alive: list[Any] = []  # objects that TensorRT holds pointers to

    def get_num_outputs(self) -> int:
        return self.op.num_outputs

    def get_supported_format_combinations(self, in_out: Sequence[Any], num_inputs: int) -> list[Any]:
        rank, among = IMAGES.get(self.op.name, (0, ()))
        names = [*input_names(self.op, num_inputs, self.attributes), "output"]
        images = [i for i, name in enumerate(names) if name in among]
        dims = tuple(in_out[images[0]].desc.dims) if images else ()
        channels = dims[-3] if len(dims) == rank and rank > 0 else -1
        found = []
        for combination in dtype_combinations(self.op, self.declared, self.attributes):
            layouts = [[self.trt.TensorFormat.LINEAR] * len(combination)]
            if combination[0] in FLOATS and channels > 0 and channels * combination[0].itemsize % 16 == 0:
                last = self.trt.TensorFormat.HWC if combination[0] == torch.float32 else self.trt.TensorFormat.HWC8
                layouts.append([last if i in images else self.trt.TensorFormat.LINEAR for i in range(len(combination))])
            for layout in layouts:
                for dtype, layout_of_tensor in zip(combination, layout, strict=True):
                    desc = self.trt.PluginTensorDesc()
                    desc.type, desc.format = self.types[dtype], layout_of_tensor
                    found.append(desc)
        return found

    def get_aliased_input(self, output_index: int) -> int:
        return -1

    def get_timing_cache_id(self) -> str:
        return ""

    def get_launch_params(
        self,
        inputs: Sequence[Any],
        in_out: Sequence[Any],
        num_inputs: int,
        launch_params: Any,
        extra_args: Any,
        expr_builder: Any,
    ) -> None:
        given, made = shape_expressions(self.trt, self.op, inputs, self.attributes, expr_builder)
        descs = [desc.desc for desc in in_out]
        operands = [
            aot.Operand(described.shape, self.dtypes[desc.type], desc.format != self.trt.TensorFormat.LINEAR)
            for described, desc in zip([*given, *made], descs, strict=True)
        ]
        kernel = aot.kernel(self.op, operands[:num_inputs], operands[num_inputs:], self.attributes)
        self.kernels[self._key(descs)] = kernel

        def as_argument(size: Any) -> Any:
            self.alive.append(self.integer(expression(size, expr_builder)))
            return self.alive[-1]

        for axis, blocks, threads in zip("xyz", kernel.grid, (kernel.block, 1, 1), strict=True):
            setattr(launch_params, f"grid_{axis}", as_argument(blocks))
            setattr(launch_params, f"block_{axis}", as_argument(threads))
        launch_params.shared_mem = as_argument(kernel.shared)
        extra_args.nbSymExprs = len(kernel.sizes)
        for i, size in enumerate(kernel.sizes):
            extra_args[i] = as_argument(size)

    def get_kernel(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[str, bytes]:
        kernel = self.kernels[self._key([*inputs, *outputs])]
        self.alive.append(aot.ptx(kernel.source).encode())
        return kernel.name, self.alive[-1]

    @staticmethod
    def _key(descs: Sequence[Any]) -> Any:
        return tuple((desc.type, desc.format) for desc in descs)


class _AotCreator(PythonCreator):
    def create_plugin(
        self, name: str, namespace: str, field_collection: Sequence[Any], phase: Any, request: Any = None
    ) -> Any:
        asked = self.trt.QuickPluginCreationRequest
        jit = phase == self.trt.TensorRTPhase.RUNTIME or request in (asked.STRICT_JIT, asked.PREFER_JIT)
        attributes = attributes_of(self.op, field_collection)
        if request != asked.STRICT_AOT and (reason := aot.obstacle(self.op, attributes)):
            logger.info("plugins: {} is computed by torch: {}", name, reason)
            jit = True
        return (jit_plugin.plugin_classes(self.op)[0] if jit else self.plugin)(attributes)
