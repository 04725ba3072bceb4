"""A verification whose file runs in a thread of its own says what one says that waits for each run."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport.exporter import agreement, beside, rounding, verify
from svexport.exporter.beside import FileBeside
from svexport.runtime import session

export = importlib.import_module("svexport.exporter.export")  # svexport.export is the function


def nothing() -> None:
    """What writes a file that is there already."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x) * mask[:, None]
        return self.second(y.relu()), y.argmax(-1)


class Wrong(Net):
    """Computes something else in the file than in torch, of inputs that are not like the given ones."""

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        traced = torch.compiler.is_exporting() or torch.jit.is_tracing()
        return super().forward(x.clamp(max=50) if traced else x, mask)


class Remembers(Net):
    """Adds up what it has been given: its results depend on the order of forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.add_(x.sum().detach())
        return super().forward(x, mask)


class Refuses(Net):
    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_exporting() and not x.any():
            raise ValueError("nothing there")
        return super().forward(x, mask)


def said(kind: type[Net], folder: Path, monkeypatch: pytest.MonkeyPatch, processors: int) -> dict[str, Any]:
    """What an export says, where a process may use so many processors beside torch's threads."""
    monkeypatch.setattr(beside, "_processors", lambda: processors)
    torch.manual_seed(0)
    args = torch.randn(11, 7), torch.rand(11) > 0.4
    try:
        report = svexport.export(kind().eval(), args, folder / "m.onnx", opset=13)
    except svexport.SvexportError as error:
        return {"error": type(error), "text": str(error)}
    results = [{**p.to_dict(), "cosine": None, "max_rel": None} for p in report.parity]
    return {"parity": results, "skipped": report.skipped, "notes": report.notes}


