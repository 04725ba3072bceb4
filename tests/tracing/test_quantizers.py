"""Models with fake quantizers: a rounding error before a quantizer may become a whole step behind it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.ao.quantization as tq
import torch.nn.functional as F
from torch import Tensor, nn

import svexport
from svexport.errors import ExportError, VerificationError
from svexport.exporter.trace import torch_export_first
from tests.support import exported

OPSETS = pytest.mark.parametrize("opset", [13, 17, 18, pytest.param(21, marks=exported(21))])


def symmetric(x: Tensor, scale: float) -> Tensor:
    return torch.fake_quantize_per_tensor_affine(x, scale, 0, -128, 127)


class Quantized(nn.Module):
    """Two convolutions with biases; ``traced`` is a factor of the last scale, in the file alone."""

    def __init__(self, traced: float = 1.0) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)
        self.traced = traced

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(symmetric(x, 0.03), symmetric(self.first.weight, 0.005), self.first.bias, padding=1)
        x = F.conv2d(symmetric(x.relu(), 0.02), symmetric(self.second.weight, 0.005), self.second.bias, padding=1)
        return symmetric(x, 0.01 * (self.traced if torch.jit.is_tracing() else 1.0))


@OPSETS
def test_steps_apart(opset: int, tmp_path: Path) -> None:
    """A few elements may be one step apart, no more of them than in torch itself between float32 and float64."""
    for seed in range(3):
        torch.manual_seed(100 * opset + seed)
        model, x = Quantized().eval(), torch.randn(2, 3, 31, 33)
        report = svexport.export(model, x, tmp_path / "m.onnx", opset=opset)
        assert all(p.ok for p in report.parity)
        assert all("what is quantized changes" in note for note in report.notes)
        with torch.no_grad():
            expected, exact = model(x), copy.deepcopy(model).double()(x.double())
        actual = svexport.load(tmp_path / "m.onnx")(x)
        steps = ((actual.double() - exact) / 0.01).round().abs()
        assert steps.max() <= 1
        assert int(steps.count_nonzero()) <= 20 + 4 * int((expected.double() - exact).abs().gt(0.005).count_nonzero())


def test_compare(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other, x = Quantized().eval(), Quantized().eval(), torch.randn(4, 3, 61, 63)
    svexport.export(model, x, tmp_path / "m.onnx", opset=13)
    found = svexport.compare(model, tmp_path / "m.onnx", x, rtol=0, atol=1e-5)
    assert found.ok
    assert "what is quantized changes" in found.notes[0]
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.first.bias += 1e-4
    assert not svexport.compare(other, tmp_path / "m.onnx", x, rtol=0, atol=1e-5).ok


@pytest.mark.parametrize("factor", [1.002, 1.03, 0.5])
def test_another_scale_is_found(factor: float, tmp_path: Path) -> None:
    with torch_export_first(False), pytest.raises(VerificationError, match=r"differs by up to"):
        svexport.export(Quantized(factor), torch.randn(2, 3, 31, 33), tmp_path / "m.onnx", opset=17)
    assert not (tmp_path / "m.onnx").exists()


def test_depth(tmp_path: Path) -> None:
    """Steps behind steps: after ten layers every element differs, as it does in torch."""
    torch.manual_seed(0)
    layers = [layer for _ in range(10) for layer in (Rounded(24), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 5))
    report = svexport.export(model, torch.randn(2, 24, 17, 19), tmp_path / "m.onnx", opset=13, rtol=1e-7, atol=1e-7)
    assert all(p.ok for p in report.parity)


class Rounded(nn.Module):
    """Steps that a module makes itself, with a scale for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(channels, 1, 1) * 0.01 + 0.01)

    def forward(self, x: Tensor) -> Tensor:
        return (x / self.scale).round().clamp(-127, 127) * self.scale


