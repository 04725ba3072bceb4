"""The CUDA sources, compiled once for all tests that want them, whichever process is first."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock
from torch.utils import cpp_extension

from svexport.ops import _cuda

NVCC = shutil.which("nvcc") or (cpp_extension.CUDA_HOME and shutil.which("nvcc", path=f"{cpp_extension.CUDA_HOME}/bin"))
CXX = shutil.which("g++")
_TOOLKITS = [Path(NVCC).resolve().parents[1]] if NVCC else []
_TOOLKITS += [Path(cpp_extension.CUDA_HOME or "/usr/local/cuda")]
INCLUDES = [
    path.parent
    for root in _TOOLKITS
    for path in [*root.glob("include/cuda_runtime_api.h"), *root.glob("targets/*/include/cuda_runtime_api.h")]
]

# Machine code for its registers and spills, PTX, uncompressed, for the emulation.
_FLAGS = ("-gencode", "arch=compute_90a,code=[sm_90a,compute_90a]", "--no-compress", "-Xptxas", "-v")


class Compiled(NamedTuple):
    object: Path
    report: str  # of ptxas


def run(*command: object) -> str:
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stderr


def compiled(source: Path, builds: Path) -> Compiled:
    """A kernel's source for sm_90a, in the folder that all test processes share."""
    target, report = builds / f"{source.stem}.o", builds / f"{source.stem}.txt"
    with FileLock(builds / f"{source.stem}.lock"):
        if not report.exists():
            flags = ("-std=c++17", *_cuda.FLAGS["nvcc"], *_FLAGS, "-Xcompiler", "-fPIC", f"-I{_cuda.CSRC / 'cuda'}")
            report.write_text(run(NVCC, *flags, "-c", source, "-o", target))
    return Compiled(target, report.read_text())


def linked(name: str, objects: Sequence[Path], builds: Path, *flags: object) -> Path:
    """A shared library of ``objects``, in the same folder."""
    target = builds / f"{name}.so"
    with FileLock(builds / f"{name}.lock"):
        if not target.exists():
            part = target.with_suffix(".part")
            run(CXX, "-shared", *objects, *flags, "-o", part)
            os.replace(part, target)
    return target
