"""Points, pillars and voxels: encoders, scatters, neighbours and heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exporter.zoo import entry


def indexed(points: Tensor, places: Tensor) -> Tensor:
    """Rows of points (B, N, C) at places (B, ...), as PointNet++'s index_points."""
    batch = places.shape[0]
    view = [batch] + [1] * (places.dim() - 1)
    repeat = [1, *places.shape[1:]]
    batches = torch.arange(batch, dtype=torch.long, device=points.device).view(view).repeat(repeat)
    return points[batches, places, :]


def square_distance(a: Tensor, b: Tensor) -> Tensor:
    distance = -2 * torch.matmul(a, b.permute(0, 2, 1))
    distance += torch.sum(a**2, -1).view(a.shape[0], a.shape[1], 1)
    distance += torch.sum(b**2, -1).view(b.shape[0], 1, b.shape[1])
    return distance


def pillars(batch: int) -> tuple[Tensor, ...]:
    """Points (P, 5, 4), how many of each are real, and distinct cells (P, 4) of batch, z, y and x."""
    count = 6
    cells = torch.stack([torch.randperm(8 * 6)[:count] for _ in range(batch)])
    rows = torch.arange(batch).repeat_interleave(count)
    coords = torch.stack([rows, torch.zeros_like(rows), cells.flatten() // 8, cells.flatten() % 8], 1)
    return torch.randn(batch * count, 5, 4), torch.randint(1, 6, (batch * count,)), coords


@entry(lambda batch: pillars(1))
class PointPillars(nn.Module):
    """Decorated points, a masked max over each pillar, and the scatter into one canvas."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(9, 6, bias=False)
        self.norm = nn.BatchNorm1d(6, eps=1e-3, momentum=0.01)
        self.conv = nn.Conv2d(6, 4, 3, padding=1)

    def forward(self, voxels: Tensor, num_points: Tensor, coords: Tensor) -> Tensor:
        mean = voxels[:, :, :3].sum(dim=1, keepdim=True) / num_points.type_as(voxels).view(-1, 1, 1)
        cluster = voxels[:, :, :3] - mean
        center = torch.zeros_like(voxels[:, :, :2])
        center[:, :, 0] = voxels[:, :, 0] - (coords[:, 3].to(voxels.dtype).unsqueeze(1) * 0.2 + 0.1)
        center[:, :, 1] = voxels[:, :, 1] - (coords[:, 2].to(voxels.dtype).unsqueeze(1) * 0.2 + 0.1)
        features = torch.cat([voxels, cluster, center], dim=-1)
        mask = torch.arange(voxels.shape[1], device=voxels.device).view(1, -1) < num_points.view(-1, 1)
        features *= mask.unsqueeze(-1).type_as(voxels)
        x = F.relu(self.norm(self.linear(features).permute(0, 2, 1).contiguous()).permute(0, 2, 1))
        x = torch.max(x, dim=1, keepdim=True)[0].squeeze(1)
        canvas = torch.zeros(6, 6 * 8, dtype=x.dtype, device=x.device)
        canvas[:, coords[:, 2] * 8 + coords[:, 3]] = x.t()
        return self.conv(canvas.view(1, 6, 6, 8))


@entry(lambda batch: pillars(2), dynamic=False, refused=r"\.item\(\)")
class PointPillarsPerSample(nn.Module):
    """The scatter of OpenPCDet: how many samples is the largest index, and a loop over them."""

    def forward(self, voxels: Tensor, num_points: Tensor, coords: Tensor) -> Tensor:
        x = voxels.sum(1) / num_points.view(-1, 1)
        canvases = []
        for i in range(int(coords[:, 0].max().item()) + 1):
            canvas = torch.zeros(4, 48, dtype=x.dtype, device=x.device)
            mask = coords[:, 0] == i
            these = coords[mask]
            canvas[:, (these[:, 2] * 8 + these[:, 3]).long()] = x[mask].t()
            canvases.append(canvas)
        return torch.stack(canvases, 0).view(-1, 4, 6, 8)


@entry(lambda batch: (torch.randn(batch, 5, 4), torch.randint(0, 6, (batch,))))
class VoxelEncoder(nn.Module):
    """VoxelNet's VFE: point-wise features beside the maximum of their voxel, masked by what is no point."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(12, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, voxels: Tensor, num_points: Tensor) -> Tensor:
        steps = torch.arange(voxels.size(1), dtype=torch.int, device=voxels.device)
        mask = (num_points.unsqueeze(1).int() > steps.view(1, -1)).unsqueeze(-1).to(voxels)
        x = F.relu(self.norm(self.first(voxels).transpose(1, 2)).transpose(1, 2))
        pooled = x.max(dim=1, keepdim=True)[0].repeat(1, voxels.shape[1], 1)
        x = torch.cat([x, pooled], dim=2) * mask
        return torch.max(self.second(x), 1)[0]


@entry(lambda batch: (torch.randn(batch, 4, 6, 8),), scales=(-1.0, 2.0))
class CenterHead(nn.Module):
    """CenterPoint: shared convolution, a head per attribute, peaks by max-pooling, top k per class and over all."""

    HEADS = (("heatmap", 3), ("reg", 2), ("height", 1), ("dim", 3), ("rot", 2))

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.heads = nn.ModuleDict({name: nn.Conv2d(8, size, 3, padding=1) for name, size in self.HEADS})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.shared(x)
        out = {name: head(x) for name, head in self.heads.items()}
        heat = torch.clamp(out["heatmap"].sigmoid_(), min=1e-4, max=1 - 1e-4)
        heat = heat * (F.max_pool2d(heat, 3, stride=1, padding=1) == heat).float()
        batch, classes, _height, width = heat.size()
        scores, places = torch.topk(heat.view(batch, classes, -1), 5)
        score, place = torch.topk(scores.view(batch, -1), 5)
        labels = (place / 5).int()
        places = places.view(batch, -1, 1).gather(1, place.unsqueeze(-1)).view(batch, 5)
        ys, xs = (places.float() / width).int().float(), (places % width).int().float()

        def take(feature: Tensor) -> Tensor:
            feature = feature.permute(0, 2, 3, 1).contiguous().view(batch, -1, feature.shape[1])
            return feature.gather(1, places.unsqueeze(2).expand(batch, 5, feature.shape[2]))

        reg, rot = take(out["reg"]), take(out["rot"])
        xs = (xs.view(batch, 5, 1) + reg[:, :, 0:1]) * 0.8 - 51.2
        ys = (ys.view(batch, 5, 1) + reg[:, :, 1:2]) * 0.8 - 51.2
        angle = torch.atan2(rot[..., 0:1], rot[..., 1:2])
        boxes = torch.cat([xs, ys, take(out["height"]), take(out["dim"]).clamp(max=5).exp(), angle], dim=2)
        return {"boxes": boxes, "scores": score, "labels": labels}


@entry(lambda batch: (torch.randn(batch, 12, 3), torch.randn(batch, 12, 4)), scales=(-1.0, 3.0))
class SetAbstraction(nn.Module):
    """PointNet++: farthest points, a ball query that repeats the first neighbour, and a shared MLP with max."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Conv2d(7, 8, 1), nn.BatchNorm2d(8), nn.ReLU())

    @staticmethod
    def farthest(xyz: Tensor, count: int) -> Tensor:
        batch, points, _ = xyz.shape
        centroids = torch.zeros(batch, count, dtype=torch.long, device=xyz.device)
        distance = torch.ones(batch, points, device=xyz.device) * 1e10
        farthest = torch.zeros(batch, dtype=torch.long, device=xyz.device)
        rows = torch.arange(batch, dtype=torch.long, device=xyz.device)
        for i in range(count):
            centroids[:, i] = farthest
            centroid = xyz[rows, farthest, :].view(batch, 1, 3)
            dist = torch.sum((xyz - centroid) ** 2, -1)
            mask = dist < distance
            distance[mask] = dist[mask]
            farthest = torch.max(distance, -1)[1]
        return centroids

    @staticmethod
    def ball(radius: float, count: int, xyz: Tensor, centers: Tensor) -> Tensor:
        batch, points, _ = xyz.shape
        number = centers.shape[1]
        places = torch.arange(points, dtype=torch.long, device=xyz.device).view(1, 1, points).repeat([batch, number, 1])
        places[square_distance(centers, xyz) > radius**2] = points
        places = places.sort(dim=-1)[0][:, :, :count]
        first = places[:, :, 0].view(batch, number, 1).repeat([1, 1, count])
        mask = places == points
        places[mask] = first[mask]
        return places

    def forward(self, xyz: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        centers = indexed(xyz, self.farthest(xyz, 4))
        places = self.ball(1.5, 3, xyz, centers)
        grouped = indexed(xyz, places) - centers.view(xyz.shape[0], 4, 1, 3)
        x = torch.cat([grouped, indexed(features, places)], dim=-1).permute(0, 3, 2, 1)
        return centers, torch.max(self.mlp(x), 2)[0]


@entry(lambda batch: (torch.randn(batch, 9, 3), torch.randn(batch, 4, 3), torch.randn(batch, 5, 4)), scales=(-1.0, 3.0))
class FeaturePropagation(nn.Module):
    """PointNet++ the way back: three neighbours weighted by inverse distance."""

    def forward(self, xyz: Tensor, centers: Tensor, features: Tensor) -> Tensor:
        features = features.permute(0, 2, 1)
        dists, places = square_distance(xyz, centers).sort(dim=-1)
        dists, places = dists[:, :, :3], places[:, :, :3]
        recip = 1.0 / (dists.clamp(min=0) + 1e-8)
        weight = recip / torch.sum(recip, dim=2, keepdim=True)
        return torch.sum(indexed(features, places) * weight.view(xyz.shape[0], xyz.shape[1], 3, 1), dim=2)


@entry(lambda batch: (torch.randn(batch, 3, 10),), scales=(-1.0, 30.0))
class DynamicGraph(nn.Module):
    """DGCNN: neighbours by topk of negative distances, flat indices with a base per sample, edges beside centres."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(6, 8, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2))
        self.last = nn.Conv2d(16, 5, 1)

    def edges(self, x: Tensor, k: int = 4) -> Tensor:
        batch, _, count = x.shape
        x = x.view(batch, -1, count)
        inner = -2 * torch.matmul(x.transpose(2, 1), x)
        xx = torch.sum(x**2, dim=1, keepdim=True)
        places = (-xx - inner - xx.transpose(2, 1)).topk(k=k, dim=-1)[1]
        places = places + torch.arange(0, batch, device=x.device).view(-1, 1, 1) * count
        x = x.transpose(2, 1).contiguous()
        neighbours = x.view(batch * count, -1)[places.view(-1), :].view(batch, count, k, x.shape[2])
        x = x.view(batch, count, 1, -1).repeat(1, 1, k, 1)
        return torch.cat((neighbours - x, x), dim=3).permute(0, 3, 1, 2).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.edges(x)).max(dim=-1, keepdim=False)[0]
        x = self.last(self.edges(x)).max(-1)[0]
        return torch.cat([F.adaptive_max_pool1d(x, 1), F.adaptive_avg_pool1d(x, 1)], 1).flatten(1)


@entry(
    lambda batch: (torch.randn(batch, 8, 3), torch.randn(batch, 4, 8, 1), torch.randint(0, 8, (batch, 8, 3))),
)
class RandLA(nn.Module):
    """Local spatial encoding and attentive pooling, of neighbours that are an input."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(10, 4, 1), nn.BatchNorm2d(4, eps=1e-6, momentum=0.99), nn.LeakyReLU(0.2))
        self.score = nn.Linear(8, 8, bias=False)
        self.out = nn.Conv2d(8, 5, 1)

    def forward(self, coords: Tensor, features: Tensor, idx: Tensor) -> Tensor:
        batch, points, k = idx.size()
        extended = idx.unsqueeze(1).expand(batch, 3, points, k)
        center = coords.transpose(-2, -1).unsqueeze(-1).expand(batch, 3, points, k)
        neighbours = torch.gather(center, 2, extended)
        offset = center - neighbours
        distance = torch.norm(offset, dim=1, keepdim=True)
        encoded = self.encode(torch.cat((center, neighbours, offset, distance), dim=-3))
        x = torch.cat((encoded, features.expand(batch, -1, points, k)), dim=-3)
        scores = self.score(x.permute(0, 2, 3, 1)).softmax(dim=-2).permute(0, 3, 1, 2)
        return self.out(torch.sum(scores * x, dim=-1, keepdim=True))


@entry(lambda batch: (torch.randn(batch, 5, 4, 24), torch.rand(batch, 4, 24) > 0.5))
class RangeNet(nn.Module):
    """Strides over the width alone, transposed back, a skip added; what was not measured is masked to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(5, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=0.01), nn.LeakyReLU(0.1))
        self.down = nn.Conv2d(8, 12, 3, stride=[1, 2], dilation=1, padding=1, bias=False)
        self.up = nn.ConvTranspose2d(12, 8, [1, 4], stride=[1, 2], padding=[0, 1])
        self.head = nn.Sequential(nn.Dropout2d(0.01), nn.Conv2d(8, 6, 3, padding=1))
        self.register_buffer("mean", torch.randn(5))
        self.register_buffer("std", torch.rand(5) + 0.5)

    def forward(self, scan: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = (scan - self.mean[None, :, None, None]) / self.std[None, :, None, None]
        x = x * mask.float().unsqueeze(1)
        skip = self.stem(x)
        x = F.leaky_relu(self.up(F.leaky_relu(self.down(skip), 0.1)), 0.1) + skip.detach()
        scores = F.softmax(self.head(x), dim=1)
        labels = scores.argmax(dim=1)
        labels[~mask] = -1
        return scores, labels


@entry(lambda batch: (torch.randn(batch, 8, 5, 6),), scales=(-1.0, 30.0))
class OccupancyHead(nn.Module):
    """Channels to height, as FlashOcc: classes of (B, X, Y, Z) voxels, and the free ones told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.predicter = nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 4 * 5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(x).permute(0, 3, 2, 1)
        batch, dx, dy = x.shape[:3]
        score = self.predicter(x).view(batch, dx, dy, 4, 5).softmax(-1)
        occupied = score.argmax(-1)
        return occupied.to(torch.uint8), (occupied != 4).sum(dim=(1, 2, 3))
