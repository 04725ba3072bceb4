"""From cameras to a bird's-eye view: lifting, sampling, frustum positions, memories of earlier frames."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exporter.zoo import entry


def cameras(batch: int, count: int = 2) -> Tensor:
    """Projections (B, N, 4, 4) of points in front of the cameras to pixels."""
    matrices = torch.eye(4).repeat(batch, count, 1, 1)
    matrices[..., :3, :] += 0.3 * torch.randn(batch, count, 3, 4)
    return matrices


class QuickCumsum(torch.autograd.Function):
    """LSS's: sums of equal ranks as differences of one cumulative sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, ranks: Tensor) -> tuple[Tensor, Tensor]:
        x = x.cumsum(0)
        kept = torch.ones(x.shape[0], device=x.device, dtype=torch.bool)
        kept[:-1] = ranks[1:] != ranks[:-1]
        x, places = x[kept], places[kept]
        x = torch.cat((x[:1], x[1:] - x[:-1]))
        ctx.save_for_backward(kept)
        ctx.mark_non_differentiable(places)
        return x, places

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        back = torch.cumsum(kept, 0)
        back[kept] -= 1
        return grad[back], None, None


class _Lift(nn.Module):
    """What both kinds of LSS share: a frustum of depths, and its points in the ego frame by rotation and intrinsics."""

    def __init__(self) -> None:
        super().__init__()
        self.depth_channels, self.channels = 4, 3
        self.net = nn.Conv2d(6, 4 + 3, 1)
        self.frustum = nn.Parameter(self.make_frustum(), requires_grad=False)
        self.dx = nn.Parameter(torch.tensor([1.0, 1.0, 20.0]), requires_grad=False)
        self.bx = nn.Parameter(torch.tensor([-3.5, -2.5, 0.0]), requires_grad=False)
        self.nx = nn.Parameter(torch.tensor([8, 6, 1], dtype=torch.long), requires_grad=False)

    @staticmethod
    def make_frustum() -> Tensor:
        ds = torch.arange(*(1.0, 5.0, 1.0), dtype=torch.float).view(-1, 1, 1).expand(-1, 3, 4)
        xs = torch.linspace(0, 3, 4, dtype=torch.float).view(1, 1, 4).expand(4, 3, 4)
        ys = torch.linspace(0, 2, 3, dtype=torch.float).view(1, 3, 1).expand(4, 3, 4)
        return torch.stack((xs, ys, ds), -1)

    def geometry(self, rots: Tensor, trans: Tensor, intrins: Tensor) -> Tensor:
        batch, count, _ = trans.shape
        points = self.frustum.view(1, 1, *self.frustum.shape).expand(batch, count, -1, -1, -1, -1).unsqueeze(-1)
        points = torch.cat((points[..., :2, :] * points[..., 2:3, :], points[..., 2:3, :]), 5)
        combine = rots.matmul(torch.inverse(intrins))
        points = combine.view(batch, count, 1, 1, 1, 3, 3).matmul(points).squeeze(-1)
        points += trans.view(batch, count, 1, 1, 1, 3)
        return points

    def lifted(self, x: Tensor) -> Tensor:
        batch, count, channels, height, width = x.shape
        x = self.net(x.view(batch * count, channels, height, width))
        depth = x[:, : self.depth_channels].softmax(dim=1)
        x = depth.unsqueeze(1) * x[:, self.depth_channels : self.depth_channels + self.channels].unsqueeze(2)
        return x.view(batch, count, self.channels, self.depth_channels, height, width).permute(0, 1, 3, 4, 5, 2)


def rig(batch: int) -> tuple[Tensor, ...]:
    intrins = torch.eye(3).repeat(batch, 2, 1, 1) * torch.tensor([1.5, 1.2, 1.0]) + 0.1 * torch.randn(batch, 2, 3, 3)
    rots = torch.linalg.qr(torch.randn(batch, 2, 3, 3))[0]
    return torch.randn(batch, 2, 6, 3, 4), rots, torch.randn(batch, 2, 3), intrins


