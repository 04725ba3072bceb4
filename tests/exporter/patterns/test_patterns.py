"""How modules are read for patterns: what cannot be read is reported; half images are sampled in float32."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import svexport

FORWARD = "its forward as a graph"


class Samples(nn.Module):
    def forward(self, x, grid):
        return F.grid_sample(x, grid, align_corners=False)


class ByValue(Samples):
    def forward(self, x, grid):
        return super().forward(x, grid) if grid.sum() > -1e9 else x


class OwnTensor(Samples):
    def forward(self, x, grid):
        return super().forward(x, grid) * torch.tensor([2.0])


class Assigned(Samples):
    def forward(self, x, grid):
        grid = grid.clone()
        grid[..., 0] /= 2
        return super().forward(x, grid)


class AnyArguments(Samples):
    def forward(self, *args):
        return super().forward(*args)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ByValue, "no fixed graph: TraceError"),
        (OwnTensor, "makes tensors of its own"),
        (Assigned, "its forward changes tensors in place"),
        (AnyArguments, "without names"),
    ],
)
def test_why_a_forward_is_not_read(kind, reason, capsys):
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(kind() for _ in range(5))

        def forward(self, x, grid):
            for layer in self.layers:
                x = layer(x, grid)
            return x

    args = torch.randn(1, 2, 5, 6), torch.rand(1, 5, 6, 2) * 2 - 1
    replaced = svexport.replace(Stack(), args)
    left = [a for a in replaced.svexport_left_alone if a.kind == FORWARD]
    assert [a.name for a in left] == [f"layers.{i}" for i in range(5)]
    assert all(reason in a.reason for a in left)
    assert "layers.0, layers.1 and 3 more" in " ".join(capsys.readouterr().out.split())
    skipped = svexport.replace(Stack(), args, only="grid_sample", verbose=False)
    assert FORWARD not in [a.kind for a in skipped.svexport_left_alone]


class Sampled(TorchDispatchMode):
    """The types that ATen samples in."""

    def __init__(self):
        super().__init__()
        self.types = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.grid_sampler_2d.default:
            self.types.add(args[0].dtype)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_images_are_sampled_in_float32(dtype):
    """ATen's kernel counts elements of a half image in 16 bits, and reads outside of those with more."""
    x, grid = torch.randn(1, 1, 256, 192).to(dtype), (torch.rand(1, 5, 4, 2) * 2 - 1).to(dtype)
    with Sampled() as sampled:
        svexport.replace(Samples(), (x, grid), verbose=False)
    assert sampled.types
    assert all(torch.finfo(found).bits >= 32 for found in sampled.types)
