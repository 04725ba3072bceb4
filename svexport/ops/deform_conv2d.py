"""Deformable convolution: a learned offset moves the position that each kernel tap reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from svexport.ops._bilinear import corners
from svexport.ops._module import DropIn
from svexport.ops._op import Op
from svexport.ops.dequantize import result_dtype, values_of

__all__ = ["DeformConv2d", "ModulatedDeformConv2dPack", "deform_conv2d"]


def _taps(
    offset: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    offset_groups: int,
) -> tuple[Tensor, Tensor]:
    """Pixel coordinates y and x of the taps, ``(N, offset_groups, kH*kW, oH, oW)`` each, in float32 at least."""
    moves = offset.to(torch.promote_types(offset.dtype, torch.float32))
    moves = moves.reshape(offset.shape[0], offset_groups, kernel[0] * kernel[1], 2, *offset.shape[2:])
    tap = torch.arange(moves.shape[2], device=offset.device)[:, None, None]
    row = torch.arange(moves.shape[4], device=offset.device)[:, None]
    column = torch.arange(moves.shape[5], device=offset.device)
    y = moves[:, :, :, 0] + (tap // kernel[1] * dilation[0] + row * stride[0] - padding[0])
    x = moves[:, :, :, 1] + (tap % kernel[1] * dilation[1] + column * stride[1] - padding[1])
    return y, x


def _values(input: Tensor, scale: float, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The input, dequantized if it is int8, in ``dtype`` at least."""
    return values_of(input, scale, torch.promote_types(result_dtype(input, weight), dtype))


