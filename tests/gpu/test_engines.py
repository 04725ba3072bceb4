"""Streams, memory and CUDA graphs of engines on a GPU, with a reference for TensorRT whose layers torch computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import svexport
from svexport.runtime import build, place, tensorrt
from svexport.tensorrt.jit_plugin import tensor_at
from tests.gpu.support import gpu
from tests.tensorrt.models import Scale, exported
from tests.tensorrt.reference import Reference, install
from tests.tensorrt.reference.runtime import Context

pytestmark = gpu
ROWS, COLUMNS = 512, 1024


class Wide(Scale):
    example_inputs = (torch.ones(2, COLUMNS),)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Of 2 * x + 1, which takes a while on the device."""
    exported(Wide(), tmp_path / "m.onnx", dynamic_shapes={"x": {0: "rows"}})
    trt = install(monkeypatch, tmp_path, "10.16.1")
    svexport.build(tmp_path / "m.onnx", tmp_path / "m.engine", shapes=SHAPES).close()
    for module in (build, tensorrt):
        monkeypatch.setattr(module, "place", place.cuda)
    trt.streams = []

    def execute(self: Any, stream_handle: int) -> bool:
        trt.streams.append(stream_handle)
        with torch.cuda.stream(torch.cuda.ExternalStream(stream_handle)):
            x = tensor_at(self._addresses["x"], self._shapes["x"], torch.float32)
            slow = x
            for _ in range(20):  # long enough for a reader that does not wait to come too early
                slow = slow.sort(dim=1).values
            [name] = self._engine._outputs
            size = x.numel() * 4
            if name in self._allocators:
                address = self._allocators[name].reallocate_output_async(name, None, size, 256, stream_handle)
                self._allocators[name].notify_shape(name, x.shape)
            else:
                address = self._addresses[name]
            y = tensor_at(address, tuple(x.shape), torch.float32)
            torch.add(2 * x + 1, slow - slow, out=y)
        return True

    def shape(self: Any, name: str) -> tuple[int, ...]:
        if name in self._engine._names:
            return self._shapes[name]
        return tuple(-1 if trt.faults.get("unknown") else size for size in self._shapes["x"])

    monkeypatch.setattr(Context, "execute_async_v3", execute)
    monkeypatch.setattr(Context, "get_tensor_shape", shape)
    Reference.current = trt  # type: ignore[attr-defined]
    return tmp_path / "m.engine"


SHAPES = {"x": ((0, COLUMNS), (ROWS, COLUMNS), (4 * ROWS, COLUMNS))}


def check(engine: Callable[..., Any]) -> None:
    """Inputs written just before, outputs read just after, memory of both used again at once."""
    for i in range(30):
        x = torch.full((ROWS, COLUMNS), float(i), device="cuda")
        y = engine(x)
        del x
        torch.full((ROWS, COLUMNS), -1.0, device="cuda")  # where x was
        assert bool((y == 2 * i + 1).all())


@pytest.mark.parametrize("unknown", [False, True])
def test_on_the_default_stream_and_others(plan: Path, unknown: bool) -> None:
    trt = Reference.current  # type: ignore[attr-defined]
    trt.faults["unknown"] = unknown
    with svexport.load(plan) as engine:
        check(engine)
        assert 0 not in trt.streams
        trt.streams.clear()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            check(engine)
        assert set(trt.streams) == {stream.cuda_stream}
        assert engine(torch.ones(0, COLUMNS, device="cuda")).shape == (0, COLUMNS)
        assert engine(torch.ones(3, COLUMNS)).device.type == "cuda"  # from the CPU


@pytest.mark.parametrize("unknown", [False, True])
def test_threads_on_streams_of_their_own(plan: Path, unknown: bool) -> None:
    Reference.current.faults["unknown"] = unknown  # type: ignore[attr-defined]
    wrong: list[BaseException] = []
    with svexport.load(plan) as engine:

        def work(own: bool) -> None:
            try:
                with torch.cuda.stream(torch.cuda.Stream() if own else None):
                    check(engine)
            except BaseException as error:  # noqa: BLE001 - raised where the test waits
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_recorded_runs(plan: Path) -> None:
    trt = Reference.current  # type: ignore[attr-defined]
    with svexport.load(plan, cuda_graphs=2) as engine:
        check(engine)
        called = len(trt.streams)
        check(engine)
        assert len(trt.streams) == called  # replayed
        x = torch.randn(7, COLUMNS, device="cuda")
        first, second = engine(x), engine(-x)
        assert torch.equal(first, 2 * x + 1)
        assert torch.equal(second, 1 - 2 * x)
        assert set(engine.info()["cuda_graphs"].values()) == {"recorded"}


def test_a_run_whose_sizes_are_unknown_is_not_recorded(plan: Path) -> None:
    Reference.current.faults["unknown"] = True  # type: ignore[attr-defined]
    with svexport.load(plan, cuda_graphs=2) as engine:
        check(engine)
        assert list(engine.info()["cuda_graphs"].values()) == ["the sizes of its outputs follow from its numbers"]
