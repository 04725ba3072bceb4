"""svexport's layers that sample feature maps, with int8 maps: QuantizeLinear directly before the node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from svexport.ops.camera_sample import CameraSample, Detr3DCrossAtten
from svexport.ops.deform_conv2d import DeformConv2d, ModulatedDeformConv2dPack, deform_conv2d
from svexport.ops.grid_sample import GridSample
from svexport.ops.ms_deform_attn import MultiScaleDeformableAttention, MultiScaleDeformableSampling, ms_deform_attn
from svexport.ops.quantize import quantize
from svexport.ops.transformer_decoder import DecoderOutput, TransformerDecoder, TransformerDecoderConfig
from svexport.quantization.layers import FakeQuantizer, QuantizedLayer, step

__all__ = ["MAP_READERS", "QuantizedMaps", "maps_of", "readers", "to_quantized_maps"]


class QuantizedMaps(QuantizedLayer):
    """A layer that reads its feature maps in int8, and computes in floating point.

    Attributes:
        map_quantizers: one per level, each with one scale.
    """

    map_quantizers: nn.ModuleList

    def quantizers(self) -> Iterator[FakeQuantizer]:
        """The quantizers of its maps, then those of its inputs and weight."""
        for quantizer in self.map_quantizers:
            assert isinstance(quantizer, FakeQuantizer)
            yield quantizer

    def quantized(self, maps: Sequence[Tensor]) -> tuple[list[Tensor], tuple[float, ...] | None]:
        """The maps in int8 and the value of a step of each; or floating-point maps and None if they need a gradient.

        Raises:
            ValueError: if the number of maps differs from the calibrated one.
        """
        quantizers = list(self.quantizers())
        if len(maps) != len(quantizers):
            raise ValueError(f"{type(self).__name__} expects {len(quantizers)} feature maps, got {len(maps)}")
        if not all(quantizer.enabled for quantizer in quantizers):
            return list(maps), None
        if torch.is_grad_enabled() and any(one.requires_grad for one in maps):
            return [quantizer(one) for quantizer, one in zip(quantizers, maps, strict=True)], None
        scales = tuple(float(quantizer.scale) for quantizer in quantizers)
        return [quantize(one, scale, restricted=False) for one, scale in zip(maps, scales, strict=True)], scales


class QuantizedCameraSample(QuantizedMaps, CameraSample):
    def forward(
        self,
        features: Sequence[Tensor],
        reference_points: Tensor,
        lidar2img: Tensor,
        weights: Tensor,
        offsets: Tensor | None = None,
    ) -> Tensor:
        maps, scales = self.quantized(features)
        return self.sample(maps, reference_points, lidar2img, weights, offsets, scales).to(features[0].dtype)


class QuantizedDetr3DCrossAtten(QuantizedMaps, Detr3DCrossAtten):
    def sample(self, features: Sequence[Tensor], *inputs: Any, **options: Any) -> Tensor:
        maps, scales = self.quantized(features)
        return super().sample(maps, *inputs, **options, scales=scales).to(features[0].dtype)


class QuantizedTransformerDecoder(QuantizedMaps, TransformerDecoder):
    def decode(
        self, *inputs: Any, config: TransformerDecoderConfig | None = None, every_layer: bool = False
    ) -> list[DecoderOutput]:
        *queries, features, cameras = inputs
        maps, scales = self.quantized(features)
        config = config or (self.config if scales is None else replace(self.config, scales=scales))
        return super().decode(*queries, maps, cameras, config=config, every_layer=every_layer)


class QuantizedGridSample(QuantizedMaps, GridSample):
    def forward(self, input: Tensor, grid: Tensor) -> Tensor:
        (image,), scales = self.quantized([input])
        return self.sample(image, grid, scales[0] if scales else self.scale).to(input.dtype)


class QuantizedDeformConv2d(QuantizedMaps, DeformConv2d):
    def convolve(self, input: Tensor, offset: Tensor, mask: Tensor | None) -> Tensor:
        (image,), scales = self.quantized([input])
        numbers = self.stride, self.padding, self.dilation, mask
        scale = scales[0] if scales else 1.0
        return deform_conv2d(image, offset, self.weight, self.bias, *numbers, scale=scale).to(input.dtype)


class QuantizedModulatedDeformConv2dPack(QuantizedDeformConv2d, ModulatedDeformConv2dPack):
    pass


class QuantizedDeformableAttention(QuantizedMaps, MultiScaleDeformableAttention):
    def attend(self, value: Tensor, *inputs: Tensor) -> Tensor:
        return attend(self, value, *inputs)


class QuantizedDeformableSampling(QuantizedMaps, MultiScaleDeformableSampling):
    def attend(self, value: Tensor, *inputs: Tensor) -> Tensor:
        return attend(self, value, *inputs)


def attend(layer: QuantizedMaps, value: Tensor, *inputs: Tensor) -> Tensor:
    """Deformable attention to the value of all levels, which has one scale."""
    (codes,), scales = layer.quantized([value])
    return ms_deform_attn(codes, *inputs, scale=scales[0] if scales else 1.0).to(value.dtype)


_READERS: dict[type[nn.Module], type[QuantizedMaps]] = {
    CameraSample: QuantizedCameraSample,
    DeformConv2d: QuantizedDeformConv2d,
    Detr3DCrossAtten: QuantizedDetr3DCrossAtten,
    GridSample: QuantizedGridSample,
    ModulatedDeformConv2dPack: QuantizedModulatedDeformConv2dPack,
    MultiScaleDeformableAttention: QuantizedDeformableAttention,
    MultiScaleDeformableSampling: QuantizedDeformableSampling,
    TransformerDecoder: QuantizedTransformerDecoder,
}

MAP_READERS = tuple(_READERS)
"""Kinds of layers that sample feature maps."""

_PLACES: dict[type[nn.Module], tuple[int, str]] = {
    CameraSample: (0, "features"),
    DeformConv2d: (0, "input"),
    Detr3DCrossAtten: (2, "value"),
    GridSample: (0, "input"),
    ModulatedDeformConv2dPack: (0, "x"),
    MultiScaleDeformableAttention: (2, "value"),
    MultiScaleDeformableSampling: (0, "value"),
    TransformerDecoder: (3, "features"),
}
"""The position and name of the maps among forward's arguments."""


