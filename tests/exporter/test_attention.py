"""Attention layers of torch.nn in all their settings, by both exporters: they agree with torch to 1e-5."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import svexport

OPSETS = [11, 13, 17, 18, 20]
EMBED, HEADS, BATCH, LENGTH, SOURCE = 8, 2, 2, 3, 5
MASKS = (None, "bool", "float", "bool 3-D", "float 3-D")


def mask(kind: str | None, rows: int, columns: int) -> Tensor | None:
    """Boolean (True is hidden) or added to the scores, for all heads or for each; no row is hidden as a whole."""
    if kind is None:
        return None
    shape = (BATCH * HEADS, rows, columns) if kind.endswith("3-D") else (rows, columns)
    generator = torch.Generator().manual_seed(rows * columns)
    hidden = torch.rand(shape, generator=generator) < 0.4
    hidden[..., 0] = False
    if kind.startswith("bool"):
        return hidden
    return torch.randn(shape, generator=generator).masked_fill(hidden, -torch.inf)


def padding(kind: str | None, columns: int) -> Tensor | None:
    """The last sequence ends one position early."""
    if kind is None:
        return None
    hidden = torch.zeros(BATCH, columns, dtype=torch.bool)
    hidden[-1, -1] = True
    return hidden if kind == "bool" else torch.zeros(BATCH, columns).masked_fill(hidden, -torch.inf)


class Variants(nn.Module):
    """Modules by name, and how each is called on the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.calls: list[tuple[str, Callable[..., Tensor | tuple[Tensor, ...]]]] = []

    def add(self, name: str, layer: nn.Module, call: Callable[..., Tensor | tuple[Tensor, ...]]) -> None:
        self.layers.append(layer)
        self.calls.append((name, call))

    def forward(self, x: Tensor, memory: Tensor) -> dict[str, Tensor]:
        outputs = {}
        for layer, (name, call) in zip(self.layers, self.calls, strict=True):
            result = call(layer, x, memory)
            for i, output in enumerate(result if isinstance(result, tuple) else (result,)):
                if output is not None:
                    outputs[f"{name} {i}"] = output
        return outputs


def check(model: Variants, opset: int, folder: Path, dynamic: bool = False) -> None:
    """The file agrees with torch, fast path and all, also on another batch if that is dynamic."""
    torch.manual_seed(0)
    model.eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    x, memory = torch.randn(BATCH, LENGTH, EMBED), torch.randn(BATCH, SOURCE, EMBED)
    shapes = {"x": {0: "batch"}, "memory": {0: "batch"}} if dynamic else None
    report = svexport.export(
        model, (x, memory), folder / "m.onnx", opset=opset, dynamic_shapes=shapes, verify=False, plugins=False
    )
    engine = svexport.load(report.path)
    for n in (BATCH, 5) if dynamic else (BATCH,):
        x, memory = torch.randn(n, LENGTH, EMBED), torch.randn(n, SOURCE, EMBED)
        with torch.no_grad():
            expected = model(x, memory)
        for (name, e), a in zip(expected.items(), engine(x, memory), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def first(batch_first: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors if batch_first else tuple(t.transpose(0, 1) for t in tensors)


def settings(opset: int, *choices: tuple) -> Iterator[tuple]:
    """Their full product; for the dynamo exporter, whose time grows with the square of the model, every pair of two."""
    product = list(itertools.product(*choices))
    random.Random(0).shuffle(product)
    seen: set[tuple] = set()
    for chosen in product:
        pairs = set(itertools.combinations(enumerate(chosen), 2))
        if opset < 18 or not pairs <= seen:
            yield chosen
        seen |= pairs


def multihead_attentions(opset: int) -> Variants:
    model = Variants()
    for batch_first, attn, pad, weights, own in settings(
        opset, (True, False), MASKS, (None, "bool", "float"), ("none", "mean", "each"), (True, False)
    ):
        columns = LENGTH if own else SOURCE
        options = {
            "attn_mask": mask(attn, LENGTH, columns),
            "key_padding_mask": padding(pad, columns),
            "need_weights": weights != "none",
            "average_attn_weights": weights == "mean",
        }

        def call(layer: nn.Module, x: Tensor, memory: Tensor, own=own, options=options) -> tuple:
            query, key = first(layer.batch_first, x, x if own else memory)
            key = query if own else key  # the very same tensor: a condition of the fast path
            return layer(query, key, key, **options)

        name = f"{batch_first=} {attn=} {pad=} {weights=} {own=}"
        model.add(name, nn.MultiheadAttention(EMBED, HEADS, batch_first=batch_first), call)
    return model


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("opset", OPSETS)
def test_multihead_attention(opset: int, tmp_path) -> None:
    check(multihead_attentions(opset), opset, tmp_path)
