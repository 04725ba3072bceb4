"""Functions of pairs: NaN, infinities, large and small numbers, types, broadcasting, dynamic sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import svexport
from tests.exporter.aten import exported, results

TRACED = [(11, True), (11, False), (17, True), (20, True)]
"""Opset, and whether torch.export traces below 18."""

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "fmax": lambda x: torch.fmax(x, x.roll(1, 1)),
    "fmax of types": lambda x: (x * 3).nan_to_num(0, 9, -9).to(torch.int32).fmax(x[:1]),
    "fmin": lambda x: torch.fmin(x, x.roll(1, 1)),
    "fmin of integers": lambda x: torch.fmin(
        (x * 3).nan_to_num(0, 9, -9).long(), torch.tensor([[1], [2]]).flatten()[:1]
    ),
    "both of masks": lambda x: torch.fmax(x > 0, x[:1] < 0.5) == torch.fmin(x > 1, x > 0),
    "hypot": lambda x: torch.hypot(x, x.roll(1, 1)),
    "isin": lambda x: torch.isin(x.round(), x[:, :2].round()),
    "isin, inverted": lambda x: torch.isin(x.round(), torch.tensor([0, 1]), invert=True),
    "isin of a number": lambda x: torch.isin(x.round(), 1),
}


@pytest.mark.parametrize(("opset", "first"), TRACED)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_pairs(name: str, opset: int, first: bool, tmp_path) -> None:
    function = FUNCTIONS[name]
    exported(function, torch.randn(4, 7), tmp_path, opset, first, dynamic_shapes={"x": {0: "n"}})
    engine = svexport.load(tmp_path / "m.onnx")
    for rows in (1, 4, 11):
        x = torch.randn(rows, 7)
        extremes = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, 3e38, -3e38, 1e-30]).expand(rows, 7)
        both = torch.where(torch.rand(rows, 7) < 0.6, extremes, x)
        for given in (x, extremes.contiguous(), both):
            if "types" in name or "integers" in name:
                given = given.nan_to_num(0, 5, -5).clamp(-9, 9) if "integers" in name else given.clamp(-9, 9)
            for actual, expected in zip(results(engine(given)), results(function(given)), strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0, equal_nan=True)


TO_THE_BIT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "copysign": torch.copysign,
    "copysign of a number": lambda x, y: torch.copysign(x, -0.0),
    "copysign of integers": lambda x, y: torch.copysign(x.nan_to_num(0, 9, -9).clamp(-9, 9).int(), y),
    "copysign in place": lambda x, y: (x + 0 * y).copysign_(y),
    "heaviside": torch.heaviside,
    "heaviside of integers": lambda x, y: torch.heaviside(*(t.nan_to_num(0, 3, -3).clamp(-3, 3).int() for t in (x, y))),
    "heaviside of masks": lambda x, y: torch.heaviside(x > 0, y > 0),
    "nextafter": torch.nextafter,
    "nextafter of types": lambda x, y: torch.nextafter(x.half(), y.half()),
}


@pytest.mark.parametrize(("opset", "first"), TRACED)
@pytest.mark.parametrize("name", TO_THE_BIT)
def test_pairs_to_the_bit(name: str, opset: int, first: bool, tmp_path) -> None:
    """Of each kind of number with each. The sign of zeros is ``copysign``'s alone: the others' come out of a Where, in
    which ONNX Runtime makes them all positive."""

    def function(x: Tensor) -> Tensor:
        return TO_THE_BIT[name](x, x.flatten()[:13].unsqueeze(-1))

    exported(
        function, torch.randn(13), tmp_path, opset, first, dynamic_shapes={"x": {0: torch.export.Dim("n", min=13)}}
    )
    engine = svexport.load(tmp_path / "m.onnx")
    info = torch.finfo(torch.float32)
    tiny = [info.smallest_normal, info.smallest_normal * info.eps, -info.smallest_normal * info.eps, 2**-14]
    extremes = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, info.max, -info.max, 1.0, -2.0, *tiny])
    anywhere = torch.randn(300) * 10 ** torch.empty(300).uniform_(-38, 37)
    for x in (torch.cat([extremes, anywhere, torch.exp2(torch.arange(-149.0, 128.0))]), torch.randn(17)):
        actual, expected = engine(x), function(x)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        if "copysign" in name:
            assert torch.equal(actual.signbit() & ~actual.isnan(), expected.signbit() & ~expected.isnan())


def test_the_next_of_float64_is_refused(tmp_path) -> None:
    with pytest.raises(svexport.ExportError, match="nextafter of float64 has no exact form in ONNX"):
        exported(lambda x: torch.nextafter(x, -x), torch.randn(3).double(), tmp_path, 17, True)
    assert not list(tmp_path.iterdir())
