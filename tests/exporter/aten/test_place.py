"""Indices that are masked out, out of range at both ends, negative or int32; a given number of nonzero positions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import svexport
from tests.exporter.aten import Call, agrees, exported
from tests.exporter.aten.test_order import TRACED

ROWS = torch.tensor([[-1], [-100], [100], [2], [-5], [0]])
COLUMNS = torch.tensor([[3, -4, 9, -9, 1]])


def chosen(fill: float):
    def function(x: Tensor) -> Tensor:
        return torch.ops.aten._unsafe_masked_index(x, x[:1, :5] > 0, [ROWS, COLUMNS], fill)

    return function


def added(x: Tensor) -> Tensor:
    values = x.repeat(2, 2)[:6, :5]
    return torch.ops.aten._unsafe_masked_index_put_accumulate(x, values > 0, [ROWS, COLUMNS], values)


@pytest.mark.parametrize("opset", [11, 17, 20])
@pytest.mark.parametrize("function", [chosen(-8), added], ids=["index", "put"])
def test_places_beyond_the_ends(function, opset: int, tmp_path) -> None:
    exported(function, torch.randint(-9, 9, (5, 6)), tmp_path, opset, True)
    for _ in range(3):
        agrees(tmp_path, function, torch.randint(-(2**40), 2**40, (5, 6)))


@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize("opset", [11, 20])
def test_of_booleans(opset: int, fill: bool, tmp_path) -> None:
    function = chosen(fill)
    exported(function, torch.rand(5, 6) > 0.5, tmp_path, opset, True)
    for _ in range(3):
        agrees(tmp_path, function, torch.rand(5, 6) > 0.5)


@pytest.mark.parametrize(("opset", "first"), TRACED)
def test_sums_at_places_of_booleans_are_refused(opset: int, first: bool, tmp_path) -> None:
    with pytest.raises(svexport.ExportError):
        exported(added, torch.rand(5, 6) > 0.5, tmp_path, opset, first)


def indexed(x: Tensor) -> tuple[Tensor, ...]:
    rows = (x[:, 0, 0] * 2).int().clamp(-4, 3)
    columns = (x[:, 1, 1] * 2).int().clamp(-3, 2)
    added = x.index_put((rows, columns), x[:, 0], accumulate=True)
    assigned = x.clone()
    assigned[rows] = 1.0
    return x[rows], x[rows, columns], x[rows, :, columns.clamp(-2, 1)], x[:, columns], added, assigned


@pytest.mark.parametrize(("opset", "first"), [*TRACED, (18, True)])
def test_indices_of_32_bits(opset: int, first: bool, tmp_path) -> None:
    exported(indexed, torch.randn(4, 3, 2), tmp_path, opset, first)
    engine = svexport.load(tmp_path / "m.onnx")
    for _ in range(3):
        x = torch.randn(4, 3, 2) * 2
        for actual, expected in zip(engine(x), Call(indexed)(x), strict=True):
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("opset", "first"), TRACED)
def test_nonzero_static(opset: int, first: bool, tmp_path) -> None:
    """Fewer places than rows, and more; NaN and subnormal numbers are not 0, zeros of both signs are."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.nonzero_static(x, size=4),
            torch.nonzero_static(x > 0.5, size=40, fill_value=7),
            torch.nonzero_static(x[0].to(torch.int64), size=0),
        )

    exported(function, torch.randn(3, 5), tmp_path, opset, first, dynamic_shapes={"x": {0: "rows", 1: "columns"}})
    special = torch.tensor([[0.0, -0.0, torch.nan, 1e-45], [-torch.inf, 0, 0, 3]])
    for x in (torch.randn(2, 7).relu(), torch.zeros(4, 4), special, torch.randn(9, 3)):
        agrees(tmp_path, function, x)


@pytest.mark.parametrize(("opset", "first"), [(11, True), (17, False)])
def test_nonzero_static_of_other_ranks(opset: int, first: bool, tmp_path) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.nonzero_static(y, size=6) for y in (x, x[0, 0], x.sum()))

    exported(function, torch.randn(2, 3, 5).relu(), tmp_path, opset, first)
    for x in (torch.randn(2, 3, 5).relu(), torch.zeros(2, 3, 5)):
        agrees(tmp_path, function, x)


@pytest.mark.parametrize(("opset", "first"), TRACED)
def test_diagonals(opset: int, first: bool, tmp_path) -> None:
    """Of a view too, where the tracer follows views."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        y, tall, wide, mask = x.clone(), x[0].T.contiguous(), x[0].clone(), x[0] > 0
        if first:  # TorchScript loses it, which verification refuses
            y.select(0, 1).fill_diagonal_(5.0)
        return y, tall.fill_diagonal_(-2, wrap=True), wide.fill_diagonal_(3.5), mask.fill_diagonal_(True)

    exported(function, torch.randn(2, 2, 7), tmp_path, opset, first)
    for x in (torch.randn(2, 2, 7), torch.full((2, 2, 7), torch.nan)):
        agrees(tmp_path, function, x)


@pytest.mark.parametrize("opset", [11, 20])
def test_taken_along_a_dimension(opset: int, tmp_path) -> None:
    """Of a dynamic size, broadcast either way, and of all in one row."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        order = x.argsort(1)
        return (
            torch.take_along_dim(x, order, 1),
            x.take_along_dim(order[:, :1], -1),
            torch.take_along_dim(x[:, :1], order[:, :2] * 0, 1),
            torch.take_along_dim(x[:, None], torch.tensor([[[3, -6]]]), 2),
            torch.take_along_dim(x, order[0]),
        )

    exported(function, torch.randperm(18).float().view(3, 6), tmp_path, opset, True, dynamic_shapes={"x": {0: "n"}})
    for n in (1, 2, 5):
        agrees(tmp_path, function, torch.randperm(6 * n).float().view(n, 6))
