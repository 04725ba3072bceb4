"""Habits in the spellings that people use, each with a near miss that is no habit."""

from __future__ import annotations

import pytest

from svexport.advise import advise

HEAD = """import torch
import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

TABLE = np.array([[1.0, 2.0], [3.0, 4.0]])


def helper(x) -> Tensor:
    return x


X, Y, W = range(3)


class Model(nn.Module):
    def __init__(self, fold=8, ratio=0.5):
        super().__init__()
        self.fold, self.ratio = fold, ratio
        self.conv = nn.Conv2d(3, 8, 1)
        self.range = [-51.2, -51.2, 51.2, 51.2]
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.heads = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2)])
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d((1, 1)), nn.Conv2d(3, 8, 1))
        self.up = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Upsample(2), nn.Conv2d(3, 8, 1))
        self.sizes = (3, 1)
        self.soft, self.hard = nn.Softmax(dim=1), nn.LogSoftmax(-1)
        self.one = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        self.a, self.b = (nn.Sequential(nn.Linear(8, 8)) for _ in range(2))
        self.c, self.d = (build() for _ in range(2))
        self.tracks = {}
        kernel = torch.rand(3, 3)
        self.register_buffer("kernel", (kernel / kernel.sum())[None, None])

    def keep(self, row):
        self.tracks[len(self.tracks)] = row

    def turn(self, z):
        return z.permute(1, 0)
"""


def codes(lines, folder, parameters="x: Tensor, y: Tensor, p"):
    path = folder / "model.py"
    body = "\n".join(f"        {line}" for line in lines.split("; "))
    path.write_text(f"{HEAD}\n    def forward(self, {parameters}):\n{body}\n")
    report = advise([path])
    assert not report.unread
    return [f.code for f in report.findings]


