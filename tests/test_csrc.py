"""The CUDA sources, as far as compilers can check them without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from svexport.ops import _cuda
from tests.csrc import CXX, INCLUDES, NVCC, built, compiled

KERNELS = sorted(_cuda.CSRC.glob("cuda/**/*.cu"))
HEADERS = sorted(_cuda.CSRC.glob("cuda/**/*.h"))
BINDINGS = sorted(_cuda.CSRC.glob("torch/*.cpp"))

needs_nvcc = pytest.mark.skipif(not NVCC, reason="needs nvcc")
needs_cxx = pytest.mark.skipif(not CXX, reason="needs g++")
needs_headers = pytest.mark.skipif(not (CXX and INCLUDES), reason="needs g++ and the headers of a CUDA toolkit")
every_kernel = pytest.mark.parametrize(
    "source", [pytest.param(path, id=path.stem, marks=pytest.mark.kernels(path)) for path in KERNELS]
)

# Of any kernel for sm_90. What is spilled are a few addresses that are kept across a loop; data is not.
SPILLED_BYTES = 96


def test_kernels_know_neither_torch_nor_tensorrt() -> None:
    """What they include is theirs, or of the CUDA toolkit or the C++ library."""
    files = sorted(path for path in (_cuda.CSRC / "cuda").rglob("*") if path.suffix in (".cu", ".cuh", ".h"))
    own = {str(path.relative_to(_cuda.CSRC / "cuda")) for path in files}
    for path in files:
        for quoted, system in re.findall(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', path.read_text(), re.MULTILINE):
            assert not quoted or quoted in own, f"{path.name} includes {quoted}"
            assert not re.search(r"torch|aten|c10|nvinfer", system, re.IGNORECASE), f"{path.name} includes {system}"


@needs_headers
def test_headers_of_the_launchers_are_plain_cpp() -> None:
    """Each on its own: no device code, nothing left for the one who includes it to include."""
    paths = [*INCLUDES, _cuda.CSRC / "cuda"]
    flags = ("-std=c++17", "-Wall", "-Werror", "-fsyntax-only", *(f"-I{path}" for path in paths))
    for header in HEADERS:
        built("checked", (CXX, *flags, "-x", "c++", "-include", header, os.devnull), [header])


@needs_nvcc
@pytest.mark.whole
@every_kernel
def test_compiles_without_spilling_data(source: Path) -> None:
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", compiled(source).report)]
    assert max(spilled, default=0) <= SPILLED_BYTES


@needs_nvcc
@every_kernel
def test_compiles_for_the_oldest_architecture(source: Path) -> None:
    oldest = _cuda.architectures().split()[0].replace(".", "")
    if f"compute_{oldest}" not in subprocess.run([NVCC, "--list-gpu-arch"], capture_output=True, text=True).stdout:
        pytest.skip(f"this nvcc does not know compute_{oldest}")
    # With few optimizations, or none where nvcc has no such option: sooner done.
    known = "--Ofast-compile" in subprocess.run([NVCC, "--help"], capture_output=True, text=True).stdout
    quick = ["-Ofc", "max"] if known else ["-G"]
    include = f"-I{_cuda.CSRC / 'cuda'}"
    built("oldest.o", (NVCC, "-std=c++17", *quick, f"-arch=sm_{oldest}", include, "-c", source), [source])


@needs_headers
def test_nodes_of_onnxruntime_need_no_tensorrt() -> None:
    """The sources of the plugins with the plain types of csrc/onnxruntime in place of TensorRT's headers."""
    folders = [_cuda.CSRC / name for name in ("onnxruntime", "cuda", "tensorrt")]
    flags = (
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fsyntax-only",
        *(f"-I{path}" for path in (*folders, *INCLUDES)),
    )
    nodes = [path for path in sorted(_cuda.CSRC.glob("tensorrt/*.cpp")) if not path.name.startswith("interface")]
    for source in (*nodes, _cuda.CSRC / "onnxruntime" / "einsum.cpp"):
        built("checked", (CXX, *flags, source), [source])


def test_every_operator_is_compiled() -> None:
    unit = _cuda.CSRC / "torch" / "operators.cpp"
    included = re.findall(r'#include "(\w+\.cpp)"', unit.read_text())
    assert included == sorted(path.name for path in BINDINGS if path.stem not in ("autograd", "operators"))
    sources = _cuda.sources()
    assert {unit, unit.with_name("autograd.cpp"), *KERNELS} == set(sources)
    assert tuple(path.stem for path in sources[: len(_cuda.LONGEST)]) == _cuda.LONGEST


@needs_headers
def test_bindings_fit_torch_and_the_launchers() -> None:
    paths = [*cpp_extension.include_paths(), *INCLUDES, _cuda.CSRC / "cuda"]
    # The macro stands for a header that only CUDA builds of torch have.
    flags = ("-std=c++20", "-fsyntax-only", "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE", *(f"-I{path}" for path in paths))
    unit = _cuda.CSRC / "torch" / "operators.cpp"
    built("checked", (CXX, *flags, unit), [unit])


@needs_cxx
def test_autograd_of_the_extension(tmp_path: Path) -> None:
    """Built for CPU tensors, it passes the tests of autograd that Python's passes."""
    source, torch_folder = _cuda.CSRC / "torch" / "autograd.cpp", Path(torch.__file__).parent
    flags = ["-std=c++17", "-shared", "-fPIC", "-DSVEXPORT_AUTOGRAD=AutogradCPU"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    flags += [f"-I{path}" for path in cpp_extension.include_paths()]
    link = (f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu", "-ltorch")
    library = built("autograd.so", (CXX, *flags, source, *link), [source])
    (tmp_path / "autograd_plugin.py").write_text(
        "import torch, svexport.ops\n"
        f"torch.ops.load_library({str(library)!r})\n"
        "assert 'AutogradCPU' in torch._C._dispatch_dump('svexport::einsum')\n"
    )
    tests = Path(__file__).parent / "ops" / "test_every_op.py"
    wanted = "one_tensor_alone or gradient_of_gradients or transforms or recorded or in_place or saved_tensor_hooks"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "autograd_plugin", "-p", "no:cacheprovider", tests, "-k", wanted],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
