from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from svexport.tensorrt import library
from tests.tensorrt.host import SOURCES, Host, compile_host

CUDA = Path(cpp_extension.CUDA_HOME or "/usr/local/cuda")


@pytest.fixture(scope="session")
def headers() -> library.Headers:
    """The C++ headers of a TensorRT."""
    if not os.environ.get("TENSORRT_ROOT"):
        pytest.skip("needs the C++ headers of TensorRT: set TENSORRT_ROOT to a folder with its include/")
    if not (CUDA / "include" / "cuda_runtime_api.h").is_file():
        pytest.skip("needs the headers of the CUDA runtime: set CUDA_HOME")
    return library.find_headers()


@pytest.fixture(scope="session")
def plugin_library(headers: library.Headers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin library; without a GPU one without kernels, of which everything but enqueue works."""
    path = tmp_path_factory.mktemp("library") / library.library_name(headers.version[0])
    if torch.cuda.is_available():
        intercept = SOURCES / "intercept.cpp"
        names = re.findall(r"^(?:FORBIDDEN|TIMED)\((\w+)", intercept.read_text(), re.MULTILINE)
        wrapped = [flag for name in names for flag in ("-Xlinker", f"--wrap={name}")]
        compiled = path.with_name("intercept.o")
        subprocess.run(
            ["g++", "-std=c++17", "-O2", "-fPIC", "-isystem", CUDA / "include", "-c", intercept, "-o", compiled],
            check=True,
        )
        library.link([*library.compile_objects(headers), compiled], path, wrapped)
    else:
        sources = sorted(library.CSRC.glob("tensorrt/*.cpp"))
        include = ["-I", library.CSRC / "cuda", "-isystem", headers.folder, "-isystem", CUDA / "include"]
        flags = ["-std=c++17", "-O0", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
        subprocess.run(["g++", *flags, *include, *sources, "-o", path, "-ldl"], check=True)
    return path


@pytest.fixture(scope="session")
def host(headers: library.Headers, plugin_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Host:
    """The plugin library loaded in the host."""
    return Host(compile_host(headers, tmp_path_factory.mktemp("host"), CUDA), plugin_library)