@entry(rig, dynamic=False, scales=(-1.0,))
class LiftSplatCumsum(_Lift):
    """Splat by sorting ranks and the cumulative sum trick."""

    def forward(self, x: Tensor, rots: Tensor, trans: Tensor, intrins: Tensor) -> Tensor:
        geometry, x = self.geometry(rots, trans, intrins), self.lifted(x)
        batch, count, depth, height, width, channels = x.shape
        number = batch * count * depth * height * width
        x = x.reshape(number, channels)
        places = ((geometry - (self.bx - self.dx / 2.0)) / self.dx).long().view(number, 3)
        of = torch.cat([torch.full([number // batch, 1], i, device=x.device, dtype=torch.long) for i in range(batch)])
        places = torch.cat((places, of), 1)
        kept = (
            (places[:, 0] >= 0)
            & (places[:, 0] < self.nx[0])
            & (places[:, 1] >= 0)
            & (places[:, 1] < self.nx[1])
            & (places[:, 2] >= 0)
            & (places[:, 2] < self.nx[2])
        )
        x, places = x[kept], places[kept]
        ranks = (
            places[:, 0] * (self.nx[1] * self.nx[2] * batch)
            + places[:, 1] * (self.nx[2] * batch)
            + places[:, 2] * batch
            + places[:, 3]
        )
        sorts = ranks.argsort()
        x, places, ranks = x[sorts], places[sorts], ranks[sorts]
        x, places = QuickCumsum.apply(x, places, ranks)
        final = torch.zeros((batch, channels, self.nx[2], self.nx[0], self.nx[1]), device=x.device)
        final[places[:, 3], :, places[:, 2], places[:, 0], places[:, 1]] = x
        return torch.cat(final.unbind(dim=2), 1)


@entry(rig, scales=(-1.0, 0.5))
class LiftSplatIndexAdd(_Lift):
    """Splat by index_add_, what is outside multiplied with zero and sent to the first cell."""

    def forward(self, x: Tensor, rots: Tensor, trans: Tensor, intrins: Tensor) -> Tensor:
        geometry, x = self.geometry(rots, trans, intrins), self.lifted(x)
        batch, channels = x.shape[0], x.shape[-1]
        x = x.reshape(batch, -1, channels)
        places = torch.floor((geometry - (self.bx - self.dx / 2)) / self.dx).long().view(batch, -1, 3)
        inside = ((places >= 0) & (places < self.nx)).all(-1)
        flat = (places[..., 0] * 6 + places[..., 1]).masked_fill(~inside, 0)
        flat = flat + torch.arange(batch, device=x.device).unsqueeze(1) * 48
        bev = x.new_zeros(batch * 48, channels)
        bev.index_add_(0, flat.flatten(), (x * inside.unsqueeze(-1)).flatten(0, 1))
        return bev.view(batch, 8, 6, channels).permute(0, 3, 1, 2).contiguous()


@entry(
    lambda batch: (torch.randn(batch, 2, 8, 4, 6), torch.randn(batch, 12, 8), cameras(batch)),
    scales=(0.0, -1.0, 3.0),
)
class BEVFormerLayer(nn.Module):
    """Temporal self-attention by deformable sampling, then pillars of reference points seen by some cameras."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets, self.weights = nn.Linear(8, 2 * 4 * 2), nn.Linear(8, 2 * 4)
        self.value, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    @staticmethod
    def reference(height: int, width: int, depth: int, x: Tensor) -> tuple[Tensor, Tensor]:
        zs = (
            torch.linspace(0.5, 4 - 0.5, depth, dtype=x.dtype, device=x.device)
            .view(-1, 1, 1)
            .expand(depth, height, width)
            / 4
        )
        xs = (
            torch.linspace(0.5, width - 0.5, width, device=x.device).view(1, 1, width).expand(depth, height, width)
            / width
        )
        ys = (
            torch.linspace(0.5, height - 0.5, height, device=x.device).view(1, height, 1).expand(depth, height, width)
            / height
        )
        volume = torch.stack((xs, ys, zs), -1).permute(0, 3, 1, 2).flatten(2).permute(0, 2, 1)[None]
        yy, xx = torch.meshgrid(
            torch.linspace(0.5, height - 0.5, height, device=x.device),
            torch.linspace(0.5, width - 0.5, width, device=x.device),
            indexing="ij",
        )
        return volume, torch.stack((xx.reshape(-1)[None] / width, yy.reshape(-1)[None] / height), -1)

    @staticmethod
    def projected(volume: Tensor, lidar2img: Tensor) -> tuple[Tensor, Tensor]:
        volume = volume.repeat(lidar2img.size(0), 1, 1, 1).clone()
        volume[..., 0:1] = volume[..., 0:1] * 4 - 2
        volume[..., 1:2] = volume[..., 1:2] * 4 - 2
        points = torch.cat((volume, torch.ones_like(volume[..., :1])), -1).permute(1, 0, 2, 3)
        depth, batch, queries = points.size()[:3]
        count = lidar2img.size(1)
        points = points.view(depth, batch, 1, queries, 4).repeat(1, 1, count, 1, 1).unsqueeze(-1)
        matrices = lidar2img.view(1, batch, count, 1, 4, 4).repeat(depth, 1, 1, queries, 1, 1)
        seen = torch.matmul(matrices.to(torch.float32), points.to(torch.float32)).squeeze(-1)
        eps = 1e-5
        mask = seen[..., 2:3] > eps
        seen = seen[..., 0:2] / torch.maximum(seen[..., 2:3], torch.ones_like(seen[..., 2:3]) * eps)
        mask = mask & (seen[..., 1:2] > 0.0) & (seen[..., 1:2] < 1.0) & (seen[..., 0:1] < 1.0) & (seen[..., 0:1] > 0.0)
        mask = torch.nan_to_num(mask)
        return seen.permute(2, 1, 3, 0, 4), mask.permute(2, 1, 3, 0, 4).squeeze(-1)

    def forward(self, features: Tensor, query: Tensor, lidar2img: Tensor) -> Tensor:
        volume, plane = self.reference(3, 4, 2, query)
        seen, mask = self.projected(volume, lidar2img)
        batch, count, channels, _height, _width = features.shape
        value = self.value(query).view(batch, 3, 4, 2, 4).permute(0, 3, 4, 1, 2).flatten(0, 1)
        offsets = self.offsets(query).view(batch, 12, 2, 4, 2)
        weights = self.weights(query).view(batch, 12, 2, 4).softmax(-1)
        normalizer = torch.tensor([4, 3], dtype=query.dtype, device=query.device)
        locations = plane[:, :, None, None, :] + offsets / normalizer
        grid = (2 * locations - 1).transpose(1, 2).flatten(0, 1)
        sampled = F.grid_sample(value, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        sampled = (sampled * weights.transpose(1, 2).reshape(batch * 2, 1, 12, 4)).sum(-1)
        query = query + self.out(sampled.view(batch, 8, 12).transpose(1, 2).contiguous())
        grid = (seen * 2 - 1).transpose(0, 1).flatten(0, 1)
        cross = F.grid_sample(features.flatten(0, 1), grid, align_corners=False)
        cross = cross.view(batch, count, channels, 12, 2) * mask.transpose(0, 1).unsqueeze(2)
        hits = (mask.sum(-1) > 0).permute(1, 2, 0).sum(-1).clamp(min=1.0)
        cross = cross.sum(-1).sum(1).transpose(1, 2) / hits[..., None]
        return self.norm(query + cross)


def inverse_sigmoid(x: Tensor, eps: float = 1e-5) -> Tensor:
    x = x.clamp(min=0, max=1)
    return torch.log(x.clamp(min=eps) / (1 - x).clamp(min=eps))


def sine_positions(positions: Tensor, features: int = 4, temperature: int = 10000) -> Tensor:
    """PETR's pos2posemb3d."""
    positions = positions * (2 * math.pi)
    dim = torch.arange(features, dtype=torch.float32, device=positions.device)
    dim = temperature ** (2 * torch.div(dim, 2, rounding_mode="floor") / features)
    parts = [positions[..., i, None] / dim for i in (1, 0, 2)]
    parts = [torch.stack((p[..., 0::2].sin(), p[..., 1::2].cos()), dim=-1).flatten(-2) for p in parts]
    return torch.cat(parts, dim=-1)


@entry(
    lambda batch: (torch.randn(batch, 2, 8, 3, 4), cameras(batch), torch.rand(batch, 2, 12, 16) > 0.3), scales=(-1.0,)
)
class PETRHead(nn.Module):
    """Position embedding by frustum: pixels and depths in 3D by inverse projections; queries attend to all."""

    def __init__(self) -> None:
        super().__init__()
        self.input_proj = nn.Conv2d(8, 8, 1)
        self.encoder = nn.Sequential(nn.Conv2d(12, 16, 1), nn.ReLU(), nn.Conv2d(16, 8, 1))
        self.reference_points = nn.Embedding(5, 3)
        nn.init.uniform_(self.reference_points.weight, 0, 1)
        self.query_embedding = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 8))
        self.attention = nn.MultiheadAttention(8, 2)
        self.reg = nn.Linear(8, 6)

    def embedding(self, x: Tensor, lidar2img: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        eps = 1e-5
        batch, count, _, height, width = x.shape
        hs = torch.arange(height, device=x.device).float() * 12 / height
        ws = torch.arange(width, device=x.device).float() * 16 / width
        index = torch.arange(0, 4, step=1, device=x.device).float()
        ds = 1.0 + (index * (index + 1)) * (60.0 - 1.0) / (4 * 5)
        coords = torch.stack(torch.meshgrid([ws, hs, ds], indexing="ij")).permute(1, 2, 3, 0)
        coords = torch.cat((coords, torch.ones_like(coords[..., :1])), -1)
        coords[..., :2] = coords[..., :2] * torch.maximum(coords[..., 2:3], torch.ones_like(coords[..., 2:3]) * eps)
        img2lidar = torch.inverse(lidar2img)
        coords = coords.view(1, 1, width, height, 4, 4, 1).repeat(batch, count, 1, 1, 1, 1, 1)
        img2lidar = img2lidar.view(batch, count, 1, 1, 1, 4, 4).repeat(1, 1, width, height, 4, 1, 1)
        points = torch.matmul(img2lidar, coords).squeeze(-1)[..., :3]
        points = (points + 61.2) / 122.4
        mask = (points > 1.0) | (points < 0.0)
        mask = mask.flatten(-2).sum(-1) > (4 * 0.5)
        mask = masks | mask.permute(0, 1, 3, 2)
        points = points.permute(0, 1, 4, 5, 3, 2).contiguous().view(batch * count, -1, height, width)
        return self.encoder(inverse_sigmoid(points)).view(batch, count, 8, height, width), mask

    def forward(self, features: Tensor, lidar2img: Tensor, pad: Tensor) -> Tensor:
        batch, count = features.shape[:2]
        masks = F.interpolate(pad.float(), size=features.shape[-2:]).to(torch.bool)
        x = self.input_proj(features.flatten(0, 1)).view(batch, count, 8, *features.shape[-2:])
        pos, mask = self.embedding(features, lidar2img, masks)
        mask[:, :, 0, 0] = False
        memory, pos = (t.permute(1, 3, 4, 0, 2).reshape(-1, batch, 8) for t in (x, pos))
        reference = self.reference_points.weight.unsqueeze(0).repeat(batch, 1, 1)
        query = self.query_embedding(sine_positions(reference)).transpose(0, 1)
        out = self.attention(query, memory + pos, memory, key_padding_mask=mask.flatten(1))[0]
        boxes = self.reg(torch.nan_to_num(out.transpose(0, 1)))
        boxes[..., :3] += inverse_sigmoid(reference)
        boxes[..., :3] = boxes[..., :3].sigmoid()
        return boxes


@entry(
    lambda batch: (
        torch.randn(batch, 5, 8),
        torch.randn(batch, 6, 8),
        torch.rand(batch, 6, 3),
        torch.linalg.qr(torch.randn(batch, 4, 4))[0],
        torch.randint(0, 2, (batch,)).float(),
    ),
    scales=(-1.0, 3.0),
)
class StreamMemory(nn.Module):
    """StreamPETR's queue: earlier queries moved by the ego motion, dropped at a new scene, the best pushed in front."""

    def __init__(self) -> None:
        super().__init__()
        self.cls = nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.pseudo = nn.Embedding(2, 3)

    def forward(
        self, query: Tensor, memory: Tensor, points: Tensor, ego: Tensor, prev_exists: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        points = torch.cat([points, torch.ones_like(points[..., 0:1])], dim=-1)
        points = (ego.unsqueeze(1) @ points.unsqueeze(-1)).squeeze(-1)[..., :3]
        memory = memory[:, :6] * prev_exists.view(-1, 1, 1)
        points = points[:, :6] * prev_exists.view(-1, 1, 1)
        pseudo = self.pseudo.weight.unsqueeze(0) * 2 - 1
        points[:, :2] = points[:, :2] + (1 - prev_exists).view(-1, 1, 1) * pseudo
        out = query + self.attention(query, torch.cat([query, memory], 1), torch.cat([query, memory], 1))[0]
        score = self.cls(out).sigmoid().topk(1, dim=-1).values[..., 0:1]
        _, best = torch.topk(score, 2, dim=1)
        kept = torch.gather(out, 1, best.repeat(1, 1, out.shape[-1]))
        kept_points = torch.gather(points, 1, best.repeat(1, 1, 3))
        memory = torch.cat([kept, memory], dim=1)[:, :6]
        return out, memory, torch.cat([kept_points, points], dim=1)[:, :6]


@entry(
    lambda batch: (torch.randn(batch, 2, 8, 6, 8), torch.randn(batch, 2, 8, 3, 4), cameras(batch)),
    scales=(0.0, -1.0),
)
class DETR3D(nn.Module):
    """Feature sampling of reference points in all cameras and levels, with refinement."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Embedding(5, 16)
        self.reference = nn.Linear(8, 3)
        self.weights = nn.Linear(8, 2 * 2)
        self.reg = nn.Linear(8, 10)
        self.pc_range = [-2.0, -2.0, -1.0, 2.0, 2.0, 3.0]

    def sample(self, features: tuple[Tensor, ...], reference: Tensor, lidar2img: Tensor) -> tuple[Tensor, Tensor]:
        reference = reference.clone()
        for i in range(3):
            low, high = self.pc_range[i], self.pc_range[i + 3]
            reference[..., i : i + 1] = reference[..., i : i + 1] * (high - low) + low
        reference = torch.cat((reference, torch.ones_like(reference[..., :1])), -1)
        batch, queries = reference.size()[:2]
        count = lidar2img.size(1)
        points = reference.view(batch, 1, queries, 4).repeat(1, count, 1, 1).unsqueeze(-1)
        matrices = lidar2img.view(batch, count, 1, 4, 4).repeat(1, 1, queries, 1, 1)
        seen = torch.matmul(matrices, points).squeeze(-1)
        eps = 1e-5
        mask = seen[..., 2:3] > eps
        seen = seen[..., 0:2] / torch.maximum(seen[..., 2:3], torch.ones_like(seen[..., 2:3]) * eps)
        seen[..., 0] /= 2.0
        seen[..., 1] /= 1.5
        seen = (seen - 0.5) * 2
        mask = (
            mask & (seen[..., 0:1] > -1.0) & (seen[..., 0:1] < 1.0) & (seen[..., 1:2] > -1.0) & (seen[..., 1:2] < 1.0)
        )
        mask = mask.view(batch, count, 1, queries, 1, 1).permute(0, 2, 3, 1, 4, 5)
        mask = torch.nan_to_num(mask)
        sampled = []
        for feature in features:
            height, width = feature.shape[-2:]
            grid = seen.view(batch * count, queries, 1, 2)
            out = F.grid_sample(feature.view(batch * count, 8, height, width), grid)
            sampled.append(out.view(batch, count, 8, queries, 1).permute(0, 2, 3, 1, 4))
        return torch.stack(sampled, -1).view(batch, 8, queries, count, 1, len(features)), mask

    def forward(self, p3: Tensor, p4: Tensor, lidar2img: Tensor) -> tuple[Tensor, Tensor]:
        batch = p3.shape[0]
        pos, query = torch.split(self.query.weight, 8, dim=1)
        pos, query = pos.unsqueeze(0).expand(batch, -1, -1), query.unsqueeze(0).expand(batch, -1, -1)
        reference = self.reference(pos).sigmoid()
        for _ in range(2):
            weights = self.weights(query + pos).view(batch, 1, 5, 2, 1, 2)
            out, mask = self.sample((p3, p4), reference, lidar2img)
            out = (torch.nan_to_num(out) * weights.sigmoid() * mask).sum(-1).sum(-1).sum(-1)
            query = query + out.permute(0, 2, 1)
            tmp = self.reg(query)
            refined = torch.zeros_like(reference)
            refined[..., :2] = tmp[..., :2] + inverse_sigmoid(reference[..., :2])
            refined[..., 2:3] = tmp[..., 4:5] + inverse_sigmoid(reference[..., 2:3])
            reference = refined.sigmoid().detach()
        return query, reference


@entry(lambda batch: (torch.randn(batch, 8, 5, 6),), scales=(-1.0, 3.0))
class TransFusion(nn.Module):
    """Queries from peaks of a heatmap, pooled but for small classes; category embedding by one hot."""

    def __init__(self) -> None:
        super().__init__()
        self.heatmap = nn.Conv2d(8, 3, 3, padding=1)
        self.class_encoding = nn.Conv1d(3, 8, 1)
        self.attention = nn.MultiheadAttention(8, 2)
        x, y = torch.meshgrid(torch.linspace(0, 4, 5), torch.linspace(0, 5, 6), indexing="ij")
        self.bev_pos = torch.cat([x[None] + 0.5, y[None] + 0.5], dim=0)[None].view(1, 2, -1).permute(0, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        batch = x.shape[0]
        flat = x.view(batch, 8, -1)
        bev_pos = self.bev_pos.repeat(batch, 1, 1).to(x.device)
        heatmap = self.heatmap(x).detach().sigmoid()
        local = torch.zeros_like(heatmap)
        local[:, :, 1:-1, 1:-1] = F.max_pool2d(heatmap, kernel_size=3, stride=1, padding=0)
        local[:, 2] = F.max_pool2d(heatmap[:, 2], kernel_size=1, stride=1, padding=0)
        heatmap = (heatmap * (heatmap == local)).view(batch, 3, -1)
        top = heatmap.view(batch, -1).topk(dim=-1, k=4, largest=True, sorted=True)[1]
        classes, places = top // heatmap.shape[-1], top % heatmap.shape[-1]
        query = flat.gather(index=places[:, None, :].expand(-1, flat.shape[1], -1), dim=-1)
        one_hot = F.one_hot(classes, num_classes=3).permute(0, 2, 1)
        query = query + self.class_encoding(one_hot.float())
        pos = bev_pos.gather(index=places[:, None, :].permute(0, 2, 1).expand(-1, -1, 2), dim=1)
        out = self.attention(query.permute(2, 0, 1), flat.permute(2, 0, 1), flat.permute(2, 0, 1))[0]
        score = heatmap.gather(index=places[:, None, :].expand(-1, 3, -1), dim=-1)
        return out.permute(1, 2, 0), pos, score * one_hot, classes


@entry(lambda batch: (torch.randn(batch, 12, 8),), scales=(0.0, -1.0, 30.0))
class MapTRHead(nn.Module):
    """Hierarchical queries, instance plus point; boxes from the extent of the points; both directions of a line."""

    def __init__(self) -> None:
        super().__init__()
        self.instance, self.point = nn.Embedding(3, 16), nn.Embedding(4, 16)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.cls, self.reg = nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, bev: Tensor) -> dict[str, Tensor]:
        pts = self.point.weight.unsqueeze(0)
        ins = self.instance.weight.unsqueeze(1)
        pos, query = torch.split((pts + ins).flatten(0, 1), 8, dim=1)
        query = query.unsqueeze(0).expand(bev.size(0), -1, -1) + pos
        mask = torch.zeros([12, 12], dtype=torch.bool, device=bev.device)
        mask[4:, :4] = True
        query = query + self.attention(query, query, query, attn_mask=mask)[0]
        query = query + self.attention(query, bev, bev)[0]
        cls = self.cls(query.view(bev.size(0), 3, 4, -1).mean(2))
        points = self.reg(query).sigmoid().view(bev.size(0), 3, 4, 2)
        xs, ys = points[..., 0], points[..., 1]
        box = torch.stack(
            [xs.min(2, keepdim=True)[0], ys.min(2, keepdim=True)[0], xs.max(2)[0][..., None], ys.max(2)[0][..., None]],
            2,
        )
        return {"scores": cls, "points": points, "boxes": box.squeeze(-1), "reversed": torch.flip(points, [2])}
