"""Plugins in Python: the ops as TensorRT layers with nothing but pip's tensorrt.

Everything about them follows from the definitions of the ops: fields from the schema, shapes and types from the fake.
They run in two ways. Just in time (``IPluginV3``, TensorRT 10 or later): computed by torch on TensorRT's stream. Ahead
of time (``IPluginV3QuickAOTBuild``): as a kernel that goes into the engine, see :mod:`svexport.tensorrt.aot`. That is
the interface below ``tensorrt.plugin.aot_impl``, whose functions know no optional inputs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from svexport.errors import BackendNotAvailableError, PluginBuildError
from svexport.logging import logger
from svexport.ops._op import DOMAIN, Op, as_tuple
from svexport.tensorrt import aot
from svexport.tensorrt.bindings import dtypes as dtypes_of
from svexport.tensorrt.bindings import load_tensorrt
from svexport.tensorrt.library import libraries
from svexport.tensorrt.nodes import plugin_ops

__all__ = ["Registered", "create_plugin", "plugin_classes", "register_plugins"]

VERSION = "1"

COORDINATES = {
    "bilinear_sample": ("grid",),
    "camera_sample": ("reference_points", "lidar2img", "offsets"),
    "deform_conv2d": ("offset",),
    "grid_sample": ("grid",),
    "ms_deform_attn": ("sampling_locations",),
    "transformer_decoder": ("reference_points", "lidar2img"),
}
"""Inputs that may be float32 beside half data, and should be: in half, coordinates are off by pixels."""

FACTORS = {
    "add_bias_residual_layer_norm": ("bias", "weight", "norm_bias"),
    "camera_sample": ("weights",),
    "ms_deform_attn": ("attention_weights",),
}
"""Inputs that may keep the type that they have in the network beside data of another."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

IMAGES = {
    "bilinear_sample": (4, ("image", "output")),
    "camera_sample": (5, ("features",)),
    "grid_sample": (4, ("input", "output")),
}
"""Inputs and first output that kernels compiled ahead of time read and write in channels-last too, if of this rank."""


class Size:
    """A dimension as an op's fake computes with it: an expression of TensorRT's, or a number."""

    def __init__(self, value: Any, builder: Any, operations: Any) -> None:
        self.value, self._builder, self._operations = value, builder, operations

    def _with(self, operation: str, left: Any, right: Any) -> Size:
        one, other = (
            x.value if isinstance(x, Size) else self._builder.constant(x)  #
            for x in (left, right)
        )
        return Size(
            self._builder.operation(getattr(self._operations, operation), one, other), self._builder, self._operations
        )

    def __add__(self, other: Any) -> Size:
        return self._with("SUM", self, other)

    def __radd__(self, other: Any) -> Size:
        return self._with("SUM", other, self)

    def __sub__(self, other: Any) -> Size:
        return self._with("SUB", self, other)

    def __rsub__(self, other: Any) -> Size:
        return self._with("SUB", other, self)

    def __mul__(self, other: Any) -> Size:
        return self._with("PROD", self, other)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Size:
        return self._with("FLOOR_DIV", self, other)

    def at_least(self, other: Any) -> Size:
        return self._with("MAX", self, other)


@dataclass(frozen=True)
class Description:
    """What stands in for a tensor in an op's fake: a shape of numbers or :class:`Size`, and a dtype."""

    shape: tuple[Any, ...]
    dtype: torch.dtype

    def dim(self) -> int:
        return len(self.shape)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def new_empty(self, *size: Any, dtype: torch.dtype | None = None) -> Description:
        shape = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
        return Description(tuple(shape), dtype or self.dtype)


def output_descriptions(op: Op, tensors: Sequence[Description], attributes: Mapping[str, Any]) -> list[Description]:
    """What the op makes of tensors of these shapes and dtypes, by its fake."""
    assert op.fake is not None, f"{op.name}: an op with a plugin has a fake, from which its shapes follow"
    outputs = op.fake(*op.bind(tensors, attributes))
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


