"""Models with fake quantizers: their numbers, their files, and interrupted calibrations."""

from __future__ import annotations

import copy
import itertools
import json
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport import SvexportError
from svexport.quantization.layers import quantized_layers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 6, 3, 2, 1, output_padding=1, groups=2)
        self.head = nn.Linear(6, 5, bias=False)
        self.never = nn.Linear(6, 6)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.up(self.stem(x)).mean((-2, -1))
        return self.head(y if scale is None else y * scale)


def batches(count: int = 4) -> list[Tensor]:
    return [torch.randn(3, 3, 9, 7) for _ in range(count)]


def scales(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if name.endswith("quantizer.scale")}


def int8(x: Tensor, scale: Tensor) -> Tensor:
    """Numbers from -128 to 127 of this scale, in float64."""
    scale = scale.double()
    return (x.double() / scale).round().clamp(-128, 127) * scale


@pytest.mark.core
def test_copy_with_the_same_keys() -> None:
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    quantized = svexport.quantize(net, batches(), method="minmax")
    assert not scales(net)
    assert net.training
    assert type(net.head) is nn.Linear
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    names = [name for name, _ in quantized_layers(quantized)]
    assert names == ["stem.0", "up", "head"]  # never is not reached
    added = {f"{name}.{which}_quantizer.scale" for name in names for which in ("input", "weight")}
    assert set(quantized.state_dict()) == set(before) | added
    second = svexport.quantize(net, batches(), method="minmax")
    second.load_state_dict(quantized.state_dict())
    assert repr(quantized.up).count("scale") == 2
    again = copy.deepcopy(quantized)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in quantized.state_dict().items())


@pytest.mark.core
def test_numbers() -> None:
    net, data = Net().eval(), batches()
    quantized = svexport.quantize(net, data, method="minmax")
    largest = max(float(x.abs().max()) for x in data)
    assert scales(quantized)["stem.0.input_quantizer.scale"].item() == pytest.approx(largest / 127, rel=1e-6)
    rows = net.up.weight.detach().transpose(0, 1).flatten(1).abs().amax(1)
    torch.testing.assert_close(scales(quantized)["up.weight_quantizer.scale"], rows / 127)

    x = torch.randn(2, 6)
    head, wide = quantized.head, net.head.weight.detach()
    assert isinstance(head, nn.Linear)
    s = scales(quantized)
    expected = int8(x, s["head.input_quantizer.scale"]) @ int8(wide, s["head.weight_quantizer.scale"][:, None]).T
    torch.testing.assert_close(head(x).double(), expected, rtol=1e-5, atol=1e-6)


def test_every_layer() -> None:
    """With scales of one step in a million there is nothing left but the layer itself."""
    layers = [
        (nn.Linear(4, 3), (2, 5, 4)),
        (nn.Conv1d(4, 6, 3, stride=2, padding="valid", groups=2), (2, 4, 9)),
        (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 5, 6)),
        (nn.Conv3d(2, 3, 2, dilation=2), (1, 2, 4, 5, 6)),
        (nn.ConvTranspose1d(4, 6, 3, 2, bias=False), (2, 4, 5)),
        (nn.ConvTranspose2d(4, 6, 3, 2, 1, groups=2, dilation=2), (2, 4, 5, 3)),
        (nn.ConvTranspose3d(2, 3, 2), (1, 2, 3, 2, 2)),
    ]
    for layer, shape in layers:
        x = torch.randn(shape)
        quantized = svexport.quantize(layer, [x], method="minmax")
        for module in quantized.modules():
            if hasattr(module, "scale"):
                module.scale.fill_(torch.finfo(torch.float32).tiny)
        assert not torch.allclose(quantized(x), layer(x), atol=1e-3)  # all numbers are clamped
        for _, one in quantized_layers(quantized):
            one.switch(on=False)
        torch.testing.assert_close(quantized(x), layer(x))


