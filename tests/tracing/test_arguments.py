"""Tensors in attributes of objects, such as a language model's cache of keys and values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import svexport

pytestmark = pytest.mark.core


class Layer:
    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.dtype = keys.dtype


class Cache:
    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers
        self.owner = self  # nothing keeps objects from referring to one another
        self.first = layers[0]

    def append(self, x: Tensor) -> None:
        for layer in self.layers:
            layer.keys = torch.cat([layer.keys, x])
            layer.values = torch.cat([layer.values, x * 2])


class Attention(nn.Module):
    def forward(self, x: Tensor, cache: Cache) -> dict:
        cache.append(x)
        keys, values = cache.layers[1].keys, cache.first.values
        return {"y": (x @ keys.T).softmax(1) @ values, "cache": cache}


@pytest.mark.parametrize("opset", [11, 18])
def test_objects_in_and_out(opset, tmp_path) -> None:
    cache = Cache([Layer(torch.randn(3, 4), torch.randn(3, 4)) for _ in range(2)])
    given = [cache.layers[0].keys, cache.layers[0].values, cache.layers[1].keys, cache.layers[1].values]
    x = torch.randn(2, 4)
    report = svexport.export(Attention(), (x, cache), tmp_path / "m.onnx", opset=opset)
    names = [f"cache_layers_{i}_{kind}" for i in (0, 1) for kind in ("keys", "values")]
    assert list(report.inputs) == ["x", *names]
    # A name that is an input's is told apart.
    assert list(report.outputs) == ["y", *(f"{name}_2" for name in names)]
    assert [cache.layers[0].keys, cache.layers[0].values, cache.layers[1].keys, cache.layers[1].values] == given
    outputs = svexport.load(report.path)(x, *given)
    torch.testing.assert_close(outputs[1], torch.cat([given[0], x]))


@pytest.mark.parametrize("opset", [11, 18])
def test_dynamic_sizes_inside_objects(opset, tmp_path) -> None:
    cache = Cache([Layer(torch.randn(3, 4), torch.randn(3, 4)) for _ in range(2)])
    report = svexport.export(
        Attention(),
        (torch.randn(2, 4), cache),
        tmp_path / "m.onnx",
        opset=opset,
        dynamic_shapes={"x": None, "cache": {"layers": [{"keys": {0: "past"}, "values": {0: "past"}}] * 2}},
    )
    assert report.verified
    assert report.inputs["cache_layers_1_keys"] == "float32[past, 4]"


def test_objects_without_tensors_are_constants(tmp_path) -> None:
    class Options:
        def __init__(self) -> None:
            self.scale = 3.0

    class Scale(nn.Module):
        def forward(self, x: Tensor, options: Options) -> Tensor:
            return x * options.scale

    report = svexport.export(Scale(), (torch.randn(2), Options()), tmp_path / "m.onnx")
    assert list(report.inputs) == ["x"]


def test_objects_without_tensors_are_no_results(tmp_path) -> None:
    class Nothing:
        pass

    class Returns(nn.Module):
        def forward(self, x: Tensor) -> dict:
            return {"y": x * 2, "extra": Nothing()}

    with pytest.raises(svexport.ExportError, match="Returns returned a Nothing at extra; expected tensors in"):
        svexport.export(Returns(), torch.randn(2), tmp_path / "m.onnx")
