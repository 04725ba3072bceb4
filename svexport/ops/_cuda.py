"""Loads the CUDA kernels of the ops on the first use of a CUDA tensor, and compiles them first if necessary."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from svexport._version import __version__
from svexport.errors import PluginBuildError
from svexport.ops import _winners
from svexport.ops._winners import cache_folder

__all__ = [
    "FLAGS",
    "LONGEST",
    "architectures",
    "cache_folder",
    "kernels",
    "load",
    "longest_first",
    "sources",
    "tried",
    "with_features",
]

CSRC = Path(__file__).parents[1] / "csrc"
FLAGS = {"cxx": ["-O1"], "nvcc": ["-O1", "-lineinfo"]}
"""Compiler flags, the same on first use and in setup.py. -O1 applies to host code, which only plans and launches;
kernels are always compiled at -O3."""

LONGEST = (
    *("operators", "add_bias_residual_layer_norm", "einsum", "grid_sample_backward_narrow"),
    *("add_bias_residual_layer_norm_backward", "autograd", "add_bias_residual_layer_norm_backward_long", "grid_sample"),
    *("einsum_narrow", "grid_sample_backward", "einsum_large", "camera_sample", "grid_sample_planes"),
    *("transformer_decoder_fused", "channel_product", "grid_sample_int8", "camera_sample_backward"),
)
"""The sources slowest to compile, 14 to 6 seconds of a core. They start first, so that no core waits for them last."""

_lock = threading.Lock()
_loaded: bool | None = None  # None: not tried yet


def load() -> bool:
    """Whether the kernels are available. The first call loads them, and first compiles them into a cache if necessary.

    ``SVEXPORT_KERNELS=0`` in the environment disables them. If they cannot be compiled, one warning says why and every
    op runs its reference.
    """
    global _loaded
    if _loaded is None:
        with _lock:
            if _loaded is None:
                _loaded = _try_load()
    return _loaded


def tried() -> bool:
    """Whether :func:`load` has been called, successfully or not."""
    return _loaded is not None


def kernels() -> set[str]:
    """The names of the operators (``grid_sample``, ``grid_sample_backward``, ...) that have a CUDA kernel loaded."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    return {name.removeprefix("svexport::") for name in names if name.startswith("svexport::")}


def sources() -> list[Path]:
    """The source files of the extension, in the order in which they are compiled."""
    torch = [CSRC / "torch" / "autograd.cpp", CSRC / "torch" / "operators.cpp"]  # these include the other files there
    return longest_first([*CSRC.glob("cuda/**/*.cu"), *torch])


def longest_first(sources: Iterable[Path]) -> list[Path]:
    """Sorts sources so that a parallel build starts the slowest ones first."""
    place = {stem: i for i, stem in enumerate(LONGEST)}
    return sorted(sources, key=lambda path: (place.get(path.stem, len(place)), path))


def architectures() -> str:
    """All architectures of a distributed build, in the syntax of TORCH_CUDA_ARCH_LIST. A build on first use compiles
    only for the devices of this machine."""
    return (CSRC / "architectures.txt").read_text().strip()


def with_features(architectures: str) -> str:
    """A list of architectures with 9.0a in place of 9.0, from CUDA 12 on.

    The letter adds wgmma, which every device of compute capability 9.0 has and the fused decoder needs.
    """
    if torch.version.cuda and int(torch.version.cuda.split(".")[0]) < 12:  # its compiler does not know 9.0a
        return architectures
    more = {"9.0": "9.0a", "9.0+PTX": "9.0a 9.0+PTX"}
    return " ".join(more.get(name, name) for name in re.split(r"[\s;]+", architectures.strip()))


def _architectures() -> str:
    """The architectures to compile for on first use: those requested, or those of this machine's devices."""
    devices = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    given = os.environ.get("TORCH_CUDA_ARCH_LIST") or " ".join(f"{a}.{b}" for a, b in sorted(devices))
    return with_features(given)


def _try_load() -> bool:
    if os.environ.get("SVEXPORT_KERNELS") == "0":
        return False
    spec = importlib.util.find_spec("svexport._C")
    try:
        if spec and spec.origin:
            torch.ops.load_library(spec.origin)
        else:
            _load_from_cache()
        _winners.tell()
    except (PluginBuildError, OSError) as error:
        warnings.warn(
            f"svexport runs its ops on CUDA without its kernels, which is correct but slower: {error}", stacklevel=2
        )
        return False
    return True


def _load_from_cache() -> None:
    """Loads the extension from the cache, and compiles it first unless an earlier process did."""
    name = "svexport_kernels"
    folder = cache_folder() / _build_key()
    library = folder / f"{name}.so"
    if library.is_file():
        torch.ops.load_library(str(library))
        return
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None or not shutil.which("nvcc", path=os.path.join(cpp_extension.CUDA_HOME, "bin")):
        raise PluginBuildError(
            f"no nvcc was found to compile them; install the CUDA toolkit {torch.version.cuda} or set CUDA_HOME"
        )
    if not cpp_extension.is_ninja_available():
        raise PluginBuildError("no ninja was found to compile them with; pip install ninja")
    with (
        _one_at_a_time(folder),
        _progress(),
        _environment("TORCH_CUDA_ARCH_LIST", _architectures()),
        tempfile.TemporaryDirectory(dir=folder) as build,
    ):
        if library.is_file():  # compiled by the process that held the lock
            torch.ops.load_library(str(library))
            return
        try:
            cpp_extension.load(  # compiles and loads
                name,
                [str(s) for s in sources()],
                extra_cflags=FLAGS["cxx"],
                extra_cuda_cflags=FLAGS["nvcc"],
                extra_include_paths=[str(CSRC / "cuda")],
                build_directory=build,
                is_python_module=False,
                is_standalone=False,
                verbose=os.environ.get("SVEXPORT_KERNELS") == "verbose",
            )
        except (RuntimeError, subprocess.SubprocessError) as error:
            raise PluginBuildError(
                f"they do not compile here ({_first_error(str(error))}); SVEXPORT_KERNELS=verbose shows what the"
                " compilers print, SVEXPORT_KERNELS=0 switches the kernels off"
            ) from error
        os.replace(Path(build, f"{name}.so"), library)


def _build_key() -> str:
    """A hash of everything that the compiled extension depends on."""
    digest = hashlib.sha256(repr(FLAGS).encode())
    for path in sorted(p for folder in ("cuda", "torch") for p in (CSRC / folder).rglob("*") if p.is_file()):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(_architectures().encode())
    version = re.sub(r"[^\w.]+", "-", f"{__version__}-torch{torch.__version__}-cuda{torch.version.cuda}")
    return f"{version}-py{sys.version_info[0]}{sys.version_info[1]}-{digest.hexdigest()[:16]}"


def _first_error(output: str) -> str:
    """The compiler's error line, or Python's first line if no compiler ran."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no reason given"]
    return next((line for line in lines if re.search(r"\b(error|fatal)\b *:|\bfatal +:", line)), lines[0])


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Holds a lock of the operating system, which is released even if the process dies."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise PluginBuildError(
            f"the cache cannot be written ({error}); set SVEXPORT_CACHE to a folder that can"
        ) from error
    with lock as file:
        try:
            import fcntl
        except ImportError:  # Windows: processes that start at once may compile twice
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable for the duration of the context."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _progress() -> Iterator[Any]:
    """A spinner on a terminal, nothing in a pipe."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status("Compiling svexport's CUDA kernels for this GPU: once, for a minute or two"):
        yield
