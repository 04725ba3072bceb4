from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

import svexport
from svexport.graph.nodes import svexport_nodes
from svexport.graph.walk import opset_of

pytestmark = pytest.mark.core


def test_export_with_defaults(run, project):
    result = run("export", "nets:Ready")
    assert result.code == 0, result.err
    assert "Ready -> Ready.onnx: verified" in result.out
    assert opset_of(onnx.load("Ready.onnx")) == 11


def test_export_as_program(project):
    """The installed script: it finds modules of the working directory."""
    script = Path(sys.executable).with_name("svexport")
    command = [script] if script.exists() else [sys.executable, "-m", "svexport"]
    result = subprocess.run(
        [*command, "export", "package.nets:Ready", "-o", "out/net.onnx"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "verified" in result.stdout
    assert result.stderr == ""
    assert (project / "out" / "net.onnx").is_file()


def test_export_with_everything(run, project):
    options = "--opset 13 --input x=1x3x8x8 --dynamic x:0=batch --dynamic x:-1=width --rtol 1e-2 --atol 1e-2 --seed 3"
    result = run("export", "nets.py:Net", "-o", "net.onnx", *options.split(), "--json", "--report", "net.html")
    assert result.code == 0, result.err
    report = result.json
    assert report["ok"]
    assert report["verified"]
    assert report["opset"] == 13
    assert report["inputs"] == {"x": "float32[batch, 3, 8, width]"}
    assert {p["run"] for p in report["parity"]} >= {"given", "scaled"}
    page = Path("net.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "Verified: 1 output" in page
    assert opset_of(onnx.load("net.onnx")) == 13


@pytest.mark.parametrize("way", ["inputs", "attributes"])
def test_weights_as(run, project, monkeypatch, way):
    """What the command line says is what :func:`svexport.export` is told."""
    told = {}
    monkeypatch.setattr(svexport, "export", lambda *_, **options: told.update(options))
    run("export", "nets:Ready", "--weights-as", way)
    assert told["weights"] == way


def test_names_of_the_file(run, project):
    words = ("export", "nets:Net", "-o", "net.onnx", "--input", "x=1x3x8x8", "--no-verify")
    result = run(*words, "--input-names", "image", "--output-names", "logits")
    assert result.code == 0, result.err
    graph = onnx.load("net.onnx").graph
    assert [v.name for v in (*graph.input, *graph.output)] == ["image", "logits"]
    for flag in ("--input-names", "--output-names"):
        result = run(*words, flag, "one,two")
        assert result.code == 1
        assert f"{flag[2:].replace('-', '_')} expects 1 different names" in result.err


@pytest.mark.parametrize(("plugins", "nodes"), [("all", 0), ("none", 0), ("einsum", 1), ("bilinear_sample", 0)])
def test_plugins(run, project, plugins, nodes):
    result = run("export", "nets:Product", "-o", "net.onnx", "--plugins", plugins)
    assert result.code == 0, result.err
    assert len(list(svexport_nodes(onnx.load("net.onnx")))) == nodes


def test_simplify(run, project):
    transposes = []
    for words in ([], ["--simplify"]):
        result = run("export", "nets:Turned", "--opset", "13", "--json", *words)
        assert result.code == 0, result.err
        transposes.append(result.json["nodes"].get("Transpose", 0))
        assert any(note.startswith("simplify: ") for note in result.json["notes"]) == bool(words)
    assert transposes == [2, 0]


def test_half_for_a_target(run, project):
    result = run("export", "nets:Ready", "-o", "net.onnx", "--dtype", "float16", "--target", "8.6", "--json")
    assert result.code == 0, result.err
    assert result.json["target"] == "TensorRT 8.6"
    assert result.json["outputs"]["scores"].startswith("float16")


def test_half_but_for_some(run, project):
    common = ("export", "nets:Net", "--input", "x=2x3x8x8", "--dtype", "float16", "--opset", "13", "--json")
    auto = run(*common, "-o", "a.onnx", "--keep", "auto")
    assert auto.code == 0, auto.err
    assert auto.json["verified"]
    named = run(*common, "-o", "b.onnx", "--keep", "con*", "--keep", "nothing*")
    assert named.code == 1
    assert "no module of Net is named 'nothing*'" in named.err
    named = run(*common, "-o", "b.onnx", "--keep", "con*")
    assert named.code == 0, named.err
    assert {one["module"] for one in named.json["kept"]} == {"conv"}


def test_no_verify(run, project):
    result = run("export", "nets:Noise", "--no-verify", "--json", "--report", "net.html")
    assert result.code == 0, result.err
    assert result.json["parity"] == []
    assert not result.json["verified"]
    assert "Not compared with torch" in Path("net.html").read_text()


def test_index_inputs(run, project):
    result = run("export", "nets:Lookup", "--input", "ids=1x7:int64")
    assert result.code == 0, result.err


def test_json_is_alone_on_stdout(run, project):
    result = run("export", "nets:Chatty", "--json")
    assert result.json["ok"]
    assert "from Python" in result.err
    assert "from below" in result.err


def test_unsupported_operator_is_one_message(run, project):
    result = run("export", "nets:Unsupported")
    assert result.code == 1
    assert result.out == ""  # where torch would print its graph
    assert "special_bessel_j0 cannot be exported" in result.err
    assert "nets.py:" in result.err


def test_file_that_differs_is_not_written(run, project):
    result = run("export", "nets:Noise", "-o", "noise.onnx", "--json")
    assert result.code == 1
    assert result.json["error"]["type"] == "VerificationError"
    assert not result.json["error"]["parity"][0]["ok"]
    assert "forward draws random numbers" in result.err
    assert "nets.py:" in result.err
    assert not Path("noise.onnx").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nets:Net", "Net came without inputs; give them, --input NAME=1x3x224x224"),
        ("nets:Net --input y=1x3x8x8", "Net.forward has no parameter y; it has x"),
        ("nets:Ready --opset 8", "opset must be an integer from 9 to"),
        ("nets:Ready --target 7.0", "target expects a TensorRT version"),
        ("nets:Ready --plugins warp", "expected names of ops"),
        ("nets:Ready --dynamic y:0=batch", "dynamic_shapes names ['y']"),
        ("nets:Ready --dynamic x:4=batch", "x has 4 dimensions, axis 4 is none of them"),
        ("nets:Ready --dynamic x:0=batch --dynamic x:0=n", "--dynamic calls x:0 both batch and n; give it one name"),
        ("nets:Ready --input x=1x3x8x8 --input x=2x3x8x8", "--input gives x more than once"),
        ("nets:Ready -o .", "expected the path of a file, got the folder"),
        ("nets:Ready -o nets.py/net.onnx", "cannot write nets.py/net.onnx"),
        ("nets:Ready --report nets.py/net.html", "cannot write nets.py/net.html"),
    ],
)
def test_refused(run, project, words, message):
    result = run("export", *words.split())
    assert result.code == 1
    assert message in result.err
    assert "Traceback" not in result.err


def test_all_that_is_wrong_is_said_at_once(run, project):
    words = "--weights w.pt --inputs in.npz --target 7.0 -o nets.py/net.onnx --report nets.py/net.html"
    result = run("export", "absent.py:Net", *words.split())
    assert result.code == 1
    assert "6 things are wrong" in result.err
    missing = ("absent.py", "w.pt", "in.npz")
    assert all(f"no such file: {name}" in result.err for name in missing)
    assert "8.2, 8.4, 8.5, 8.6" in result.err  # the targets there are
    assert result.err.count("cannot write nets.py/net") == 2


def test_line_numbers_are_whole_in_narrow_tables(run, project, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    report = run("export", "nets:Product", "-o", "product.onnx", "--json").json
    (source,) = [node["source"] for node in report["svexport_nodes"]]
    from nets import Product
    from rich.console import Console

    import svexport

    console = Console(width=70, record=True, file=io.StringIO())
    for table in svexport.export(Product(), path="product.onnx").tables():
        console.print(table)
    assert source.split(" ")[0] in console.export_text()  # nets.py:31


@pytest.mark.parametrize("place", ["folder", "/dev/null", "nets.py/net.html"])
def test_unusable_report_is_refused_before_the_work(run, project, place):
    (project / "folder").mkdir()
    result = run("export", "nets:nothing_to_load", "--report", place)
    assert result.code == 1
    assert place in result.err
    assert "nothing_to_load" not in result.err
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--dynamic x=batch", "expected NAME:AXIS=SYMBOL, such as image:0=batch; got 'x=batch'"),
        ("--dynamic x:0", "expected NAME:AXIS=SYMBOL"),
        ("--plugins Einsum,", "expected names of ops such as grid_sample,einsum; got 'Einsum,'"),
        ("--dtype int8", "invalid choice: 'int8'"),
        ("--opset eleven", "invalid int value: 'eleven'"),
        ("--rtol tight", "invalid float value: 'tight'"),
    ],
)
def test_malformed_options(run, words, message):
    result = run("export", "nets:Net", *words.split())
    assert result.code == 2
    assert message in result.err


@pytest.mark.skipif(shutil.which("setsid") is None, reason="needs a session without a terminal")
def test_no_escape_codes_in_a_pipe(project):
    env = {**os.environ, "TERM": "xterm-256color"}
    command = ["setsid", sys.executable, "-m", "svexport", "export", "nets:Ready"]
    result = subprocess.run(command, capture_output=True, check=True, env=env)
    assert b"\x1b" not in result.stdout + result.stderr
