"""Runs the plugin library in a host of ours (host/host.cpp) that makes TensorRT's calls to a plugin one at a time."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import AttributeProto, TensorProto, helper
from torch import Tensor

from svexport.tensorrt.library import Headers

SOURCES = Path(__file__).parent / "host"

# nvinfer1::DataType, TensorFormat and PluginFieldType
TYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.int8: 2,
    torch.int32: 3,
    torch.bool: 4,
    torch.bfloat16: 7,
    torch.int64: 8,
}
DTYPES = {number: dtype for dtype, number in TYPES.items()}
LINEAR, CHW2, HWC8, CHW4, CHW32, HWC, HWC16 = 0, 1, 2, 3, 5, 8, 11
VECTORS = {CHW2: 2, CHW4: 4, CHW32: 32}
PADDINGS = {HWC8: 8, HWC: 1, HWC16: 16}
# Which formats TensorRT has on a GPU for a type, in tensors of three dimensions and more.
FORMATS = {
    torch.float32: (LINEAR, CHW32, HWC),
    torch.float16: (LINEAR, CHW2, HWC8, CHW32, HWC16),
    torch.bfloat16: (LINEAR, CHW2, HWC8),
    torch.int8: (LINEAR, CHW4, CHW32, HWC16),
    torch.int32: (LINEAR,),
    torch.int64: (LINEAR,),
    torch.bool: (LINEAR,),
}
FLOAT16, FLOAT32, INT32, BFLOAT16 = 0, 1, 5, 9
NUMPY = {FLOAT16: np.float16, FLOAT32: np.float32, BFLOAT16: np.uint16}  # any other: int32
TENSORS = {TensorProto.FLOAT: FLOAT32, TensorProto.FLOAT16: FLOAT16, TensorProto.BFLOAT16: BFLOAT16}
Fields = dict[str, tuple[int, Any]]
"""By name: the type, and numbers."""


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("rank", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("dims", ctypes.c_int64 * 8),
        ("max", ctypes.c_int64 * 8),
    )


@dataclass(frozen=True)
class Desc:
    """A tensor as TensorRT describes it to a plugin; ``known`` is False if its sizes come at run time only."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    format: int = LINEAR
    scale: float = 1.0
    known: bool = True

    def c(self) -> _Tensor:
        sizes = (*self.shape, *[0] * (8 - len(self.shape)))
        dims = sizes if self.known else tuple(-1 for _ in sizes)
        return _Tensor(
            len(self.shape),
            TYPES[self.dtype],
            self.format,
            self.scale,
            (ctypes.c_int64 * 8)(*dims),
            (ctypes.c_int64 * 8)(*sizes),
        )


