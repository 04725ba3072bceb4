"""Trained models in int8: the loss of accuracy by method, and with the plan from sensitivity."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import svexport
from svexport.quantization.layers import quantized_layers
from tests.quantization import trained
from tests.quantization.trained import Trained

pytestmark = pytest.mark.large


@pytest.fixture(scope="module", params=["skeletons", "cameras"])
def found(request: pytest.FixtureRequest) -> Trained:
    with torch.random.fork_rng(devices=[]):
        return getattr(trained, request.param)()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def calibration(found: Trained) -> tuple[Tensor, ...]:
    return found.make(512, torch.Generator().manual_seed(7))[0].split(64)


def test_points(found: Trained, calibration: tuple[Tensor, ...]) -> None:
    """Sensors that failed decide minmax's scales; the default leaves them out, and so does a plan that keeps layers."""
    right = found.points(found.model)
    assert right >= 95
    lost = {}
    for method in ("minmax", "entropy"):
        lost[method] = right - found.points(svexport.quantize(found.model, calibration, method=method))
    assert lost["minmax"] >= 3
    assert lost["entropy"] <= 1


def test_points_with_a_plan(found: Trained, calibration: tuple[Tensor, ...]) -> None:
    """Of the method that loses most, on data that neither scales nor plan were chosen by."""
    whole = _WithAnswers(found.model)
    inputs, answers = found.make(1024, torch.Generator().manual_seed(8))
    held = list(zip(inputs.split(256), answers.split(256), strict=True))
    quantized = svexport.quantize(whole, calibration, method="minmax")
    ranking = svexport.sensitivity(quantized, held, found.accuracy)
    assert ranking.loss >= 3
    plan = ranking.keep(loss=0.2)
    assert 0 < len(plan) < len(ranking.layers)
    better = svexport.quantize(whole, calibration, method="minmax", keep=plan)
    assert found.points(found.model) - found.points(better) <= 0.3


@pytest.mark.parametrize("opset", [13, 17])
def test_file(found: Trained, calibration: tuple[Tensor, ...], opset: int, tmp_path: Path) -> None:
    """In ONNX Runtime it computes what the model with fake quantizers does, on held-out data."""
    quantized = svexport.quantize(found.model, calibration)
    path = tmp_path / "m.onnx"
    shapes = {"x": {0: "batch"}}
    report = svexport.export(quantized, calibration[0][:2], path, opset=opset, dynamic_shapes=shapes)
    assert report.verified
    for target in ("8.6", "10.1", "11.0"):
        options = {"opset": opset, "target": target, "dynamic_shapes": shapes, "verify": False}
        checked = svexport.export(quantized, calibration[0][:2], tmp_path / "t.onnx", **options).check
        assert checked is not None
        assert checked.ok
        assert not any(one.rule == "quantizers_dangling" for one in checked.findings)
    x, answers = found.make(512, torch.Generator().manual_seed(11))
    with torch.no_grad():
        expected = quantized(x)
    actual = svexport.load(path)(x)
    *_, (_, last) = quantized_layers(quantized)
    weight_step = last.weight_quantizer.scale.max() * 127  # the largest weight
    step = float(last.input_quantizer.scale * weight_step)  # what one step of its input is worth in a score
    assert float((actual - expected).abs().le(step).float().mean()) >= 0.999
    close = np.isclose(actual.numpy(), expected.numpy(), rtol=1e-3, atol=1e-4).mean()
    assert close >= 0.99
    assert abs(found.accuracy(actual, (x, answers)) - found.accuracy(expected, (x, answers))) <= 0.2


class _WithAnswers(torch.nn.Module):
    """Batches of sensitivity are what forward is called with, and what the metric is given: the answers are in them."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, answers: Tensor | None = None) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]
