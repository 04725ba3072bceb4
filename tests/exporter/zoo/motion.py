"""Sequences and graphs: forecasting, skeletons, filters, recurrences."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exporter.zoo import entry


def polylines(batch: int) -> tuple[Tensor, ...]:
    """Vectors of polylines (B, P, V, 6) and which of them are real; the first of each always is."""
    mask = torch.rand(batch, 5, 4) > 0.4
    mask[:, :, 0] = True
    return torch.randn(batch, 5, 4, 6), mask


@entry(polylines)
class VectorNet(nn.Module):
    """Subgraphs by max over the valid vectors, then global attention over polylines; the agent's is the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(n, 8), nn.LayerNorm(8), nn.ReLU()) for n in (6, 16)])
        self.query, self.key, self.value = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 8)
        self.head = nn.Linear(8, 6 * 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            pooled = x.masked_fill(~mask.unsqueeze(-1), float("-inf")).max(dim=2, keepdim=True)[0]
            pooled = torch.where(torch.isinf(pooled), torch.zeros_like(pooled), pooled)
            x = torch.cat([x, pooled.expand(-1, -1, x.shape[2], -1)], dim=-1)
        x = x.masked_fill(~mask.unsqueeze(-1), -1e9).max(dim=2)[0]
        valid = mask.any(-1)
        x = F.normalize(x, dim=-1)
        scores = torch.matmul(self.query(x), self.key(x).transpose(1, 2)) / math.sqrt(8)
        scores = scores.masked_fill(~valid.unsqueeze(1), -1e12)
        x = torch.matmul(torch.softmax(scores, -1), self.value(x))
        return self.head(x[:, 0]).view(x.shape[0], 6, 2).cumsum(1)


def lanes(batch: int) -> tuple[Tensor, ...]:
    return torch.randn(7, 2), torch.randn(7, 2), torch.randint(0, 7, (9,)), torch.randint(0, 7, (9,))


@entry(lanes, dynamic=False)
class LaneGCN(nn.Module):
    """Convolutions over lanes: index_add_ along edges of several scales, and attention of what is near."""

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Sequential(
            nn.Linear(2, 8), nn.ReLU(inplace=True), nn.Linear(8, 8, bias=False), nn.GroupNorm(1, 8)
        )
        self.fuse = nn.ModuleDict({key: nn.Linear(8, 8, bias=False) for key in ("ctr", "pre0", "suc0")})
        self.norm, self.ctr2 = nn.GroupNorm(1, 8), nn.Linear(8, 8, bias=False)
        self.dist = nn.Sequential(nn.Linear(2, 8), nn.ReLU(inplace=True))

    def forward(self, ctrs: Tensor, feats: Tensor, u: Tensor, v: Tensor) -> Tensor:
        x = F.relu(self.input(ctrs) + self.input(feats))
        res = x
        for _ in range(2):
            temp = self.fuse["ctr"](x)
            temp.index_add_(0, u, self.fuse["pre0"](x[v]))
            temp.index_add_(0, v, self.fuse["suc0"](x[u]))
            x = F.relu(self.norm(temp))
            x = self.ctr2(x)
            x += res
            x = F.relu(x)
            res = x
        dist = ctrs.view(-1, 1, 2) - ctrs.view(1, -1, 2)
        near = torch.sqrt((dist**2).sum(2)) <= 1.0
        idcs = torch.nonzero(near, as_tuple=False)
        hi, wi = idcs[:, 0], idcs[:, 1]
        out = self.fuse["ctr"](x)
        out.index_add_(0, hi, self.dist(ctrs[hi] - ctrs[wi]) * x[wi])
        return F.relu(out)


def scene(batch: int) -> tuple[Tensor, ...]:
    mask = torch.rand(batch, 4, 5) > 0.3
    mask[:, :, -1] = True
    return torch.randn(batch, 4, 5, 7), mask, torch.rand(batch, 4) * 6 - 3


@entry(scene)
class MotionTransformer(nn.Module):
    """Agents in their own frames, attention over time and agents with padding, modes as Gaussian mixtures."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pos = nn.Linear(7, 8), nn.Parameter(torch.randn(1, 5, 8))
        layer = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "batch_first": True}
        self.time, self.agents = (
            nn.TransformerEncoderLayer(**layer),
            nn.TransformerEncoderLayer(norm_first=True, **layer),
        )
        self.anchors = nn.Embedding(3, 8)
        self.decoder = nn.TransformerDecoderLayer(**layer)
        self.head, self.prob = nn.Linear(8, 6 * 5), nn.Linear(8, 1)

    def forward(self, history: Tensor, mask: Tensor, heading: Tensor) -> tuple[Tensor, Tensor]:
        batch, agents, steps, _ = history.shape
        cos, sin = torch.cos(heading), torch.sin(heading)
        rotation = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
        center = history[:, :, -1:, :2]
        local = torch.einsum("batd,bade->bate", history[..., :2] - center, rotation)
        x = self.embed(torch.cat([local, history[..., 2:]], -1)) + self.pos.unsqueeze(1)
        x = self.time(x.flatten(0, 1), src_key_padding_mask=~mask.flatten(0, 1))
        x = x.view(batch, agents, steps, 8)
        x = (x * mask.unsqueeze(-1)).sum(2) / mask.sum(2, keepdim=True).clamp(min=1)
        causal = torch.triu(torch.ones(agents, agents, dtype=torch.bool, device=x.device), diagonal=1)
        x = self.agents(x, src_mask=causal)
        query = self.anchors.weight[None].repeat(batch, 1, 1)
        modes = self.decoder(query, x)
        out = self.head(modes).view(batch, 3, 6, 5)
        mean = out[..., :2].cumsum(-2)
        sigma = out[..., 2:4].clamp(-1.609, 5.0).exp()
        rho = torch.tanh(out[..., 4:]) * 0.5
        return torch.cat([mean, sigma, rho], -1), self.prob(modes).squeeze(-1).softmax(-1)


@entry(lambda batch: (torch.randn(batch, 3, 6, 5, 2),), scales=(0.0, -1.0, 3.0))
class AdaptiveSTGCN(nn.Module):
    """2s-AGCN: a fixed, a learned and a data dependent adjacency, batch norm over persons, joints and channels."""

    def __init__(self) -> None:
        super().__init__()
        self.data_bn = nn.BatchNorm1d(2 * 5 * 3)
        self.register_buffer("A", torch.rand(3, 5, 5))
        self.PA = nn.Parameter(1e-2 * torch.randn(3, 5, 5))
        self.conv_a, self.conv_b = (nn.ModuleList([nn.Conv2d(3, 2, 1) for _ in range(3)]) for _ in range(2))
        self.conv_d = nn.ModuleList([nn.Conv2d(3, 4, 1) for _ in range(3)])
        self.bn, self.soft = nn.BatchNorm2d(4), nn.Softmax(-2)
        self.tcn = nn.Conv2d(4, 4, (3, 1), padding=(1, 0), stride=(2, 1))
        self.fc = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        n, c, t, v, m = x.size()
        x = x.permute(0, 4, 3, 1, 2).contiguous().view(n, m * v * c, t)
        x = self.data_bn(x)
        x = x.view(n, m, v, c, t).permute(0, 1, 3, 4, 2).contiguous().view(n * m, c, t, v)
        adjacency = self.A + self.PA
        y = None
        for i in range(3):
            a1 = self.conv_a[i](x).permute(0, 3, 1, 2).contiguous().view(n * m, v, 2 * t)
            a2 = self.conv_b[i](x).view(n * m, 2 * t, v)
            a1 = self.soft(torch.matmul(a1, a2) / a1.size(-1)) + adjacency[i]
            z = self.conv_d[i](torch.matmul(x.view(n * m, c * t, v), a1).view(n * m, c, t, v))
            y = z + y if y is not None else z
        y = self.tcn(F.relu(self.bn(y)))
        y = y.view(n, m, 4, -1).mean(3).mean(1)
        return self.fc(y)


class Chomp(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, : -self.size].contiguous()


@entry(lambda batch: (torch.randn(batch, 3, 9),))
class TCN(nn.Module):
    """Weight-normed dilated convolutions, chomped to be causal, with residuals."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        blocks = []
        for i, channels in enumerate((3, 6)):
            d = 2**i
            blocks.append(
                nn.Sequential(
                    norm(nn.Conv1d(channels, 6, 3, padding=2 * d, dilation=d)), Chomp(2 * d), nn.ReLU(), nn.Dropout(0.2)
                )
            )
        self.first, self.second = blocks
        self.down, self.linear = nn.Conv1d(3, 6, 1), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x) + self.down(x))
        y = F.relu(self.second(y) + y)
        return F.log_softmax(self.linear(y[:, :, -1]), dim=1)