@cache
def sample_shapes(op: Op) -> dict[str, tuple[int, ...]]:
    """A shape for each tensor argument, of the op's first sample (the first tensor of a list)."""
    sample = next(iter(op.samples(lambda *shape: torch.zeros(shape))))
    tensors = {
        argument.name: value[0] if argument.kind == "tensors" else value
        for argument, value in zip(op.arguments, sample, strict=True)
        if argument.is_tensor
    }
    return {name: () if tensor is None else tuple(tensor.shape) for name, tensor in tensors.items()}


def input_names(op: Op, count: int, attributes: Mapping[str, Any]) -> list[str]:
    """The argument that each of a node's inputs belongs to."""
    bound = op.bind(range(count), attributes)
    by_input = {
        index: argument.name
        for argument, value in zip(op.arguments, bound, strict=True)
        if argument.is_tensor and value is not None
        for index in (value if isinstance(value, list) else (value,))
    }
    return [by_input[i] for i in range(count)]


def output_dtypes(op: Op, given: Sequence[torch.dtype], attributes: Mapping[str, Any]) -> list[torch.dtype]:
    """Those of the outputs for inputs of these dtypes and, as TensorRT has not said them yet, the samples' ranks."""
    shapes = sample_shapes(op)
    names = input_names(op, len(given), attributes)
    inputs = [Description(shapes[n], d) for n, d in zip(names, given, strict=True)]
    return [o.dtype for o in output_descriptions(op, inputs, attributes)]


def dtype_combinations(
    op: Op, declared: Sequence[torch.dtype], attributes: Mapping[str, Any]
) -> Iterator[list[torch.dtype]]:
    """The dtypes of inputs and outputs that a plugin takes, for inputs that have these in the network.

    The data in any floating-point type, and what belongs to it in the same; :data:`FACTORS` also as they are;
    everything else as it is, but :data:`COORDINATES` in float32 too.
    """
    coordinates, factors = COORDINATES.get(op.name, ()), FACTORS.get(op.name, ())
    names = input_names(op, len(declared), attributes)
    for data in FLOATS:
        choices = [
            (dtype,)
            if not dtype.is_floating_point
            else tuple(dict.fromkeys((torch.float32, dtype)))
            if name in coordinates
            else tuple(dict.fromkeys((data, dtype)))
            if name in factors
            else (data,)
            for name, dtype in zip(names, declared, strict=True)
        ]
        for inputs in product(*choices):
            yield [*inputs, *output_dtypes(op, inputs, attributes)]


def shape_expressions(
    trt: ModuleType, op: Op, inputs: Sequence[Any], attributes: Mapping[str, Any], builder: Any
) -> tuple[list[Description], list[Description]]:
    """Descriptions of inputs whose dimensions TensorRT gives as expressions, and of the outputs.

    Sizes that it knows are numbers.
    """

    def size(expression: Any) -> Any:
        if expression.is_constant():
            return expression.get_constant_value()
        return Size(expression, builder, trt.DimensionOperation)

    given = [Description(tuple(size(dims[i]) for i in range(len(dims))), torch.float32) for dims in inputs]
    return given, output_descriptions(op, given, attributes)


def expression(size: Any, builder: Any) -> Any:
    """A number or :class:`Size` as TensorRT has it."""
    return size.value if isinstance(size, Size) else builder.constant(size)


@dataclass(frozen=True)
class Registered:
    """What :func:`register_plugins` did.

    Attributes:
        kinds: how each node type runs: ``"C++"`` by the plugin library, ``"AOT"`` by a kernel that is compiled into the
            engine, ``"JIT"`` by torch, in Python.
        library: the plugin library that was loaded.
    """

    kinds: Mapping[str, str]
    library: Path | None = None

    def __str__(self) -> str:
        by_kind = {kind: [n for n, k in self.kinds.items() if k == kind] for kind in sorted(set(self.kinds.values()))}
        text = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in by_kind.items())
        return f"{text} ({self.library})" if self.library else text


_registered: dict[str, tuple[Any, str]] = {}  # a creator lives as long as the registry that points to it


