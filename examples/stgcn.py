"""ST-GCN, written as any user would write it: plain PyTorch, with ``torch.einsum`` for the graph convolution.

S. Yan, Y. Xiong, D. Lin: *Spatial Temporal Graph Convolutional Networks for Skeleton-Based Action Recognition*,
AAAI 2018, https://arxiv.org/abs/1801.07455.

A clip of skeletons is a graph of joints, linked along the bones within a frame and to themselves over time. Each of
the ten blocks mixes joints along the bones with one weight per kind of neighbour (itself, nearer to the centre of the
body, farther from it), then mixes nine frames of every joint.

    python examples/stgcn.py                     # a summary, and stgcn.onnx at opset 11
    python examples/stgcn.py --layout kinetics --output kinetics.onnx
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """A skeleton of one data set: bones as (joint, joint), listed outwards from the joint at the centre."""

    bones: tuple[tuple[int, int], ...]
    centre: int
    frames: int
    classes: int

    @property
    def joints(self) -> int:
        return 1 + max(max(bone) for bone in self.bones)


def _chains(*chains: tuple[int, ...], first: int = 0) -> tuple[tuple[int, int], ...]:
    """Bones along chains of joints whose numbering starts at ``first``."""
    return tuple((a - first, b - first) for chain in chains for a, b in pairwise(chain))


LAYOUTS = {
    # Kinect v2, numbered from 1 as in the data set's paper; joint 21 is the spine between the shoulders.
    "ntu-rgb+d": Layout(
        bones=_chains(
            (21, 2, 1),  # spine, down to its base
            (21, 3, 4),  # neck, head
            (21, 5, 6, 7, 8, 23, 22),  # left arm, thumb, finger tip
            (21, 9, 10, 11, 12, 25, 24),  # right arm, thumb, finger tip
            (1, 13, 14, 15, 16),  # left leg
            (1, 17, 18, 19, 20),  # right leg
            first=1,
        ),
        centre=20,
        frames=300,
        classes=60,
    ),
    # OpenPose's 18 joints, numbered from 0, as detected in the Kinetics videos; joint 1 is the neck.
    "kinetics": Layout(
        bones=_chains(
            (1, 0, 14, 16),  # nose, right eye, right ear
            (0, 15, 17),  # left eye, left ear
            (1, 2, 3, 4),  # right arm
            (1, 5, 6, 7),  # left arm
            (2, 8, 9, 10),  # right leg, hanging from the shoulder: the layout has no spine
            (5, 11, 12, 13),  # left leg
        ),
        centre=1,
        frames=150,
        classes=400,
    ),
}


class Graph:
    """The adjacency of a skeleton, split by the paper's spatial configuration (its section 3.3).

    Attributes:
        hops: (V, V), bones between two joints; also how far each joint is from the centre, ``hops[centre]``.
        adjacency: (3, V, V), indexed [subset, neighbour, joint]. Every joint averages over itself and the joints one
            bone away (columns of the sum are 1). Subset 0 keeps the neighbours as far from the centre as the joint
            (itself), 1 the nearer ones (centripetal), 2 the farther ones (centrifugal).
    """

    def __init__(self, layout: str = "ntu-rgb+d") -> None:
        if layout not in LAYOUTS:
            raise ValueError(f"unknown layout {layout!r}, expected one of {', '.join(LAYOUTS)}")
        self.layout = LAYOUTS[layout]
        self.hops = self._hop_distance()

        linked = (self.hops <= 1).double()  # (V, V)
        normalized = linked / linked.sum(0)  # A D^-1: the mean over the neighbours of each column's joint
        distance = self.hops[self.layout.centre]  # (V,)
        further = torch.sign(distance[:, None] - distance[None, :])  # of neighbour against joint: -1, 0, 1
        self.adjacency = torch.stack([normalized * (further == sign) for sign in (0, -1, 1)]).float()  # (K, V, V)

    def _hop_distance(self) -> Tensor:
        joints = self.layout.joints
        step = torch.eye(joints)
        for a, b in self.layout.bones:
            step[a, b] = step[b, a] = 1
        hops = torch.full((joints, joints), math.inf)
        reached = torch.eye(joints)
        for hop in range(joints):  # whatever is first reached in this many steps is that far away
            hops[(reached > 0) & hops.isinf()] = hop
            reached = reached @ step
            reached.clamp_(max=1)  # only "reached or not" counts, so the number of paths must not overflow
        return hops


class GraphConv(nn.Module):
    """Mixes channels per subset of neighbours, then gathers those: (N, C, T, V), (K, V, V) -> (N, C', T, V)."""

    def __init__(self, in_channels: int, out_channels: int, subsets: int) -> None:
        super().__init__()
        self.subsets = subsets
        self.conv = nn.Conv2d(in_channels, out_channels * subsets, kernel_size=1)

    def forward(self, x: Tensor, A: Tensor) -> Tensor:
        x = self.conv(x)  # (N, K*C', T, V)
        n, kc, t, v = x.shape
        x = x.view(n, self.subsets, kc // self.subsets, t, v)  # (N, K, C', T, V)
        return torch.einsum("nkctv,kvw->nctw", (x, A))  # (N, C', T, V)


class Block(nn.Module):
    """Graph convolution over joints, then a convolution over time: (N, C, T, V) -> (N, C', T / stride, V)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        A: Tensor,
        *,
        temporal_kernel: int = 9,
        stride: int = 1,
        dropout: float = 0.0,
        residual: bool = True,
    ) -> None:
        super().__init__()
        self.gcn = GraphConv(in_channels, out_channels, subsets=A.shape[0])
        self.edge_importance = nn.Parameter(torch.ones_like(A))  # learnt, one factor per bone, direction and block
        self.tcn = nn.Sequential(
            nn.BatchNorm2d(out_channels),
            nn.ReLU(),
            nn.Conv2d(out_channels, out_channels, (temporal_kernel, 1), (stride, 1), ((temporal_kernel - 1) // 2, 0)),
            nn.BatchNorm2d(out_channels),
            nn.Dropout(dropout),
        )
        self.shortcut: nn.Module | None = None
        if residual and (in_channels, stride) == (out_channels, 1):
            self.shortcut = nn.Identity()
        elif residual:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=(stride, 1)), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor, A: Tensor) -> Tensor:
        y = self.tcn(self.gcn(x, A * self.edge_importance))
        if self.shortcut is not None:
            y = y + self.shortcut(x)
        return torch.relu(y)


class STGCN(nn.Module):
    """The ten-block network of the paper.

    Args:
        layout: "ntu-rgb+d" (25 joints, 60 classes) or "kinetics" (18 joints, 400 classes).
        in_channels: numbers per joint; NTU has x, y, z in metres, Kinetics x, y and the detector's confidence.
        classes: of actions; the data set's own number if not given.
        temporal_kernel: frames that a block mixes.
        dropout: in every block, while training.

    Shape:
        (N, C, T, V, M), clips of M people, -> (N, classes), scores before softmax. T is free.
    """

    # (channels, stride) of the ten blocks; the first has no residual
    BLOCKS = (*[(64, 1)] * 4, (128, 2), *[(128, 1)] * 2, (256, 2), *[(256, 1)] * 2)

    A: Tensor
    example_inputs: tuple[Tensor, ...]

    def __init__(
        self,
        layout: str = "ntu-rgb+d",
        *,
        in_channels: int = 3,
        classes: int | None = None,
        temporal_kernel: int = 9,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.graph = Graph(layout)
        self.register_buffer("A", self.graph.adjacency)  # (K, V, V)
        self.data_bn = nn.BatchNorm1d(self.A.shape[-1] * in_channels)  # every coordinate of every joint on its own
        self.blocks = nn.ModuleList()
        channels = in_channels
        for index, (width, stride) in enumerate(self.BLOCKS):
            self.blocks.append(
                Block(
                    channels,
                    width,
                    self.A,
                    temporal_kernel=temporal_kernel,
                    stride=stride,
                    dropout=dropout,
                    residual=index > 0,
                )
            )
            channels = width
        self.classifier = nn.Conv2d(channels, classes or self.graph.layout.classes, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        n, c, t, v, m = x.shape
        x = x.permute(0, 4, 3, 1, 2).contiguous().view(n * m, v * c, t)  # (N*M, V*C, T)
        x = self.data_bn(x)
        x = x.view(n * m, v, c, t).permute(0, 2, 3, 1).contiguous()  # (N*M, C, T, V)
        for block in self.blocks:
            x = block(x, self.A)
        x = x.mean(dim=(2, 3))  # (N*M, 256)
        x = x.view(n, m, -1).mean(dim=1)  # (N, 256)
        return self.classifier(x[:, :, None, None]).flatten(1)  # (N, classes)


def example_clips(
    layout: str = "ntu-rgb+d", frames: int = 300, people: int = 2, clips: int = 1, seed: int = 0
) -> Tensor:
    """Made-up skeletons whose bones swing about their joints: (N, C, T, V, M)."""
    skeleton = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(seed)
    seconds = torch.arange(frames) / 30
    standing = torch.randn(clips, people, 3, 1, generator=generator)
    joints = {skeleton.centre: standing + 0.1 * torch.sin(seconds)}  # each (N, M, C, T)
    for parent, child in skeleton.bones:
        rest, phase = torch.randn(2, clips, people, 3, 1, generator=generator)
        swing = torch.randn(clips, people, 3, 1, generator=generator)
        direction = rest + swing * torch.sin(2 * math.pi * seconds + phase)
        joints[child] = joints[parent] + 0.25 * direction / direction.norm(dim=2, keepdim=True)  # 25 cm long
    x = torch.stack([joints[joint] for joint in range(skeleton.joints)], dim=-1)  # (N, M, C, T, V)
    if layout == "kinetics":  # a video has no depth; its third number is the confidence of the detector
        x[:, :, 2] = 0.5 + 0.5 * torch.rand(x[:, :, 2].shape, generator=generator)
    return x.permute(0, 2, 3, 4, 1).contiguous()


@torch.no_grad()
def _as_if_trained(net: STGCN, clips: Tensor) -> None:
    """Gives every parameter and statistic a value that training could have left there.

    A fresh network has ones and zeros in its norms and edge factors, which would hide an export that drops them.
    """
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)]
    for norm in norms:
        nn.init.uniform_(norm.weight, 0.7, 1.3)
        nn.init.uniform_(norm.bias, -0.3, 0.3)
        norm.momentum = None  # None: the plain average of the batches seen
    for module in net.modules():
        if isinstance(module, Block):
            nn.init.uniform_(module.edge_importance, 0.5, 1.5)
    net.train()(clips)
    for norm in norms:
        norm.momentum = 0.1


QUICK = {"frames": 32}
"""Arguments of :func:`model` for a quick try."""


def model(
    layout: str = "ntu-rgb+d", *, frames: int | None = None, people: int = 2, seed: int = 0, **overrides: Any
) -> STGCN:
    """ST-GCN in evaluation mode, with ``example_inputs`` of the data set's own size (NTU: 1x3x300x25x2).

    ``overrides`` go to :class:`STGCN`. The same arguments give the same weights, and the caller's random state is
    left alone.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = STGCN(layout, **overrides)
        _as_if_trained(net, example_clips(layout, frames=32, clips=2, seed=seed + 1))
    frames = frames or net.graph.layout.frames
    net.example_inputs = (example_clips(layout, frames, people, seed=seed),)
    return net.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Show ST-GCN and export it with svexport.")
    parser.add_argument("--layout", choices=LAYOUTS, default="ntu-rgb+d")
    parser.add_argument("--frames", type=int, help="length of the example clip (default: the data set's)")
    parser.add_argument("--opset", type=int, default=11)
    parser.add_argument("--output", default="stgcn.onnx", metavar="FILE")
    options = parser.parse_args()

    net = model(options.layout, frames=options.frames)
    (clip,) = net.example_inputs
    with torch.no_grad():
        start = time.perf_counter()
        scores = net(clip)
        seconds = time.perf_counter() - start
    print(f"ST-GCN, {options.layout}: {sum(p.numel() for p in net.parameters()) / 1e6:.2f} M parameters")
    print(f"  input   {tuple(clip.shape)} = (clips, coordinates, frames, joints, people)")
    print(f"  output  {tuple(scores.shape)} = (clips, classes), scores {scores.min():.2f} .. {scores.max():.2f}")
    print(f"  forward {seconds * 1e3:.0f} ms on the CPU")

    try:
        import svexport
    except ModuleNotFoundError:
        print("  svexport is not installed (pip install -e .): nothing exported")
        return
    print(svexport.export(net, path=options.output, opset=options.opset))


if __name__ == "__main__":
    main()