@entry(lambda batch: (torch.randn(batch, 4, 3, 5, 6),))
class ConvLSTM(nn.Module):
    """Cells over time, their states made in forward, the last of them returned."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3 + 4, 4 * 4, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b, t, _, height, width = x.size()
        h = torch.zeros(b, 4, height, width, device=self.conv.weight.device)
        c = torch.zeros(b, 4, height, width, device=self.conv.weight.device)
        outputs = []
        for step in range(t):
            i, f, o, g = torch.split(self.conv(torch.cat([x[:, step], h], dim=1)), 4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs, dim=1), c


@entry(lambda batch: (torch.randn(batch, 3, 5, 6), torch.randn(batch, 4, 5, 6)))
class ConvGRU(nn.Module):
    """One step of a memory that the caller keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.candidate = nn.Conv2d(7, 8, 3, padding=1), nn.Conv2d(7, 4, 3, padding=1)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        reset, update = self.gates(torch.cat([x, h], 1)).sigmoid().chunk(2, 1)
        new = torch.tanh(self.candidate(torch.cat([x, reset * h], 1)))
        return torch.lerp(h, new, update)


def tracks(batch: int) -> tuple[Tensor, ...]:
    root = torch.randn(batch, 4, 4)
    return torch.randn(batch, 4), root @ root.mT + torch.eye(4), torch.randn(batch, 2)