def to_format(x: Tensor, format: int) -> Tensor:
    """The memory of ``x`` in a format, as a contiguous tensor."""
    if format == LINEAR:
        return x.contiguous()
    channels, (height, width) = x.shape[-3], x.shape[-2:]
    step = VECTORS.get(format) or PADDINGS[format]
    padded = x.new_full((*x.shape[:-3], -(-channels // step) * step, height, width), 0)
    padded[..., :channels, :, :] = x
    if format in VECTORS:
        return padded.unflatten(-3, (-1, step)).movedim(-3, -1).contiguous()
    return padded.movedim(-3, -1).contiguous()


def from_format(memory: Tensor, shape: Sequence[int], format: int) -> Tensor:
    """The inverse of :func:`to_format`."""
    if format == LINEAR:
        return memory.view(shape)
    if format in VECTORS:
        memory = memory.movedim(-1, -3).flatten(-4, -3)
    else:
        memory = memory.movedim(-1, -3)
    return memory[..., : shape[-3], :, :]


def fields_of(node: onnx.NodeProto, names: Iterable[str]) -> Fields:
    """The fields that TensorRT's parser makes of a node: attributes that the creator names, by ONNX type."""
    result: Fields = {}
    attributes = {a.name: a for a in node.attribute}
    for name in names:
        if name in attributes:
            a = attributes[name]
            value = helper.get_attribute_value(a)
            if a.type == AttributeProto.TENSOR:
                kind = TENSORS[value.data_type]
                result[name] = kind, np.frombuffer(value.raw_data, NUMPY[kind])
            else:
                whole = a.type in (AttributeProto.INT, AttributeProto.INTS)
                kind = INT32 if whole else FLOAT32
                result[name] = kind, np.ravel(np.asarray(value, NUMPY.get(kind, np.int32)))
    return result


def without_launchers(objects: Sequence[Path]) -> list[str]:
    """Flags for linking objects of the library and ``stand_in.cpp``, whose launcher takes the places of all others."""
    symbols = subprocess.run(["nm", *objects], capture_output=True, text=True, check=True).stdout
    missing = set(re.findall(r"^ +U (_ZN8svexport\w+)$", symbols, re.MULTILINE))
    missing -= set(re.findall(r"^\w+ \w (_ZN8svexport\w+)$", symbols, re.MULTILINE))
    return [f"-Wl,--defsym={name}=stand_in_launcher" for name in sorted(missing)]


def compile_host(headers: Headers, folder: Path, cuda: Path) -> Path:
    """Compiles the host against the headers of a TensorRT."""
    path = folder / "host.so"
    command = [
        *("g++", "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden"),
        *("-isystem", headers.folder, "-isystem", cuda / "include", SOURCES / "host.cpp", "-o", path, "-ldl"),
    ]
    subprocess.run(command, check=True)
    return path


class Host:
    """A plugin library, loaded. One per process: the host keeps one set of creators."""

    def __init__(self, host: Path, library: Path) -> None:
        self.c = ctypes.CDLL(str(host))
        for name in ("host_create", "host_clone", "host_attach", "host_reload"):
            getattr(self.c, name).restype = ctypes.c_void_p
        self.c.host_log.restype = self.c.host_type.restype = ctypes.c_char_p
        self.c.host_configure.restype = ctypes.c_int64
        count = self.c.host_load(str(library).encode())
        assert count >= 0, self.log()
        self.types = [self.c.host_type(i).decode() for i in range(count)]
        self.version = divmod(self.c.host_version(), 100)

    def log(self) -> str:
        """What was logged since the last call."""
        return self.c.host_log().decode()

    def fields(self, node_type: str) -> dict[str, int]:
        """Names and types of the fields that a creator asks for."""
        names, types = (ctypes.c_char_p * 1024)(), (ctypes.c_int32 * 1024)()
        count = self.c.host_fields(node_type.encode(), names, types, 1024)
        return {names[i].decode(): types[i] for i in range(count)}

    def create(self, node_type: str, fields: Fields) -> Plugin | None:
        """None if the creator refuses; the log says why."""
        n = len(fields)
        arrays = [np.array(values, NUMPY.get(kind, np.int32)) for kind, values in fields.values()]
        layer = self.c.host_create(
            node_type.encode(),
            n,
            (ctypes.c_char_p * n)(*(name.encode() for name in fields)),
            (ctypes.c_int32 * n)(*(kind for kind, _ in fields.values())),
            (ctypes.c_int32 * n)(*(a.size for a in arrays)),
            (ctypes.c_void_p * n)(*(a.ctypes.data if a.size else None for a in arrays)),
        )
        return Plugin(self, layer) if layer else None

    def create_from(self, node: onnx.NodeProto) -> Plugin | None:
        return self.create(node.op_type, fields_of(node, self.fields(node.op_type)))


@dataclass
class Plugin:
    """A plugin that the library made."""

    host: Host
    layer: int
    outputs: int = field(init=False)

    def __post_init__(self) -> None:
        self.outputs = self.host.c.host_outputs(ctypes.c_void_p(self.layer))

    def __del__(self) -> None:
        self.host.c.host_destroy(ctypes.c_void_p(self.layer))

    def _call(self, name: str, *args: object) -> int:
        return getattr(self.host.c, name)(ctypes.c_void_p(self.layer), *args)

    def clone(self) -> Plugin:
        return Plugin(self.host, self._call("host_clone"))

    def attach(self) -> Plugin:
        """What an execution context works with."""
        return Plugin(self.host, self._call("host_attach"))

    def reload(self) -> Plugin:
        """Through an engine file."""
        layer = self._call("host_reload")
        assert layer, self.host.log()
        return Plugin(self.host, layer)

    def serialized(self) -> bytes:
        buffer = ctypes.create_string_buffer(self._call("host_serialized", None, 0))
        self._call("host_serialized", buffer, len(buffer))
        return buffer.raw

    def output_types(self, types: Sequence[torch.dtype]) -> list[torch.dtype]:
        results = (ctypes.c_int32 * self.outputs)()
        status = self._call(
            "host_output_types", len(types), (ctypes.c_int32 * len(types))(*map(TYPES.get, types)), results
        )
        assert status == 0, self.host.log()
        return [DTYPES[t] for t in results]

    def shapes(self, inputs: Sequence[Desc]) -> list[tuple[tuple[int, ...], bool]] | None:
        """The shape of each output, and whether it is constant; None if the plugin refuses."""
        results = (_Tensor * self.outputs)()
        if self._call("host_shapes", len(inputs), _array(inputs), results):
            return None
        return [(tuple(r.max[: r.rank]), -1 not in r.dims[: r.rank]) for r in results]

    def formats(self, tensors: Sequence[Desc], types: Sequence[Sequence[torch.dtype]]) -> list[list[Desc]]:
        """Every supported combination for tensors, inputs then outputs, each of one of ``types``."""
        n, most = len(tensors), 512
        masks = (ctypes.c_int32 * n)(*(sum(1 << TYPES[t] for t in each) for each in types))
        found = (ctypes.c_int32 * (most * n * 2))()
        inputs = n - self.outputs
        count = self._call("host_formats", inputs, self.outputs, _array(tensors), masks, found, most)
        assert count <= 100, "TensorRT stops after 100"
        pairs = [(found[2 * i], found[2 * i + 1]) for i in range(count * n)]
        return [
            [
                replace(d, dtype=DTYPES[t], format=f)
                for d, (t, f) in zip(tensors, pairs[i * n : (i + 1) * n], strict=True)
            ]
            for i in range(count)
        ]

    def configure(self, tensors: Sequence[Desc]) -> int:
        """The bytes of workspace; negative if the plugin refuses."""
        return self._call("host_configure", len(tensors) - self.outputs, self.outputs, _array(tensors))

    def tactics(self) -> list[int]:
        """What the builder would time, once configured."""
        found = (ctypes.c_int32 * 64)()
        count = self._call("host_tactics", found, 64)
        assert count >= 0, self.host.log()
        return found[:count]

    def set_tactic(self, tactic: int) -> None:
        assert self._call("host_set_tactic", tactic) == 0, self.host.log()

    def prepare(self, tensors: Sequence[Desc]) -> int:
        return self._call("host_prepare", len(tensors) - self.outputs, self.outputs, _array(tensors))

    def enqueue(
        self,
        tensors: Sequence[Desc],
        memory: Sequence[Tensor],
        workspace: Tensor | None = None,
        stream: int | None = None,
        times: int = 1,
    ) -> float:
        """Runs it on a CUDA stream, by default torch's; returns the microseconds that a call took."""
        microseconds = ctypes.c_double()
        status = self._call(
            "host_enqueue",
            len(tensors) - self.outputs,
            self.outputs,
            _array(tensors),
            (ctypes.c_void_p * len(memory))(*(m.data_ptr() for m in memory)),
            ctypes.c_void_p(workspace.data_ptr() if workspace is not None else None),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream if stream is None else stream),
            times,
            ctypes.byref(microseconds),
        )
        assert status == 0, self.host.log()
        return microseconds.value


def _array(tensors: Sequence[Desc]) -> ctypes.Array:
    return (_Tensor * len(tensors))(*(t.c() for t in tensors))