class Ranged(nn.Module):
    def __init__(self, low: int, high: int, zero: int, axis: int) -> None:
        super().__init__()
        self.range, self.axis, self.zero = (low, high), axis, zero
        self.register_buffer("scale", torch.rand(5) * 0.02 + 0.02)
        self.register_buffer("zeros", torch.full((5,), zero, dtype=torch.int32))
        self.register_buffer("one", torch.tensor(0.037))
        self.register_buffer("zero_point", torch.tensor(zero, dtype=torch.int32))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.fake_quantize_per_tensor_affine(x, 0.04, self.zero, *self.range),
            torch.fake_quantize_per_tensor_affine(
                x, self.one, self.zero_point, quant_min=self.range[0], quant_max=self.range[1]
            ),
            torch.fake_quantize_per_channel_affine(x, self.scale, self.zeros, self.axis, *self.range),
        )

    def reference(self, x: Tensor) -> tuple[Tensor, ...]:
        """By the definition, in float64."""
        x = x.double()
        return tuple(
            ((x / scale).round() + self.zero).clamp(*self.range).sub(self.zero) * scale for scale in self.scales(x)
        )

    def scales(self, x: Tensor) -> tuple[Any, ...]:
        whole = self.scale.double().reshape([-1 if i == self.axis else 1 for i in range(x.dim())])
        return 0.04, self.one.double(), whole

    def within_steps(self, x: Tensor) -> Tensor:
        """Other numbers in place of those between two steps, which rounding errors decide for either."""
        while (near := sum((x / s).frac().abs().sub(0.5).abs() < 1e-3 for s in self.scales(x)) > 0).any():
            x = torch.where(near, torch.randn_like(x) * 8, x)
        return x


@OPSETS
@pytest.mark.parametrize(
    ("low", "high", "zero"),
    [(-128, 127, 0), (0, 255, 3), (-127, 127, 0), (0, 127, 0), (0, 127, 11), (-8, 7, 1), (-3, 127, 0), (3, 200, 7)],
)
def test_ranges(low: int, high: int, zero: int, opset: int, tmp_path: Path) -> None:
    """ONNX has the ranges of its types only."""
    axis = opset % 3
    model, x = Ranged(low, high, zero, axis), torch.randn([5 if i == axis else 7 for i in range(3)]) * 8
    x = model.within_steps(x)
    svexport.export(model, x, tmp_path / "m.onnx", opset=opset)
    for actual, expected in zip(svexport.load(tmp_path / "m.onnx")(x), model.reference(x), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)
    elements = {
        i.data_type
        for i in onnx.load(tmp_path / "m.onnx").graph.initializer
        if i.data_type in (onnx.TensorProto.UINT8,)
    }
    assert not elements or high > 127


@pytest.mark.parametrize("opset", [11, 18])
def test_dynamic_sizes(opset: int, tmp_path: Path) -> None:
    class Steps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -128, 127)

    with torch_export_first(True):
        report = svexport.export(
            Steps(), torch.randn(2, 5), tmp_path / "m.onnx", opset=opset, dynamic_shapes={"x": {0: "b", 1: "n"}}
        )
    assert not [note for note in report.notes if note.startswith("traced by TorchScript")]
    x = torch.randint(-150, 150, (3, 7)) * 0.1 + 0.02
    torch.testing.assert_close(svexport.load(tmp_path / "m.onnx")(x), Steps()(x))


class Observed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.input = tq.FakeQuantize(
            tq.MovingAverageMinMaxObserver, -127, 127, dtype=torch.qint8, qscheme=torch.per_tensor_symmetric
        )
        self.fused = tq.FusedMovingAvgObsFakeQuantize(tq.MovingAverageMinMaxObserver, 0, 255)
        self.weight = tq.default_per_channel_weight_fake_quant()
        self.off = tq.default_fake_quant()

    def forward(self, x: Tensor) -> Tensor:
        return self.off(self.fused(F.conv2d(self.input(x), self.weight(self.conv.weight), self.conv.bias)))


