"""Plugins in Python: the ops as TensorRT layers with nothing but pip's tensorrt, computed by torch on its stream.

Everything about them follows from the definitions of the ops: fields from the schema, shapes and types from the fake.
TensorRT 10 or later (``IPluginV3``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from svexport.errors import BackendNotAvailableError, PluginBuildError
from svexport.logging import logger
from svexport.ops._op import DOMAIN, Op, as_tuple
from svexport.tensorrt.library import libraries
from svexport.tensorrt.nodes import plugin_ops

__all__ = ["plugin_classes", "register_plugins"]

VERSION = "1"

COORDINATES = {
    "bilinear_sample": ("grid",),
    "camera_sample": ("reference_points", "lidar2img", "offsets"),
    "grid_sample": ("grid",),
    "ms_deform_attn": ("sampling_locations",),
    "transformer_decoder": ("reference_points", "lidar2img"),
}
"""Inputs that may be float32 beside half data, and should be: in half, coordinates are off by pixels."""


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


@dataclass(frozen=True)
class Description:
    """What stands in for a tensor in an op's fake: a shape of numbers or :class:`Size`, and a dtype."""

    shape: tuple[Any, ...]
    dtype: torch.dtype

    def dim(self) -> int:
        return len(self.shape)

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


_registered: list[Any] = []  # creators live as long as the registry that points to them


def register_plugins(library: str | os.PathLike[str] | None = None) -> Registered:
    """Makes TensorRT know every svexport node: by the C++ plugin library if there is one for it, else in Python.

    Nodes that already have a creator keep it; calling twice is fine. Python plugins need torch and this package where
    the engine runs; the C++ library does not.

    Args:
        library: the plugin library; by default the one that ``svexport plugins build`` left in the cache.

    Raises:
        BackendNotAvailableError: without TensorRT 10 or later.
        PluginBuildError: if a library that was given cannot be loaded.
    """
    trt = _tensorrt()
    registry = trt.get_plugin_registry()
    if registry is None:
        raise BackendNotAvailableError("TensorRT has no plugin registry here; is libnvinfer complete?")
    major = int(trt.__version__.split(".")[0])
    path = Path(library) if library else next((lib.path for lib in libraries() if lib.major == major), None)
    if path is not None:
        if not path.is_file() or registry.load_library(str(path)) is None:
            raise PluginBuildError(f"{path} is no plugin library that TensorRT {trt.__version__} loads; build it again")
        logger.info("plugins: {}", path)
    kinds = {}
    for op in plugin_ops():
        if registry.get_creator(op.node_type, VERSION, DOMAIN) is not None:
            kinds[op.node_type] = "JIT" if any(c.name == op.node_type for c in _registered) else "C++"
            continue
        creator = plugin_classes(op)[1]()
        if not registry.register_creator(creator, DOMAIN):
            raise PluginBuildError(f"TensorRT {trt.__version__} refused the plugin {op.node_type}")
        _registered.append(creator)
        kinds[op.node_type] = "JIT"
    return Registered(kinds, path)


def create_plugin(op: Op, name: str, attributes: Mapping[str, Any]) -> Any:
    """The op's plugin for a network under construction, by the creator that is registered for it.

    Raises:
        ValueError: if the creator refuses the attributes.
    """
    trt = _tensorrt()
    creator = trt.get_plugin_registry().get_creator(op.node_type, VERSION, DOMAIN)
    plugin = creator.create_plugin(name, fields_of(trt, op, attributes), trt.TensorRTPhase.BUILD)
    if plugin is None:
        raise ValueError(f"the plugin {op.node_type} refuses the attributes of {name}; TensorRT's log says why")
    return plugin


def _tensorrt() -> ModuleType:
    try:
        import tensorrt
    except ImportError as error:
        raise BackendNotAvailableError(
            f"plugins need TensorRT's Python bindings, which do not import here ({error}); pip install tensorrt"
        ) from error
    if not hasattr(tensorrt, "IPluginV3OneBuild"):
        raise BackendNotAvailableError(
            f"plugins in Python need TensorRT 10 or later, this is {tensorrt.__version__}; build those in C++ for it: "
            "svexport plugins build"
        )
    return tensorrt


