"""median, nanmedian, kthvalue and mode: ties, NaN, one value, integers, dynamic sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import svexport
from tests.exporter.aten import agrees, exported, results

TRACED = [(11, True), (11, False), (17, True), (20, True)]
"""Opset, and whether torch.export traces below 18."""
NAN = float("nan")

OF_ALL: dict[str, Callable[[Tensor], Tensor]] = {"median": torch.median, "nanmedian": torch.nanmedian}
OF_ROWS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "kthvalue": lambda x, dim, keepdim: x.kthvalue(2, dim, keepdim),
    "median": torch.median,
    "mode": torch.mode,
    "nanmedian": torch.nanmedian,
}


def inputs(shape: tuple[int, ...], nan: bool = True) -> list[Tensor]:
    """Numbers, ties, nothing but NaN, and NaN among others."""
    x = torch.randn(shape)
    ties = torch.randint(-1, 2, shape).float()
    among = [torch.where(x > 0.7, NAN, x), torch.where(x > 0, NAN, ties)] if nan else []
    return [x, ties, torch.full(shape, NAN), *among]


def rows_agree(path, function: Callable, x: Tensor, dim: int, keepdim: bool) -> None:
    """Values as torch gives them, and places where they are found: of ties, torch leaves open which."""
    values, places = svexport.load(path / "m.onnx")(x)
    expected, others = function(x)
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    assert (places.shape, places.dtype) == (others.shape, others.dtype)
    there = x.gather(dim, places if keepdim else places.unsqueeze(dim))
    torch.testing.assert_close(there if keepdim else there.squeeze(dim), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("opset", "first"), TRACED)
@pytest.mark.parametrize("name", OF_ALL)
def test_of_all(name: str, opset: int, first: bool, tmp_path) -> None:
    for shape in ((3, 5), (3, 4)):
        exported(OF_ALL[name], torch.randn(shape), tmp_path, opset, first)
        for x in inputs(shape):
            agrees(tmp_path, OF_ALL[name], x)


@pytest.mark.parametrize(("dim", "keepdim", "shape"), [(-1, False, (3, 2, 7)), (0, True, (6, 3))])
@pytest.mark.parametrize(("opset", "first"), TRACED)
@pytest.mark.parametrize("name", OF_ROWS)
def test_of_rows(name: str, opset: int, first: bool, dim: int, keepdim: bool, shape: tuple[int, ...], tmp_path) -> None:
    function = lambda x: tuple(OF_ROWS[name](x, dim, keepdim))  # noqa: E731
    exported(function, torch.randn(shape), tmp_path, opset, first)
    for x in inputs(shape, nan=name != "mode"):
        rows_agree(tmp_path, function, x, dim, keepdim)


@pytest.mark.parametrize(("opset", "first"), TRACED)
def test_integers_and_one_value(opset: int, first: bool, tmp_path) -> None:
    def function(x):
        one = x.sum()
        found = [r for f in OF_ROWS.values() for r in f(x, 1, False)[:1]]
        return *found, x.median(), x.nanmedian(), *one.median(0), *one.kthvalue(1), *one.mode()

    exported(function, torch.randint(-2, 3, (3, 5)), tmp_path, opset, first)
    for _ in range(3):
        agrees(tmp_path, function, torch.randint(-2, 3, (3, 5)))


@pytest.mark.parametrize(("opset", "first"), TRACED)
def test_dynamic_rows(opset: int, first: bool, tmp_path) -> None:
    def function(x):
        return x.median(), x.nanmedian(), *(f(x, 0, False)[0] for f in OF_ROWS.values())

    def without_mode(found):
        return [result for name, result in zip((*OF_ALL, *OF_ROWS), found, strict=True) if name != "mode"]

    exported(function, torch.randn(4, 3), tmp_path, opset, first, dynamic_shapes={"x": {0: "rows"}})
    for rows in (2, 5, 8):
        for x in inputs((rows, 3), nan=False):
            agrees(tmp_path, function, x)
        for x in inputs((rows, 3)):
            both = (without_mode(f(x)) for f in (svexport.load(tmp_path / "m.onnx"), function))
            for actual, expected in zip(*both, strict=True):
                torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("opset", "first"), TRACED)
def test_mode_by_hand(opset: int, first: bool, tmp_path) -> None:
    """Its last place. Numbers go before NaN; torch's own sort has them in no order, so its result depends on theirs."""
    function = lambda x: tuple(x.mode(-1))  # noqa: E731
    exported(function, torch.randn(5, 6), tmp_path, opset, first)
    x = torch.tensor(
        [[2, 1, 2, 1, 0, 3], [5, 5, 4, 4, 4, 1], [NAN, 1, NAN, 2, 1, NAN], [3, NAN, NAN, NAN, 2, NAN], [NAN] * 6]
    )
    values, places = results(svexport.load(tmp_path / "m.onnx")(x))
    torch.testing.assert_close(values, torch.tensor([1, 4, 1, 2, NAN]), equal_nan=True)
    assert places.tolist() == [3, 4, 4, 4, 5]


@pytest.mark.parametrize(("opset", "first"), TRACED)
def test_mode_of_booleans(opset: int, first: bool, tmp_path) -> None:
    function = lambda x: (x > 0).mode(-1, keepdim=True).values  # noqa: E731
    exported(function, torch.randn(4, 5), tmp_path, opset, first)
    for x in (torch.randn(4, 5), torch.zeros(4, 5), torch.ones(4, 5)):
        agrees(tmp_path, function, x)