def readers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers that :func:`to_quantized_maps` knows, by name; of a layer under several names, the first."""
    return {name: module for name, module in model.named_modules() if type(module) in _READERS}


def maps_of(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The maps that a call of one of :func:`readers` samples; empty unless all inputs are floating point."""
    place, name = _PLACES[type(layer)]
    maps = args[place] if len(args) > place else kwargs.get(name)
    if maps is None and isinstance(layer, Detr3DCrossAtten):
        maps = args[1] if len(args) > 1 else kwargs.get("key")
    if isinstance(layer, MultiScaleDeformableAttention):
        maps = layer.value_proj.forward((args[0] if args else kwargs["query"]) if maps is None else maps)  # unobserved
    maps = [maps] if isinstance(maps, Tensor) else list(maps or ())
    return maps if all(isinstance(one, Tensor) and one.is_floating_point() for one in maps) else []


def to_quantized_maps(layer: nn.Module, largest: Sequence[float], device: torch.device | None) -> None:
    """Turns a layer into a quantized layer, in place.

    Args:
        layer: one of :func:`readers`.
        largest: the magnitude of each level that 127 represents.
        device: device of the maps.
    """
    quantizers = [FakeQuantizer(step(torch.tensor(one, device=device))) for one in largest]
    layer.__class__ = _READERS[type(layer)]
    assert isinstance(layer, QuantizedMaps)
    layer.map_quantizers = nn.ModuleList(quantizers)
