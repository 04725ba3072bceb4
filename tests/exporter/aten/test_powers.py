"""Integer powers are exact, wrap around beyond the range of their type, and match torch for negative exponents."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor

from tests.exporter.aten import agrees, exported

WAYS = [(11, False), (11, True), (17, True), (18, True)]
EXTREMES = [0, 1, -1, 2, -2, 3, -3, 7, 10, 63, 64, 65, -64, 2**31 - 1, -(2**31)]


def integers(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Extremes of a type, and numbers from all of it."""
    info = torch.iinfo(dtype)
    x = torch.randint(info.min, info.max, shape, dtype=dtype)
    known = [n for n in (*EXTREMES, info.min, info.max) if info.min <= n <= info.max]
    places = torch.randint(0, 2 * len(known), shape)
    return torch.where(places < len(known), torch.tensor(known, dtype=dtype)[places % len(known)], x)


@pytest.mark.parametrize(("opset", "first"), WAYS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
def test_of_two_tensors(tmp_path: Path, opset: int, first: bool, dtype: torch.dtype) -> None:
    def function(x: Tensor) -> Tensor:
        return x[0].unsqueeze(-1) ** x[1]

    exported(function, torch.randint(0, 4, (2, 19)).to(dtype), tmp_path, opset, first)
    for _ in range(3):
        agrees(tmp_path, function, integers(dtype, (2, 19)))


@pytest.mark.parametrize(("opset", "first"), WAYS)
@pytest.mark.parametrize("base", [0, 1, -1, 2, -2, 3, -7, 10, 2**40 + 1])
def test_of_a_number(tmp_path: Path, opset: int, first: bool, base: int) -> None:
    def function(x: Tensor) -> Tensor:
        return base**x

    exported(function, torch.arange(97), tmp_path, opset, first)
    agrees(tmp_path, function, integers(torch.int64, (97,)))


@pytest.mark.parametrize(("opset", "first"), WAYS)
@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 5, 22, 63])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_to_a_number(tmp_path: Path, opset: int, first: bool, exponent: int, dtype: torch.dtype) -> None:
    def function(x: Tensor) -> Tensor:
        return x**exponent

    exported(function, torch.arange(6).reshape(2, 3).to(dtype), tmp_path, opset, first)
    agrees(tmp_path, function, integers(dtype, (2, 3)))


@pytest.mark.parametrize(("opset", "first"), WAYS)
def test_mixed_types_are_of_the_larger(tmp_path: Path, opset: int, first: bool) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        whole = x.int() ** x, x ** x.int(), x.to(torch.uint8) ** x.to(torch.int8)
        if not first:  # TorchScript refuses products of booleans
            return whole
        return (*whole, (x > 1) ** 2, (x > 1).square(), 3 ** (x > 1))

    exported(function, torch.arange(4), tmp_path, opset, first)
    agrees(tmp_path, function, torch.tensor([0, 1, 5, 13]))


@pytest.mark.parametrize(("opset", "first"), WAYS)
def test_floating_point_numbers_stay_one_node(tmp_path: Path, opset: int, first: bool) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return x**2.5, 2**x, x.long() ** 1.5, x ** x.long()

    exported(function, torch.rand(7) + 1, tmp_path, opset, first)
    nodes = [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node]
    assert nodes.count("Pow") == 4
    assert "Mod" not in nodes
