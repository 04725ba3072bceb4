"""Models that the tests of builds and engines share, exported once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport

__all__ = ["Sampler", "Scale", "exported"]


class Sampler(nn.Module):
    """A node with a plugin, dynamic in its batch, results in a dict with a list in it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, image: Tensor, grid: Tensor) -> dict[str, Any]:
        y = self.conv(image).relu()
        sampled = F.grid_sample(y, grid, align_corners=False)
        return {"scores": y.mean((2, 3)), "sampled": [sampled, sampled.amax((2, 3))]}

    example_inputs = (torch.linspace(-1, 1, 2 * 3 * 64).reshape(2, 3, 8, 8), torch.rand(2, 5, 5, 2) * 2 - 1)


class Scale(nn.Module):
    """Nothing but torch's own functions: no plugin."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + 1

    example_inputs = (torch.arange(12.0).reshape(3, 4),)


def exported(model: nn.Module, path: Path, **options: Any) -> Path:
    """The file of a model for its example inputs."""
    svexport.export(model.eval(), model.example_inputs, path, opset=17, verify="quick", **options)
    return path
