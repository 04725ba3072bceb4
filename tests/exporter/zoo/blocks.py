"""Blocks that every repository has: channel gates, merged branches, running statistics, masks of several kinds."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exporter.zoo import entry


@entry(lambda batch: (torch.randn(batch, 8, 6, 7),))
class Gates(nn.Module):
    """SE, ECA, CBAM and coordinate attention one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.se = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(8, 2, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(2, 8, 1),
            nn.Hardsigmoid(inplace=True),
        )
        self.eca = nn.Conv1d(1, 1, 3, padding=1, bias=False)
        self.mlp = nn.Sequential(nn.Flatten(), nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 8))
        self.spatial = nn.Conv2d(2, 1, 7, padding=3)
        self.squeeze, self.ch, self.cw = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.se(x)
        y = self.eca(F.adaptive_avg_pool2d(x, 1).squeeze(-1).transpose(-1, -2)).transpose(-1, -2).unsqueeze(-1)
        x = x * y.sigmoid().expand_as(x)
        pooled = [
            F.avg_pool2d(x, (x.size(2), x.size(3)), stride=(x.size(2), x.size(3))),
            F.lp_pool2d(x, 2, (x.size(2), x.size(3)), stride=(x.size(2), x.size(3))),
            F.max_pool2d(x, (x.size(2), x.size(3)), stride=(x.size(2), x.size(3))),
        ]
        x = x * torch.sigmoid(sum(self.mlp(p) for p in pooled)).unsqueeze(2).unsqueeze(3).expand_as(x)
        x = x * torch.sigmoid(
            self.spatial(torch.cat((torch.max(x, 1)[0].unsqueeze(1), torch.mean(x, 1).unsqueeze(1)), 1))
        )
        _n, _c, h, w = x.size()
        x_h = nn.AdaptiveAvgPool2d((None, 1))(x)
        x_w = nn.AdaptiveAvgPool2d((1, None))(x).permute(0, 1, 3, 2)
        y = F.hardswish(self.squeeze(torch.cat([x_h, x_w], dim=2)))
        x_h, x_w = torch.split(y, [h, w], dim=2)
        return x * self.ch(x_h).sigmoid() * self.cw(x_w.permute(0, 1, 3, 2)).sigmoid()


