"""Segmentation and backbones: windows, masks from queries, fused resolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exporter.zoo import entry


def window_partition(x: Tensor, size: int) -> Tensor:
    b, h, w, c = x.shape
    x = x.view(b, h // size, size, w // size, size, c)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, size, size, c)


def window_reverse(windows: Tensor, size: int, h: int, w: int) -> Tensor:
    b = int(windows.shape[0] / (h * w / size / size))
    x = windows.view(b, h // size, w // size, size, size, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(b, h, w, -1)


class _Window(nn.Module):
    """A Swin block: padded to windows, shifted, relative position bias, a mask made in forward."""

    def __init__(self, shift: int, size: int = 4) -> None:
        super().__init__()
        self.shift, self.size = shift, size
        self.norm, self.qkv, self.proj = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.table = nn.Parameter(torch.randn((2 * size - 1) ** 2, 2))
        coords = torch.stack(torch.meshgrid([torch.arange(size), torch.arange(size)], indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0).contiguous()
        relative[:, :, 0] += size - 1
        relative[:, :, 1] += size - 1
        relative[:, :, 0] *= 2 * size - 1
        self.register_buffer("relative", relative.sum(-1))

    def mask(self, h: int, w: int, x: Tensor) -> Tensor:
        img = torch.zeros((1, h, w, 1), device=x.device)
        slices = (slice(0, -self.size), slice(-self.size, -self.shift), slice(-self.shift, None))
        cnt = 0
        for rows in slices:
            for columns in slices:
                img[:, rows, columns, :] = cnt
                cnt += 1
        windows = window_partition(img, self.size).view(-1, self.size * self.size)
        mask = windows.unsqueeze(1) - windows.unsqueeze(2)
        return mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)

    def attention(self, x: Tensor, mask: Tensor | None) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        attn = (q * (c // 2) ** -0.5) @ k.transpose(-2, -1)
        bias = self.table[self.relative.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous()
        attn = attn + bias.unsqueeze(0)
        if mask is not None:
            nw = mask.shape[0]
            attn = attn.view(b // nw, nw, 2, n, n) + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, 2, n, n)
        return self.proj((attn.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        b, _, c = x.shape
        shortcut, x = x, self.norm(x).view(b, h, w, c)
        pad_b, pad_r = (self.size - h % self.size) % self.size, (self.size - w % self.size) % self.size
        x = F.pad(x, (0, 0, 0, pad_r, 0, pad_b))
        _, hp, wp, _ = x.shape
        mask = None
        if self.shift > 0:
            x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
            mask = self.mask(hp, wp, x)
        windows = window_partition(x, self.size).view(-1, self.size * self.size, c)
        windows = self.attention(windows, mask).view(-1, self.size, self.size, c)
        x = window_reverse(windows, self.size, hp, wp)
        if self.shift > 0:
            x = torch.roll(x, shifts=(self.shift, self.shift), dims=(1, 2))
        if pad_r > 0 or pad_b > 0:
            x = x[:, :h, :w, :].contiguous()
        return shortcut + x.view(b, h * w, c)


@entry(lambda batch: (torch.randn(batch, 3, 14, 12),), dynamic=False)
class Swin(nn.Module):
    """Windows of a map that they do not divide; the batch back by int(), which makes it a number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 2, stride=2)
        self.blocks = nn.ModuleList([_Window(0), _Window(2)])
        self.merge = nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        h, w = x.size(2), x.size(3)
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, h, w)
        x = x.view(-1, h, w, 8)
        if h % 2 == 1 or w % 2 == 1:
            x = F.pad(x, (0, 0, 0, w % 2, 0, h % 2))
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return self.merge(x.view(x.shape[0], -1, 32))


class ChannelsFirstNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class GRN(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.randn(1, 1, 1, dim)), nn.Parameter(torch.randn(1, 1, 1, dim))

    def forward(self, x: Tensor) -> Tensor:
        gx = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        return self.gamma * (x * (gx / (gx.mean(dim=-1, keepdim=True) + 1e-6))) + self.beta + x


