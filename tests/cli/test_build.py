"""svexport build with a TensorRT that runs on the CPU, and its trtexec command without TensorRT."""

from __future__ import annotations

import shlex
import sys

import pytest

from svexport.tensorrt.library import library_name


def test_build(run, files, tmp_path, tensorrt):
    trt = tensorrt()
    shapes = "image=2x3x8x8:4x3x8x8:6x3x8x8"
    words = ["--shapes", shapes, "--workspace", "1G", "--optimization-level", 1, "--json"]
    result = run("build", files / "sampler.onnx", "-o", tmp_path / "m.engine", *words)
    assert result.code == 0, result.err
    assert result.json["engine"]["profiles"] == [
        {"image": [[2, 3, 8, 8], [4, 3, 8, 8], [6, 3, 8, 8]], "grid": [[2, 5, 5, 2], [4, 5, 5, 2], [6, 5, 5, 2]]}
    ]
    assert list(result.json["plugins"].values()) == ["C++"]
    assert (tmp_path / "m.engine").stat().st_size == result.json["bytes"]
    assert not list(trt.alive)
    words = ["--no-timing-cache", "--report", tmp_path / "build.html"]
    said = run("build", files / "scale.onnx", "-o", tmp_path / "s.engine", *words).out
    assert "TensorRT 10.16.1.9" in (tmp_path / "build.html").read_text()
    assert "TensorRT 10.16.1.9 on reference" in said
    assert said.splitlines()[-1].startswith("trtexec --onnx=")


def test_failures_are_one_line(run, files, tmp_path, tensorrt):
    tensorrt(build="no kernel")
    result = run("build", files / "scale.onnx", "-o", tmp_path / "m.engine")
    assert result.code == 1
    assert result.err.startswith("svexport build: error: TensorRT 10.16.1.9 builds no engine")
    assert "no kernel" in result.err
    assert not (tmp_path / "m.engine").exists()
    twice = ["--shapes", "x=1x2", "--shapes", "x=1x3"]
    assert "twice" in run("build", files / "scale.onnx", *twice).err
    assert "--target goes with --trtexec" in run("build", files / "scale.onnx", "--target", "8.6").err
    for wrong in ("x", "x=", "x=1:2", "x=1xa", "=1x2"):
        assert run("build", files / "scale.onnx", "--shapes", wrong).code == 2


TRTEXEC = {
    "8.6": "--skipInference --preview=+profileSharing0806 --noTF32",
    "10.3": "--skipInference --stronglyTyped --noTF32",
    "11.4": "--skipInference --noTF32",
}


@pytest.mark.parametrize("target", TRTEXEC)
def test_the_command_of_trtexec_needs_no_tensorrt(run, files, tmp_path, monkeypatch, target):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    result = run("build", files / "sampler.onnx", "--trtexec", "--target", target, "--no-check", "--json")
    assert result.code == 0, result.err
    words = shlex.split(result.json["trtexec"])
    library = library_name(int(target.split(".")[0]))
    assert words == [
        "trtexec", f"--onnx={files / 'sampler.onnx'}", f"--saveEngine={files / 'sampler.engine'}",
        *TRTEXEC[target].split(), "--minShapes=image:1x3x8x8,grid:1x5x5x2", "--optShapes=image:1x3x8x8,grid:1x5x5x2",
        "--maxShapes=image:8x3x8x8,grid:8x5x5x2", "--profilingVerbosity=detailed", f"--dynamicPlugins={library}",
    ]  # fmt: skip
    assert any("SvGridSample: put" in note for note in result.json["notes"])
    assert not (files / "sampler.engine").exists()


def test_a_file_that_the_target_refuses_is_told_with_the_command(run, files, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    result = run("build", files / "sampler.onnx", "--trtexec", "--target", "10.3")
    assert result.code == 1  # bodies would come before the plugin
    assert result.out.startswith("trtexec ")
    assert "error: expected" in result.out
    assert run("build", files / "scale.onnx", "--trtexec", "--target", "10.3").code == 0
    assert "--target 8.6" in run("build", files / "scale.onnx", "--trtexec").err
    assert "one of 8.2" in run("build", files / "scale.onnx", "--trtexec", "--target", "7").err
    assert "needs TensorRT 10" in run("build", files / "scale.onnx", "--trtexec", "--target=8.6", "--strip-weights").err


def test_options_reach_the_command(run, files):
    words = ["--fp16", "--tf32", "--dla-core", 0, "--workspace", "512M", "--plugins", "my lib.so", "--device", "cuda:1"]
    words += ["--version-compatible", "--timing-cache", "t.cache", "--optimization-level", 3]
    command = run("build", files / "scale.onnx", "--trtexec", "--target", "8.6", *words).out.splitlines()[0]
    for word in (
        "--fp16", "--useDLACore=0", "--allowGPUFallback", "--memPoolSize=workspace:512", "--dynamicPlugins=my lib.so",
        "--setPluginsToSerialize=my lib.so", "--versionCompatible", "--timingCacheFile=t.cache", "--device=1",
        "--builderOptimizationLevel=3",
    ):  # fmt: skip
        assert word in shlex.split(command)
    assert "--noTF32" not in command
