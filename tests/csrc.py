"""Compiles C++ and CUDA sources and keeps the results in the user's cache, shared by all runs and checkouts.

The key of an entry is a hash of the command, the compilers, and the sources with all of ours that they include.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock
from torch.utils import cpp_extension

from svexport.ops import _cuda

ROOT = Path(__file__).parents[1]
CACHE = _cuda.cache_folder() / "tests"
KEPT_DAYS = 30

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
_FLAGS = ("--no-compress", "-Xptxas", "-v")


class Compiled(NamedTuple):
    object: Path
    report: str  # of ptxas


def run(*command: object) -> str:
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stderr


def built(name: str, command: Sequence[object], sources: Sequence[Path]) -> Path:
    """The file that a command makes of ``sources`` where ``-o name`` is added to it, from the cache if it is there.

    Where the sources are counts as little as where this checkout is.
    What the compiler said lies beside it: ``name`` with the suffix ``.txt``.
    """
    words = [word.name if word in sources else str(word).replace(str(ROOT), "") for word in command]
    folder = CACHE / "built" / digest(repr((name, words)), compilers("-march=native" in words), *sources)
    target = folder / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not target.exists():
            part = folder.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            said = run(*command, "-o", part / name)
            (part / name).touch()  # of a command that only checks
            (part / name).with_suffix(".txt").write_text(said)
            os.replace(part, folder)
            _prune()
    os.utime(folder)
    return target


def compiled(source: Path, architecture: str = "90a") -> Compiled:
    """A kernel's source for one architecture."""
    target_of = ("-gencode", f"arch=compute_{architecture},code=[sm_{architecture},compute_{architecture}]")
    flags = ("-std=c++17", *_cuda.FLAGS["nvcc"], *target_of, *_FLAGS, "-Xcompiler", "-fPIC", f"-I{_cuda.CSRC / 'cuda'}")
    target = built(f"{source.stem}.o", (NVCC, *flags, "-c", source), [source])
    return Compiled(target, target.with_suffix(".txt").read_text())


def linked(name: str, objects: Sequence[Path]) -> Path:
    """A shared library of objects that were built here."""
    return built(f"{name}.so", (CXX, "-shared", *objects), ())  # the objects' folders are named by their hashes


def digest(*parts: str | Path) -> str:
    """Of texts, and of files with all of ours that they include."""
    result = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            result.update(part.encode())
        else:
            for path in sorted(included(part)):
                result.update(path.name.encode() + path.read_bytes())
    return result.hexdigest()[:32]


def included(source: Path) -> set[Path]:
    """A source, and what it includes of our own."""
    found: set[Path] = set()
    todo = [source.resolve()]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        for name in re.findall(r'^\s*#\s*include\s*["<]([^">]+)[">]', path.read_text(), re.MULTILINE):
            places = [path.parent, _cuda.CSRC, _cuda.CSRC / "cuda", _cuda.CSRC / "torch"]
            todo += [place for folder in places if (place := (folder / name).resolve()).is_file()]
    return found


@functools.cache
def compilers(native: bool = False) -> str:
    """Those here, and torch, whose headers some sources include; ``native``: the processor too."""
    commands = [[tool, "--version"] for tool in (NVCC, CXX) if tool]
    commands += [[CXX, "-march=native", "-Q", "--help=target"]] if native else []
    said = [subprocess.run(command, capture_output=True, text=True, check=False).stdout for command in commands]
    return "\n".join([*said, torch.__version__])


def _prune() -> None:
    """Nothing is kept that no run has wanted for a while."""
    for folder in (CACHE / "built").iterdir():
        if folder.is_dir() and folder.stat().st_mtime < time.time() - KEPT_DAYS * 86400:
            shutil.rmtree(folder, ignore_errors=True)