def test_output_size_of_transposed_convolutions() -> None:
    layer = nn.ConvTranspose2d(2, 3, 3, stride=2)
    x = torch.randn(1, 2, 4, 4)
    quantized = svexport.quantize(layer, [x])
    assert quantized(x, output_size=[10, 10]).shape == layer(x, output_size=[10, 10]).shape == (1, 3, 10, 10)


@pytest.mark.parametrize("opset", [11, 13, 17, 20])
def test_file(opset: int, tmp_path: Path) -> None:
    """Verified against the model; the quantizers are nodes."""
    quantized = svexport.quantize(Net(), batches())
    path = tmp_path / "m.onnx"
    report = svexport.export(quantized, (batches(1)[0],), path, opset=opset)
    assert report.verified
    if opset >= 13:  # there are scales by channel from there on
        nodes = [node.op_type for node in onnx.load(path).graph.node]
        assert nodes.count("DequantizeLinear") == 6
        assert opset > 17 or svexport.check(path, "8.6").ok
        assert svexport.check(path, "10.1").ok


def e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """The nearest of all its numbers, by looking."""
    bits = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    numbers = bits[bits.isfinite()].unique()
    y = x.double() / scale.double()
    found = numbers[(y[..., None] - numbers).abs().argmin(-1)]
    return found * scale.double()


@pytest.mark.parametrize("mode", ["reflect", "circular", "replicate"])
def test_nothing_pads_between_quantizer_and_convolution(mode: str, tmp_path: Path) -> None:
    net = nn.Conv2d(3, 4, 3, padding=(1, 2), dilation=(1, 2), padding_mode=mode).eval()
    x = torch.randn(2, 3, 7, 6)
    report = svexport.export(svexport.quantize(net, [x]), (x,), tmp_path / "m.onnx", opset=13)
    assert report.verified
    assert not svexport.check(tmp_path / "m.onnx", "10.1").findings


def test_numbers_of_fp8() -> None:
    net, data = Net().eval(), batches()
    quantized = svexport.quantize(net, data, format="fp8")
    largest = max(float(x.abs().max()) for x in data)
    s = scales(quantized)
    assert s["stem.0.input_quantizer.scale"].item() == pytest.approx(largest / 448, rel=1e-6)
    x = 3 * torch.randn(7, 6)
    expected = e4m3(x, s["head.input_quantizer.scale"])
    expected = expected @ e4m3(net.head.weight, s["head.weight_quantizer.scale"][:, None]).T
    torch.testing.assert_close(quantized.head(x).double(), expected, rtol=1e-5, atol=1e-6)
    again = svexport.quantize(net, data, format="fp8")
    again.load_state_dict(quantized.state_dict())
    assert "fp8" in repr(again)


@pytest.mark.parametrize("opset", [19, 21, 23])
def test_file_of_fp8(opset: int, tmp_path: Path) -> None:
    quantized = svexport.quantize(Net(), batches(), format="fp8")
    path = tmp_path / "m.onnx"
    report = svexport.export(quantized, (batches(1)[0],), path, opset=opset)
    assert report.verified
    assert any("ReluQuantRewrite" in note for note in report.notes)
    nodes = [node.op_type for node in onnx.load(path).graph.node]
    assert nodes.count("DequantizeLinear") == nodes.count("QuantizeLinear") == 6
    assert svexport.check(path, "10.12").ok
    assert not svexport.check(path, "8.6").ok


def test_half_model_in_fp8(tmp_path: Path) -> None:
    net, x = Net().half(), batches(1)[0].half()
    quantized = svexport.quantize(net, [x], format="fp8")
    assert svexport.export(quantized, (x,), tmp_path / "m.onnx", opset=19).verified


