"""TorchScript traces models that torch.export refuses; their files are right, and the report says so."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport.exporter import dynamo
from svexport.exporter.opsets import LAST_TORCHSCRIPT_OPSET
from svexport.exporter.trace import torch_export_first
from tests.exporter.test_opsets import (
    Clamps,
    Concatenations,
    Expansions,
    Extremes,
    Finite,
    FloorDivisions,
    Indexing,
    IntegersAndNumbers,
    NearestExact,
    Permutations,
    Twins,
    Unpools,
)
from tests.exporter.test_slices import Numbers, Writes, corner, one_wide, single
from tests.support import check_export

pytestmark = pytest.mark.skipif(LAST_TORCHSCRIPT_OPSET >= 18, reason="an old torch has TorchScript alone")


@pytest.fixture
def alone() -> Iterator[None]:
    with torch_export_first(False):
        yield


INDICES = torch.tensor([-7, -6, 5, 6, -1])
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], dict[str, Any]]] = {
    "floor divisions": (FloorDivisions, (torch.ones(4, 5) * 3, INDICES, INDICES.to(torch.int8)), {"x": {0: "n"}}),
    "permutations": (Permutations, (torch.rand(2, 3, 4, 5),), {"x": {0: "n"}}),
    "concatenations": (Concatenations, (torch.rand(2, 3, 4),), {"x": {0: "n"}}),
    "expansions": (Expansions, (torch.rand(2, 3, 2),), {"x": {0: "n", 1: "m"}}),
    "indexing": (
        Indexing,
        (torch.rand(2, 3, 4, 5), torch.tensor([0, 1, 1]), torch.tensor([2, -1, -3])),
        {"x": {0: "n"}},
    ),
    "clamps": (Clamps, (torch.rand(3, 4), torch.tensor([[2**40, -(2**40)], [1, 7]])), {"x": {0: "n"}}),
    "integers and numbers": (IntegersAndNumbers, (torch.rand(5, 6),), {"x": {0: "n"}}),
    "infinities": (Finite, (torch.tensor([[torch.nan, torch.inf], [-torch.inf, 1.0]]),), {}),
    "equal constants": (Twins, (torch.rand(1, 3, 4, 4),), {}),
    "extremes of masks": (Extremes, (torch.rand(3, 7) - 0.5,), {"x": {0: "n"}}),
    "nearest": (NearestExact, (torch.rand(2, 3, 4, 14),), {"x": {0: "n"}}),
    "unpooled": (Unpools, (torch.rand(2, 4, 7, 9),), {"x": {0: "n"}}),
    **{
        f"writes {i}": (lambda w=w: Writes(w), (torch.rand(2, 3, 4),) * 2, {"x": {0: "n"}, "y": {0: "n"}})
        for i, w in enumerate((one_wide, corner, single))
    },  # type: ignore[misc]
    "one place": (Numbers, (torch.rand(1, 4, 1),), {}),
}


NOT_AT_9 = ("writes", "floor divisions", "integers and numbers")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "opset"),  # what is written to slices of dynamic sizes has the sizes of the trace at opset 9, which has no
    # exact remainder of floating-point numbers
    [(name, opset) for name in CASES for opset in (9, 11, 17) if opset > 9 or not name.startswith(NOT_AT_9)],
)
def test_alone(name: str, opset: int, alone: None, tmp_path) -> None:
    build, args, sizes = CASES[name]
    report = check_export(build().eval(), tmp_path, opset, args, dynamic_shapes=sizes or None)
    assert report.notes == [note for note in report.notes if not note.startswith("traced by")]


class Branching(nn.Module):
    """A value in Python that decides nothing that is returned."""

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            self.seen = True
        return x * 2


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Branching(), r"needs the value of a tensor in Python: .*test_torchscript.py:\d+ in forward: if x.isnan"),
        (torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.ReLU())), "it has scripted modules"),
    ],
)
@pytest.mark.parametrize("opset", [11, 17])
def test_what_torch_export_refuses(model: nn.Module, reason: str, opset: int, tmp_path) -> None:
    report = svexport.export(model, torch.randn(2, 3), tmp_path / "m.onnx", opset=opset)
    assert report.verified
    (note,) = (note for note in report.notes if note.startswith("traced by TorchScript"))

    assert re.search(reason, note)


@pytest.mark.parametrize("wrong", [False, True])
def test_what_torch_export_gets_wrong(wrong: bool, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Of a converted file that is not right, or fails, the other tracer's is written, and the report says why."""
    own = dynamo.export

    def broken(*args: Any) -> Any:
        model, guards = own(*args)
        for node in model.graph.node:
            if node.op_type == "Sigmoid":
                node.op_type = "Tanh" if wrong else "Nonsense"
        return model, guards

    monkeypatch.setattr(dynamo, "export", broken)
    report = svexport.export(nn.Sigmoid(), torch.randn(2, 3), tmp_path / "m.onnx", opset=11)
    assert report.verified
    assert report.nodes == {"Sigmoid": 1}
    assert "the file by torch.export is not right: the exported file" in report.notes[-1]


