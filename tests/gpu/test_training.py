"""Training with the kernels equals training with the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from svexport.ops import ms_deform_attn
from svexport.ops.ms_deform_attn import reference
from tests.gpu.support import gpu

pytestmark = gpu

LEVELS = ((16, 24), (8, 12))
CHANNELS, HEADS, POINTS, QUERIES = 32, 4, 4, 20


class Detector(nn.Module):
    """Queries look at a pyramid of two levels by deformable attention, twice, and say where their object is."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.query = nn.Parameter(torch.randn(QUERIES, CHANNELS))
        self.reference = nn.Parameter(torch.rand(QUERIES, 2))
        self.backbone = nn.ModuleList(nn.Conv2d(3, CHANNELS, 3, stride, padding=1) for stride in (1, 2))
        self.offsets = nn.ModuleList(nn.Linear(CHANNELS, HEADS * len(LEVELS) * POINTS * 2) for _ in range(2))
        self.weights = nn.ModuleList(nn.Linear(CHANNELS, HEADS * len(LEVELS) * POINTS) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(CHANNELS) for _ in range(2))
        self.head = nn.Linear(CHANNELS, 3)

    def forward(self, image: Tensor) -> Tensor:
        maps = [conv(image) for conv in self.backbone]
        n = len(image)
        value = torch.cat([m.flatten(2).mT for m in maps], dim=1).view(n, -1, HEADS, CHANNELS // HEADS)
        shapes = torch.tensor(LEVELS, device=image.device)
        starts = shapes.new_tensor([0, LEVELS[0][0] * LEVELS[0][1]])
        query = self.query.expand(n, -1, -1)
        shape = (n, QUERIES, HEADS, len(LEVELS), POINTS)
        for offsets, weights, norm in zip(self.offsets, self.weights, self.norms, strict=True):
            locations = self.reference[:, None, None, None] + offsets(query).view(*shape, 2) * 0.1
            attention = weights(query).view(*shape[:3], -1).softmax(-1).view(shape)
            query = norm(query + self.attend(value, shapes, starts, locations, attention))
        return self.head(query)


def losses(attend: Callable[..., Tensor], steps: int = 50) -> list[float]:
    """Of finding a bright spot in noise."""
    torch.manual_seed(0)
    model = Detector(attend).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    curve = []
    for _ in range(steps):
        where = torch.rand(8, 2, generator=generator)
        y, x = (torch.arange(size) / size for size in LEVELS[0])
        distance = (x - where[:, None, None, 0]) ** 2 + (y[:, None] - where[:, None, None, 1]) ** 2
        image = torch.exp(-40 * distance)[:, None] + 0.1 * torch.randn(8, 3, *LEVELS[0], generator=generator)
        scores, found = model(image.cuda()).split((1, 2), dim=-1)
        loss = F.smooth_l1_loss((scores.softmax(1) * found).sum(1), where.cuda(), beta=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


@pytest.mark.large
def test_deformable_attention_learns_alike_with_kernels_and_reference() -> None:
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        kernels, references = losses(ms_deform_attn), losses(lambda *args: reference(*args, 1.0))
    assert sum(kernels[-5:]) < 0.7 * sum(kernels[:5])  # it does learn
    assert kernels == pytest.approx(references, rel=2e-2)
    assert kernels[:10] == pytest.approx(references[:10], rel=1e-4)
