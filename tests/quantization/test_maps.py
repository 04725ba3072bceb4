"""Layers that sample maps read them as int8: QuantizeLinear, then the node with its scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport import ops
from svexport.quantization.layers import quantized_layers
from svexport.quantization.maps import QuantizedMaps
from tests.quantization import trained

SIZES = ((7, 11), (4, 5))


class Sampler(nn.Module):
    """Two levels of maps of a backbone, sampled at the places of :mod:`tests.quantization.trained`."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 5, 3, 2, 1), nn.ReLU())
        self.coarser = nn.Conv2d(5, 5, 3, 2, 1)
        self.sample = ops.CameraSample(trained.IMAGE, [-10.0, -10, -2, 10, 10, 2])
        self.head = nn.Linear(5, 3)
        self.register_buffer("places", trained.places())
        self.register_buffer("rig", trained.rig())
        self.register_buffer("weights", torch.randn(1, trained.SEEN, trained.CAMERAS, 1, 2))

    def maps(self, x: Tensor) -> list[Tensor]:
        fine = self.backbone(x.flatten(0, 1))
        return [level.unflatten(0, (x.shape[0], trained.CAMERAS)) for level in (fine, self.coarser(fine))]

    def forward(self, x: Tensor) -> Tensor:
        several = [t.expand(x.shape[0], *t.shape[1:]) for t in (self.places, self.rig, self.weights)]
        return self.head(self.sample(self.maps(x), *several))


def images(count: int = 3) -> list[Tensor]:
    return [torch.randn(2, trained.CAMERAS, 3, *trained.IMAGE) for _ in range(count)]


def feeders(path: Path, name: str) -> tuple[onnx.NodeProto, list[str]]:
    """The node of a type, and what makes each of its inputs."""
    graph = onnx.load(path).graph
    makers = {output: node.op_type for node in graph.node for output in node.output}
    (node,) = (one for one in graph.node if one.op_type == name)
    return node, [makers.get(one, "") for one in node.input]


def assert_reads_steps(path: Path, name: str, scale: float) -> None:
    """The node of a type takes int8, worth ``scale`` a step, from a quantizer that nothing stands behind."""
    node, before = feeders(path, name)
    assert before[0] == "QuantizeLinear"
    assert next(a.f for a in node.attribute if a.name == "scale") == pytest.approx(scale, rel=1e-6)
    checked = svexport.check(path, "11.0")
    assert checked.ok
    assert not {one.rule for one in checked.findings} & {"quantizers_plugin", "quantizers_dangling"}


def test_numbers() -> None:
    """The scale is that of the level's largest magnitude, and what is sampled are its steps."""
    model = Sampler().eval()
    data = images()
    quantized = svexport.quantize(model, data, method="minmax", keep=["backbone.0", "coarser", "head"])
    with torch.no_grad():
        seen = [model.maps(x) for x in data]
        largest = [max(float(maps[level].abs().max()) for maps in seen) for level in range(2)]
        keys = [f"sample.map_quantizers.{level}.scale" for level in range(2)]
        assert set(quantized.state_dict()) == {*model.state_dict(), *keys}
        scales = [float(quantized.state_dict()[key]) for key in keys]
        assert scales == pytest.approx([one / 127 for one in largest], rel=1e-6)
        x = 1.5 * data[0]  # some are beyond
        stepped = [
            (one.double() / scale).round().clamp(-128, 127) * scale
            for one, scale in zip(model.maps(x), scales, strict=True)
        ]
        several = [t.double().expand(2, *t.shape[1:]) for t in (model.places, model.rig, model.weights)]
        expected = nn.functional.linear(
            model.sample(stepped, *several), model.head.weight.double(), model.head.bias.double()
        )
        torch.testing.assert_close(quantized(x).double(), expected, rtol=1e-5, atol=1e-5)
        assert (quantized(x) - model(x)).abs().max() > 1e-4
        for _, layer in quantized_layers(quantized):
            layer.switch(False)
        assert torch.equal(quantized(x), model(x))


