from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from filelock import FileLock

from svexport.tensorrt import library
from tests.tensorrt.conftest import CUDA
from tests.tensorrt.parser.parser import VARIABLE, Parsed, Parser, compile_parser, configured


@pytest.fixture(scope="session")
def parser(headers: library.Headers, shared: Path) -> Parser:
    """NVIDIA's parser for the headers of TENSORRT_ROOT."""
    objects = configured()
    if objects is None:
        pytest.skip(
            f"needs NVIDIA's ONNX parser: set {VARIABLE} to a folder with NvOnnxParser.h and what it compiles to"
        )
    folder = shared / "parser"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        return Parser(compile_parser(headers, objects, folder, CUDA), headers.version)


@pytest.fixture
def parse(parser: Parser, tmp_path: Path) -> Callable[..., Parsed]:
    """Parses one model."""

    def one(model: onnx.ModelProto, plugins: Path | None = None) -> Parsed:
        onnx.save(model, tmp_path / "model.onnx")
        return parser.read([tmp_path / "model.onnx"], plugins)[0]

    return one
