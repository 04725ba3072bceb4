"""svexport triton: writing a model repository from the command line."""

from __future__ import annotations

import pytest

import svexport
from tests.tensorrt.models import Scale


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "scale.onnx"
    model = Scale()
    svexport.export(model, model.example_inputs, path, verify="quick", dynamic_shapes={"x": {0: "batch"}})
    return path


def test_a_repository(run, file, tmp_path):
    words = ["--max-batch-size", 4, "--instances", 2, "--device", "cpu", "--queue-delay", 50, "--client", "scale"]
    result = run("triton", tmp_path / "models", file, *words, "--json")
    assert result.code == 0, result.err
    assert result.json["models"]["scale"]["max_batch_size"] == 4
    assert result.json["models"]["scale"]["inputs"] == {"x": {"type": "FP32", "shape": [None, 4]}}
    assert "client.infer('scale', inputs)" in result.json["client"]
    text = (tmp_path / "models/scale/config.pbtxt").read_text()
    assert "instance_group { count: 2  kind: KIND_CPU }" in text
    assert "max_queue_delay_microseconds: 50" in text
    assert "use_tf32" not in text
    assert "--gpus" not in result.json["command"]
    said = run("triton", tmp_path / "again", f"first={file}", "--no-warmup", "--no-dynamic-batching").out
    assert "tritonserver --model-repository=/models" in said
    assert "model_warmup" not in (tmp_path / "again/first/config.pbtxt").read_text()
    assert "dynamic_batching" not in (tmp_path / "again/first/config.pbtxt").read_text()


def test_an_ensemble(run, file, tmp_path):
    words = [f"a={file}", f"b={file}", "--ensemble", "both", "--connect", "b.x=output"]
    result = run("triton", tmp_path / "models", *words, "--json")
    assert result.code == 0, result.err
    assert list(result.json["models"]) == ["a", "b", "both"]


def test_wrong_words(run, file, tmp_path):
    assert run("triton", tmp_path / "m", file, "--shape", "x").code == 2
    assert run("triton", tmp_path / "m", file, "--shape", "x=0x3").code == 2
    assert run("triton", tmp_path / "m", file, "--connect", "x").code == 2
    assert run("triton", tmp_path / "m").code == 2
    assert "give each once" in run("triton", tmp_path / "m", file, file).err
    assert "--shape gives x twice" in run("triton", tmp_path / "m", file, "--shape", "x=1x4", "--shape", "x=2x4").err
    assert "cannot read" in run("triton", tmp_path / "m", tmp_path / "none.onnx").err
    assert not (tmp_path / "m").exists()
