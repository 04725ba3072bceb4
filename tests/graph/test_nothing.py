"""Compares files with torch on inputs from which nothing is selected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx import helper
from torch import Tensor, nn

import svexport
from svexport.graph.nothing import take_zero_for_a_size


class Picked(nn.Module):
    """A layer of the rows whose first number is above -3."""

    def __init__(self, layer: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.layer, x[x[:, 0] > -3], x)


def _states(layer: nn.Module, picked: Tensor, _: Tensor) -> Tensor:
    first = picked[None, :, :4].repeat(2, 1, 1)
    output, last = layer(picked.view(-1, 2, 3), first)
    return torch.cat([output.flatten(1), *last], 1)


def _reshaped_layers(layer: nn.Module, picked: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    x = picked.view(-1, 6, 1, 1)
    apart = (picked[:, None] - picked[None]).transpose(0, 2)  # of (6, N, N)
    return F.channel_shuffle(layer(x), 2), F.local_response_norm(x, 3), apart.flatten(0, 1), apart.flatten(1, 2)


def _products(layer: nn.Module, picked: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    rows = picked.view(-1, 2, 3)
    return (
        torch.tensordot(rows, rows[:, :1], ([0, 2], [0, 2])),
        torch.tensordot(picked, x, ([1], [1])),
        torch.einsum("nc,mc->mn", picked, x),
        layer(x) @ picked.unsqueeze(2),
        rows.unsqueeze(1) @ x.view(1, 7, 3, 2),
    )


def _of_all(layer: nn.Module, picked: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    places = picked.abs().long() % 5
    loss = F.cross_entropy(picked, places[:, 0], reduction="sum")
    return loss, picked.median(), picked.nanmedian(), layer(places)


LAYERS = {
    "gru": (lambda: nn.GRU(3, 4, batch_first=True, bidirectional=True), _states),
    "lstm": (lambda: nn.LSTM(3, 4, batch_first=True), lambda layer, picked, _: layer(picked.view(-1, 2, 3))[1][1]),
    "attention": (
        lambda: nn.MultiheadAttention(6, 2, batch_first=True),
        lambda layer, picked, x: layer(picked[None], x[None], x[None])[0],
    ),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
        lambda layer, picked, _: layer(picked[None]),
    ),
    "reshaped": (lambda: nn.GroupNorm(3, 6), _reshaped_layers),
    "products": (nn.Identity, _products),
    "all": (lambda: nn.EmbeddingBag(5, 3), _of_all),
    "repeated": (
        nn.Identity,
        lambda layer, picked, _: torch.repeat_interleave(layer(picked), picked[:, 1].abs().long(), 0),
    ),
}


@pytest.mark.parametrize(
    ("name", "opset"),
    [
        *(("gru", 11), ("lstm", 18), ("attention", 13), ("attention", 18), ("transformer", 11), ("transformer", 17)),
        *(("repeated", 13), ("reshaped", 11), ("reshaped", 17), ("products", 11), ("products", 18), ("all", 18)),
    ],
)
def test_nothing_is_picked(name: str, opset: int, tmp_path) -> None:
    make, call = LAYERS[name]
    model = Picked(make(), call).eval()
    assert svexport.export(model, torch.randn(7, 6), tmp_path / "m.onnx", opset=opset).verified
    engine = svexport.load(tmp_path / "m.onnx")
    for count in (0, 1, 5):
        x = 3 * torch.randn(7, 6)
        x[:, 0] = torch.where(torch.arange(7) < count, 1.0, -9.0)
        with torch.no_grad():
            torch.testing.assert_close(engine(x), model(x), rtol=1e-4, atol=1e-5, equal_nan=True)


def _reshaped(finds: str, sizes: list[int] | None) -> onnx.ModelProto:
    """A Reshape of x to these sizes, or to one that is given and 2."""
    nodes = [helper.make_node(finds, ["x"], ["found"]), helper.make_node("Reshape", ["x", "sizes"], ["y"])]
    if sizes is None:
        nodes.insert(1, helper.make_node("Concat", ["size", "two"], ["sizes"], axis=0))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, [3, None]), helper.make_tensor_value_info("size", 7, [1])],
        [helper.make_tensor_value_info("y", 1, None)],
        [helper.make_tensor("sizes", 7, [2], sizes) if sizes else helper.make_tensor("two", 7, [1], [2])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_zero_among_computed_sizes_is_one() -> None:
    model = _reshaped("NonZero", None)
    take_zero_for_a_size(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for x, size in ((np.zeros((3, 0), np.float32), 0), (np.random.rand(3, 4).astype(np.float32), 6)):
        (y,) = session.run(None, {"x": x, "size": np.array([size])})
        np.testing.assert_array_equal(y, x.reshape(size, 2))


@pytest.mark.parametrize(("finds", "sizes"), [("NonZero", [0, -1]), ("NonZero", [-1, 2]), ("Identity", None)])
def test_other_sizes_stay(finds: str, sizes: list[int] | None) -> None:
    model = _reshaped(finds, sizes)
    before = model.SerializeToString()
    take_zero_for_a_size(model)
    assert model.SerializeToString() == before
