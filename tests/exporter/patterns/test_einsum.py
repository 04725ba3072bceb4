"""Sums of broadcast products in all their spellings, and near misses."""

import onnx
import pytest
import torch
from torch import nn

import svexport
from tests.exporter.patterns.outcomes import gradients_of, replaced_with, whats

WHAT = "sum of broadcast products"


class Graph(nn.Module):
    """A graph convolution, (N, K, C, T, V) by (K, V, W), as people write it without einsum."""

    def __init__(self, mix):
        super().__init__()
        self.adjacency, self.mix = nn.Parameter(torch.rand(3, 5, 5)), mix

    def forward(self, x):
        return self.mix(x, self.adjacency)


def inputs(batch=2, frames=7):
    return (torch.randn(batch, 3, 4, frames, 5),)


WRITTEN = {
    "graph": lambda x, a: (x[..., None] * a[None, :, None, None]).sum((1, 4)),
    "unsqueezed": lambda x, a: torch.sum(x.unsqueeze(-1).mul(a.view(1, 3, 1, 1, 5, 5)), dim=-2),
    "ranks": lambda x, a: (x.permute(0, 2, 3, 1, 4).unsqueeze(-1) * a).sum([-3, -2]),
    "kept": lambda x, a: (a[:, None, None] * x[..., None]).sum((1, -2), keepdim=True),
    "outer sum": lambda x, a: (x.flatten(1)[:, :, None] * x.flatten(1)[:, None]).sum(0),
    "matrix and vector": lambda x, a: (x[..., None, :] * a[0]).sum(-1).sum(-1),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_found_however_it_is_written(name):
    model = Graph(WRITTEN[name])
    replaced, found = replaced_with(model, inputs(), WHAT, [inputs(1, 9)])
    assert found
    with torch.profiler.profile() as profile:
        replaced(*inputs())
    keys = [e.key for e in profile.key_averages()]
    assert "aten::bmm" in keys or "aten::mm" in keys
    assert "aten::mul" not in keys


NEARLY = {
    "mean": lambda x, a: (x[..., None] * a[None, :, None, None]).mean((1, 4)),
    "largest": lambda x, a: (x[..., None] * a[None, :, None, None]).amax((1, 4)),
    "sum of sums": lambda x, a: (x[..., None] + a[None, :, None, None]).sum((1, 4)),
    "nothing broadcast": lambda x, a: (x * x.flip(0)).sum(-1),
    "nothing contracted": lambda x, a: (x[..., None] * a[0, 0]).sum(-1),
    "everything": lambda x, a: (x[..., None] * a[None, :, None, None]).sum(),
    "product used again": lambda x, a: (p := x[..., None] * a[None, :, None, None]).sum(4) + p.amax(4),
    "masked between": lambda x, a: (x[..., None] * a[None, :, None, None]).relu().sum((1, 4)),
    "in another type": lambda x, a: (x[..., None] * a[None, :, None, None]).sum((1, 4), dtype=torch.float64),
    "of a size": lambda x, a: (x[..., None] * a[None, :, None, None]).sum(x.dim() - 1),
    "types mixed": lambda x, a: (x[..., None].double() * a[None, :, None, None]).sum((1, 4)),
}


@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_that_is_left_or_right(name):
    _, found = replaced_with(Graph(NEARLY[name]), inputs(), WHAT)
    assert not found or name == "of a size"


def test_autocast_and_half():
    """Autocast rounds factors of einsum, and none of a product and a sum."""
    model, (x,) = Graph(WRITTEN["graph"]), inputs()
    replaced = svexport.replace(model, (x,), verbose=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(gradients_of(replaced, (x,)), gradients_of(model, (x,)), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(replaced.half()(x.half()), model.half()(x.half()), rtol=1e-2, atol=1e-2)


def test_files_and_skip(tmp_path):
    model = Graph(WRITTEN["graph"])
    files = [tmp_path / "theirs.onnx", tmp_path / "ours.onnx"]
    for m, file in zip((model, svexport.replace(model, inputs(), verbose=False)), files, strict=True):
        svexport.export(m, inputs(), file, opset=11)
    nodes = [[node.op_type for node in onnx.load(file).graph.node] for file in files]
    assert "Mul" in nodes[0]
    assert "MatMul" in nodes[1]
    assert "Mul" not in nodes[1]
    assert whats(svexport.replace(model, inputs(), skip="einsum", verbose=False)) == []
