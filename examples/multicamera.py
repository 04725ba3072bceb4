"""A multi-camera detector from pixels to boxes, written as any user would write it: ResNet, FPN and a DETR3D head.

K. He et al.: *Deep Residual Learning for Image Recognition*, CVPR 2016, https://arxiv.org/abs/1512.03385; T.-Y. Lin et
al.: *Feature Pyramid Networks for Object Detection*, CVPR 2017, https://arxiv.org/abs/1612.03144; Y. Wang et al.:
*DETR3D*, CoRL 2021, https://arxiv.org/abs/2110.06922, whose head is the example beside this one.

Every image of the rig goes through the same small backbone; the pyramid gives its features one width; and the head
looks them up where its 3D points appear in the images.

    python examples/multicamera.py               # a summary, and multicamera.onnx at opset 11
    python examples/multicamera.py --cameras 4 --output four.onnx
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import detr3d
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (32, 64, 128, 256)  # of the backbone's stages, at strides 4, 8, 16 and 32


class Block(nn.Module):
    """The basic block of ResNet: (N, C, H, W) -> (N, C', H / stride, W / stride)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.downsample: nn.Module = nn.Identity()
        if (in_channels, stride) != (out_channels, 1):
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class Backbone(nn.Module):
    """A small ResNet: (N, 3, H, W) -> three of (N, C, H, W), at strides 8, 16 and 32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTHS[0], 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        self.layer1 = Block(WIDTHS[0], WIDTHS[0], stride=1)
        self.layer2 = Block(WIDTHS[0], WIDTHS[1], stride=2)
        self.layer3 = Block(WIDTHS[1], WIDTHS[2], stride=2)
        self.layer4 = Block(WIDTHS[2], WIDTHS[3], stride=2)

    def forward(self, images: Tensor) -> list[Tensor]:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(images))), kernel_size=3, stride=2, padding=1)
        c2 = self.layer2(self.layer1(x))
        c3 = self.layer3(c2)
        return [c2, c3, self.layer4(c3)]


class FPN(nn.Module):
    """Features of one width, coarse ones added to fine ones; and one level more, at twice the last stride."""

    def __init__(self, widths: tuple[int, ...], dim: int) -> None:
        super().__init__()
        self.lateral_convs = nn.ModuleList(nn.Conv2d(width, dim, 1) for width in widths)
        self.fpn_convs = nn.ModuleList(nn.Conv2d(dim, dim, 3, padding=1) for _ in widths)
        self.extra_conv = nn.Conv2d(dim, dim, 3, stride=2, padding=1)

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        laterals = [conv(feature) for conv, feature in zip(self.lateral_convs, features, strict=True)]
        for i in range(len(laterals) - 1, 0, -1):
            laterals[i - 1] = laterals[i - 1] + F.interpolate(laterals[i], laterals[i - 1].shape[2:], mode="nearest")
        outputs = [conv(lateral) for conv, lateral in zip(self.fpn_convs, laterals, strict=True)]
        return [*outputs, self.extra_conv(F.relu(outputs[-1]))]


class MultiCameraDetector(nn.Module):
    """Boxes around the car from the images of its cameras.

    Shape:
        images (B, cams, 3, H, W), standardised; lidar2img (B, cams, 4, 4) -> a dict of
        classes (B, Q, classes), boxes (B, Q, 10) and reference_points (B, Q, 3): see :class:`detr3d.DETR3D`.
    """

    example_inputs: tuple[Tensor, Tensor]

    def __init__(self, config: detr3d.Config = detr3d.CONFIGS["small"]) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.neck = FPN(WIDTHS[1:], config.dim)
        self.head = detr3d.DETR3D(config)

    def forward(self, images: Tensor, lidar2img: Tensor) -> dict[str, Tensor]:
        b, cams = images.shape[:2]
        features = self.neck(self.backbone(images.flatten(0, 1)))
        return self.head([feature.unflatten(0, (b, cams)) for feature in features], lidar2img)


def example_inputs(config: detr3d.Config, batch: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Made-up photos, smooth with a little texture, and the surround rig."""
    generator = torch.Generator().manual_seed(seed)
    count = batch * config.cameras
    smooth = F.interpolate(torch.randn(count, 3, 12, 20, generator=generator), config.image_size, mode="bilinear")
    images = smooth + 0.1 * torch.randn(count, 3, *config.image_size, generator=generator)
    rig = torch.stack(list(detr3d.surround_cameras(config.image_size).values())[: config.cameras])
    return images.unflatten(0, (batch, config.cameras)), rig.expand(batch, -1, -1, -1).contiguous()


@torch.no_grad()
def _as_if_trained(net: MultiCameraDetector, images: Tensor) -> None:
    """Gives norms and head what training could have left there: ones and zeros would hide an export that drops them."""
    detr3d._as_if_trained(net.head)
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        nn.init.uniform_(norm.weight, 0.7, 1.3)
        nn.init.uniform_(norm.bias, -0.3, 0.3)
        norm.momentum = None  # None: the plain average of the batches seen
    net.train().backbone(images.flatten(0, 1))
    for norm in norms:
        norm.momentum = 0.1


QUICK = {"queries": 30, "layers": 1, "cameras": 3}
"""Arguments of :func:`model` for a quick try."""


def model(*, batch: int = 1, seed: int = 0, **overrides: Any) -> MultiCameraDetector:
    """The detector in evaluation mode, with ``example_inputs``: six images of 232x400, and their rig.

    ``overrides`` replace fields of the head's small configuration. The same arguments give the same weights, and the
    caller's random state is left alone.
    """
    config = replace(detr3d.CONFIGS["small"], **overrides)
    inputs = example_inputs(config, batch, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = MultiCameraDetector(config)
        _as_if_trained(net, inputs[0])
    net.example_inputs = inputs
    return net.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Show a multi-camera detector and export it with svexport.")
    parser.add_argument("--cameras", type=int, choices=range(1, 7), default=6, help="how many of the rig's six")
    parser.add_argument("--opset", type=int, default=11)
    parser.add_argument("--output", default="multicamera.onnx", metavar="FILE")
    options = parser.parse_args()

    net = model(cameras=options.cameras)
    images, lidar2img = net.example_inputs
    with torch.no_grad():
        start = time.perf_counter()
        result = net(images, lidar2img)
        seconds = time.perf_counter() - start
    print(f"Multi-camera detector: {sum(p.numel() for p in net.parameters()) / 1e6:.2f} M parameters")
    print(f"  input   {tuple(images.shape)} = (batch, cameras, channels, height, width)")
    print(f"  input   {tuple(lidar2img.shape)} = lidar2img of the cameras")
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
