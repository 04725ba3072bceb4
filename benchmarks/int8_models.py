"""``python -m benchmarks.int8_models``: what int8 costs the two models of ``tests/quantization/trained.py``.

Points of accuracy that are lost on data that no scale and no plan was chosen by: by method, and with the layers kept
that a plan of ``sensitivity`` names; how much of a file's results ONNX Runtime computes as the model does; and what
calibrating takes beside the model alone.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import svexport
from benchmarks._measure import write
from svexport.quantization.layers import quantized_layers
from tests.quantization import trained
from tests.quantization.test_trained import _WithAnswers
from tests.quantization.trained import Trained

METHODS = ("minmax", "percentile", "mse", "entropy")
BATCHES, TURNS = 512, 3


def data(found: Trained, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and answers."""
    return found.make(count, torch.Generator().manual_seed(seed))


def seconds(function: Callable[[], object]) -> float:
    """Of this process."""
    start = time.process_time()
    function()
    return time.process_time() - start


def planned(found: Trained, calibration: tuple[Tensor, ...]) -> dict[str, Any]:
    """With a plan for min-max, the method that loses most."""
    whole = _WithAnswers(found.model)
    inputs, answers = data(found, 1024, 8)
    held = list(zip(inputs.split(256), answers.split(256), strict=True))
    ranking = svexport.sensitivity(svexport.quantize(whole, calibration, method="minmax"), held, found.accuracy)
    plan = ranking.keep(loss=0.2)
    better = svexport.quantize(whole, calibration, method="minmax", keep=plan)
    return {"plan": found.points(better), "kept": f"{len(plan)} of {len(ranking.layers)} layers"}


def within_a_step(found: Trained, calibration: tuple[Tensor, ...], folder: Path) -> float:
    """The share of a file's results that are no further from the model's than a step of the last layer's input."""
    quantized, path = svexport.quantize(found.model, calibration), folder / "m.onnx"
    svexport.export(quantized, calibration[0][:2], path, opset=17, dynamic_shapes={"x": {0: "batch"}})
    *_, (_, last) = quantized_layers(quantized)
    step = float(last.input_quantizer.scale * last.weight_quantizer.scale.max() * 127)
    x, _ = data(found, 512, 11)
    return float((svexport.load(path)(x) - quantized(x)).abs().le(step).float().mean())


def calibration_over_model(model: nn.Module, batch: Tensor) -> float:
    """By the default method; in turns, of which the fastest counts."""
    batches = [batch] * BATCHES
    turns = [
        (seconds(lambda: [model(x) for x in batches]), seconds(lambda: svexport.quantize(model, batches)))
        for _ in range(TURNS)
    ]
    alone, calibrating = map(min, zip(*turns, strict=True))
    return calibrating / alone


def measured(name: str, folder: Path) -> dict[str, Any]:
    found: Trained = getattr(trained, name)()
    calibration = data(found, 512, 7)[0].split(64)
    with torch.no_grad():
        row: dict[str, Any] = {"model": name, "float": found.points(found.model)}
        row |= {m: found.points(svexport.quantize(found.model, calibration, method=m)) for m in METHODS}
        row |= planned(found, calibration)
        row["within_a_step"] = within_a_step(found, calibration, folder)
        row["calibration_over_model"] = calibration_over_model(found.model, calibration[0][:16])
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in row.items()}


def main() -> None:
    """Prints a row a model, and writes them."""
    logging.disable(logging.WARNING)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("skeletons", "cameras"):
            rows.append(measured(name, Path(folder)))
            print(rows[-1], flush=True)
    print(write("int8-models-cpu", rows))


if __name__ == "__main__":
    main()
