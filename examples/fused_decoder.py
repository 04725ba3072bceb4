"""A multi-camera detector whose whole decoder is one operator: ``svexport.ops.TransformerDecoder``.

A few convolutions stand for the image backbone. Behind them, layers of self attention, camera attention, feed forward
and box branch train as modules do, and are one ``SvTransformerDecoder`` node in the file, which TensorRT runs as one
plugin and ONNX Runtime by its body in standard ONNX. ``--nodes`` exports the same decoder as small nodes between
matrix products that stay native.

    python examples/fused_decoder.py             # a summary, and fused_decoder.onnx at opset 11
    python examples/fused_decoder.py --nodes --weights attributes --output nodes.onnx
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import Any

import detr3d
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport
from svexport.ops import TransformerDecoder, TransformerDecoderConfig

CONFIG = replace(
    TransformerDecoderConfig.preset("seed"),
    num_layers=2,
    embed_dims=64,
    num_heads=4,
    ffn_dims=128,
    num_queries=100,
    image_size=(144, 368),
    feature_sizes=((36, 92), (18, 46), (9, 23)),
)
"""The deployed decoder, narrower, on images of half the size; the decoder pools a fourth level itself."""


class FusedDetector(nn.Module):
    """Boxes around the car from the images of its cameras.

    Shape:
        images (B, cams, 3, H, W), standardised; lidar2img (B, cams, 4, 4) -> a dict of
        classes (B, Q, classes), boxes (B, Q, 10) and reference_points (B, Q, 3).
    """

    example_inputs: tuple[Tensor, Tensor]

    def __init__(self, config: TransformerDecoderConfig) -> None:
        super().__init__()
        dim = config.embed_dims
        strides = (4, *(2 for _ in config.feature_sizes[1:]))
        widths = (3, *(dim for _ in config.feature_sizes))
        self.backbone = nn.ModuleList(
            nn.Conv2d(a, dim, 2 * stride - 1, stride, padding=stride - 1)
            for a, stride in zip(widths, strides, strict=False)
        )
        self.query_embedding = nn.Embedding(config.num_queries, 2 * dim)  # position and content
        self.reference_points = nn.Linear(dim, 3)
        self.decoder = TransformerDecoder(config)

    def forward(self, images: Tensor, lidar2img: Tensor) -> dict[str, Tensor]:
        b, cams = images.shape[:2]
        x, features = images.flatten(0, 1), []
        for conv in self.backbone:
            x = F.relu(conv(x))
            features.append(x.unflatten(0, (b, cams)))  # (B, cams, C, H, W)
        query_pos, query = self.query_embedding.weight.expand(b, -1, -1).chunk(2, dim=-1)
        points = self.reference_points(query_pos).sigmoid()
        return self.decoder(query, query_pos, points, features, lidar2img)._asdict()


@torch.no_grad()
def _as_if_trained(net: FusedDetector) -> None:
    """Norms that do something, small steps of points that start around the car: see the example of DETR3D."""
    for module in net.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.7, 1.3)
            nn.init.uniform_(module.bias, -0.3, 0.3)
    for layer in net.decoder.layers:
        nn.init.normal_(layer.svca.attention_weights.weight, std=0.1)
        layer.reg[-1].weight[[0, 1, 4]] *= 0.05
    config = net.decoder.config
    angle, radius, height = torch.rand(3, config.num_queries)
    angle, radius = 2 * math.pi * angle, 0.06 + 0.42 * radius  # of the range, from its middle
    start = torch.stack((0.5 + radius * angle.cos(), 0.5 + radius * angle.sin(), 0.1 + 0.8 * height), dim=-1)  # (Q, 3)
    query_pos = net.query_embedding.weight[:, : config.embed_dims]
    missing = start.logit() - net.reference_points(query_pos)
    query_pos += missing @ torch.linalg.pinv(net.reference_points.weight).T  # the least change that starts them there


QUICK = {"num_queries": 30, "num_layers": 1, "num_cams": 3}
"""Arguments of :func:`model` for a quick try."""


def model(*, batch: int = 1, seed: int = 0, **overrides: Any) -> FusedDetector:
    """The detector in evaluation mode, with ``example_inputs``: made-up images of the surround rig.

    ``overrides`` replace fields of :data:`CONFIG`. The same arguments give the same weights, and the caller's random
    state is left alone.
    """
    config = replace(CONFIG, **overrides)
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(batch * config.num_cams, 3, 6, 12, generator=generator)
    images = F.interpolate(coarse, config.image_size, mode="bilinear").unflatten(0, (batch, config.num_cams))
    rig = torch.stack(list(detr3d.surround_cameras(config.image_size).values())[: config.num_cams])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = FusedDetector(config)
        _as_if_trained(net)
    net.example_inputs = images, rig.expand(batch, -1, -1, -1).contiguous()
    return net.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Export a multi-camera detector with its decoder as one node.")
    parser.add_argument("--nodes", action="store_true", help="small nodes between native matrix products instead")
    parser.add_argument("--weights", choices=("inputs", "attributes"), default="inputs", help="of the one node")
    parser.add_argument("--opset", type=int, default=11)
    parser.add_argument("--output", default="fused_decoder.onnx", metavar="FILE")
    options = parser.parse_args()

    net = model()
    net.decoder.fuse = "nodes" if options.nodes else "block"
    images, lidar2img = net.example_inputs
    with torch.no_grad():
        result = net(images, lidar2img)
    print(f"Fused decoder: {sum(p.numel() for p in net.decoder.parameters()) / 1e6:.2f} M parameters")
    print(f"  input   {tuple(images.shape)} = (batch, cameras, channels, height, width)")
    for name, value in result.items():
        print(f"  output  {tuple(value.shape)} = {name}, {value.min():.2f} .. {value.max():.2f}")
    print(svexport.export(net, path=options.output, opset=options.opset, weights=options.weights))


if __name__ == "__main__":
    main()