def test_fp8_is_refused_where_there_is_none(tmp_path: Path) -> None:
    quantized = svexport.quantize(Net(), batches(), format="fp8")
    with pytest.raises(svexport.ExportError, match="fp8, which ONNX has from opset 19 on, got opset=17; give opset=19"):
        svexport.export(quantized, batches(1)[0], tmp_path / "m.onnx", opset=17)
    with pytest.raises(svexport.ExportError, match=r"opset|fp8, which TensorRT has from 9\.0 on"):
        svexport.export(quantized, batches(1)[0], tmp_path / "m.onnx", opset=19, target="8.6")
    with pytest.raises(SvexportError, match="format: expected one of int8, fp8, got 'int4'"):
        svexport.quantize(Net(), batches(), format="int4")
    with pytest.raises(SvexportError, match="'entropy' counts 128 equal steps, which fp8 does not have"):
        svexport.quantize(Net(), batches(), format="fp8", method="entropy")


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_gradients_pass(format: str) -> None:
    """As they are, where nothing is clamped."""
    quantized = svexport.quantize(nn.Linear(6, 5), [torch.randn(9, 6)], format=format, method="minmax")
    x = torch.randn(4, 6) * 2
    x.requires_grad_()
    quantizer = quantized.input_quantizer
    quantizer(x).sum().backward()
    most = quantizer.scale * (127 if format == "int8" else 448)
    inside = (x.abs() <= most).float()
    torch.testing.assert_close(x.grad, inside)


def test_trains() -> None:
    quantized = svexport.quantize(Net(), batches()).train()
    optimizer = torch.optim.SGD(quantized.parameters(), 0.05)
    x, y = torch.randn(16, 3, 9, 7), torch.randn(16, 5)
    losses = []
    for _ in range(30):
        loss = nn.functional.mse_loss(quantized(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None for name, p in quantized.named_parameters() if "never" not in name)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("method", ["entropy", "mse", "percentile"])
def test_batch_sizes_give_the_same(method: str) -> None:
    net, x = Net(), torch.randn(16, 3, 9, 7)
    found = [scales(svexport.quantize(net, x.split(size), method=method)) for size in (1, 4, 16)]
    for name, value in found[0].items():
        # Convolutions of other batch sizes round otherwise: by a bin at most.
        assert all(torch.allclose(value, other[name], rtol=2e-3) for other in found[1:])


def test_as_forward_is_called() -> None:
    net, x, scale = Net(), torch.randn(3, 3, 9, 7), torch.rand(6)
    given: list[Any] = [(x, scale), {"x": x, "scale": scale}, (x, {"scale": scale})]
    found = [scales(svexport.quantize(net, [one], method="minmax")) for one in given]
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in found[0])


def test_keep() -> None:
    quantized = svexport.quantize(Net(), batches(), keep=["stem.*", "up"])
    assert [name for name, _ in quantized_layers(quantized)] == ["head"]


def test_attention_stays() -> None:
    """It reads the weights of its layers and never calls them."""
    net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    quantized = svexport.quantize(net, [torch.randn(2, 5, 8)])
    assert [name for name, _ in quantized_layers(quantized)] == ["linear1", "linear2"]


