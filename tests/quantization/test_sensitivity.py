"""A layer that int8 ruins is ranked first, and kept out of int8."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport import SvexportError
from svexport.quantization.layers import quantized_layers


def net(width: int = 8, depth: int = 4) -> nn.Sequential:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers).eval()


def planted(model: nn.Sequential, place: int) -> None:
    """Gives a layer a first input that is 300 times as large as the others, and weighs no more."""
    layer = model[place]
    assert isinstance(layer, nn.Linear)
    widths = torch.ones(layer.in_features)
    widths[0] = 300.0
    with torch.no_grad():
        layer.weight /= widths
    model[place] = nn.Sequential(_Times(widths), layer)


class _Times(nn.Module):
    def __init__(self, factors: Tensor) -> None:
        super().__init__()
        self.register_buffer("factors", factors)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors


@pytest.mark.parametrize("place", [0, 2, 4, 6, 8])
def test_planted_layer_is_first(place: int) -> None:
    model, data = net(depth=5), [torch.randn(32, 8) for _ in range(4)]
    planted(model, place)
    quantized = svexport.quantize(model, data, method="minmax")
    found = svexport.sensitivity(quantized, [torch.randn(32, 8)])
    assert found.layers[0].name == f"{place}.1"
    assert found.layers[0].loss > 20 * found.layers[1].loss
    assert found.unit == "noise"
    assert found.loss > 0 == found.layers[-1].rest
    assert found.keep(found.loss) == []
    assert found.keep(found.loss / 10) == [f"{place}.1"]
    assert len(found.keep(0)) == 5


def test_the_plan_meets_its_budget() -> None:
    """On data that nothing was chosen by."""
    model, data = net(), [torch.randn(64, 8) for _ in range(4)]
    planted(model, 4)
    target = [torch.randn(256, 8) for _ in range(3)]
    right = [model(x).argmax(-1) for x in target]

    def accuracy(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> float:
        return 100 * float((outputs.argmax(-1) == batch[1]).float().mean())

    class WithLabels(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
            return self.inner(x)

    whole = WithLabels(model)
    pairs = list(zip(target, right, strict=True))
    quantized = svexport.quantize(whole, data, method="minmax")
    found = svexport.sensitivity(quantized, pairs[:2], accuracy)
    assert found.unit == "metric"
    assert found.loss > 3
    assert found.layers[0].name == "inner.4.1"
    plan = found.keep(loss=2)
    better = svexport.quantize(whole, data, method="minmax", keep=plan)
    lost = 100 - accuracy(better(*pairs[2]), pairs[2])
    assert len(plan) < 4
    assert lost < 3


def test_model_is_left_as_it_is() -> None:
    quantized = svexport.quantize(net(), [torch.randn(4, 8)]).train()
    layers = dict(quantized_layers(quantized))
    layers["2"].switch(on=False)
    svexport.sensitivity(quantized, [torch.randn(4, 8)])
    assert quantized.training
    assert {name: layer.input_quantizer.enabled for name, layer in layers.items()} == {
        "0": True, "2": False, "4": True, "6": True,
    }  # fmt: skip


def test_shown() -> None:
    found = svexport.sensitivity(svexport.quantize(net(), [torch.randn(9, 8)]), [torch.randn(9, 8)])
    assert json.loads(json.dumps(found.to_dict()))["layers"][0]["name"] == found.layers[0].name
    assert "with all layers quantized" in str(found)
    assert all(one.name in str(found) for one in found.layers)
    assert repr(found).startswith("Sensitivity(Sequential: noise ")


def test_page(tmp_path: Path) -> None:
    model, data = net(), [torch.randn(32, 8)]
    planted(model, 4)
    found = svexport.sensitivity(svexport.quantize(model, data, method="minmax"), data)
    found.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 2  # for wide and for narrow pages
    for one in found.layers:
        assert page.count(f">{one.name}<") >= 2  # in the picture and in the table
        assert f"{one.loss:.3g}" in page
    assert "<img" in found._repr_html_()


def test_refused() -> None:
    quantized = svexport.quantize(net(), [torch.randn(4, 8)])
    with pytest.raises(SvexportError, match=r"expected the result of svexport\.quantize"):
        svexport.sensitivity(net(), [torch.randn(4, 8)])
    with pytest.raises(SvexportError, match="batches is empty"):
        svexport.sensitivity(quantized, [])
    with pytest.raises(SvexportError, match="metric must return a number, got str"):
        svexport.sensitivity(quantized, [torch.randn(4, 8)], lambda outputs, batch: "good")
    with pytest.raises(SvexportError, match="metric must return finite numbers"):
        svexport.sensitivity(quantized, [torch.randn(4, 8)], lambda outputs, batch: float("nan"))
    random = iter(range(1000))
    found = svexport.sensitivity(quantized, [torch.randn(4, 8)], lambda outputs, batch: -float(next(random)))
    with pytest.raises(SvexportError, match="check that the metric returns the same number"):
        found.keep(0)
