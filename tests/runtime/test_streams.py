"""Order of CUDA streams, with stand-ins that only record order: no memory is written while another stream uses it.

An operation on a stream comes after earlier ones on it, and after what the stream was told to wait for. Two operations
on the same memory, at least one of them a write, race unless one comes after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from svexport.runtime import context as contexts
from svexport.runtime import place, session


class Device:
    """In the place of ``torch.cuda``; ``races`` are what went wrong."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self.default = Stream(self, number=0)
        self.current = self.default
        self.streams = 0

    def Stream(self, device: Any = None) -> Stream:
        self.streams += 1
        return Stream(self, self.streams)

    def Event(self) -> Event:
        return Event()

    def current_stream(self, device: Any = None) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def get_device_name(self, device: Any) -> str:
        return "streams"

    def synchronize(self, device: Any = None) -> None:
        pass


class Stream:
    def __init__(self, device: Device, number: int) -> None:
        self.device, self.cuda_stream = device, number
        self.seen: dict[int, int] = {}  # of each stream, how many operations come before the next one here

    def wait_stream(self, other: Stream) -> None:
        self.after(other.seen)

    def wait_event(self, event: Event) -> None:
        self.after(event.seen)

    def after(self, seen: dict[int, int]) -> None:
        for stream, count in seen.items():
            self.seen[stream] = max(self.seen.get(stream, 0), count)

    def operation(self, reads: list[Memory], writes: list[Memory]) -> None:
        self.seen[self.cuda_stream] = self.seen.get(self.cuda_stream, 0) + 1
        for memory in reads:
            self.comes_after(memory, memory.writes)
            memory.reads[self.cuda_stream] = self.seen[self.cuda_stream]
        for memory in writes:
            self.comes_after(memory, {**memory.reads})
            self.comes_after(memory, memory.writes)
            memory.writes[self.cuda_stream] = self.seen[self.cuda_stream]

    def comes_after(self, memory: Memory, uses: dict[int, int]) -> None:
        late = [stream for stream, count in uses.items() if self.seen.get(stream, 0) < count]
        if late:
            self.device.races.append(f"stream {self.cuda_stream} uses {memory.name}, which {late} may still use")


class Event:
    seen: dict[int, int]

    def record(self, stream: Stream) -> None:
        self.seen = dict(stream.seen)


class Memory:
    """In the place of a tensor, from the pool of the stream that is current when it is made."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name, self.home = device, name, device.current
        self.reads: dict[int, int] = {}
        self.writes: dict[int, int] = {}
        self.recorded: list[Stream] = []
        self.home.operation([], [self])

    def copy_(self, other: Memory) -> None:
        self.device.current.operation([other], [self])

    def clone(self) -> Memory:
        made = Memory(self.device, f"a copy of {self.name}")
        made.copy_(self)
        return made

    def record_stream(self, stream: Stream) -> None:
        self.recorded.append(stream)

    def freed(self) -> None:
        """Its memory is used again, by the stream that it is of, once those that are recorded have gone so far."""
        for stream in self.recorded:
            self.home.after(stream.seen)
        self.home.operation([], [self])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    for module in (place, session):
        monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=made, Tensor=torch.Tensor))
    return made


def calls(device: Device, replay: Any, *freed: Memory) -> None:
    """From several streams in turn; inputs and results are freed where they are used, and ``freed`` at the end."""
    callers = [device.default, device.Stream(), device.Stream()]
    kept = []
    for caller in (*callers, callers[0], callers[1]):
        with device.stream(caller):
            given = Memory(device, "input")
            [result] = replay([given])
            caller.operation([result], [])
            given.freed()
            kept.append((caller, result))
    for caller, result in kept:
        with device.stream(caller):
            caller.operation([result], [])
            result.freed()
    for memory in freed:
        memory.freed()


def test_replays_of_onnx_runtime(device: Device) -> None:
    cuda = session._Cuda(torch.device("cuda", 0), None, session._Cuda(torch.device("cuda", 0), None))
    assert cuda.provider[1]["enable_cuda_graph"] == "1"
    own, outputs = [Memory(device, "own input")], [Memory(device, "own output")]

    def run() -> None:
        cuda._stream.operation(own, outputs)  # by its handle, whatever torch's current stream is

    # Its own inputs are free when a run ends, for which ONNX Runtime waits.
    calls(device, lambda given: cuda.replay(run, own, given, outputs), *outputs)
    assert not device.races


def test_replays_of_tensorrt(device: Device) -> None:
    where: Any = place.Cuda(torch.device("cuda", 0))
    own, outputs = [Memory(device, "own input")], [Memory(device, "own output")]
    replay = contexts.Replay(where, object(), own, outputs, lambda: device.current.operation(own, outputs))  # type: ignore[arg-type]
    calls(device, replay)  # what is its own is freed once the device has done all
    assert not device.races


def test_a_race_is_found(device: Device) -> None:
    """Of what the tests here take for right."""
    own, outputs = [Memory(device, "own input")], [Memory(device, "own output")]

    def unordered(given: list[Memory]) -> list[Memory]:
        own[0].copy_(given[0])
        device.current.operation(own, outputs)
        return [outputs[0].clone()]

    calls(device, unordered)
    assert any("own input" in race for race in device.races)
    assert any("own output" in race for race in device.races)


def test_nothing_runs_while_a_run_is_recorded(device: Device) -> None:
    """ONNX Runtime records in a mode in which what other threads allocate fails, and breaks the recording."""
    plain = session._Cuda(torch.device("cuda", 0), None)
    records = session._Cuda(torch.device("cuda", 0), None, plain)
    inside, end, order = threading.Event(), threading.Event(), []

    def record() -> None:
        inside.set()
        assert end.wait(30)
        order.append("recorded")

    recording = threading.Thread(target=records.replay, args=(record, [], [], []))
    recording.start()
    assert inside.wait(30)
    bound = SimpleNamespace(run_with_iobinding=lambda binding: order.append("ran"))
    running = threading.Thread(target=plain.run, args=(bound, None))
    running.start()
    running.join(0.2)
    end.set()
    recording.join()
    running.join()
    assert order == ["recorded", "ran"]
