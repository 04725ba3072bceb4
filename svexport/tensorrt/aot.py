"""Kernels that TensorRT embeds in an engine, which then runs without Python and without a plugin library.

Such a plugin is one kernel, in PTX. Its arguments are the pointers of the inputs, 32-bit integers and the pointers of
the outputs (``tensorrt.plugin.aot_impl``). ``csrc/aot`` calls the kernels of ``csrc/cuda`` with these arguments. This
module writes the entry point for given data types, attributes and formats, and computes the number of blocks for sizes
that may be TensorRT expressions. Nothing here needs TensorRT.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from svexport.errors import PluginBuildError, UnsupportedError
from svexport.kernels import planner
from svexport.ops._op import Op
from svexport.tensorrt import library

__all__ = ["AOT_OPS", "Kernel", "Operand", "available", "kernel", "obstacle", "ptx"]

FOLDER = library.CSRC / "aot"

AOT_OPS = frozenset(f.stem for f in FOLDER.glob("*.cuh")) - {"aot", "entry", "sample"}
"""Names of the ops whose forward is a single kernel that works directly on TensorRT's tensors."""

_CONSTANT_SIZES = ("camera_sample",)
"""Ops whose kernels are compiled for the known sizes; kernels of the others are compiled once for all sizes."""

_TYPES = {
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.int8: "int8_t",
    torch.int32: "int",
    torch.int64: "long long",
}


@dataclass(frozen=True)
class Operand:
    """A tensor of a plugin.

    Attributes:
        shape: sizes: numbers, or expressions if TensorRT does not know them yet.
        dtype: data type of the elements.
        channels_last: whether (N, C, H, W) is stored as (N, H, W, C).
    """

    shape: tuple[Any, ...]
    dtype: torch.dtype
    channels_last: bool = False


@dataclass(frozen=True)
class Kernel:
    """What TensorRT needs to launch a kernel.

    Attributes:
        name: name of the entry point.
        source: CUDA C++, compiled by :func:`ptx`.
        grid: blocks along x, y, z; numbers or expressions.
        block: threads per block.
        shared: bytes of dynamic shared memory.
        sizes: the integer arguments between the input and the output pointers; numbers or expressions.
    """

    name: str
    source: str
    grid: tuple[Any, Any, Any]
    block: int
    shared: int
    sizes: tuple[Any, ...]


@dataclass(frozen=True)
class Launch:
    """The launch configuration of a kernel of ``csrc/aot``, and its last arguments, which are C++ constants."""

    grid: tuple[Any, Any, Any]
    block: int
    choice: tuple[str, ...] = ()
    shared: int = 0


