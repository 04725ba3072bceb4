"""Integer sums, products, remainders and extremes are exact, even for large numbers that ONNX Runtime gets wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor

import svexport
from svexport.graph.integers import write_exactly
from svexport.graph.types import infer_types
from tests.exporter.aten import Call, agrees, exported

ENDS = [2**63 - 1, -(2**63), 2**53 + 1, -(2**53) - 1, 2**31, -(2**31) - 1, 3, -5, 0]

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "sum of axes": lambda x: x.sum((0, 2), keepdim=True),
    "sum in int32": lambda x: x.int().sum(1, dtype=torch.int32),
    "prod": lambda x: x.prod(),
    "prod of an axis": lambda x: x.prod(1),
    "prod of int32": lambda x: x.int().prod(-1, keepdim=True),
    "prod in int32": lambda x: x.int().prod(2, dtype=torch.int32),
    "prod of uint8": lambda x: x.to(torch.uint8).prod(1),
    "cumprod": lambda x: x.cumprod(1),
    "fmod": lambda x: x.fmod(7),
    "fmod of two": lambda x: x.fmod(x.flip(1).clamp(min=2)),
    "addmm": lambda x: torch.addmm(x[0, :, :1], x[0], x[1].mT, beta=3, alpha=-2),
    "scatter_add": lambda x: x.scatter_add(1, torch.zeros(x.shape, dtype=torch.int64), x),
    "scatter_reduce": lambda x: x.scatter_reduce(1, torch.zeros(2, 3, 5, dtype=torch.int64), x[:, :3], "prod"),
    "largest": lambda x: x.scatter_reduce(1, torch.zeros(2, 3, 5, dtype=torch.int64), x[:, :3], "amax"),
    "index_add": lambda x: x.index_add(0, torch.tensor([1, 1]), x),
    "amax": lambda x: x.amax((0, 2)),
    "amin of all": lambda x: x.min(),
    "cummin": lambda x: x.cummin(1)[0],
    "counts": lambda x: (x > 3).sum(1) * x.sum(1),
}


def integers(shape: tuple[int, ...]) -> Tensor:
    """From all of int64, its ends among them."""
    x = torch.randint(-(2**63), 2**63 - 1, shape)
    places = torch.randint(0, 3 * len(ENDS), shape)
    return torch.where(places < len(ENDS), torch.tensor(ENDS)[places % len(ENDS)], x)


@pytest.mark.parametrize("opset", [11, 17, 18])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_modulo_the_bits(tmp_path: Path, name: str, opset: int) -> None:
    exported(FUNCTIONS[name], torch.randint(-9, 9, (2, 7, 5)), tmp_path, opset, True)
    for _ in range(3):
        agrees(tmp_path, FUNCTIONS[name], integers((2, 7, 5)))


@pytest.mark.parametrize("opset", [11, 20])
@pytest.mark.parametrize("name", ["sum", "sum of axes", "prod", "prod of an axis", "cumprod"])
def test_of_dynamic_sizes(tmp_path: Path, name: str, opset: int) -> None:
    function = FUNCTIONS[name]
    exported(function, torch.randint(-9, 9, (2, 7, 5)), tmp_path, opset, True, dynamic_shapes={"x": {1: "n"}})
    for n in (1, 2, 13, 64, 0):
        agrees(tmp_path, function, integers((2, n, 5)))


def test_behind_torchscript(tmp_path: Path) -> None:
    exported(lambda x: (x.sum(1), x.prod(1)), torch.randint(-9, 9, (3, 6)), tmp_path, 11, False)
    agrees(tmp_path, lambda x: (x.sum(1), x.prod(1)), integers((3, 6)))


def test_of_more_than_two_million_numbers_in_three_parts(tmp_path: Path) -> None:
    x = torch.full((2**21 + 3,), 2**63 - 1)
    svexport.export(Call(torch.sum), x, tmp_path / "m.onnx", opset=11, verify=False)
    agrees(tmp_path, torch.sum, x)


def test_what_stays_small_is_one_node(tmp_path: Path) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        chosen = torch.where(x > 0, 3, -100).unsqueeze(0)
        sums = (x > 0).sum(1), chosen.sum(1), x.int().sum(1), (x == 2).long().sum(), torch.ones_like(x).sum()
        return (*sums, x.int().long().amax(1))

    exported(function, torch.randint(-9, 9, (3, 6)), tmp_path, 11, True)
    operators = {node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node}
    assert not operators & {"Div", "Mul", "Sub"}


def test_dynamic_counts_of_sizes_stay(tmp_path: Path) -> None:
    class Mean(torch.nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x[mask].mean(0)

    args = torch.randn(5, 3), torch.tensor([True, False, True, True, False])
    svexport.export(Mean(), args, tmp_path / "m.onnx", opset=11)
    assert "Scan" not in {node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node}


@pytest.mark.parametrize(("least", "kind", "changes"), [(-2, "Min", False), (-1e6, "Min", True), (-2, "Max", True)])
def test_places_within_an_image_are_summed_as_they_are(least: float, kind: str, changes: bool) -> None:
    """Floats of which NaN becomes the least, within bounds: what a place is computed of in bodies of grid_sample."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        places (float[n, 3] x) => (int32[n] y)
        <float least = {{{least}}}, float most = {{32}}, int32[3] strides = {{1, 36, 1296}}, int64[1] axes = {{1}}> {{
            above = Greater(x, least)
            known = Where(above, x, least)
            within = {kind}(known, most)
            whole = Cast<to = 6>(within)
            places = Mul(whole, strides)
            y = ReduceSum<keepdims = 0>(places, axes)
        }}""")
    before = len(model.graph.node)
    write_exactly(model, lambda: infer_types(model))
    assert (len(model.graph.node) != before) == changes
