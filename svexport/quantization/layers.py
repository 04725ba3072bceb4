"""Layers of torch.nn with fake quantizers for their input and weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from svexport.exporter.fp8 import LARGEST, ToFp8, fake_quantize_fp8
from svexport.ops.transformer_decoder import TransformerDecoder

__all__ = [
    "FORMATS",
    "FakeQuantizer",
    "QuantizedLayer",
    "always_called",
    "quantizable",
    "quantized_layers",
    "step",
    "to_quantized",
]

LOW, HIGH = -128, 127

_HALF = {torch.float16, torch.bfloat16}

FORMATS = {"int8": float(HIGH), "fp8": LARGEST}
"""The number that the largest magnitude becomes after division by the scale."""


class FakeQuantizer(ToFp8):
    """``clamp(round(x / scale), -128, 127) * scale``, with the gradient of a straight-through estimator; or the same
    with the numbers of fp8 (E4M3).

    Exported as QuantizeLinear and DequantizeLinear.

    Attributes:
        scale: float32, a scalar or ``(C,)`` along an axis.
        axis: the axis; None for one scale.
        enabled: whether it quantizes.
        fp8: whether it quantizes to fp8.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(self, scale: Tensor, axis: int | None = None, fp8: bool = False) -> None:
        super().__init__()
        self.axis, self.enabled, self.fp8 = axis, True, fp8
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", torch.zeros_like(scale, dtype=torch.int32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Fake-quantized, of the same shape and dtype; as it is where the quantizer is disabled."""
        if not self.enabled:
            return x
        if self.fp8:
            result: Tensor = fake_quantize_fp8(x, self.scale, self.axis or 0)
            return result
        wide = x.float() if x.dtype in _HALF else x
        if self.axis is None:
            y = torch.fake_quantize_per_tensor_affine(wide, self.scale, self.zero_point, LOW, HIGH)
        else:
            y = torch.fake_quantize_per_channel_affine(wide, self.scale, self.zero_point, self.axis, LOW, HIGH)
        return y.to(x.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FakeQuantizer:
        """Half models quantize with scales in float32, which their conversion would round."""
        own = self.scale
        super()._apply(fn, recurse)
        if self.scale.dtype in _HALF:
            self.scale = own.to(self.scale.device)
        return self

    def extra_repr(self) -> str:
        """Scale and range, as ``print(module)`` shows them."""
        shown = f"scale={float(self.scale):.3g}" if self.axis is None else f"{len(self.scale)} scales, axis={self.axis}"
        return shown + (", fp8" if self.fp8 else "") + ("" if self.enabled else ", off")


class QuantizedLayer(nn.Module):
    """A layer that computes with quantized numbers.

    Attributes:
        input_quantizer: one scale.
        weight_quantizer: one scale per output channel.
    """

    input_quantizer: FakeQuantizer
    weight_quantizer: FakeQuantizer
    output_axis = 0  # of the weight

    def quantizers(self) -> Iterator[FakeQuantizer]:
        """The quantizers of its inputs and its weight."""
        yield self.input_quantizer
        yield self.weight_quantizer

    def switch(self, on: bool) -> None:
        """Switches between quantized and original computation."""
        for quantizer in self.quantizers():
            quantizer.enabled = on


class QuantizedLinear(nn.Linear, QuantizedLayer):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(self.input_quantizer(input), self.weight_quantizer(self.weight), self.bias)


class _Convolution(QuantizedLayer):
    function: staticmethod[..., Any]

    def forward(self, input: Tensor) -> Tensor:
        layer: Any = self
        padding = layer.padding
        if layer.padding_mode != "zeros":  # before the quantizer, which has to be right before the convolution
            input, padding = F.pad(input, layer._reversed_padding_repeated_twice, mode=layer.padding_mode), 0
        x, weight = self.input_quantizer(input), self.weight_quantizer(layer.weight)
        result: Tensor = self.function(x, weight, layer.bias, layer.stride, padding, layer.dilation, layer.groups)
        return result


class QuantizedConv1d(_Convolution, nn.Conv1d):
    function = staticmethod(F.conv1d)


class QuantizedConv2d(_Convolution, nn.Conv2d):
    function = staticmethod(F.conv2d)


class QuantizedConv3d(_Convolution, nn.Conv3d):
    function = staticmethod(F.conv3d)


class _Transposed(QuantizedLayer):
    output_axis = 1
    dimensions: int
    function: staticmethod[..., Any]

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        layer: Any = self
        padding = layer._output_padding(
            input, output_size, layer.stride, layer.padding, layer.kernel_size, self.dimensions, layer.dilation
        )
        x, weight = self.input_quantizer(input), self.weight_quantizer(layer.weight)
        result: Tensor = self.function(
            x, weight, layer.bias, layer.stride, layer.padding, padding, layer.groups, layer.dilation
        )
        return result


class QuantizedConvTranspose1d(_Transposed, nn.ConvTranspose1d):
    dimensions, function = 1, staticmethod(F.conv_transpose1d)


class QuantizedConvTranspose2d(_Transposed, nn.ConvTranspose2d):
    dimensions, function = 2, staticmethod(F.conv_transpose2d)


class QuantizedConvTranspose3d(_Transposed, nn.ConvTranspose3d):
    dimensions, function = 3, staticmethod(F.conv_transpose3d)


_QUANTIZED: dict[type[nn.Module], type[QuantizedLayer]] = {
    nn.Linear: QuantizedLinear,
    nn.Conv1d: QuantizedConv1d,
    nn.Conv2d: QuantizedConv2d,
    nn.Conv3d: QuantizedConv3d,
    nn.ConvTranspose1d: QuantizedConvTranspose1d,
    nn.ConvTranspose2d: QuantizedConvTranspose2d,
    nn.ConvTranspose3d: QuantizedConvTranspose3d,
}


def quantizable(model: nn.Module) -> dict[str, nn.Module]:
    """Layers that :func:`to_quantized` supports, by name; the first name of a layer that has several.

    Layers inside ``nn.MultiheadAttention`` and ``TransformerDecoder`` are left out, because these read the weights
    without calling the layers. Layers that compute their weight in every forward are left out too.
    """
    inside = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.MultiheadAttention, TransformerDecoder))
    ]
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in _QUANTIZED
        and "weight" in module._parameters
        and not any(not outer or name.startswith(f"{outer}.") for outer in inside)
    }


