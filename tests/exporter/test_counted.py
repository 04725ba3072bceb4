"""Forwards that count themselves: refused where a later one returns something else, and not where it only counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import svexport


class Counts(nn.Module):
    """Goes by how often it has been called, or not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls, self.left, self.longest = how, 0, 40, 0
        self.kept: Tensor | None = None
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("age", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.left -= 1
        self.seen += 1
        self.age.add_(1)
        if self.longest < x.shape[1]:
            self.longest = x.shape[1]
            self.kept = torch.arange(self.longest) + 1.0
        if self.how == "warm-up":
            return x * (3 if self.calls <= 50 else 2)
        if self.how == "key frame":
            return x * 3 if self.calls % 10 == 0 else x * 2
        if self.how == "down":
            return x * (3 if self.left > 0 else 2)
        if self.how == "buffer":
            return torch.where(self.seen > 100, x * 2, x * 3)
        if self.how == "fading":
            return x * torch.exp(-1e-7 * self.age)
        if self.how == "kept":
            return x * self.kept[: x.shape[1]]
        assert self.calls < 10**5, "only counts"
        return x * 2


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize(
    ("how", "name"),
    [("warm-up", "calls"), ("key frame", "calls"), ("down", "left"), ("buffer", "seen"), ("fading", "age")],
)
def test_what_comes_later_is_refused(how: str, name: str, opset: int, tmp_path: Path) -> None:
    with pytest.raises(
        svexport.VerificationError, match=rf"forward changes [a-z, ]*\b{name}\b.* returns something else"
    ):
        svexport.export(Counts(how), torch.rand(2, 3) + 1, tmp_path / "m.onnx", opset=opset)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", ["kept", "only counts"])
def test_what_is_the_same_is_not(how: str, tmp_path: Path) -> None:
    model = Counts(how)
    assert svexport.export(model, torch.rand(2, 3) + 1, tmp_path / "m.onnx", opset=11).verified
    assert (model.calls, model.left, model.longest, int(model.seen), model.kept) == (0, 40, 0, 0, None)
