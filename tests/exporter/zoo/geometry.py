"""Depth, pose and images: rotations, expectations over heatmaps, reprojection, subpixel shuffles."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exporter.zoo import entry


def quaternion_to_matrix(q: Tensor) -> Tensor:
    r, i, j, k = torch.unbind(q, -1)
    two_s = 2.0 / (q * q).sum(-1)
    o = torch.stack(
        (
            1 - two_s * (j * j + k * k),
            two_s * (i * j - k * r),
            two_s * (i * k + j * r),
            two_s * (i * j + k * r),
            1 - two_s * (i * i + k * k),
            two_s * (j * k - i * r),
            two_s * (i * k - j * r),
            two_s * (j * k + i * r),
            1 - two_s * (i * i + j * j),
        ),
        -1,
    )
    return o.reshape((*q.shape[:-1], 3, 3))


def sqrt_positive(x: Tensor) -> Tensor:
    """The root where there is one, written through a mask."""
    root = torch.zeros_like(x)
    positive = x > 0
    root[positive] = torch.sqrt(x[positive])
    return root


def matrix_to_quaternion(matrix: Tensor) -> Tensor:
    batch = matrix.shape[:-2]
    m00, m01, m02, m10, m11, m12, m20, m21, m22 = torch.unbind(matrix.reshape((*batch, 9)), dim=-1)
    q_abs = sqrt_positive(
        torch.stack([1 + m00 + m11 + m22, 1 + m00 - m11 - m22, 1 - m00 + m11 - m22, 1 - m00 - m11 + m22], dim=-1)
    )
    candidates = torch.stack(
        [
            torch.stack([q_abs[..., 0] ** 2, m21 - m12, m02 - m20, m10 - m01], dim=-1),
            torch.stack([m21 - m12, q_abs[..., 1] ** 2, m10 + m01, m02 + m20], dim=-1),
            torch.stack([m02 - m20, m10 + m01, q_abs[..., 2] ** 2, m12 + m21], dim=-1),
            torch.stack([m10 - m01, m20 + m02, m21 + m12, q_abs[..., 3] ** 2], dim=-1),
        ],
        dim=-2,
    )
    floor = torch.tensor(0.1).to(dtype=q_abs.dtype, device=q_abs.device)
    candidates = candidates / (2.0 * q_abs[..., None].max(floor))
    best = F.one_hot(q_abs.argmax(dim=-1), num_classes=4) > 0.5
    return candidates[best, :].reshape((*batch, 4))


@entry(lambda batch: (torch.randn(batch, 8),), scales=(-1.0, 30.0))
class RotationHeads(nn.Module):
    """6D to a matrix by Gram-Schmidt, quaternions there and back, an axis and angle by Rodrigues."""

    def __init__(self) -> None:
        super().__init__()
        self.fc6, self.fc4, self.fc3 = nn.Linear(8, 6), nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        d6 = self.fc6(x).view(-1, 3, 2)
        a1, a2 = d6[..., 0], d6[..., 1]
        b1 = F.normalize(a1)
        b2 = F.normalize(a2 - torch.einsum("bi,bi->b", b1, a2).unsqueeze(-1) * b1)
        six = torch.stack((b1, b2, torch.cross(b1, b2, dim=1)), dim=-1)
        quaternion = matrix_to_quaternion(six @ quaternion_to_matrix(self.fc4(x)))
        quaternion = torch.where(quaternion[..., 0:1] < 0, -quaternion, quaternion)
        vec = self.fc3(x)
        angle = torch.norm(vec, p=2, dim=1, keepdim=True)
        axis = vec / (angle + 1e-7)
        x_, y_, z_ = axis.unbind(1)
        zero = torch.zeros_like(x_)
        k = torch.stack([zero, -z_, y_, z_, zero, -x_, -y_, x_, zero], dim=1).view(-1, 3, 3)
        eye = torch.eye(3, device=x.device).unsqueeze(0)
        angle = angle.unsqueeze(-1)
        return six, quaternion, eye + torch.sin(angle) * k + (1 - torch.cos(angle)) * torch.bmm(k, k)


@entry(lambda batch: (torch.randn(batch, 5, 8, 6), torch.rand(batch, 5) > 0.4))
class SoftArgmax(nn.Module):
    """Expected coordinates and their spread, the hard maximum beside them with a quarter of a pixel of shift."""

    def forward(self, heat: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n, k, h, w = heat.shape
        prob = F.softmax(heat.reshape(n, k, -1) * 2.0, dim=2).reshape(n, k, h, w)
        xs, ys = torch.linspace(0, 1, w, device=heat.device), torch.linspace(0, 1, h, device=heat.device)
        x, y = (prob.sum(2) * xs).sum(-1), (prob.sum(3) * ys).sum(-1)
        coords = torch.stack([x, y], -1)
        var = (prob.sum(2) * (xs.view(1, 1, -1) - x.unsqueeze(-1)).pow(2)).sum(-1)
        score, index = heat.reshape(n, k, -1).max(2)
        px, py = index % w, torch.div(index, w, rounding_mode="floor")
        flat = heat.reshape(n, k, -1)
        right = flat.gather(2, (py * w + (px + 1).clamp(max=w - 1)).unsqueeze(-1)).squeeze(-1)
        left = flat.gather(2, (py * w + (px - 1).clamp(min=0)).unsqueeze(-1)).squeeze(-1)
        hard = torch.stack([px + 0.25 * torch.sign(right - left), py.float()], -1)
        coords[~visible] = -1.0
        return coords, hard * visible.unsqueeze(-1), torch.where(visible, var.sqrt(), score)


@entry(lambda batch: (torch.randn(batch, 3, 9, 8),))
class SpatialTransformer(nn.Module):
    """A localisation network whose affine matrix is the identity plus what it says; and the crop by its grid."""

    def __init__(self) -> None:
        super().__init__()
        self.localization = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, stride=2), nn.ReLU(True), nn.AdaptiveAvgPool2d((2, 3))
        )
        self.fc = nn.Linear(24, 6)
        self.fc.weight.data.mul_(0.3)
        self.fc.bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))

    def forward(self, x: Tensor) -> Tensor:
        theta = self.fc(self.localization(x).view(-1, 24)).view(-1, 2, 3).tanh()
        grid = F.affine_grid(theta, [x.size(0), x.size(1), 6, 5], align_corners=False)
        return F.grid_sample(x, grid, align_corners=False, padding_mode="border")


@entry(lambda batch: (torch.rand(batch, 4, 2) * 12, torch.rand(batch, 4) > 0.3), scales=(0.0, -1.0, 3.0))
class GaussianHeatmap(nn.Module):
    """Targets drawn in the graph: separable Gaussians of rounded centres, the largest of each class."""

    def forward(self, centers: Tensor, valid: Tensor) -> Tensor:
        xs = torch.arange(12, dtype=centers.dtype, device=centers.device)
        ys = torch.arange(10, dtype=centers.dtype, device=centers.device)[:, None]
        mu = torch.round(centers)
        heat = torch.exp(-((xs - mu[..., 0:1, None]) ** 2 + (ys - mu[..., 1:2, None]) ** 2) / (2 * 1.5**2))
        heat[heat < torch.finfo(heat.dtype).eps * heat.max()] = 0
        heat = heat * valid[..., None, None].float()
        return torch.stack([heat[:, :2].amax(1), heat[:, 2:].max(dim=1).values], 1)


@entry(
    lambda batch: (torch.rand(batch, 3, 8, 10), torch.rand(batch, 3, 8, 10), torch.rand(batch, 1, 8, 10)),
    scales=(0.0, 30.0),
)
class MonoDepth(nn.Module):
    """Reprojection of one image by depth and pose, compared by SSIM with the other; edge-aware smoothness."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.refl = nn.AvgPool2d(3, 1), nn.ReflectionPad2d(1)
        self.pose = nn.Linear(6, 6)
        self.register_buffer("K", torch.tensor([[8.0, 0, 5, 0], [0, 8, 4, 0], [0, 0, 1, 0], [0, 0, 0, 1]])[None])
        self.register_buffer("inv_K", torch.linalg.pinv(self.K))
        ys, xs = torch.meshgrid(torch.arange(8.0), torch.arange(10.0), indexing="ij")
        self.register_buffer("pix", torch.stack([xs.flatten(), ys.flatten(), torch.ones(80)], 0)[None])

    def ssim(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self.refl(x), self.refl(y)
        mu_x, mu_y = self.pool(x), self.pool(y)
        sigma_x, sigma_y = self.pool(x**2) - mu_x**2, self.pool(y**2) - mu_y**2
        sigma_xy = self.pool(x * y) - mu_x * mu_y
        n = (2 * mu_x * mu_y + 0.01**2) * (2 * sigma_xy + 0.03**2)
        d = (mu_x**2 + mu_y**2 + 0.01**2) * (sigma_x + sigma_y + 0.03**2)
        return torch.clamp((1 - n / d) / 2, 0, 1)

    def forward(self, target: Tensor, source: Tensor, disp: Tensor) -> tuple[Tensor, Tensor]:
        batch = target.shape[0]
        depth = 1 / (0.01 + (10 - 0.01) * disp)
        pooled = torch.cat([target, source], 1).mean((2, 3))
        pose = 0.01 * self.pose(pooled)
        t = torch.eye(4, device=target.device).repeat(batch, 1, 1)
        t[:, :3, 3] = pose[:, :3]
        t[:, 0, 1], t[:, 1, 0] = -pose[:, 3], pose[:, 3]
        points = depth.view(batch, 1, -1) * torch.matmul(self.inv_K[:, :3, :3], self.pix)
        points = torch.cat([points, torch.ones(batch, 1, 80, device=target.device)], 1)
        cam = torch.matmul(torch.matmul(self.K, t)[:, :3, :], points)
        pix = cam[:, :2, :] / (cam[:, 2, :].unsqueeze(1) + 1e-7)
        pix = pix.view(batch, 2, 8, 10).permute(0, 2, 3, 1)
        pix[..., 0] /= 10 - 1
        pix[..., 1] /= 8 - 1
        warped = F.grid_sample(source, (pix - 0.5) * 2, padding_mode="border", align_corners=True)
        loss = 0.85 * self.ssim(warped, target).mean(1, True) + 0.15 * (target - warped).abs().mean(1, True)
        norm = disp / (disp.mean(2, True).mean(3, True) + 1e-7)
        grad = torch.abs(norm[:, :, :, :-1] - norm[:, :, :, 1:])
        edge = torch.mean(torch.abs(target[:, :, :, :-1] - target[:, :, :, 1:]), 1, keepdim=True)
        return loss, grad * torch.exp(-edge)


@entry(lambda batch: (torch.randn(batch, 3, 8, 12),))
class PackNet(nn.Module):
    """Space to depth by views, 3D convolutions over the packed channels, and the inverse depth scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.conv3d, self.pack = nn.Conv3d(1, 2, 3, padding=1), nn.Conv2d(24, 8, 3, padding=1)
        self.unpack = nn.Conv3d(1, 2, 3, padding=1)
        self.out, self.pad = nn.Conv2d(4, 1, 3), nn.ConstantPad2d([1, 1, 1, 1], value=0)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        x = x.contiguous().view(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).contiguous()
        x = x.view(b, c * 4, h // 2, w // 2)
        x = self.conv3d(x.unsqueeze(1))
        b, c, d, h, w = x.shape
        x = F.elu(self.pack(x.view(b, c * d, h, w)))
        x = self.unpack(x.unsqueeze(1))
        b, c, d, h, w = x.shape
        x = F.pixel_shuffle(x.view(b, c * d, h, w), 2)
        return torch.sigmoid(self.out(self.pad(x))) / 0.5


@entry(lambda batch: (torch.rand(batch, 3, 6, 7),))
class SuperResolution(nn.Module):
    """EDSR and ESRGAN: the mean shifted by a frozen convolution, residual scaling, PixelShuffle, a bicubic skip."""

    def __init__(self) -> None:
        super().__init__()
        self.sub_mean = nn.Conv2d(3, 3, 1)
        self.sub_mean.weight.data = torch.eye(3).view(3, 3, 1, 1) / torch.tensor([1.0, 0.9, 1.1]).view(3, 1, 1, 1)
        self.sub_mean.bias.data = -torch.tensor([0.45, 0.44, 0.40])
        self.head, self.body = nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.PReLU(8))
        self.tail = nn.Sequential(nn.Conv2d(8, 32, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(8, 3, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        skip = F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False)
        x = self.head(self.sub_mean(x))
        x = x + self.body(x).mul(0.1)
        y = self.tail(x) + skip
        y = F.pixel_unshuffle(y, 2)
        return torch.clamp(F.pixel_shuffle(y, 2) * 255.0, 0, 255).round() / 255.0


@entry(lambda batch: (torch.rand(batch, 6, 3) * 4, torch.rand(batch, 2, 3)), scales=(0.0, -1.0))
class NeRF(nn.Module):
    """Positions encoded by frequencies, densities composed along rays by cumulated products."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(3 * 5, 16), nn.ReLU(), nn.Linear(16, 4))
        self.register_buffer("freqs", 2.0 ** torch.linspace(0, 1, 2))

    def forward(self, points: Tensor, sun: Tensor) -> tuple[Tensor, Tensor]:
        scaled = points[..., None, :] * self.freqs[:, None]
        encoded = torch.cat([points, torch.cat([scaled.sin(), scaled.cos()], -2).flatten(-2)], -1)
        raw = self.mlp(encoded)
        dists = torch.norm(points[:, 1:] - points[:, :-1], dim=-1)
        dists = torch.cat([dists, torch.full_like(dists[:, :1], 1e10)], -1)
        alpha = 1.0 - torch.exp(-F.relu(raw[..., 3]) * dists)
        transmit = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
        weights = alpha * transmit
        rgb = torch.sum(weights[..., None] * torch.sigmoid(raw[..., :3]), -2)
        cdf = torch.cat(
            [torch.zeros_like(weights[:, :1]), torch.cumsum(weights / (weights.sum(-1, True) + 1e-5), -1)], -1
        )
        places = torch.searchsorted(cdf.contiguous(), sun[:, 0].contiguous(), right=True)
        below = torch.clamp(places - 1, min=0, max=6)
        return rgb * math.sqrt(2), torch.gather(cdf, 1, below)
