"""Programs of torch.export, decomposed node by node: in-place writes, casts, pools and windows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport
from svexport.exporter import context, program
from svexport.exporter.opsets import FIRST_DYNAMO_OPSET, LAST_TORCHSCRIPT_OPSET

pytestmark = pytest.mark.skipif(LAST_TORCHSCRIPT_OPSET >= FIRST_DYNAMO_OPSET, reason="TorchScript traces every opset")


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(x)


def twice_written(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.zeros(3, 3)
    y += x
    z = y.mul_(2)
    y.sub_(1)
    return z, y


def detached(x: Tensor) -> Tensor:
    """What is detached shares its memory."""
    y = x + 1
    y.detach().mul_(2)
    return y


def copied(x: Tensor) -> tuple[Tensor, Tensor]:
    """What is made contiguous here does not."""
    y = x.t().contiguous()
    y.add_(1)
    return y, x.t()


def seen_by_a_view(x: Tensor) -> Tensor:
    y = x * 2
    view = y[0]
    y.add_(1)
    return view + y


def written_by_a_view(x: Tensor) -> Tensor:
    y = x * 2
    y.view(-1).relu_()
    return y


def turned(x: Tensor) -> tuple[Tensor, Tensor]:
    """A flat view beside what is written to through its axes in another order."""
    y = x * 2
    flat = y.view(-1)
    y.T[0].fill_(7)
    y.mT.swapaxes(0, 1).movedim(1, 0)[2] += 1
    return flat, y


def part_of_a_split(x: Tensor) -> Tensor:
    parts = (x * 1).split(1)
    parts[0].add_(5)
    return torch.cat(parts)


def same_type(x: Tensor) -> Tensor:
    """A cast to the type that a tensor has is the tensor."""
    y = x + 0
    y.to(torch.float32).add_(1)
    return y


IN_PLACE = {
    "alone": (lambda x: (x * 2).add_(1) + x, True),
    "activation": (lambda x: F.relu(x * 2, inplace=True) + 1, True),
    "input": (lambda x: x.add_(1) * 2, True),
    "twice": (twice_written, True),
    "detached": (detached, True),
    "copied": (copied, False),
    "seen by a view": (seen_by_a_view, True),
    "written by a view": (written_by_a_view, True),
    "turned": (turned, True),
    "part of a split": (part_of_a_split, False),
    "same type": (same_type, True),
    "normalized": (lambda x: F.silu(F.layer_norm(x, (3,)), inplace=True) + x, True),
    "of weights": (lambda x: F.relu(F.linear(x, torch.eye(3)), inplace=True) + x, True),
}
"""Functions that write in place, and whether that is seen to be to what nothing else sees."""


@pytest.mark.parametrize("name", IN_PLACE)
def test_writes_in_place(name: str, tmp_path, monkeypatch) -> None:
    by_node: list[bool] = []

    def seen(*args):
        by_node.append(program.decompose_nodes(*args))
        return by_node[-1]

    monkeypatch.setattr(context, "decompose_nodes", seen)
    function, expected = IN_PLACE[name]
    report = svexport.export(Function(function), torch.randn(3, 3), tmp_path / "m.onnx", opset=11)
    assert by_node == [expected]
    assert report.verified
    assert report.max_abs < 1e-6
    x = torch.randn(3, 3)
    own = function(x.clone())
    files = svexport.load(report.path)(x)
    for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (files, own)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("function", "shape", "nodes"),
    [
        (lambda x: F.adaptive_avg_pool2d(x, (5, 7)), (2, 3, 16, 20), {"MatMul": 2}),
        (lambda x: F.adaptive_avg_pool2d(x, (4, 5)), (2, 3, 16, 20), {"AveragePool": 1}),
        (lambda x: F.adaptive_avg_pool2d(x, (16, 3)), (2, 3, 16, 20), {"MatMul": 1}),
        (lambda x: F.adaptive_avg_pool1d(x, 6), (3, 16, 20), {"Unsqueeze": 1, "MatMul": 1, "Squeeze": 1}),
        (lambda x: F.adaptive_avg_pool3d(x, (3, 5, 7)), (1, 2, 8, 9, 10), {"MatMul": 3, "Reshape": 2}),
        (lambda x: x.unfold(3, 4, 4), (2, 3, 16, 20), {"Reshape": 1}),
        (lambda x: x.unfold(1, 2, 2), (2, 5, 3), {"Slice": 1, "Reshape": 1, "Transpose": 1}),
        (lambda x: x.unfold(-2, 3, 1), (2, 3, 16, 20), {"Gather": 1, "Transpose": 1}),
        (lambda x: F.unfold(x, (2, 4), stride=(2, 4)), (2, 3, 6, 8), {"Reshape": 2, "Transpose": 1}),
    ],
)
def test_pools_and_windows(function, shape, nodes, tmp_path) -> None:
    report = svexport.export(Function(function), torch.randn(shape), tmp_path / "m.onnx", opset=11)
    assert report.verified
    assert report.lowered_nodes == nodes


def test_types_are_promoted_where_they_differ(tmp_path) -> None:
    """Of integers and numbers, of two types, stacked too, and of what is clamped to a number of another type."""
    model = Function(
        lambda x: (x + 1.5, x * torch.tensor(2.0), (x / 2).clamp(0, 1), torch.stack([x.int(), x / 2]), x.half() + x)
    )
    report = svexport.export(model, torch.arange(-2, 4), tmp_path / "m.onnx", opset=11)
    assert report.verified
    assert [shape.partition("[")[0] for shape in report.outputs.values()] == ["float32"] * 4 + ["float16"]


@pytest.mark.parametrize("opset", [11, 17, 20])
def test_vmap(opset: int, tmp_path) -> None:
    """Of a function that torch makes of others, within it."""
    model = Function(lambda x: torch.vmap(lambda row, other: torch.outer(row, other) / row.norm(), (0, None))(x, x[0]))
    report = svexport.export(model, torch.randn(5, 4), tmp_path / "m.onnx", opset=opset)
    assert report.verified
    x = torch.randn(5, 4)
    torch.testing.assert_close(svexport.load(report.path)(x), model(x))


@pytest.mark.parametrize("opset", [11, 20])
def test_transforms_that_fail_end(opset: int, tmp_path) -> None:
    """What torch.export refuses within torch.func is not what everything after it is computed in."""
    model = Function(lambda x: torch.vmap(torch.func.grad(lambda row: (row**3).sum()))(x))
    with suppress(svexport.ExportError):
        svexport.export(model, torch.randn(5, 4), tmp_path / "m.onnx", opset=opset)
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    torch.randn(2, generator=torch.Generator())  # vmap refuses that
