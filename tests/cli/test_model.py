"""Naming a model and its inputs on the command line."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from svexport.cli import _model

pytestmark = pytest.mark.core


@pytest.fixture
def load(project):
    """Parses what follows `export` and loads the model: ``load("nets:Net", "--seed", "1")``."""
    import argparse

    def load(*argv):
        parser = argparse.ArgumentParser()
        _model.add_arguments(parser)
        return _model.load(parser.parse_args([str(word) for word in argv]))

    return load


@pytest.mark.parametrize(
    "spec", ["nets:Ready", "nets:instance", "nets:Zoo.net", "package.nets:Ready", "nets.py:Ready", "./nets.py:Zoo.net"]
)
def test_model_by_name(load, spec):
    model, args = load(spec)
    assert type(model).__name__ == "Ready"
    assert args is model.example_inputs


def test_file_imports_what_lies_beside_it(load, project):
    (project / "deep").mkdir()
    (project / "deep" / "sibling.py").write_text("import torch\nmodel = torch.nn.ReLU()\n")
    (project / "deep" / "torch_net.py").write_text("from sibling import model\n")
    assert isinstance(load("deep/torch_net.py:model", "--input", "input=1")[0], torch.nn.ReLU)


def test_file_called_like_a_library(load, project):
    (project / "onnx.py").write_text("import torch\nmodel = torch.nn.ReLU()\n")
    before = sys.modules.get("onnx")
    assert isinstance(load("onnx.py:model", "--input", "input=1")[0], torch.nn.ReLU)
    assert sys.modules.get("onnx") is before


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("absent:Net", r"no module named 'absent', neither installed nor in .*path/to/file.py:callable"),
        ("package.absent:Net", r"no module named 'package.absent'"),
        ("absent.py:Net", r"no such file: absent.py"),
        ("nets:Absent", r"nets has no 'Absent'; it has Net, Ready, .*broken"),
        ("nets:Zoo.absent", r"nets has no 'Zoo.absent'"),
        ("nets:number", r"nets:number is a int; expected an nn.Module, or a callable that returns one"),
        ("nets:nothing", r"nets:nothing\(\) returned a NoneType; expected an nn.Module"),
        ("nets:broken", r"calling nets:broken\(\) raised RuntimeError: no such checkpoint \(.*nets.py:\d+\)"),
        (
            "nets:Sized",
            r"nets:Sized\(width\) is called without arguments, which fails: missing a required argument: 'width'",
        ),
        ("failing:Net", r"importing failing raised ValueError: bad \(.*failing.py:1\); --verbose shows the traceback"),
        ("needy:Net", r"importing needy raised ModuleNotFoundError: No module named 'mmcv_of_long_ago'"),
        ("script.py:Net", r"importing script.py raised SystemExit: 2 .*guard it with `if __name__"),
    ],
)
def test_model_that_is_not_there(load, project, spec, message):
    (project / "failing.py").write_text("raise ValueError('bad')\n")
    (project / "needy.py").write_text("import mmcv_of_long_ago\n")
    (project / "script.py").write_text("raise SystemExit(2)\n")
    with pytest.raises(_model.ExportError, match=message):
        load(spec)


@pytest.mark.parametrize("spec", ["nets", "nets:", ":Net", "a b:Net", "nets:Net()", "dir/nets:Net"])
def test_malformed_model(run, spec):
    result = run("export", spec)
    assert result.code == 2
    assert f"expected package.module:callable or path/to/file.py:callable, got {spec!r}" in result.err


@pytest.mark.parametrize("spec", ["x", "x=", "=1x2", "x=1,2", "x=1x-2", "x=1x2:", "x=1xx2", "1x=2", "x=1x2:float32:"])
def test_malformed_input(run, spec):
    result = run("export", "nets:Net", "--input", spec)
    assert result.code == 2
    assert f"got {spec!r}; for example image=1x3x224x224 or ids=1x77:int64" in result.err


def test_unknown_input_dtype(run):
    result = run("export", "nets:Net", "--input", "x=1x2:half")
    assert result.code == 2
    assert "expected a dtype of float32, float16," in result.err
    assert "got 'half' in 'x=1x2:half'" in result.err


def test_random_inputs(load):
    words = "nets:Masked", "--input", "x=2x3:float16", "--input", "ids=5:int64", "--input", "mask=40:bool"
    _, args = load(*words)
    assert (args["x"].dtype, args["x"].shape) == (torch.float16, (2, 3))
    assert args["x"].abs().sum() > 0
    assert args["ids"].dtype == torch.int64
    assert set(args["ids"].tolist()) <= {0, 1}
    assert set(args["mask"].tolist()) == {False, True}
    _, again = load(*words)
    _, other = load(*words, "--seed", 1)
    assert torch.equal(args["x"], again["x"])
    assert not torch.equal(args["x"], other["x"])


def test_random_weights_are_the_same_every_time(load):
    first, again, other = (load("nets:Ready", "--seed", seed)[0].conv.weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_list_of_inputs(load):
    words = "--input", "features_1=2", "--input", "features_0=1", "--input", "scale=1"
    _, args = load("nets:Pyramid", *words)
    assert [f.shape for f in args["features"]] == [(1,), (2,)]
    assert args["scale"].shape == (1,)
    with pytest.raises(_model.ExportError, match=r"the list features needs features_0 to features_2, got \[0, 2\]"):
        load("nets:Pyramid", "--input", "features_0=1", "--input", "features_2=1")


def test_inputs_from_npz(load, project):
    np.savez(project / "in.npz", features_0=np.ones((1, 2)), features_1=np.zeros(3, np.int64), scale=np.float32(2))
    _, args = load("nets:Pyramid", "--inputs", "in.npz")
    assert [f.dtype for f in args["features"]] == [torch.float64, torch.int64]
    assert args["scale"].shape == ()


@pytest.mark.parametrize("value", [torch.ones(2), (torch.ones(2), [torch.zeros(1)]), {"x": torch.ones(1)}])
def test_inputs_from_pt(load, project, value):
    torch.save(value, project / "in.pt")
    torch.testing.assert_close(load("nets:Net", "--inputs", "in.pt")[1], value)


def test_inputs_from_both(load, project):
    torch.save({"scale": torch.ones(1)}, project / "in.pt")
    _, args = load("nets:Pyramid", "--inputs", "in.pt", "--input", "features_0=4")
    assert sorted(args) == ["features", "scale"]
    torch.save((torch.ones(1),), project / "in.pt")
    with pytest.raises(_model.ExportError, match=r"--input adds to arguments by name, but in.pt holds a tuple"):
        load("nets:Net", "--inputs", "in.pt", "--input", "x=4")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.npz", None, "no such file: absent.npz"),
        ("absent.pt", None, "no such file: absent.pt"),
        ("in.json", b"{}", r"expected a .npz or .pt file of inputs, got in.json; save one with numpy.savez"),
        ("in.npz", b"nonsense", r"in.npz cannot be read as .npz of plain arrays"),
        ("in.pt", b"nonsense", r"in.pt cannot be read as tensors saved by torch.save"),
        ("in.pt", b"", r"in.pt cannot be read as tensors saved by torch.save: EOFError"),
    ],
)
def test_unreadable_inputs(load, project, name, content, message):
    if content is not None:
        (project / name).write_bytes(content)
    with pytest.raises(_model.ExportError, match=message):
        load("nets:Net", "--inputs", name)


def test_files_run_no_code(load, project):
    class Payload:
        def __reduce__(self):
            return print, ("ran",)

    torch.save(Payload(), project / "in.pt")
    np.savez(project / "in.npz", x=np.array([Payload()], dtype=object))
    for name in ("in.pt", "in.npz"):
        with pytest.raises(_model.ExportError, match=f"{name} cannot be read"):
            load("nets:Net", "--inputs", name)
    with pytest.raises(_model.ExportError, match=r"in.pt cannot be read"):
        load("nets:Net", "--weights", "in.pt")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": state},
        lambda state: {f"module.{key}": value for key, value in state.items()},
    ],
)
def test_weights(load, project, wrap):
    saved, _ = load("nets:Ready", "--seed", 5)
    torch.save(wrap(saved.state_dict()), project / "net.pt")
    model, _ = load("nets:Ready", "--weights", "net.pt")
    torch.testing.assert_close(model.state_dict(), saved.state_dict())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"conv.weight": torch.ones(1)}, r"net.pt does not fit the model: (?s:.*)Missing key.*conv.bias"),
        ({"conv.weight": 3}, r"net.pt does not fit the model"),
        ([torch.ones(1)], r"expected a state_dict in net.pt, got a list"),
    ],
)
def test_weights_that_do_not_fit(load, project, value, message):
    torch.save(value, project / "net.pt")
    with pytest.raises(_model.ExportError, match=message):
        load("nets:Net", "--weights", "net.pt")
