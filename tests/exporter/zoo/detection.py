"""Detection heads that decode in the graph: anchors, distributions, proposals, dynamic filters, lanes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exporter.zoo import entry


def levels(*sizes: tuple[int, int], channels: int = 8):
    return lambda batch: tuple(torch.randn(batch, channels, *size) for size in sizes)


@entry(levels((8, 12), (4, 6)))
class YOLOv5Detect(nn.Module):
    """Grids kept between calls and made anew where the size differs, then xy, wh and scores by slices."""

    def __init__(self) -> None:
        super().__init__()
        self.nc, self.no, self.nl, self.na = 3, 8, 2, 2
        self.grid = [torch.empty(0) for _ in range(self.nl)]
        self.anchor_grid = [torch.empty(0) for _ in range(self.nl)]
        self.stride = torch.tensor([8.0, 16.0])
        self.register_buffer("anchors", torch.tensor([[10, 13, 16, 30], [30, 61, 62, 45]]).float().view(2, -1, 2))
        self.m = nn.ModuleList(nn.Conv2d(8, self.no * self.na, 1) for _ in range(2))

    def forward(self, p3: Tensor, p4: Tensor) -> Tensor:
        x, z = [p3, p4], []
        for i in range(self.nl):
            x[i] = self.m[i](x[i])
            bs, _, ny, nx = x[i].shape
            x[i] = x[i].view(bs, self.na, self.no, ny, nx).permute(0, 1, 3, 4, 2).contiguous()
            if not self.training:
                if self.grid[i].shape[2:4] != x[i].shape[2:4]:
                    self.grid[i], self.anchor_grid[i] = self._make_grid(nx, ny, i)
                xy, wh, conf = x[i].sigmoid().split((2, 2, self.nc + 1), 4)
                xy = (xy * 2 + self.grid[i]) * self.stride[i]
                wh = (wh * 2) ** 2 * self.anchor_grid[i]
                z.append(torch.cat((xy, wh, conf), 4).view(bs, self.na * nx * ny, self.no))
        return torch.cat(z, 1)

    def _make_grid(self, nx: int, ny: int, i: int) -> tuple[Tensor, Tensor]:
        d, t = self.anchors[i].device, self.anchors[i].dtype
        shape = 1, self.na, ny, nx, 2
        yv, xv = torch.meshgrid(torch.arange(ny, device=d, dtype=t), torch.arange(nx, device=d, dtype=t), indexing="ij")
        grid = torch.stack((xv, yv), 2).expand(shape) - 0.5
        return grid, (self.anchors[i] * self.stride[i]).view((1, self.na, 1, 1, 2)).expand(shape)


class DFL(nn.Module):
    def __init__(self, c1: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c1, 1, 1, bias=False).requires_grad_(False)
        self.conv.weight.data[:] = nn.Parameter(torch.arange(c1, dtype=torch.float).view(1, c1, 1, 1))
        self.c1 = c1

    def forward(self, x: Tensor) -> Tensor:
        b, _, a = x.shape
        return self.conv(x.view(b, 4, self.c1, a).transpose(2, 1).softmax(1)).view(b, 4, a)


@entry(levels((8, 12), (4, 6)))
class YOLOv8Detect(nn.Module):
    """Distribution focal loss decoded by a convolution of frozen weights; anchors remade where the shape changed."""

    def __init__(self) -> None:
        super().__init__()
        self.shape: torch.Size | None = None
        self.anchors, self.strides = torch.empty(0), torch.empty(0)
        self.cv2 = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 16, 1)) for _ in range(2)
        )
        self.cv3 = nn.ModuleList(nn.Conv2d(8, 3, 1) for _ in range(2))
        self.dfl = DFL()

    @staticmethod
    def make_anchors(feats: list[Tensor], strides: tuple[int, ...], offset: float = 0.5) -> tuple[Tensor, Tensor]:
        points, tensors = [], []
        for feat, stride in zip(feats, strides, strict=True):
            _, _, h, w = feat.shape
            sx = torch.arange(end=w, device=feat.device, dtype=feat.dtype) + offset
            sy = torch.arange(end=h, device=feat.device, dtype=feat.dtype) + offset
            sy, sx = torch.meshgrid(sy, sx, indexing="ij")
            points.append(torch.stack((sx, sy), -1).view(-1, 2))
            tensors.append(torch.full((h * w, 1), stride, dtype=feat.dtype, device=feat.device))
        return torch.cat(points), torch.cat(tensors)

    def forward(self, p3: Tensor, p4: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = [p3, p4]
        for i in range(2):
            x[i] = torch.cat((self.cv2[i](x[i]), self.cv3[i](x[i])), 1)
        shape = x[0].shape
        cat = torch.cat([xi.view(shape[0], 19, -1) for xi in x], 2)
        if self.shape != shape:
            self.anchors, self.strides = (t.transpose(0, 1) for t in self.make_anchors(x, (8, 16)))
            self.shape = shape
        box, cls = cat.split((16, 3), 1)
        lt, rb = self.dfl(box).chunk(2, 1)
        x1y1, x2y2 = self.anchors.unsqueeze(0) - lt, self.anchors.unsqueeze(0) + rb
        dbox = torch.cat(((x1y1 + x2y2) / 2, x2y2 - x1y1), 1) * self.strides
        return torch.cat((dbox, cls.sigmoid()), 1)


@entry(levels((6, 8), (3, 4)), scales=(-1.0,))
class FCOS(nn.Module):
    """Distances scaled per level, centerness, candidates of each level by topk, boxes clipped to the image."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU())
        self.logits, self.reg, self.ctr = (
            nn.Conv2d(8, 3, 3, padding=1),
            nn.Conv2d(8, 4, 3, padding=1),
            nn.Conv2d(8, 1, 3, padding=1),
        )
        self.scales = nn.ParameterList([nn.Parameter(torch.tensor(v)) for v in (1.0, 2.0)])

    @staticmethod
    def locations(h: int, w: int, stride: int, device: torch.device) -> Tensor:
        xs = torch.arange(0, w * stride, step=stride, dtype=torch.float32, device=device)
        ys = torch.arange(0, h * stride, step=stride, dtype=torch.float32, device=device)
        y, x = torch.meshgrid(ys, xs, indexing="ij")
        return torch.stack((x.reshape(-1), y.reshape(-1)), dim=1) + stride // 2

    def forward(self, p3: Tensor, p4: Tensor) -> dict[str, Tensor]:
        boxes, scores, labels = [], [], []
        for scale, stride, x in zip(self.scales, (8, 16), (p3, p4), strict=True):
            n, _, h, w = x.shape
            points = self.locations(h, w, stride, x.device)
            x = self.tower(x)
            cls = self.logits(x).permute(0, 2, 3, 1).reshape(n, -1, 3).sigmoid()
            reg = F.relu(self.reg(x) * scale).permute(0, 2, 3, 1).reshape(n, -1, 4) * stride
            ctr = self.ctr(x).permute(0, 2, 3, 1).reshape(n, -1).sigmoid()
            cls = torch.where(cls > 0.3, torch.sqrt(cls * ctr[:, :, None]), torch.zeros_like(cls))
            top, index = cls.flatten(1).topk(min(4, h * w), dim=1)
            where = index // 3
            p = points[where]
            d = torch.gather(reg, 1, where.unsqueeze(-1).repeat(1, 1, 4))
            box = torch.stack(
                [p[..., 0] - d[..., 0], p[..., 1] - d[..., 1], p[..., 0] + d[..., 2], p[..., 1] + d[..., 3]], -1
            )
            box[..., 0::2] = box[..., 0::2].clamp(min=0, max=63)
            box[..., 1::2] = box[..., 1::2].clamp(min=0, max=47)
            boxes.append(box * (top > 0).unsqueeze(-1))
            scores.append(top)
            labels.append(torch.where(top > 0, index % 3 + 1, 0))
        return {"boxes": torch.cat(boxes, 1), "scores": torch.cat(scores, 1), "labels": torch.cat(labels, 1)}


