"""Assignments to slices are exported as parts put together, at opsets where torch's exporter writes scatters."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport.exporter.trace import torch_export_first
from tests.support import BOTH_EXPORTERS

pytestmark = pytest.mark.core

Write = Callable[[Tensor, Tensor], None]


def last(x: Tensor, y: Tensor) -> None:
    x[..., 0] = y[..., 1] * 2
    x[..., -1] /= 3


def one_wide(x: Tensor, y: Tensor) -> None:
    x[..., 1:2] = y[..., :1]
    x[:, 1:2, 2] = y[:, :1, 0]
    x[:, 2, 1:2] = y[0, 0, :1]


def corner(x: Tensor, y: Tensor) -> None:
    x[:, :2, :3] = y[:, :2, 1:4]
    x[:, -2:, -1:] = 1.5
    x[:, 1:-1] += y[:, :1]


def single(x: Tensor, y: Tensor) -> None:
    x[:, 0] = y[0, 2]
    x[:, -1, 2] = y[:, 0, 0]
    x[:, 1, 1] = 7


def whole(x: Tensor, y: Tensor) -> None:
    x[:] = y
    x[:, :, :] *= 2
    x[..., 2:] = y[0, 0, 2:]


def first(x: Tensor, y: Tensor) -> None:
    x[0] = y[1]
    x[-1, 1:] = 0
    x[:1] = y[1:2, :1]


def copied(x: Tensor, y: Tensor) -> None:
    x[:, 1:].copy_(y[:, :1])
    x[..., :2].copy_(y[0, 0, 0])
    x[0].copy_(y[1, 2])


def stepped(x: Tensor, y: Tensor) -> None:
    x[:, ::2] = y[:, :2]
    x[..., 1::3] = 4.0


def of_sizes(x: Tensor, y: Tensor) -> None:
    middle = x.shape[2] // 2
    x[..., middle:] = y[..., middle:]
    x[:, : x.shape[1] - 1, 0] = 2


def listed(x: Tensor, y: Tensor) -> None:
    x[:, [0, 1]] = y[:, [2, 1]]
    x[:, torch.tensor([1])] = y[0, 0]
    x[:, [0, 1], [1, 2]] = y[:, 0, :2]


def views(x: Tensor, y: Tensor) -> None:
    x[:, 0].fill_(3.0)
    x[:, 1].copy_(y[:, 0])
    x[..., 2] += 1


def indexed(x: Tensor, y: Tensor) -> None:
    index = torch.where(y[0, :2, 0] > 0, 1, -2)  # (2,)
    x[index, 0] = y[:, 0] * 2
    x[:, index, 1] = y[:, :2, 0]
    x[0, index, :2] = y[0, :1, :2]
    x[x[:, 0, 0] > 0, index[0]] = 1.5
    x[y > 0] = -1


class Writes(nn.Module):
    def __init__(self, write: Write) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        changed, zeros = x * 1, torch.zeros_like(x)
        self.write(changed, y)
        self.write(zeros, x)
        return changed, zeros


WRITES = [last, one_wide, corner, single, whole, first, copied, stepped, of_sizes, listed]


@pytest.mark.parametrize("write", [*WRITES, views, indexed])
def test_slices_by_torchscript(write: Write, tmp_path) -> None:
    with torch_export_first(False):
        args = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
        report = svexport.export(Writes(write), args, tmp_path / "m.onnx", opset=17)
    fresh = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    torch.testing.assert_close(tuple(svexport.load(report.path)(*fresh)), Writes(write)(*fresh))


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("dynamic", [(), (0,)])
def test_slices(write: Write, opset: int, dynamic: tuple[int, ...], tmp_path) -> None:
    axes = {axis: f"n{axis}" for axis in dynamic}
    args = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    file = tmp_path / "m.onnx"
    report = svexport.export(Writes(write), args, file, opset=opset, dynamic_shapes={"x": axes, "y": axes})
    assert report.verified
    # TorchScript, which traces with older versions of torch, makes scatters of what a view of a slice is changed by.
    scattered = [stepped, listed, *([of_sizes] if dynamic else [])]
    if not BOTH_EXPORTERS:
        scattered += [last, corner, whole, copied, of_sizes]
    if write not in scattered:
        assert not {"ScatterND", "Range"} & {node.op_type for node in onnx.load(str(file)).graph.node}
    shape = [size + 2 * (axis in dynamic) for axis, size in enumerate((2, 3, 4))]
    fresh = torch.randn(shape), torch.randn(shape)
    torch.testing.assert_close(tuple(svexport.load(file)(*fresh)), Writes(write)(*fresh))


@pytest.mark.parametrize("opset", [11, 17])
def test_types(opset: int, tmp_path) -> None:
    class Casts(nn.Module):
        def forward(self, x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
            x, n = x * 1, n * 1
            x[:, 0] = n[:, 1]
            n[:, 1:] = x[:, 1:]
            return x, n

    args = torch.randn(2, 3) * 9, torch.randint(9, (2, 3))
    batch = {"x": {0: "b"}, "n": {0: "b"}}
    assert svexport.export(Casts(), args, tmp_path / "m.onnx", opset=opset, dynamic_shapes=batch).verified


@pytest.mark.parametrize("opset", [11, 17])
def test_sizes_stay_known(opset: int, tmp_path) -> None:
    """Poses put together from rotation and translation, for every image of a batch."""

    class Poses(nn.Module):
        def forward(self, rotation: Tensor, translation: Tensor) -> Tensor:
            pose = torch.eye(4).to(rotation).repeat(rotation.shape[0], 1, 1)
            pose[:, :3, :3] = rotation
            pose[:, :3, 3] = translation
            return torch.inverse(pose)

    args = torch.eye(3) + 0.1 * torch.randn(2, 3, 3), torch.randn(2, 3)
    batch = {"rotation": {0: "b"}, "translation": {0: "b"}}
    report = svexport.export(Poses(), args, tmp_path / "m.onnx", opset=opset, dynamic_shapes=batch)
    assert report.verified
    assert report.outputs["output"].endswith(", 4, 4]")


class Numbers(nn.Module):
    """Every way to name one place, in dimensions of which some have one place alone."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        last, first, second, both = (x * 1 for _ in range(4))
        for i in range(x.shape[-1]):
            last[..., i] = last[..., i] * (i + 2) - 1
        first[0] = first[-1] * 2
        second[:, 0] = x[:, -1] + x[:, 0]
        both[:, 0, ..., -1] = x[:, -1, ..., 0]
        both[0, :, 0] = 3.0
        return last, first, second, both


@pytest.mark.parametrize("shape", [(1, 1, 3, 2), (1, 5, 2), (3, 1, 1), (1, 4, 1), (2, 1, 3, 1, 2), (1, 1, 1)])
@pytest.mark.parametrize("opset", [11, 17])
def test_sizes_of_one(opset: int, shape: tuple[int, ...], tmp_path) -> None:
    """A dimension of size 1 is a single place as well, without any index that takes it away."""
    file, x = tmp_path / "m.onnx", torch.randn(shape)
    assert svexport.export(Numbers(), torch.randn(shape), file, opset=opset).verified
    torch.testing.assert_close(tuple(svexport.load(file)(x)), Numbers()(x))