def _dtypes(trt: ModuleType) -> dict[Any, torch.dtype]:
    return {
        trt.DataType.FLOAT: torch.float32,
        trt.DataType.HALF: torch.float16,
        trt.DataType.BF16: torch.bfloat16,
        trt.DataType.INT8: torch.int8,
        trt.DataType.INT32: torch.int32,
        trt.DataType.INT64: torch.int64,
        trt.DataType.BOOL: torch.bool,
    }


def attributes_of(op: Op, fields: Sequence[Any]) -> dict[str, Any]:
    """The attributes in a collection of plugin fields, as the op takes them.

    Raises:
        ValueError: if one is missing, twice there, unknown, or not of its type or length.
    """
    known = {a.name: a for a in op.attributes}
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


def plugin_classes(op: Op) -> tuple[type, type]:
    """The plugin of an op and its creator, as classes of the TensorRT that is installed.

    Raises:
        BackendNotAvailableError: without TensorRT 10 or later.
    """
    trt = _tensorrt()
    dtypes = _dtypes(trt)
    types = {dtype: type_ for type_, dtype in dtypes.items()}
    coordinates = COORDINATES.get(op.name, ())

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
            return [types[o.dtype] for o in self._outputs(self.declared)]

        def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], expr_builder: Any) -> list[Any]:
            operations = trt.DimensionOperation
            given = [
                Description(tuple(Size(dims[i], expr_builder, operations) for i in range(len(dims))), torch.float32)
                for dims in inputs
            ]
            shapes = []
            for output in output_descriptions(op, given, self.attributes):
                dims = trt.DimsExprs(len(output.shape))
                for i, size in enumerate(output.shape):
                    dims[i] = size.value if isinstance(size, Size) else expr_builder.constant(size)
                shapes.append(dims)
            return shapes

        def supports_format_combination(self, pos: int, in_out: Sequence[Any], num_inputs: int) -> bool:
            """Row-major order; the data in any floating-point type, everything else as :data:`COORDINATES` says."""
            here = [desc.desc for desc in in_out]
            if here[pos].format != trt.TensorFormat.LINEAR or here[pos].type not in dtypes:
                return False
            dtype = dtypes[here[pos].type]
            if pos >= num_inputs:
                if any(d.type not in dtypes for d in here[:num_inputs]):
                    return False
                return dtype == self._outputs([dtypes[d.type] for d in here[:num_inputs]])[pos - num_inputs].dtype
            declared = self.declared[pos] if pos < len(self.declared) else dtype
            if not declared.is_floating_point:
                return dtype == declared
            data = next(i for i, d in enumerate(self.declared or [dtype]) if d.is_floating_point)
            if pos == data:
                return dtype in (torch.float32, torch.float16, torch.bfloat16)
            if self._names(num_inputs)[pos] in coordinates:
                return dtype in (torch.float32, declared)
            return dtype == dtypes.get(here[data].type)

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

        def _names(self, count: int) -> list[str]:
            """The argument that each input belongs to."""
            bound = op.bind(range(count), self.attributes)
            by_input = {
                index: argument.name
                for argument, value in zip(op.arguments, bound, strict=True)
                if argument.is_tensor and value is not None
                for index in (value if isinstance(value, list) else (value,))
            }
            return [by_input[i] for i in range(count)]

        def _outputs(self, given: Sequence[torch.dtype]) -> list[Description]:
            """Outputs for inputs of these dtypes and, as TensorRT has not said them yet, the ranks of the samples."""
            shapes = sample_shapes(op)
            names = self._names(len(given))
            return output_descriptions(
                op, [Description(shapes[n], d) for n, d in zip(names, given, strict=True)], self.attributes
            )

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