def kernel(op: Op, inputs: Sequence[Operand], outputs: Sequence[Operand], attributes: Mapping[str, Any]) -> Kernel:
    """The kernel of an op of :data:`AOT_OPS` for these tensors and attributes.

    Raises:
        UnsupportedError: if there is no kernel for them.
    """
    arguments = op.bind(inputs, attributes)
    for tensor in (*inputs, *outputs):
        if tensor.dtype not in _TYPES:
            raise UnsupportedError(f"{op.name}: no kernel compiled ahead of time takes {tensor.dtype}")
        if _known(tensor.shape) and _product(tensor.shape) > torch.iinfo(torch.int32).max:
            raise UnsupportedError(f"{op.name}: kernels compiled ahead of time count in 32 bits, not {tensor.shape}")
    if reason := obstacle(op, attributes):
        raise UnsupportedError(f"{op.name}: {reason}")
    launch = _LAUNCHES[op.name](arguments, outputs)
    pointers: list[str] = []
    views: list[str] = []
    sizes: list[tuple[str, Any]] = []

    def view(operand: Operand, name: str, const: str) -> str:
        kind = f"{const}{_TYPES[operand.dtype]}"
        dims = [f"{name}_{i}" for i in range(len(operand.shape))]
        pointers.append(f"{kind}* {name}")
        sizes.extend(zip(dims, operand.shape, strict=True))
        if op.name in _CONSTANT_SIZES:
            dims = [str(s) if isinstance(s, int) else d for d, s in zip(dims, operand.shape, strict=True)]
        return f"View<{kind}, {len(dims)}>{{{name}, {{{', '.join(dims)}}}}}"

    for argument, value in zip(op.arguments, arguments, strict=True):
        if argument.kind == "tensors":
            if len({tensor.dtype for tensor in value}) > 1:
                raise UnsupportedError(f"{op.name}: kernels compiled ahead of time take {argument.name} of one type")
            listed = [view(tensor, f"{argument.name}{i}", "const ") for i, tensor in enumerate(value)]
            kind = f"View<const {_TYPES[value[0].dtype]}, {len(value[0].shape)}>"
            views.append(f"List<{kind}, {len(value)}>{{{{{', '.join(listed)}}}}}")
        elif argument.kind == "tensor":
            absent = f"View<const {_TYPES[inputs[0].dtype]}, {len(inputs[0].shape)}>{{}}"
            views.append(absent if value is None else view(value, argument.name, "const "))
        elif argument.kind in ("ints", "floats"):
            views.append(f"List<double, {len(value)}>{{{{{', '.join(map(_literal, value))}}}}}")
        else:
            views.append(f"Int<{int(value)}>()" if argument.kind == "int" else f"float({_literal(value)})")
    read = len(pointers)
    views += [view(operand, f"out{i}", "") for i, operand in enumerate(outputs)]
    entry = f"svexport_{op.name}"
    ints = [f"int {n}" for n, _ in sizes]
    source = "\n".join([
        f'#include "{op.name}.cuh"',
        '#include "entry.cuh"',
        "using namespace svexport::aot;",
        f'extern "C" __global__ void __launch_bounds__({launch.block})',
        f"    {entry}({', '.join([*pointers[:read], *ints, *pointers[read:]])}) {{",
        f"  svexport::aot::{op.name}({', '.join([*views, *launch.choice])});",
        "}",
        "",
    ])  # fmt: skip
    return Kernel(entry, source, launch.grid, launch.block, launch.shared, tuple(size for _, size in sizes))


def _literal(value: float) -> str:
    """A number in C++."""
    return repr(float(value)) if math.isfinite(value) else "NAN" if value != value else f"{'-' * (value < 0)}INFINITY"


def obstacle(op: Op, attributes: Mapping[str, Any]) -> str | None:
    """Why a node of :data:`AOT_OPS` with these attributes has no kernel; None if it has one."""
    if op.beyond_plugin(attributes):
        return f"no kernel is for {', '.join(f'{name}={value}' for name, value in attributes.items())}"
    return None


def available() -> bool:
    """Whether nvcc is installed, to compile kernels with."""
    try:
        library.find_nvcc()
    except PluginBuildError:
        return False
    return True


def ptx(source: str) -> str:
    """The PTX of a kernel, for every device on which TensorRT supports its data types; compiled once and cached.

    Raises:
        PluginBuildError: without nvcc, or if it fails.
    """
    # Target the oldest device; the driver compiles for the actual one. TensorRT has bfloat16 from 8.0 on only.
    architecture = "compute_80" if "__nv_bfloat16" in source else "compute_75"
    include = ["-I", str(FOLDER), "-I", str(library.CSRC / "cuda")]
    command = [library.find_nvcc(), "-ptx", "-std=c++17", "-O3", f"-arch={architecture}", *include]
    key = hashlib.sha256(repr((command, source, _sources())).encode()).hexdigest()[:32]
    result = library.plugins_folder() / "aot" / f"{key}.ptx"
    if not result.is_file():
        result.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=result.parent) as folder:
            written, compiled = Path(folder, "kernel.cu"), Path(folder, "kernel.ptx")
            written.write_text(source)
            done = subprocess.run([*command, written, "-o", compiled], capture_output=True, text=True, check=False)
            if done.returncode:
                raise PluginBuildError(f"nvcc does not compile a kernel ahead of time:\n{done.stderr}\n{source}")
            os.replace(compiled, result)
    return result.read_text()


