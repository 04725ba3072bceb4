"""Timing and record keeping shared by the benchmarks."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = [
    *("RESULTS", "Workload", "captured", "eager_times", "graph_times", "interleaved", "peak_memory", "queued_times"),
    "write",
]

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Workload:
    """Something that ours and its peers compute, on the GPU.

    Attributes:
        name: what is computed, on which shapes and types.
        ours, peers: functions without arguments that a CUDA graph can capture. The first peer is the one to beat.
        bytes: least device memory traffic: inputs read once, outputs written once.
        goal: the largest ratio of our time to the first peer's that meets the goal; of ``whole`` models beyond what the
            peer, timed twice, differs from itself.
        memory_goal: the largest ratio of the memory that our call allocates at once to the first peer's, for ``whole``.
        limit: the longest time of ours that meets the goal, in microseconds.
        eager: peers that no graph can capture; timed as they are.
        capturable: whether a graph captures all that the functions do. If not, plain calls are timed.
        whole: whether the functions are models: plain calls are timed, launches included, and their memory is told.
    """

    name: str
    ours: Callable[[], Any]
    peers: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    bytes: int = 0
    goal: float | None = None
    memory_goal: float | None = None
    limit: float | None = None
    eager: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    capturable: bool = True
    whole: bool = False


def graph_times(functions: Mapping[str, Callable[[], Any]], replays: int = 100) -> dict[str, dict]:
    """Times replays of a CUDA graph of one call each: ten at a time, in turn.

    Returns:
        name -> ``{"median": us, "min": us, "runs": n}``, between events around each replay.
    """
    return queued_times(captured(functions), replays)


def captured(functions: Mapping[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """Replays of a CUDA graph of one call each."""
    graphs = {}
    for name, function in functions.items():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                function()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            function()
    return {name: graph.replay for name, graph in graphs.items()}


def queued_times(functions: Mapping[str, Callable[[], Any]], runs: int = 100) -> dict[str, dict]:
    """Times calls on the default stream, ten at a time, in turn and back again: the first of a turn has it easier.

    The GPU is kept busy until all that a call launches is queued. Without a graph, for functions that launch on the
    default stream whatever the current one is: a graph captures only the rest of them. They must not wait for the GPU.
    The result is as of :func:`graph_times`.
    """
    cycles = {}
    for name, function in functions.items():
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            cycles[name] = 50_000 + int((time.perf_counter() - start) * 4e9)  # twice as long as that takes the CPU
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn, first in enumerate(range(0, runs, 10)):
        events = []
        for name, function in list(functions.items())[:: -1 if turn % 2 else 1]:
            function()  # with what the others left in the caches; not timed
            for _ in range(min(10, runs - first)):
                torch.cuda._sleep(cycles[name])
                events.append((name, *_timed(function)))
        torch.cuda.synchronize()
        for name, begin, end in events:
            times[name].append(begin.elapsed_time(end) * 1e3)
    return _summary(times)


def eager_times(functions: Mapping[str, Callable[[], Any]], runs: int = 20, seconds: float = 0.1) -> dict[str, dict]:
    """Times plain calls, launches included, in turn and five at once, or as many as take ``seconds``.

    Every other round goes backwards: what comes first in a round, or after its like, is favoured no more than others.
    The result is as of :func:`graph_times`.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    calls = max(1, min(5, int(seconds / max(map(_seconds, functions.values())))))
    for index in range(runs + 2):
        for name, function in list(functions.items())[:: -1 if index % 2 else 1]:
            torch.cuda.synchronize()
            start, end = _timed(lambda function=function: [function() for _ in range(calls)])
            torch.cuda.synchronize()
            if index >= 2:
                times[name].append(start.elapsed_time(end) * 1e3 / calls)
    return _summary(times)


def peak_memory(function: Callable[[], Any]) -> int:
    """Bytes allocated at once during a call, its results among them."""
    function()
    torch.cuda.synchronize()
    gc.collect()  # or what it frees of earlier calls, in cycles, is taken off while this one is measured
    torch.cuda.empty_cache()  # or what is left of larger blocks counts where they are not worth dividing
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def noise(row: dict) -> float:
    """By what factor two timings of the peer, taken in turn with ours, differ; 1 where it was timed once."""
    if f"{row['peer']} again" not in row["times"]:
        return 1.0
    first, again = (row["times"][name]["median"] for name in (row["peer"], f"{row['peer']} again"))
    return max(first, again) / min(first, again)


def _seconds(function: Callable[[], Any]) -> float:
    function()
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _timed(function: Callable[[], Any]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    return start, end


def _summary(times: Mapping[str, list[float]]) -> dict[str, dict]:
    return {n: {"median": statistics.median(t), "min": min(t), "runs": len(t)} for n, t in times.items()}


def interleaved(functions: Mapping[str, Callable[[], Any]], seconds: float = 1.0, rounds: int = 5) -> dict[str, dict]:
    """Calls every function in turn, at least ``rounds`` times and for about ``seconds`` each.

    Returns:
        name -> ``{"median": s, "min": s, "runs": n}``. Taking turns keeps what else the machine does from favouring
        one.
    """
    for function in functions.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    started = time.perf_counter()
    while len(next(iter(times.values()))) < rounds or time.perf_counter() - started < seconds * len(functions):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - begin)
    return _summary(times)


def write(name: str, rows: list, folder: Path = RESULTS) -> Path:
    """Writes ``<folder>/<name>.json``, a row a line, with the device, versions, command and date of the measurement."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "onnx", "onnxruntime", "onnxscript", "numpy", "nvidia-modelopt", "svexport"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    record = {
        "device": _device(),
        "threads": torch.get_num_threads(),
        "versions": versions,
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
        "date": date.today().isoformat(),
    }
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    path.write_text(json.dumps(record, indent=2)[:-2] + f',\n  "rows": [\n{lines}\n  ]\n}}\n')
    return path


def _module() -> str:
    """The name this process was started with: ``python -m benchmarks.einsum``."""
    stem = Path(sys.argv[0]).stem
    return "benchmarks" if stem == "__main__" else f"benchmarks.{stem}"


def _device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    models = [line for line in _cpuinfo() if line.startswith("model name")]
    name = models[0].split(":", 1)[1].strip() if models else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
