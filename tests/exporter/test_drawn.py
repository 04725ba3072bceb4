"""Forwards that draw random numbers are refused only if results depend on them, even if rarely."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import svexport
from tests.exporter.aten import Call

SELDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "dropped path": lambda x: x + (torch.rand(2, 1) < 0.9999) * x.sin(),
    "dropout": lambda x: F.dropout(x, 1e-5, training=True),
    "in place": lambda x: x * torch.empty(2, 1).bernoulli_(0.9999),
    "added": lambda x: x + (torch.randn(2, 3, 20) < -6).sum(-1),
    "chosen": lambda x: x[torch.randint(0, 1000, (1,)).clamp(max=1)],
    "a loop": lambda x: x * 2 if torch.rand(()) < 0.9999 else x * 3,
    "of Python": lambda x: x * 2 if random.random() > 1e-4 else x,
    "of Python, of many": lambda x: x * (random.choice(range(1000)) + 1000 > 1000),
    "of Python, normal": lambda x: x * 2 if random.gauss(0, 1) < 6 else x,
    "of NumPy": lambda x: x * 2 if np.random.rand() < 1 - 1e-4 else x,
    "of NumPy, of many": lambda x: x * bool(np.random.randint(0, 1000)),
}


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize("name", SELDOM)
def test_what_is_seldom_drawn(name: str, opset: int, tmp_path: Path) -> None:
    before = random.getstate(), np.random.get_state()[1]
    with pytest.raises(svexport.SvexportError) as caught:
        svexport.export(Call(SELDOM[name]), torch.rand(2, 3) + 1, tmp_path / "m.onnx", opset=opset)
    text = str(caught.value)
    assert "test_drawn.py:" in text
    assert "forward draws random numbers" in text or name == "a loop"
    assert random.getstate() == before[0]
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert not list(tmp_path.iterdir())


def again(x: Tensor) -> Tensor:
    """Until what comes is small."""
    while float(torch.rand(1)) > 0.9:
        pass
    return x * 2


NOT: dict[str, Callable[[Tensor], Tensor]] = {
    "unused": lambda x: (torch.rand(3), x * 2)[1],
    "overwritten": lambda x: torch.rand(2, 3).copy_(x) * 2,
    "not in evaluation": lambda x: F.dropout(x, 0.5, training=False),
    "of Python and NumPy": lambda x: x * (2 + 0 * (random.random() < 0.5) + 0 * np.random.randint(9)),
}


@pytest.mark.parametrize("name", NOT)
def test_what_results_do_not_depend_on(name: str, tmp_path: Path) -> None:
    assert svexport.export(Call(NOT[name]), torch.rand(2, 3) + 1, tmp_path / "m.onnx", opset=11).verified


def test_dropout_of_everything(tmp_path: Path) -> None:
    """From opset 12 on training is an input of Dropout, and 1 no ratio."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.dropout(x, 1.0, True), F.alpha_dropout(x, 1.0, True)

    assert svexport.export(Call(function), torch.rand(2, 3), tmp_path / "m.onnx", opset=18).verified


def test_one_that_draws_again_and_again_ends(tmp_path: Path) -> None:
    with pytest.raises(svexport.SvexportError, match=r"test_drawn\.py:\d+ in again"):
        svexport.export(Call(again), torch.rand(2, 3), tmp_path / "m.onnx", opset=11)


def test_a_model_that_remembers(tmp_path: Path) -> None:
    """What it remembers of a forward is no random number."""

    class Remembers(torch.nn.Module):
        scale: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.scale is None:
                self.scale = torch.rand(()).clamp(max=0) + 2
            return x * self.scale

    assert svexport.export(Remembers(), torch.rand(2, 3), tmp_path / "m.onnx", opset=11).verified
