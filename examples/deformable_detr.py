"""The encoder of Deformable DETR, written as its authors' PyTorch reference is: ``F.grid_sample`` level by level.

X. Zhu, W. Su, L. Lu, B. Li, X. Wang, J. Dai: *Deformable DETR: Deformable Transformers for End-to-End Object
Detection*, ICLR 2021, https://arxiv.org/abs/2010.04159.

Every pixel of a feature pyramid is a query. It looks at a few points around itself on every level, whose offsets and
weights it computes from its own features, and mixes in what it finds there.

    python examples/deformable_detr.py           # a summary, and deformable_detr.onnx at opset 11
    python examples/deformable_detr.py --config small --output small.onnx
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes of the encoder. Everything but the levels is the paper's, whose images are about 800x1333."""

    layers: int = 6
    dim: int = 256
    heads: int = 8
    points: int = 4
    ffn: int = 1024
    levels: tuple[tuple[int, int], ...] = ((32, 40), (16, 20), (8, 10), (4, 5))  # height, width: of a 256x320 image


CONFIGS = {
    "deformable_detr": Config(),
    "small": Config(layers=2, dim=64, heads=4, ffn=128, levels=((16, 20), (8, 10), (4, 5), (2, 3))),
}


def ms_deform_attn_core_pytorch(
    value: Tensor, spatial_shapes: Tensor, sampling_locations: Tensor, attention_weights: Tensor
) -> Tensor:
    """Multi-scale deformable sampling (the paper's equation 3), as the authors wrote it for debugging.

    Shape:
        value (N, S, M, D), spatial_shapes (L, 2) of (height, width), sampling_locations (N, Lq, M, L, P, 2) in [0, 1],
        attention_weights (N, Lq, M, L, P) -> (N, Lq, M*D).
    """
    n, _, m, d = value.shape
    _, queries, m, levels, points, _ = sampling_locations.shape
    value_list = value.split([int(h) * int(w) for h, w in spatial_shapes], dim=1)
    sampling_grids = 2 * sampling_locations - 1
    sampling_values = []
    for level, (h, w) in enumerate(spatial_shapes):
        image = value_list[level].flatten(2).transpose(1, 2).reshape(n * m, d, int(h), int(w))
        grid = sampling_grids[:, :, :, level].transpose(1, 2).flatten(0, 1)  # (N*M, Lq, P, 2)
        sampling_values.append(
            F.grid_sample(image, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        )  # (N*M, D, Lq, P)
    attention_weights = attention_weights.transpose(1, 2).reshape(n * m, 1, queries, levels * points)
    output = (torch.stack(sampling_values, dim=-2).flatten(-2) * attention_weights).sum(-1)  # (N*M, D, Lq)
    return output.view(n, m * d, queries).transpose(1, 2).contiguous()


class MSDeformAttn(nn.Module):
    """Multi-scale deformable attention.

    Shape:
        query (N, Lq, C), reference_points (N, Lq, L, 2) in [0, 1], input_flatten (N, S, C), spatial_shapes (L, 2)
        -> (N, Lq, C).
    """

    def __init__(self, dim: int, levels: int, heads: int, points: int) -> None:
        super().__init__()
        self.heads, self.levels, self.points = heads, levels, points
        self.sampling_offsets = nn.Linear(dim, heads * levels * points * 2)
        self.attention_weights = nn.Linear(dim, heads * levels * points)
        self.value_proj = nn.Linear(dim, dim)
        self.output_proj = nn.Linear(dim, dim)
        self._reset_parameters()

    @torch.no_grad()
    def _reset_parameters(self) -> None:
        """Each head looks in its own direction, its points one pixel after the other."""
        angle = torch.arange(self.heads) * (2 * math.pi / self.heads)
        direction = torch.stack((angle.cos(), angle.sin()), dim=-1)
        direction /= direction.abs().amax(dim=-1, keepdim=True)
        distance = torch.arange(1, self.points + 1)[:, None]
        offsets = (direction[:, None, None] * distance).expand(-1, self.levels, -1, -1)  # (M, L, P, 2)
        nn.init.zeros_(self.sampling_offsets.weight)
        self.sampling_offsets.bias.copy_(offsets.flatten())
        nn.init.zeros_(self.attention_weights.weight)
        nn.init.zeros_(self.attention_weights.bias)
        for projection in (self.value_proj, self.output_proj):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)

    def forward(self, query: Tensor, reference_points: Tensor, input_flatten: Tensor, spatial_shapes: Tensor) -> Tensor:
        n, queries, c = query.shape
        value = self.value_proj(input_flatten).view(n, -1, self.heads, c // self.heads)
        offsets = self.sampling_offsets(query).view(n, queries, self.heads, self.levels, self.points, 2)
        weights = self.attention_weights(query).view(n, queries, self.heads, self.levels * self.points)
        weights = F.softmax(weights, -1).view(n, queries, self.heads, self.levels, self.points)
        sizes = torch.stack((spatial_shapes[..., 1], spatial_shapes[..., 0]), -1)  # (width, height)
        locations = reference_points[:, :, None, :, None, :] + offsets / sizes[None, None, None, :, None, :]
        return self.output_proj(ms_deform_attn_core_pytorch(value, spatial_shapes, locations, weights))


class EncoderLayer(nn.Module):
    """Deformable attention of the pixels among themselves, then a feed forward, each followed by its norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self_attn = MSDeformAttn(config.dim, len(config.levels), config.heads, config.points)
        self.norm1 = nn.LayerNorm(config.dim)
        self.linear1 = nn.Linear(config.dim, config.ffn)
        self.linear2 = nn.Linear(config.ffn, config.dim)
        self.norm2 = nn.LayerNorm(config.dim)

    def forward(self, src: Tensor, pos: Tensor, reference_points: Tensor, spatial_shapes: Tensor) -> Tensor:
        src = self.norm1(src + self.self_attn(src + pos, reference_points, src, spatial_shapes))
        return self.norm2(src + self.linear2(F.relu(self.linear1(src))))


class DeformableEncoder(nn.Module):
    """The encoder of Deformable DETR.

    Shape:
        features L of (N, C, H_l, W_l) -> memory (N, S, C), the pixels of all levels, S of them, one after the other.
    """

    spatial_shapes: Tensor
    reference_points: Tensor
    pos: Tensor
    example_inputs: tuple[list[Tensor]]

    def __init__(self, config: Config = CONFIGS["deformable_detr"]) -> None:
        super().__init__()
        self.config = config
        self.level_embed = nn.Parameter(torch.randn(len(config.levels), config.dim))
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))
        self.register_buffer("spatial_shapes", torch.tensor(config.levels), persistent=False)
        self.register_buffer("reference_points", _centres(config.levels), persistent=False)  # (S, 2)
        self.register_buffer("pos", _sine_embedding(self.reference_points, config.dim), persistent=False)  # (S, C)

    def forward(self, features: list[Tensor]) -> Tensor:
        src = torch.cat([feature.flatten(2).transpose(1, 2) for feature in features], dim=1)  # (N, S, C)
        level = torch.cat(
            [
                embed.expand(height * width, -1)
                for embed, (height, width) in zip(self.level_embed, self.config.levels, strict=True)
            ]
        )
        n, levels = src.shape[0], len(features)
        reference_points = self.reference_points[None, :, None].expand(n, -1, levels, -1)  # (N, S, L, 2)
        for layer in self.layers:
            src = layer(src, self.pos + level, reference_points, self.spatial_shapes)
        return src


def _centres(levels: tuple[tuple[int, int], ...]) -> Tensor:
    """(x, y) of every pixel, 0 to 1 across the image: (S, 2)."""
    points = []
    for height, width in levels:
        y, x = torch.meshgrid((torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width, indexing="ij")
        points.append(torch.stack((x, y), dim=-1).flatten(0, 1))
    return torch.cat(points)


def _sine_embedding(points: Tensor, dim: int) -> Tensor:
    """Sines and cosines of y, then of x, at falling frequencies: (S, 2) -> (S, C)."""
    frequency = 10000 ** -(torch.arange(dim // 4) / (dim // 4))
    phase = 2 * math.pi * points.flip(-1)[..., None] * frequency  # (S, 2, C/4)
    return torch.stack((phase.sin(), phase.cos()), dim=-1).flatten(1)


def example_features(config: Config, batch: int = 1, seed: int = 0) -> list[Tensor]:
    """Made-up feature maps, smooth over the image with a little texture."""
    generator = torch.Generator().manual_seed(seed)
    features = []
    for size in config.levels:
        smooth = F.interpolate(torch.randn(batch, config.dim, 4, 5, generator=generator), size, mode="bilinear")
        features.append(smooth + 0.05 * torch.randn(batch, config.dim, *size, generator=generator))
    return features


@torch.no_grad()
def _as_if_trained(net: DeformableEncoder) -> None:
    """Makes norms and attention depend on what training would have put there.

    A fresh network attends the same way from every query, and its norms' ones and zeros would hide an export that
    drops them.
    """
    for module in net.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.7, 1.3)
            nn.init.uniform_(module.bias, -0.3, 0.3)
        elif isinstance(module, MSDeformAttn):
            nn.init.xavier_uniform_(module.sampling_offsets.weight)
            nn.init.xavier_uniform_(module.attention_weights.weight)


QUICK = {"config": "small"}
"""Arguments of :func:`model` for a quick try."""


def model(config: str = "deformable_detr", *, batch: int = 1, seed: int = 0, **overrides: Any) -> DeformableEncoder:
    """The encoder in evaluation mode, with ``example_inputs``.

    ``config`` names one of :data:`CONFIGS` and ``overrides`` replace its fields. The same arguments give the same
    weights, and the caller's random state is left alone.
    """
    sizes = replace(CONFIGS[config], **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = DeformableEncoder(sizes)
        _as_if_trained(net)
    net.example_inputs = (example_features(sizes, batch, seed),)
    return net.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Show Deformable DETR's encoder and export it with svexport.")
    parser.add_argument("--config", choices=CONFIGS, default="deformable_detr")
    parser.add_argument("--opset", type=int, default=11)
    parser.add_argument("--output", default="deformable_detr.onnx", metavar="FILE")
    options = parser.parse_args()

    net = model(options.config)
    (features,) = net.example_inputs
    with torch.no_grad():
        start = time.perf_counter()
        memory = net(features)
        seconds = time.perf_counter() - start
    print(f"Deformable DETR, {options.config}: {sum(p.numel() for p in net.parameters()) / 1e6:.2f} M parameters")
    for feature in features:
        print(f"  input   {tuple(feature.shape)} = (images, channels, height, width)")
    print(f"  output  {tuple(memory.shape)} = (images, pixels, channels), {memory.min():.2f} .. {memory.max():.2f}")
    print(f"  forward {seconds * 1e3:.0f} ms on the CPU")

    try:
        import svexport
    except ModuleNotFoundError:
        print("  svexport is not installed (pip install -e .): nothing exported")
        return
    print(svexport.export(net, path=options.output, opset=options.opset))


if __name__ == "__main__":
    main()
