"""``python -m benchmarks.export_time [--rounds N] [NAME …]``: how long an export takes.

``svexport.export(verify=False)`` at opset 11 beside both of torch's exporters, and ``import svexport`` beside
``import torch``.

CPU seconds of one thread, each exporter in turn: torch's TorchScript exporter at opset 17 and the one on torch.export
at 18, the opsets at which most models export with them. The examples, single functions and the architectures of
``tests/exporter/test_architectures.py``. What an export takes at first counts apart: the first of a process loads half
of torch, the first of a model what it alone needs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import svexport
from benchmarks._measure import write
from svexport.cli._model import load_file

EXAMPLES = ("detr3d", "deformable_detr", "multicamera", "stgcn", "yolox_stem")
GOALS = {"TorchScript": 2.5, "torch.export": 0.7}
"""The largest ratio of our time to a peer's, at the median."""

_IMPORT = """
import time
a = time.process_time(); import torch; b = time.process_time(); import svexport; c = time.process_time()
print(b - a, c - b)
"""


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


FUNCTIONS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gelu": lambda: (nn.GELU(), torch.randn(2, 3)),
    "topk": lambda: (_Function(lambda x: torch.topk(x, 3)), torch.randn(4, 9)),
    "interpolate": lambda: (_Function(lambda x: F.interpolate(x, scale_factor=2.0)), torch.randn(1, 3, 8, 8)),
    "TransformerEncoderLayer": lambda: (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), torch.randn(2, 9, 32)),
    "LSTM": lambda: (nn.LSTM(4, 5), torch.randn(6, 2, 4)),
}


def models() -> dict[str, Callable[[], tuple[nn.Module, Any]]]:
    """A maker of each model and its arguments."""

    def example(name: str) -> tuple[nn.Module, Any]:
        model = load_file(Path(__file__).parents[1] / "examples" / f"{name}.py").model()
        return model, model.example_inputs

    made: dict[str, Callable[[], tuple[nn.Module, Any]]] = {n: lambda n=n: example(n) for n in EXAMPLES} | FUNCTIONS  # type: ignore[misc]
    with contextlib.suppress(BaseException):  # pytest skips what is not installed
        from tests.exporter.test_architectures import ARCHITECTURES

        made |= {name: build for name, (build, _) in ARCHITECTURES.items()}
    return made


def theirs(model: nn.Module, args: Any, path: Path, dynamo: bool) -> None:
    """Either of torch's exporters."""
    args, kwargs = ((), args) if isinstance(args, dict) else (args if isinstance(args, tuple) else (args,), {})
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
        if dynamo:
            torch.onnx.export(model, args, str(path), kwargs=kwargs, dynamo=True, opset_version=18, verbose=False)
        else:
            torch.onnx.export(model, (*args, kwargs) if kwargs else args, str(path), dynamo=False, opset_version=17)


def timed(call: Callable[[], Any]) -> float | None:
    """CPU seconds; None of what fails."""
    started = time.process_time()
    try:
        call()
    except Exception:  # noqa: BLE001 - a peer may export less than we do
        return None
    return time.process_time() - started


def export_times(name: str, model: nn.Module, args: Any, folder: Path, rounds: int) -> dict[str, Any]:
    path = folder / "m.onnx"
    calls = {
        "svexport": lambda: svexport.export(model, args, path, opset=11, verify=False),
        "TorchScript": lambda: theirs(model, args, path, dynamo=False),
        "torch.export": lambda: theirs(model, args, path, dynamo=True),
    }
    row: dict[str, Any] = {"workload": name}
    row["first"] = {label: timed(call) for label, call in calls.items()}
    seconds: dict[str, list[float | None]] = {label: [] for label in calls}
    for _ in range(rounds):
        for label, call in calls.items():
            seconds[label].append(timed(call) if row["first"][label] is not None else None)
    later = {label: None if None in found else statistics.median(found) for label, found in seconds.items()}  # type: ignore[type-var]
    row["later"] = later
    for peer in GOALS:
        if later[peer] and later["svexport"]:
            row[f"ratio to {peer}"] = later["svexport"] / later[peer]  # type: ignore[operator]
    return row


def import_times() -> list[dict[str, Any]]:
    runs = []
    for _ in range(9):
        output = subprocess.run([sys.executable, "-c", _IMPORT], check=True, capture_output=True, text=True).stdout
        runs.append(tuple(map(float, output.split())))
    return [
        {"workload": name, "median": statistics.median(run[index] for run in runs), "runs": len(runs)}
        for index, name in enumerate(("import torch", "import svexport, after torch"))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.export_time", description="how long an export takes")
    parser.add_argument("names", nargs="*", help="models; all unless given")
    parser.add_argument("--rounds", type=int, default=3, help="of each exporter in turn, after the first")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, build in models().items():
            if options.names and name not in options.names:
                continue
            torch.manual_seed(0)
            try:
                model, args = build()
            except BaseException as error:  # noqa: BLE001 - as above
                print(f"{name}: {error}")
                continue
            rows.append(export_times(name, model.eval(), args, Path(folder), options.rounds))
            print(*(f"{k}: {v:.3f}" if isinstance(v, float) else f"{k}: {v}" for k, v in rows[-1].items()), flush=True)
    for peer, goal in GOALS.items():
        ratios = [row[f"ratio to {peer}"] for row in rows if f"ratio to {peer}" in row]
        rows.append(
            {
                "workload": f"median ratio to {peer}",
                "ratio": statistics.median(ratios) if ratios else None,
                "goal": goal,
                "models": len(ratios),
            }
        )
        print(rows[-1])
    rows += import_times()
    print(write("export-time-cpu", rows))


if __name__ == "__main__":
    main()