@pytest.mark.core
@OPSETS
def test_modules_of_torch(opset: int, tmp_path: Path) -> None:
    model = Observed()
    for _ in range(3):
        model(torch.randn(2, 3, 9, 11))
    x = torch.randn(2, 3, 9, 11)
    with pytest.raises(ExportError, match=r"4 fake quantizers observe, input for one: .*disable_observer"):
        svexport.export(model, x, tmp_path / "m.onnx", opset=opset)
    model.apply(tq.disable_observer)
    model.off.disable_fake_quant()
    report = svexport.export(model, x, tmp_path / "m.onnx", opset=opset)
    assert report.nodes["QuantizeLinear"] == 3
    assert not any("forward" in vars(module) for module in model.modules())
    # Each channel's scale is its largest weight / 127.5, so that a rounding error decides about a step of that weight.
    error = (svexport.load(tmp_path / "m.onnx")(x) - model(x)).abs()
    assert error.max() < 1.01 * model.fused.scale
    assert error.gt(1e-5).double().mean() < 0.2


@pytest.mark.parametrize("opset", [10, 12])
def test_one_scale_that_is_a_buffer_before_opset_13(opset: int, tmp_path: Path) -> None:
    class Model(Ranged):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fake_quantize_per_tensor_affine(x, self.one, self.zero_point, *self.range)

    model, x = Model(-127, 127, 0, 0), torch.randn(5, 4, 3) * 8
    svexport.export(model, x, tmp_path / "m.onnx", opset=opset)
    torch.testing.assert_close(
        svexport.load(tmp_path / "m.onnx")(x), model.reference(x)[1].float(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(("opset", "first"), [(9, 10), (12, 13)])
def test_opsets_without(opset: int, first: int, tmp_path: Path) -> None:
    model = Ranged(-128, 127, 0, 1) if first == 13 else Quantized()
    x = torch.randn(2, 3 if first == 10 else 5, 6, 7)
    for tracer in (True, False):
        with torch_export_first(tracer):  # rounded without a quantizer
            report = svexport.export(model, x, tmp_path / "m.onnx", opset=opset)
        assert report.verified


class Scripted(nn.Module):
    """Of ranges that are not those of types."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fake_quantize_per_tensor_affine(x, 0.1, 2, -127, 127)
        scale, zero = torch.tensor([0.05, 0.2, 0.1]), torch.tensor([0, 3, 127], dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(x, scale, zero, 1, 0, 127)


def test_scripted_ranges(tmp_path: Path) -> None:
    """No mode sees what scripted code calls."""
    report = svexport.export(torch.jit.script(Scripted()), torch.randn(2, 3, 4), tmp_path / "m.onnx", opset=17)
    x = torch.randn(2, 3, 4) * 20
    torch.testing.assert_close(svexport.load(report.path)(x), Scripted()(x), rtol=0, atol=1e-5)


class Channels(torch.autograd.Function):
    """With a symbolic of its own that knows nothing of opsets, as modelopt's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        return torch.fake_quantize_per_channel_affine(
            x, scale, torch.zeros_like(scale, dtype=torch.int32), 1, -128, 127
        )

    @staticmethod
    def symbolic(g: Any, x: Any, scale: Any) -> Any:
        zero = g.op("Constant", value_t=torch.zeros(3, dtype=torch.int8))
        return g.op("DequantizeLinear", g.op("QuantizeLinear", x, scale, zero, axis_i=1), scale, zero, axis_i=1)


class OwnSymbolic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([0.01, 0.02, 0.03]))

    def forward(self, x: Tensor) -> Tensor:
        return Channels.apply(x, self.scale)


def test_an_operator_of_later_opsets(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 5)
    for opset in (11, 13):
        svexport.export(OwnSymbolic(), x, tmp_path / "m.onnx", opset=opset)
        torch.testing.assert_close(svexport.load(tmp_path / "m.onnx")(x), OwnSymbolic()(x))