@pytest.mark.parametrize("opset", [11, 18])
def test_an_optimizer_that_fails(opset: int, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """The other tracer takes the model where it can; else the error says what failed."""

    def failing(self: torch.onnx.ONNXProgram) -> None:
        raise ir.passes.PassError("the pass has met its end")

    monkeypatch.setattr(torch.onnx.ONNXProgram, "optimize", failing)
    x, path = torch.randn(2, 3), tmp_path / "m.onnx"
    if opset < 18:
        report = svexport.export(nn.Sigmoid(), x, path, opset=opset)
        assert report.verified
        assert "the pass has met its end" in report.notes[-1]
        return
    with pytest.raises(svexport.ExportError, match=r"at opset 18: the pass has met its end"):
        svexport.export(nn.Sigmoid(), x, path, opset=opset)
    assert not list(tmp_path.iterdir())


def test_neither_is_right(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    with pytest.raises(svexport.VerificationError, match="does not compute what torch computes"):
        svexport.export(nn.Softmax(-1), torch.randn(2, 30), tmp_path / "m.onnx", opset=11, rtol=1e-16, atol=1e-16)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("opset", [11, 17, 18])
@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: torch.nn.functional.unfold(x, 2), (0, 2, 4, 4)),
        (lambda x: torch.nn.functional.group_norm(x, 2), (0, 4, 3)),
        (lambda x: torch.nn.functional.group_norm(x, 2), (2, 4, 0)),
    ],
    ids=["unfold", "group_norm", "group_norm of no positions"],
)
def test_nothing_does_not_end_the_process(function, shape, opset, tmp_path) -> None:
    """The exporter, and ONNX Runtime, divide by sizes that are zero."""

    class Of(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    with pytest.raises(svexport.SvexportError):
        svexport.export(Of(), torch.zeros(shape), tmp_path / "m.onnx", opset=opset)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("opset", [11, 17])
def test_quotients_and_remainders_are_exact(opset: int, tmp_path: Path) -> None:
    """At multiples of the divisor too, of both signs, and by zero."""
    x = torch.tensor([2.0, -2.0, 1.0, 5.5, 0.0, -0.7, 3.0, 2.4])
    y = torch.tensor([0.4, 0.4, -0.1, 0.5, 2.0, 0.1, 0.0, -0.8])

    class Quotients(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            return x // y, x % y, torch.div(x, y, rounding_mode="floor"), x // 0.4

    model = Quotients()
    with torch_export_first(False):
        svexport.export(model, (x, y), tmp_path / "m.onnx", opset=opset, verify=False)
    for found, expected in zip(svexport.load(tmp_path / "m.onnx").run([x, y]), model(x, y), strict=True):
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())
