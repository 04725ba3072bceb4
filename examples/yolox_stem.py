"""The first stages of YOLOX's backbone, written as any user would write them: plain PyTorch, with Focus as four slices.

Z. Ge, S. Liu, F. Wang, Z. Li, J. Sun: *YOLOX: Exceeding YOLO Series in 2021*, https://arxiv.org/abs/2107.08430; the
cross stage partial blocks are those of C.-Y. Wang et al.: *CSPNet*, CVPRW 2020, https://arxiv.org/abs/1911.11929.

Focus turns every 2x2 block of pixels into channels, which loses nothing and quarters the image. A stage then halves it
once more and splits its channels: one half goes through residual bottlenecks, the other past them.

    python examples/yolox_stem.py                # a summary, and yolox_stem.onnx at opset 11
    python examples/yolox_stem.py --size l --output large.onnx
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = {"s": (0.33, 0.50), "m": (0.67, 0.75), "l": (1.0, 1.0), "x": (1.33, 1.25)}
"""Depth and width of the published models, as multiples of the large one's."""


class BaseConv(nn.Module):
    """Convolution, batch norm, SiLU: (N, C, H, W) -> (N, C', H / stride, W / stride)."""

    def __init__(self, in_channels: int, out_channels: int, ksize: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, ksize, stride, padding=(ksize - 1) // 2, bias=False)
        self.bn = nn.BatchNorm2d(out_channels, eps=1e-3, momentum=0.03)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class Focus(nn.Module):
    """Every 2x2 block of pixels as channels, then a convolution: (N, C, H, W) -> (N, C', H / 2, W / 2)."""

    def __init__(self, in_channels: int, out_channels: int, ksize: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv = BaseConv(in_channels * 4, out_channels, ksize, stride)

    def forward(self, x: Tensor) -> Tensor:
        patch_top_left = x[..., ::2, ::2]
        patch_top_right = x[..., ::2, 1::2]
        patch_bot_left = x[..., 1::2, ::2]
        patch_bot_right = x[..., 1::2, 1::2]
        x = torch.cat((patch_top_left, patch_bot_left, patch_top_right, patch_bot_right), dim=1)
        return self.conv(x)


class Bottleneck(nn.Module):
    """Two convolutions around which the input goes, too: (N, C, H, W) -> (N, C, H, W)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = BaseConv(channels, channels, ksize=1)
        self.conv2 = BaseConv(channels, channels, ksize=3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.conv1(x))


class CSPLayer(nn.Module):
    """Half of the channels through the bottlenecks, half past them: (N, C, H, W) -> (N, C, H, W)."""

    def __init__(self, channels: int, bottlenecks: int) -> None:
        super().__init__()
        hidden = channels // 2
        self.conv1 = BaseConv(channels, hidden, ksize=1)
        self.conv2 = BaseConv(channels, hidden, ksize=1)
        self.conv3 = BaseConv(2 * hidden, channels, ksize=1)
        self.m = nn.Sequential(*(Bottleneck(hidden) for _ in range(bottlenecks)))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3(torch.cat((self.m(self.conv1(x)), self.conv2(x)), dim=1))


class Stem(nn.Module):
    """Focus and the first two CSP stages of YOLOX's backbone.

    Args:
        depth: multiple of the number of bottlenecks of YOLOX-L (3 and 9).
        width: multiple of its channels (64, 128 and 256).
        in_channels: of the image.

    Shape:
        (N, 3, H, W), H and W multiples of 8, -> a dict of ``dark2`` (N, 2*C, H/4, W/4) and ``dark3`` (N, 4*C, H/8, W/8)
        where C is ``64 * width``.
    """

    example_inputs: tuple[Tensor, ...]

    def __init__(self, depth: float = 0.33, width: float = 0.50, in_channels: int = 3) -> None:
        super().__init__()
        channels, bottlenecks = int(64 * width), max(round(3 * depth), 1)
        self.stem = Focus(in_channels, channels, ksize=3)
        self.dark2 = nn.Sequential(
            BaseConv(channels, 2 * channels, ksize=3, stride=2), CSPLayer(2 * channels, bottlenecks)
        )
        self.dark3 = nn.Sequential(
            BaseConv(2 * channels, 4 * channels, ksize=3, stride=2), CSPLayer(4 * channels, 3 * bottlenecks)
        )

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        dark2 = self.dark2(self.stem(images))
        return {"dark2": dark2, "dark3": self.dark3(dark2)}


def example_images(height: int = 416, width: int = 416, images: int = 1, seed: int = 0) -> Tensor:
    """Made-up photos with values 0 to 255, as YOLOX takes them, smooth with a little texture: (N, 3, H, W)."""
    generator = torch.Generator().manual_seed(seed)
    smooth = F.interpolate(torch.rand(images, 3, 8, 8, generator=generator), (height, width), mode="bilinear")
    return (255 * smooth + 8 * torch.randn(images, 3, height, width, generator=generator)).clamp(0, 255)


@torch.no_grad()
def _as_if_trained(net: Stem, images: Tensor) -> None:
    """Gives every norm the factors and statistics that training could have left there.

    A fresh network has ones and zeros in its norms, which would hide an export that drops them.
    """
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        nn.init.uniform_(norm.weight, 0.7, 1.3)
        nn.init.uniform_(norm.bias, -0.3, 0.3)
        norm.momentum = None  # None: the plain average of the batches seen
    net.train()(images)
    for norm in norms:
        norm.momentum = 0.03


QUICK = {"height": 96, "width": 128}
"""Arguments of :func:`model` for a quick try."""


def model(size: str = "s", *, height: int = 416, width: int = 416, seed: int = 0, **overrides: Any) -> Stem:
    """The stem of YOLOX-S (or another of :data:`SIZES`) in evaluation mode, with ``example_inputs``.

    ``overrides`` go to :class:`Stem`. The same arguments give the same weights, and the caller's random state is left
    alone.
    """
    depth, multiple = SIZES[size]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Stem(**{"depth": depth, "width": multiple, **overrides})
        _as_if_trained(net, example_images(64, 64, images=2, seed=seed + 1))
    net.example_inputs = (example_images(height, width, seed=seed),)
    return net.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Show the stem of YOLOX and export it with svexport.")
    parser.add_argument("--size", choices=SIZES, default="s")
    parser.add_argument("--opset", type=int, default=11)
    parser.add_argument("--output", default="yolox_stem.onnx", metavar="FILE")
    options = parser.parse_args()

    net = model(options.size)
    (images,) = net.example_inputs
    with torch.no_grad():
        start = time.perf_counter()
        result = net(images)
        seconds = time.perf_counter() - start
    print(f"YOLOX-{options.size.upper()}, stem: {sum(p.numel() for p in net.parameters()) / 1e6:.2f} M parameters")
    print(f"  input   {tuple(images.shape)} = (images, channels, height, width)")
    for name, value in result.items():
        print(f"  output  {tuple(value.shape)} = {name}, {value.min():.2f} .. {value.max():.2f}")
    print(f"  forward {seconds * 1e3:.0f} ms on the CPU")

    try:
        import svexport
    except ModuleNotFoundError:
        print("  svexport is not installed (pip install -e .): nothing exported")
        return
    print(svexport.export(net, path=options.output, opset=options.opset))


if __name__ == "__main__":
    main()