def register_plugins(library: str | os.PathLike[str] | None = None) -> Registered:
    """Makes TensorRT know every svexport node: by the C++ plugin library if there is one for it, else in Python.

    In Python, an op whose forward is one kernel becomes a plugin that is compiled into the engine, if nvcc is there and
    TensorRT is 10.8 or later; the others are computed by torch, and need it and this package where the engine runs.
    A node with an attribute ``aot`` of 0 is computed by torch all the same. Nodes that already have a creator keep it;
    calling twice is fine.

    Args:
        library: the plugin library; by default the one that ``svexport plugins build`` left in the cache.

    Raises:
        BackendNotAvailableError: without TensorRT 10 or later, with a library 8.6 or later.
        PluginBuildError: if a library that was given cannot be loaded.
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
        return _registered_in_library(_tensorrt() if path is None else trt, registry, path)
    ahead = hasattr(trt, "IPluginV3QuickAOTBuild") and aot.available()
    kinds = {}
    for op in plugin_ops():
        if registry.get_creator(op.node_type, VERSION, DOMAIN) is not None:
            kinds[op.node_type] = _registered[op.node_type][1] if op.node_type in _registered else "C++"
            continue
        kinds[op.node_type] = "AOT" if ahead and op.name in aot.AOT_OPS else "JIT"
        creator = (aot_plugin_classes if kinds[op.node_type] == "AOT" else plugin_classes)(op)[1]()
        if not registry.register_creator(creator, DOMAIN):
            raise PluginBuildError(f"TensorRT {trt.__version__} refused the plugin {op.node_type}")
        _registered[op.node_type] = creator, kinds[op.node_type]
    registered = Registered(kinds, path)
    logger.info("plugins: {}", registered)
    return registered


def _registered_in_library(trt: ModuleType, registry: Any, path: Path | None) -> Registered:
    """Before 10 there is the library, and nothing in Python."""
    lacking = [
        op.node_type for op in plugin_ops() if registry.get_plugin_creator(op.node_type, VERSION, DOMAIN) is None
    ]
    if lacking:
        raise PluginBuildError(f"{path} has no {', '.join(lacking)} for TensorRT {trt.__version__}; build it again")
    registered = Registered({op.node_type: "C++" for op in plugin_ops()}, path)
    logger.info("plugins: {}", registered)
    return registered


def create_plugin(op: Op, name: str, attributes: Mapping[str, Any]) -> Any:
    """The op's plugin for a network under construction, by the creator that is registered for it.

    Raises:
        ValueError: if the creator refuses the attributes.
    """
    trt = _tensorrt()
    creator = trt.get_plugin_registry().get_creator(op.node_type, VERSION, DOMAIN)
    fields, phase = fields_of(trt, op, attributes), trt.TensorRTPhase.BUILD
    if hasattr(trt, "IPluginCreatorV3Quick") and isinstance(creator, trt.IPluginCreatorV3Quick):
        plugin = creator.create_plugin(name, DOMAIN, fields, phase, trt.QuickPluginCreationRequest.PREFER_AOT)
    else:
        plugin = creator.create_plugin(name, fields, phase)
    if plugin is None:
        raise ValueError(f"the plugin {op.node_type} refuses the attributes of {name}; TensorRT's log says why")
    return plugin


def _tensorrt() -> ModuleType:
    trt = load_tensorrt()
    if not hasattr(trt, "IPluginV3OneBuild"):
        raise BackendNotAvailableError(
            f"plugins in Python need TensorRT 10 or later, this is {trt.__version__}; build those in C++ for it: "
            "svexport plugins build"
        )
    return trt


def attributes_of(op: Op, fields: Sequence[Any]) -> dict[str, Any]:
    """The attributes in a collection of plugin fields, as the op takes them.

    Raises:
        ValueError: if one is missing, twice there, unknown, or not of its type or length.
        BackendNotAvailableError: if there are lists among them, and the bindings do not hand them over.
    """
    known = {a.name: a for a in op.attributes}
    if any(a.kind in ("ints", "floats") for a in op.attributes) and not _reads_lists():
        raise BackendNotAvailableError(
            f"{op.node_type} has lists as attributes, of which the Python bindings of TensorRT "
            f"{_tensorrt().__version__} show a plugin the first element only; use the C++ library (svexport plugins "
            "build), or bindings of another version: 10.16 and 11.4 show them all, 10.1, 10.14 and 10.15 do not"
        )
    found: dict[str, Any] = {}
    for field in fields:
        argument = known.get(field.name)
        if argument is None or field.name in found:
            raise ValueError(
                f"{op.node_type} expects each of {', '.join(known)} once, "
                f"got {'a second ' if argument else ''}{field.name}"
            )
        values = np.ravel(field.data)
        whole = argument.kind in ("int", "ints")
        if values.dtype.kind != ("i" if whole else "f") or (argument.kind in ("int", "float") and values.size != 1):
            raise ValueError(
                f"{op.node_type} expects {field.name} of {argument.kind}, got {values.size} of {values.dtype}"
            )
        items = [int(v) if whole else float(v) for v in values]
        found[field.name] = items[0] if argument.kind in ("int", "float") else items
    if missing := [name for name in known if name not in found]:
        raise ValueError(f"{op.node_type} expects each of {', '.join(known)} once, {', '.join(missing)} is missing")
    return found


@cache
def _reads_lists() -> bool:
    """Whether a field's data are all of its elements, as they are in most versions of the bindings."""
    trt, given = _tensorrt(), _lasting(np.array([1, 2], np.int32))
    return list(np.ravel(trt.PluginField("", given, trt.PluginFieldType.INT32).data)) == [1, 2]


