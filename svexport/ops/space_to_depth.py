"""Space to depth: moves every 2x2 block of pixels into channels, in the order of YOLOX's Focus stem."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from svexport.ops._module import DropIn
from svexport.ops._op import Op

__all__ = ["Focus", "SpaceToDepth", "space_to_depth"]


def reference(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    blocks = x.reshape(n, c, h // 2, 2, w // 2, 2).permute(0, 5, 3, 1, 2, 4)
    return blocks.clone(memory_format=torch.contiguous_format).view(n, 4 * c, h // 2, w // 2)


def fake(x: Tensor) -> Tensor:
    n, c, h, w = x.shape  # dynamic sizes need not be proven even
    return x.new_empty(n, 4 * c, h // 2, w // 2)


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    for shape in [(2, 3, 4, 6), (1, 1, 2, 2), (3, 5, 14, 10), (0, 3, 4, 4)]:
        yield (make(*shape),)


OP = Op(
    name="space_to_depth",
    schema="(Tensor x) -> Tensor",
    reference=reference,
    samples=samples,
    fake=fake,
    plugin=False,
)


def space_to_depth(x: Tensor) -> Tensor:
    """Moves every 2x2 block of pixels into channels: (even row, even column), (odd, even), (even, odd), (odd, odd).

    Channel ``(2*j + i)*C + c`` of the output is ``x[:, c, i::2, j::2]``. One transpose replaces the ``torch.cat`` of
    four strided slices in the Focus stem of YOLOX (https://github.com/Megvii-BaseDetection/YOLOX).

    Shape:
        - x: ``(N, C, H, W)`` of any dtype, ``H`` and ``W`` even
        - output: ``(N, 4*C, H/2, W/2)``

    Raises:
        ValueError: if ``x`` is not 4-D, or ``H`` or ``W`` is odd.
    """
    if x.dim() != 4:
        raise ValueError(f"space_to_depth expects (N, C, H, W), got {tuple(x.shape)}")
    if any(isinstance(size, int) and size % 2 for size in x.shape[2:]):
        raise ValueError(f"space_to_depth expects even H and W, got {tuple(x.shape)}; pad to a multiple of 2")
    return OP(x)


class SpaceToDepth(nn.Module):
    """Module form of :func:`space_to_depth`; it has no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)``, H and W even; the axes H and W are halved."""
        return space_to_depth(x)


_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "silu": lambda: nn.SiLU(inplace=True),
    "relu": lambda: nn.ReLU(inplace=True),
    "lrelu": lambda: nn.LeakyReLU(0.1, inplace=True),
}


class Focus(DropIn, nn.Module):
    """YOLOX's Focus: :func:`space_to_depth`, then convolution, batch norm and activation.

    Constructor and state_dict are those of ``yolox.models.network_blocks.Focus``.

    Args:
        in_channels: channels of the image.
        out_channels: channels of the result.
        ksize: kernel size of the convolution, which pads by ``(ksize - 1) // 2``.
        stride: stride of the convolution.
        act: ``"silu"``, ``"relu"`` or ``"lrelu"`` (slope 0.1).

    Raises:
        ValueError: on another ``act``.
    """

    replaces = ("Focus",)
    requires = ("conv",)

    def __init__(self, in_channels: int, out_channels: int, ksize: int = 1, stride: int = 1, act: str = "silu") -> None:
        super().__init__()
        if act not in _ACTIVATIONS:
            raise ValueError(f"Focus expects act to be one of {', '.join(_ACTIVATIONS)}; got {act!r}")
        self.conv = nn.Sequential(
            OrderedDict(
                conv=nn.Conv2d(4 * in_channels, out_channels, ksize, stride, (ksize - 1) // 2, bias=False),
                bn=nn.BatchNorm2d(out_channels),
                act=_ACTIVATIONS[act](),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)``, H and W even; the axes H and W are halved."""
        return self.conv(space_to_depth(x))