@pytest.mark.parametrize(
    ("habit", "code"),
    [
        ("label = x.softmax(-1).max(-1)[1]; return label", "SVX304"),
        ("_, label = torch.softmax(x, dim=1).max(dim=1); return label", "SVX304"),
        ("return F.softmax(x, -1).max(-1).indices", "SVX304"),
        ("return x.sigmoid().squeeze(-1) > 0.5", "SVX302"),
        ("q = x.sigmoid(); return q[..., 0] > 0.5, q.flatten(1) > 0.3", "SVX302"),
        ("y = x.permute(0, 2, 1); y = torch.tanh(y); return y", "SVX205"),
        ("y = x.transpose(1, 2); y = y > 0; return y", "SVX205"),
        ("y = self.conv(y); y = x.permute(0, 3, 1, 2).contiguous(); return self.conv(y)", "SVX207"),
        ("return self.conv(x.movedim(-1, 1).contiguous())", "SVX207"),
        ("return (x[:, :, None, :, None] * y[:, None, :, :, :]).sum((-2, 0))", "SVX301"),
        ("lo = torch.tensor(self.range[:2], device=x.device); return x - lo", "SVX106"),
        ("x = x.clamp(0, 1); return torch.log(x / (1 - x))", "SVX303"),
        ("x = x.clip(min=0, max=1); return torch.log(x / (1 - x))", "SVX303"),
        ("return x[..., (0, 1)] * 2", "SVX204"),
        ("n = len(x[0]); return n", "SVX103"),
        ("return len(helper(p)[0])", "SVX103"),
        ("for i in range(3): p.append((x + i).nonzero().tolist()); return p", "SVX101"),
        ("for i, row in enumerate(x): p[i] = row.flatten().tolist(); return p", "SVX101"),
        ("for a, b in zip(x, y): p.append(b.tolist()); return p", "SVX101"),
        ("return x[:, :1].repeat(1, 3, 1) * y", "SVX201"),
        ("z = torch.zeros_like(x); z[:-1, :2] = x[1:, :2]; z[:, 2:] = x[:, 2:]; return z", "SVX105"),
        ("z = torch.zeros(8, 8).to(x.device, x.dtype); z[:, 0] = x; z[:, 1] = y; return z", "SVX105"),
        ("z = torch.zeros_like(x); z[:, 0] = y; z[:, 1] = y; return z[:, 0]", "SVX105"),
        (
            "z = torch.zeros_like(x); z[0::2, 0::2] = y; z[1::2, 0::2] = y; z[0::2, 1::2] = y; z[1::2, 1::2] = y; "
            "return z",
            "SVX105",
        ),
        ("y = self.conv(p); y[..., :2] += x[..., :2]; y[..., 4:5] = x[..., 2:3]; return y", "SVX105"),
        ("y = self.heads[0](p); y[..., 0] = x[..., 0]; y[..., 1] = x[..., 1]; return y", "SVX105"),
        ("y = x * 2; y = y.view(4, 4); y = x * 3; y[:, 0] = x[:, 1]; y[:, 1] = x[:, 0]; return y", "SVX105"),
        (
            "z = x.new_zeros(4, 6, 9); for i in range(4):;     for j in range(6):;         z[i, j, :len(p[i])] = p[i]; "
            "return z",
            "SVX105",
        ),
        ("for i in range(x.size(0)):;     y[i] = torch.relu(y[i]); return y", "SVX102"),
        ("for row in x.split(1, dim=0): p.append(torch.relu(row)); return p", "SVX102"),
        ("for row in x: p.append((row.sum(-1) > 0).nonzero()); return p", "SVX104"),
        ("return x * self.token.repeat(2, 3, 1)", "SVX201"),
        ("mask = y[..., None].repeat(1, 1, 8); return torch.where(mask > 0, x, p)", "SVX201"),
        ("z = x.mean(1, keepdim=True).repeat(1, 5); return x - z", "SVX201"),
        ("return torch.ones_like(x).mul_(0.5)", "SVX202"),
        ("return torch.zeros(3, 2).float().to(x.device)", "SVX202"),
        ("a, b = self.q(x), self.k(x); n, m, c = a.shape; return (a.unsqueeze(2) * b.unsqueeze(1)).sum(-1)", "SVX301"),
        ("b, n, c = x.shape; q, k, v = self.q(x).chunk(3, -1); return (q[:, :, None] * k[:, None]).sum(-1)", "SVX301"),
        (
            "b, n, c = x.shape; for head in self.heads:;     x = x + head(x); "
            "return (x.unsqueeze(2) * x.unsqueeze(1)).sum(-1)",
            "SVX301",
        ),
        ("x = p + 1  # (B, N, C); return (x.unsqueeze(2) * y.view(1, 1, 4, 8)).sum(-1)", "SVX301"),
        ("return self.conv(x.permute(0, 3, 1, 2).float().contiguous())", "SVX207"),
        ("odds = x / (1 - x); return torch.log(odds)", "SVX303"),
        ("z = self.q(p); return len(z)", "SVX103"),
        (
            "a = x[..., ::2, ::2]; b = x[..., 1::2, ::2]; c = x[..., ::2, 1::2]; d = x[..., 1::2, 1::2]; "
            "x = torch.cat((a, b, c, d), 1); a = x + 1; return a",
            "SVX203",
        ),
        ("for i in range(4): p.append(float(x[i])); return p", "SVX101"),
        ("return x * self.pool(p).repeat(1, 1, 2, 2)", "SVX201"),
        ("return x.moveaxis(1, -1).clip(min=-1.5)", "SVX205"),
        ("return torch.movedim(x, 0, 2).permute(1, 2, 0)", "SVX206"),
        ("for row in (x > y).unbind(0): p.append(torch.cumsum(row, 0)); return p", "SVX102"),
        ("z = x.new_zeros(4, 3, 6); for d in range(3):;     z[:, d, d:] = x[:, d:]; return z", "SVX105"),
        ("z = torch.zeros_like(x); for a, b in p:;     z[:, a] = x[:, b] - y[:, a]; return z", "SVX105"),
        ("z = y.clone(); z[:, :1] = x[:, :1] * 2; z[:, 1:2] = x[:, 1:2] + 2; return z", "SVX105"),
        (
            "z = x.new_zeros(4, 6); for i in range(2):;     for j in range(3):;         z[:, i * 3 + j] = x[:, i] * j; "
            "return z",
            "SVX105",
        ),
        (
            "k = 0; z = x.new_zeros(4, 6); for i in range(2):;     for j in range(3):;         z[:, k] = x[:, i] * j;"
            "         k += 1; return z",
            "SVX105",
        ),
        ("z = x / 2; z = z.permute(0, 2, 1); z[..., 0] /= 3; z[..., 1] /= 5; return z", "SVX105"),
        ("return [torch.nonzero(row > 0) for row in x]", "SVX104"),
        ("for i in range(x.shape[0]): p.append(x[i].nonzero()); return p", "SVX104"),
        ("z = [torch.nonzero(row) for row in x]; return [row.flip(1) for row in z]", "SVX104"),
        ("return x.softmax(-1).topk(2).indices", "SVX304"),
        ("_, order = x.sigmoid().sort(1); return order", "SVX304"),
        ("return torch.softmax(x, -1).argsort()", "SVX304"),
        ("return torch.zeros(3, 2).to(x)", "SVX202"),
        ("return torch.arange(3).to(x.device)", "SVX202"),
        ("return torch.zeros(3, 2).cuda()", "SVX202"),
        ("return x.permute(0, 2, 1).mul(255).round()", "SVX205"),
        ("return torch.floor(x.permute(0, 2, 1) * 2 + 1)", "SVX205"),
        ("y = x.permute(0, 2, 1); p.to(y.device); y = torch.tanh(y); return y", "SVX205"),
        ("z = torch.log(x / (1 - x)); z = z.masked_fill(y > 0, 0); return z", "SVX303"),
        ("best = x.argmax(-1); return torch.stack([y[i, best[i]] for i in range(x.shape[0])])", "SVX102"),
        ("best = x.max(1); return torch.stack([y[i, best.indices[i]] for i in range(x.shape[0])])", "SVX102"),
        ("best = self.conv(p).max(1).indices; return len(best)", "SVX103"),
        ("values, _ = x.topk(2); return len(values)", "SVX103"),
        ("return torch.softmax(x, 1).flatten(2).argmax(1)", "SVX304"),
        ("return x.softmax(1).permute(0, 2, 3, 1).contiguous().argmax(-1)", "SVX304"),
        ("return torch.linspace(0, 1, steps=5, device=x.device)", "SVX106"),
        ("return torch.cat([x[:, :, a::2, b::2] for a, b in ((0, 0), (1, 0), (0, 1), (1, 1))], 1)", "SVX203"),
        ("z = x.new_zeros(4, 2); z[:, 0], z[:, 1] = x[:, 1], x[:, 0]; return z", "SVX105"),
        ("z = torch.empty(*x.shape, 2); z[..., 0] = x; z[..., 1] = y; return z", "SVX105"),
        (
            "z = []; for i in p:;     z.append(x.view(1, -1, 4)); z = torch.cat(z, 1); return y + z.repeat(3, 1, 1)",
            "SVX201",
        ),
        ("p = p[None] + 1; return len(p)", "SVX103"),
        ("return torch.linspace(start=0, end=1, steps=5, device=x.device)", "SVX106"),
        ("return torch.stack([torch.where(b, a, -a) for a, b in zip(x, y)])", "SVX102"),
        ("_, i = p.max(dim=1); return [int(i[k]) for k in range(3)]", "SVX101"),
        ("z = x.new_zeros(x.shape[:2] + (3, 3)); return (z[:, :, None] * y.view(2, 2, 4, 1, 3)).sum(-1)", "SVX301"),
        ("z = torch.zeros(*x.shape[:2], 3, 3); return (z[:, :, None] * y.view(2, 2, 4, 1, 3)).sum(-1)", "SVX301"),
        ("i = x.topk(2).indices; return torch.stack([a[b] for a, b in zip(y, i)])", "SVX102"),
        ("# x: (B, N, C), y: (K,); return (x.unsqueeze(-1) * torch.stack((y, y))[None, None]).sum(2)", "SVX301"),
        ("b, c = x.shape; return x.softmax(-1).argmax(1)", "SVX304"),
        ("return x * y[..., None].permute(0, 2, 1).repeat(1, 4, 1)", "SVX201"),
        ("z = y.unsqueeze(1).repeat(1, 4); return x * z[..., None]", "SVX201"),
        ("z = y.view(2, 3, 1, 5).repeat(1, 1, 4, 1); return (x * z).sum(1) / z.sum(1).clamp(min=1)", "SVX201"),
        ("z = x.mean(1, keepdim=True) / y.view(-1, 1, 1); return x - z.repeat(1, 5, 1)", "SVX201"),
        ("return x[..., [X, Y]] * 2", "SVX204"),
        ("return int(x.shape[1] / self.fold)", "SVX103"),
        ("n = len(p); z = p @ self.token; return n", "SVX103"),
        ("n = len(p); return self.turn(p), n", "SVX103"),
        ("y = x.permute(0, 2, 1); return F.relu(y) if p else y", "SVX205"),
        ("z = x.new_zeros(4, 3, 2); for i in range(3):;     z[:, i, 0] = x;     z[:, i, 1] = y; return z", "SVX105"),
        ("z = torch.zeros(1, 5, 4).to(x.device, x.dtype); z[0, 0] = y; z[0, 1:] = x; return z", "SVX105"),
        ("z = torch.zeros_like(x); z[:, 1:-1, 1:-1] = y; return z", "SVX105"),
        ("z = x.new_zeros(4, 9); z[:, 2:5] = y; z[:, 5:] = z[:, 3:4] * 2; return z", "SVX105"),
        ("z = torch.zeros_like(x); z[:, 0] = x; a = z[:, 0]; z[:, 1] = a; return z", "SVX105"),
        ("for i in range(x.shape[0]): p.append(self.conv(x[i : i + 1])); return p", "SVX102"),
        ("a = x.clamp(min=0); b = (1 - x).clamp(min=0); return torch.log(a / b)", "SVX303"),
        ("z = y.unsqueeze(-1).repeat(1, 1, 8); return x * z.to(x.dtype)", "SVX201"),
        ("return x.sigmoid().flatten(1).amax(-1) > 0.5", "SVX302"),
        ("return torch.max(x.sigmoid(), 1)[0] > 0.5, x.sigmoid().min(1).values < 0.5", "SVX302"),
        ("return torch.linspace(start=0, end=1, steps=5).to(x.device)", "SVX202"),
        ("return x * y.unsqueeze(-1).unsqueeze(-1).repeat(1, 1, 8, 8)", "SVX201"),
        ("return x * self.pool(p).repeat(1, 1, *x.shape[-2:])", "SVX201"),
        ("return x * F.conv2d(p, self.kernel).repeat(1, 8, 1, 1)", "SVX201"),
        ("return x * torch.from_numpy(TABLE).to(x)", "SVX106"),
        ("z = self.b(p); return len(z)", "SVX103"),
        ("return x * self.conv(y[..., -1:]).repeat(1, 1, 1, 8)", "SVX201"),
        ("return x - self.conv(y[..., -1:].flatten(0, 1)[..., None]).repeat(1, 1, 4, 8)", "SVX201"),
        ("a, b, *_ = self.range; c, d, e, f, g, h = self.range; return torch.arange(c, d, device=x.device)", "SVX106"),
        ("return x.softmax(1)[0].argmax(0)", "SVX304"),
        ("return x.softmax(-1)[..., :-1].argmax(-1)", "SVX304"),
        ("return self.soft(x).argmax(1)", "SVX304"),
        ("z = x.softmax(1); return torch.topk(z[:, 1:], k=2, dim=1).indices", "SVX304"),
        ("return x.sigmoid().squeeze(-1).argsort(1), x.softmax(-1)", "SVX304"),
        ("return x.softmax(-2).squeeze(-1).argmax(-1), x.softmax(2).squeeze(0).argmax(1)", "SVX304"),
        ("z = x.new_zeros(4, 2, 2); z[:, 0, 0], z[:, 1, 0] = x, y; z[:, :, 1] = y; return z", "SVX105"),
        ("return x * p.view(2, 1, *self.range[:3]).repeat(1, 8, 1, 1, 1)", "SVX201"),
        ("return x * p.view(2, *self.sizes).repeat(1, 1, 3)", "SVX201"),
        ("return self.hard(x).argmax(-1), nn.Softmax(0)(x).argmax(0)", "SVX304"),
        ("return nn.Sigmoid()(x) > 0.5", "SVX302"),
        ("return torch.zeros(2, *x.shape[1:]).type_as(y)", "SVX202"),
        ("return x * self.one(p).repeat(1, 1, 8)", "SVX201"),
        ("return x * F.interpolate(p.reshape(1, 4, 4, 8).permute(0, 3, 1, 2), p).repeat(9, 1, 1, 1)", "SVX201"),
        (
            "b, c = x.shape; for i in range(b):;     keep = y[i].topk(2).indices;     p.append(x[i, keep].relu()); "
            "return p",
            "SVX102",
        ),
        ("return x.permute(0, 2, 1).contiguous().gt(0.5)", "SVX205"),
        ("return x * x.new_tensor([[a, b] for a in (-1, 1) for b in range(2)])", "SVX106"),
        ("b, c = x.shape; d, e = y.shape; z = x[:, None] * y[None]; return z.sum(-1), z.device", "SVX301"),
        (
            "s = (slice(0, 2), slice(2, None)); z = x.new_zeros(4, 4); "
            "for i, (a, b) in enumerate(itertools.product(s, s)):;     z[a, b] = i; return z",
            "SVX105",
        ),
    ],
)
def test_found(tmp_path, habit, code):
    assert code in codes(habit, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "score, label = x.softmax(-1).max(-1); return score, label",
        "return x.softmax(-1).max(-1)[0]",
        "return x.softmax(-1).max()",
        "q = x.sigmoid(); return q[..., 0] > 0.5, q.flatten(1)",
        "y = x.permute(0, 2, 1); z = torch.tanh(y); return y, z",
        "y = x.permute(0, 2, 1); p = y; y = torch.tanh(y); return y, p",
        "y = self.conv(y); y = x.permute(0, 3, 1, 2).contiguous(); p = self.conv(y); return p, y.view(-1)",
        "return self.conv(x.movedim(1, -1).contiguous())",
        "return (x[:, :, None, :] * y[:, None, :, :]).sum((1, 3))",
        "y = x + 1; try:;     y = x.sigmoid();     return y > 0.5; finally:;     print(y)",
        "lo = torch.tensor(self.range[p:]); return x - lo",
        "x = x.clamp(0, 0.999); return torch.log(x / (1 - x))",
        "return x[(0, 1)] * 2, x[:, (0, 2, 1)]",
        "for rows in x.nonzero(as_tuple=True): p.append(rows); return p",
        "return x[:, :2].repeat(1, 3, 1) * y, x[0, :1].repeat(1, 3, 1) * y",
        "z = torch.zeros_like(x); z[0::2, 0::2] = y; z[1::2, 1::2] = y; return z",
        "z = torch.zeros_like(x); z[2:4, :2] = x[2:4, :2]; z[:, 2:] = x[:, 2:]; return z",
        "z = x[:2]; z[:, 0] = y; z[:, 1] = y; return z",
        "a = x[..., ::2, ::2]; b = x[..., 1::2, ::2]; x = y; c = x[..., ::2, 1::2]; d = x[..., 1::2, 1::2]; "
        "return torch.cat((a, b, c, d), 1)",
        "z = x.view(2, 4); z[:, 0] = y; z[:, 1] = y; return z",
        "z = self.conv(x); if p:;     z = y; z[:, 0] = y; z[:, 1] = y; return z",
        "z = x.new_zeros(4, 2); z[:, 0] = x.shape[2]; z[:, 1] = x.shape[3]; return z",
        "for h, w in zip(x, y): p.append(F.interpolate(p, size=(h, w))); return p",
        "for i in x.nonzero(): p.append(torch.where(y[i])); return p",
        "for _ in p: x = x.unsqueeze(0); return (x.unsqueeze(1) * y.view(1, 1, 4, 8)).sum(-1)",
        "if x.dim() == 3:;     b, n, c = x.shape; return (x.unsqueeze(2) * y.unsqueeze(1)).sum(-1)",
        "n, c, h, w = x.shape; return (x.view(n, 1, 9, 8, h, w) * y.view(n, 2, 9, 1, h, w)).sum(2)",
        "mask = y[..., None].repeat(1, 1, 8); return self.q(mask > 0)",
        "mask = y[..., None].repeat(1, 1, 8); return self.q((1 - mask) * torch.finfo(x.dtype).min)",
        "return torch.ones_like(x).add_(0.5), torch.zeros_like(x).mul_(p)",
        "odds = x / (1 - x); x = y; return torch.log(x / (1 - p))",
        "z = x / (1 - y); y = x; return torch.log(z)",
        "for i in range(4): p.append(float(p[i]) + float(3)); return p",
        "return any(int(row) > 3 for row in x)",
        "return x.permute(0, 2, 1).clamp(y), x.permute(0, 2, 1).clamp(min=p)",
        "for i in x > y if p else p: p.append(torch.cumsum(i, 0)); return p",
        "turn = torch.eye(3, dtype=torch.float64); return turn, torch.eye(p, device=x.device)",
        "z = x.new_zeros(4, 3, 6); for d in range(3):;     n = p[d]; z[:, d, :n] = x[:, :n]; return z",
        "z = x.new_zeros(4, 3, 6); for d in range(3):;     z[:, d, : p[d]] = x[:, : p[d]]; return z",
        "z = x.new_zeros(4, 3); for d in range(3):;     if d > p:;         z[:, d] = x; return z",
        "z = x.new_zeros(4, 3); for d in range(3):;     if d > p: continue;     z[:, d] = x; return z",
        "z = y.clone(); for a, b in p:;     z[:, a] = z[:, b]; return z",
        "z = y.clone(); for a, b in p:;     z[:, a] = self.q(x[:, b]); return z",
        "z = x.clone(); z[..., p] = x[..., p] * 2; z[..., 1:3] = x[..., 1:3]; return z",
        "return x * self.token.repeat(1, 1, 2), x * self.up(p).repeat(1, 1, 2, 2)",
        "z = x.new_zeros(4, 6); for i in range(2):;     for j in range(3):;         z[:, i * 2 + j] = x[:, i]; "
        "return z",
        "k = 0; z = x.new_zeros(4, 6); for i in range(6):;     if i > p:;         z[:, k] = x[:, i];         k += 1; "
        "return z",
        "k = 1; z = x.new_zeros(4, 6); for i in range(5):;     z[:, k] = x[:, i];     k += 1; return z",
        "z = x / 2; a = z.permute(0, 2, 1); a[..., 0] = 3; a[..., 1] = 5; return z, a",
        "return [torch.nonzero(x == i) for i in range(p)]",
        "return x.softmax(1).topk(2).indices, x.softmax(-1).topk(2).values",
        "return torch.zeros(3).to(p), torch.rand(3).to(x.device), torch.arange(p).to(torch.int32)",
        "return x.permute(0, 2, 1) / 255.0, (x.permute(0, 2, 1) * 0.5).round(), x.permute(0, 2, 1).mul(p).round()",
        "z = torch.log(x / (1 - x)); keep = x > 0.01; z = z.masked_fill(~keep, 0); return z",
        "z = torch.log(x / (1 - x)); return torch.where(torch.isfinite(z), z, y)",
        "keep = x > 0; return torch.cat([y[i, keep[i]] for i in range(x.shape[0])])",
        "return len(p.max(1)), len(p.indices)",
        "return torch.softmax(x, 2).flatten(2).argmax(1), x.softmax(1).permute(0, 2, 3, 1).argmax(1)",
        "return torch.linspace(0, 1, steps=p, device=x.device)",
        "return torch.cat([x[:, :, a::2, b::2] for a, b in ((0, 0), (1, 0), (0, 1), (0, 1))], 1)",
        "return torch.cat([x[:, :, a::2, b::2] for a, b in p], 1)",
        "return torch.linspace(start=0, end=p, steps=5, device=x.device)",
        "n = len(x); return x if n > 3 else x[: max(n, 2)]",
        "i = x > 0; return torch.cat([a[b] for a, b in zip(y, i)])",
        "return len(self.token), [x * torch.relu(row) for row in self.token]",
        "z = []; for i in p:;     z.append(x.view(1, -1, 4)); z = torch.cat(z, 0); return y + z.repeat(3, 1, 1)",
        "b, c, d = x.shape; return x.softmax(-1).argmax(1)",
        "return x * y[..., None].permute(2, 0, 1).repeat(1, 4, 1)",
        "z = y.unsqueeze(1).repeat(1, 4); return x * z[..., 0]",
        "z = y.view(2, 3, 1, 5).repeat(1, 1, 4, 1); return (x * z).sum(1) / z.sum(2).clamp(min=1)",
        "z = x.mean(1, keepdim=True) / y.view(-1, 2, 1); return x - z.repeat(1, 5, 1)",
        "return x[..., [Y, X]] * 2, x[..., [X, p]]",
        "return int(x.shape[1] / self.ratio)",
        "n = len(p); return n",
        "n = len(p); return self.keep(p), n",
        "y = x.permute(0, 2, 1); return F.relu(y), y",
        "z = torch.zeros(2, 5, 4); z[0, 0] = y; z[0, 1:] = x; return z",
        "z = torch.zeros_like(x); z[:, 1::2] = y; return z",
        "z = x.new_zeros(4, 9); z[:, 2:5] = y; z[:, 5:] = z[:, 4:6] * 2; return z",
        "for i in range(x.shape[0]): p.append(self.conv(x[i : i + 2])); return p",
        "for row in x.unbind(0): self.keep(row); return p",
        "a = x.clamp(min=p); b = (1 - x).clamp(min=p); return torch.log(a / b)",
        "a = x.clamp(min=0); b = (1 - y).clamp(min=0); return torch.log(a / b)",
        "return x.sigmoid().sum(-1) > 0.5, x.sigmoid().max(-1) > 0.5",
        "return x * y.unsqueeze(-1).unsqueeze(-1).repeat(1, 4, 1, 1)",
        "return x * self.pool(p).repeat(*x.shape[:2], 1, 1)",
        "return x * F.conv2d(p, self.kernel.transpose(0, 2)).repeat(1, 8, 1, 1)",
        "TABLE = p; return x * torch.from_numpy(TABLE).to(x)",
        "z = self.d(p); return len(z)",
        "return x * self.conv(y[..., -2:]).repeat(1, 1, 1, 8)",
        "return x - self.conv(y[..., -1:].flatten(1, 2)[..., None]).repeat(1, 1, 4, 8)",
        "a, b = p.shape[:2]; return torch.arange(a, b, device=x.device)",
        "return x * self.one(p).repeat(1, 8, 1)",
        "z = x.new_zeros(4, 2, 2); z[:, 0, p], z[:, 1, 0] = x, y; z[:, :, 1] = y; return z",
        "return x * p.view(2, *self.sizes).repeat(1, 3, 1)",
        "z = x.softmax(1); return torch.topk(z[:, 1:], k=2, dim=1).indices, z",
        "return x.softmax(-1).squeeze(-1).argmax(-1), x.softmax(1).squeeze(0).argmax(1)",
        "return x.softmax(1).squeeze(-2).argmax(1), x.softmax(-1).squeeze(1).argmax(-1)",
        "return self.soft(x).argmax(-1), self.hard(x).argmax(1), nn.Softmax(0)(x).argmax(1)",
        "return x * F.interpolate(p.reshape(1, 4, 1, 8).permute(0, 3, 1, 2), p).repeat(1, 1, 1, 9)",
        "b, c = x.shape; for i in range(b):;     keep = y[i];     p.append(x[i, keep].relu()); return p",
        "y = x.permute(0, 2, 1).contiguous(); return y.gt(0.5), y",
        "return x * x.new_tensor([[a, p] for a in (-1, 1)]), x * x.new_tensor([a for a in p])",
        "return x * x.new_tensor([a for a in (1, 2) if a > p])",
        "b, c = x.shape; d, e = y.shape; z = x[:, None] * y[None]; return z.sum(-1), z",
        "s = (p, slice(2, None)); z = x.new_zeros(4, 4); "
        "for i, (a, b) in enumerate(itertools.product(s, s)):;     z[a, b] = i; return z",
        "return x.softmax(1)[0].argmax(1), x.softmax(0)[0].argmax(0), x.softmax(1)[y > 0].argmax(0)",
    ],
)
def test_not_found(tmp_path, text):
    assert codes(text, tmp_path) == []


def test_a_loop_is_reported_once(tmp_path):
    assert codes("return [int(torch.relu(row).sum()) for row in x]", tmp_path) == ["SVX101"]
