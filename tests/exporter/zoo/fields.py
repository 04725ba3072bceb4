"""Radiance fields: hash grids, codes of positions, rendering, and sampling by weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exporter.zoo import entry


@entry(lambda n: (torch.randn(3 * n, 3),), dynamic=False)
class HashedGrid(nn.Module):
    """The eight corners of a cell by products with primes whose bits are compared, negative cells too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 2))

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        cell = (points * 3).floor().long()
        features, keys = [], []
        for corner in range(8):
            at = cell + torch.tensor([corner & 1, corner >> 1 & 1, corner >> 2 & 1])
            keys.append((at[:, 0] ^ (at[:, 1] * 2654435761) ^ (at[:, 2] * 805459861)) % 64)
            features.append(self.table[keys[-1]])
        return torch.stack(features, 1).sum(1), torch.stack(keys, 1)


def whole(kind: torch.dtype, *shape: int) -> Tensor:
    """Integers from all of a type."""
    limits = torch.iinfo(kind)
    return torch.randint(limits.min, limits.max, shape, dtype=torch.int64).to(kind)


@entry(lambda n: (whole(torch.int32, n, 4), whole(torch.int64, n, 4)))
class Mixed(nn.Module):
    """Hashes of 32 and of 64 bits, whose products and sums overflow."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x = (x ^ (x >> 16)) * -2048144789
        x = (x ^ (x >> 13)) * -1028477387
        y = y - 7046029254386353131
        y = (y ^ (y >> 30)) * -4658895280553007687
        return x ^ (x >> 16), x % 97, torch.fmod(x, 97), x // -7, x.sum(), y ^ (y >> 27), y % 1000, -y, y.abs()


@entry(lambda n: (torch.randn(5 * n, 3),), dynamic=False)
class Morton(nn.Module):
    """Points along a curve that fills space: the bits of three coordinates between each other."""

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        def spread(v: Tensor) -> Tensor:
            for shift, kept in ((16, 0x030000FF), (8, 0x0300F00F), (4, 0x030C30C3), (2, 0x09249249)):
                v = (v | (v << shift)) & kept
            return v

        x, y, z = ((points.clamp(-4, 4) + 4) * 127).long().unbind(1)
        code = spread(x) | spread(y) << 1 | spread(z) << 2
        return code, points[torch.argsort(code, stable=True)]


@entry(lambda b: (torch.randn(b, 6), torch.rand(b, 6) + 0.1, torch.randn(b, 6, 3)), scales=(0.0, -1.0, 3.0))
class Rendered(nn.Module):
    """Colours along a ray, each seen through what lies before it."""

    def forward(self, density: Tensor, depth: Tensor, color: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        depth = depth.sort(-1).values
        length = torch.diff(depth, append=torch.full_like(depth[..., :1], 1e10))
        opacity = 1 - torch.exp(-density.relu() * length)
        through = torch.cumprod(torch.cat([torch.ones_like(opacity[..., :1]), 1 - opacity + 1e-10], -1), -1)
        weight = opacity * through[..., :-1]
        return (weight[..., None] * color).sum(-2), weight.sum(-1), (weight * depth).sum(-1)


@entry(lambda b: (torch.randn(b, 3, 4), torch.rand(b, 5)), scales=())
class DrawnFromHistogram(nn.Module):
    """Places drawn where weights are large, by the inverse of their sums."""

    def forward(self, weight: Tensor, u: Tensor) -> Tensor:
        weight = weight.flatten(1).abs() + 1e-5
        sums = F.pad(torch.cumsum(weight / weight.sum(-1, keepdim=True), -1), (1, 0))
        place = torch.searchsorted(sums, u.contiguous(), right=True)
        low, high = (place - 1).clamp(min=0), place.clamp(max=weight.shape[1])
        first, last = sums.gather(1, low), sums.gather(1, high)
        span = last - first
        return low + (u - first) / torch.where(span < 1e-5, torch.ones_like(span), span)


@entry(lambda b: (torch.rand(b, 7, 9) > 0.4,))
class Connected(nn.Module):
    """A number for each part of a mask that hangs together, by the largest of all neighbours, time and again."""

    def forward(self, mask: Tensor) -> Tensor:
        h, w = mask.shape[1:]
        label = torch.arange(1, h * w + 1).view(1, h, w).float() * mask
        for _ in range(6):
            label = F.max_pool2d(label[:, None], 3, 1, 1)[:, 0] * mask
        return label.long()