@entry(
    lambda batch: (torch.randn(batch, 8, 6, 10), torch.eye(3).repeat(batch, 1, 1) + 0.2 * torch.rand(batch, 3, 3)),
    scales=(-1.0,),
)
class SMOKE(nn.Module):
    """Keypoints in 3D: dimensions by exponentials, position by inverse intrinsics, yaw of a unit vector."""

    def __init__(self) -> None:
        super().__init__()
        self.cls, self.reg = nn.Conv2d(8, 3, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.register_buffer("dim_ref", torch.tensor([[3.88, 1.63, 1.53], [1.78, 1.70, 0.58], [0.88, 1.73, 0.67]]))

    def forward(self, x: Tensor, intrinsics: Tensor) -> tuple[Tensor, Tensor]:
        heat = self.cls(x).sigmoid_()
        heat = heat * F.max_pool2d(heat, 3, 1, 1).eq(heat)
        reg = self.reg(x)
        reg[:, 3:6, ...] = reg[:, 3:6, ...].sigmoid() - 0.5
        ori = reg[:, 6:8, ...].clone()
        reg[:, 6:8, ...] = F.normalize(ori)
        batch, _classes, height, width = heat.shape
        scores, inds = torch.topk(heat.view(batch, -1), k=4)
        clses = (inds / (height * width)).float().long()
        inds = inds % (height * width)
        xs, ys = (inds % width).float(), (inds / width).floor()
        pois = reg.permute(0, 2, 3, 1).reshape(batch, -1, 8).gather(1, inds.unsqueeze(-1).repeat(1, 1, 8)).view(-1, 8)
        depths = pois[:, 0].tanh() * 16.32 + 28.01
        points = torch.stack((xs.view(-1) + pois[:, 1], ys.view(-1) + pois[:, 2]), -1)
        image = torch.cat((points, torch.ones_like(points[:, :1])), dim=1) * depths.unsqueeze(-1)
        inv = intrinsics.inverse().unsqueeze(1).expand(batch, 4, -1, -1).reshape(-1, 3, 3)
        locations = torch.matmul(inv, image.unsqueeze(-1)).squeeze(2)
        dims = torch.exp(pois[:, 3:6]) * self.dim_ref[clses.view(-1), :]
        locations[:, 1] += dims[:, 1] / 2
        rays = torch.atan(locations[:, 0] / (locations[:, 2] + 1e-7))
        vector = pois[:, 6:8]
        alphas = torch.atan(vector[:, 0] / (vector[:, 1] + 1e-7))
        positive = vector[:, 1] >= 0
        alphas = torch.where(positive, alphas - math.pi / 2, alphas + math.pi / 2)
        yaw = alphas + rays
        yaw = torch.where(yaw > math.pi, yaw - 2 * math.pi, yaw)
        yaw = torch.where(yaw < -math.pi, yaw + 2 * math.pi, yaw)
        return torch.cat([clses.view(-1, 1).float(), dims, locations, yaw.unsqueeze(1)], 1), scores


@entry(
    lambda batch: (torch.randn(batch, 8, 4, 6), torch.randn(batch, 8, 2, 3), torch.rand(batch, 16, 24) > 0.8),
    scales=(-1.0, 3.0),
)
class TwoStageDeformableDETR(nn.Module):
    """Valid ratios of padded images, proposals of encoder positions masked by infinities, the best as queries."""

    def __init__(self) -> None:
        super().__init__()
        self.level_embed = nn.Parameter(torch.randn(2, 8))
        self.enc_output, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.cls, self.box = nn.Linear(8, 3), nn.Linear(8, 4)
        self.pos_trans = nn.Linear(16, 16)

    @staticmethod
    def valid_ratio(mask: Tensor) -> Tensor:
        _, h, w = mask.shape
        valid_h, valid_w = torch.sum(~mask[:, :, 0], 1), torch.sum(~mask[:, 0, :], 1)
        return torch.stack([valid_w.float() / w, valid_h.float() / h], -1)

    def proposals(self, memory: Tensor, padding: Tensor, shapes: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        n = memory.shape[0]
        found, cur = [], 0
        for lvl, (h, w) in enumerate(shapes):
            flat = padding[:, cur : (cur + h * w)].view(n, h, w, 1)
            valid_h, valid_w = torch.sum(~flat[:, :, 0, 0], 1), torch.sum(~flat[:, 0, :, 0], 1)
            gy, gx = torch.meshgrid(
                torch.linspace(0, h - 1, h, dtype=torch.float32, device=memory.device),
                torch.linspace(0, w - 1, w, dtype=torch.float32, device=memory.device),
                indexing="ij",
            )
            grid = torch.cat([gx.unsqueeze(-1), gy.unsqueeze(-1)], -1)
            scale = torch.cat([valid_w.unsqueeze(-1), valid_h.unsqueeze(-1)], 1).view(n, 1, 1, 2)
            grid = (grid.unsqueeze(0).expand(n, -1, -1, -1) + 0.5) / scale
            wh = torch.ones_like(grid) * 0.05 * (2.0**lvl)
            found.append(torch.cat((grid, wh), -1).view(n, -1, 4))
            cur += h * w
        out = torch.cat(found, 1)
        valid = ((out > 0.01) & (out < 0.99)).all(-1, keepdim=True)
        out = torch.log(out / (1 - out))
        out = out.masked_fill(padding.unsqueeze(-1), float("inf")).masked_fill(~valid, float("inf"))
        memory = memory.masked_fill(padding.unsqueeze(-1), float(0)).masked_fill(~valid, float(0))
        return self.norm(self.enc_output(memory)), out

    def forward(self, p4: Tensor, p5: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat, masks, shapes, ratios = [], [], [], []
        for lvl, x in enumerate((p4, p5)):
            m = F.interpolate(mask[None].float(), size=x.shape[-2:]).to(torch.bool)[0]
            shapes.append(x.shape[-2:])
            flat.append(x.flatten(2).transpose(1, 2) + self.level_embed[lvl].view(1, 1, -1))
            masks.append(m.flatten(1))
            ratios.append(self.valid_ratio(m))
        memory, padding = torch.cat(flat, 1), torch.cat(masks, 1)
        out, proposals = self.proposals(memory, padding, shapes)
        unact = self.box(out) + proposals
        top = torch.topk(self.cls(out)[..., 0], 5, dim=1)[1]
        coords = torch.gather(unact, 1, top.unsqueeze(-1).repeat(1, 1, 4)).detach()
        reference = coords.sigmoid()
        dim_t = 10 ** (2 * (torch.arange(4, dtype=torch.float32) // 2) / 4)
        pos = (reference * 2 * math.pi)[:, :, :, None] / dim_t
        pos = torch.stack((pos[..., 0::2].sin(), pos[..., 1::2].cos()), dim=4).flatten(2)
        query = self.pos_trans(pos)
        return query, reference, torch.stack(ratios, 1)


@entry(lambda batch: (torch.randn(batch, 8, 5, 10),), scales=(-1.0,))
class CLRNet(nn.Module):
    """Lane priors sampled along their rows, pooled into features, refined; strips flipped from the bottom up."""

    def __init__(self) -> None:
        super().__init__()
        self.n_strips, self.n_offsets, self.points = 7, 8, 4
        self.register_buffer("sample_x", (torch.linspace(0, 1, steps=4, dtype=torch.float32) * 7).long())
        self.register_buffer("prior_feat_ys", torch.flip((1 - self.sample_x.float() / 7), dims=[-1]))
        self.register_buffer("prior_ys", torch.linspace(1, 0, steps=8, dtype=torch.float32))
        self.embeddings = nn.Embedding(6, 3)
        nn.init.uniform_(self.embeddings.weight, 0.1, 0.9)
        self.fc = nn.Linear(8 * 4, 8)
        self.cls, self.reg = nn.Linear(8, 2), nn.Linear(8, 4 + 8)

    def priors(self) -> tuple[Tensor, Tensor]:
        weight = self.embeddings.weight
        priors = weight.new_zeros((6, 2 + 2 + 2 + self.n_offsets), device=weight.device)
        priors[:, 2:5] = weight.clone()
        priors[:, 6:] = (
            priors[:, 3].unsqueeze(1).clone().repeat(1, self.n_offsets) * 9
            + (
                (1 - self.prior_ys.repeat(6, 1) - priors[:, 2].unsqueeze(1).clone().repeat(1, self.n_offsets))
                * 4
                / torch.tan(priors[:, 4].unsqueeze(1).clone().repeat(1, self.n_offsets) * math.pi + 1e-5)
            )
        ) / 9
        return priors, priors.clone()[..., 6 + self.sample_x]

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        priors, on_map = self.priors()
        priors, on_map = priors.repeat(batch, 1, 1), on_map.repeat(batch, 1, 1)
        for _ in range(2):
            xs = torch.flip(on_map, dims=[2]).view(batch, 6, -1, 1) * 2.0 - 1.0
            ys = self.prior_feat_ys.repeat(batch * 6).view(batch, 6, -1, 1) * 2.0 - 1.0
            feature = F.grid_sample(x, torch.cat((xs, ys), dim=-1), align_corners=True).permute(0, 2, 1, 3)
            feature = F.relu(self.fc(feature.reshape(batch * 6, -1)))
            cls, reg = self.cls(feature).reshape(batch, -1, 2), self.reg(feature).reshape(batch, -1, 12)
            lines = priors.clone()
            lines[:, :, :2] = cls
            lines[:, :, 2:5] += reg[:, :, :3]
            lines[:, :, 5] = reg[:, :, 3]
            lines[..., 6:] += reg[..., 4:]
            priors, on_map = lines.detach().clone(), lines[..., 6 + self.sample_x].detach().clone()
        return lines


class Filters(nn.Module):
    """CondInst and SOLOv2: filters that a head predicts, applied by a convolution with a group for each instance."""

    def __init__(self) -> None:
        super().__init__()
        self.controller = nn.Linear(8, (4 + 2) * 3 + 3 + 3 + 1)

    def parsed(self, params: Tensor, number: int) -> tuple[list[Tensor], list[Tensor]]:
        splits = list(torch.split_with_sizes(params, [18, 3, 3, 1], dim=1))
        weights, biases = [splits[0], splits[2]], [splits[1], splits[3]]
        weights[0], biases[0] = weights[0].reshape(number * 3, -1, 1, 1), biases[0].reshape(number * 3)
        weights[1], biases[1] = weights[1].reshape(number, -1, 1, 1), biases[1].reshape(number)
        return weights, biases


@entry(lambda batch: (torch.randn(1, 4, 6, 8), torch.randn(5, 8), torch.rand(5, 2) * 32), dynamic=False)
class CondInst(Filters):
    """One image, relative coordinates of every instance, groups of the static number of instances."""

    def forward(self, feats: Tensor, embeds: Tensor, centers: Tensor) -> Tensor:
        number, (h, w) = embeds.shape[0], feats.shape[2:]
        ys, xs = torch.meshgrid(
            torch.arange(0, h * 4, 4, device=feats.device),
            torch.arange(0, w * 4, 4, device=feats.device),
            indexing="ij",
        )
        locations = torch.stack((xs.reshape(-1), ys.reshape(-1)), dim=1) + 2
        relative = centers.reshape(-1, 1, 2) - locations.reshape(1, -1, 2)
        relative = relative.permute(0, 2, 1).float() / 64
        x = torch.cat([relative, feats.reshape(1, 4, h * w).expand(number, -1, -1)], dim=1).reshape(1, -1, h, w)
        weights, biases = self.parsed(self.controller(embeds), number)
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            x = F.conv2d(x, weight, bias=bias, stride=1, padding=0, groups=number)
            x = F.relu(x) if i < 1 else x
        x = x.reshape(-1, 1, h, w)
        x = F.interpolate(
            F.pad(x, (0, 1, 0, 1), mode="replicate"), size=(2 * h + 1, 2 * w + 1), mode="bilinear", align_corners=True
        )
        return F.pad(x, pad=(1, 0, 1, 0), mode="replicate")[:, :, : 2 * h, : 2 * w].sigmoid()


@entry(
    lambda batch: (torch.randn(1, 3, 6, 8), torch.randn(1, 3, 4, 4), torch.randn(1, 5, 4, 4)),
    dynamic=False,
    scales=(-1.0,),
)
class SOLOv2(nn.Module):
    """Kernels of grid cells by topk of scores, masks by a convolution with them, matrix NMS."""

    def forward(self, feats: Tensor, kernels: Tensor, cates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heat = cates.sigmoid()
        local = F.max_pool2d(heat, 2, stride=1, padding=1)
        heat = heat * (local[:, :, :-1, :-1] == heat).float()
        scores, inds = heat.permute(0, 2, 3, 1).reshape(-1).topk(6)
        labels = inds % 5
        kernel = kernels[0].permute(1, 2, 0).view(-1, 3)[inds // 5]
        preds = F.conv2d(feats, kernel.unsqueeze(-1).unsqueeze(-1), stride=1).squeeze(0).sigmoid()
        masks = preds > 0.5
        sums = masks.sum((1, 2)).float()
        scores = scores * (preds * masks.float()).sum((1, 2)) / sums.clamp(min=1)
        scores, order = torch.sort(scores, descending=True, stable=True)
        flat = masks[order].reshape(6, -1).float()
        inter = torch.mm(flat, flat.transpose(1, 0))
        grow = sums[order].expand(6, 6)
        iou = (inter / (grow + grow.transpose(1, 0) - inter).clamp(min=1)).triu(diagonal=1)
        same = labels[order].expand(6, 6)
        same = (same == same.transpose(1, 0)).float().triu(diagonal=1)
        compensate = (iou * same).max(0)[0].expand(6, 6).transpose(1, 0)
        decay = torch.exp(-2 * (iou * same) ** 2) / torch.exp(-2 * compensate**2)
        return scores * decay.min(0)[0], labels[order], preds[order]


@entry(lambda batch: (torch.randn(batch, 6, 5, 7),), scales=(0.0, -1.0, 3.0))
class DCNv2Block(nn.Module):
    """Deformable convolution by hand: offsets, modulation, four corners gathered from a padded map."""

    def __init__(self) -> None:
        super().__init__()
        self.offset, self.modulator = nn.Conv2d(6, 18, 3, padding=1), nn.Conv2d(6, 9, 3, padding=1)
        self.conv = nn.Conv2d(6, 4, 3, stride=3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        offset, m = self.offset(x), torch.sigmoid(self.modulator(x))
        n = offset.size(1) // 2
        x = F.pad(x, (1, 1, 1, 1))
        b, c, hp, wp = x.shape
        h, w = offset.shape[2:]
        px, py = torch.meshgrid(torch.arange(-1, 2), torch.arange(-1, 2), indexing="ij")
        pn = torch.cat([px.flatten(), py.flatten()], 0).view(1, 2 * n, 1, 1).type_as(offset)
        p0x, p0y = torch.meshgrid(torch.arange(1, h + 1), torch.arange(1, w + 1), indexing="ij")
        p0x, p0y = (t.flatten().view(1, 1, h, w).repeat(1, n, 1, 1) for t in (p0x, p0y))
        p = (torch.cat([p0x, p0y], 1).type_as(offset) + pn + offset).contiguous().permute(0, 2, 3, 1)
        lt = p.detach().floor()
        rb = lt + 1
        lt = torch.cat([lt[..., :n].clamp(0, hp - 1), lt[..., n:].clamp(0, wp - 1)], -1).long()
        rb = torch.cat([rb[..., :n].clamp(0, hp - 1), rb[..., n:].clamp(0, wp - 1)], -1).long()
        p = torch.cat([p[..., :n].clamp(0, hp - 1), p[..., n:].clamp(0, wp - 1)], -1)
        lb, rt = torch.cat([lt[..., :n], rb[..., n:]], -1), torch.cat([rb[..., :n], lt[..., n:]], -1)

        def at(q: Tensor) -> Tensor:
            index = (q[..., :n] * wp + q[..., n:]).contiguous().unsqueeze(1).expand(-1, c, -1, -1, -1)
            return x.view(b, c, -1).gather(-1, index.contiguous().view(b, c, -1)).view(b, c, h, w, n)

        def near(q: Tensor) -> Tensor:
            qx, qy = q[..., :n].type_as(p), q[..., n:].type_as(p)
            return ((1 - (qx - p[..., :n]).abs()) * (1 - (qy - p[..., n:]).abs())).unsqueeze(1)

        sampled = sum(near(q) * at(q) for q in (lt, rb, lb, rt))
        sampled = sampled * m.permute(0, 2, 3, 1).unsqueeze(1)
        sampled = torch.cat([sampled[..., s : s + 3].contiguous().view(b, c, h, w * 3) for s in range(0, n, 3)], -1)
        return self.conv(sampled.contiguous().view(b, c, h * 3, w * 3))


@entry(lambda batch: (torch.randn(batch, 9, 4), torch.randn(batch, 9, 3)), scales=(-1.0,))
class NMSFreeDecode(nn.Module):
    """DETR's post-processing: topk over queries and classes, boxes by gather, scaled, filtered to a fixed number."""

    def forward(self, boxes: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        prob = logits.sigmoid()
        scores, index = torch.topk(prob.view(logits.shape[0], -1), 6, dim=1)
        boxes_of = torch.div(index, logits.shape[2], rounding_mode="trunc")
        x_c, y_c, w, h = boxes.sigmoid().unbind(-1)
        xyxy = torch.stack([x_c - 0.5 * w, y_c - 0.5 * h, x_c + 0.5 * w, y_c + 0.5 * h], dim=-1)
        xyxy = torch.gather(xyxy, 1, boxes_of.unsqueeze(-1).repeat(1, 1, 4))
        xyxy = xyxy * torch.tensor([640.0, 480.0, 640.0, 480.0])[None, None]
        area = (xyxy[..., 2:] - xyxy[..., :2]).clamp(min=0).prod(-1)
        return xyxy, scores, index % logits.shape[2], (scores > 0.5) & (area > 10.0), (scores > 0.5).sum(-1)
