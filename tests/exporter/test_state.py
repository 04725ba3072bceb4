"""Models that change themselves or their inputs in forward: they and the inputs are left as they were."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import Tensor, nn

import svexport

pytestmark = pytest.mark.core

BOTH_EXPORTERS = pytest.mark.parametrize("opset", [11, 18])
X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


class Counting(nn.Module):
    """Keeps what does not matter for its results."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frames", torch.zeros(()))
        self.linear = nn.Linear(3, 3)
        self.linear.seen = deque([1])
        self.shapes: dict[str, int] = {}
        self.last = None

    def forward(self, x: Tensor) -> Tensor:
        self.frames += 1
        self.linear.seen.append(len(self.linear.seen))
        self.shapes["x"] = 1
        self.last = x
        self.new = x
        return self.linear(x)


class Memory(nn.Module):
    """Adds its last result to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)
        self.head.memory = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(x)
        if self.head.memory is not None:
            y = y + self.head.memory
        self.head.memory = y
        return y


class Totals(nn.Module):
    """Adds to its buffer in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.sum(0)
        return x + self.total


def assert_untouched(model: Counting) -> None:
    assert model.frames == 0
    assert list(model.linear.seen) == [1]
    assert model.shapes == {}
    assert model.last is None
    assert not hasattr(model, "new")


@BOTH_EXPORTERS
def test_what_forward_keeps_is_undone(opset, tmp_path) -> None:
    model = Counting()
    buffer = model.frames
    assert svexport.export(model, X, tmp_path / "m.onnx", opset=opset).verified
    assert model.frames is buffer
    assert_untouched(model)
    svexport.compare(model, tmp_path / "m.onnx", X, layers=True)
    assert_untouched(model)


@BOTH_EXPORTERS
@pytest.mark.parametrize(("kind", "name"), [(Memory, "head.memory"), (Totals, "total")])
def test_state_that_matters_is_named(kind, name, opset, tmp_path) -> None:
    model = kind()
    with pytest.raises(svexport.VerificationError, match=rf"forward changes {name} of the model"):
        svexport.export(model, X, tmp_path / "m.onnx", opset=opset)
    assert not list(tmp_path.iterdir())
    assert not any(model.state_dict().get("total", torch.zeros(3)))
    assert getattr(model, "head", model).__dict__.get("memory") is None


@BOTH_EXPORTERS
def test_inputs_that_forward_changes(opset, tmp_path) -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            y[:, 0] = 0
            return x.add_(1) * y

    x, y = X.clone(), X + 1
    report = svexport.export(InPlace(), (x, y), tmp_path / "m.onnx", opset=opset)
    assert report.verified
    torch.testing.assert_close(x, X, rtol=0, atol=0)
    torch.testing.assert_close(y, X + 1, rtol=0, atol=0)
    torch.testing.assert_close(svexport.load(report.path)(x, y), InPlace()(x.clone(), y.clone()))