@pytest.mark.parametrize(("opset", "target"), [(13, None), (13, "8.6"), (17, "10.1"), (17, "11.0"), (20, None)])
def test_file(opset: int, target: str | None, tmp_path: Path) -> None:
    """The maps are quantized right before the node; nothing dequantizes them, and ONNX Runtime agrees."""
    data = images()
    quantized = svexport.quantize(Sampler(), data).eval()
    path = tmp_path / "m.onnx"
    options: dict[str, Any] = {"opset": opset, "target": target, "dynamic_shapes": {"x": {0: "batch"}}}
    report = svexport.export(quantized, (data[0],), path, **options)
    assert report.verified
    node, before = feeders(path, "SvCameraSample")
    assert before[:2] == ["QuantizeLinear"] * 2
    (scales,) = (list(a.floats) for a in node.attribute if a.name == "scales")
    expected = [float(quantized.state_dict()[f"sample.map_quantizers.{level}.scale"]) for level in range(2)]
    assert scales == pytest.approx(expected, rel=1e-6)
    checked = svexport.check(path, target or "11.0")
    assert checked.ok
    assert not {one.rule for one in checked.findings} & {"quantizers_plugin", "quantizers_dangling"}
    if target is None:
        x = torch.randn(5, trained.CAMERAS, 3, *trained.IMAGE)
        with torch.no_grad():
            own = quantized(x)
        last = quantized.head
        step = float(last.input_quantizer.scale * last.weight_quantizer.scale.max() * 127)
        assert float((svexport.load(path)(x) - own).abs().le(step).float().mean()) >= 0.999


def test_half_file(tmp_path: Path) -> None:
    quantized = svexport.quantize(Sampler(), images(), keep=["backbone.0", "coarser", "head"])
    path = tmp_path / "m.onnx"
    assert svexport.export(quantized, (images(1)[0],), path, opset=17, dtype=torch.float16).verified
    assert feeders(path, "SvCameraSample")[1][:2] == ["QuantizeLinear"] * 2


def test_gradients() -> None:
    """They pass the maps' quantizers; the values are those without gradients."""
    quantized = svexport.quantize(Sampler(), images())
    (x,) = images(1)
    y = quantized.eval()(x)
    with torch.no_grad():
        torch.testing.assert_close(quantized(x), y, rtol=1e-5, atol=1e-5)
    y.sum().backward()
    weight = quantized.coarser.weight.grad
    assert weight is not None
    assert weight.abs().sum() > 0


def test_keep_and_sensitivity() -> None:
    """A level that int8 ruins: the sampling layer is found first."""
    model = Sampler().eval()
    with torch.no_grad():
        assert model.coarser.bias is not None
        model.coarser.bias[0] += 1e4
        model.head.weight[:, 0] *= 1e-4
    data = images()
    quantized = svexport.quantize(model, data, method="minmax", keep=["head"])
    ranking = svexport.sensitivity(quantized, images(1))
    assert ranking.layers[0].name == "sample"
    kept = svexport.quantize(model, data, keep=["head", "sample"])
    assert not any(isinstance(module, QuantizedMaps) for module in kept.modules())
    assert [name for name, _ in quantized_layers(kept)] == ["backbone.0", "coarser"]
    assert not any(isinstance(m, QuantizedMaps) for m in svexport.quantize(model, data, format="fp8").modules())


def test_maps_of_another_type_than_weights() -> None:
    """What is sampled has the type of the maps, as before."""
    sample = ops.CameraSample(trained.IMAGE, [-10.0, -10, -2, 10, 10, 2])
    maps = [torch.randn(1, trained.CAMERAS, 5, *size).half() for size in SIZES]
    inputs = maps, trained.places(), trained.rig(), torch.randn(1, trained.SEEN, trained.CAMERAS, 1, 2)
    quantized = svexport.quantize(sample, [inputs])
    assert quantized(*inputs).dtype == sample(*inputs).dtype == torch.float16
    torch.testing.assert_close(quantized(*inputs), sample(*inputs), rtol=0.1, atol=0.1)