@entry(lambda batch: (torch.randn(batch, 4, 6, 7),))
class RepVGG(nn.Module):
    """Three branches, of which one is the identity, merged in forward as the kernel of one convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.dense_bn = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.one, self.one_bn, self.identity = nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        for bn in (self.dense_bn, self.one_bn, self.identity):
            nn.init.uniform_(bn.running_var, 0.5, 1.5)
            nn.init.normal_(bn.running_mean)

    @staticmethod
    def fused(kernel: Tensor, bn: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
        std = (bn.running_var + bn.eps).sqrt()
        return kernel * (bn.weight / std).reshape(-1, 1, 1, 1), bn.bias - bn.running_mean * bn.weight / std

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        eye = torch.zeros(4, 4, 3, 3, device=x.device)
        for i in range(4):
            eye[i, i % 4, 1, 1] = 1
        kernels = self.dense.weight, F.pad(self.one.weight, [1, 1, 1, 1]), eye
        parts = [self.fused(k, bn) for k, bn in zip(kernels, (self.dense_bn, self.one_bn, self.identity), strict=True)]
        kernel, bias = sum(p[0] for p in parts), sum(p[1] for p in parts)
        branches = self.dense_bn(self.dense(x)) + self.one_bn(self.one(x)) + self.identity(x)
        return F.relu(F.conv2d(x, kernel, bias, padding=1)), F.relu(branches)


@entry(lambda batch: (torch.randn(batch, 4, 5),))
class RunningStatistics(nn.Module):
    """Inputs normalized by statistics in buffers, updated only in training; an averaged copy beside."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(5))
        self.register_buffer("var", torch.rand(5) + 0.5)
        self.register_buffer("count", torch.tensor(10.0))
        self.net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(4), nn.ELU(), nn.Linear(6, 3))
        self.ema = copy.deepcopy(self.net).requires_grad_(False)
        for p, e in zip(self.net.parameters(), self.ema.parameters(), strict=True):
            e.data.mul_(0.9).add_(p.data + 0.1, alpha=0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            delta = x.mean((0, 1)) - self.mean
            self.mean += delta * x.shape[0] / (self.count + x.shape[0])
            self.count += x.shape[0]
        x = torch.clamp((x - self.mean) / torch.sqrt(self.var + 1e-8), -5, 5)
        return self.net(x), self.ema(x)


def masked(batch: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, 6, 8), torch.rand(batch, 6) > 0.4, torch.randint(0, 3, (batch, 6))


@entry(masked)
class MixedMasks(nn.Module):
    """Padding, causal and segment masks combined; rows without any key set to zero; masked mean, max and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, valid: Tensor, segment: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n, t, c = x.shape
        causal = torch.tril(torch.ones(t, t, dtype=torch.bool, device=x.device))
        mask = causal[None] & valid[:, None, :] & (segment[:, :, None] == segment[:, None, :])
        bias = torch.zeros(n, t, t, device=x.device).masked_fill_(mask.logical_not(), float("-inf"))
        q, k, v = self.qkv(x).view(n, t, 3, 2, 4).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, None])
        out = out.transpose(1, 2).reshape(n, t, c)
        out = torch.where(mask.any(-1, keepdim=True), out, torch.zeros_like(out))
        scores = ((q @ k.transpose(-2, -1)) / 2).masked_fill(~mask[:, None], torch.finfo(x.dtype).min)
        out = out + (scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, c)
        mean = (x * valid[..., None]).sum(1) / valid.sum(1, keepdim=True).clamp(min=1)
        best = torch.max(x.masked_fill(~valid[..., None], -1e4), dim=1)[0]
        return self.out(out), torch.cat([mean, best], -1), (valid.long().cumsum(1) - 1) * valid


@entry(lambda batch: (torch.randn(batch, 6, 8),))
class MixtureOfExperts(nn.Module):
    """The best two of four experts, their weights renormalised, every expert computed and combined by one hot."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.w1, self.w2 = nn.Parameter(0.3 * torch.randn(4, 8, 12)), nn.Parameter(0.3 * torch.randn(4, 12, 8))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(F.softmax(self.gate(x), dim=-1), 2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        hidden = F.gelu(torch.einsum("btd,edh->bteh", x, self.w1), approximate="tanh")
        out = torch.einsum("bteh,ehd->bted", hidden, self.w2)
        combine = (F.one_hot(chosen, 4).to(x.dtype) * weights.unsqueeze(-1)).sum(2)
        return (out * combine.unsqueeze(-1)).sum(2) / (x.norm(dim=-1, keepdim=True) + 1)


@entry(lambda batch: (torch.randn(batch, 7, 6),))
class VectorQuantizer(nn.Module):
    """The nearest entry of a codebook, straight through, with its index and the perplexity of their use."""

    def __init__(self) -> None:
        super().__init__()
        self.codebook = nn.Embedding(5, 6)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = z.reshape(-1, 6)
        distance = (
            (flat**2).sum(1, keepdim=True) + (self.codebook.weight**2).sum(1) - 2 * flat @ self.codebook.weight.t()
        )
        index = torch.argmin(distance, dim=1).unsqueeze(1)
        encodings = torch.zeros(index.shape[0], 5, device=z.device)
        encodings.scatter_(1, index, 1)
        quantized = torch.matmul(encodings, self.codebook.weight).view(z.shape)
        used = encodings.mean(0)
        return (
            z + (quantized - z).detach(),
            index.view(z.shape[:-1]),
            torch.exp(-torch.sum(used * torch.log(used + 1e-10))),
        )
