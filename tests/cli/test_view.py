"""svexport view: it starts Netron if that is installed, and otherwise says what to install."""

from __future__ import annotations

import sys
import types

import pytest


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(b"anything: it is Netron's to read")
    return path


@pytest.fixture
def netron(monkeypatch):
    """Notes what it is asked, and is interrupted at once."""
    module = types.ModuleType("netron")
    module.asked = []

    def start(file, address=None, browse=True):
        module.asked.append((file, address, browse))
        return "localhost", address or 8080

    def wait():
        raise KeyboardInterrupt

    module.start, module.wait, module.stop = start, wait, lambda: module.asked.append("stopped")
    monkeypatch.setitem(sys.modules, "netron", module)
    return module


def test_it_is_shown_until_ctrl_c(run, file, netron):
    result = run("view", file, "--port", 9000, "--no-browser", "--json")
    assert result.code == 0, result.err
    assert netron.asked == [(str(file), 9000, False), "stopped"]
    assert result.json["address"] == "http://localhost:9000"
    assert run("view", file).out.startswith(f"served {file} at http://localhost:8080")
    assert netron.asked[2] == (str(file), None, True)


def test_without_netron(run, file, monkeypatch):
    monkeypatch.setitem(sys.modules, "netron", None)
    result = run("view", file)
    assert result.code == 1
    assert "pip install netron" in result.err
    assert "netron.app" in result.err


def test_other_files(run, tmp_path, netron):
    assert "no such file" in run("view", tmp_path / "none.onnx").err
    (tmp_path / "m.engine").touch()
    assert "expected an .onnx file" in run("view", tmp_path / "m.engine").err
    assert netron.asked == []