def test_cache(tmp_path: Path) -> None:
    """A level is in it as a layer is."""
    model, data, path = Sampler(), images(), tmp_path / "c.json"
    first = svexport.quantize(model, data, method="mse", cache=path)
    second = svexport.quantize(model, [], method="mse", cache=path)
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())


def test_maps_that_are_int8_already() -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Sampler()
            self.inner.sample.scales = 0.02, 0.02

        def forward(self, x: Tensor) -> Tensor:
            maps = [ops.quantize(one, 0.02) for one in self.inner.maps(x)]
            several = [t.expand(2, *t.shape[1:]) for t in (self.inner.places, self.inner.rig, self.inner.weights)]
            result: Tensor = self.inner.sample(maps, *several)
            return result

    quantized = svexport.quantize(Given(), images())
    assert [name for name, _ in quantized_layers(quantized)] == ["inner.backbone.0", "inner.coarser"]


def test_other_levels_than_calibrated() -> None:
    quantized = svexport.quantize(Sampler(), images())
    with pytest.raises(ValueError, match="expects 2 feature maps, got 1"):
        quantized.sample([torch.randn(1, 2, 5, 3, 4)], None, None, None)


def config(**options: Any) -> ops.TransformerDecoderConfig:
    small = {"embed_dims": 16, "num_heads": 2, "ffn_dims": 24, "num_layers": 2, "num_cams": 3, "num_queries": 9}
    return ops.TransformerDecoderConfig(**small, image_size=(64, 96), feature_sizes=SIZES, **options)