@pytest.mark.parametrize("kind", [Net, Wrong, Remembers, Refuses])
def test_what_it_says_is_the_same(kind: type[Net], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, with_another = (said(kind, tmp_path, monkeypatch, n) for n in (1, 64 * torch.get_num_threads()))
    assert alone == with_another
    assert ("error" in alone) == (kind is Wrong), alone
    assert bool(alone.get("skipped")) == (kind is Refuses), alone


def test_torch_computes_the_next_inputs_while_the_file_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's run of the given inputs ends when torch has begun with the second ones after them, or the test
    fails."""
    began, threads, own = threading.Event(), [], FileBeside.start

    def start(self: FileBeside, inputs: list[Tensor]) -> Any:
        run = self.engine.run

        def waiting(tensors: list[Tensor]) -> list[Tensor]:
            threads.append(threading.current_thread())
            assert began.wait(20), "torch waits for the file"
            return run(tensors)

        monkeypatch.setattr(self.engine, "run", waiting)
        return own(self, inputs)

    class Counts(Net):
        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            if not torch.compiler.is_exporting() and not x.any():
                began.set()
            return super().forward(x, mask)

    monkeypatch.setattr(beside, "_processors", lambda: 64 * torch.get_num_threads())
    monkeypatch.setattr(FileBeside, "start", start)
    svexport.export(Counts().eval(), (torch.randn(11, 7), torch.ones(11)), tmp_path / "m.onnx", opset=13)
    assert threads
    assert threading.main_thread() not in threads


def test_the_file_is_run_on_the_given_inputs_once_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch has computed these, and no second time."""
    args, ran, runs = (torch.randn(11, 7), torch.ones(11)), threading.Event(), []
    own = session.OnnxEngine.run

    def run(self: session.OnnxEngine, tensors: list[Tensor]) -> list[Tensor]:
        runs.append(torch.equal(tensors[0], args[0]))
        ran.set()
        return own(self, tensors)

    class Waits(Net):
        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            assert torch.compiler.is_exporting() or ran.wait(20), "the file waits for torch"
            return super().forward(x, mask)

    monkeypatch.setattr(beside, "_processors", lambda: 64 * torch.get_num_threads())
    monkeypatch.setattr(session.OnnxEngine, "run", run)
    assert svexport.export(Waits().eval(), args, tmp_path / "m.onnx", opset=13).verified
    assert runs[0]
    assert runs.count(True) == 1


@pytest.mark.parametrize("many", [True, False])
def test_torch_computes_the_given_inputs_while_the_file_is_written(
    many: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are many numbers; else the two would only take turns in Python."""
    began, usual, own = threading.Event(), sys.getswitchinterval(), export.finish

    def finish(*args: Any) -> Any:
        assert began.wait(20 if many else 0.2) == many
        assert sys.getswitchinterval() < usual
        return own(*args)

    class Begins(Net):
        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            if not torch.compiler.is_exporting():
                began.set()
            return super().forward(x, mask)

    monkeypatch.setattr(beside, "_processors", lambda: 64 * torch.get_num_threads())
    monkeypatch.setattr(export, "finish", finish)
    monkeypatch.setattr(export, "_MANY", 1 if many else 2**20)
    report = svexport.export(Begins().eval(), (torch.randn(11, 7), torch.ones(11)), tmp_path / "m.onnx", opset=13)
    assert report.verified
    assert sys.getswitchinterval() == usual


@pytest.mark.parametrize("processors", [1, 1024])
def test_nothing_waits_for_garbage_to_be_collected(
    processors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the session nor the tensors of a verification, of which torch's rounding was asked too."""
    monkeypatch.setattr(beside, "_processors", lambda: processors)
    monkeypatch.setattr(agreement, "CLOSE", -1.0)
    made: list[weakref.ref[Any]] = []
    for kind in (session.OnnxEngine, verify.Verification, rounding.Rounding):

        def init(self: Any, *args: Any, own: Any = kind.__init__, **kwargs: Any) -> None:
            made.append(weakref.ref(self))
            own(self, *args, **kwargs)

        monkeypatch.setattr(kind, "__init__", init)
    gc.disable()
    try:
        svexport.export(Net().eval(), (torch.randn(11, 7), torch.ones(11)), tmp_path / "m.onnx", opset=13)
        assert len(made) > 3
        assert [one() for one in made] == [None] * len(made)
    finally:
        gc.enable()


@pytest.mark.parametrize("processors", [1, 1024])
@pytest.mark.parametrize("fails", [False, True])
def test_what_keeps_a_file_from_being_written_is_said_first(
    fails: bool, processors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever forward does meanwhile; nothing is left behind, nor a thread that writes."""

    def finish(*_: Any) -> Any:
        time.sleep(0.05)
        raise svexport.ExportError("there is no ink")

    class Fails(Net):
        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            if fails and not torch.compiler.is_exporting() and not torch.jit.is_tracing():
                raise ValueError("nor is there light")
            return super().forward(x, mask)

    monkeypatch.setattr(beside, "_processors", lambda: processors)
    monkeypatch.setattr(export, "finish", finish)
    usual = sys.getswitchinterval()
    with pytest.raises(svexport.ExportError, match="no ink"):
        svexport.export(Fails().eval(), (torch.randn(11, 7), torch.ones(11)), tmp_path / "m.onnx", opset=13)
    assert sys.getswitchinterval() == usual
    assert not list(tmp_path.iterdir())
    assert not any(thread.name.startswith("svexport-file") for thread in threading.enumerate())


@pytest.mark.parametrize("processors", [1, 1024])
def test_a_file_that_cannot_be_loaded_is_an_error(processors: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(beside, "_processors", lambda: processors)
    (tmp_path / "m.onnx").write_bytes(b"no model")
    with FileBeside(tmp_path / "m.onnx", nothing) as file:
        with pytest.raises(svexport.VerificationError, match=r"No file was written"):
            file.load()
        with pytest.raises(svexport.VerificationError, match=r"No file was written"):
            file.start([torch.zeros(2)]).result()


@pytest.mark.parametrize(
    ("torchs", "processors", "during"), [(1, 1, 1), (1, 2, 1), (2, 2, 1), (3, 4, 3), (3, 2, 2), (2, 4, 2)]
)
def test_torch_has_its_threads_again(
    torchs: int, processors: int, during: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "_processors", lambda: processors)
    (tmp_path / "m.onnx").write_bytes(b"no model")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(torchs)
        with FileBeside(tmp_path / "m.onnx", nothing) as file:
            assert torch.get_num_threads() == during
            assert file.waits == (processors == 1)
        assert torch.get_num_threads() == torchs
        with FileBeside(tmp_path / "m.onnx", nothing, apart=False) as file:
            assert file.waits
            assert torch.get_num_threads() == torchs
    finally:
        torch.set_num_threads(before)
