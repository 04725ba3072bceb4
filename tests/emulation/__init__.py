"""Runs kernels on the CPU: launchers take CPU tensors, PTX is interpreted (runtime.cpp), and accesses are checked."""

from __future__ import annotations

import ctypes
import math
import os
import random
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.utils import cpp_extension

from svexport.ops import _cuda
from tests.csrc import CXX, INCLUDES, NVCC, built, compiled, linked

HERE = Path(__file__).parent
RUNTIME = (HERE / "runtime.cpp", HERE / "__init__.py")
_FLAGS = ("-std=c++20", "-O2", "-march=native", "-ffp-contract=off", "-fPIC")
_NOT_SUPPORTED = 801  # cudaErrorNotSupported
_OWN = os.RTLD_NOW | os.RTLD_DEEPBIND  # CUDA's runtime is the emulated one, also where torch has loaded the real one


def _compiles() -> bool:
    if not (NVCC and CXX and INCLUDES):
        return False
    flags = ("-std=c++20", "-fsyntax-only", "-x", "c++", "-")
    return subprocess.run([CXX, *flags], input=b"_Float16 x;", capture_output=True, check=False).returncode == 0


_needed = pytest.mark.skipif(
    not _compiles(), reason="needs nvcc, the CUDA toolkit's headers and a g++ that knows _Float16 (12 and later)"
)


def emulated(*sources: str) -> list[pytest.MarkDecorator]:
    """For a module whose fixture ``kernels`` is to be these sources (:func:`paths`)."""
    return [_needed, pytest.mark.kernels(*paths(*sources), *RUNTIME)]


def paths(*sources: str) -> list[Path]:
    """Those of csrc/cuda and of this folder by stem or pattern."""
    return [p for s in sources for folder in (HERE, _cuda.CSRC / "cuda") for p in sorted(folder.rglob(f"{s}.cu"))]


_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64, torch.bool]


class View(ctypes.Structure):
    """``svexport::Tensor`` of tensor.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("sizes", ctypes.c_int64 * 8),
        ("strides", ctypes.c_int64 * 8),
    )

    @classmethod
    def of(cls, tensor: torch.Tensor | None) -> View:
        """None: absent."""
        view = cls()
        if tensor is not None:
            view.data, view.dtype, view.rank = tensor.data_ptr(), _DTYPES.index(tensor.dtype), tensor.dim()
            view.sizes[: tensor.dim()], view.strides[: tensor.dim()] = tensor.shape, tensor.stride()
        return view


class Structure(NamedTuple):
    """One of ctypes, or an array of them, by its address; and the tensors and memory that are in it."""

    value: ctypes.Structure | ctypes.Array
    tensors: Sequence[torch.Tensor | Memory | None] = ()


class Memory(NamedTuple):
    """Scratch memory: a pointer for a launcher, none where it is empty."""

    tensor: torch.Tensor

    @classmethod
    def within(cls, tensor: torch.Tensor) -> Memory:
        """Of a contiguous tensor, and no more of its storage."""
        return cls(tensor.view(-1).view(torch.uint8))

    @classmethod
    def of(cls, size: int) -> Memory:
        """So many bytes at a multiple of 16, none of which is zero."""
        tensor = torch.full((size + 16,), 0xFF, dtype=torch.uint8)
        start = -tensor.data_ptr() % 16
        return cls(tensor[start : start + size])


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """For outputs: what no kernel should leave there."""
    return torch.full(shape, math.nan if dtype.is_floating_point else 77, dtype=dtype)


def in_memory(x: torch.Tensor, *, order: bool = True) -> torch.Tensor:
    """The same values, sometimes with (poisoned) gaps, sometimes not aligned, the axes perhaps in any order."""
    axes = list(range(x.dim()))
    if order and random.random() < 0.5:
        random.shuffle(axes)
    gap = random.choice([0, 0, 1])
    sizes = [x.shape[a] + gap * random.choice([0, 0, 1, 2, 8]) for a in axes]
    start = random.choice([0, 0, 0, 1, 2, 8])
    result = poisoned(start + math.prod(sizes), dtype=x.dtype)[start:].view(sizes)
    for position, a in enumerate(axes):
        result = result.narrow(position, 0, x.shape[a])
    return result.permute([axes.index(a) for a in range(x.dim())]).copy_(x)


PRODUCT_TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of the sum of the products' magnitudes."""


def check_product(
    result: torch.Tensor,
    product: Callable[..., torch.Tensor],
    *operands: torch.Tensor | None,
    shown: str,
    smallest: float | None = None,
) -> None:
    """Against the product in float64; ``smallest``: sum of magnitudes that counts, default: the least normal number."""
    precise = [None if x is None else x.double() for x in operands]
    magnitudes = product(*(None if x is None else x.abs() for x in precise))
    smallest = torch.finfo(result.dtype).tiny if smallest is None else smallest
    error = ((result.double() - product(*precise)).abs() / magnitudes.clamp_min(smallest)).max()
    assert error < PRODUCT_TOLERANCES[result.dtype], f"{shown}: {error}"


