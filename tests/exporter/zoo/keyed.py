"""Values grouped by keys, on borders of cells, routed by masks, or made from the size of a batch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exporter.zoo import entry


def tenths(*shape: int) -> Tensor:
    """Numbers on the borders of cells, as coordinates are that were stored to a digit."""
    return torch.randint(-60, 60, shape) / 10


@entry(lambda points: (tenths(5 * points, 3), torch.randn(5 * points, 4)), dynamic=False)
class VoxelsOnBorders(nn.Module):
    """Points to cells by ``//``, their places in them by ``%``, sums and counts by index."""

    def forward(self, points: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cell = (points[:, :2] // 0.4).clamp(-8, 7).long() + 8
        key = cell[:, 0] * 16 + cell[:, 1]
        sums = features.new_zeros(256, 4).index_add_(0, key, features)
        counts = torch.zeros(256).scatter_add_(0, key, torch.ones_like(points[:, 0]))
        return sums / counts.clamp(min=1)[:, None], points % 0.4, torch.div(points, 0.3, rounding_mode="floor")


@entry(lambda n: (torch.randn(n, 4), torch.randint(0, 5, (n,))))
class SoftmaxOfSegments(nn.Module):
    def forward(self, x: Tensor, key: Tensor) -> Tensor:
        index = key[:, None].expand_as(x)
        largest = torch.full((5, 4), float("-inf")).scatter_reduce(0, index, x, "amax")
        e = (x - largest[key]).exp()
        return e / torch.zeros(5, 4).scatter_add(0, index, e)[key]


@entry(lambda n: (torch.randn(5 * n, 4), torch.randint(0, 4, (5 * n,))), dynamic=False)
class FirstOfEachKey(nn.Module):
    """Sorted by key; the first row of each, and what number its key has."""

    def forward(self, x: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        order = torch.argsort(key, stable=True)
        key = key[order]
        first = torch.ones_like(key, dtype=torch.bool)
        first[1:] = key[1:] != key[:-1]
        return x[order][first], key[first], first.cumsum(0) - 1


@entry(lambda b: (torch.randn(b, 6, 8), torch.randint(0, 3, (b, 6))))
class RoutedExperts(nn.Module):
    """Each token through the layer of its kind, gathered and put back by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = kind == number
            out[chosen] = expert(x[chosen])
        return out


@entry(lambda b: (torch.randn(b, 7, 4), torch.rand(b, 7) > 0.5))
class MaskedTokens(nn.Module):
    """Rows that a mask names get a learned token, then more; all others another value in one column."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = x.clone()
        y[mask] = self.token
        y[mask] += 1
        y[~mask, 1] = -1.0
        y[:, -2:, 3] *= 2
        return y.masked_scatter(mask[..., None], x.flip(1))


@entry(lambda b: (torch.randn(b, 7, 4), torch.randn(b, 3), torch.randn(b, 7, 4)))
class ShiftByCanBus(nn.Module):
    """Temporal attention whose maps are shifted by what the car drove; headings in degrees."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor, can: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        angle = torch.atan2(can[:, 1], can[:, 0])
        degrees = angle / math.pi * 180
        degrees = torch.where(degrees < 0, degrees + 360, degrees)
        shift = torch.stack([can[:, 2] * angle.sin() / 0.5, can[:, 2] * angle.cos() / 0.5], -1)
        q = self.query(torch.cat([before, x], -1)) + shift.sum(-1)[:, None, None]
        return self.attention(q, q, x)[0], degrees


@entry(lambda b: (torch.randn(b, 7, 8),))
class ChunkedAttention(nn.Module):
    """Within chunks of four, of a length padded to them; what was padded is masked."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        pad = -n % 4
        y = F.pad(x, (0, 0, 0, pad)).view(b, -1, 4, c)
        beyond = torch.arange(n + pad).view(-1, 4) >= n
        weights = (y @ y.mT).masked_fill(beyond[None, :, None, :], -1e9).softmax(-1)
        return (weights @ y).reshape(b, -1, c)[:, :n]


@entry(lambda b: (torch.randn(b, 4, 5), torch.randint(0, 5, (b, 4))))
class ChainField(nn.Module):
    """The score of a path and the sum over all, by transitions indexed with pairs of labels."""

    def __init__(self) -> None:
        super().__init__()
        self.transitions = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        path = x.gather(2, labels[..., None]).squeeze(-1).sum(1) + self.transitions[labels[:, :-1], labels[:, 1:]].sum(
            1
        )
        alpha = x[:, 0]
        for step in range(1, 4):
            alpha = torch.logsumexp(alpha[:, :, None] + self.transitions, 1) + x[:, step]
        return path, alpha.logsumexp(1)


@entry(lambda b: (torch.randn(b, 8, 6, 10),))
class Involution(nn.Module):
    """A kernel of its own at every place."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Conv2d(8, 18, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        kernel = self.kernel(x).view(b, 2, 1, 9, h, w)
        return (kernel * F.unfold(x, 3, padding=1).view(b, 2, c // 2, 9, h, w)).sum(3).view(b, c, h, w)


@entry(lambda b: (torch.randint(0, 256, (b, 5, 7, 3), dtype=torch.uint8),))
class Bytes(nn.Module):
    """Images of bytes: negated, halved and masked as bytes, then normalized."""

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = image.permute(0, 3, 1, 2).flip(1)
        return (y.float() - torch.tensor([103.0, 116, 123]).view(1, 3, 1, 1)) / 57, -y, (y >> 1) & 15


@entry(lambda b: (torch.randn(b + 3, 4),))
class PartsOfABatch(nn.Module):
    """As many parts as there are devices, of sizes that differ by one."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.sum(0) for part in x.tensor_split(3))


@entry(lambda b: (torch.randn(b, 3, 2), torch.randn(b, 3, 4)))
class LoopsOfTokens(nn.Module):
    """A cell called for each step, its state kept between them, beside a layer over all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.layer = nn.GRUCell(2, 4), nn.LSTM(4, 3, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        state = None
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return state, self.layer(y)[0]


@entry(lambda b: (torch.randn(b + 3, 4),))
class MeanOfMany(nn.Module):
    """Batches of four and more go another way than smaller ones, which a file for all would not."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(0) if x.shape[0] > 3 else x.sum(0)


@entry(lambda b: (torch.randn(b + 3, 4),))
class ReversedIfShort(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(0) if x.shape[0] < 4 else x.relu() - (-x).relu()


@entry(lambda b: (torch.randn(b, 6, 4), torch.randint(0, 4, (b, 6))))
class LossesOfTokens(nn.Module):
    """The loss of every token, smoothed, those of padding left out, and their mean in each row."""

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        each = F.cross_entropy(
            x.flatten(0, 1), target.flatten(), ignore_index=0, label_smoothing=0.1, reduction="none"
        ).view_as(target)
        kept = target != 0
        return each, (each * kept).sum(1) / kept.sum(1).clamp(min=1)
