"""Python access to the planners of ``csrc/cuda/*/tactics.h``: a C++ library without CUDA, compiled on first use.

The torch operators and the plugins run the same planners; this module serves the kernels that are compiled ahead of
time, ``svexport kernels`` and the tests. It needs no GPU, only the description of one.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from svexport.errors import PluginBuildError, UnsupportedError
from svexport.ops import _cuda, _winners

__all__ = ["GPUS", "Gpu", "Launch", "Plan", "Tactic", "by_cost", "plan", "problems", "this_gpu"]

SOURCE = _cuda.CSRC / "planner.cpp"
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that plans depend on.

    Attributes:
        name: the name that the device reports.
        capability: compute capability, 75 for 7.5.
        multiprocessors: number of multiprocessors.
        shared_memory: maximum bytes of shared memory per block.
        l2_megabytes: size of the L2 cache.
        bandwidth: memory bandwidth, GB/s.
    """

    name: str
    capability: int
    multiprocessors: int
    shared_memory: int
    l2_megabytes: int
    bandwidth: float


GPUS = {
    "t4": Gpu("Tesla T4", 75, 40, 64 * 1024, 4, 320),
    "a10": Gpu("NVIDIA A10", 86, 72, 99 * 1024, 6, 600),
    "orin": Gpu("Orin", 87, 16, 163 * 1024, 4, 205),
    "l4": Gpu("NVIDIA L4", 89, 58, 99 * 1024, 48, 300),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 80, 108, 163 * 1024, 40, 2039),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 90, 132, 227 * 1024, 50, 3352),
    "h200": Gpu("NVIDIA H200", 90, 132, 227 * 1024, 50, 4915),
    "b200": Gpu("NVIDIA B200", 100, 148, 227 * 1024, 126, 8000),
    "5090": Gpu("NVIDIA GeForce RTX 5090", 120, 170, 99 * 1024, 96, 1792),
}
"""GPUs by short names; the numbers are from their data sheets."""


@dataclass(frozen=True)
class Launch:
    """A kernel's launch configuration: along x ``ceil(work / per_block)`` blocks, at most ``most``."""

    work: int
    per_block: int
    most: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_memory: int


@dataclass(frozen=True)
class Tactic:
    """A way to run an op.

    Attributes:
        id: the number that identifies it in TensorRT plans.
        microseconds: the planner's estimate of its time.
        constants: constants of its kernel, by name.
        launch: launch configuration of its kernel.
    """

    id: int
    microseconds: float
    constants: Mapping[str, Any]
    launch: Launch

    def __str__(self) -> str:
        return " ".join(
            str(value) if not isinstance(value, bool) else name * value for name, value in self.constants.items()
        ).strip()


@dataclass(frozen=True)
class Plan:
    """The tactics for a problem, and the chosen one: the cheapest by estimate, or the one measured as fastest."""

    chosen: Tactic
    tactics: tuple[Tactic, ...]
    timed: bool = False


class _Gpu(ctypes.Structure):
    """``svexport::Gpu`` of planner.h."""

    _fields_ = (
        ("capability", ctypes.c_int32),
        ("multiprocessors", ctypes.c_int32),
        ("shared_memory", ctypes.c_int32),
        ("l2_megabytes", ctypes.c_int32),
        ("table", ctypes.c_int32),
        ("bandwidth", ctypes.c_float),
    )


def _described(gpu: Gpu) -> _Gpu:
    # 1 GB/s is 1000 bytes per microsecond.
    return _Gpu(gpu.capability, gpu.multiprocessors, gpu.shared_memory, gpu.l2_megabytes, 0, gpu.bandwidth * 1e3)


def this_gpu(device: int | None = None) -> Gpu | None:
    """A CUDA device of this machine, by default the current one; None without any."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
    clock, bus = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
    return Gpu(
        found.name,
        10 * found.major + found.minor,
        found.multi_processor_count,
        getattr(found, "shared_memory_per_block_optin", 48 * 1024),
        getattr(found, "L2_cache_size", 4 << 20) >> 20,
        clock * 1e3 * bus / 4 / 1e9 or 1000,
    )


def problems() -> dict[str, dict[str, int]]:
    """By op, the names of a problem's numbers and their defaults."""
    return dict(json.loads(_text(_library().svexport_problems)))


def plan(op: str, gpu: Gpu, **problem: int) -> Plan:
    """The tactics of an op for a problem on a GPU; a tactic measured as fastest takes precedence over the cheapest.

    Raises:
        UnsupportedError, PluginBuildError: as for :func:`by_cost`.
    """
    plan = by_cost(op, gpu, **problem)
    winner = _winners.winner(gpu.name, op, {**problems()[op], **problem})
    return next((Plan(t, plan.tactics, True) for t in plan.tactics if t.id == winner), plan)


def by_cost(op: str, gpu: Gpu, **problem: int) -> Plan:
    """The tactics of an op for a problem (see :func:`problems` for the names) on a GPU, chosen by the cost function.

    Raises:
        UnsupportedError: if the op has no planner, or its problems have no such name.
        PluginBuildError: without a C++ compiler.
    """
    known = problems()
    if op not in known:
        raise UnsupportedError(f"{op} has no planner; those that have one: {', '.join(sorted(known))}")
    if unknown := problem.keys() - known[op].keys():
        raise UnsupportedError(
            f"{op}: a problem is made of {', '.join(known[op])}; not of {', '.join(sorted(unknown))}"
        )
    numbers = [int(value) for value in {**known[op], **problem}.values()]
    text = _text(
        _library().svexport_plan,
        op.encode(),
        (ctypes.c_int64 * len(numbers))(*numbers),
        len(numbers),
        ctypes.byref(_described(gpu)),
        gpu.name.encode(),
    )
    found = json.loads(text)
    tactics = tuple(
        Tactic(t["id"], t["microseconds"], t["constants"], Launch(**{k: _tuple(v) for k, v in t["launch"].items()}))
        for t in found["tactics"]
    )
    return Plan(next(t for t in tactics if t.id == found["chosen"]), tactics)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _text(function: Any, *args: Any) -> str:
    """The text that a function of planner.cpp writes."""
    size = 1 << 14
    while True:
        buffer = ctypes.create_string_buffer(size)
        length = function(*args, buffer, size)
        if length < size:
            return buffer.value.decode()
        size = length + 1


@functools.cache
def _library() -> ctypes.CDLL:
    """The planners' library, compiled once and cached."""
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        raise PluginBuildError(
            "no C++ compiler was found to compile the planners of the kernels; install g++ or clang++"
        )
    digest = hashlib.sha256(repr((compiler, _FLAGS)).encode() + SOURCE.read_bytes())
    for path in sorted((_cuda.CSRC / "cuda").rglob("*.h")):
        digest.update(path.name.encode() + path.read_bytes())
    folder = _cuda.cache_folder() / "planner"
    library = folder / f"planner-{digest.hexdigest()[:24]}.so"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}.so")
        command = [compiler, *_FLAGS, f"-I{_cuda.CSRC / 'cuda'}", str(SOURCE), "-o", str(partial)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PluginBuildError(f"the planners of the kernels do not compile:\n{done.stderr[-2000:]}")
        os.replace(partial, library)
    return ctypes.CDLL(str(Path(library)))
