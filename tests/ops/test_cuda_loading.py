"""How the CUDA kernels are loaded, with stand-ins for everything that needs a GPU or a compiler."""

from __future__ import annotations

import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from svexport.ops import _cuda, fast_sigmoid

COMPILERS_SAY = """Error building extension 'svexport_kernels': [1/3] nvcc --expt-relaxed-constexpr -c inverse.cu
FAILED: [code=1] inverse.cuda.o
/src/inverse.cu(12): error: identifier "__shfl" is undefined
1 error detected in the compilation of "/src/inverse.cu".
ninja: build stopped: subcommand failed.
"""


@pytest.fixture
def machine(monkeypatch, tmp_path) -> Path:
    """Nothing loaded and nothing in the cache; a CUDA toolkit, ninja, and compilers that write an empty library."""
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("SVEXPORT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SVEXPORT_KERNELS", raising=False)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(_cuda, "_loaded", None)
    monkeypatch.setattr(_cuda.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(nvcc.parent.parent))
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: True)
    return tmp_path


@pytest.fixture
def compiled(machine, monkeypatch) -> list[list[str]]:
    """The sources of each compilation."""
    calls: list[list[str]] = []

    def load(name: str, sources: list[str], *, build_directory: str, **options: object) -> None:
        calls.append(sources)
        Path(build_directory, f"{name}.so").touch()

    monkeypatch.setattr(cpp_extension, "load", load)
    return calls


@pytest.fixture
def loaded(monkeypatch) -> list[str]:
    """The libraries that torch was told to load; those it compiled it loads of itself."""
    paths: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", paths.append)
    return paths


def no_nvcc(patch: pytest.MonkeyPatch, machine: Path) -> None:
    shutil.rmtree(machine / "cuda")


def no_toolkit(patch: pytest.MonkeyPatch, machine: Path) -> None:
    patch.setattr(cpp_extension, "CUDA_HOME", None)


def no_ninja(patch: pytest.MonkeyPatch, machine: Path) -> None:
    patch.setattr(cpp_extension, "is_ninja_available", lambda: False)


def compile_error(patch: pytest.MonkeyPatch, machine: Path) -> None:
    def load(name: str, sources: list[str], *, build_directory: str, **options: object) -> None:
        Path(build_directory, "inverse.cuda.o").touch()
        raise RuntimeError(COMPILERS_SAY)

    patch.setattr(cpp_extension, "load", load)


def other_toolkit(patch: pytest.MonkeyPatch, machine: Path) -> None:
    def load(*args: object, **options: object) -> None:
        raise RuntimeError("The detected CUDA version (11.8) mismatches the version that was used to compile PyTorch")

    patch.setattr(cpp_extension, "load", load)


def no_cache(patch: pytest.MonkeyPatch, machine: Path) -> None:
    (machine / "cache").touch()


def broken_library(patch: pytest.MonkeyPatch, machine: Path) -> None:
    folder = machine / "cache" / _cuda._build_key()
    folder.mkdir(parents=True)
    (folder / "svexport_kernels.so").write_text("no library")


