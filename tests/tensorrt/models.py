"""Models shared by the tests of builds and engines, exported once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper
from torch import Tensor, nn

import svexport

__all__ = ["BATCH", "Sampler", "Scale", "exported", "model_of", "reshape_by_input"]


BATCH = {"image": {0: "batch"}, "grid": {0: "batch"}}
"""Dynamic sizes of :class:`Sampler`."""


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


def model_of(shapes: dict[str, list[int | str | None]]) -> onnx.ModelProto:
    """Each input is negated."""
    value = helper.make_tensor_value_info
    nodes = [helper.make_node("Neg", [name], [f"{name}_y"]) for name in shapes]
    graph = helper.make_graph(
        nodes,
        "g",
        [value(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()],
        [value(f"{name}_y", TensorProto.FLOAT, [None] * len(shape)) for name, shape in shapes.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    return model


def reshape_by_input() -> onnx.ModelProto:
    """``x`` of 12 numbers in the two sizes that its input ``size`` says."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Reshape", ["x", "size"], ["y"])],
        "g",
        [value("x", TensorProto.FLOAT, [12]), value("size", TensorProto.INT64, [2])],
        [value("y", TensorProto.FLOAT, [None, None])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
