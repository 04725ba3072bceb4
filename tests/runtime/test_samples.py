"""Comparisons over samples: statistics equal those computed at once, several engines, a metric."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import svexport
from svexport import SvexportError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        y = self.linear(x) * scale
        return {"scores": y.softmax(-1), "sum": y.sum(-1)}


@pytest.fixture
def model() -> Model:
    return Model().eval()


@pytest.fixture
def file(model: Model, tmp_path: Path) -> Path:
    svexport.export(model, (torch.randn(2, 4),), tmp_path / "m.onnx", verify="quick", dynamic_shapes={"x": {0: "n"}})
    return tmp_path / "m.onnx"


def samples(count: int = 7) -> Iterator[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for i in range(count):
        yield (torch.randn(1 + i, 4, generator=generator),)


def off(model: Model) -> Any:
    """Errors that grow with the sample's size."""

    def run(x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        results = model(x, scale)
        return {"scores": results["scores"], "sum": results["sum"] + 1e-2 * len(x) * torch.linspace(0, 1, len(x))}

    return run


def test_statistics_are_those_of_all_samples_at_once(model: Model, file: Path) -> None:
    result = svexport.compare(model, {"file": file, "off": off(model)}, samples=samples())
    assert result.samples == 7
    assert not result.ok
    by_key = {(one.engine, one.output): one for one in result.outputs}
    assert list(by_key) == [("file", "scores"), ("file", "sum"), ("off", "scores"), ("off", "sum")]
    assert all(by_key["file", name].ok for name in ("scores", "sum"))
    wrong = by_key["off", "sum"]
    errors = torch.cat([(off(model)(x)["sum"] - model(x)["sum"]).abs().double() for (x,) in samples()]).detach()
    assert wrong.max_abs == pytest.approx(float(errors.max()), rel=1e-6)
    assert wrong.mean_abs == pytest.approx(float(errors.mean()), rel=1e-6)
    for fraction in (0.5, 0.9, 0.99, 1.0):
        exact = float(errors.sort().values[math.ceil(fraction * len(errors)) - 1])
        assert exact * 0.999 <= wrong.quantile(fraction) <= exact * 1.05
    assert wrong.worst == 6
    assert wrong.failed == 6  # the first sample has one row, whose error is zero
    assert torch.equal(result.worst["off"][0], list(samples())[6][0])
    assert by_key["off", "scores"].max_abs == 0
    assert json.dumps(result.to_dict())
    assert "off differ" in str(result)


def test_metrics_stand_beside_errors(model: Model, file: Path) -> None:
    def metric(outputs: Any, sample: Any) -> dict[str, float]:
        _, total = outputs
        assert outputs["sum"] is total
        return {"mean": total.mean(), "rows": len(sample[0])}

    result = svexport.compare(model, [file, off(model)], samples=samples(), metric=metric)
    assert set(result.metrics) == {"torch", "m.onnx", "run"}
    assert result.metrics["torch"]["rows"] == 4
    with torch.no_grad():
        wanted = sum(float(model(x)["sum"].mean()) for (x,) in samples()) / 7
    assert result.metrics["torch"]["mean"] == pytest.approx(wanted, rel=1e-5)
    assert result.metrics["m.onnx"]["mean"] == pytest.approx(wanted, abs=1e-5)
    assert result.metrics["run"]["mean"] != pytest.approx(wanted, abs=1e-3)
    one = svexport.compare(model, file, samples=samples(), metric=lambda outputs, sample: 3)
    assert one.metrics["torch"] == {"metric": 3.0}


def test_samples_may_be_dicts_and_of_other_models(model: Model, file: Path) -> None:
    given = [{"x": torch.randn(2, 4)}, {"x": torch.randn(3, 4), "scale": 1.0}]
    result = svexport.compare(model, {"file": file, "again": model, "function": off(model)}, samples=given)
    assert [one.engine for one in result.outputs if one.ok] == ["file", "file", "again", "again", "function"]


def test_numbers_that_are_not_finite_do_not_spoil_the_rest(model: Model) -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sqrt()

    def root(x: Tensor) -> Tensor:
        return x.sqrt() + 1e-3

    given = [(torch.tensor([4.0, -1.0]),), (torch.empty(0),), (torch.tensor([9.0, torch.inf]),)]
    [one] = svexport.compare(Root(), root, samples=given).outputs
    assert one.samples == 3
    assert one.mean_abs == pytest.approx(1e-3, rel=1e-2)
    [other] = svexport.compare(Root(), lambda x: x, samples=given[:1]).outputs
    assert other.max_abs == math.inf
    assert other.failed == 1


def test_wrong_requests(model: Model, file: Path) -> None:
    with pytest.raises(SvexportError, match="samples is empty"):
        svexport.compare(model, file, samples=[])
    with pytest.raises(SvexportError, match="expects an iterable such as a DataLoader, got int"):
        svexport.compare(model, file, samples=5)  # type: ignore[call-overload]
    loader = DataLoader(TensorDataset(torch.randn(3, 4)), 2)
    with pytest.raises(SvexportError, match=r"called with sample 0, a list: TypeError.*\(tuple\(batch\) for"):
        svexport.compare(model, file, samples=loader)
    assert svexport.compare(model, file, samples=(tuple(batch) for batch in loader)).samples == 2
    with pytest.raises(SvexportError, match="with sample 1, a Tensor: RuntimeError"):
        svexport.compare(model, file, samples=[torch.ones(1, 4), torch.ones(1, 5)])
    with pytest.raises(SvexportError, match="samples excludes args and layers"):
        svexport.compare(model, file, (torch.ones(1, 4),), samples=samples())  # type: ignore[call-overload]
    for engines, options in (([file, model], {}), (file, {"metric": len})):
        with pytest.raises(SvexportError, match=r"samples=\[args\]"):
            svexport.compare(model, engines, (torch.ones(1, 4),), **options)
    with pytest.raises(SvexportError, match="as a dict by name"):
        svexport.compare(model, [file, file], samples=samples())
    with pytest.raises(SvexportError, match="metric must return a number"):
        svexport.compare(model, file, samples=samples(), metric=lambda outputs, sample: "good")