def _convolve(columns: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, groups: int) -> Tensor:
    """Applies the weight to columns ``(N, offset_groups, C/offset_groups, kH*kW, oH, oW)``: ``(N, O, oH, oW)``."""
    n, offset_groups, _, taps, height, width = columns.shape
    if mask is not None:
        columns = columns * mask.to(columns.dtype).view(n, offset_groups, 1, taps, height, width)
    outputs, terms = weight.shape[0], weight.shape[1] * taps
    matrix = weight.to(columns.dtype).reshape(groups, outputs // groups, terms)
    output = (matrix @ columns.reshape(n, groups, terms, height * width)).view(n, outputs, height, width)
    return output if bias is None else output + bias.to(columns.dtype)[:, None, None]


def reference(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    offset_groups: int,
    scale: float,
) -> Tensor:
    n, channels, height, width = input.shape
    y, x = _taps(offset, weight.shape[2:], stride, padding, dilation, offset_groups)
    pixels = _values(input, scale, weight, y.dtype)
    pixels = pixels.reshape(n, offset_groups, channels // offset_groups, height * width)

    def corner(index: Tensor, weight: Tensor) -> Tensor:  # (N, offset_groups, C/offset_groups, kH*kW*oH*oW)
        index = index.flatten(2)[:, :, None].expand(-1, -1, pixels.shape[2], -1)
        return pixels.gather(3, index) * weight.flatten(2)[:, :, None]

    columns = torch.stack(
        [corner(j * width + i, v * w) for j, v in corners(y, height) for i, w in corners(x, width)]
    ).sum(0)
    return _convolve(columns.unflatten(3, y.shape[2:]), weight, bias, mask, groups).to(result_dtype(input, weight))


def implementation(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    offset_groups: int,
    scale: float,
) -> Tensor:
    n, channels, height, width = input.shape
    y, x = _taps(offset, weight.shape[2:], stride, padding, dilation, offset_groups)
    # Pad to a power of two: grid_sample's normalized coordinates of whole pixels are exact then, so that offsets of 0,
    # with which training begins, have the gradient of the upper neighbour here too.
    wide, high = (1 << (size - 1).bit_length() for size in (width, height))
    pixels = F.pad(_values(input, scale, weight, y.dtype), (0, wide - width, 0, high - height))
    grid = torch.stack(((2 * x + 1) / wide - 1, (2 * y + 1) / high - 1), dim=-1)
    grid = torch.where(grid.abs() <= 2, grid, 2)  # outside: NaN as well
    columns = F.grid_sample(
        pixels.reshape(n * offset_groups, channels // offset_groups, high, wide),
        grid.to(pixels.dtype).flatten(0, 1).flatten(1, 2),  # (N*offset_groups, kH*kW*oH, oW, 2)
        padding_mode="zeros",
        align_corners=False,
    )
    columns = columns.reshape(n, offset_groups, channels // offset_groups, *y.shape[2:])
    return _convolve(columns, weight, bias, mask, groups).to(result_dtype(input, weight))


def fake(input: Tensor, offset: Tensor, weight: Tensor, *_: object) -> Tensor:
    return input.new_empty(input.shape[0], weight.shape[0], *offset.shape[2:], dtype=result_dtype(input, weight))


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    for n, (channels, out), size, kernel, stride, padding, dilation, groups, offset_groups, modulated, biased in [
        (2, (4, 6), (5, 7), (3, 3), (1, 1), (1, 1), (1, 1), 1, 1, True, True),
        (1, (4, 2), (11, 5), (3, 2), (2, 1), (2, 0), (1, 2), 2, 4, True, False),
        (3, (6, 6), (1, 3), (1, 1), (1, 2), (0, 1), (1, 1), 3, 2, False, True),
        (2, (2, 4), (6, 4), (2, 3), (2, 3), (1, 2), (3, 1), 2, 1, False, False),
    ]:
        height, width = _output_size(size, kernel, stride, padding, dilation)
        taps = offset_groups * math.prod(kernel)
        yield (
            make(n, channels, *size),
            make(n, 2 * taps, height, width) * 2,
            make(out, channels // groups, *kernel),
            make(out) if biased else None,
            make(n, taps, height, width).sigmoid() if modulated else None,
            stride,
            padding,
            dilation,
            groups,
            offset_groups,
            1.0,
        )
    codes = (make(2, 4, 5, 6) * 40).clamp(-128, 127).to(torch.int8)
    yield codes, make(2, 18, 3, 3), make(3, 4, 3, 3), None, None, (2, 2), (1, 1), (1, 1), 1, 1, 0.03


def _output_size(
    size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[int, int]:
    height, width = (
        (s + 2 * p - d * (k - 1) - 1) // step + 1
        for s, k, step, p, d in zip(size, kernel, stride, padding, dilation, strict=True)
    )
    return height, width


OP = Op(
    name="deform_conv2d",
    schema="(Tensor input, Tensor offset, Tensor weight, Tensor? bias, Tensor? mask, int[] stride, int[] padding, "
    "int[] dilation, int groups, int offset_groups, float scale) -> Tensor",
    reference=reference,
    implementation=implementation,
    fake=fake,
    samples=samples,
)


def deform_conv2d(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
) -> Tensor:
    """``torchvision.ops.deform_conv2d``: deformable convolution; version 2 if ``mask`` is given.

    It also reads int8 inputs directly, without a dequantized copy; products and sums stay in floating point.

    J. Dai et al., *Deformable Convolutional Networks*, ICCV 2017, https://arxiv.org/abs/1703.06211; X. Zhu et al.,
    *Deformable ConvNets v2*, CVPR 2019, https://arxiv.org/abs/1811.11168.

    Shape:
        - input: ``(N, C, H, W)``, floating point, or int8 with a step worth ``scale``; TensorRT may hold it in any of
          its int8 formats
        - offset: ``(N, 2*offset_groups*kH*kW, oH, oW)``, pixels: (y, x) of every tap. Kept in float32 at least, also
          for half inputs.
        - weight: ``(O, C/groups, kH, kW)``
        - bias: ``(O,)``
        - mask: ``(N, offset_groups*kH*kW, oH, oW)``, factors of the tap samples
        - output: ``(N, O, oH, oW)``, the dtype of ``input``, or of ``weight`` if ``input`` is int8; oH and oW as for
          ``torch.nn.functional.conv2d``

    The numbers of groups and of offset groups follow from the shapes. Taps sample bilinearly; they read zero outside
    the image and where an offset is NaN.

    Args:
        scale: value of one step of an int8 input; ignored for any other input.

    Raises:
        ValueError: on shapes other than these, or a stride or dilation below 1.
        TypeError: if ``input`` is neither floating point nor int8, or ``weight`` is not floating point.
    """
    strides, paddings, dilations = _pair(stride), _pair(padding), _pair(dilation)

    def unexpected(expected: str) -> ValueError:
        tensors = {"input": input, "offset": offset, "weight": weight, "bias": bias, "mask": mask}
        got = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items() if t is not None)
        return ValueError(f"deform_conv2d expects {expected}; got {got}")

    if min(*strides, *dilations) < 1:
        raise ValueError(f"deform_conv2d expects strides and dilations of at least 1, got {strides} and {dilations}")
    int8 = input.dtype == torch.int8
    if not ((input.is_floating_point() or int8) and weight.is_floating_point()):
        raise TypeError(
            "deform_conv2d expects a floating-point or int8 input and a floating-point weight, got "
            f"{input.dtype} and {weight.dtype}; convert them first"
        )
    if input.dim() != 4 or offset.dim() != 4 or weight.dim() != 4 or 0 in input.shape[1:] or 0 in weight.shape:
        raise unexpected(
            "input (N, C, H, W), offset (N, 2*offset_groups*kH*kW, oH, oW) and weight (O, C/groups, kH, kW)"
        )
    n, channels = input.shape[:2]
    taps = weight.shape[2] * weight.shape[3]
    groups, offset_groups = channels // weight.shape[1], offset.shape[1] // (2 * taps)
    size = _output_size(input.shape[2:], weight.shape[2:], strides, paddings, dilations)
    if any(isinstance(s, int) and s < 1 for s in size):  # dynamic sizes need not be proven large
        raise unexpected(f"an image that its kernel fits into, not an output of {size}; use more padding")
    if groups * weight.shape[1] != channels or weight.shape[0] % groups:
        raise unexpected("weight (O, C/groups, kH, kW) for a number of groups that divides O and C")
    if offset_groups == 0 or channels % offset_groups or offset.shape != (n, 2 * offset_groups * taps, *size):
        raise unexpected(
            f"offset ({n}, 2*offset_groups*{taps}, {size[0]}, {size[1]}) for a number of offset groups that divides C"
        )
    if mask is not None and mask.shape != (n, offset_groups * taps, *size):
        raise unexpected(f"mask ({n}, {offset_groups * taps}, {size[0]}, {size[1]})")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise unexpected(f"bias ({weight.shape[0]},)")
    if mask is not None and bias is None:  # TensorRT's parser supports no absent input before a present one
        bias = weight.new_zeros(weight.shape[0])
    numbers = strides, paddings, dilations, groups, offset_groups, float(scale) if int8 else 1.0
    return OP(input, offset, weight, bias, mask, *numbers)


class DeformConv2d(DropIn, nn.Module):
    """``torchvision.ops.DeformConv2d``: the same constructor, parameters and initialization.

    Raises:
        ValueError: if ``groups`` does not divide ``in_channels`` and ``out_channels``.
    """

    replaces = ("DeformConv2d",)
    requires: ClassVar[tuple[str, ...]] = (
        *("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups"),
        *("weight", "bias"),
    )

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if in_channels % groups or out_channels % groups:
            raise ValueError(
                f"expected groups to divide in_channels and out_channels, got groups={groups}, "
                f"in_channels={in_channels}, out_channels={out_channels}"
            )
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = _pair(kernel_size)
        self.stride = _pair(stride)
        self.padding = _pair(padding)
        self.dilation = _pair(dilation)
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, *self.kernel_size))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_channels))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As ``torch.nn.Conv2d``."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            fan_in, _ = nn.init._calculate_fan_in_and_fan_out(self.weight)
            bound = 1 / math.sqrt(fan_in)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: Tensor, offset: Tensor, mask: Tensor | None = None) -> Tensor:
        """See :func:`deform_conv2d` for the shapes."""
        return self.convolve(input, offset, mask)

    def convolve(self, input: Tensor, offset: Tensor, mask: Tensor | None) -> Tensor:
        """Calls :func:`deform_conv2d` with the module's weight, bias and options."""
        return deform_conv2d(input, offset, self.weight, self.bias, self.stride, self.padding, self.dilation, mask)

    def extra_repr(self) -> str:
        """The sizes and options, as ``print(module)`` shows them."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}, bias={self.bias is not None}"
        )


class ModulatedDeformConv2dPack(DeformConv2d):
    """``mmcv.ops.ModulatedDeformConv2dPack``: version 2, with the convolution that predicts offsets and mask.

    Constructor, parameters and initialization are mmcv's: offsets start at 0 and the mask at 1/2.
    Source: https://mmcv.readthedocs.io/en/latest/api.html#mmcv.ops.ModulatedDeformConv2dPack

    Shape:
        - x: ``(N, C, H, W)``
        - output: ``(N, O, oH, oW)``

    Raises:
        ValueError: if ``groups`` does not divide ``in_channels`` and ``out_channels``, or ``deform_groups`` does not
            divide ``in_channels``.
    """

    replaces = ("ModulatedDeformConv2dPack",)
    requires = (*DeformConv2d.requires, "conv_offset")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        deform_groups: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)
        if in_channels % deform_groups:
            raise ValueError(
                f"expected deform_groups to divide in_channels, got deform_groups={deform_groups}, "
                f"in_channels={in_channels}"
            )
        self.deform_groups = deform_groups
        taps = math.prod(self.kernel_size)
        self.conv_offset = nn.Conv2d(
            in_channels, deform_groups * 3 * taps, self.kernel_size, self.stride, self.padding, self.dilation
        )
        bound = 1 / math.sqrt(in_channels * taps)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        nn.init.zeros_(self.conv_offset.weight)
        nn.init.zeros_(self.conv_offset.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """``(N, C, H, W)`` to ``(N, out, H', W')``, at offsets that the module's convolution predicts from ``x``."""
        moves = self.conv_offset(x)
        taps = moves.shape[1] // 3
        offset, mask = moves.split((2 * taps, taps), dim=1)
        return self.convolve(x, offset, mask.sigmoid())