@entry(tracks, scales=(-1.0, 2.0))
class Kalman(nn.Module):
    """Prediction and update of constant velocity, the gain by solving, the gate by a Cholesky factor."""

    def __init__(self) -> None:
        super().__init__()
        f = torch.eye(4)
        f[0, 2] = f[1, 3] = 0.1
        self.register_buffer("F", f)
        self.register_buffer("H", torch.eye(2, 4))
        self.log_q, self.log_r = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, p: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        p = (p + p.transpose(-1, -2)).abs() / 2 + 10 * torch.eye(4)
        x = torch.einsum("ij,bj->bi", self.F, x)
        p = self.F @ p @ self.F.T + torch.diag_embed(self.log_q.exp())
        innovation = z - x @ self.H.T
        s = self.H @ p @ self.H.T + torch.diag(self.log_r.exp())
        gain = torch.linalg.solve(s, self.H @ p).mT
        x = x + (gain @ innovation.unsqueeze(-1)).squeeze(-1)
        eye = torch.eye(4, device=x.device).expand_as(p)
        p = torch.bmm(eye - gain @ self.H, p)
        gate = torch.einsum("bi,bij,bj->b", innovation, torch.inverse(s), innovation)
        return x, 0.5 * (p + p.mT), gate


@entry(lambda batch: (torch.randn(batch, 6, 8), torch.randint(1, 7, (batch,))))
class LengthsGRU(nn.Module):
    """A recurrence over padded sequences, of each the state at its own length."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 6, num_layers=2, batch_first=True, bidirectional=False)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out, _ = self.gru(x)
        index = (lengths - 1).view(-1, 1, 1).expand(-1, 1, out.size(2)).clamp(min=0)
        return out.gather(1, index).squeeze(1)
