"""Pairs of images: correlation, cost volumes, warps, and matching of keypoints."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exporter.zoo import entry


def pair(*shape: int, count: int = 2):
    return lambda batch: tuple(torch.randn(batch, *shape) for _ in range(count))


def coords_grid(batch: int, height: int, width: int, device: torch.device) -> Tensor:
    coords = torch.meshgrid(torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij")
    return torch.stack(coords[::-1], dim=0).float()[None].repeat(batch, 1, 1, 1)


def bilinear_sampler(image: Tensor, coords: Tensor) -> Tensor:
    height, width = image.shape[-2:]
    xs, ys = coords.split([1, 1], dim=-1)
    grid = torch.cat([2 * xs / (width - 1) - 1, 2 * ys / (height - 1) - 1], dim=-1)
    return F.grid_sample(image, grid, align_corners=True)


@entry(pair(8, 8, 8))
class RAFT(nn.Module):
    """A pyramid of all pairs, lookups around the flow, a separable GRU, and the convex upsampling."""

    def __init__(self, radius: int = 1) -> None:
        super().__init__()
        self.radius = radius
        self.convz = nn.Conv2d(8 + 18 + 2, 8, (1, 5), padding=(0, 2))
        self.convr = nn.Conv2d(8 + 18 + 2, 8, (1, 5), padding=(0, 2))
        self.convq = nn.Conv2d(8 + 18 + 2, 8, (1, 5), padding=(0, 2))
        self.flow, self.mask = nn.Conv2d(8, 2, 3, padding=1), nn.Conv2d(8, 9 * 4, 1)

    def lookup(self, pyramid: list[Tensor], coords: Tensor) -> Tensor:
        r = self.radius
        coords = coords.permute(0, 2, 3, 1)
        batch, height, width, _ = coords.shape
        out = []
        for i, corr in enumerate(pyramid):
            dx = torch.linspace(-r, r, 2 * r + 1, device=coords.device)
            dy = torch.linspace(-r, r, 2 * r + 1, device=coords.device)
            delta = torch.stack(torch.meshgrid(dy, dx, indexing="ij"), dim=-1)
            centroid = coords.reshape(batch * height * width, 1, 1, 2) / 2**i
            corr = bilinear_sampler(corr, centroid + delta.view(1, 2 * r + 1, 2 * r + 1, 2))
            out.append(corr.view(batch, height, width, -1))
        return torch.cat(out, dim=-1).permute(0, 3, 1, 2).contiguous().float()

    def upsample(self, flow: Tensor, mask: Tensor) -> Tensor:
        batch, _, height, width = flow.shape
        mask = torch.softmax(mask.view(batch, 1, 9, 2, 2, height, width), dim=2)
        up = F.unfold(2 * flow, [3, 3], padding=1).view(batch, 2, 9, 1, 1, height, width)
        up = torch.sum(mask * up, dim=2).permute(0, 1, 4, 2, 5, 3)
        return up.reshape(batch, 2, 2 * height, 2 * width)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        batch, dim, height, width = first.shape
        corr = torch.matmul(first.view(batch, dim, -1).transpose(1, 2), second.view(batch, dim, -1))
        corr = corr.view(batch, height, width, 1, height, width) / torch.sqrt(torch.tensor(dim).float())
        corr = corr.reshape(batch * height * width, 1, height, width)
        pyramid = [corr, F.avg_pool2d(corr, 2, stride=2)]
        coords0 = coords_grid(batch, height, width, first.device)
        coords1 = coords_grid(batch, height, width, first.device)
        net = torch.tanh(first)
        for _ in range(2):
            coords1 = coords1.detach()
            x = torch.cat([net, self.lookup(pyramid, coords1), coords1 - coords0], dim=1)
            z, r = torch.sigmoid(self.convz(x)), torch.sigmoid(self.convr(x))
            q = torch.tanh(self.convq(torch.cat([r * net, x[:, 8:]], dim=1)))
            net = (1 - z) * net + z * q
            coords1 = coords1 + self.flow(net)
        return self.upsample(coords1 - coords0, 0.25 * self.mask(net))


@entry(pair(6, 8, 10))
class PWCNet(nn.Module):
    """Warping with a mask of what was inside, and a cost volume of shifts by padding and slicing."""

    def __init__(self) -> None:
        super().__init__()
        self.flow = nn.Conv2d(12, 2, 3, padding=1)
        self.refine = nn.Conv2d(9 + 6 + 2, 2, 3, padding=1)
        self.up = nn.ConvTranspose2d(2, 2, 4, 2, 1)

    @staticmethod
    def warp(x: Tensor, flow: Tensor) -> Tensor:
        batch, _, height, width = x.size()
        xx = torch.arange(0, width, device=x.device).view(1, -1).repeat(height, 1)
        yy = torch.arange(0, height, device=x.device).view(-1, 1).repeat(1, width)
        xx = xx.view(1, 1, height, width).repeat(batch, 1, 1, 1)
        yy = yy.view(1, 1, height, width).repeat(batch, 1, 1, 1)
        grid = torch.cat((xx, yy), 1).float() + flow
        grid[:, 0, :, :] = 2.0 * grid[:, 0, :, :].clone() / max(width - 1, 1) - 1.0
        grid[:, 1, :, :] = 2.0 * grid[:, 1, :, :].clone() / max(height - 1, 1) - 1.0
        grid = grid.permute(0, 2, 3, 1)
        out = F.grid_sample(x, grid, align_corners=False)
        mask = F.grid_sample(torch.ones(x.size(), device=x.device), grid, align_corners=False)
        mask[mask < 0.9999] = 0
        mask[mask > 0] = 1
        return out * mask

    @staticmethod
    def correlate(first: Tensor, second: Tensor, reach: int = 1) -> Tensor:
        height, width = first.shape[2:]
        padded = F.pad(second, [reach] * 4)
        rows = []
        for i in range(2 * reach + 1):
            for j in range(2 * reach + 1):
                shifted = padded[:, :, i : i + height, j : j + width]
                rows.append((first * shifted).mean(dim=1, keepdim=True))
        return F.leaky_relu(torch.cat(rows, 1), 0.1)

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        flow = self.flow(torch.cat((first, second), 1)).clamp(-4, 4)
        cost = self.correlate(first, self.warp(second, flow))
        flow = flow + self.refine(torch.cat((cost, first, flow), 1))
        return flow, self.up(flow)


@entry(pair(4, 6, 12))
class PSMNet(nn.Module):
    """A cost volume filled disparity by disparity, 3D convolutions, trilinear upsampling, disparity regression."""

    def __init__(self) -> None:
        super().__init__()
        self.dres = nn.Sequential(nn.Conv3d(8, 8, 3, padding=1, bias=False), nn.BatchNorm3d(8), nn.ReLU(inplace=True))
        self.down = nn.Conv3d(8, 12, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose3d(12, 8, 3, padding=1, output_padding=1, stride=2, bias=False)
        self.classif = nn.Conv3d(8, 1, 3, padding=1, bias=False)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        batch, channels, height, width = left.size()
        cost = torch.zeros(batch, channels * 2, 4, height, width, device=left.device)
        for i in range(4):
            if i > 0:
                cost[:, :channels, i, :, i:] = left[:, :, :, i:]
                cost[:, channels:, i, :, i:] = right[:, :, :, :-i]
            else:
                cost[:, :channels, i] = left
                cost[:, channels:, i] = right
        cost = self.dres(cost.contiguous())
        cost = self.classif(F.relu(self.up(F.relu(self.down(cost))) + cost))
        cost = F.interpolate(cost, [8, height * 2, width * 2], mode="trilinear", align_corners=False)
        pred = F.softmax(torch.squeeze(cost, 1), dim=1)
        disp = torch.reshape(torch.arange(0, 8, device=left.device, dtype=torch.float32), [1, 8, 1, 1])
        return torch.sum(pred * disp.repeat(pred.size()[0], 1, pred.size()[2], pred.size()[3]), 1)


@entry(pair(8, 6, 12))
class GroupWiseStereo(nn.Module):
    """GwcNet's group-wise correlation by new_zeros and slices; top-k regression of the disparity."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        batch, channels, height, width = left.shape
        volume = left.new_zeros([batch, 4, 5, height, width])
        for i in range(5):
            a, b = (left, right) if i == 0 else (left[:, :, :, i:], right[:, :, :, :-i])
            cost = (a * b).view([batch, 4, channels // 4, height, a.shape[-1]]).mean(dim=2)
            volume[:, :, i, :, i:] = cost
        cost, ind = volume.contiguous().mean(1).sort(dim=1, descending=True, stable=True)
        pool = ind[:, :2]
        prob = F.softmax(torch.gather(cost, 1, torch.arange(2, device=left.device).view(1, 2, 1, 1).expand_as(pool)), 1)
        return torch.sum(pool * prob, 1, keepdim=True)


def views(batch: int) -> tuple[Tensor, ...]:
    proj = torch.eye(4).repeat(batch, 3, 1, 1)
    proj[:, :, :3, :4] += 0.1 * torch.randn(batch, 3, 3, 4)
    return torch.randn(batch, 3, 4, 6, 8), proj, torch.linspace(1, 3, 5).repeat(batch, 1) + torch.rand(batch, 1)


@entry(views, scales=(-1.0,))
class MVSNet(nn.Module):
    """Homographies of source views to planes of depth, variance as cost, expected depth and confidence."""

    def __init__(self) -> None:
        super().__init__()
        self.regularize = nn.Conv3d(4, 1, 3, padding=1)

    @staticmethod
    def warp(src: Tensor, src_proj: Tensor, ref_proj: Tensor, depths: Tensor) -> Tensor:
        batch, channels, height, width = src.shape
        count = depths.shape[1]
        with torch.no_grad():
            proj = torch.matmul(src_proj, torch.inverse(ref_proj))
            rot, trans = proj[:, :3, :3], proj[:, :3, 3:4]
            y, x = torch.meshgrid(
                [
                    torch.arange(0, height, dtype=torch.float32, device=src.device),
                    torch.arange(0, width, dtype=torch.float32, device=src.device),
                ],
                indexing="ij",
            )
            y, x = y.contiguous().view(height * width), x.contiguous().view(height * width)
            xyz = torch.unsqueeze(torch.stack((x, y, torch.ones_like(x))), 0).repeat(batch, 1, 1)
            points = torch.matmul(rot, xyz).unsqueeze(2).repeat(1, 1, count, 1)
            points = points * depths.view(batch, 1, count, -1) + trans.view(batch, 3, 1, 1)
            xy = points[:, :2] / points[:, 2:3]
            gx = xy[:, 0] / ((width - 1) / 2) - 1
            gy = xy[:, 1] / ((height - 1) / 2) - 1
            grid = torch.stack((gx, gy), dim=3)
        grid = grid.view(batch, count * height, width, 2)
        warped = F.grid_sample(src, grid, mode="bilinear", padding_mode="zeros", align_corners=True)
        return warped.view(batch, channels, count, height, width)

    def forward(self, features: Tensor, proj: Tensor, depths: Tensor) -> dict[str, Tensor]:
        features, projections = torch.unbind(features, 1), torch.unbind(proj, 1)
        ref = features[0].unsqueeze(2).repeat(1, 1, depths.shape[1], 1, 1)
        total, square = ref, ref**2
        for feature, projection in zip(features[1:], projections[1:], strict=True):
            warped = self.warp(feature, projection, projections[0], depths)
            total = total + warped
            square = square + warped.pow_(2)
        variance = square.div_(3).sub_(total.div_(3).pow_(2))
        prob = F.softmax(self.regularize(variance).squeeze(1), dim=1)
        depth = torch.sum(prob * depths.view(*depths.shape, 1, 1), 1)
        sum4 = 4 * F.avg_pool3d(
            F.pad(prob.unsqueeze(1), pad=(0, 0, 0, 0, 1, 2)), (4, 1, 1), stride=1, padding=0
        ).squeeze(1)
        levels = torch.arange(depths.shape[1], device=prob.device, dtype=torch.float)
        index = torch.sum(prob * levels.view(1, -1, 1, 1), 1).long()
        confidence = torch.gather(sum4, 1, index.clamp(max=depths.shape[1] - 1).unsqueeze(1)).squeeze(1)
        return {"depth": depth, "confidence": confidence}


def keypoints(batch: int) -> tuple[Tensor, ...]:
    return (
        torch.randn(batch, 8, 6),
        torch.randn(batch, 8, 7),
        torch.rand(batch, 6, 2) * 100,
        torch.rand(batch, 7, 2) * 100,
    )


@entry(keypoints, scales=(-1.0,))
class SuperGlue(nn.Module):
    """Attention between keypoints, Sinkhorn in log space with dustbins, mutual matches above a threshold."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(2, 8, 1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 1))
        self.proj = nn.ModuleList([nn.Conv1d(8, 8, 1) for _ in range(3)])
        self.mlp = nn.Sequential(nn.Conv1d(16, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 8, 1))
        self.bin_score = nn.Parameter(torch.tensor(1.0))

    def attend(self, x: Tensor, source: Tensor) -> Tensor:
        batch = x.size(0)
        query, key, value = (
            layer(t).view(batch, 4, 2, -1) for layer, t in zip(self.proj, (x, source, source), strict=True)
        )
        scores = torch.einsum("bdhn,bdhm->bhnm", query, key) / 4**0.5
        message = torch.einsum("bhnm,bdhm->bdhn", F.softmax(scores, dim=-1), value)
        return x + self.mlp(torch.cat([x, message.contiguous().view(batch, 8, -1)], dim=1))

    def transport(self, scores: Tensor, iters: int = 5) -> Tensor:
        batch, m, n = scores.shape
        one = scores.new_tensor(1)
        ms, ns = (m * one).to(scores), (n * one).to(scores)
        bins0, bins1 = self.bin_score.expand(batch, m, 1), self.bin_score.expand(batch, 1, n)
        alpha = self.bin_score.expand(batch, 1, 1)
        couplings = torch.cat([torch.cat([scores, bins0], -1), torch.cat([bins1, alpha], -1)], 1)
        norm = -(ms + ns).log()
        log_mu = torch.cat([norm.expand(m), ns.log()[None] + norm])
        log_nu = torch.cat([norm.expand(n), ms.log()[None] + norm])
        log_mu, log_nu = log_mu[None].expand(batch, -1), log_nu[None].expand(batch, -1)
        u, v = torch.zeros_like(log_mu), torch.zeros_like(log_nu)
        for _ in range(iters):
            u = log_mu - torch.logsumexp(couplings + v.unsqueeze(1), dim=2)
            v = log_nu - torch.logsumexp(couplings + u.unsqueeze(2), dim=1)
        return couplings + u.unsqueeze(2) + v.unsqueeze(1) - norm

    def forward(self, desc0: Tensor, desc1: Tensor, kpts0: Tensor, kpts1: Tensor) -> dict[str, Tensor]:
        size = kpts0.new_tensor([[120.0, 100.0]])
        kpts0, kpts1 = ((k - size / 2) / (size.max(1, keepdim=True).values * 0.7) for k in (kpts0, kpts1))
        desc0 = desc0 + self.encoder(kpts0.transpose(1, 2))
        desc1 = desc1 + self.encoder(kpts1.transpose(1, 2))
        desc0, desc1 = self.attend(desc0, desc0), self.attend(desc1, desc1)
        desc0, desc1 = self.attend(desc0, desc1), self.attend(desc1, desc0)
        scores = self.transport(torch.einsum("bdn,bdm->bnm", desc0, desc1) / 8**0.5)
        max0, max1 = scores[:, :-1, :-1].max(2), scores[:, :-1, :-1].max(1)
        places0, places1 = max0.indices, max1.indices
        mutual0 = torch.arange(places0.shape[1], device=scores.device)[None] == places1.gather(1, places0)
        mutual1 = torch.arange(places1.shape[1], device=scores.device)[None] == places0.gather(1, places1)
        zero = scores.new_tensor(0)
        mscores0 = torch.where(mutual0, max0.values.exp(), zero)
        mscores1 = torch.where(mutual1, mscores0.gather(1, places1), zero)
        valid0 = mutual0 & (mscores0 > 0.2)
        valid1 = mutual1 & valid0.gather(1, places1)
        return {
            "matches0": torch.where(valid0, places0, places0.new_tensor(-1)),
            "matches1": torch.where(valid1, places1, places1.new_tensor(-1)),
            "scores": mscores1,
        }


@entry(
    lambda batch: (*keypoints(batch)[:2], *keypoints(batch)[2:]),
    scales=(-1.0,),
)
class LightGlue(nn.Module):
    """Rotary positions learned by Fourier features, bidirectional cross attention, double log softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.wr = nn.Linear(2, 2, bias=False)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.to_qk, self.to_v = nn.Linear(8, 8), nn.Linear(8, 8)
        self.ffn = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8))
        self.matchability, self.final = nn.Linear(8, 1), nn.Linear(8, 8)

    def positions(self, x: Tensor) -> Tensor:
        projected = self.wr(x)
        emb = torch.stack([torch.cos(projected), torch.sin(projected)], 0).unsqueeze(-3)
        return emb.repeat_interleave(2, dim=-1)

    @staticmethod
    def rotary(freqs: Tensor, t: Tensor) -> Tensor:
        x = t.unflatten(-1, (-1, 2))
        x1, x2 = x.unbind(dim=-1)
        return t * freqs[0] + torch.stack((-x2, x1), dim=-1).flatten(start_dim=-2) * freqs[1]

    def own(self, x: Tensor, encoding: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (2, -1, 3)).transpose(1, 2)
        q, k, v = qkv[..., 0], qkv[..., 1], qkv[..., 2]
        q, k = self.rotary(encoding, q), self.rotary(encoding, k)
        context = F.scaled_dot_product_attention(q, k, v)
        return x + self.ffn(torch.cat([x, self.out(context.transpose(1, 2).flatten(start_dim=-2))], -1))

    def cross(self, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
        qk0, qk1, v0, v1 = (
            t.unflatten(-1, (2, -1)).transpose(1, 2)
            for t in (self.to_qk(x0), self.to_qk(x1), self.to_v(x0), self.to_v(x1))
        )
        qk0, qk1 = qk0 * 0.25**0.5, qk1 * 0.25**0.5
        sim = torch.einsum("bhid, bhjd -> bhij", qk0, qk1)
        attn01, attn10 = F.softmax(sim, dim=-1), F.softmax(sim.transpose(-2, -1).contiguous(), dim=-1)
        m0 = torch.einsum("bhij, bhjd -> bhid", attn01, v1)
        m1 = torch.einsum("bhji, bhjd -> bhid", attn10.transpose(-2, -1), v0)
        m0, m1 = (m.transpose(1, 2).flatten(start_dim=-2) for m in (m0, m1))
        return x0 + self.ffn(torch.cat([x0, m0], -1)), x1 + self.ffn(torch.cat([x1, m1], -1))

    def forward(self, desc0: Tensor, desc1: Tensor, kpts0: Tensor, kpts1: Tensor) -> tuple[Tensor, Tensor]:
        desc0, desc1 = desc0.transpose(1, 2).contiguous(), desc1.transpose(1, 2).contiguous()
        kpts0, kpts1 = kpts0 / 50 - 1, kpts1 / 50 - 1
        desc0, desc1 = self.own(desc0, self.positions(kpts0)), self.own(desc1, self.positions(kpts1))
        desc0, desc1 = self.cross(desc0, desc1)
        mdesc0, mdesc1 = self.final(desc0) / 8**0.25, self.final(desc1) / 8**0.25
        sim = torch.einsum("bmd,bnd->bmn", mdesc0, mdesc1)
        z0, z1 = self.matchability(desc0), self.matchability(desc1)
        batch, m, n = sim.shape
        certainties = F.logsigmoid(z0) + F.logsigmoid(z1).transpose(1, 2)
        scores0 = F.log_softmax(sim, 2)
        scores1 = F.log_softmax(sim.transpose(-1, -2).contiguous(), 2).transpose(-1, -2)
        scores = sim.new_full((batch, m + 1, n + 1), 0)
        scores[:, :m, :n] = scores0 + scores1 + certainties
        scores[:, :-1, -1] = F.logsigmoid(-z0.squeeze(-1))
        scores[:, -1, :-1] = F.logsigmoid(-z1.squeeze(-1))
        return scores, scores[:, :-1, :-1].max(2)[1]
