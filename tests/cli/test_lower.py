from __future__ import annotations

import os
import re
from pathlib import Path

import onnx
import pytest
import torch

import svexport
from svexport.errors import SvexportError
from svexport.graph.nodes import svexport_nodes

pytestmark = pytest.mark.core


@pytest.fixture
def file(project, run):
    assert run("export", "nets:Product", "-o", "product.onnx", "--plugins", "einsum").code == 0
    return Path("product.onnx")


def test_lower(run, file):
    before = file.read_bytes()
    result = run("lower", file, "-o", "standard/product.onnx")
    assert result.code == 0, result.err
    assert "lowered 1 SvEinsum; no svexport nodes left, opset 11" in result.out
    lowered = onnx.load("standard/product.onnx")
    onnx.checker.check_model(lowered, full_check=True)
    assert not lowered.functions
    assert {n.domain for n in lowered.graph.node} == {""}
    assert file.read_bytes() == before
    a, b = torch.randn(2, 3), torch.randn(3, 4)
    torch.testing.assert_close(svexport.load("standard/product.onnx")(a, b), a @ b)


def test_lower_in_place_as_json(run, file):
    result = run("lower", file, "-o", file, "--json")
    assert result.json["lowered"] == {"SvEinsum": 1}
    assert result.json["kept"] == {}
    assert not list(svexport_nodes(onnx.load(str(file))))
    again = run("lower", file, "-o", file)
    assert again.code == 0
    assert "lowered nothing: it has no such nodes" in again.out


def test_lower_some(run, file):
    result = run("lower", file, "-o", "same.onnx", "--ops", "bilinear_sample", "--json")
    assert result.json["lowered"] == {}
    assert result.json["kept"] == {"SvEinsum": 1}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("absent.onnx -o out.onnx", "no such file: absent.onnx"),
        ("empty.onnx -o out.onnx", "empty.onnx is not a valid ONNX file"),
        ("text.onnx -o out.onnx", "text.onnx is not a valid ONNX file"),
        ("cut.onnx -o out.onnx", "cut.onnx is not a valid ONNX file"),
        ("product.onnx -o out.onnx --ops warp", "expected names of ops"),
        ("product.onnx -o nets.py/out.onnx", "cannot write nets.py/out.onnx"),
        ("product.onnx -o .", "expected the path of a file"),
    ],
)
def test_refused(run, file, words, message):
    Path("empty.onnx").touch()
    Path("text.onnx").write_text("not a model")
    Path("cut.onnx").write_bytes(file.read_bytes()[:-100])
    result = run("lower", *words.split())
    assert result.code == 1
    assert message in result.err
    assert "Traceback" not in result.err
    assert not Path("out.onnx").exists()


def test_an_output_that_is_no_onnx_file_is_refused_at_once(run, file):
    for words in (("lower", "absent.onnx"), ("export", "nets:nothing_to_load")):
        result = run(*words, "-o", "out.txt")
        assert result.code == 2
        assert "expected the name of an ONNX file, such as model.onnx; got 'out.txt'" in result.err


def test_python_refuses_it_with_the_same_words(run, file):
    class Untouched(torch.nn.Module):
        def forward(self, x):
            raise AssertionError("nothing is run before the name is known")

    message = "expected the name of an ONNX file, such as model.onnx; got 'out.txt'"
    for call in (
        lambda: svexport.export(Untouched(), torch.zeros(1), "out.txt"),
        lambda: svexport.convert("absent.onnx", 11, "out.txt"),
        lambda: svexport.reduce(file, "check", "out.txt", target="8.4"),
    ):
        with pytest.raises(SvexportError, match=re.escape(message)):
            call()
    assert not Path("out.txt").exists()


def test_what_is_spelled_wrongly_in_python(file):
    for call, message in (
        (lambda: svexport.lower(file, ops="einsum"), "give ['einsum']"),
        (lambda: svexport.convert(file, "10"), "opset must be an integer from 9 to the model's own, 11, got '10'"),
        (lambda: svexport.check(file, target=10.10), "target expects a text, such as '8.6', got the number 10.1"),
    ):
        with pytest.raises(SvexportError, match=re.escape(message)):
            call()


def test_pipes_and_devices_stay_what_they_are(run, file):
    """A file that is renamed into their place would replace them: ``-o /dev/null`` of root, for all programs."""
    os.mkfifo("pipe.onnx")
    for words in (("lower", file, "-o", "pipe.onnx"), ("export", "nets:Product", "-o", "pipe.onnx")):
        result = run(*words)
        assert result.code == 1
        assert "pipe.onnx, which is no regular file" in result.err
    assert Path("pipe.onnx").is_fifo()
