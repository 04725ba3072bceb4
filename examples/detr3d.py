"""A DETR3D head, written as any user would write it: plain PyTorch, ``F.grid_sample`` and ``torch.einsum``.

Y. Wang, V. Guizilini, T. Zhang, Y. Wang, H. Zhao, J. Solomon: *DETR3D: 3D Object Detection from Multi-view Images via
3D-to-2D Queries*, CoRL 2021, https://arxiv.org/abs/2110.06922.

Every object query owns a 3D point around the car. A decoder layer projects the points into the images of six cameras,
reads the feature maps there, mixes what it read into the query, and moves the point. This file is everything behind
the image backbone: queries, decoder, box and class branches, and a camera rig to run them with.

    python examples/detr3d.py                    # a summary, and detr3d.onnx at opset 11
    python examples/detr3d.py --config small --output small.onnx
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CAMERAS_FILE = Path(__file__).parent / "data" / "surround_cameras.json"


@dataclass(frozen=True)
class Config:
    """Sizes of the head. The defaults are the paper's, for six 1600x900 images padded to 1600x928."""

    queries: int = 900
    layers: int = 6
    dim: int = 256
    heads: int = 8
    ffn: int = 512
    classes: int = 10
    box_size: int = 10  # cx, cy, w, l, cz, h, sin, cos, vx, vy
    cameras: int = 6
    points: int = 1
    levels: tuple[tuple[int, int], ...] = ((116, 200), (58, 100), (29, 50), (15, 25))
    image_size: tuple[int, int] = (928, 1600)  # height, width in pixels
    pc_range: tuple[float, ...] = (-51.2, -51.2, -5.0, 51.2, 51.2, 3.0)  # metres: x, y, z from, x, y, z to
    depth_eps: float = 1e-5


CONFIGS = {
    "detr3d": Config(),
    # the same rig and view, a quarter of the pixels each way
    "small": Config(
        queries=100,
        layers=2,
        dim=64,
        heads=4,
        ffn=128,
        levels=((29, 50), (15, 25), (8, 13), (4, 7)),
        image_size=(232, 400),
    ),
}


# --------------------------------------------------------------------------------------------------------- cameras


def _pose(sensor: dict) -> Tensor:
    """Sensor to ego as a matrix, from a translation and a quaternion (w, x, y, z): (4, 4), float64."""
    quaternion = torch.tensor(sensor["rotation"], dtype=torch.float64)
    w, x, y, z = (quaternion / quaternion.norm()).tolist()  # the file is rounded, so not quite of unit length
    pose = torch.eye(4, dtype=torch.float64)
    pose[:3, :3] = torch.tensor(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )
    pose[:3, 3] = torch.tensor(sensor["translation"])
    return pose


def surround_cameras(image_size: tuple[int, int], file: Path = CAMERAS_FILE) -> dict[str, Tensor]:
    """``lidar2img`` of every camera of the rig, by name: (4, 4), LiDAR metres to (u * depth, v * depth, depth, 1).

    The photo is first scaled to the width of ``image_size`` (height, width). If it is then too low (900 for 928), rows
    are padded at the bottom, which moves no pixel; if it is too high, rows of sky are cropped at the top.
    """
    rig = json.loads(file.read_text(encoding="utf-8"))
    photo_height, photo_width = rig["image_size"]
    height, width = image_size
    scale = width / photo_width
    cropped = max(0.0, photo_height * scale - height)

    lidar2ego = _pose(rig["lidar"])
    cameras = {}
    for camera in rig["cameras"]:
        k = camera["intrinsics"]
        intrinsics = torch.eye(4, dtype=torch.float64)
        intrinsics[0, 0], intrinsics[0, 2] = k["fx"] * scale, k["cx"] * scale
        intrinsics[1, 1], intrinsics[1, 2] = k["fy"] * scale, k["cy"] * scale - cropped
        extrinsics = torch.linalg.inv(_pose(camera)) @ lidar2ego
        cameras[camera["name"]] = (intrinsics @ extrinsics).float()
    return cameras