@pytest.mark.parametrize(
    ("broken", "advice"),
    [
        (no_nvcc, "no nvcc was found .* install the CUDA toolkit .* or set CUDA_HOME"),
        (no_toolkit, "no nvcc was found .* install the CUDA toolkit .* or set CUDA_HOME"),
        (no_ninja, "no ninja was found .* pip install ninja"),
        (compile_error, r"/src/inverse.cu\(12\): error: identifier .* SVEXPORT_KERNELS=verbose shows what"),
        (other_toolkit, r"do not compile here \(The detected CUDA version \(11.8\) mismatches"),
        (no_cache, "the cache cannot be written .*; set SVEXPORT_CACHE"),
        (broken_library, "svexport_kernels.so"),
    ],
)
def test_without_kernels_the_reference_runs_after_one_warning(
    machine: Path, monkeypatch: pytest.MonkeyPatch, broken: Callable, advice: str
) -> None:
    broken(monkeypatch, machine)
    x = torch.randn(7)
    expected = fast_sigmoid(x)
    assert not _cuda.tried()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with pytest.warns(UserWarning, match=f"without its kernels, which is correct but slower: .*{advice}"):
        assert torch.equal(fast_sigmoid(x), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(fast_sigmoid(x), expected)
    assert _cuda.tried()
    assert not _cuda.load()
    left = {path.name for path in (machine / "cache").glob("*/*")}
    assert left <= {"lock", "svexport_kernels.so"}, "what was half built is still there"


def test_kernels_can_be_switched_off(machine: Path, compiled: list, loaded: list, monkeypatch) -> None:
    monkeypatch.setenv("SVEXPORT_KERNELS", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not _cuda.load()
    assert not compiled
    assert not loaded
    assert not (machine / "cache").exists()


def test_compiled_once_then_loaded_from_the_cache(machine: Path, compiled: list, loaded: list, monkeypatch) -> None:
    assert _cuda.load()
    assert _cuda.load()
    assert len(compiled) == 1
    assert set(compiled[0]) == {str(path) for path in _cuda.sources()}
    assert not loaded
    no_nvcc(monkeypatch, machine)
    no_ninja(monkeypatch, machine)
    monkeypatch.setattr(_cuda, "_loaded", None)  # another process
    assert _cuda.load()
    assert len(compiled) == 1
    (library,) = loaded
    assert Path(library).is_file()
    assert Path(library).is_relative_to(machine / "cache")


def test_an_extension_built_ahead_of_time_comes_first(machine: Path, compiled: list, loaded: list, monkeypatch) -> None:
    class Spec:
        origin = "/site-packages/svexport/_C.so"

    monkeypatch.setattr(_cuda.importlib.util, "find_spec", lambda name: Spec if name == "svexport._C" else None)
    assert _cuda.load()
    assert loaded == [Spec.origin]
    assert not compiled


def test_processes_that_start_at_once_compile_once(machine: Path, monkeypatch, loaded: list) -> None:
    """The lock is the operating system's, so threads that bypass our own stand for processes."""
    compiled = []

    def load(name: str, sources: list[str], *, build_directory: str, **options: object) -> None:
        compiled.append(build_directory)
        time.sleep(0.2)
        Path(build_directory, f"{name}.so").touch()

    monkeypatch.setattr(cpp_extension, "load", load)
    threads = [threading.Thread(target=_cuda._load_from_cache) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1
    assert len(loaded) == 3
    assert not Path(compiled[0]).exists()


def test_the_lock_of_a_process_that_died_is_free(machine: Path, compiled: list) -> None:
    folder = machine / "cache" / _cuda._build_key()
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    (folder / f"build-{os.getpid()}").mkdir()
    assert _cuda.load()
    assert len(compiled) == 1


def test_the_key_changes_with_everything_the_library_depends_on(machine: Path, monkeypatch) -> None:
    csrc = machine / "csrc"
    for folder in ("cuda", "torch", "tensorrt"):
        (csrc / folder).mkdir(parents=True)
        (csrc / folder / "op.h").write_text(folder)
    monkeypatch.setattr(_cuda, "CSRC", csrc)
    keys = [_cuda._build_key()]

    def changed() -> bool:
        keys.append(_cuda._build_key())
        return len(set(keys)) == len(keys)

    assert _cuda._build_key() == keys[0]
    (csrc / "tensorrt" / "op.h").write_text("plugins are no part of it")
    assert _cuda._build_key() == keys[0]
    for folder in ("cuda", "torch"):
        (csrc / folder / "op.h").write_text("changed")
        assert changed()
    (csrc / "cuda" / "new.cu").touch()
    assert changed()
    monkeypatch.setattr(_cuda, "FLAGS", {**_cuda.FLAGS, "nvcc": ["-O0"]})
    assert changed()
    monkeypatch.setattr(torch, "__version__", "2.99.0+cu999")
    assert changed()
    monkeypatch.setattr(torch.version, "cuda", "99.9")
    assert changed()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.7")
    assert changed()
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (12, 0))
    assert changed()
    assert all(set(key) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") for key in keys)