class Kernels:
    """The launchers of sources, by name, with tensors, numbers and :class:`Memory`.

    None stands for an absent tensor. A kernel may access the tensors' storages and memory, and nothing else.
    """

    def __init__(self, *sources: Path, architecture: str = "90a") -> None:
        flags = (*_FLAGS, *(f"-I{path}" for path in INCLUDES))
        runtime = built("emulation.so", (CXX, "-shared", RUNTIME[0], *flags), [RUNTIME[0]])
        self._runtime = ctypes.CDLL(str(runtime), mode=_OWN)
        self._runtime.emulation_allow.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._runtime.emulation_report.restype = ctypes.c_char_p
        self._runtime.emulation_launches.restype = ctypes.c_char_p
        self.path = linked("emulated", [*(compiled(path, architecture).object for path in sources), runtime])
        self._library = ctypes.CDLL(str(self.path), mode=_OWN)
        listed = [
            subprocess.run(
                ["nm", *flags, "-D", "--defined-only", self.path], capture_output=True, text=True, check=True
            )
            for flags in ([], ["-C"])
        ]
        symbols, readable = (result.stdout.splitlines() for result in listed)
        self._symbols = {
            match[1]: symbol.split()[-1]
            for symbol, text in zip(symbols, readable, strict=True)
            if (match := re.search(r" T svexport::(\w+)\(", text))
        }

    def __call__(self, launcher: str, *args: object, then: Memory | None = None) -> bool:
        """Calls a launcher on stream 0, ``then`` behind it; whether it has a kernel for that.

        Raises AssertionError that says what the kernel did wrong.
        """
        behind = () if then is None else (then,)
        status = self._call(launcher, ctypes.c_int, *args, ctypes.c_void_p(None), *behind)
        report = self.report()
        assert not report, report
        assert status in (0, _NOT_SUPPORTED), f"cudaError {status}"
        return status == 0

    def bytes(self, function: str, *args: object) -> int:
        """What a function that asks for memory returns."""
        return int(self._call(function, ctypes.c_size_t, *args))

    def load_operators(self, source: Path) -> None:
        """Those that a source registers, a binding with what folder ``torch`` has in place of headers for CUDA.

        They run on CPU tensors, and their kernels may access any memory; :meth:`report` says what they do wrong.
        """
        folder, fakes = Path(torch.__file__).parent / "lib", HERE / "torch"
        headers = [
            fakes,
            *cpp_extension.include_paths(),
            *INCLUDES,
            *(_cuda.CSRC / name for name in ("", "cuda", "torch")),
        ]
        flags = ["-std=c++20", "-O1", "-shared", "-fPIC", *(f"-I{path}" for path in headers)]
        flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
        link = [self.path, f"-L{folder}", "-lc10", "-ltorch_cpu", "-ltorch"]
        ctypes.CDLL(
            str(built("operators.so", (CXX, *flags, source, *link), [source, *sorted(fakes.rglob("*.h"))])), mode=_OWN
        )
        self._runtime.emulation_allow(1, 1 << 62)

    def report(self) -> str:
        """What a kernel did wrong first since the last call; empty if nothing."""
        return str(self._runtime.emulation_report().decode())

    def multiprocessors(self, count: int) -> None:
        """Of the device, which launchers adapt to."""
        self._runtime.emulation_multiprocessors(count)

    def launched(self) -> dict[str, int]:
        """The kernels launched since the last call (their names as in the source), and how often."""
        counts: dict[str, int] = {}
        for line in self._runtime.emulation_launches().decode().splitlines():
            mangled, count = line.split()
            name = _name(mangled)
            counts[name] = counts.get(name, 0) + int(count)
        return counts

    def _call(self, name: str, result: type, *args: object) -> int:
        function = self._library[self._symbols[name]]
        function.restype = result
        values, allowed = [], []
        for arg in args:
            if isinstance(arg, torch.Tensor) or arg is None:
                arg = Structure(View.of(arg), (arg,))
            if isinstance(arg, Structure):
                values.append(ctypes.byref(arg.value))
                allowed += [_extent(tensor) for tensor in arg.tensors if tensor is not None]
            elif isinstance(arg, Memory):
                values.append(ctypes.c_void_p(arg.tensor.data_ptr() if arg.tensor.numel() else None))
                allowed.append(_extent(arg))
            elif isinstance(arg, bool):
                values.append(ctypes.c_bool(arg))
            elif isinstance(arg, int):
                values.append(ctypes.c_int(arg))
            elif isinstance(arg, float):
                values.append(ctypes.c_float(arg))
            else:
                values.append(arg)
        for begin, size in allowed:
            if size:
                self._runtime.emulation_allow(begin, size)
        try:
            return int(function(*values))
        finally:
            for begin, size in allowed:
                if size:
                    self._runtime.emulation_allow(begin, 0)


def _extent(x: torch.Tensor | Memory) -> tuple[int, int]:
    """Where what a kernel may access begins, and its bytes: a tensor's storage, or memory."""
    if isinstance(x, Memory):
        return x.tensor.data_ptr(), x.tensor.numel()
    return x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()


def _name(mangled: str) -> str:
    """``kernel`` of ``_ZN9namespace6kernelI...``."""
    rest, name = mangled.removeprefix("_ZN"), mangled
    while match := re.match(r"\d+", rest):
        start, length = match.end(), int(match[0])
        name, rest = rest[start : start + length], rest[start + length :]
    return name
