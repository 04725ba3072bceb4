from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from svexport.ops.index_put import OP, index_put
from tests.support import OPSETS, check_export, run_op

I, J = torch.tensor([0, 2, 0, -1, 2, 0]), torch.tensor([1, 1, 1, 0, -3, 1])


def explicit(x: Tensor, indices: list[Tensor], values: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Adds one element at a time, where indexing puts it."""
    places = torch.arange(x.numel()).reshape(x.shape)
    at = [slice(None)] * (max(dims) + 1)
    for dim, index in zip(dims, indices, strict=True):
        at[dim] = index
    chosen = places[tuple(at)]
    output = x.flatten().clone()
    for place, value in zip(chosen.flatten().tolist(), values.expand(chosen.shape).flatten(), strict=True):
        output[place] += value
    return output.reshape(x.shape)


CASES = [
    ((3, 4), [I], (6, 4), (0,)),
    ((3, 4), [I, J], (6,), (0, 1)),
    ((3, 4), [I, J], (), (0, 1)),
    ((5, 3, 4), [I, J], (5, 6), (1, 2)),
    ((5, 3, 4), [I], (6, 4), (1,)),
    ((3, 2, 4), [I, J], (6, 2), (0, 2)),
    ((2, 3, 5, 4), [I, J], (6, 2, 5), (1, 3)),
    ((2, 3, 4), [I[:, None], J[:2]], (6, 1), (1, 2)),
    ((4, 3), [torch.tensor(-1)], (3,), (0,)),
    ((6,), [torch.tensor([[1, 5], [1, 1]])], (2, 2), (0,)),
    ((6, 2), [I > 0], (2, 2), (0,)),
    ((2, 6), [J == 1], (2, 1), (1,)),
    ((3, 6, 4), [I[:4], J == 1], (), (0, 1)),
    ((2, 3, 4), [torch.eye(3, 4) > 0], (2, 3), (1,)),
    ((3, 2, 4, 4), [torch.eye(3, 2) > 0, torch.tensor([1, 3])], (2, 4), (0, 1)),
    ((3, 4), [torch.zeros(3, 4) > 0], (0,), (0,)),
]


@pytest.mark.parametrize(("shape", "indices", "values", "dims"), CASES)
def test_body(shape: tuple, indices: list, values: tuple, dims: tuple) -> None:
    torch.manual_seed(0)
    x, added = torch.randn(shape, dtype=torch.float64), torch.randn(values, dtype=torch.float64)
    expected = explicit(x, indices, added, dims)
    torch.testing.assert_close(OP(x, indices, added, dims, 1), expected)
    for opset, dynamic in itertools.product(OPSETS, (False, True)):
        (actual,) = run_op(OP, (x.float(), indices, added.float(), dims, 1), opset, dynamic=dynamic)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


ASSIGNED = [
    ((5, 4), [torch.tensor([0, 2, -1])], (3, 4), (0,)),
    ((5, 3, 4), [torch.tensor([0, 2, -1, 3]), torch.tensor([1, 1, 0, -3])], (), (0, 1)),
    ((3, 2, 4), [torch.tensor([1, -1]), torch.tensor([0, 3])], (2, 1), (0, 2)),
    ((2, 3, 5, 4), [torch.tensor([2, 0]), torch.tensor([3, 1])], (2, 2, 5), (1, 3)),
    ((2, 3, 4), [torch.tensor([[0], [2]]), torch.tensor([1, 3])], (2, 1), (1, 2)),
    ((6, 2), [I > 0], (2, 2), (0,)),
    ((2, 6, 3), [J == 1], (), (1,)),
    ((3, 6, 4), [torch.tensor([0, 2, 1, -3]), J == 1], (), (0, 1)),
    ((2, 3, 4), [torch.eye(3, 4) > 0], (2, 3), (1,)),
    ((3, 4), [torch.zeros(3, 4) > 0], (0,), (0,)),
]


@pytest.mark.parametrize(("shape", "indices", "values", "dims"), ASSIGNED)
def test_body_of_assignments(shape: tuple, indices: list, values: tuple, dims: tuple) -> None:
    torch.manual_seed(0)
    x, put = torch.randn(shape), torch.randn(values)
    expected = explicit(x, indices, put, dims) - explicit(x, indices, torch.zeros(()), dims)
    at = explicit(torch.zeros(shape), indices, torch.ones(()), dims) > 0
    expected = torch.where(at, expected, x)
    torch.testing.assert_close(OP(x, indices, put, dims, 0), expected)
    for opset, dynamic in itertools.product(OPSETS, (False, True)):
        (actual,) = run_op(OP, (x, indices, put, dims, 0), opset, dynamic=dynamic)
        torch.testing.assert_close(actual, expected)


class Voxels(nn.Module):
    """Points added up in the cells they fall into, as a bird's-eye-view pooling has it."""

    def forward(self, grid: Tensor, row: Tensor, column: Tensor, points: Tensor) -> dict[str, Tensor]:
        return {
            "cells": grid.index_put((row, column), points, accumulate=True),
            "in place": (grid + 1).index_put_((row, column), points, accumulate=True),
            "rows": grid.index_put((row,), points[:, None], accumulate=True),
            "per channel": grid.permute(2, 0, 1)
            .contiguous()
            .index_put((torch.arange(2)[:, None], row, column), points.t(), accumulate=True),
            "count": torch.zeros(4, 5, dtype=torch.int64).index_put((row, column), torch.tensor(1), accumulate=True),
            "ours": index_put(grid, (row, column), points, accumulate=True),
        }


def inputs(count: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(count)
    row, column = torch.randint(4, (count,), generator=generator), torch.randint(5, (count,), generator=generator)
    row[-1], column[-1] = row[0], column[0]
    return torch.randn(4, 5, 2), row, column, torch.randn(count, 2)


@pytest.mark.core
@pytest.mark.parametrize("opset", [9, 11, 13, 16, 17, 18, 20])
def test_unedited_models(opset: int, tmp_path) -> None:
    shapes = {name: {0: "m"} for name in ("row", "column", "points")} if opset in (9, 13, 17, 20) else None
    others = [inputs(9), inputs(2)] if shapes else []
    assert check_export(Voxels(), tmp_path, opset, inputs(7), *others, dynamic_shapes=shapes).verified


@pytest.mark.parametrize("opset", [9, 17])
def test_indices_of_32_bits(opset: int, tmp_path) -> None:
    class Model(nn.Module):
        def forward(self, grid: Tensor, row: Tensor, column: Tensor, points: Tensor) -> list[Tensor]:
            return [grid.index_put((row.int(), column.int()), points, accumulate=True)]

    check_export(Model(), tmp_path, opset, inputs(7))


class Assign(nn.Module):
    def forward(self, x: Tensor, other: Tensor, mask: Tensor) -> list[Tensor]:
        index = other[:, 0].argsort() * 2 - 1  # none of them twice, one negative
        rows, apart, single, masked = (x.clone() for _ in range(4))
        rows[index] = other[:, :, None]
        rows[mask] = 0.0
        apart[index, :, index.abs() // 2] = other  # x is (n, 2, 4)
        single[index, 0] = other.sum(1, keepdim=True)
        masked[mask, 1] = -1.0
        canvas = torch.zeros(2, 5, 3)
        canvas[:, index] = other.t()[:, :, None]
        canvas[index.abs() // 4, :, index.abs() // 2] = other[:, :1]
        return [rows, apart, single, masked, canvas]


def assignment(n: int) -> tuple[Tensor, ...]:
    return torch.randn(n, 2, 4), torch.randn(3, 2), torch.rand(n) > 0.5


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("dynamic", [False, True])
def test_assignments(dynamic: bool, opset: int, tmp_path) -> None:
    shapes = {"x": {0: "n"}, "mask": {0: "n"}} if dynamic else None
    others = [assignment(7)] if dynamic else []
    check_export(Assign(), tmp_path, opset, assignment(5), *others, dynamic_shapes=shapes)


def test_the_first_export_of_a_process(tmp_path) -> None:
    """torch.onnx has no more than opset 9 in its registry until then; what is left to it needs opset 11."""
    code = "\n".join(
        [
            "import torch, svexport",
            "from tests.ops.test_index_put import Assign, assignment",
            f"assert svexport.export(Assign(), assignment(5), {str(tmp_path / 'm.onnx')!r}, opset=11).verified",
        ]
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


class Masked(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        one = torch.tensor(1.5)
        rows = x.index_put((x[:, 0] > 0,), x[0], accumulate=True)
        return [x.index_put((x > 0,), one, accumulate=True), rows, x.index_put((x > 9,), one, accumulate=True)]


@pytest.mark.parametrize("opset", [9, 11, 13, 17, 18])
def test_masks(opset: int, tmp_path) -> None:
    others = [(torch.randn(2, 4),), (torch.randn(7, 4),)]
    check_export(Masked(), tmp_path, opset, (torch.randn(3, 4),), *others, dynamic_shapes={"x": {0: "n"}})
