"""Compiles the C++ plugin library for the TensorRT at hand, finds it again, and loads it."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from svexport.errors import PluginBuildError
from svexport.ops import _cuda

__all__ = ["Headers", "Library", "build", "find_headers", "find_nvcc", "libraries", "library_name", "plugins_folder"]

CSRC = _cuda.CSRC
FLAGS = ["-std=c++17", "-O3", "-lineinfo", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra"]
LINK_FLAGS = ["-shared", "-cudart", "static", "-Xlinker", "--exclude-libs=ALL,--no-undefined"]

_NEEDED = ("NvInferVersion.h", "NvInferRuntime.h", "NvInferRuntimeCommon.h", "NvInferRuntimePlugin.h", "NvInferImpl.h")
_FOLDERS = ("include", "include/x86_64-linux-gnu", "include/aarch64-linux-gnu", ".")


@dataclass(frozen=True)
class Headers:
    """The C++ headers of a TensorRT.

    Attributes:
        folder: the folder that contains NvInferRuntime.h.
        version: (major, minor).
    """

    folder: Path
    version: tuple[int, int]


@dataclass(frozen=True)
class Library:
    """A compiled plugin library.

    Attributes:
        path: the shared object.
        major: major version of the TensorRT that can load it.
    """

    path: Path
    major: int


def find_headers(root: str | os.PathLike[str] | None = None) -> Headers:
    """The headers in a TensorRT folder: ``root``, else the environment's ``TENSORRT_ROOT``, else the system's.

    Raises:
        PluginBuildError: if a file is missing; names it and says where to get it.
    """
    given = root or os.environ.get("TENSORRT_ROOT")
    base = Path(given) if given else Path("/usr")
    folder = next((base / f for f in _FOLDERS if (base / f / "NvInferRuntime.h").is_file()), None)
    if folder is None:
        raise PluginBuildError(
            f"{base / 'include' / 'NvInferRuntime.h'} does not exist. The plugins are compiled against the C++ headers "
            "of TensorRT, which pip's tensorrt does not have: install libnvinfer-headers-dev or unpack the tar archive "
            "of your TensorRT version (https://developer.nvidia.com/tensorrt/download), and give its folder as "
            "--tensorrt-root or TENSORRT_ROOT"
        )
    found = folder / "NvInferVersion.h"
    version = _version(found.read_text()) if found.is_file() else None
    needed = [f for f in _NEEDED if f != "NvInferRuntimePlugin.h" or version is None or version >= (8, 6)]
    for name in needed:
        if not (folder / name).is_file():
            raise PluginBuildError(
                f"{folder / name} does not exist, although {folder / 'NvInferRuntime.h'} does: the headers of TensorRT "
                "are not complete there; install libnvinfer-headers-dev or unpack its tar archive again"
            )
    if version is None or version < (8, 4):
        raise PluginBuildError(
            f"{found} is of TensorRT {'.'.join(map(str, version)) if version else 'an unknown version'}; "
            "the plugins need 8.4 or newer"
        )
    return Headers(folder.resolve(), version)


def _version(text: str) -> tuple[int, int] | None:
    numbers = []
    for part in ("MAJOR", "MINOR"):
        # Newer headers define NV_TENSORRT_MAJOR by TRT_MAJOR_ENTERPRISE.
        match = re.search(rf"#define\s+(?:NV_TENSORRT_{part}|TRT_{part}_ENTERPRISE)\s+(\d+)", text)
        if not match:
            return None
        numbers.append(int(match[1]))
    return numbers[0], numbers[1]


def library_name(major: int) -> str:
    """The file name of the plugin library for a major version of TensorRT."""
    return f"libsvexport_tensorrt{major}.so"


def build(
    tensorrt_root: str | os.PathLike[str] | None = None,
    *,
    architectures: Sequence[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Library:
    """Compiles the plugin library with nvcc.

    Args:
        tensorrt_root: a TensorRT folder with its ``include``; see :func:`find_headers`.
        architectures: compute capabilities, ``["8.7", "9.0"]``; by default those of this machine's GPUs, or, without a
            GPU, all those of a distributed build.
        output: the folder for the library; by default svexport's cache, where :func:`libraries` finds it.
        progress: called repeatedly with the number of files compiled and the total.

    Raises:
        PluginBuildError: if headers or nvcc are missing, or a file does not compile.
    """
    headers = find_headers(tensorrt_root)
    folder = Path(output) if output else plugins_folder()
    path = folder / library_name(headers.version[0])
    link(compile_objects(headers, architectures, progress), path)
    return Library(path, headers.version[0])


def compile_objects(
    headers: Headers,
    architectures: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Compiles the object files of the library; reuses those of earlier builds."""
    include = [CSRC / "cuda", CSRC / "tensorrt"]
    sources = [*sorted(CSRC.glob("cuda/**/*.cu")), *sorted(CSRC.glob("tensorrt/*.cpp"))]
    return compile_sources(sources, include, headers.folder, architectures, progress)