@pytest.mark.parametrize("fuse", ["block", "nodes"])
def test_decoder(fuse: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    decoder = ops.TransformerDecoder(config(), fuse).eval()
    inputs = decoder.example_inputs
    quantized = svexport.quantize(decoder, [inputs], method="minmax")
    assert [name for name, _ in quantized_layers(quantized)] == [""]
    with torch.no_grad():
        *before, maps, cameras = inputs
        largest = [one.abs().max() / 127 for one in maps]
        stepped = [(one / step).round().clamp(-128, 127) * step for one, step in zip(maps, largest, strict=True)]
        for own, expected in zip(quantized(*inputs), decoder(*before, stepped, cameras), strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)
    name = "SvTransformerDecoder" if fuse == "block" else "SvCameraSample"
    path = tmp_path / "m.onnx"
    assert svexport.export(quantized, inputs, path, opset=17).verified
    model = onnx.load(path)
    makers = {output: node.op_type for node in model.graph.node for output in node.output}
    nodes = [node for node in model.graph.node if node.op_type == name]
    assert len(nodes) == (1 if fuse == "block" else 2)
    assert all([makers.get(one) for one in node.input].count("QuantizeLinear") == 2 for node in nodes)
    outputs = quantized.every_layer(*before, [one.requires_grad_() for one in maps], cameras)
    outputs[-1].boxes.sum().backward()
    assert all(one.grad is not None and one.grad.abs().sum() > 0 for one in maps)


def test_cross_attention_of_detr3d() -> None:
    torch.manual_seed(3)
    maps = [torch.randn(1, 2, 8, *size) for size in SIZES]
    metas = [{"lidar2img": list(trained.rig()[0]), "img_shape": [(*trained.IMAGE, 3)] * 2}]

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = ops.Detr3DCrossAtten(8, 2, 2, 1, 2, pc_range=[-10.0, -10, -2, 10, 10, 2])
            nn.init.normal_(self.layer.output_proj.weight)

        def forward(self, query: Tensor, key: Any, value: Any) -> Tensor:
            options = {"reference_points": trained.places(), "img_metas": metas}
            result: Tensor = self.layer(query, key, value=value, **options)
            return result

    model, query = Attention().eval(), torch.randn(trained.SEEN, 1, 8)
    for key, value in ((None, maps), (maps, None)):
        keep = ["layer.attention_weights", "layer.output_proj", "*.position_encoder.*"]
        quantized = svexport.quantize(model, [(query, key, value)], method="minmax", keep=keep)
        assert len(quantized.layer.map_quantizers) == 2
        steps = [one.abs().max() / 127 for one in maps]
        stepped = [(one / step).round().clamp(-128, 127) * step for one, step in zip(maps, steps, strict=True)]
        with torch.no_grad():
            own = quantized(query, key, value)
            torch.testing.assert_close(own, model(query, None, stepped), rtol=1e-5, atol=1e-5)
            assert not torch.equal(own, model(query, key, value))


class Warp(nn.Module):
    """Features moved to other places, and back into a convolution."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(3, 10, 3, padding=1), nn.Conv2d(10, 4, 1)
        self.sample = ops.GridSample(align_corners=False, **options)

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        return self.after(self.sample(self.before(x), grid))


@pytest.mark.parametrize("options", [{}, {"mode": "nearest", "padding_mode": "border"}, {"mode": "bicubic"}])
def test_grid_sample(options: dict[str, Any], tmp_path: Path) -> None:
    """Its scale is that of the image; one QuantizeLinear and nothing else lies before the node."""
    model = Warp(**options).eval()
    batches = [(torch.randn(2, 3, 7, 9), torch.rand(2, 5, 4, 2) * 2.2 - 1.1) for _ in range(3)]
    quantized = svexport.quantize(model, batches, method="minmax", keep=["before", "after"]).eval()
    x, grid = batches[0]
    with torch.no_grad():
        scale = max(float(model.before(one).abs().max()) for one, _ in batches) / 127
        assert float(quantized.state_dict()["sample.map_quantizers.0.scale"]) == pytest.approx(scale, rel=1e-6)
        stepped = (model.before(1.5 * x).double() / scale).round().clamp(-128, 127) * scale
        sampled = nn.functional.grid_sample(stepped, grid.double(), align_corners=False, **options)
        expected = nn.functional.conv2d(sampled, model.after.weight.double(), model.after.bias.double())
        torch.testing.assert_close(quantized(1.5 * x, grid).double(), expected, rtol=1e-5, atol=1e-5)
    path = tmp_path / "m.onnx"
    assert svexport.export(quantized, batches[0], path, opset=13).verified
    assert_reads_steps(path, "SvGridSample", scale)
    with torch.no_grad():
        torch.testing.assert_close(svexport.load(path)(*batches[1]), quantized(*batches[1]), rtol=1e-4, atol=1e-4)
    quantized(*batches[0]).sum().backward()
    assert quantized.before.weight.grad.abs().sum() > 0


def test_half_image_of_grid_sample() -> None:
    """What is sampled has the type of the image, as before."""
    image, grid = torch.randn(1, 3, 5, 6).half(), torch.rand(1, 2, 4, 2)
    sample = ops.GridSample(align_corners=True)
    quantized = svexport.quantize(sample, [(image, grid)])
    assert quantized(image, grid).dtype == sample(image, grid).dtype == torch.float16
    torch.testing.assert_close(quantized(image, grid), sample(image, grid), rtol=0.1, atol=0.1)


LEVELS = torch.tensor([(7, 11), (4, 5)])
STARTS = torch.tensor([0, 77])


class Attention(nn.Module):
    """Deformable attention to two levels; ``padded`` is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = ops.MultiScaleDeformableAttention(16, 2, 2, 3, batch_first=True)
        for layer in (self.attention.sampling_offsets, self.attention.attention_weights):
            nn.init.normal_(layer.weight, std=0.3)
        self.register_buffer("levels", LEVELS)
        self.register_buffer("starts", STARTS)

    def forward(self, query: Tensor, value: Tensor, points: Tensor) -> Tensor:
        sizes = {"spatial_shapes": self.levels, "level_start_index": self.starts}
        return self.attention(query, value=value, reference_points=points, **sizes)


def test_deformable_attention(tmp_path: Path) -> None:
    """What is quantized is the projected value, right before the node."""
    model = Attention().eval()
    batches = [(torch.randn(2, 9, 16), torch.randn(2, 97, 16), torch.rand(2, 9, 2, 2)) for _ in range(3)]
    keep = [f"attention.{name}" for name in ("sampling_offsets", "attention_weights", "value_proj", "output_proj")]
    quantized = svexport.quantize(model, batches, method="minmax", keep=keep).eval()
    project = model.attention.value_proj
    with torch.no_grad():
        scale = max(float(project(value).abs().max()) for _, value, _ in batches) / 127
        assert float(quantized.state_dict()["attention.map_quantizers.0.scale"]) == pytest.approx(scale, rel=1e-6)
        query, value, points = batches[0]
        handle = project.register_forward_hook(lambda *call: (call[2] / scale).round().clamp(-128, 127) * scale)
        expected = model(query, 1.5 * value, points)
        handle.remove()
        torch.testing.assert_close(quantized(query, 1.5 * value, points), expected, rtol=1e-5, atol=1e-5)
    path = tmp_path / "m.onnx"
    assert svexport.export(quantized, batches[0], path, opset=13).verified
    assert_reads_steps(path, "SvMsDeformAttn", scale)
    quantized(*batches[0]).sum().backward()
    assert quantized.attention.value_proj.weight.grad.abs().sum() > 0


def test_deformable_sampling() -> None:
    """Of Hugging Face's layers."""
    sample = ops.MultiScaleDeformableSampling()
    shape = (1, 5, 2, 2, 3)
    inputs = torch.randn(1, 97, 2, 4), LEVELS, LEVELS.tolist(), STARTS, torch.rand(*shape, 2), torch.rand(shape), 64
    quantized = svexport.quantize(sample, [inputs], method="minmax")
    scale = inputs[0].abs().max() / 127
    stepped = (inputs[0] / scale).round() * scale
    torch.testing.assert_close(quantized(*inputs), sample(stepped, *inputs[1:]), rtol=1e-5, atol=1e-5)


class Deformed(nn.Module):
    """A deformable convolution between two others: version 1, or 2 as mmcv packs it."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(6, 4, 1)
        self.offsets = None if packed else nn.Conv2d(8, 18, 3, padding=1)
        self.deform = (ops.ModulatedDeformConv2dPack if packed else ops.DeformConv2d)(8, 6, 3, padding=1)
        if packed:
            nn.init.normal_(self.deform.conv_offset.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x).relu()
        return self.after(self.deform(x) if self.offsets is None else self.deform(x, self.offsets(x)))


@pytest.mark.parametrize("packed", [False, True])
def test_deformable_convolution(packed: bool, tmp_path: Path) -> None:
    """Its input is quantized right before the node; offsets and mask see it as it is."""
    model = Deformed(packed).eval()
    batches = [(torch.randn(2, 3, 7, 9),) for _ in range(3)]
    moves = "deform.conv_offset" if packed else "offsets"
    quantized = svexport.quantize(model, batches, method="minmax", keep=["before", "after", moves]).eval()
    with torch.no_grad():
        scale = max(float(model.before(x).relu().max()) for (x,) in batches) / 127
        assert float(quantized.state_dict()["deform.map_quantizers.0.scale"]) == pytest.approx(scale, rel=1e-6)
        x = 1.5 * batches[0][0]  # some are beyond
        seen = model.before(x).relu()
        stepped = (seen.double() / scale).round().clamp(-128, 127) * scale
        if packed:
            offset, mask = model.deform.conv_offset(seen).double().split((18, 9), 1)
            mask = mask.sigmoid()
        else:
            offset, mask = model.offsets(seen).double(), None
        layer = model.deform
        read = ops.deform_conv2d(stepped, offset, layer.weight.double(), layer.bias.double(), 1, 1, 1, mask)
        expected = nn.functional.conv2d(read, model.after.weight.double(), model.after.bias.double())
        torch.testing.assert_close(quantized(x).double(), expected, rtol=1e-5, atol=1e-5)
    path = tmp_path / "m.onnx"
    assert svexport.export(quantized, batches[0], path, opset=13).verified
    assert_reads_steps(path, "SvDeformConv2d", scale)
    with torch.no_grad():
        torch.testing.assert_close(svexport.load(path)(*batches[1]), quantized(*batches[1]), rtol=1e-4, atol=1e-4)
    quantized(*batches[0]).sum().backward()
    assert quantized.before.weight.grad.abs().sum() > 0
