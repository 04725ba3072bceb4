"""``svexport.export(dtype=torch.float16, keep="auto")`` beside AutoCast of nvidia-modelopt, on models that overflow.

``python -m benchmarks.half_models``, with ``nvidia-modelopt[onnx]`` installed. The models are those of
``tests/exporter/test_precision.py``. AutoCast gets the file in float32 and the same inputs to measure by. Both files
are computed node by node in the types that they say (onnx's reference evaluator), on inputs that neither was made with;
errors are relative to the model in float64.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch import Tensor, nn

import svexport
from benchmarks._measure import write
from tests.exporter.test_precision import OVERFLOWING, SINGLE, types

OPSET, HELD_OUT, MODELS = 17, 5, 3


class GatherElements(OpRun):  # type: ignore[misc]
    """That of onnx fails on matrices."""

    def _run(self, data: np.ndarray, indices: np.ndarray, axis: int = 0) -> tuple[np.ndarray]:
        return (np.take_along_axis(data, indices, axis),)


def error(model: nn.Module, path: Path, batches: Sequence[tuple[Tensor, ...]]) -> float:
    """Of a file's results, root of the mean square over that of the model's in float64; NaN where they are."""
    runner, precise, parts = ReferenceEvaluator(str(path), new_ops=[GatherElements]), copy.deepcopy(model).double(), []
    for batch in batches:
        expected = precise(*(x.double() for x in batch))
        given = {value.name: x.numpy() for value, x in zip(onnx.load(path).graph.input, batch, strict=True)}
        with np.errstate(all="ignore"):
            found = torch.from_numpy(np.asarray(runner.run(None, given)[0])).double()
        parts.append(((found - expected).square().mean(), expected.square().mean()))
    above, below = (sum(part) for part in zip(*parts, strict=True))
    return float((above / below) ** 0.5)


def kept(path: Path) -> float:
    """The share of nodes whose result is float32, casts not counted."""
    found = types(path)
    return sum(dtype == SINGLE for _, dtype in found) / len(found)


def by_autocast(single: Path, path: Path, args: tuple[Tensor, ...]) -> None:
    from modelopt.onnx.autocast import convert_to_mixed_precision

    data = path.with_suffix(".npz")
    np.savez(data, **{v.name: x.numpy() for v, x in zip(onnx.load(single).graph.input, args, strict=True)})
    made = convert_to_mixed_precision(str(single), keep_io_types=True, calibration_data=str(data))
    onnx.save(made, path)


def measure(make: Callable[[], nn.Module], inputs: Callable[[], Any], folder: Path) -> dict[str, Any]:
    """Errors and shares of both, and of ours with its plugins, whose bodies are not counted."""

    def drawn() -> tuple[Tensor, ...]:
        args = inputs()
        return args if isinstance(args, tuple) else (args,)

    model, args, held_out = make().eval(), drawn(), [drawn() for _ in range(HELD_OUT)]
    single, ours, plugins, autocast = (folder / f"{name}.onnx" for name in ("single", "ours", "plugins", "autocast"))
    svexport.export(model, args, single, opset=OPSET, plugins=False, verify=False)
    half: dict[str, Any] = {"opset": OPSET, "dtype": torch.float16, "keep": "auto"}
    svexport.export(model, args, ours, plugins=False, **half)
    svexport.export(model, args, plugins, **half)
    by_autocast(single, autocast, args)
    return {
        "error": error(model, ours, held_out),
        "autocast_error": error(model, autocast, held_out),
        "float32": kept(ours),
        "float32_with_plugins": kept(plugins),
        "autocast_float32": kept(autocast),
    }


def main() -> None:
    """Prints a row a model, the mean of several drawn, and writes them."""
    logging.disable(logging.WARNING)
    rows = []
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for name, (make, inputs) in OVERFLOWING.items():
            found = []
            for seed in range(MODELS):
                torch.manual_seed(seed)
                found.append(measure(make, inputs, Path(folder)))
            means = {key: float(f"{sum(row[key] for row in found) / MODELS:.3g}") for key in found[0]}
            rows.append({"model": name, **means})
            print(rows[-1], flush=True)
    print(write("half-models-cpu", rows))


if __name__ == "__main__":
    main()
