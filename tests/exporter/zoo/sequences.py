"""Sequence models: carried states, caches that are written to, chosen experts and codes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exporter.zoo import entry


@entry(lambda b: (torch.randn(b, 4), torch.randn(b, 2)))
class KalmanStep(nn.Module):
    """A track predicted, and corrected by what is seen of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("motion", torch.eye(4) + 0.1 * torch.eye(4).roll(2, 1).triu(1))
        self.register_buffer("seen", torch.eye(4)[:2])

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spread = self.motion @ torch.diag_embed(x.abs() + 0.5) @ self.motion.T + 0.01 * torch.eye(4)
        x = x @ self.motion.T
        error = self.seen @ spread @ self.seen.T + 0.1 * torch.eye(2)
        gain = spread @ self.seen.T @ torch.linalg.inv(error)
        x = x + (gain @ (z - x @ self.seen.T)[..., None])[..., 0]
        return x, (torch.eye(4) - gain @ self.seen) @ spread, torch.logdet(error)


@entry(lambda b: (torch.randn(b, 5, 4),), scales=(0.0, -1.0, 3.0))
class SelectiveScan(nn.Module):
    """A state of a layer whose step each token chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(-torch.rand(4, 3))
        self.layer = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        step, into, out = self.layer(x).split([4, 3, 3], -1)
        step = F.softplus(step)
        state, results = x.new_zeros(x.shape[0], 4, 3), []
        for t in range(x.shape[1]):
            state = (step[:, t, :, None] * self.decay).exp() * state
            state = state + step[:, t, :, None] * into[:, t, None] * x[:, t, :, None]
            results.append((state * out[:, t, None]).sum(-1))
        return torch.stack(results, 1) * F.silu(x), state


@entry(lambda b: (torch.randn(b, 6, 4), torch.randn(b, 1, 4), torch.randint(0, 20, ())), dynamic=False)
class RingOfKeys(nn.Module):
    """The newest key in the place of the oldest; places that none was in yet are not attended to."""

    def forward(self, cache: Tensor, key: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        place = (position % 6).view(1, 1, 1).expand(cache.shape[0], 1, 4)
        cache = cache.scatter(1, place, key)
        valid = torch.arange(6) < (position + 1).clamp(max=6)
        weights = (key @ cache.mT).masked_fill(~valid, float("-inf")).softmax(-1)
        return weights @ cache, cache


@entry(lambda b: (torch.randn(b, 8, 4),), scales=(-1.0, 3.0))
class ExpertsOfCapacity(nn.Module):
    """Tokens to the expert that each likes best, the first three; the others pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        share, expert = self.gate(x).softmax(-1).max(-1)
        chosen = F.one_hot(expert, 3)
        rank = (chosen.cumsum(1) * chosen).sum(-1) - 1
        kept = rank < 3
        slot = (expert * 3 + rank.clamp(max=2))[..., None].expand_as(x)
        slots = torch.zeros(x.shape[0], 9, 4).scatter_add(1, slot, x * kept[..., None])
        return slots.gather(1, slot) * (share * kept)[..., None], rank


@entry(lambda b: (torch.randn(b, 5, 4).round(),))
class EqualCodes(nn.Module):
    """The nearest of a book's codes, two of which are the same, and others equally near."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("book", torch.tensor([[0.0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1], [-1, 0, 0, 1]]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        distance = (x**2).sum(-1, keepdim=True) - 2 * x @ self.book.T + (self.book**2).sum(-1)
        code = distance.argmin(-1)
        return x + (self.book[code] - x).detach(), code, torch.bincount(code.flatten(), minlength=4)


@entry(lambda b: (torch.randn(b, 6),))
class WrittenParts(nn.Module):
    """Parts and diagonals of a tensor, written to one by the other."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x.clone()
        first, second = y.chunk(2, 1)
        first.add_(second)
        second.sub_(first)
        y.split([1, 5], 1)[1].sigmoid_()
        y[:, ::2] += y[:, 1::2]
        pairs = x[:, :, None] * x[:, None]
        pairs.diagonal(0, 1, 2).mul_(0)
        pairs.diagonal(1, 1, 2).fill_(3)
        return y, first, pairs