@functools.cache
def _sources() -> str:
    """A hash of everything that kernels include."""
    texts = [f.read_bytes() for folder in ("aot", "cuda") for f in sorted((library.CSRC / folder).rglob("*.*"))]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


# ------------------------------------------------------------------------------------------- launches, one per kernel


def _known(shape: Sequence[Any]) -> bool:
    return all(isinstance(size, int) for size in shape)


def _product(sizes: Sequence[Any]) -> Any:
    product: Any = 1
    for size in sizes:
        product = size * product  # an expression must be the left factor
    return product


def _ceil_div(a: Any, b: int) -> Any:
    return (a + (b - 1)) // b


def _some(blocks: Any) -> Any:
    """At least one block, even if it has no work."""
    return max(blocks, 1) if isinstance(blocks, int) else blocks.at_least(1)


_MANY = 1 << 20
"""The assumed number of rows if TensorRT learns it only later: enough for every multiprocessor."""


def _gpu() -> planner.Gpu:
    """The GPU that an engine is built on, limited to the 48 KB of shared memory of a kernel that TensorRT launches."""
    return replace(planner.this_gpu() or planner.GPUS["h100"], shared_memory=48 * 1024)


def _blocks(launch: planner.Launch, work: Any) -> Any:
    """The number of blocks: the planner's if the work is a number, otherwise an expression."""
    if isinstance(work, int):
        return _some(launch.grid[0])
    blocks = _some(_ceil_div(work, launch.per_block))
    return blocks if launch.most >= torch.iinfo(torch.int32).max else blocks.at_most(launch.most)


def _constants(*values: int | bool) -> tuple[str, ...]:
    return tuple(
        f"std::{str(v).lower()}_type()" if isinstance(v, bool) else f"Int<{v}>()"  #
        for v in values
    )


