"""Comparison of precisions: figures checked with numpy, layers by name, pages."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport import SvexportError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(6, 8), nn.Linear(8, 8), nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.b(self.act(self.a(x)))))


def signal(expected: Tensor, actual: Tensor) -> float:
    e, a = expected.detach().double().numpy(), actual.detach().double().numpy()
    return float(10 * np.log10((e**2).sum() / ((a - e) ** 2).sum()))


def test_side_by_side(tmp_path: Path) -> None:
    net, data, held = Net().eval(), [torch.randn(32, 6)], [torch.randn(5, 6), torch.randn(9, 6)]
    half, int8 = copy.deepcopy(net).half(), svexport.quantize(net, data, method="minmax")
    found = svexport.precisions(
        net, {"half": half, "int8": int8}, held, lambda outputs, batch: float(outputs.float().mean())
    )
    names = [layer.name for layer in found.layers if "quantizer" not in layer.name]
    assert names == ["a", "act", "b", "act, call 2", "head"]
    x = torch.cat(held)
    for name, other in (("half", half(x.half()).float()), ("int8", int8(x))):
        assert found.result.signal[name] == pytest.approx(signal(net(x), other), abs=0.5 if name == "half" else 0.01)
    first = {layer.name: layer for layer in found.layers}["a"]
    assert first.signal["int8"] == pytest.approx(signal(net.a(x), int8.a(x)), abs=0.01)
    assert first.kind == "Linear"
    assert 50 < first.signal["half"] < 90
    assert 20 < first.signal["int8"] < first.signal["half"]
    mean = float(np.mean([net(one).detach().mean().item() for one in held]))
    assert found.metric["float"] == pytest.approx(mean, rel=1e-5)
    assert set(found.metric) == {"float", "half", "int8"}

    json.dumps(found.to_dict(), allow_nan=False)
    assert "dB" in str(found)
    assert "metric float" in repr(found)
    found.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count('<div class="wide">') == page.count('<div class="narrow">') == 1
    assert all(text in page for text in ("act, call 2", "half", "int8"))
    assert "<img" in found._repr_html_()


def test_equal_and_not_finite() -> None:
    net = Net().eval()
    broken = copy.deepcopy(net)
    with torch.no_grad():
        broken.b.weight.fill_(math.inf)
    found = svexport.precisions(net, {"same": copy.deepcopy(net), "broken": broken}, [torch.randn(3, 6)])
    assert all(layer.signal["same"] == math.inf for layer in found.layers)
    assert math.isnan(found.result.signal["broken"])
    assert "equal" in str(found)
    assert "not finite" in str(found)
    assert not found.metric
    assert found.to_dict()["result"]["signal"] == {"same": None, "broken": None}


def test_models_stay_as_they_are() -> None:
    net = Net().train()
    other = copy.deepcopy(net)
    svexport.precisions(net, {"other": other}, [torch.randn(3, 6)])
    assert net.training
    assert not any(module._forward_hooks for one in (net, other) for module in one.modules())


def test_refused() -> None:
    net = Net()
    with pytest.raises(SvexportError, match="expected models to compare with, got none"):
        svexport.precisions(net, {}, [torch.randn(3, 6)])
    with pytest.raises(SvexportError, match="batches is empty"):
        svexport.precisions(net, {"a": net}, [])
    with pytest.raises(SvexportError, match="other: expected modules named as the model's"):
        svexport.precisions(net, {"other": nn.Sequential(nn.Linear(6, 3))}, [torch.randn(3, 6)])
    with pytest.raises(svexport.ExportError, match=r"do not fit Net\.forward"):
        svexport.precisions(net, {"a": net}, [(torch.randn(3, 6), 1, 2)])
