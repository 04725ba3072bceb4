from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch.utils import cpp_extension

import svexport
from svexport.graph.nodes import svexport_nodes
from svexport.tensorrt import library
from tests.tensorrt.host import SOURCES, Host, compile_host, without_launchers
from tests.tensorrt.reference.fixtures import files, tensorrt

__all__ = ["files", "held", "headers", "host", "plugin_library", "tensorrt"]

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
    """The plugin library; without a GPU one whose launchers do nothing."""
    folder = tmp_path_factory.mktemp("library")
    path = folder / library.library_name(headers.version[0])
    if torch.cuda.is_available():
        intercept = SOURCES / "intercept.cpp"
        names = re.findall(r"^(?:FORBIDDEN|EXPECTED)\((\w+)", intercept.read_text(), re.MULTILINE)
        wrapped = [flag for name in names for flag in ("-Xlinker", f"--wrap={name}")]
        flags = ["-std=c++17", "-O2", "-fPIC", "-isystem", CUDA / "include"]
        subprocess.run(["g++", *flags, "-c", intercept, "-o", folder / "intercept.o"], check=True)
        library.link([*library.compile_objects(headers), folder / "intercept.o"], path, wrapped)
    else:
        sources = [*sorted(library.CSRC.glob("tensorrt/*.cpp")), SOURCES / "stand_in.cpp"]
        include = ["-I", library.CSRC / "cuda", "-isystem", headers.folder, "-isystem", CUDA / "include"]
        flags = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
        subprocess.run(["g++", *flags, *include, "-c", *sources], cwd=folder, check=True)
        objects = sorted(folder.glob("*.o"))
        link = ["-shared", "-Wl,-Bsymbolic,--no-undefined", *without_launchers(objects)]
        subprocess.run(["g++", *link, *objects, "-ldl", "-o", path], check=True)
    return path


@pytest.fixture(scope="session")
def host(headers: library.Headers, plugin_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Host:
    """The plugin library loaded in the host."""
    return Host(compile_host(headers, tmp_path_factory.mktemp("host"), CUDA), plugin_library)


@pytest.fixture(scope="session")
def held(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., onnx.NodeProto]:
    """Makes the node of a decoder, exported with these options, whose weights are attributes."""

    def export(decoder: svexport.ops.TransformerDecoder, **options: Any) -> onnx.NodeProto:
        path = tmp_path_factory.mktemp("held") / "decoder.onnx"
        svexport.export(decoder, path=path, weights="attributes", target="8.6", verify=False, **options)
        return next(svexport_nodes(onnx.load(path)))

    return export