def fields_of(trt: ModuleType, op: Op, attributes: Mapping[str, Any] | None = None) -> Any:
    """The attributes as plugin fields, in schema order; without values, what a creator announces."""
    fields = []
    for argument in op.attributes:
        whole = argument.kind in ("int", "ints")
        value = np.array([] if attributes is None else attributes[argument.name], np.int32 if whole else np.float32)
        kind = trt.PluginFieldType.INT32 if whole else trt.PluginFieldType.FLOAT32
        fields.append(trt.PluginField(argument.name, _lasting(value.reshape(-1)), kind))
    return trt.PluginFieldCollection(fields)


_arrays: dict[bytes, np.ndarray] = {}


def _lasting(array: np.ndarray) -> np.ndarray:
    """An equal array that is never freed: a field does not keep the memory that it points to."""
    return _arrays.setdefault(array.dtype.char.encode() + array.tobytes(), array)


def _output_shapes(
    trt: ModuleType, op: Op, inputs: Sequence[Any], attributes: Mapping[str, Any], builder: Any
) -> list[Any]:
    shapes = []
    for output in shape_expressions(trt, op, inputs, attributes, builder)[1]:
        dims = trt.DimsExprs(len(output.shape))
        for i, size in enumerate(output.shape):
            dims[i] = expression(size, builder)
        shapes.append(dims)
    return shapes