def compile_sources(
    sources: Sequence[Path],
    include: Sequence[Path],
    system: Path,
    architectures: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Compiles sources to object files; reuses those of earlier builds.

    Args:
        sources: ``.cu`` files of csrc/cuda, which include only headers from there, and ``.cpp`` files.
        include: folders of svexport's headers; the first is csrc/cuda.
        system: the folder of the runtime's headers.
        architectures: see :func:`build`.
        progress: see :func:`build`.
    """
    nvcc = find_nvcc()
    flags = [*FLAGS, *gencode(architectures)]
    included = [*(f"-I{folder}" for folder in include), "-isystem", str(system)]
    depends = {".cu": _text(include[0])}  # the same for every runtime
    depends[".cpp"] = "".join(map(_text, include)) + _text(system, "*")
    done = 0

    def compiled(source: Path) -> Path:
        nonlocal done
        key = hashlib.sha256(repr((nvcc, flags, depends[source.suffix])).encode() + source.read_bytes())
        result = plugins_folder() / "objects" / f"{source.stem}-{key.hexdigest()[:16]}.o"
        if not result.is_file():
            result.parent.mkdir(parents=True, exist_ok=True)
            partial = result.with_suffix(f".{os.getpid()}.o")
            _run([nvcc, *flags, *included, "-c", str(source), "-o", str(partial)])
            os.replace(partial, result)
        done += 1
        if progress:
            progress(done, len(sources))
        return result

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compiled, _cuda.longest_first(sources)))


def link(objects: Sequence[Path], path: Path, flags: Sequence[str] = ()) -> None:
    """Links object files to a shared library."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.so")
    _run([find_nvcc(), *LINK_FLAGS, *flags, *map(str, objects), "-ldl", "-o", str(partial)])
    os.replace(partial, path)


def libraries() -> list[Library]:
    """The plugin libraries that :func:`build` left in svexport's cache, newest TensorRT first."""
    found = [
        (int(m[1]), p)
        for p in plugins_folder().glob("*.so")
        if (m := re.fullmatch(r"libsvexport_tensorrt(\d+)\.so", p.name))
    ]
    return [Library(path, major) for major, path in sorted(found, reverse=True)]


def plugins_folder() -> Path:
    """The folder for compiled plugins."""
    return _cuda.cache_folder() / "tensorrt"


def _text(folder: Path, pattern: str = "**/*") -> str:
    """A hash of all headers in a folder and its subfolders."""
    digest = hashlib.sha256()
    found = folder.glob(pattern)
    for path in sorted(p for p in found if p.suffix in (".h", ".cuh")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def find_nvcc() -> str:
    """The path of nvcc.

    Raises:
        PluginBuildError: if it is not found.
    """
    from torch.utils import cpp_extension

    homes = [os.path.join(h, "bin") for h in (os.environ.get("CUDA_HOME"), cpp_extension.CUDA_HOME) if h]
    found = next((n for path in [*homes, None] if (n := shutil.which("nvcc", path=path))), None)
    if found is None:
        raise PluginBuildError(
            "no nvcc was found to compile the plugins; install the CUDA toolkit of the version your TensorRT is for, "
            "and put its bin on PATH or set CUDA_HOME"
        )
    return found


def gencode(architectures: Sequence[str] | None) -> list[str]:
    """nvcc's flags for compute capabilities; None: those of this machine's GPUs, or all if there is no GPU."""
    if architectures is None:
        found = sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})
        architectures = [f"{a}.{b}" for a, b in found] or _cuda.architectures().split()
    flags = []
    for name in _cuda.with_features(" ".join(architectures)).split():
        match = re.fullmatch(r"(\d+)\.?(\da?)(\+PTX)?", name)
        if not match:
            raise PluginBuildError(f"an architecture is a compute capability such as 8.7 or 9.0+PTX; got {name!r}")
        number = match[1] + match[2]
        flags += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
        if match[3]:
            flags += ["-gencode", f"arch=compute_{number},code=compute_{number}"]
    return flags


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
        first = next((i for i, line in enumerate(lines) if "error" in line), 0)
        raise PluginBuildError("\n".join([f"{' '.join(command)} failed:", *lines[first : first + 5]]))
