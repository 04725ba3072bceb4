"""Places that cannot be written to, paths that are none, packages that are absent: an error says what to do, and
nothing half written is left."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import svexport
from svexport.graph import reading
from svexport.graph import saving as module

X = torch.rand(2, 3)


def test_full_disk(tmp_path, monkeypatch) -> None:
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "m.onnx").write_bytes(b"before")
    monkeypatch.setattr("svexport.graph.wire.write_model", full)
    with pytest.raises(svexport.ExportError, match=r"cannot write .*m\.onnx: No space left on device; make room"):
        svexport.export(nn.Linear(3, 3), X, tmp_path / "m.onnx")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before"]


def test_errors_of_the_model_are_its_own(tmp_path) -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Path("/absent/weights").read_bytes()
            return x

    with pytest.raises(Exception, match="weights") as caught:
        svexport.export(Reads(), X, tmp_path / "m.onnx")
    assert "make room" not in str(caught.value)


LIMITED = """
import resource, sys
import torch, svexport
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    svexport.export(torch.nn.Linear(300, 300), torch.rand(1, 300), sys.argv[1], opset=11)
except svexport.ExportError as error:
    print(error)
"""
ABSENT = """
import sys
sys.modules[sys.argv[1]] = None
import torch, svexport
try:
    svexport.export(torch.nn.Linear(3, 3), torch.rand(1, 3), sys.argv[2], opset=18)
except svexport.BackendNotAvailableError as error:
    print(error)
"""


def output_of(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit of file sizes")
def test_limit_of_file_sizes(tmp_path) -> None:
    assert "File too large; make room there" in output_of(LIMITED, str(tmp_path / "m.onnx"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["onnxscript", "onnxruntime"])
def test_absent_packages(package, tmp_path) -> None:
    assert "pip install" in output_of(ABSENT, package, str(tmp_path / "m.onnx"))
    assert not list(tmp_path.iterdir())


READERS = {
    "check": lambda path: svexport.check(path, "8.6"),
    "compare": lambda path: svexport.compare(nn.ReLU(), path, X),
    "export": lambda path: svexport.export(nn.ReLU(), X, path),
    "load": svexport.load,
    "lower": svexport.lower,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["a\0b.onnx", "pipe.onnx", "folder.onnx", "file/m.onnx", "a" * 300 + ".onnx"])
def test_paths_that_are_no_files(name, reader, tmp_path) -> None:
    """A pipe is not waited for."""
    os.mkfifo(tmp_path / "pipe.onnx")
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(svexport.SvexportError):
        READERS[reader](f"{tmp_path}/{name}")
    assert sorted(tmp_path.iterdir()) == before


def test_device(tmp_path) -> None:
    with pytest.raises(svexport.SvexportError, match="pipe or a device"):
        reading.check_regular(Path(os.devnull))
    with pytest.raises(svexport.ExportError, match="no regular file"):
        module.check_place(Path(os.devnull))
