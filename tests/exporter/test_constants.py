"""Values that Python reads from tensors while torch.export traces: constants, unless something wrote to them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

import svexport
from svexport.graph.fold import MOST_BYTES


class Held(nn.Module):
    """A function of a buffer, a parameter and an attribute that is neither."""

    def __init__(self, function: Callable[[Held, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("counts", torch.tensor([2, 0, 3]))
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
        self.plain = torch.tensor([True, False, True])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def in_place(self: Held, x: Tensor) -> Tensor:
    weight = self.weight.clone()
    F.relu(weight, True)
    return x + int(weight.sum())


def through_a_view(self: Held, x: Tensor) -> Tensor:
    counts = self.counts.clone()
    counts.view(1, 3)[0, 1] += 5
    return x + counts[1].item()


def by_out(self: Held, x: Tensor) -> Tensor:
    made = torch.zeros(3)
    torch.add(self.weight, 1, out=made)
    return x + float(made.sum())


CONSTANT: list[Callable[[Held, Tensor], Tensor]] = [
    lambda self, x: x * int(self.counts[0]),
    lambda self, x: torch.cat([x[:, : self.counts[2]], x[:, self.counts[0] :]], 1),
    lambda self, x: x[:, :3][:, self.plain] * self.weight[self.plain],
    lambda self, x: torch.zeros(self.counts[0], self.counts[2]) + x[:2, :3],
    lambda self, x: x.new_full((self.counts[2], 1), self.counts[0]) + x[:3].sum(1, keepdim=True),
    lambda self, x: x[[0, 2]] + self.counts.sum().item(),
    lambda self, x: x[:, self.plain.nonzero()[:, 0]],
    lambda self, x: torch.stack([x[:, i] for i in self.counts.tolist()]),
    lambda self, x: x[:, torch.unique(self.counts)] if (self.weight > 2).any() else -x,
    lambda self, x: x.index_put((torch.tensor([0]), torch.tensor([1])), x.new_ones(1) * float(self.weight.norm())),
    lambda self, x: x * self.counts.float().mean().numpy().item(),
]


@pytest.mark.parametrize("function", CONSTANT)
def test_values_of_constants(function: Callable[[Held, Tensor], Tensor], tmp_path) -> None:
    report = svexport.export(Held(function), torch.randn(4, 5), tmp_path / "m.onnx", opset=18)
    assert report.verified


@pytest.mark.parametrize("function", [in_place, through_a_view, by_out])
def test_what_was_written_to_is_computed(function: Callable[[Held, Tensor], Tensor], tmp_path) -> None:
    """Of a value that it cannot know, torch.export makes a node or an error; never the one before the write."""
    try:
        report = svexport.export(Held(function), torch.randn(4, 5), tmp_path / "m.onnx", opset=18)
    except svexport.VerificationError:
        raise
    except svexport.ExportError:
        return
    assert report.verified


@pytest.mark.parametrize(
    "function", [lambda self, x: x * int(x.sum() > 0), lambda self, x: x[: int(x.shape[0] * self.counts[0]) - 3]]
)
def test_values_of_inputs_are_none(function: Callable[[Held, Tensor], Tensor], tmp_path) -> None:
    model = Held(function)
    try:
        report = svexport.export(
            model, torch.randn(4, 5), tmp_path / "m.onnx", opset=18, dynamic_shapes={"x": {0: "n"}}
        )
    except svexport.VerificationError:
        raise
    except svexport.ExportError:
        return
    assert report.verified


class Orthogonal(nn.Module):
    """Layers whose weights torch makes orthogonal of others, by each of its ways, whenever they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.square = orthogonal(nn.Linear(4, 4))
        self.tall = orthogonal(nn.Linear(4, 7), orthogonal_map="householder")
        self.wide = orthogonal(nn.Linear(7, 3), orthogonal_map="cayley", use_trivialization=False)
        self.convolution = orthogonal(nn.Conv1d(3, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(self.wide(self.tall(self.square(x))).unsqueeze(-1))


class OfMatrices(nn.Module):
    """One of which is written to before it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4) + 2 * torch.eye(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        written = torch.linalg.inv(self.weight)
        written[0] += x[0]
        parts = torch.linalg.qr(self.weight)
        return written, x @ parts.Q, x * torch.linalg.svd(parts.R).S, torch.linalg.solve(self.weight, x.T)


@pytest.mark.parametrize("opset", [11, 17, 20])
@pytest.mark.parametrize("kind", [Orthogonal, OfMatrices])
def test_algebra_of_weights(kind: type[nn.Module], opset: int, tmp_path) -> None:
    """A constant, though ONNX has nothing for it."""
    torch.manual_seed(0)
    model = kind().eval()
    report = svexport.export(model, torch.randn(5, 4), tmp_path / "m.onnx", opset=opset, dynamic_shapes={"x": {0: "n"}})
    assert report.verified
    assert sum(report.nodes.values()) < 32
    for count in (1, 8):
        x = 10 * torch.randn(count, 4)
        actual = svexport.load(report.path)(x)
        torch.testing.assert_close(actual, model(x), rtol=1e-4, atol=1e-4)


def test_a_large_constant_is_a_node(tmp_path) -> None:
    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows = torch.arange(2100.0)
            return x + rows[:, None] * rows

    model = Large()
    report = svexport.export(model, torch.randn(1), tmp_path / "m.onnx", opset=18)
    assert MOST_BYTES < 4 * 2100**2
    assert "Mul" in report.nodes
    assert report.bytes < 2**20


def test_weights_are_not_written_to(tmp_path) -> None:
    """What is computed again of the true tensors leaves them as they are."""

    def function(self: Held, x: Tensor) -> Tensor:
        return x + int(F.relu(self.weight.detach(), inplace=True).sum()) * F.elu(self.weight, 1.0, False).sum().item()

    model = Held(function)
    before = model.weight.detach().clone()
    try:
        assert svexport.export(model, torch.randn(4, 5), tmp_path / "m.onnx", opset=18).verified
    except svexport.VerificationError:
        raise
    except svexport.ExportError:
        pass
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize("how", ["array", "numbers", "long"])
def test_data_of_a_constant(how, opset, tmp_path) -> None:
    """A stereo net's regression of disparities: torch.export alone loses the values of ``.data``, or crashes."""

    class Regression(nn.Module):
        def forward(self, costs: Tensor) -> Tensor:
            size = costs.shape[1]
            if how == "array":
                disparities = torch.Tensor(np.reshape(np.array(range(size)), [1, size, 1]))
            elif how == "numbers":
                disparities = torch.Tensor([[[0.0], [1.0], [2.0]]])
            else:
                disparities = torch.tensor([0, 1, 2]).view(1, -1, 1)
            return (F.softmax(costs, 1) * disparities.data).sum(1)

    model, costs = Regression(), torch.randn(2, 3, 5)
    report = svexport.export(model, costs, tmp_path / "m.onnx", opset=opset, dynamic_shapes={"costs": {0: "n", 2: "w"}})
    assert report.verified
    assert not any("TorchScript" in note for note in report.notes)
    costs = torch.randn(3, 3, 7)
    torch.testing.assert_close(svexport.load(report.path)(costs), model(costs))


@pytest.mark.parametrize("opset", [11, 18])
def test_rows_of_a_tensor_of_sizes(opset, tmp_path) -> None:
    """``for h, w in spatial_shapes``, as in Deformable-DETR's proposals: the numbers go wherever sizes do."""

    class Proposals(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            spatial_shapes, found, start = torch.as_tensor([(2, 3), (1, 2)]), [], 0
            for h, w in spatial_shapes:
                rows = x[:, start : start + h * w].view(x.shape[0], h, w)
                y, _ = torch.meshgrid(torch.linspace(0.5, h - 0.5, h), torch.linspace(0, w - 1, w), indexing="ij")
                found += [(rows + y / h).flatten(1), F.adaptive_avg_pool1d(x, h), x.chunk(h + 1, 1)[0], x.roll(h, 1)]
                found.append(x.unfold(1, w, h).flatten(1) * F.one_hot(torch.arange(1), w).sum())
                start += h * w
            return torch.cat(found, 1)

    model, x = Proposals(), torch.randn(2, 8)
    report = svexport.export(model, x, tmp_path / "m.onnx", opset=opset, dynamic_shapes={"x": {0: "n"}})
    assert report.verified
    assert not any("TorchScript" in note for note in report.notes)
    x = torch.randn(5, 8)
    torch.testing.assert_close(svexport.load(report.path)(x), model(x))
