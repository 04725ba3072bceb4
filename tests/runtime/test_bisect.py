"""Bisection over layers of TensorRT engines, with a TensorRT that runs on the CPU (tests/tensorrt/reference)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport import BuildError, UnsupportedError
from svexport.runtime import bisect
from tests.tensorrt.reference.fixtures import Install, every_version


class Scaled(nn.Module):
    """A layer that is easy to plant a fault in: its file has one Mul by a constant of its own."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Branches(nn.Module):
    """Two chains that are added, and a step after that."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Scaled(1.01)
        self.left = nn.Sequential(*(Scaled(1.1 + 0.01 * i) for i in range(9)))
        self.right = nn.Sequential(*(Scaled(1.3 + 0.01 * i) for i in range(9)))
        self.last = Scaled(1.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.last(self.left(x) + self.right(x))

    example_inputs = (torch.linspace(1, 2, 12).reshape(3, 4),)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("branches") / "m.onnx"
    svexport.export(Branches(), Branches.example_inputs, path, verify="quick", dynamic_shapes={"x": {0: "batch"}})
    return path


def scale(factor: float, by: float = 2.0) -> Callable[[onnx.ModelProto], None]:
    """A fault: this factor is another."""

    def plant(model: onnx.ModelProto) -> None:
        held = [t for t in model.graph.initializer if not t.dims or list(t.dims) == [1]]
        held += [a.t for n in model.graph.node if n.op_type == "Constant" for a in n.attribute if a.name == "value"]
        for tensor in held:
            value = onnx.numpy_helper.to_array(tensor)
            if value.size == 1 and abs(float(value.reshape(())) - factor) < 1e-4:
                tensor.CopyFrom(onnx.numpy_helper.from_array(value * by, tensor.name))
                return
        raise AssertionError(f"no {factor} in the file")

    return plant


FACTORS = {"stem": 1.01, "left.0": 1.1, "left.4": 1.14, "right.0": 1.3, "right.8": 1.38, "last": 1.5}


@pytest.mark.parametrize("module", FACTORS)
def test_on_any_branch(file: Path, tmp_path: Path, tensorrt: Install, module: str) -> None:
    trt = tensorrt(kernel=scale(FACTORS[module]))
    with svexport.build(file, tmp_path / "m.engine") as engine:
        found = svexport.compare(Branches(), engine, layers=True)
    assert found.first is not None
    assert found.first.name == module
    assert len(trt.built) - 1 <= 5  # engines with more outputs, of 22 layers
    assert not list(trt.alive)
    [note] = [note for note in found.notes if "layers were compared" in note]
    assert note.startswith(f"{len(found.layers)} of ")


def test_only_a_few_outputs_are_added_at_a_time(
    file: Path, tmp_path: Path, tensorrt: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[int] = []

    def kernel(model: onnx.ModelProto) -> None:
        shown.append(len(model.graph.output))
        scale(1.34)(model)

    tensorrt(kernel=kernel)
    with svexport.build(file, tmp_path / "m.engine") as engine:
        svexport.compare(Branches(), engine, layers=True)
        assert shown[0] == 1
        assert max(shown) <= 1 + bisect.PROBES
        monkeypatch.setattr(bisect, "PROBES", 1)
        assert svexport.compare(Branches(), engine, layers=True).first.name == "right.4"  # type: ignore[union-attr]


def test_what_fails_only_where_layers_are_fused(file: Path, tmp_path: Path, tensorrt: Install) -> None:
    """With more outputs the error is gone, and that is said."""

    def kernel(model: onnx.ModelProto) -> None:
        if len(model.graph.output) == 1:
            scale(1.14)(model)

    tensorrt(kernel=kernel)
    with svexport.build(file, tmp_path / "m.engine") as engine:
        found = svexport.compare(Branches(), engine, layers=True)
    assert not found.ok
    assert found.first is None
    assert any("as further outputs the engine's own agree" in note for note in found.notes)


def test_values_that_cannot_be_outputs_are_looked_through(
    file: Path, tmp_path: Path, tensorrt: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    from svexport.runtime import build as module

    plain = module.build
    products = [node.output[0] for node in onnx.load(file).graph.node if node.op_type == "Mul"]
    hidden = products[5]  # of left.4, where the fault is

    def build(model: onnx.ModelProto, *args: object, **options: object) -> object:
        if hidden in [output.name for output in model.graph.output]:
            raise BuildError("TensorRT builds no engine")
        return plain(model, *args, **options)  # type: ignore[arg-type]

    tensorrt(kernel=scale(1.14))
    with svexport.build(file, tmp_path / "m.engine") as engine:
        monkeypatch.setattr(module, "build", build)
        found = svexport.compare(Branches(), engine, layers=True)
    assert found.first is not None
    assert found.first.name == "left.5"
    assert any(f"{hidden} cannot be outputs" in note for note in found.notes)


def test_behind_all_layers(tmp_path: Path, tensorrt: Install) -> None:
    class After(nn.Module):
        example_inputs = (torch.ones(2, 3),)

        def __init__(self) -> None:
            super().__init__()
            self.inner = Scaled(1.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * 1.7

    svexport.export(After(), path=tmp_path / "m.onnx", verify="quick")
    tensorrt(kernel=scale(1.7))
    with svexport.build(tmp_path / "m.onnx") as engine:
        found = svexport.compare(After(), engine, layers=True)
    assert [p.ok for p in found.layers] == [True]
    assert any("the error begins after them" in note for note in found.notes)


def test_outputs_that_agree_and_chosen_layers(file: Path, tmp_path: Path, tensorrt: Install) -> None:
    trt = tensorrt()
    with svexport.build(file, tmp_path / "m.engine") as engine:
        found = svexport.compare(Branches(), engine, layers=True)
        assert found.ok
        assert found.layers == []
        assert any("layers were not looked at" in note for note in found.notes)
        assert len(trt.built) == 1
        chosen = svexport.compare(Branches(), engine, layers=["left.1", "left.2", "right.1", "last"])
        assert [p.name for p in chosen.layers] == ["left.1", "left.2", "right.1", "last"]
        assert all(p.ok for p in chosen.layers)
        assert len(trt.built) == 3  # three at a time


@every_version
def test_an_engine_that_was_loaded_needs_its_file(file: Path, tmp_path: Path, tensorrt: Install, version: str) -> None:
    tensorrt(version, kernel=scale(1.14))
    svexport.build(file, tmp_path / "m.engine").close()
    with pytest.raises(UnsupportedError, match=r"m\.engine needs the ONNX file that it was built from: onnx="):
        svexport.compare(Branches(), tmp_path / "m.engine", layers=True)
    found = svexport.compare(Branches(), tmp_path / "m.engine", layers=True, onnx=file)
    assert found.first is not None
    assert found.first.name == "left.4"
