"""Parts of well-known models that only one of torch's tracers takes, or that one gets wrong, rewritten in small."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport


class CoarseMatching(nn.Module):
    """As in LoFTR: dual softmax, borders masked in place, mutual nearest neighbours, coordinates of as many as are."""

    def __init__(self, width: int = 4, border: int = 1) -> None:
        super().__init__()
        self.width, self.border = width, border

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second = (x / x.shape[-1] ** 0.5 for x in (first, second))
        similar = torch.einsum("nlc,nsc->nls", first, second) / 0.1
        confidence = similar.softmax(1) * similar.softmax(2)
        batch, left, right = confidence.shape
        mask = (confidence > 0.0).view(batch, left // self.width, self.width, right // self.width, self.width)
        mask[:, : self.border] = False
        mask[:, :, :, -self.border :] = False
        mask = mask.view(batch, left, right)
        mask = mask * (confidence == confidence.max(2, keepdim=True)[0])
        mask = mask * (confidence == confidence.max(1, keepdim=True)[0])
        found, places = mask.max(2)
        batches, rows = torch.where(found)
        columns = places[batches, rows]
        points = torch.stack([rows % self.width, rows // self.width], 1) * (64 / self.width)
        return points, columns, confidence[batches, rows, columns]


class _CellSums(torch.autograd.Function):
    """Sums of neighbours of one rank, from the differences of cumulative sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, ranks: Tensor) -> tuple[Tensor, Tensor]:
        x = x.cumsum(0)
        last = torch.ones(x.shape[0], device=x.device, dtype=torch.bool)
        last[:-1] = ranks[1:] != ranks[:-1]
        x, places = x[last], places[last]
        return torch.cat((x[:1], x[1:] - x[:-1])), places


