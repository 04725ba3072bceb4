"""Timing: what runs when on which inputs, and what is reported; durations are not asserted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport import EngineError, SvexportError
from svexport.runtime.bench import Bench, Timing

SEEN: list[tuple[int, float]] = []
"""Where inputs lay, and their sums: not in the model, which a benchmark leaves as it was."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: float = 2.0, *, shift: Tensor | None = None) -> Tensor:
        SEEN.append((x.data_ptr(), float(x.sum())))
        y = self.linear(x) * scale
        return y if shift is None else y + shift


def test_runs_are_interleaved_on_copies_of_the_inputs() -> None:
    model, x = Model(), torch.randn(2, 4)
    order: list[str] = []

    def other(name: str) -> Any:
        def run(x: Tensor, scale: float = 2.0, *, shift: Tensor | None = None) -> Tensor:
            order.append(name)
            return model.linear(x) * scale + shift

        return run

    result = svexport.bench(model, {"a": other("a"), "b": other("b")}, (x, {"shift": torch.ones(3)}), runs=12, copies=3)
    assert [len(t.milliseconds) for t in result.timings] == [12, 12, 12]
    measured = order[-24:]
    assert Counter(measured) == {"a": 12, "b": 12}
    assert "ab" in "".join(measured)
    assert "ba" in "".join(measured)  # the order turns
    places = [place for place, _ in SEEN[-12:]]
    assert len(set(places)) == 3
    assert x.data_ptr() not in places
    assert len({total for _, total in SEEN}) == 1
    assert result.ok
    assert result["a"].error == 0
    assert model.training  # left as it was


def test_errors_stand_beside_times() -> None:
    model, x = Model(), torch.randn(2, 4)
    result = svexport.bench(model, [lambda x: 2 * model.linear(x) + 0.25], (x,), runs=10)
    assert not result.ok
    assert result.timings[1].error == pytest.approx(0.25, abs=1e-5)
    assert "FAIL" in str(result)
    assert result.to_dict()["timings"][1]["ok"] is False


def test_compiled() -> None:
    class Small(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    calls = []

    def compile(model: nn.Module) -> nn.Module:
        calls.append(model)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", compile)
        result = svexport.bench(Small(), args=(torch.ones(2),), runs=10, compiled=True)
    assert [t.name for t in result.timings] == ["torch", "torch.compile"]
    assert len(calls) == 1


def test_wrong_requests(tmp_path: Any) -> None:
    model, x = Model(), torch.randn(2, 4)
    numbers = {"runs": (0, 1.5, "3"), "copies": (0, 2.5, None), "seconds": (0, float("nan"), "1")}
    for options in ({name: value} for name, values in numbers.items() for value in values):
        with pytest.raises(SvexportError, match="integers from 1 on, seconds more than 0"):
            svexport.bench(model, args=(x,), **options)
    with pytest.raises(SvexportError, match="as a dict by name"):
        svexport.bench(model, [lambda x: x, lambda x: x], (x,))
    with pytest.raises(SvexportError, match="names the model itself"):
        svexport.bench(model, {"torch": lambda x: x}, (x,))
    with pytest.raises(EngineError, match="cannot read"):
        svexport.bench(model, tmp_path / "none.onnx", (x,))


def test_percentiles_and_page(tmp_path: Any) -> None:
    timing = Timing("engine", "cpu", tuple(float(i) for i in range(100, 0, -1)), 1e-6, True)
    assert (timing.percentile(50), timing.percentile(99), timing.median) == (51, 100, 50.5)
    assert timing.throughput == pytest.approx(1e3 / 50.5)
    one = Timing("torch", "cpu", (2.0,))
    assert one.percentile(99) == 2
    result = Bench("Net", {"x": "float32[1]"}, [one, timing], ["a note"])
    result.to_html(tmp_path / "bench.html")
    assert "a note" in (tmp_path / "bench.html").read_text()
    assert "<img" in result._repr_html_()
    with pytest.raises(SvexportError, match="torch, engine"):
        result["other"]
