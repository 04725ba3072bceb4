"""What "verified" stands on: files that are wrong somewhere are refused, files that are right are not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport.exporter.quantizers import allow_steps
from svexport.exporter.rounding import Rounding, Tolerances
from svexport.parity import parity

BOTH_EXPORTERS = pytest.mark.parametrize("opset", [11, 18])


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- outputs below any absolute tolerance


class Faulty(nn.Module):
    """Computes another function in the file than in torch."""

    def __init__(self, right: Any, wrong: Any) -> None:
        super().__init__()
        self.right, self.wrong = right, wrong
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        traced = torch.jit.is_tracing() or torch.compiler.is_exporting()
        return (self.wrong if traced else self.right)(self.linear(x))


SMALL_FAULTS = {
    "sign": (lambda x: x * 1e-5, lambda x: x * -1e-5),
    "offset": (lambda x: x * 1e-6, lambda x: x * 1e-6 + 1e-7),
    "one column": (lambda x: x * 1e-6, lambda x: x * 1e-6 * torch.tensor([1.0] * 7 + [0.9])),
    "activation": (lambda x: x.relu() * 1e-6, lambda x: x * 1e-6),
    "mean": (lambda x: x.mean(1) * 1e-6, lambda x: x.sum(1) * 1e-6 / 7.9),
    "softmax": (lambda x: x.softmax(1) * 1e-6, lambda x: x.softmax(0) * 1e-6),
    "whole numbers": (lambda x: (x * 1e5).long() + 10**6, lambda x: (x * 1e5).long() + 10**6 + 7),
    "half": (lambda x: (x * 1e-3).half(), lambda x: (x * 1.02e-3).half()),
}


@BOTH_EXPORTERS
@pytest.mark.parametrize("fault", SMALL_FAULTS)
def test_faults_of_small_outputs(fault, opset, tmp_path) -> None:
    torch.manual_seed(0)
    right, wrong = SMALL_FAULTS[fault]
    with pytest.raises(svexport.VerificationError, match="differs by up to"):
        svexport.export(Faulty(right, wrong), seeded(4, 8), tmp_path / "m.onnx", opset=opset)
    assert not list(tmp_path.iterdir())
    assert svexport.export(Faulty(right, right), seeded(4, 8), tmp_path / "m.onnx", opset=opset).verified


def test_tolerances_that_are_given_hold(tmp_path) -> None:
    model = Faulty(*SMALL_FAULTS["offset"])
    report = svexport.export(model, seeded(4, 8), tmp_path / "m.onnx", opset=11, atol=1e-4)
    assert {(p.rtol, p.atol) for p in report.parity} == {(1e-3, 1e-4)}


@BOTH_EXPORTERS
def test_outputs_that_are_nothing_but_rounding(opset, tmp_path) -> None:
    """A mean taken off what is alike: 1e-8 of anything."""

    class Centered(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.register_buffer("ones", torch.ones(64))
            self.tied = tied

        def forward(self, x: Tensor) -> Tensor:
            x = x.float() @ self.ones[:, None].float().expand(64, 3) * 0.1 if self.tied else self.linear(x)
            return (x @ torch.full((x.shape[1], 1), 0.1)) - (x * 0.1).sum(1, keepdim=True)

    for tied in (False, True):  # to float32, by a constant
        torch.manual_seed(0)
        report = svexport.export(Centered(tied), seeded(4, 64), tmp_path / "m.onnx", opset=opset)
        assert report.verified
        assert report.max_abs < 1e-5


def test_scale_of_an_output() -> None:
    held = Tolerances.of(None, None, {torch.float32}).held
    assert held(torch.tensor([1e-6, float("inf"), float("nan")])) == (1e-3, pytest.approx(1e-10))
    assert held(torch.tensor([1e6])) == (1e-3, 1e-4)
    assert held(torch.tensor([], dtype=torch.float32))[1] < 1e-40
    assert held(torch.tensor([7])) == held(torch.tensor([True])) == (0.0, 0.0)
    assert Tolerances.of(None, 0.5, {torch.float32}).held(torch.tensor([7])) == (0.0, 0.5)
    assert Tolerances.of(0.1, 0.2, {torch.float32}).held(torch.tensor([1e-6])) == (0.1, 0.2)


class Alone(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x,)


@torch.no_grad()
def test_rounding_explains_only_itself() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(1024, 16), Alone()), seeded(8, 1024)
    (expected,) = model(x)
    exact = copy.deepcopy(model).double()(x.double())[0].float()
    rounding = Rounding(model, [x], [expected])
    assert 0 < rounding.allows(0, exact, 0.0, 0.0) < 1e-5
    assert rounding.allows(0, expected + 1e-4, 0.0, 0.0) == 0.0
    biased = expected + 5 * rounding.gaps[0].amax()
    assert rounding.allows(0, biased, 0.0, 0.0) == 0.0
    random = nn.Sequential(nn.Dropout(), model)  # which is no rounding
    assert Rounding(random, [x], random(x)).allows(0, random(x)[0], 0.0, 0.0) == 0.0


# ---------------------------------------------------------------- steps of quantizers


class Steps(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.scale = scale

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (torch.fake_quantize_per_tensor_affine(self.conv(x), self.scale, 0, -128, 127),)


@torch.no_grad()
@pytest.mark.parametrize("share", [0.5, 0.01])
@pytest.mark.parametrize("seed", range(3))
def test_planted_steps_are_refused(share, seed) -> None:
    """One step more in half of the elements, or in a few, none of which is near a border."""
    torch.manual_seed(seed)
    model, x = Steps(0.02), seeded(2, 3, 17, 19, seed=seed)
    (expected,) = model(x)
    planted = expected + 0.02 * (torch.rand(expected.shape) < share)
    found = [parity("y", expected, planted)]
    allow_steps(found, model, [x], [("y", expected, planted)], [])
    assert not found[0].ok, f"seed {seed}"


@torch.no_grad()
@pytest.mark.parametrize("values", ["large", "whole"])
def test_planted_steps_of_what_is_exact_are_refused(values) -> None:
    """Numbers of the inputs have no rounding error, however large."""

    class Whole(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x.round(),)

    x = seeded(50, 60) * 1e5 if values == "large" else torch.arange(3000.0).reshape(50, 60) + 0.5
    (expected,) = Whole()(x)
    planted = expected + (torch.arange(3000).reshape(50, 60) % 2)
    found = [parity("y", expected, planted, rtol=0, atol=1e-4)]
    allow_steps(found, Whole(), [x], [("y", expected, planted)], [])
    assert not found[0].ok


@torch.no_grad()
def test_steps_on_a_border_are_allowed() -> None:
    torch.manual_seed(0)
    model, x = Steps(0.02), seeded(8, 3, 37, 39)
    off = (model.conv(x) / 0.02).double().frac().abs() - 0.5
    place = off.abs().flatten().argmin()
    channel = int(place) // (35 * 37) % 8
    values = model.conv(x)
    up = values.flatten()[place].sign() * 0.02
    model.conv.bias[channel] -= up * off.flatten()[place]
    (expected,) = model(x)
    other = expected.clone()
    step = 1 if expected.flatten()[place].abs() < values.flatten()[place].abs() else -1
    other.view(-1)[place] += step * up
    found, notes = [parity("y", expected, other)], []
    assert not found[0].ok
    allow_steps(found, model, [x], [("y", expected, other)], notes)
    assert found[0].ok
    assert "in the same elements" in notes[0]