@pytest.mark.parametrize("masked", [False, True])
def test_encoders_are_quantized_without_gradients(masked: bool) -> None:
    """torch's fast path, which they take there, reads the weights and calls no layer."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 8)
    mask = torch.arange(5) >= torch.tensor([[5], [3]]) if masked else None
    quantized = svexport.quantize(net, [x])
    expected = quantized(x, src_key_padding_mask=mask)
    with torch.no_grad():
        torch.testing.assert_close(quantized(x, src_key_padding_mask=mask), expected)
        own = net(x, src_key_padding_mask=mask)
    assert not torch.allclose(own[0], expected[0], rtol=1e-4, atol=1e-4)


def test_weights_that_are_computed_stay() -> None:
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    quantized = svexport.quantize(net, [torch.randn(3, 4)])
    assert [name for name, _ in quantized_layers(quantized)] == ["1"]


def test_zeros() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    nn.init.zeros_(net[0].weight)
    quantized = svexport.quantize(net, [torch.zeros(2, 3)])
    torch.testing.assert_close(quantized(torch.ones(2, 3)), net(torch.ones(2, 3)))


def test_512_batches_take_twice_the_time_of_the_model_at_most_and_no_memory() -> None:
    """In turns of 64, of which the fastest counts: what else the machine does is in none or in few."""
    channels = (3, 32, 32, 64, 64)
    convolutions = [nn.Conv2d(i, o, 3, padding=1) for i, o in itertools.pairwise(channels)]
    net = nn.Sequential(*(layer for one in convolutions for layer in (one, nn.ReLU()))).eval()
    x, alive, most = torch.randn(1, 3, 28, 28), weakref.WeakSet[Tensor](), [0]
    seconds: dict[str, list[float]] = {"model": [], "calibration": []}

    def given(count: int) -> Iterator[Tensor]:
        for _ in range(count):
            batch = x.clone()
            alive.add(batch)
            most[0] = max(most[0], len(alive))
            yield batch

    with torch.no_grad():
        for _ in range(9):
            start = time.process_time()
            for batch in given(64):
                net(batch)
            middle = time.process_time()
            svexport.quantize(net, given(64), method="minmax")
            seconds["model"].append(middle - start)
            seconds["calibration"].append(time.process_time() - middle)
    assert min(seconds["calibration"]) <= 2 * min(seconds["model"]), seconds
    assert most[0] <= 3


class Stops:
    """Batches of which the last never comes."""

    def __init__(self, data: list[Tensor], after: int) -> None:
        self.data, self.after = data, after

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.data[: self.after]
        raise KeyboardInterrupt


def test_interrupted_calibration_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("svexport.quantization.quantize._SECONDS", 0.0)
    net, data, cache = Net(), batches(6), tmp_path / "cache.json"
    with pytest.raises(KeyboardInterrupt):
        svexport.quantize(net, Stops(data, 4), cache=cache)
    assert json.loads(cache.read_text())["batches"] == 4
    calls = []
    net.register_forward_hook(lambda *_: calls.append(1))
    resumed = scales(svexport.quantize(net, data, cache=cache))
    assert len(calls) == 2
    whole = scales(svexport.quantize(net, data))
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    calls.clear()
    other = scales(svexport.quantize(net, [], method="minmax", cache=cache))  # has seen enough
    assert not calls
    assert all(torch.equal(v, other[n]) for n, v in scales(svexport.quantize(net, data, method="minmax")).items())


def test_cache_of_another_model(tmp_path: Path) -> None:
    cache = tmp_path / "cache.json"
    net = Net()
    svexport.quantize(net, batches(), cache=cache)
    with torch.no_grad():
        net.head.weight[0, 0] += 1e-3
    with pytest.raises(SvexportError, match="calibration of another model, or of other weights; delete it"):
        svexport.quantize(net, batches(), cache=cache)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "{", "[" * 100000, "\x00", '{"format": "svexport calibration", "version": 2}',
             '{"format": "svexport calibration", "version": 1, "batches": -1, "layers": {}}',
             '{"format": "svexport calibration", "version": 1, "batches": 1, "layers": {"head": {}}}']
)  # fmt: skip
def test_damaged_cache(text: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache.json"
    cache.write_text(text)
    with pytest.raises(SvexportError, match=r"is no calibration cache: .*; delete it"):
        svexport.quantize(Net(), batches(), cache=cache)
    assert cache.read_text() == text


def test_batches_that_do_not_fit() -> None:
    """The number of the batch, what it was, and the line of forward."""
    model, other = Net(), torch.randn(3, 4, 9, 7)
    said = r"fails on batch 2 \(x float32\[3, 4, 9, 7\]\): RuntimeError: Given(.|\n)*test_quantize.py:\d+ in forward"
    with pytest.raises(svexport.ExportError, match=said):
        svexport.quantize(model, [*batches(1), other])
    with pytest.raises(svexport.ExportError, match=said):
        svexport.sensitivity(svexport.quantize(model, batches(1)), [*batches(1), other])


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(SvexportError, match="batches is empty"):
        svexport.quantize(Net(), [])
    with pytest.raises(SvexportError, match=r"expected a layer to quantize, .*; it has none"):
        svexport.quantize(nn.ReLU(), batches())
    with pytest.raises(SvexportError, match="keep leaves none of 4"):
        svexport.quantize(Net(), batches(), keep=["*"])
    with pytest.raises(SvexportError, match=r"no layer is named 'tail'; those that can be quantized are stem\.0, up"):
        svexport.quantize(Net(), batches(), keep=["tail", "head"])
    with pytest.raises(SvexportError, match="expected a list of names, got the string 'head'"):
        svexport.quantize(Net(), batches(), keep="head")
    with pytest.raises(SvexportError, match="Net is quantized already"):
        svexport.quantize(svexport.quantize(Net(), batches()), batches())
    with pytest.raises(SvexportError, match=r"batch 2: input of stem\.0: expected finite values"):
        svexport.quantize(Net(), [*batches(1), torch.full((1, 3, 9, 7), float("nan"))])
    with pytest.raises(svexport.ExportError, match=r"do not fit Net\.forward"):
        svexport.quantize(Net(), [tuple(batches(3))])
    with pytest.raises(SvexportError, match="folder"):
        svexport.quantize(Net(), batches(), cache=tmp_path)
    with pytest.raises(SvexportError, match="method: expected one of"):
        svexport.quantize(Net(), batches(), method="kl")


@pytest.mark.parametrize("opset", [13, 18, 20])
@pytest.mark.parametrize("axis", [None, 1])
def test_dynamic_sizes(opset: int, axis: int | None, tmp_path: Path) -> None:
    """torch has no kernels of shapes alone for quantizers with scales in tensors."""

    class Quantizer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor(0.02) if axis is None else 0.01 + 0.02 * torch.rand(5))
            self.register_buffer("zero", torch.zeros_like(self.scale, dtype=torch.int32))

        def forward(self, x: Tensor) -> Tensor:
            if axis is None:
                return torch.fake_quantize_per_tensor_affine(x, self.scale, self.zero, -128, 127)
            return torch.fake_quantize_per_channel_affine(x, self.scale, self.zero, axis, -128, 127)

    path = tmp_path / "m.onnx"
    for shapes in ({"x": {0: "batch", 2: "width"}}, "auto"):
        model = Quantizer()
        report = svexport.export(model, (torch.randn(3, 5, 4),), path, opset=opset, dynamic_shapes=shapes)
        assert report.verified
        assert not any("TorchScript" in note for note in report.notes)
        x = torch.randn(7, 5, 4)
        torch.testing.assert_close(svexport.load(path)(x), model(x))


@pytest.mark.parametrize(("opset", "target"), [(13, None), (17, "8.6"), (17, "10.1"), (20, None)])
def test_half_file(opset: int, target: str | None, tmp_path: Path) -> None:
    """Scales stay float32, in which is quantized; the rest is half."""
    quantized = svexport.quantize(Net(), batches())
    halved = copy.deepcopy(quantized).half()
    assert all(torch.equal(value, scales(halved)[name]) for name, value in scales(quantized).items())
    assert halved.head.weight.dtype == torch.float16
    (x,) = batches(1)
    with torch.no_grad():
        torch.testing.assert_close(halved.eval()(x.half()).float(), quantized.eval()(x), rtol=0.05, atol=0.05)
    path = tmp_path / "m.onnx"
    for model, given, options in ((quantized, x, {"dtype": torch.float16}), (halved, x.half(), {})):
        report = svexport.export(model, (given,), path, opset=opset, target=target, **options)
        assert report.verified
        nodes = [node.op_type for node in onnx.load(path).graph.node]
        assert nodes.count("DequantizeLinear") == 6
        if target:
            assert svexport.check(path, target).ok
            kinds = {i.name: i.data_type for i in onnx.load(path).graph.initializer}
            whole = [name for name in kinds if name.endswith("weight_int8") or "int8" in name]
            assert (len(whole) == 3) == (target == "10.1"), kinds
