"""Building engines with a TensorRT that runs on the CPU (tests/tensorrt/reference); kernels are not tested here."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import svexport
from svexport import BackendNotAvailableError, BuildError, EngineError, PluginBuildError, UnsupportedError
from svexport.graph.bodies import strip
from svexport.progress import phases_to
from svexport.tensorrt import plugins
from svexport.tensorrt.build_report import read_layers
from tests.tensorrt.models import exported, model_of, reshape_by_input
from tests.tensorrt.reference import VERSIONS, Reference
from tests.tensorrt.reference.fixtures import Install, every_version


def nothing_left(folder: Path, trt: Reference) -> None:
    """No engine, no part of one, and no context that somebody holds."""
    assert not [p for p in folder.iterdir() if ".engine" in p.name]
    assert not list(trt.alive)


# ----------------------------------------------------------------------------------------------------- what is built


@every_version
def test_types_flags_and_profiles(files: Path, tmp_path: Path, tensorrt: Install, version: str) -> None:
    trt = tensorrt(version)
    with svexport.build(files / "sampler.onnx", tmp_path / "m.engine") as engine:
        [config] = trt.built
        assert config._flags == set()  # TF32 is off, and half is not allowed
        assert [list(p._shapes) for p in config._profiles] == [["image", "grid"]]
        assert engine.info()["profiles"][0]["image"] == [[1, 3, 8, 8], [1, 3, 8, 8], [8, 3, 8, 8]]
        assert "'batch' is built for 1 to 8, usually 1" in str(engine.report)
        ((name, kind),) = engine.report.plugins.items()
        assert kind == "C++"
        assert Path(__file__).with_name("models.py").name in engine.report.sources[name]
        assert len(engine.report.layers) == engine.info()["layers"]
        assert json.dumps(engine.report.to_dict())
        assert engine.version == ".".join(trt.__version__.split(".")) + ".0" * (version == "8.6.1")
    assert trt.loaded == [str(tmp_path / "libsvexport.so")] * len(trt.loaded)
    assert not list(trt.alive)


@every_version
def test_half_files(tmp_path: Path, tensorrt: Install, version: str) -> None:
    """Strongly typed from 10 on; before, half is allowed by a flag where the file has it."""

    class Linear(nn.Linear):
        example_inputs = (torch.ones(2, 4),)

    exported(Linear(4, 3), tmp_path / "half.onnx", dtype=torch.float16)
    trt = tensorrt(version)
    with svexport.build(tmp_path / "half.onnx") as engine:
        assert (tmp_path / "half.engine").is_file()
        assert trt.built[0]._flags == ({"FP16"} if version == "8.6.1" else set())
        assert "--fp16" in engine.report.trtexec if version == "8.6.1" else "--fp16" not in engine.report.trtexec


def test_quantizers_allow_integers_before_10(tmp_path: Path, tensorrt: Install) -> None:
    value = helper.make_tensor_value_info
    scale = [helper.make_tensor("s", TensorProto.FLOAT, [], [0.1]), helper.make_tensor("z", TensorProto.INT8, [], [0])]
    nodes = [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
             helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"])]  # fmt: skip
    ends = [value(name, TensorProto.FLOAT, [4]) for name in ("x", "y")]
    model = helper.make_model(
        helper.make_graph(nodes, "g", ends[:1], ends[1:], scale), opset_imports=[helper.make_opsetid("", 13)]
    )
    model.ir_version = 8
    for version, flags in (("8.6.1", {"INT8"}), ("10.1.0", set()), ("11.4.0", set())):
        trt = tensorrt(version)
        with svexport.build(model) as engine:  # in memory: no file
            assert trt.built[0]._flags == flags
            assert engine.path is None
            x = torch.tensor([0.12, -0.26, 100.0, 0.0])
            assert torch.allclose(engine(x), torch.tensor([0.1, -0.3, 12.7, 0.0]))


def test_every_option_is_passed_on(files: Path, tmp_path: Path, tensorrt: Install) -> None:
    trt = tensorrt("10.16.1")
    options: dict[str, Any] = {"optimization_level": 2, "workspace": "1.5G", "dla_core": 1, "version_compatible": True}
    options |= {"hardware_compatibility": "ampere+", "refit": True, "tf32": True}
    with svexport.build(files / "sampler.onnx", tmp_path / "m.plan", **options) as engine:
        [config] = trt.built
        assert config._flags == {"TF32", "VERSION_COMPATIBLE", "REFIT", "GPU_FALLBACK"}
        assert config._pools == {"WORKSPACE": 3 << 29}
        assert config.builder_optimization_level == 2
        assert (config.default_device_type.name, config.DLA_core) == ("DLA", 1)
        assert config.hardware_compatibility_level.name == "AMPERE_PLUS"
        assert config.plugins_to_serialize == [str(tmp_path / "libsvexport.so")]
        command = engine.report.trtexec.split()
    assert command[:2] == ["trtexec", f"--onnx={files / 'sampler.onnx'}"]
    assert set(command[3:]) == {
        "--skipInference", "--stronglyTyped", "--minShapes=image:1x3x8x8,grid:1x5x5x2",
        "--optShapes=image:1x3x8x8,grid:1x5x5x2", "--maxShapes=image:8x3x8x8,grid:8x5x5x2",
        "--builderOptimizationLevel=2", "--memPoolSize=workspace:1536", "--useDLACore=1", "--allowGPUFallback",
        "--versionCompatible", "--hardwareCompatibilityLevel=ampere+", "--refit", "--profilingVerbosity=detailed",
        f"--dynamicPlugins={tmp_path / 'libsvexport.so'}", f"--setPluginsToSerialize={tmp_path / 'libsvexport.so'}",
        f"--timingCacheFile={tmp_path / 'cache/tensorrt/timing' / f'{trt.__version__}-reference.cache'}",
    }  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_weights_that_are_left_out_and_exchanged(tmp_path: Path, tensorrt: Install, version: str) -> None:
    class Linear(nn.Linear):
        example_inputs = (torch.ones(2, 4),)

    first, second = Linear(4, 3), Linear(4, 3)
    for name, model in (("first", first), ("second", second), ("other", Linear(4, 5))):
        exported(model, tmp_path / f"{name}.onnx")
    x = torch.randn(2, 4)
    trt = tensorrt(version)
    with svexport.build(tmp_path / "first.onnx", tmp_path / "m.engine", strip_weights=True) as engine:
        assert trt.built[0]._flags == {"STRIP_PLAN", "REFIT_IDENTICAL"}
        torch.testing.assert_close(engine(x), first(x))
        engine.refit(tmp_path / "second.onnx")
        torch.testing.assert_close(engine(x), second(x))
        with pytest.raises(EngineError, match="does not take the weights: weights do not match"):
            engine.refit(tmp_path / "other.onnx")
        with pytest.raises(EngineError, match=r"cannot read .*none\.onnx"):
            engine.refit(tmp_path / "none.onnx")
        with pytest.raises(EngineError, match="ModelProto, got int"):
            engine.refit(5)  # type: ignore[arg-type]
        torch.testing.assert_close(engine(x), second(x))
    with svexport.load(tmp_path / "m.engine", refit=tmp_path / "second.onnx") as engine:
        torch.testing.assert_close(engine(x), second(x))
    with (
        svexport.build(tmp_path / "first.onnx", tmp_path / "fixed.engine") as fixed,
        pytest.raises(EngineError, match="refit=True"),
    ):
        fixed.refit(tmp_path / "second.onnx")


def test_bodies_are_taken_out_where_they_would_come_first(files: Path, tmp_path: Path, tensorrt: Install) -> None:
    assert onnx.load(files / "sampler.onnx").functions
    for version in VERSIONS:
        tensorrt(version)
        svexport.build(files / "sampler.onnx", tmp_path / "m.engine").close()
    assert onnx.load(files / "sampler.onnx").functions


def test_weights_beside_the_file(tmp_path: Path, tensorrt: Install) -> None:
    class Linear(nn.Linear):
        example_inputs = (torch.ones(2, 64),)

    model = Linear(64, 64)
    exported(model, tmp_path / "m.onnx")
    (tmp_path / "beside").mkdir()
    loaded = onnx.load(tmp_path / "m.onnx")
    onnx.save(loaded, tmp_path / "beside/m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    tensorrt()
    x = torch.randn(2, 64)
    with svexport.build(tmp_path / "beside/m.onnx", tmp_path / "m.engine") as engine:
        torch.testing.assert_close(engine(x), model(x))


def test_timings_are_kept_by_device_and_version(files: Path, tmp_path: Path, tensorrt: Install) -> None:
    path = tmp_path / "cache/tensorrt/timing/10.1.0.9-reference.cache"
    trt = tensorrt("10.1.0")
    svexport.build(files / "scale.onnx", tmp_path / "m.engine").close()
    kept = path.read_bytes()
    assert kept == b"timings of 10.1.0.9"
    svexport.build(files / "scale.onnx", tmp_path / "m.engine").close()
    assert trt.built[-1]._cache._content == kept
    path.write_bytes(b"of another device")
    with svexport.build(files / "scale.onnx", tmp_path / "m.engine") as engine:
        assert any("measured anew" in note for note in engine.report.notes)
    assert path.read_bytes() == kept
    svexport.build(files / "scale.onnx", tmp_path / "m.engine", timing_cache=False).close()
    assert trt.built[-1]._cache is None
    blocked = tmp_path / "file"
    blocked.touch()
    with svexport.build(files / "scale.onnx", tmp_path / "m.engine", timing_cache=blocked / "cache") as engine:
        assert any("timings are not kept" in note for note in engine.report.notes)


def test_layers_are_told_with_what_would_remove_reformats(files: Path, tmp_path: Path, tensorrt: Install) -> None:
    def tensor(kind: str) -> list[dict[str, str]]:
        return [{"Name": "x", "Format/Datatype": kind}]

    layers = [
        {"Name": "a + b", "LayerType": "CaskConvolution", "TacticName": "sm90_xmma",
         "Inputs": tensor("Row major linear FP16"), "Outputs": tensor("Row major linear FP16"),
         "Metadata": "[ONNX Layer: a]\x1e[ONNX Layer: b]"},
        {"Name": "Reformatting CopyNode for Input Tensor 0 to c", "LayerType": "Reformat",
         "Inputs": tensor("Row major linear FP32"), "Outputs": tensor("Row major linear FP16"), "Metadata": ""},
        {"Name": "r", "LayerType": "Reformat", "Inputs": tensor("Row major linear FP16"),
         "Outputs": tensor("Channel major FP16 format where channel % 8 == 0")},
    ]  # fmt: skip
    tensorrt(layers=json.dumps({"Layers": layers}))
    with svexport.build(files / "scale.onnx", tmp_path / "m.engine") as engine:
        report = engine.report
    assert [layer.nodes for layer in report.fused] == [("a", "b")]
    assert [layer.name for layer in report.reformats] == [layers[1]["Name"], "r"]
    assert "dtype=" in report.reformats[0].remedy
    assert "formats of the plugins" in report.reformats[1].remedy
    assert "2 reformats" in str(report)
    report.to_html(tmp_path / "build.html")
    page = re.sub("<[^>]*>", "", (tmp_path / "build.html").read_text())
    for text in ("sm90_xmma", "Reformatting CopyNode", "dtype=", "all 3 layers", "trtexec --onnx="):
        assert text in page


@pytest.mark.parametrize("text", ["", "{", "[]", '{"Layers": ["a", {}, 3]}', '{"Layers": [{"Inputs": ["x"]}]}', "null"])
def test_whatever_an_inspector_says_is_read(text: str) -> None:
    assert isinstance(read_layers(text), list)


# ------------------------------------------------------------------------------------------------------------ faults

FAULTS = {
    "parse": ({"parse": "Assertion failed"}, r"does not parse .*Assertion failed \(node '.*', .*models\.py"),
    "build": ({"build": "Could not find any implementation for node X"}, "builds no engine .*any implementation"),
    "memory": ({"build": "Requested amount of GPU memory (8 bytes) is not there"}, "memory .*smaller workspace"),
    "raise": ({"raise": RuntimeError("a plugin raised")}, "fails to build: RuntimeError: a plugin raised"),
    "deserialize": ({"deserialize": "Serialization assertion failed"}, "does not load .*Serialization assertion"),
    "context": ({"context": "out of memory"}, "no execution context .*0.0 MB.*out of memory"),
}  # fmt: skip


@every_version
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_an_error_that_leaves_nothing(
    files: Path, tmp_path: Path, tensorrt: Install, version: str, fault: str
) -> None:
    faults, said = FAULTS[fault]
    trt = tensorrt(version, **faults)
    with pytest.raises(BuildError if fault not in ("deserialize", "context") else EngineError, match=said) as caught:
        svexport.build(files / "sampler.onnx", tmp_path / "m.engine")
    del caught
    nothing_left(tmp_path, trt)


def test_an_older_engine_stays_where_a_build_fails(files: Path, tmp_path: Path, tensorrt: Install) -> None:
    tensorrt()
    svexport.build(files / "scale.onnx", tmp_path / "m.engine").close()
    before = (tmp_path / "m.engine").read_bytes()
    tensorrt(build="no")
    with pytest.raises(BuildError):
        svexport.build(files / "sampler.onnx", tmp_path / "m.engine")
    assert (tmp_path / "m.engine").read_bytes() == before


@pytest.mark.parametrize("version", VERSIONS)
def test_ctrl_c_cancels(files: Path, tmp_path: Path, tensorrt: Install, version: str) -> None:
    """While TensorRT works, in a thread that never looks: the next step of its monitor ends the build."""
    trt = tensorrt(version)
    seen = []

    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.25)  # the main thread hears it
        seen.append(threading.current_thread())

    trt.during_build = interrupted
    before = signal.default_int_handler
    outer = signal.signal(signal.SIGINT, before)  # what runs the tests may ignore it
    with pytest.raises(KeyboardInterrupt) as caught:
        svexport.build(files / "sampler.onnx", tmp_path / "m.engine")
    del caught
    assert signal.signal(signal.SIGINT, outer) is before
    assert seen[0] is not threading.main_thread()
    assert trt.finished == (version == "8.6.1")
    nothing_left(tmp_path, trt)


def test_it_builds_in_any_thread(files: Path, tmp_path: Path, tensorrt: Install) -> None:
    tensorrt()
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(svexport.build(files / "scale.onnx", tmp_path / "m.engine")))
    thread.start()
    thread.join()
    assert torch.equal(made[0](torch.ones(3, 4)), torch.full((3, 4), 3.0))


def test_phases_are_told(files: Path, tmp_path: Path, tensorrt: Install) -> None:
    tensorrt()
    phases: list[str] = []
    with phases_to(phases.append):
        svexport.build(files / "scale.onnx", tmp_path / "m.engine").close()
    assert phases[:3] == ["checking", "registering plugins", "parsing"]
    assert "building: Building Engine, 2 of 4" in phases


def test_what_cannot_parse_is_told_before(tmp_path: Path, tensorrt: Install) -> None:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Det", ["x"], ["y"], name="det")], "g", [value("x", 1, [2, 4, 4])], [value("y", 1, [2])]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), tmp_path / "m.onnx")
    trt = tensorrt()
    with pytest.raises(BuildError, match=r"not for TensorRT 10\.16: Det: det: .*check=False"):
        svexport.build(tmp_path / "m.onnx", tmp_path / "m.engine")
    assert not trt.built
    svexport.build(tmp_path / "m.onnx", tmp_path / "m.engine", check=False).close()
    assert trt.built


def test_a_version_of_which_nothing_is_known_is_tried(
    files: Path, tmp_path: Path, tensorrt: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    trt = tensorrt("11.4.0")
    trt.__version__ = "11.99.0.9"
    with svexport.build(files / "scale.onnx", tmp_path / "m.engine") as engine:
        assert any(note.startswith("not checked before") for note in engine.report.notes)
        assert engine.report.check is None


# ------------------------------------------------------------------------------------------------------ what is asked


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"optimization_level": 9}, BuildError, "0 to 5"),
        ({"workspace": "much"}, BuildError, "bytes, or a text"),
        ({"workspace": 0}, BuildError, "bytes, or a text"),
        ({"dla_core": -1}, BuildError, "number of a DLA"),
        ({"hardware_compatibility": "all"}, BuildError, "'ampere\\+' or 'same'"),
        ({"fp16": True}, UnsupportedError, r"dtype=torch\.float16"),
        ({"shapes": {"nothing": (1,)}}, BuildError, "no input of the file; it has image, grid"),
        ({"shapes": {"image": (1, 3, 8)}}, BuildError, r"\[batch, 3, 8, 8\] in the file, got the shape \[1, 3, 8\]"),
        ({"shapes": {"image": (1, 4, 8, 8)}}, BuildError, "in the file, got the shape"),
        ({"shapes": {"image": ((2, 3, 8, 8), (1, 3, 8, 8), (4, 3, 8, 8))}}, BuildError, "no size larger than"),
        ({"shapes": {"image": ((1, 3, 8, 8), (2, 3, 8, 8))}}, BuildError, "smallest, usual, largest"),
        ({"shapes": {"image": "1x3x8x8"}}, BuildError, "tuple of integers"),
        ({"shapes": []}, BuildError, "expects"),
        ({"shapes": {"image": (1, 3, 8, 8), "grid": (2, 5, 5, 2)}}, BuildError, "'batch' is one size in the file"),
        ({"shapes": {"image": ((1.5, 3, 8, 8), (2, 3, 8, 8), (4, 3, 8, 8))}}, BuildError, "tuple of integers"),
        ({"values": {"nothing": (1,)}}, BuildError, "values names 'nothing'"),
        ({"values": [1]}, BuildError, "values expects"),
        ({"timing_cache": 1}, BuildError, "timing_cache expects"),
        ({"path": 5}, BuildError, "expected the path of a .engine"),
    ],
)
def test_wrong_requests(
    files: Path, tmp_path: Path, tensorrt: Install, options: dict[str, Any], error: type, said: str
) -> None:
    trt = tensorrt()
    with pytest.raises(error, match=said):
        svexport.build(files / "sampler.onnx", **{"path": tmp_path / "m.engine", **options})
    assert not trt.built
    nothing_left(tmp_path, trt)


@pytest.mark.parametrize(
    ("version", "options", "said"),
    [
        ("8.6.1", {"strip_weights": True}, "needs TensorRT 10"),
        ("10.1.0", {"hardware_compatibility": "same"}, r"needs a later TensorRT, this is 10\.1"),
    ],
)
def test_what_a_version_lacks(
    files: Path, tmp_path: Path, tensorrt: Install, version: str, options: dict[str, Any], said: str
) -> None:
    tensorrt(version)
    with pytest.raises(UnsupportedError, match=said):
        svexport.build(files / "scale.onnx", tmp_path / "m.engine", **options)


def test_files_that_are_none(files: Path, tmp_path: Path, tensorrt: Install) -> None:
    tensorrt()
    (tmp_path / "text.onnx").write_text("hello")
    (tmp_path / "empty.onnx").touch()
    for name, said in (("no.onnx", "cannot read"), ("text.onnx", "not an ONNX file"), ("empty.onnx", "no ONNX graph")):
        with pytest.raises(BuildError, match=said):
            svexport.build(tmp_path / name, tmp_path / "m.engine")
    with pytest.raises(BuildError, match="got Linear"):
        svexport.build(nn.Linear(1, 1))  # type: ignore[arg-type]
    (tmp_path / "folder.engine").mkdir()
    for path, said in (("m.onnx", "is a .engine or .plan file"), ("folder.engine", "got the folder")):
        with pytest.raises(BuildError, match=said):
            svexport.build(files / "scale.onnx", tmp_path / path)


def test_without_tensorrt(files: Path, tmp_path: Path, tensorrt: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(BackendNotAvailableError, match="pip install tensorrt"):
        svexport.build(files / "scale.onnx", tmp_path / "m.engine")
    trt = tensorrt()
    trt.__version__ = "8.5.3.1"
    with pytest.raises(BackendNotAvailableError, match=r"8\.6 or later, this is 8\.5\.3\.1"):
        svexport.build(files / "scale.onnx", tmp_path / "m.engine")


def test_without_a_gpu(files: Path, tmp_path: Path, tensorrt: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    from svexport.runtime import build, place

    tensorrt()
    monkeypatch.setattr(build, "place", place.cuda)
    for device, error in ((None, BackendNotAvailableError), ("cuda:99", BackendNotAvailableError),
                          ("cpu", UnsupportedError), ("nonsense", EngineError)):  # fmt: skip
        if device is None and torch.cuda.is_available():
            continue
        with pytest.raises(error):
            svexport.build(files / "scale.onnx", tmp_path / "m.engine", device=device)


def test_without_a_plugin(files: Path, tmp_path: Path, tensorrt: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    trt = tensorrt("8.6.1")
    monkeypatch.setattr(plugins, "libraries", list)
    with pytest.raises(BackendNotAvailableError, match="svexport plugins build"):
        svexport.build(files / "sampler.onnx", tmp_path / "m.engine")
    with pytest.raises(PluginBuildError, match="no plugin library"):
        svexport.build(files / "sampler.onnx", tmp_path / "m.engine", plugins=tmp_path / "no.so")
    nothing_left(tmp_path, trt)
    svexport.build(files / "scale.onnx", tmp_path / "m.engine").close()  # which needs none


# ------------------------------------------------------------------------------------------------------------- sizes


def test_sizes_follow_from_those_of_the_same_name(tensorrt: Install) -> None:
    tensorrt()
    model = model_of({"a": ["n", 3], "b": [4, "n"], "c": [2]})
    with svexport.build(model, shapes={"a": ((2, 3), (4, 3), (6, 3))}) as engine:
        assert engine.info()["profiles"] == [{"a": [[2, 3], [4, 3], [6, 3]], "b": [[4, 2], [4, 4], [4, 6]]}]
        assert not [note for note in engine.report.notes if "built for" in note]
    with svexport.build(model) as engine:
        assert engine.info()["profiles"][0]["b"] == [[4, 1], [4, 1], [4, 8]]


def test_other_sizes_have_to_be_given(tensorrt: Install) -> None:
    tensorrt()
    for model in (model_of({"a": ["n", "width"]}), model_of({"a": ["n", None]})):
        with pytest.raises(BuildError, match=r"'a' axis 1.*shapes=\{\"a\": \(smallest, usual, .*--shapes a="):
            svexport.build(model)
    with svexport.build(model_of({"a": [None, 2]})) as engine:
        assert engine.info()["profiles"][0]["a"] == [[1, 2], [1, 2], [8, 2]]
        assert any("axis 0 of 'a'" in note for note in engine.report.notes)


@every_version
def test_several_profiles(tensorrt: Install, version: str) -> None:
    tensorrt(version)
    model = model_of({"a": ["n", "m"]})
    shapes = [{"a": ((1, 1), (1, 4), (1, 8))}, {"a": ((2, 1), (8, 1), (16, 1))}]
    with svexport.build(model, shapes=shapes) as engine:
        for shape in ((1, 8), (16, 1), (1, 1)):
            x = torch.randn(shape)
            assert torch.equal(engine(x), -x)
        with pytest.raises(EngineError, match=r"a: \[1, 1\] to \[1, 8\] or a: \[2, 1\] to \[16, 1\], got a: \[2, 2\]"):
            engine(torch.ones(2, 2))
        command = engine.report.trtexec
        if version.startswith("8."):
            assert command.startswith("# trtexec before 10 builds one profile")
        else:
            assert command.count("--profile=") == 2


def test_numbers_that_are_sizes(tensorrt: Install) -> None:
    model = reshape_by_input()
    strip(model)
    for version in VERSIONS:
        trt = tensorrt(version)
        with pytest.raises(BuildError, match=r"values=\{\"size\"") as caught:
            svexport.build(model, check=False, shapes={"size": (2,)})
        del caught
        with svexport.build(model, check=False, values={"size": ((1, 1), (3, 4), (12, 12))}) as engine:
            assert trt.built[-1]._profiles[0]._values == {"size": ((1, 1), (3, 4), (12, 12))}
            x, dtype = torch.arange(12.0), engine.inputs[1].dtype
            assert dtype == (torch.int32 if version == "8.6.1" else torch.int64)
            assert torch.equal(engine(x, torch.tensor([4, 3], dtype=dtype)), x.reshape(4, 3))
