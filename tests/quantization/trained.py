"""Trains two small models in seconds: one for actions of skeletons, one for objects that cameras see around a car.

Sometimes a sensor fails: a joint is far off, a pixel far too bright. Training data has such clips and images too, so
the models tolerate them; int8 scaled by the largest magnitude does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples import stgcn
from svexport import ops

LIMBS = {
    "head": [0, 14, 15, 16, 17],
    "right arm": [3, 4],
    "left arm": [6, 7],
    "right leg": [9, 10],
    "left leg": [12, 13],
}
ACTIONS = [(limb, axis, speed) for limb in LIMBS for axis in (0, 1) for speed in (1.0, 2.5)][2:14]
"""A limb that swings along an axis, slowly or fast: twelve of them."""

FRAMES, IMAGE, CAMERAS, SEEN = 16, (24, 32), 2, 8


class SmallSTGCN(stgcn.STGCN):
    BLOCKS = ((12, 1), (24, 2))


def clips(count: int, generator: torch.Generator, broken: float = 0.00005) -> tuple[Tensor, Tensor]:
    """``(N, 3, T, V, 1)`` and ``(N,)``; ``broken``, of all coordinates, are up to 30 m off."""
    actions = torch.randint(len(ACTIONS), (count,), generator=generator)
    pose = stgcn.example_clips("kinetics", 1, 1, seed=1)[0, :, 0, :, 0]  # (3, V)
    x = pose[None, :, None] + 0.03 * torch.randn(count, 3, FRAMES, 18, generator=generator)
    seconds = torch.arange(FRAMES) / FRAMES
    phase = 2 * math.pi * torch.rand(count, generator=generator)
    size = 0.15 + 0.1 * torch.rand(count, generator=generator)
    for clip, action in enumerate(actions.tolist()):
        limb, axis, speed = ACTIONS[action]
        swing = size[clip] * torch.sin(2 * math.pi * speed * seconds + phase[clip])
        x[clip, axis, :, LIMBS[limb]] += swing[:, None]
    lost = torch.rand(x.shape, generator=generator) < broken
    x = torch.where(lost, 60 * (torch.rand(x.shape, generator=generator) - 0.5), x)
    return x[..., None], actions


class Detector(nn.Module):
    """What stands at each of eight places around a car, nothing or one of three kinds: ``(B, places, 4)`` scores."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, o, stride in ((3, 12, 1), (12, 16, 2), (16, 16, 1)):
            layers += [nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
        self.backbone = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4))
        self.register_buffer("places", places())
        self.register_buffer("weights", torch.full((1, SEEN, CAMERAS, 1, 1), 4.0))

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        features = self.backbone(x.flatten(0, 1)).unflatten(0, (b, CAMERAS))
        found = ops.camera_sample(
            [features],
            self.places.expand(b, -1, -1),
            rig().expand(b, -1, -1, -1),
            self.weights.expand(b, -1, -1, -1, -1),
            image_size=IMAGE,
            pc_range=[-10.0, -10, -2, 10, 10, 2],
        )
        return self.head(found)


def places() -> Tensor:
    """``(1, places, 3)``, from 0 to 1: four before the car, four behind it."""
    x, y = torch.meshgrid(torch.tensor([0.1, 0.9]), torch.tensor([0.3, 0.433, 0.567, 0.7]), indexing="ij")
    return torch.stack([x.flatten(), y.flatten(), torch.full((8,), 0.5)], -1)[None]


def rig() -> Tensor:
    """``(1, cameras, 4, 4)``: one camera looks ahead, one back."""
    h, w = IMAGE
    lens = torch.tensor([[w / 1.2, 0, w / 2, 0], [0, w / 1.2, h / 2, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    ahead = torch.tensor([[0.0, -1, 0, 0], [0, 0, -1, 0], [1, 0, 0, 0], [0, 0, 0, 1]])
    back = torch.tensor([[0.0, 1, 0, 0], [0, 0, -1, 0], [-1, 0, 0, 0], [0, 0, 0, 1]])
    return torch.stack([lens @ ahead, lens @ back])[None]


def scenes(count: int, generator: torch.Generator, broken: float = 0.00005) -> tuple[Tensor, Tensor]:
    """``(N, cameras, 3, H, W)`` and ``(N, places)``; ``broken``, of all pixels, are up to 600 times too bright."""
    kinds = torch.randint(4, (count, SEEN), generator=generator)
    h, w = IMAGE
    images = 0.25 * torch.randn(count, CAMERAS, 3, h, w, generator=generator)
    metres = places()[0] * torch.tensor([20.0, 20, 4]) - torch.tensor([10.0, 10, 2])
    seen = torch.einsum("cij,qj->cqi", rig()[0], F.pad(metres, (0, 1), value=1.0))
    for camera in range(CAMERAS):
        for place in range(SEEN):
            u, v, depth, _ = seen[camera, place].tolist()
            if depth <= 0:
                continue
            column, row = round(u / depth), round(v / depth)
            for kind in (1, 2, 3):
                there = kinds[:, place] == kind
                images[there, camera, kind - 1, row - 1 : row + 2, column - 1 : column + 2] += 1.0
    lost = torch.rand(images.shape, generator=generator) < broken
    return torch.where(lost, 600 * torch.rand(images.shape, generator=generator), images), kinds


@dataclass
class Trained:
    """A model, and the data that it is judged by.

    Attributes:
        make: so many samples and what they are, for a random state.
    """

    model: nn.Module
    make: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]

    def accuracy(self, outputs: Any, batch: Any) -> float:
        """In per cent."""
        return 100 * float((outputs.argmax(-1) == batch[1]).float().mean())

    @torch.no_grad()
    def points(self, model: nn.Module, count: int = 4096, seed: int = 9) -> float:
        """Of held-out samples."""
        x, y = self.make(count, torch.Generator().manual_seed(seed))
        outputs = torch.cat([model(part) for part in x.split(256)])
        return self.accuracy(outputs, (x, y))


def train(model: nn.Module, make: Callable[..., tuple[Tensor, Tensor]], steps: int, rate: float) -> Trained:
    generator = torch.Generator().manual_seed(5)
    x, y = make(4096, generator)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps)
    model.train()
    for _ in range(steps):
        some = torch.randint(len(x), (64,), generator=generator)
        loss = F.cross_entropy(model(x[some]).flatten(0, -2), y[some].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return Trained(model.eval(), make)


def skeletons() -> Trained:
    torch.manual_seed(3)
    return train(SmallSTGCN("kinetics", classes=len(ACTIONS), temporal_kernel=5), clips, 300, 0.01)


def cameras() -> Trained:
    torch.manual_seed(4)
    return train(Detector(), scenes, 200, 0.01)
