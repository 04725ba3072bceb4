"""``python -m benchmarks.conversions [--resume] [NAME …]``: files of models at opset 20, converted to 17, 13, 11 and 9.

The models of :mod:`benchmarks.nodes`, static, with weights of the size of trained ones, as ``export`` writes them at 20
in standard ONNX. Each is converted to each opset and run; then, from 13, brought up to 20 again by onnx's converter and
down once more. A file is equal where no output differs from that of the file at 20 by more than 1e-5 of the output's
largest number, all in float32 by ONNX Runtime, without its optimizations. What is not installed is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.version_converter
import onnxruntime
from torch import Tensor, nn

import svexport
from benchmarks.nodes import run_models
from svexport.graph.nodes import svexport_nodes

NEWEST, LOWER, BETWEEN = 20, (17, 13, 11, 9), 13
TOLERANCE = 1e-5
"""Of the largest number in an output."""


def run(model: onnx.ModelProto, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What ONNX Runtime computes, node by node."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return session.run(None, dict(zip(names, inputs, strict=True)))


def difference(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """The largest of any output, over its largest finite number; infinite where shapes, types, NaN or inf differ."""
    worst = 0.0
    for ours, theirs in zip(actual, expected, strict=True):
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            return float("inf")
        finite = np.isfinite(theirs)
        if not np.array_equal(ours[~finite], theirs[~finite], equal_nan=theirs.dtype.kind == "f"):
            return float("inf")
        apart = np.abs(ours[finite].astype(np.float64) - theirs[finite].astype(np.float64))
        largest = np.abs(theirs[finite].astype(np.float64)).max(initial=0)
        worst = max(worst, float(apart.max(initial=0)) / max(float(largest), 1e-30))
    return worst


def tensors(args: Any) -> list[Tensor]:
    """All that a model is given, in the order of a file's inputs."""
    if isinstance(args, Tensor):
        return [args]
    if isinstance(args, dict):
        return tensors(list(args.values()))
    if isinstance(args, (list, tuple)):
        return [tensor for each in args for tensor in tensors(each)]
    return [tensor for layer in args.layers for tensor in (layer.keys, layer.values)]  # a cache of transformers


def measured(name: str, model: nn.Module, args: Any, folder: Path) -> dict[str, Any]:
    """Of one model: the differences of its files at lower opsets."""
    inputs = [tensor.numpy() for tensor in tensors(args)]
    path = folder / "newest.onnx"
    svexport.export(model, args, path, opset=NEWEST, verify=False, plugins=False)
    newest = onnx.load(path)
    assert not list(svexport_nodes(newest))
    expected = run(newest, inputs)
    row: dict[str, Any] = {"model": name, "down": {}, "round trip": {}}

    def down(file: onnx.ModelProto, found: dict[str, float | str]) -> None:
        for opset in LOWER:
            try:
                lower = svexport.convert(file, opset=opset)
                onnx.checker.check_model(lower, full_check=True)
                found[str(opset)] = difference(run(lower, inputs), expected)
            except Exception as error:  # noqa: BLE001 - a refusal, or a fault: either is said
                found[str(opset)] = f"{type(error).__name__}: {error}".splitlines()[0]

    down(newest, row["down"])
    try:
        again = onnx.version_converter.convert_version(svexport.convert(newest, opset=BETWEEN), NEWEST)
        row["up"] = difference(run(again, inputs), expected)
    except Exception as error:  # noqa: BLE001 - onnx's converter does not take all, and what it writes may not run
        row["up"] = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        down(again, row["round trip"])
    return row


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many are equal at each opset, the largest difference, and which are not equal."""
    failed = [row["model"] for row in rows if "error" in row]
    found: dict[str, Any] = {"summary": "all", "models": len(rows), "failed": failed}
    for kind in ("down", "round trip"):
        for opset in map(str, LOWER):
            values = {row["model"]: row[kind][opset] for row in rows if row.get(kind)}
            numbers = [value for value in values.values() if not isinstance(value, str)]
            found[f"{kind} {opset}"] = {
                "of": len(values),
                "equal": sum(number <= TOLERANCE for number in numbers),
                "worst": max(numbers, default=None),
                "not equal": [name for name, value in values.items() if isinstance(value, str) or value > TOLERANCE],
            }
    found["not up"] = [row["model"] for row in rows if not isinstance(row.get("up", 0.0), float)]
    return [found]


def main() -> None:
    run_models("conversions", "files at lower opsets", "down", measured, summary)


if __name__ == "__main__":
    main()