@entry(lambda batch: (torch.randn(batch, 3, 8, 12),))
class ConvNeXt(nn.Module):
    """Norms of channels first and last, a large depthwise kernel, global response normalization, layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 2, stride=2), ChannelsFirstNorm(8))
        self.dw, self.norm = nn.Conv2d(8, 8, 7, padding=3, groups=8), nn.LayerNorm(8, eps=1e-6)
        self.pw1, self.grn, self.pw2 = nn.Linear(8, 32), GRN(32), nn.Linear(32, 8)
        self.gamma = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.dw(x).permute(0, 2, 3, 1))
        y = self.gamma * self.pw2(self.grn(F.gelu(self.pw1(y))))
        return (x + y.permute(0, 3, 1, 2)).mean([-2, -1])


def prompts(batch: int) -> tuple[Tensor, ...]:
    return torch.randn(1, 8, 4, 6), torch.rand(batch, 2, 2) * 32, torch.randint(-1, 2, (batch, 2))


@entry(prompts, dynamic=False)
class MaskDecoder(nn.Module):
    """SAM: Fourier positions of clicks, two-way attention, masks by hypernetworks, the best by score."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gaussian", torch.randn(2, 4))
        self.point_embeddings = nn.ModuleList([nn.Embedding(1, 8) for _ in range(2)])
        self.not_a_point, self.iou_token, self.mask_tokens = nn.Embedding(1, 8), nn.Embedding(1, 8), nn.Embedding(3, 8)
        self.to_image, self.to_token = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
        self.up = nn.Sequential(
            nn.ConvTranspose2d(8, 4, 2, 2), ChannelsFirstNorm(4), nn.GELU(), nn.ConvTranspose2d(4, 2, 2, 2)
        )
        self.hyper = nn.ModuleList([nn.Linear(8, 2) for _ in range(3)])
        self.iou = nn.Linear(8, 3)

    def encode(self, coords: Tensor) -> Tensor:
        coords = (2 * coords - 1) @ self.gaussian * (2 * torch.pi)
        return torch.cat([torch.sin(coords), torch.cos(coords)], dim=-1)

    def points(self, points: Tensor, labels: Tensor) -> Tensor:
        points = points + 0.5
        points = torch.cat([points, torch.zeros((points.shape[0], 1, 2), device=points.device)], dim=1)
        labels = torch.cat([labels, -torch.ones((labels.shape[0], 1), device=labels.device)], dim=1)
        emb = self.encode(points / torch.tensor([48.0, 32.0]))
        emb[labels == -1] = 0.0
        emb[labels == -1] += self.not_a_point.weight
        emb[labels == 0] += self.point_embeddings[0].weight
        emb[labels == 1] += self.point_embeddings[1].weight
        return emb

    def forward(self, image: Tensor, points: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        sparse = self.points(points, labels)
        h, w = image.shape[-2:]
        grid = torch.ones((h, w), device=image.device)
        y, x = (grid.cumsum(0) - 0.5) / h, (grid.cumsum(1) - 0.5) / w
        pos = self.encode(torch.stack([x, y], dim=-1)).permute(2, 0, 1).unsqueeze(0)
        tokens = torch.cat([self.iou_token.weight, self.mask_tokens.weight], dim=0)
        tokens = torch.cat((tokens.unsqueeze(0).expand(sparse.size(0), -1, -1), sparse), dim=1)
        src = torch.repeat_interleave(image, tokens.shape[0], dim=0)
        pos = torch.repeat_interleave(pos, tokens.shape[0], dim=0).flatten(2).permute(0, 2, 1)
        b, c, h, w = src.shape
        src = src.flatten(2).permute(0, 2, 1)
        tokens = tokens + self.to_image(tokens, src + pos, src)[0]
        src = src + self.to_token(src + pos, tokens, tokens)[0]
        up = self.up(src.transpose(1, 2).view(b, c, h, w))
        hyper = torch.stack([self.hyper[i](tokens[:, 1 + i, :]) for i in range(3)], dim=1)
        b, c, h, w = up.shape
        masks = (hyper @ up.view(b, c, h * w)).view(b, -1, h, w)
        iou = self.iou(tokens[:, 0, :])
        reweight = torch.tensor([[1000] + [0] * 2]).to(iou.device)
        score = iou + (points.shape[1] + 0.5 - 2.5) * reweight
        best = torch.argmax(score, dim=1)
        chosen = masks[torch.arange(masks.shape[0]), best, :, :].unsqueeze(1)
        return F.interpolate(chosen, (24, 32), mode="bilinear", align_corners=False), iou, chosen > 0


@entry(lambda batch: (torch.randn(batch, 8, 4, 6), torch.randn(batch, 8, 8, 12)))
class Mask2FormerHead(nn.Module):
    """Attention masked by the masks predicted before, a row that masks all attending to all; semantic inference."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.mask_embed, self.cls = nn.Embedding(5, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.attention, self.norm = nn.MultiheadAttention(8, 2), nn.LayerNorm(8)

    def predict(self, query: Tensor, features: Tensor, size: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
        query = self.norm(query).transpose(0, 1)
        masks = torch.einsum("bqc,bchw->bqhw", self.mask_embed(query), features)
        attn = F.interpolate(masks, size=size, mode="bilinear", align_corners=False)
        attn = (attn.sigmoid().flatten(2).unsqueeze(1).repeat(1, 2, 1, 1).flatten(0, 1) < 0.5).bool().detach()
        return self.cls(query), masks, attn

    def forward(self, x: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        src = x.flatten(2).permute(2, 0, 1)
        query = self.query.weight.unsqueeze(1).repeat(1, x.shape[0], 1)
        cls, masks, attn = self.predict(query, features, x.shape[-2:])
        for _ in range(2):
            attn[torch.where(attn.sum(-1) == attn.shape[-1])] = False
            query = query + self.attention(query, src, src, attn_mask=attn)[0]
            cls, masks, attn = self.predict(query, features, x.shape[-2:])
        prob = F.softmax(cls, dim=-1)[..., :-1]
        return torch.einsum("bqc,bqhw->bchw", prob, masks.sigmoid()), cls


@entry(lambda batch: (torch.randn(batch, 3, 16, 24),))
class HRNet(nn.Module):
    """Branches of two resolutions exchanged twice, all of them upsampled to the largest and concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4, momentum=0.1), nn.ReLU(inplace=True)
        )
        self.down = nn.Sequential(nn.Conv2d(4, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.fuse_up, self.fuse_down = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 3, 2, 1)
        self.relu, self.last = nn.ReLU(inplace=True), nn.Conv2d(12, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.stem(x)
        low = self.down(high)
        for _ in range(2):
            width, height = high.shape[-1], high.shape[-2]
            up = F.interpolate(self.fuse_up(low), size=[height, width], mode="bilinear", align_corners=True)
            high, low = self.relu(high + up), self.relu(low + self.fuse_down(high))
        up = F.interpolate(low, size=(high.size(2), high.size(3)), mode="bilinear")
        return F.interpolate(self.last(torch.cat([high, up], 1)), scale_factor=2, mode="nearest").argmax(1)


@entry(lambda batch: tuple(torch.randn(batch, 4, *size) for size in ((12, 16), (6, 8), (3, 4))))
class BiFPN(nn.Module):
    """EfficientDet: fast attention of learned weights, nearest upsampling, same padding by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.rand(2, 2)), nn.Parameter(torch.rand(2, 3))
        self.conv = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 4, 1)) for _ in range(4)]
        )

    @staticmethod
    def pooled(x: Tensor) -> Tensor:
        h, w = x.shape[-2:]
        eh, ew = (-(-h // 2) - 1) * 2 - h + 3, (-(-w // 2) - 1) * 2 - w + 3
        return F.max_pool2d(F.pad(x, [ew // 2, ew - ew // 2, eh // 2, eh - eh // 2]), 3, 2)

    def forward(self, p3: Tensor, p4: Tensor, p5: Tensor) -> tuple[Tensor, ...]:
        w = F.relu(self.w1)
        w = w / (torch.sum(w, dim=1, keepdim=True) + 1e-4)
        swish = F.hardswish
        up4 = self.conv[0](swish(w[0, 0] * p4 + w[0, 1] * F.interpolate(p5, scale_factor=2, mode="nearest")))
        out3 = self.conv[1](swish(w[1, 0] * p3 + w[1, 1] * nn.Upsample(size=p3.shape[-2:])(up4)))
        w = F.relu(self.w2)
        w = w / (torch.sum(w, dim=1, keepdim=True) + 1e-4)
        out4 = self.conv[2](swish(w[0, 0] * p4 + w[0, 1] * up4 + w[0, 2] * self.pooled(out3)))
        out5 = self.conv[3](swish(w[1, 0] * p5 + w[1, 1] * self.pooled(out4)))
        return out3, out4, out5