class LiftSplat(nn.Module):
    """As in lift-splat-shoot: features of points summed in the cells of a grid, whose sizes a parameter holds."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.tensor([5, 4, 2]), requires_grad=False)
        self.step = nn.Parameter(torch.tensor([1.0, 1.0, 2.0]), requires_grad=False)

    def forward(self, x: Tensor, points: Tensor) -> Tensor:
        batch, count, channels = x.shape
        x = x.reshape(-1, channels)
        places = (points / self.step).long().view(-1, 3)
        of = torch.cat([torch.full([count, 1], i, device=x.device, dtype=torch.long) for i in range(batch)])
        places = torch.cat((places, of), 1)
        inside = (places[:, :3] >= 0).all(1) & (places[:, :3] < self.cells).all(1)
        x, places = x[inside], places[inside]
        ranks = ((places[:, 0] * self.cells[1] + places[:, 1]) * self.cells[2] + places[:, 2]) * batch + places[:, 3]
        order = ranks.argsort()
        x, places = _CellSums.apply(x[order], places[order], ranks[order])
        grid = torch.zeros((batch, channels, self.cells[2], self.cells[0], self.cells[1]), device=x.device)
        grid[places[:, 3], :, places[:, 2], places[:, 0], places[:, 1]] = x
        return torch.cat(grid.unbind(2), 1)


class RotaryTiles(nn.Module):
    """As in DINOv3: angles of patches, tiled, before attention."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("periods", 100.0 ** (torch.arange(4) / 4))
        self.project = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        rows = torch.arange(0.5, height, dtype=x.dtype, device=x.device) / height
        columns = torch.arange(0.5, width, dtype=x.dtype, device=x.device) / width
        places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flatten(0, 1) * 2 - 1
        angles = (2 * math.pi * places[:, :, None] / self.periods).flatten(1, 2).tile(2)
        cos, sin = angles.cos(), angles.sin()
        tokens = self.project(x.flatten(2).transpose(1, 2))
        q, k, v = tokens.view(batch, -1, 3, 2, 16).permute(2, 0, 3, 1, 4)
        q, k = (t * cos + torch.cat((-t[..., 8:], t[..., :8]), -1) * sin for t in (q, k))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Skeletons(nn.Module):
    """As in ST-GCN: a graph convolution, and pools over all that is left, by sizes of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", torch.rand(3, 5, 5))
        self.norm = nn.BatchNorm1d(15)
        self.gcn = nn.Conv2d(3, 12, 1)
        self.tcn = nn.Conv2d(4, 4, (3, 1), (2, 1), (1, 0))
        self.head = nn.Conv2d(4, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        count, channels, times, joints, people = x.size()
        x = x.permute(0, 4, 3, 1, 2).contiguous().view(count * people, joints * channels, times)
        x = self.norm(x).view(count, people, joints, channels, times)
        x = x.permute(0, 1, 3, 4, 2).contiguous().view(count * people, channels, times, joints)
        x = self.gcn(x)
        n, kc, t, v = x.size()
        x = torch.einsum("nkctv,kvw->nctw", x.view(n, 3, kc // 3, t, v), self.graph)
        x = F.relu(self.tcn(x.contiguous()))
        x = F.avg_pool2d(x, x.size()[2:])
        x = x.view(count, people, -1, 1, 1).mean(dim=1)
        return self.head(x).view(x.size(0), -1)


class PoolBySize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, x.size()[2:]).flatten(1) + F.max_pool2d(x, kernel_size=x.shape[-2:]).flatten(1)


class RelativeBias(nn.Module):
    """As in BEiT: a table of biases, resized to the window that the image has, gathered for attention."""

    def __init__(self, window: int = 3) -> None:
        super().__init__()
        self.window = window
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2 + 3, 2))
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        old, new = 2 * self.window - 1, (2 * height - 1, 2 * width - 1)
        table = self.table[:-3].reshape(1, old, old, -1).permute(0, 3, 1, 2)
        table = F.interpolate(table, size=(int(new[0]), int(new[1])), mode="bilinear")
        table = torch.cat([table.permute(0, 2, 3, 1).reshape(new[0] * new[1], -1), self.table[-3:]])
        grid = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        places = torch.stack(grid).flatten(1)
        apart = (places[:, :, None] - places[:, None, :]).permute(1, 2, 0).contiguous()
        apart[:, :, 0] += height - 1
        apart[:, :, 1] += width - 1
        apart[:, :, 0] *= 2 * width - 1
        bias = table[apart.sum(-1).view(-1)].view(height * width, height * width, -1).permute(2, 0, 1)
        qkv = self.qkv(x.flatten(2).transpose(1, 2)).reshape(batch, -1, 3, 2, 8).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(*qkv.unbind(0), attn_mask=bias.unsqueeze(0))
        return x.transpose(1, 2).reshape(batch, height * width, channels)


class Windows(nn.Module):
    """As in timm's Swin: shifted windows, put together by a size divided by a number of windows."""

    def __init__(self, by_int: bool = False) -> None:
        super().__init__()
        self.by_int = by_int
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        x = torch.roll(x, (-1, -1), (1, 2))
        x = F.pad(x, (0, 0, 0, (2 - width % 2) % 2, 0, (2 - height % 2) % 2))
        _, high, wide, _ = x.shape
        windows = x.view(batch, high // 2, 2, wide // 2, 2, channels).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, channels)
        windows = self.mix(windows).view(-1, 2, 2, channels)
        count = windows.shape[0] // (high * wide // 4)
        if self.by_int:
            count = int(windows.shape[0] / (high * wide / 2 / 2))
        x = windows.view(count, high // 2, wide // 2, 2, 2, -1).permute(0, 1, 3, 2, 4, 5).reshape(count, high, wide, -1)
        return torch.roll(x[:, :height, :width].contiguous(), (1, 1), (1, 2))


class Stem(nn.Module):
    """As in YOLOX: four strided slices, and a decoded grid of the sizes of its levels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(12, 6, 3, 1, 1)
        self.down = nn.Conv2d(6, 6, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat((x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]), 1)
        x = F.silu(self.conv(x))
        levels = [x, F.silu(self.down(x))]
        sizes = [level.shape[-2:] for level in levels]
        found = torch.cat([level.flatten(2) for level in levels], 2).permute(0, 2, 1)
        grids, strides = [], []
        for (height, width), stride in zip(sizes, (2, 4), strict=True):
            rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            grid = torch.stack((columns, rows), 2).view(1, -1, 2)
            grids.append(grid)
            strides.append(torch.full((*grid.shape[:2], 1), stride))
        grid, stride = (torch.cat(parts, 1).to(found.dtype) for parts in (grids, strides))
        found[..., :2] = (found[..., :2] + grid) * stride
        found[..., 2:4] = found[..., 2:4].exp() * stride
        return found


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        y = x.clone()
        y[:, 0] = limit
        y[:, 1:].clamp_(max=limit)
        return y.add_(1)


class WritesInFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _InPlace.apply(x * 2, 0.5) - x


class Asserting(nn.Module):
    """As in RT-DETR: sizes of levels in a tensor, an assertion about values, queries by topk."""

    def forward(self, x: Tensor) -> Tensor:
        levels = [x, F.max_pool2d(x, 2)]
        shapes = torch.as_tensor([level.shape[-2:] for level in levels], dtype=torch.long)
        starts = torch.cat((shapes.new_zeros((1,)), shapes.prod(1).cumsum(0)[:-1]))
        tokens = torch.cat([level.flatten(2) for level in levels], 2).transpose(1, 2)
        torch._check_tensor_all(torch.isfinite(tokens), lambda: "tokens are no numbers")
        if (shapes[:, 0] * shapes[:, 1]).sum() != tokens.shape[1]:
            raise ValueError("levels do not fit")
        parts = tokens.split([int(h * w) for h, w in shapes], 1)
        best = torch.topk(parts[0].amax(-1), 5, 1).indices
        chosen = tokens.gather(1, best.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))
        return chosen + tokens[:, int(starts[1])].unsqueeze(1)


class ConstantMask(nn.Module):
    """As in EoMT and BEVFormer: what is taken of a tensor is decided by buffers, and by a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("shapes", torch.tensor([[4, 5], [2, 3]]))
        self.power = torch.tensor([0.0, 1.0])

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, :4][:, self.mask]
        parts = [
            part.view(-1, int(h), int(w)) for part, (h, w) in zip(x.split(self.shapes.prod(1).tolist(), 1), self.shapes)
        ]
        sums = torch.stack([part.sum((1, 2)) for part in parts], 1)
        if self.power[1] > 0.5:
            sums = sums * 2
        places = torch.where(self.mask)[0]
        return torch.cat([chosen, sums, *(x[:, i : i + 1] for i in places)], 1)


BATCH = {"x": {0: "batch"}}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], dict[str, Any] | None]] = {
    "loftr": (CoarseMatching, lambda: (torch.randn(2, 16, 8), torch.randn(2, 16, 8)), None),
    "lift_splat": (LiftSplat, lambda: (torch.randn(2, 60, 3), torch.rand(2, 60, 3) * 6 - 0.5), None),
    "dinov3": (RotaryTiles, lambda: (torch.randn(2, 32, 3, 4),), BATCH),
    "st_gcn": (Skeletons, lambda: (torch.randn(2, 3, 8, 5, 2),), BATCH),
    "pool_by_size": (PoolBySize, lambda: (torch.randn(2, 3, 5, 6),), BATCH),
    "beit": (RelativeBias, lambda: (torch.randn(2, 16, 4, 5),), BATCH),
    "swin": (Windows, lambda: (torch.randn(2, 5, 6, 4),), BATCH),
    "yolox": (Stem, lambda: (torch.randn(2, 3, 8, 12),), BATCH),
    "writes_in_function": (WritesInFunction, lambda: (torch.randn(3, 4),), BATCH),
    "rt_detr": (Asserting, lambda: (torch.randn(2, 4, 6, 8),), BATCH),
    "constant_mask": (ConstantMask, lambda: (torch.randn(2, 26),), BATCH),
}


@pytest.mark.parametrize("opset", [11, 17, 20])
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, opset: int, tmp_path) -> None:
    build, inputs, dynamic = MODELS[name]
    model = build().eval()
    report = svexport.export(model, inputs(), tmp_path / "m.onnx", opset=opset, dynamic_shapes=dynamic)
    assert report.verified
    assert report.opset == opset
    if dynamic:
        assert all(shape.partition("[")[2].startswith("batch") for shape in report.outputs.values())
        assert "batch=1" in {p.run for p in report.parity}


@pytest.mark.parametrize("opset", [11, 17, 20])
def test_a_batch_that_is_made_a_number(opset: int, tmp_path) -> None:
    """As in Microsoft's Swin: ``int()`` of a dynamic size, which one of torch.export's ways makes a number."""
    model, x = Windows(by_int=True), torch.randn(2, 5, 6, 4)
    assert svexport.export(model, x, tmp_path / "m.onnx", opset=opset, dynamic_shapes=BATCH).verified