def to_quantized(layer: nn.Module, largest: float, format: str = "int8") -> None:
    """Turns a layer into a quantized layer, in place.

    Args:
        layer: one of :func:`quantizable`.
        largest: the input magnitude that the largest quantized number represents.
        format: one of :data:`FORMATS`.
    """
    kind = _QUANTIZED[type(layer)]
    weight = layer.get_parameter("weight").detach()
    rows = weight.transpose(0, kind.output_axis).flatten(1).float()
    scales = step(rows.abs().amax(1) if rows.numel() else rows.new_zeros(len(rows)), format)
    one, fp8 = step(torch.tensor(largest, device=weight.device), format), format == "fp8"
    layer.__class__ = kind
    assert isinstance(layer, QuantizedLayer)
    layer.input_quantizer, layer.weight_quantizer = (
        FakeQuantizer(one, fp8=fp8),
        FakeQuantizer(scales, kind.output_axis, fp8),
    )


def step(largest: Tensor, format: str = "int8") -> Tensor:
    """The scale for a largest magnitude; of zeros, any; one that a quotient with does not leave float32 anyhow."""
    return (
        torch.where(largest > 0, largest, 1.0).float().div(FORMATS[format]).clamp_min(torch.finfo(torch.float32).tiny)
    )


def always_called(model: nn.Module) -> None:
    """Makes torch.nn's encoder layers call their quantized layers also without gradients.

    Their fast path is one function of the weights, which would ignore the quantizers.
    """
    for module in model.modules():
        if not isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerEncoder)):
            continue
        if any(isinstance(part, QuantizedLayer) for part in module.modules()):
            if isinstance(module, nn.TransformerEncoderLayer):
                module.activation_relu_or_gelu = 0  # of other activations there is no fast path
            else:
                module.use_nested_tensor = False  # which the fast path alone takes


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedLayer]]:
    """Names and modules of a model's quantized layers, in its own order."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QuantizedLayer))