def _inverse(arguments: Sequence[Any], outputs: Sequence[Operand]) -> Launch:
    (A, n) = arguments
    lanes = 2 if n <= 2 else 4 if n <= 4 else 8
    return Launch((_some(_ceil_div(_product(A.shape[:-2]), 128 // lanes)), 1, 1), 128)


def _add_bias_residual_layer_norm(arguments: Sequence[Any], outputs: Sequence[Operand]) -> Launch:
    x, extra = arguments[0], arguments[6]
    rows, d, item = _product(x.shape[:-1]), x.shape[-1], x.dtype.itemsize
    known = isinstance(d, int)
    problem = {"rows": rows if isinstance(rows, int) else _MANY, "columns": d if known else 0, "item_size": item}
    strides = math.gcd(d * item, 16) if known else 16
    problem |= {"strides": strides, "extra": extra is not None}
    tactic = planner.plan("add_bias_residual_layer_norm", _gpu(), **problem).chosen
    kernel, access = tactic.constants["kernel"], tactic.constants["access"]
    # If the columns are unknown, the kernel decides at run time whether it can use vectors.
    width = 16 // item if access in ("vector", "shifted") or not known else {"pair": 2, "single": 1}[access]
    columns = 0 if kernel == "long" else int(kernel.removeprefix("warp").removeprefix("block"))
    return Launch(
        (_blocks(tactic.launch, rows), 1, 1),
        tactic.launch.block[0],
        _constants(columns, not kernel.startswith("warp"), width, access == "shifted"),
        tactic.launch.shared_memory,
    )


def _camera_sample(arguments: Sequence[Any], outputs: Sequence[Operand]) -> Launch:
    features, weights = arguments[0], arguments[3]
    batch, queries, channels = outputs[0].shape
    last, vector, groups = features[0].channels_last, 16 // outputs[0].dtype.itemsize, weights.shape[5]
    whole = last and isinstance(channels, int) and isinstance(groups, int) and channels // groups % vector == 0
    problem = {
        "queries": queries if isinstance(queries, int) else _MANY,
        "channels": channels if isinstance(channels, int) else 0,
        "item_size": outputs[0].dtype.itemsize,
        "vectors": int(whole),
    }
    tactic = planner.plan("camera_sample", _gpu(), **problem).chosen
    return Launch(
        (_some(queries), _some(batch), _some(_ceil_div(channels, tactic.constants["chunk"]))),
        tactic.launch.block[0],
        _constants(last, whole, tactic.constants["row_shift"]),
    )


def _grid_sample(arguments: Sequence[Any], outputs: Sequence[Operand]) -> Launch:
    return _sample(arguments[0], arguments[1], arguments[2])


def _bilinear_sample(arguments: Sequence[Any], outputs: Sequence[Operand]) -> Launch:
    return _sample(arguments[0], arguments[1], 0)


def _sample(image: Operand, grid: Operand, mode: int) -> Launch:
    batch, channels = image.shape[:2]
    points, taps = _product(grid.shape[1:-1]), {0: 2 ** (len(image.shape) - 2), 1: 1, 2: 16}[mode]
    images = batch if not isinstance(batch, int) or batch < 65535 else 65535
    last, vector = image.channels_last, 16 // image.dtype.itemsize
    if last and (not isinstance(channels, int) or channels % vector):
        raise UnsupportedError(f"sampling from channels-last needs channels in multiples of {vector}, got {channels}")
    # Unknown sizes may be small, so plan for the smallest, which gives the most blocks.
    known = _known(image.shape) and _known(grid.shape)
    problem = {"images": batch if known else 1, "points": points if known else 1, "taps": taps}
    problem |= {"channels": channels if isinstance(channels, int) else 1, "item_size": image.dtype.itemsize}
    problem |= {"alignment": 16, "output_last": 1} if last else {}
    tactic = planner.plan("grid_sample", _gpu(), **problem).chosen
    constants, launch = tactic.constants, tactic.launch
    chunk, shift = constants["chunk"], constants["shift"]
    if not last:
        blocks = _some(_ceil_div(_ceil_div(channels, chunk) * points, launch.per_block))
        return Launch((blocks, _some(images), 1), launch.block[0], _constants(constants["width"], chunk, shift, 1))
    at_once = (2 if taps <= 4 else 1) * (launch.block[0] >> shift)
    choice = _constants(0, chunk, shift, constants["tile"] // at_once)
    blocks = _some(_ceil_div(points, launch.per_block))
    return Launch((blocks, _ceil_div(channels, chunk), _some(images)), launch.block[0], choice, launch.shared_memory)


def _ms_deform_attn(arguments: Sequence[Any], outputs: Sequence[Operand]) -> Launch:
    value, locations = arguments[0], arguments[3]
    images, rows, channels = value.shape[0], locations.shape[1] * value.shape[2], value.shape[3]
    known, item = isinstance(channels, int), value.dtype.itemsize
    problem = {
        "rows": rows if isinstance(rows, int) else _MANY,
        "channels": channels if known else 0,
        "item_size": item,
    }
    tactic = planner.plan("ms_deform_attn", _gpu(), **problem).chosen
    # If the channels are unknown, the kernel decides at run time whether it can use vectors.
    width = tactic.constants["width"] if known else 16 // item
    blocks = _some(images * _ceil_div(rows, tactic.launch.per_block))
    return Launch((blocks, 1, 1), tactic.launch.block[0], _constants(tactic.constants["lanes"], width))


_LAUNCHES: dict[str, Callable[[Sequence[Any], Sequence[Operand]], Launch]] = {
    "add_bias_residual_layer_norm": _add_bias_residual_layer_norm,
    "bilinear_sample": _bilinear_sample,
    "camera_sample": _camera_sample,
    "grid_sample": _grid_sample,
    "inverse": _inverse,
    "ms_deform_attn": _ms_deform_attn,
}
