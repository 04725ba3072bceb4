"""svexport quantize: batches from files and from Python, the file that is written, the ranking."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

import svexport


@pytest.fixture
def samples(project):
    torch.manual_seed(0)
    names = [f"sample{i}.npz" for i in range(3)]
    for name in names:
        np.savez(project / name, x=torch.randn(2, 3, 8, 8).numpy())
    return names


def test_files(run, project, samples):
    result = run("quantize", "nets.py:Net", "--batches", *samples, "-o", "int8.onnx", "--method", "minmax", "--json")
    assert result.code == 0, result.err
    assert result.json["report"]["verified"] is True
    assert result.json["ranking"] is None
    model = onnx.load(project / "int8.onnx")
    assert model.opset_import[0].version == 17
    scales = [onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.data_type == 1 and not t.dims]
    largest = max(float(abs(np.load(project / name)["x"]).max()) for name in samples)
    assert any(abs(float(scale) - largest / 127) < 1e-6 for scale in scales)
    assert svexport.check(project / "int8.onnx", "8.6").ok


def test_batches_of_a_module_and_the_ranking(run, project):
    (project / "data.py").write_text(
        "import torch\n"
        "loader = [torch.ones(2, 3, 8, 8), torch.zeros(2, 3, 8, 8)]\n"
        "def made():\n    return (torch.full((1, 3, 8, 8), 1e30 * i) for i in range(9))\n"
        "number = 3\n"
    )
    result = run("quantize", "nets.py:Net", "--batches", "data.py:loader", "-o", "a.onnx", "--ranking", "--json")
    assert result.code == 0, result.err
    assert [layer["name"] for layer in result.json["ranking"]["layers"]] == ["conv"]
    shown = run("quantize", "nets.py:Net", "--batches", "data.py:made", "--limit", "1", "-o", "b.onnx", "--ranking")
    assert shown.code == 0, shown.err
    assert "with all layers quantized" in shown.out
    refused = run("quantize", "nets.py:Net", "--batches", "data.py:number", "-o", "c.onnx")
    assert refused.code == 1
    assert "data.py:number is a int; expected an iterable of batches" in refused.err
    assert not (project / "c.onnx").exists()


def test_fp8(run, project, samples):
    result = run("quantize", "nets.py:Net", "--batches", *samples, "-o", "fp8.onnx", "--format", "fp8", "--json")
    assert result.code == 0, result.err
    assert result.json["report"]["verified"] is True
    model = onnx.load(project / "fp8.onnx")
    assert model.opset_import[0].version == 19
    held = {t.name: t.data_type for t in model.graph.initializer}
    quantizers = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    made = {node.output[0]: node.attribute[0].i for node in model.graph.node if node.op_type == "Cast"}
    assert {held.get(node.input[2]) or made[node.input[2]] for node in quantizers} == {onnx.TensorProto.FLOAT8E4M3FN}
    refused = run("quantize", "nets.py:Net", "--batches", *samples, "-o", "m.onnx", "--format", "fp8", "--opset", "17")
    assert refused.code == 1
    assert "give opset=19, or quantize to int8" in refused.err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--batches", "none.npz", "-o", "m.onnx"], "no such file: none.npz"),
        (["--batches", "data.txt", "-o", "m.onnx"], "no such file: data.txt"),
        (
            ["--batches", "sample0.npz", "data.py:x", "-o", "m.onnx"],
            "expected .npz or .pt files, or one package.module",
        ),
        (["--batches", "sample0.npz", "--keep", "tail", "-o", "m.onnx"], "no layer is named 'tail'"),
        (["--batches", "sample0.npz", "--limit", "0"], "expected a number of batches"),
        (["--batches", "sample0.npz", "--opset", "11", "-o", "m.onnx"], "need opset 13 or later, got 11"),
        (["--batches", "sample0.npz", "--target", "86", "-o", "m.onnx"], "86"),
        (["--batches", "sample0.npz", "--percentile", "0", "-o", "m.onnx"], "percentile: expected a number above 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(run, project, samples, given, said):
    result = run("quantize", "nets.py:Net", *given)
    assert result.code != 0
    assert said in result.err
    assert not (project / "m.onnx").exists()


def test_methods_are_those_of_the_package():
    from svexport.cli.quantize import METHODS
    from svexport.quantization.calibrators import METHODS as KNOWN

    assert sorted(KNOWN) == sorted(METHODS)
