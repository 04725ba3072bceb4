"""Timing and record keeping shared by the benchmarks."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = ["interleaved", "write"]

RESULTS = Path(__file__).parent / "results"


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
    return {n: {"median": statistics.median(t), "min": min(t), "runs": len(t)} for n, t in times.items()}


def write(name: str, rows: Any) -> Path:
    """Writes ``results/<name>.json`` with the device, versions, command and date the rows were measured with."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "onnx", "onnxruntime", "onnxscript", "numpy", "svexport"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    record = {
        "device": _device(),
        "threads": torch.get_num_threads(),
        "versions": versions,
        "command": " ".join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


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