def plugin_classes(op: Op) -> tuple[type, type]:
    """The plugin of an op that torch computes, and its creator, as classes of the TensorRT that is installed.

    Raises:
        BackendNotAvailableError: without TensorRT 10 or later.
    """
    trt = _tensorrt()
    dtypes = dtypes_of(trt)
    types = {dtype: type_ for type_, dtype in dtypes.items()}

    class Plugin(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):  # type: ignore[name-defined, misc]
        def __init__(self, attributes: Mapping[str, Any]) -> None:
            for base in Plugin.__bases__:
                base.__init__(self)  # type: ignore[misc]
            self.plugin_name, self.plugin_version, self.plugin_namespace = op.node_type, VERSION, DOMAIN
            self.num_outputs = op.num_outputs
            self.attributes = dict(attributes)
            self.declared: list[torch.dtype] = []

        def get_capability_interface(self, type: Any) -> Any:
            return self

        def clone(self) -> Any:
            cloned = Plugin(self.attributes)
            cloned.declared = self.declared
            return cloned

        def get_fields_to_serialize(self) -> Any:
            return fields_of(trt, op, self.attributes)

        def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
            self.declared = [dtypes[t] for t in input_types]
            return [types[d] for d in output_dtypes(op, self.declared, self.attributes)]

        def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], expr_builder: Any) -> list[Any]:
            return _output_shapes(trt, op, inputs, self.attributes, expr_builder)

        def supports_format_combination(self, pos: int, in_out: Sequence[Any], num_inputs: int) -> bool:
            here = [desc.desc for desc in in_out[: pos + 1]]
            if here[pos].format != trt.TensorFormat.LINEAR or any(d.type not in dtypes for d in here):
                return False
            chosen = [dtypes[d.type] for d in here]
            declared = self.declared or [dtypes[d.desc.type] for d in in_out[:num_inputs]]
            return any(chosen == c[: pos + 1] for c in dtype_combinations(op, declared, self.attributes))

        def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None: ...

        def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None: ...

        def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
            return 0  # torch has its own memory

        def get_valid_tactics(self) -> list[int]:
            return []

        def set_tactic(self, tactic: int) -> None: ...

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
                given = [_tensor(p, tuple(d.dims), dtypes[d.type]) for p, d in zip(inputs, input_desc, strict=True)]
                results = as_tuple(op(*op.bind(given, self.attributes)))
                for result, pointer, desc in zip(results, outputs, output_desc, strict=True):
                    _tensor(pointer, tuple(desc.dims), dtypes[desc.type]).copy_(result)

    class Creator(trt.IPluginCreatorV3One):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = op.node_type, VERSION, DOMAIN
            self.field_names = fields_of(trt, op)

        def create_plugin(self, name: str, field_collection: Sequence[Any], phase: Any) -> Any:
            return Plugin(attributes_of(op, field_collection))

    Plugin.__name__ = Plugin.__qualname__ = op.node_type
    Creator.__name__ = Creator.__qualname__ = f"{op.node_type}Creator"
    return Plugin, Creator