def project(
    reference_points: Tensor,
    lidar2img: Tensor,
    *,
    image_size: tuple[int, int],
    pc_range: tuple[float, ...],
    depth_eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Where the cameras see the points.

    Shape:
        reference_points (B, Q, 3) in [0, 1] of the range, lidar2img (B, cams, 4, 4)
        -> uv (B, cams, Q, 2), from -1 to 1 across the image, and valid (B, cams, Q, 1).
    """
    low, high = reference_points.new_tensor(pc_range).split(3)
    points = reference_points * (high - low) + low  # (B, Q, 3), metres
    points = torch.cat((points, torch.ones_like(points[..., :1])), dim=-1)  # (B, Q, 4)
    image = torch.einsum("bnij,bqj->bnqi", lidar2img, points)  # (B, cams, Q, 4)

    depth = image[..., 2:3]
    valid = depth > depth_eps  # in front of the camera
    height, width = image_size
    uv = image[..., :2] / depth.clamp(min=depth_eps) / image.new_tensor((width, height))  # 0 .. 1 across the image
    uv = (uv - 0.5) * 2
    inside = (uv > -1) & (uv < 1)
    return uv, valid & inside[..., :1] & inside[..., 1:]


# --------------------------------------------------------------------------------------------------------- decoder


def inverse_sigmoid(x: Tensor, eps: float = 1e-5) -> Tensor:
    x = x.clamp(0, 1)
    return torch.log(x.clamp(min=eps) / (1 - x).clamp(min=eps))


class SelfAttention(nn.Module):
    """Multi-head attention of the queries among themselves, without the residual: (B, Q, C) -> (B, Q, C)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.output_proj = nn.Linear(dim, dim)

    def forward(self, query: Tensor, query_pos: Tensor) -> Tensor:
        b, n, c = query.shape
        where = query + query_pos
        q = self.q_proj(where).view(b, n, self.heads, c // self.heads)  # (B, Q, H, D)
        k = self.k_proj(where).view(b, n, self.heads, c // self.heads)
        v = self.v_proj(query).view(b, n, self.heads, c // self.heads)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(c // self.heads)  # (B, H, Q, Q)
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v)  # (B, Q, H, D)
        return self.output_proj(mixed.reshape(b, n, c))


class CameraAttention(nn.Module):
    """Reads the images where the queries' points appear in them (the paper's section 3.2).

    Shape:
        query, query_pos (B, Q, C), reference_points (B, Q, 3), features L of (B, cams, C, H, W),
        lidar2img (B, cams, 4, 4) -> (B, Q, C), with the residual.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        samples = config.cameras * config.points * len(config.levels)
        self.attention_weights = nn.Linear(config.dim, samples)
        self.output_proj = nn.Linear(config.dim, config.dim)
        self.position_encoder = nn.Sequential(
            nn.Linear(3, config.dim),
            nn.LayerNorm(config.dim),
            nn.ReLU(),
            nn.Linear(config.dim, config.dim),
            nn.LayerNorm(config.dim),
            nn.ReLU(),
        )

    def sample(self, features: list[Tensor], reference_points: Tensor, lidar2img: Tensor) -> tuple[Tensor, Tensor]:
        """The features under every point, (B, C, Q, cams, 1, L), and where they count, (B, 1, Q, cams, 1, 1)."""
        config = self.config
        uv, valid = project(
            reference_points,
            lidar2img,
            image_size=config.image_size,
            pc_range=config.pc_range,
            depth_eps=config.depth_eps,
        )
        b, cams, q, _ = uv.shape
        grid = uv.reshape(b * cams, q, 1, 2)
        sampled = []
        for feature in features:
            level = F.grid_sample(feature.flatten(0, 1), grid, padding_mode="zeros", align_corners=False)
            sampled.append(level.view(b, cams, -1, q, 1).permute(0, 2, 3, 1, 4))  # (B, C, Q, cams, 1)
        valid = valid.permute(0, 3, 2, 1)[..., None, None]
        return torch.stack(sampled, dim=-1), valid

    def forward(
        self, query: Tensor, query_pos: Tensor, reference_points: Tensor, features: list[Tensor], lidar2img: Tensor
    ) -> Tensor:
        b, q, _ = query.shape
        weights = self.attention_weights(query + query_pos)
        weights = weights.view(b, 1, q, self.config.cameras, self.config.points, len(self.config.levels)).sigmoid()
        sampled, valid = self.sample(features, reference_points, lidar2img)
        weights = weights * valid.to(weights.dtype)
        # weight 0 does not stop the NaN of a camera that is dead or has no calibration
        output = torch.nan_to_num(sampled) * weights  # (B, C, Q, cams, points, L)
        output = output.sum(-1).sum(-1).sum(-1).permute(0, 2, 1)  # (B, Q, C)
        return self.output_proj(output) + query + self.position_encoder(inverse_sigmoid(reference_points))


class DecoderLayer(nn.Module):
    """Self attention, camera attention, feed forward, each followed by its norm; then the box branch."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        dim = config.dim
        self.mha = SelfAttention(dim, config.heads)
        self.mha_norm = nn.LayerNorm(dim)
        self.svca = CameraAttention(config)
        self.svca_norm = nn.LayerNorm(dim)
        self.ffn = nn.Sequential(nn.Linear(dim, config.ffn), nn.ReLU(), nn.Linear(config.ffn, dim))
        self.ffn_norm = nn.LayerNorm(dim)
        self.reg = nn.Sequential(
            nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, config.box_size)
        )

    def forward(
        self, query: Tensor, query_pos: Tensor, reference_points: Tensor, features: list[Tensor], lidar2img: Tensor
    ) -> tuple[Tensor, Tensor]:
        query = self.mha_norm(query + self.mha(query, query_pos))
        query = self.svca_norm(self.svca(query, query_pos, reference_points, features, lidar2img))
        query = self.ffn_norm(query + self.ffn(query))
        return query, self.reg(query)


def update(reference_points: Tensor, reg: Tensor) -> Tensor:
    """Moves the points by the centre offsets (cx, cy, cz) of the box branch: (B, Q, 3), (B, Q, 10) -> (B, Q, 3)."""
    offset = torch.cat((reg[..., 0:2], reg[..., 4:5]), dim=-1)
    return torch.sigmoid(offset + inverse_sigmoid(reference_points))


class DETR3D(nn.Module):
    """The head of DETR3D, from feature maps to boxes.

    Returns the last layer's answer; the losses on the layers before are the training loop's affair.

    Shape:
        features L of (B, cams, C, H, W), lidar2img (B, cams, 4, 4) -> a dict of
        classes (B, Q, classes), scores before sigmoid; boxes (B, Q, 10), centres in metres, sizes as logarithms;
        reference_points (B, Q, 3), the centres in [0, 1] of the range.
    """

    example_inputs: tuple[list[Tensor], Tensor]

    def __init__(self, config: Config = CONFIGS["detr3d"]) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        self.query_embedding = nn.Embedding(config.queries, 2 * dim)  # position and content
        self.reference_points = nn.Linear(dim, 3)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.cls = nn.Sequential(
            nn.Linear(dim, dim),
            nn.LayerNorm(dim),
            nn.ReLU(),
            nn.Linear(dim, dim),
            nn.LayerNorm(dim),
            nn.ReLU(),
            nn.Linear(dim, config.classes),
        )

    def queries(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """What the decoder starts from: query and query_pos (B, Q, C), reference_points (B, Q, 3)."""
        query_pos, query = self.query_embedding.weight.expand(batch, -1, -1).chunk(2, dim=-1)
        return query, query_pos, self.reference_points(query_pos).sigmoid()

    def forward(self, features: list[Tensor], lidar2img: Tensor) -> dict[str, Tensor]:
        query, query_pos, reference_points = self.queries(lidar2img.shape[0])
        for layer in self.layers:
            query, reg = layer(query, query_pos, reference_points, features, lidar2img)
            reference_points = update(reference_points, reg)

        low, high = reference_points.new_tensor(self.config.pc_range).split(3)
        centre = reference_points * (high - low) + low
        boxes = torch.cat((centre[..., 0:2], reg[..., 2:4], centre[..., 2:3], reg[..., 5:]), dim=-1)
        return {"classes": self.cls(query), "boxes": boxes, "reference_points": reference_points}


# --------------------------------------------------------------------------------------------------------- example


def example_inputs(config: Config, batch: int = 1, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Made-up feature maps, smooth over the image with a little texture, and the surround rig."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch * config.cameras, config.dim)
    features = []
    for size in config.levels:
        smooth = F.interpolate(torch.randn(*shape, 12, 20, generator=generator), size, mode="bilinear")
        feature = smooth + 0.05 * torch.randn(*shape, *size, generator=generator)
        features.append(feature.unflatten(0, (batch, config.cameras)))  # (B, cams, C, H, W)
    rig = torch.stack(list(surround_cameras(config.image_size).values())[: config.cameras])
    return features, rig.expand(batch, -1, -1, -1).contiguous()


@torch.no_grad()
def _as_if_trained(net: DETR3D) -> None:
    """Brings the fresh network to where training would: points spread around the car, small steps, worked-in norms.

    Without it the norms' ones and zeros would hide an export that drops them; and points inside the car, whose
    projections are wild, would answer their wild features by steps so large that rounding alone grows tenfold a layer.
    """
    config = net.config
    for module in net.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.7, 1.3)
            nn.init.uniform_(module.bias, -0.3, 0.3)
    for name, weight in net.named_parameters():
        if name.endswith("reg.4.weight"):
            weight[[0, 1, 4]] *= 0.05

    low, high = torch.tensor(config.pc_range).split(3)
    angle, radius, height = torch.rand(3, config.queries)
    angle, radius = 2 * math.pi * angle, 6 + 44 * radius  # metres from the LiDAR, which no camera is far from
    points = torch.stack((radius * angle.cos(), radius * angle.sin(), 7 * height - 4.5), dim=-1)  # (Q, 3)
    start = (points - low) / (high - low)
    query_pos = net.query_embedding.weight[:, : config.dim]
    missing = inverse_sigmoid(start) - net.reference_points(query_pos)
    query_pos += missing @ torch.linalg.pinv(net.reference_points.weight).T  # the least change that starts them there


QUICK = {"config": "small"}
"""Arguments of :func:`model` for a quick try."""


def model(config: str = "detr3d", *, batch: int = 1, seed: int = 0, **overrides: Any) -> DETR3D:
    """The head in evaluation mode, with ``example_inputs``: features and the surround rig.

    ``config`` names one of :data:`CONFIGS` and ``overrides`` replace its fields. The same arguments give the same
    weights, and the caller's random state is left alone.
    """
    sizes = replace(CONFIGS[config], **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = DETR3D(sizes)
        _as_if_trained(net)
    net.example_inputs = example_inputs(sizes, batch, seed)
    return net.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Show a DETR3D head and export it with svexport.")
    parser.add_argument("--config", choices=CONFIGS, default="detr3d")
    parser.add_argument("--opset", type=int, default=11)
    parser.add_argument("--output", default="detr3d.onnx", metavar="FILE")
    options = parser.parse_args()

    net = model(options.config)
    sizes = net.config
    features, lidar2img = net.example_inputs
    with torch.no_grad():
        start = time.perf_counter()
        result = net(features, lidar2img)
        seconds = time.perf_counter() - start
        *_, points = net.queries(1)
        _, valid = project(points, lidar2img, image_size=sizes.image_size, pc_range=sizes.pc_range)
    print(f"DETR3D, {options.config}: {sum(p.numel() for p in net.parameters()) / 1e6:.2f} M parameters")
    seen = valid.any(dim=1).float().mean()
    print(f"  {sizes.queries} queries, {sizes.layers} layers; {seen:.0%} of the queries start in some image")
    for feature in features:
        print(f"  input   {tuple(feature.shape)} = (batch, cameras, channels, height, width)")
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