def aot_plugin_classes(op: Op) -> tuple[type, type]:
    """The plugin of an op of :data:`svexport.tensorrt.aot.AOT_OPS` that is compiled ahead of time, and its creator.

    The creator makes the plugin that torch computes where TensorRT asks for it, with ``aot=0`` on the node.

    Raises:
        BackendNotAvailableError: without a TensorRT that has such plugins (10.8 or later).
    """
    trt = _tensorrt()
    if not hasattr(trt, "IPluginV3QuickAOTBuild"):
        raise BackendNotAvailableError(
            f"plugins compiled ahead of time need TensorRT 10.8 or later, this is {trt.__version__}"
        )
    dtypes = dtypes_of(trt)
    types = {dtype: type_ for type_, dtype in dtypes.items()}

    class Expression(trt.ISymExpr):  # type: ignore[name-defined, misc]
        def __init__(self, value: Any) -> None:
            trt.ISymExpr.__init__(self)
            self.type, self.dtype, self.expr = trt.PluginArgType.INT, trt.PluginArgDataType.INT32, value

    class Quick(trt.IPluginV3, trt.IPluginV3QuickCore, trt.IPluginV3QuickBuild):  # type: ignore[name-defined, misc]
        pass

    class Plugin(Quick, trt.IPluginV3QuickAOTBuild):  # type: ignore[name-defined, misc]
        def __init__(self, attributes: Mapping[str, Any]) -> None:
            for base in (*Quick.__bases__, trt.IPluginV3QuickAOTBuild):
                base.__init__(self)
            self.plugin_name, self.plugin_version, self.plugin_namespace = op.node_type, VERSION, DOMAIN
            self.num_outputs = op.num_outputs
            self.attributes = dict(attributes)
            self.declared: list[torch.dtype] = []
            self.kernels: dict[Any, aot.Kernel] = {}
            self.alive: list[Any] = []  # what TensorRT has been given pointers to

        def get_capability_interface(self, type: Any) -> Any:
            return self

        def clone(self) -> Any:
            cloned = Plugin(self.attributes)
            cloned.__dict__.update(self.__dict__)
            return cloned

        def get_fields_to_serialize(self) -> Any:
            return fields_of(trt, op, self.attributes)

        def get_num_outputs(self) -> int:
            return op.num_outputs

        def get_output_data_types(self, input_types: Sequence[Any], ranks: Sequence[int]) -> list[Any]:
            self.declared = [dtypes[t] for t in input_types]
            return [types[d] for d in output_dtypes(op, self.declared, self.attributes)]

        def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], expr_builder: Any) -> list[Any]:
            return _output_shapes(trt, op, inputs, self.attributes, expr_builder)

        def get_supported_format_combinations(self, in_out: Sequence[Any], num_inputs: int) -> list[Any]:
            rank, among = IMAGES.get(op.name, (0, ()))
            names = [*input_names(op, num_inputs, self.attributes), "output"]
            images = [i for i, name in enumerate(names) if name in among]
            dims = tuple(in_out[images[0]].desc.dims) if images else ()
            channels = dims[-3] if len(dims) == rank and rank > 0 else -1
            found = []
            for combination in dtype_combinations(op, self.declared, self.attributes):
                layouts = [[trt.TensorFormat.LINEAR] * len(combination)]
                if combination[0] in FLOATS and channels > 0 and channels * combination[0].itemsize % 16 == 0:
                    last = trt.TensorFormat.HWC if combination[0] == torch.float32 else trt.TensorFormat.HWC8
                    layouts.append([last if i in images else trt.TensorFormat.LINEAR for i in range(len(combination))])
                for layout in layouts:
                    for dtype, layout_of_tensor in zip(combination, layout, strict=True):
                        desc = trt.PluginTensorDesc()
                        desc.type, desc.format = types[dtype], layout_of_tensor
                        found.append(desc)
            return found

        def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None: ...

        def get_aliased_input(self, output_index: int) -> int:
            return -1

        def get_valid_tactics(self) -> list[int]:
            return []

        def set_tactic(self, tactic: int) -> None: ...

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
            given, made = shape_expressions(trt, op, inputs, self.attributes, expr_builder)
            descs = [desc.desc for desc in in_out]
            operands = [
                aot.Operand(described.shape, dtypes[desc.type], desc.format != trt.TensorFormat.LINEAR)
                for described, desc in zip([*given, *made], descs, strict=True)
            ]
            kernel = aot.kernel(op, operands[:num_inputs], operands[num_inputs:], self.attributes)
            self.kernels[self._key(descs)] = kernel

            def as_argument(size: Any) -> Any:
                self.alive.append(Expression(expression(size, expr_builder)))
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

    class Creator(trt.IPluginCreatorV3Quick):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            trt.IPluginCreatorV3Quick.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = op.node_type, VERSION, DOMAIN
            self.field_names = fields_of(trt, op)

        def create_plugin(
            self, name: str, namespace: str, field_collection: Sequence[Any], phase: Any, request: Any = None
        ) -> Any:
            asked = trt.QuickPluginCreationRequest
            jit = phase == trt.TensorRTPhase.RUNTIME or request in (asked.STRICT_JIT, asked.PREFER_JIT)
            attributes = attributes_of(op, field_collection)
            if request != asked.STRICT_AOT and (reason := aot.obstacle(op, attributes)):
                logger.info("plugins: {} is computed by torch: {}", name, reason)
                jit = True
            return (plugin_classes(op)[0] if jit else Plugin)(attributes)

    Plugin.__name__ = Plugin.__qualname__ = f"{op.node_type}Aot"
    Creator.__name__ = Creator.__qualname__ = f"{op.node_type}AotCreator"
    return Plugin, Creator


class _Memory:
    """Device memory that somebody else owns, as torch takes it over."""

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
    torch.bfloat16: "<i2",  # numpy has none: viewed afterwards
    torch.int8: "|i1",
    torch.int32: "<i4",
    torch.int64: "<i8",
    torch.bool: "|b1",
}


def _tensor(pointer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device="cuda")
    return torch.as_tensor(_Memory(pointer, shape, _TYPESTR[dtype]), device="cuda").view(dtype)
