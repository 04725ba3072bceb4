from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from onnx import AttributeProto, numpy_helper
from torch import Tensor, nn

import svexport
from svexport.errors import ExportError, UnsupportedError
from svexport.graph.nodes import svexport_nodes
from svexport.graph.weights import hold_weights
from svexport.ops import TransformerDecoder, TransformerDecoderConfig, camera_sample, quantize, to_chw32
from svexport.ops import add_bias_residual_layer_norm as add_norm
from svexport.ops._decoder.config import weight_names
from svexport.ops._decoder.layers import boxes_of, fold_image_size, inverse_sigmoid, update
from svexport.ops.transformer_decoder import OP, transformer_decoder
from tests.support import run_model

PRESETS = ("seed", "detr3d", "stream")


def small(preset: str = "detr3d", **overrides: Any) -> TransformerDecoderConfig:
    """A preset with two narrow layers, few queries and small maps."""
    config = TransformerDecoderConfig.preset(preset)
    sizes = {
        "num_layers": 2,
        "embed_dims": 16,
        "num_heads": 2,
        "ffn_dims": 24,
        "num_groups": min(config.num_groups, 4),
        "num_points": min(config.num_points, 3),
        "num_queries": 11,
        "feature_sizes": ((9, 23), (5, 12), (3, 6)),
        **overrides,
    }
    return replace(config, **sizes)


# ------------------------------------------------------------------ the same decoder in plain modules
# DETR3D's (https://github.com/WangYueFt/detr3d) as its paper and its checkpoints have it: sequence first, a mask of
# points seen, F.grid_sample, modules named as there; and the options of its successors.


def linears(sizes: Sequence[int], norm: bool, last: int) -> nn.Sequential:
    modules: list[nn.Module] = []
    for a, b in pairwise(sizes):
        modules += [nn.Linear(a, b), *([nn.LayerNorm(b)] if norm else []), nn.ReLU()]
    return nn.Sequential(*modules, *([nn.Linear(sizes[-1], last)] if last else []))


class PlainSelfAttention(nn.Module):
    def __init__(self, config: TransformerDecoderConfig) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(config.embed_dims, config.num_heads)
        self.config = config

    def forward(self, query: Tensor, query_pos: Tensor) -> Tensor:
        where = query + query_pos
        residual = where if self.config.residual_query_pos else query
        return residual + self.attn(where, where, query, need_weights=False)[0]


class PlainCameraAttention(nn.Module):
    def __init__(self, config: TransformerDecoderConfig) -> None:
        super().__init__()
        self.config = config
        c = config.embed_dims
        weights = config.num_cams * config.num_points * config.num_levels * config.num_groups
        self.attention_weights = nn.Linear(c, weights)
        if config.learned_offsets:
            self.sampling_offsets = nn.Linear(c, 3 * config.num_points)
        self.output_proj = nn.Linear(c, c)
        self.position_encoder = linears((3, c, c), norm=True, last=0)

    def forward(
        self, query: Tensor, query_pos: Tensor, points: Tensor, features: Sequence[Tensor], lidar2img: Tensor
    ) -> Tensor:
        config = self.config
        where = (query + query_pos).transpose(0, 1)
        b, q, c = where.shape
        low, high = points.new_tensor(config.pc_range).split(3)
        place = (points * (high - low) + low)[:, :, None].expand(b, q, config.num_points, 3)
        if config.learned_offsets:
            place = place + self.sampling_offsets(where).view(b, q, config.num_points, 3)
        place = torch.cat((place, torch.ones_like(place[..., :1])), dim=-1)
        image = torch.einsum("bnij,bqpj->bnqpi", lidar2img, place)
        depth = image[..., 2:3]
        mask = depth > config.depth_eps
        uv = image[..., :2] / depth.clamp(min=config.depth_eps)
        uv = uv / uv.new_tensor((config.image_size[1], config.image_size[0]))
        if config.uv_clamp is None:
            mask = mask & ((uv - 0.5) * 2 > -1).all(-1, keepdim=True) & ((uv - 0.5) * 2 < 1).all(-1, keepdim=True)
        else:
            uv = uv.clamp(*config.uv_clamp)
        grid = ((uv - 0.5) * 2).flatten(0, 1)
        sampled = [
            F.grid_sample(f.flatten(0, 1), grid, align_corners=False, padding_mode=self.padding)
            .view(b, config.num_cams, c, q, config.num_points)
            .permute(0, 2, 3, 1, 4)
            for f in features
        ]
        sampled = torch.nan_to_num(torch.stack(sampled, dim=-1))  # (B, C, Q, cams, points, L)
        weights = self.attention_weights(where)
        weights = weights.view(b, q, config.num_cams, config.num_points, len(features), config.num_groups)
        if config.activation == "sigmoid":
            weights = weights.sigmoid()
        else:
            weights = weights.flatten(2, 4).softmax(dim=2).view(weights.shape)
        weights = weights.permute(0, 5, 1, 2, 3, 4).repeat_interleave(c // config.num_groups, dim=1)
        weights = weights * mask.permute(0, 4, 2, 1, 3)[..., None].to(weights.dtype)
        output = (sampled * weights).sum(-1).sum(-1).sum(-1).permute(2, 0, 1)
        position = self.position_encoder(torch.logit(points, eps=1e-5)).permute(1, 0, 2)
        return self.output_proj(output) + query + position

    padding = "zeros"


class PlainFfn(nn.Module):
    def __init__(self, config: TransformerDecoderConfig) -> None:
        super().__init__()
        c, hidden = config.embed_dims, config.ffn_dims
        self.layers = nn.Sequential(nn.Sequential(nn.Linear(c, hidden), nn.ReLU()), nn.Linear(hidden, c))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class PlainLayer(nn.Module):
    def __init__(self, config: TransformerDecoderConfig) -> None:
        super().__init__()
        self.attentions = nn.ModuleList([PlainSelfAttention(config), PlainCameraAttention(config)])
        self.ffns = nn.ModuleList([PlainFfn(config)])
        self.norms = nn.ModuleList(nn.LayerNorm(config.embed_dims) for _ in range(3))

    def forward(self, query: Tensor, query_pos: Tensor, *views: Any) -> Tensor:
        query = self.norms[0](self.attentions[0](query, query_pos))
        query = self.norms[1](self.attentions[1](query, query_pos, *views))
        return self.norms[2](self.ffns[0](query))


class PlainDecoder(nn.Module):
    """With every layer's class branch, as in a checkpoint."""

    def __init__(self, config: TransformerDecoderConfig) -> None:
        super().__init__()
        self.config = config
        c = config.embed_dims
        self.transformer = nn.Module()
        self.transformer.decoder = nn.Module()
        self.transformer.decoder.layers = nn.ModuleList(PlainLayer(config) for _ in range(config.num_layers))
        self.transformer.reference_points = nn.Linear(c, 3)
        self.cls_branches = nn.ModuleList(
            linears((c, c, c), norm=True, last=config.num_classes) for _ in range(config.num_layers)
        )
        self.reg_branches = nn.ModuleList(
            linears((c, c, c), norm=False, last=config.code_size) for _ in range(config.num_layers)
        )
        with torch.no_grad():  # norms that do something, layers that differ
            for p in self.parameters():
                if p.dim() == 1:
                    p += 0.2 * torch.randn_like(p)

    def forward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return self.every_layer(*args)[-1]

    def every_layer(
        self, query: Tensor, query_pos: Tensor, points: Tensor, features: Sequence[Tensor], lidar2img: Tensor
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        features = list(features)
        if self.config.pool:
            features.append(F.max_pool2d(features[-1].flatten(0, 1), 2).unflatten(0, features[-1].shape[:2]))
        query, query_pos = query.transpose(0, 1), query_pos.transpose(0, 1)
        low, high = points.new_tensor(self.config.pc_range).split(3)
        outputs = []
        for layer, reg in zip(self.transformer.decoder.layers, self.reg_branches, strict=True):
            query = layer(query, query_pos, points, features, lidar2img)
            box = reg(query.transpose(0, 1))
            moved = torch.sigmoid(box[..., [0, 1, 4]] + torch.logit(points, eps=1e-5))
            centre = moved * (high - low) + low
            box = torch.cat((centre[..., :2], box[..., 2:4], centre[..., 2:], box[..., 5:]), dim=-1)
            outputs.append((self.cls_branches[-1](query.transpose(0, 1)), box, moved))
            points = moved.detach()
        return outputs


def pair(config: TransformerDecoderConfig, seed: int = 0) -> tuple[TransformerDecoder, PlainDecoder]:
    """The two decoders with the same weights, in float64."""
    torch.manual_seed(seed)
    plain = PlainDecoder(config).double()
    ours = TransformerDecoder(config).double()
    ours.load_detr3d({f"pts_bbox_head.{name}": p for name, p in plain.state_dict().items()})
    return ours, plain


def rig(config: TransformerDecoderConfig, batch: int) -> Tensor:
    """Cameras near the origin, each set of the batch somewhat bent: (batch, cams, 4, 4)."""
    height, width = config.image_size
    bent = 1 + 0.03 * torch.randn(batch, config.num_cams, 3, 4, dtype=torch.float64)
    matrices = []
    for i in range(config.num_cams):
        sin, cos = math.sin(2 * math.pi * i / config.num_cams), math.cos(2 * math.pi * i / config.num_cams)
        pose = torch.tensor([[sin, -cos, 0, 0.1], [0, 0, -1, 1.2], [cos, sin, 0, -0.6]], dtype=torch.float64)
        focal = 0.6 * width
        k = torch.tensor([[focal, 0, width / 2], [0, focal, height / 2], [0, 0, 1]], dtype=torch.float64)
        matrices.append(k @ pose)
    last = torch.tensor([0, 0, 0, 1], dtype=torch.float64).expand(batch, config.num_cams, 1, 4)
    return torch.cat((torch.stack(matrices) * bent, last), dim=2)


def inputs(config: TransformerDecoderConfig, batch: int = 2) -> tuple[Tensor, Tensor, Tensor, list[Tensor], Tensor]:
    """Random ones, in float64."""
    query, query_pos = torch.randn(2, batch, config.num_queries, config.embed_dims, dtype=torch.float64)
    points = torch.rand(batch, config.num_queries, 3, dtype=torch.float64)
    shape = batch, config.num_cams, config.embed_dims
    features = [torch.randn(*shape, *size, dtype=torch.float64) for size in config.feature_sizes]
    return query, query_pos, points, features, rig(config, batch)


def flat(args: Sequence[Any]) -> list[Tensor]:
    return [t for a in args for t in (a if isinstance(a, list) else [a])]


def to(args: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    return [to(a, dtype) if isinstance(a, (list, tuple)) else a.to(dtype) for a in args]


def assert_same(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------ DETR3D's numbers

VARIANTS = {
    "detr3d": {},
    "one_camera": {"num_cams": 1},
    "four_cameras": {"num_cams": 4, "num_layers": 1},
    "twelve_cameras_one_query": {"num_cams": 12, "num_queries": 1, "num_layers": 1},
    "points_without_offsets": {"num_points": 5, "feature_sizes": ((7, 3),)},
    "clamped": {"uv_clamp": (-1.0, 2.0), "depth_eps": 1e-2},
    "query_pos_in_residual": {"residual_query_pos": True},
    "pooled": {"pool": True, "feature_sizes": ((9, 7), (5, 3))},
    "softmax_groups": {"activation": "softmax", "num_groups": 8, "num_points": 2},
    "offsets": {"learned_offsets": True, "num_points": 3},
    "odd_sizes": {"embed_dims": 15, "num_heads": 5, "num_groups": 3, "num_classes": 1, "code_size": 6, "ffn_dims": 1},
    "four_layers": {"num_layers": 4, "num_queries": 7},
}


@pytest.mark.parametrize("fuse", ["block", "nodes"])
@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_is_the_plain_decoder(overrides: dict[str, Any], fuse: str) -> None:
    config = small(**overrides)
    ours, plain = pair(config)
    ours.fuse = fuse
    args = inputs(config)
    assert_same(ours(*args), plain(*args), 1e-9)
    assert_same(ours.float()(*to(args, torch.float32)), to(plain(*args), torch.float32), 2e-3)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_the_plain_decoder(preset: str) -> None:
    config = small(preset)
    ours, plain = pair(config)
    args = inputs(config)
    assert_same(ours(*args), plain(*args), 1e-9)


@pytest.mark.parametrize("queries", [1, 7, 513])
def test_any_number_of_queries(queries: int) -> None:
    config = small(num_queries=queries, num_layers=1)
    ours, plain = pair(config)
    args = inputs(config, batch=1)
    assert_same(ours(*args), plain(*args), 1e-9)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_empty(shape: tuple[int, int]) -> None:
    config = small(num_queries=shape[1] or 1)
    ours = TransformerDecoder(config)
    query, query_pos, points, features, lidar2img = to(inputs(config, max(shape[0], 1)), torch.float32)
    b, q = shape
    args = query[:b, :q], query_pos[:b, :q], points[:b, :q], [f[:b] for f in features], lidar2img[:b]
    classes, boxes, points = ours(*args)
    assert classes.shape == (*shape, 10)
    assert boxes.shape == (*shape, 10)
    assert points.shape == (*shape, 3)


@pytest.mark.parametrize("preset", PRESETS)
def test_points_that_no_camera_sees(preset: str) -> None:
    """Behind every camera, or beside every image: the features have no say, whatever they are."""
    config = small(preset, num_layers=1)
    ours, plain = pair(config)
    query, query_pos, points, features, lidar2img = inputs(config)
    behind, beside = lidar2img.clone(), lidar2img.clone()
    behind[:, :, 2, :3], behind[:, :, 2, 3] = 0, -5  # depth -5 everywhere
    beside[:, :, 0, :] += 1e4 * beside[:, :, 2, :]  # u is 1e4 pixels to the right
    for matrices in (behind, beside):
        expected = plain(query, query_pos, points, [torch.zeros_like(f) for f in features], matrices)
        assert_same(ours(query, query_pos, points, features, matrices), expected, 1e-9)
    # one set of cameras behind, the other as it was
    mixed = torch.stack((behind[0], lidar2img[1]))
    assert_same(ours(query, query_pos, points, features, mixed), plain(query, query_pos, points, features, mixed), 1e-9)


def test_cameras_that_are_dead_or_lost() -> None:
    config = small(num_layers=1)
    ours, plain = pair(config)
    query, query_pos, points, features, lidar2img = inputs(config)
    for feature in features:
        feature[:, 2] = math.nan
    lidar2img[:, 4] = math.nan
    blank = [f.clone() for f in features]
    for feature in blank:
        feature[:, 2] = 0
        feature[:, 4] = 0
    lost = lidar2img.clone()
    lost[:, 4] = 0  # nothing lies before it
    assert_same(ours(query, query_pos, points, features, lidar2img), plain(query, query_pos, points, blank, lost), 1e-9)


@pytest.mark.parametrize("preset", PRESETS)
def test_thousand_scenes_without_nan_and_without_deviation_at_the_border(preset: str) -> None:
    """A kernel that reads the border pixel where it should fade to zero would be off by more than 1e-3 in many."""
    config = small(preset, num_layers=1, embed_dims=8, num_groups=1, num_points=1, num_queries=13, ffn_dims=8)
    config = replace(config, feature_sizes=((6, 9), (3, 5)), num_cams=3)
    ours, plain = pair(config)
    clamping = copy.deepcopy(plain)
    clamping.transformer.decoder.layers[0].attentions[1].padding = "border"
    torch.manual_seed(1)
    deviations = caught = 0
    with torch.no_grad():
        for _ in range(4):
            args = inputs(config, batch=250)
            expected, wrong = (p(*args) for p in (plain, clamping))
            actual = ours(*args)
            single = ours.float()(*to(args, torch.float32))
            ours.double()
            for a, s, e, w in zip(actual, single, expected, wrong, strict=True):
                assert a.isfinite().all()
                assert s.isfinite().all()
                deviations += int(((a - e).abs() > 1e-6).sum()) + int(((s - e).abs() > 1e-2).sum())
                caught += int(((w - e).abs() > 1e-3).any(dim=(1, 2)).sum())
    assert deviations == 0
    assert caught > 500  # scenes and outputs in which a clamp would show


# ------------------------------------------------------------------ training


@pytest.mark.parametrize(("fuse", "every_layer"), [("block", False), ("nodes", False), ("block", True)])
def test_train_step_is_the_plain_one(fuse: str, every_layer: bool) -> None:
    """The boxes of the first layer have only a loss of their own to learn from."""
    config = small(residual_query_pos=True, pool=True, learned_offsets=True, num_points=2)
    ours, plain = pair(config)
    ours.fuse = fuse
    ours.train()
    args = inputs(config)
    leaves = [args[0], args[1], args[2], *args[3], args[4]]
    target = torch.randn(2, config.num_queries, config.code_size, dtype=torch.float64)
    gradients = []
    for model in (ours, plain):
        for leaf in leaves:
            leaf.grad = None
            leaf.requires_grad_()
        loss = 0
        for classes, boxes, points in model.every_layer(*args) if every_layer else [model(*args)]:
            loss = loss + classes.square().mean() + (boxes - target).abs().mean() + points.square().sum()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loss.backward()
        optimizer.step()
        gradients.append([leaf.grad.clone() for leaf in leaves])
    for a, e in zip(*gradients, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-7, atol=1e-9)
    idle = [name for name, p in ours.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert idle == ([] if every_layer else [name for name in ours.state_dict() if name.startswith("layers.0.reg")])
    fresh = TransformerDecoder(config).double()
    fresh.load_detr3d(plain.state_dict())
    for name, p in ours.state_dict().items():
        torch.testing.assert_close(p, fresh.state_dict()[name], rtol=1e-9, atol=1e-9)


def test_dropout_in_training_only() -> None:
    config = small(num_layers=1)
    ours, plain = pair(config)
    ours.dropout = 0.5
    args = inputs(config)
    ours.train()
    first, second = (ours(*args).classes for _ in range(2))
    assert not torch.equal(first, second)
    first.sum().backward()
    assert all(p.grad is not None for name, p in ours.named_parameters() if not name.startswith("layers.0.reg"))
    assert_same(ours.eval()(*args), plain(*args), 1e-9)


def test_dropout_leaves_the_mean() -> None:
    """Of the sum before a norm: what is kept is scaled up."""
    config = small(num_layers=1, num_queries=400, embed_dims=4, num_heads=1)
    torch.manual_seed(0)
    ours = TransformerDecoder(config, dropout=0.1).train()
    with torch.no_grad():
        for p in ours.parameters():
            p.mul_(0.01)  # next to nothing is left of the residuals, and norms are almost constant
        args = to(inputs(config, batch=1), torch.float32)
        kept = ours(*args).reference_points
        torch.testing.assert_close(kept, ours.eval()(*args).reference_points, rtol=1e-3, atol=1e-3)


@pytest.mark.core
def test_compiles_in_one_graph() -> None:
    config = small(num_layers=1)
    decoder = TransformerDecoder(config)
    args = to(inputs(config), torch.float32)
    torch.compiler.reset()
    assert_same(torch.compile(decoder, fullgraph=True, backend="eager")(*args), decoder(*args), 1e-5)


@pytest.mark.parametrize("queries", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("fuse", ["block", "nodes"])
def test_autocast(fuse: str, compiled: bool, queries: torch.dtype) -> None:
    """Types and numbers are those of queries and weights in its type, with and without torch.compile; it trains."""
    config = small("stream", num_layers=1)
    torch.manual_seed(0)
    decoder = TransformerDecoder(config, fuse)
    query, query_pos, points, features, lidar2img = to(inputs(config), torch.float32)
    args = query.to(queries), query_pos, points, to(features, queries), lidar2img
    converted = copy.deepcopy(decoder).bfloat16()
    expected = converted(query.bfloat16(), query_pos.bfloat16(), *args[2:])
    torch.compiler.reset()
    with torch.autocast("cpu", torch.bfloat16):
        actual = (torch.compile(decoder, fullgraph=True, backend="aot_eager") if compiled else decoder)(*args)
    for model, output in ((decoder, actual), (converted, expected)):
        sum(t.float().square().sum() for t in output).backward()
        assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()}
    assert [t.dtype for t in actual] == [torch.bfloat16, torch.float32, torch.float32]
    assert_same(actual, expected, 2e-2)
    for a, e in zip(decoder.parameters(), converted.parameters(), strict=True):
        assert float((a.grad - e.grad).norm()) <= 0.05 * float(a.grad.norm()) + 1e-6


def test_autocast_leaves_float64_alone() -> None:
    config = small(num_layers=1)
    ours, _ = pair(config)
    args = inputs(config)
    with torch.autocast("cpu", torch.bfloat16):
        actual = ours(*args)
    assert_same(actual, ours(*args), 1e-12)


# ------------------------------------------------------------------ rewrites, each on its own


def test_fold_image_size() -> None:
    config = small()
    _, _, points, features, lidar2img = inputs(config)
    weights = torch.randn(2, 11, 6, 1, 3, dtype=torch.float64)
    expected = camera_sample(
        features, points, lidar2img, weights, image_size=config.image_size, pc_range=config.pc_range
    )
    folded = fold_image_size(lidar2img, config.image_size)
    actual = camera_sample(features, points, folded, weights, image_size=(1, 1), pc_range=config.pc_range)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    assert actual.abs().max() > 0.1
    # the projection of all cameras is one product (cams*4, 4) x (4, Q)
    place = F.pad(points, (0, 1), value=1.0)
    product = folded.flatten(1, 2) @ place.mT
    image = torch.einsum("bkij,bqj->bkiq", lidar2img, place)
    image = image / image.new_tensor((*config.image_size[::-1], 1, 1))[:, None]
    torch.testing.assert_close(product.unflatten(1, (6, 4)), image)
    assert fold_image_size(lidar2img.half(), (3, 5)).dtype == torch.float32


def test_bias_in_the_concat_copy() -> None:
    linear = nn.Linear(7, 9).double()
    x = torch.randn(2, 5, 7, dtype=torch.float64)
    points = torch.rand(2, 5, 3, dtype=torch.float64)
    points[0, 0] = torch.tensor([0.0, 1.0, 1e-7])
    product, bias, whole = F.linear(x, linear.weight), linear.bias, linear(x)
    moved = update(inverse_sigmoid(points), product, bias)
    torch.testing.assert_close(moved, torch.sigmoid(whole[..., [0, 1, 4]] + torch.logit(points, eps=1e-5)))
    pc_range = (-3.0, -2.0, -1.0, 4.0, 5.0, 6.0)
    metres = moved * 7 - torch.tensor([3.0, 2.0, 1.0])
    expected = whole.clone()
    expected[..., [0, 1, 4]] = metres
    torch.testing.assert_close(boxes_of(moved, product, bias, pc_range), expected)


@pytest.mark.parametrize("extra", [True, False])
def test_norm_across_stages(extra: bool) -> None:
    """A Linear with bias, additions and a norm are a product without bias and one add-bias-residual-norm."""
    linear, norm = nn.Linear(6, 5).double(), nn.LayerNorm(5).double()
    x, residual = torch.randn(3, 4, 6, dtype=torch.float64), torch.randn(3, 4, 5, dtype=torch.float64)
    other = torch.randn(3, 4, 5, dtype=torch.float64) if extra else None
    expected = norm(linear(x) + residual + (other if extra else 0))
    product = F.linear(x, linear.weight)
    y, _ = add_norm(product, linear.bias, residual, norm.weight, norm.bias, extra=other)
    torch.testing.assert_close(y, expected)


def test_mask_before_the_permute() -> None:
    """What no camera sees counts for nothing before the samples are permuted or summed, NaN and infinity too."""
    config = small()
    _, _, points, features, lidar2img = inputs(config)
    weights = torch.randn(2, 11, 6, 1, 3, dtype=torch.float64)
    options = {"image_size": config.image_size, "pc_range": config.pc_range}
    expected = camera_sample(features, points, lidar2img, weights, **options)
    behind = lidar2img.clone()
    behind[:, 3, 2] = -behind[:, 3, 2]  # looks back
    poisoned = [f.clone() for f in features]
    blank = [f.clone() for f in features]
    unseen = lidar2img.clone()
    unseen[:, 3] = math.inf
    for p, z in zip(poisoned, blank, strict=True):
        p[:, 3], z[:, 3] = math.inf, 0
    torch.testing.assert_close(
        camera_sample(poisoned, points, unseen, weights, **options),
        camera_sample(blank, points, lidar2img, weights, **options),
    )
    assert not torch.equal(camera_sample(features, points, behind, weights, **options), expected)


def test_above_needs_no_sigmoid() -> None:
    config = small()
    output = TransformerDecoder(config)(*to(inputs(config), torch.float32))
    for score in (0.005, 0.01, 0.3):
        assert torch.equal(output.above(score), output.classes.sigmoid() > score)
    assert 0 < output.above(0.01).float().mean() < 1


# ------------------------------------------------------------------ features


@pytest.mark.parametrize("channels", [16, 33])
@pytest.mark.parametrize("pool", [False, True])
def test_int8_levels_are_their_values(pool: bool, channels: int) -> None:
    """Any of the levels, each with its own scale, in CHW32 or not; the pooled one too."""
    config = small(
        embed_dims=channels,
        num_heads=1,
        pool=pool,
        scales=(0.021, 0.5, 0.034),
        residual_query_pos=True,
        feature_sizes=((9, 23), (5, 12), (7, 6)),
    )
    ours, plain = pair(config)
    query, query_pos, points, features, lidar2img = inputs(config)
    packed, values = list(features), list(features)
    for level in (0, 2):
        scale = config.scales[level]
        q = quantize(features[level], scale)
        packed[level] = q if level else to_chw32(q.flatten(0, 1)).unflatten(0, q.shape[:2])
        values[level] = q.double() * torch.tensor(scale, dtype=torch.float32).double()
    expected = plain(query, query_pos, points, values, lidar2img)
    assert_same(ours(query, query_pos, points, packed, lidar2img), expected, 1e-9)
    assert not torch.allclose(plain(query, query_pos, points, features, lidar2img)[0], expected[0], atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half(dtype: torch.dtype) -> None:
    """Points in float32 stay in float32 throughout; the error is that of the type, no more than the plain modules'."""
    config = small("seed", embed_dims=32, num_queries=50)
    ours, plain = pair(config)
    args = inputs(config, batch=1)
    args[2][...] = 0.5 + 0.4 * (args[2] - 0.5).sign() * (0.3 + 0.7 * args[2])  # no point in a camera
    expected = plain(*args)
    query, query_pos, points, features, lidar2img = args
    rounded = to((query, query_pos), dtype), to(features, dtype)
    half = copy.deepcopy(ours).to(dtype)
    got = half(*rounded[0], points.float(), rounded[1], lidar2img.float())
    assert (got.classes.dtype, got.boxes.dtype, got.reference_points.dtype) == (dtype, torch.float32, torch.float32)
    eps = torch.finfo(dtype).eps
    for a, e in zip(got, expected, strict=True):
        relative = float((a.double() - e).detach().norm() / e.detach().norm())
        assert relative < 16 * eps
    mixed = ours.float()(*to((query, query_pos, points), torch.float32), to(features, dtype), lidar2img.float())
    assert {t.dtype for t in mixed} == {torch.float32}
    exact = plain(query, query_pos, points, to(to(features, dtype), torch.float64), lidar2img)
    assert_same(to(mixed, torch.float64), exact, 1e-3)


# ------------------------------------------------------------------ configuration


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_layers": 0}, "num_layers to be a positive integer, got 0"),
        ({"num_queries": 2.0}, "num_queries to be a positive integer, got 2.0"),
        ({"num_cams": True}, "num_cams to be a positive integer, got True"),
        ({"num_heads": 7}, "num_heads to divide embed_dims, 256, got 7"),
        ({"num_groups": 3}, "num_groups to divide embed_dims, 256, got 3"),
        ({"code_size": 5}, "code_size of at least cx, cy, w, l, cz, h: 6, got 5"),
        ({"image_size": (928,)}, r"image_size \(height, width\) in pixels, got \(928,\)"),
        ({"image_size": (928.0, 1600.0)}, "image_size"),
        ({"pc_range": (0, 0, 0, 1, 1)}, "pc_range of 6 numbers"),
        ({"pc_range": (0, 0, 0, 1, 0, 1)}, "pc_range with each minimum below its maximum"),
        ({"pc_range": (0, 0, math.nan, 1, 1, 1)}, "pc_range of 6 numbers"),
        ({"depth_eps": 0.0}, "depth_eps to be a positive depth in metres, got 0.0"),
        ({"depth_eps": math.inf}, "depth_eps"),
        ({"uv_clamp": (2.0, -1.0)}, "uv_clamp with low below high"),
        ({"uv_clamp": 1.0}, "uv_clamp None, or"),
        ({"activation": "relu"}, "activation 'sigmoid' or 'softmax', got 'relu'"),
        ({"pool": 1}, "pool to be True or False, got 1"),
        ({"feature_sizes": ()}, "feature_sizes of"),
        ({"feature_sizes": (4, 5)}, "feature_sizes of"),
        ({"feature_sizes": ((4, 1),), "pool": True}, "feature_sizes to end in a level that can be pooled"),
        ({"scales": (1.0,)}, "scales None, or one positive number for each of the 4 given levels"),
        ({"scales": (1.0, 1.0, 0.0, 1.0)}, "scales None"),
    ],
)
def test_config_says_what_is_wrong(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerDecoderConfig(**overrides)


def test_presets() -> None:
    weights = {"seed": 4 * 32 + 10, "detr3d": 6 * 32 + 10, "stream": 6 * 34 + 10}
    for name, count in weights.items():
        config = TransformerDecoderConfig.preset(name)
        with torch.device("meta"):
            decoder = TransformerDecoder(config)
        assert len(decoder.weights()) == count
        assert (
            dict(zip(weight_names(vars(config)), decoder.weights(), strict=True)).keys() == decoder.state_dict().keys()
        )
        assert config.num_levels == 4
        assert len(config.attributes()) == 14 == len(OP.attributes)
    with pytest.raises(ValueError, match="'seed', 'detr3d', 'stream'; got 'bevformer'"):
        TransformerDecoderConfig.preset("bevformer")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: (a[0][..., 1:], *a[1:]), r"query and query_pos \(B, Q, 16\); got \(2, 11, 15\), \(2, 11, 16\)"),
        (lambda a: (a[0], a[1][:1], *a[2:]), "query and query_pos"),
        (lambda a: (*a[:2], a[2][..., :2], *a[3:]), r"reference_points \(2, 11, 3\) and lidar2img \(2, 6, 4, 4\)"),
        (lambda a: (*a[:4], a[4][:, :5]), "lidar2img"),
        (lambda a: (*a[:3], a[3][:2], a[4]), r"3 features, \(2, 6, 16, H, W\) each"),
        (lambda a: (*a[:3], [f[:, :, :8] for f in a[3]], a[4]), "3 features"),
        (lambda a: (*a[:3], [*a[3][:2], a[3][2][..., :0]], a[4]), "3 features"),
        (lambda a: (*a[:3], [*a[3][:2], a[3][2][..., :1]], a[4]), "to pool of at least 2 by 2 pixels"),
    ],
)
@pytest.mark.parametrize("fuse", ["block", "nodes"])
def test_shapes_that_do_not_fit(change: Any, message: str, fuse: str) -> None:
    config = small(pool=True)
    with pytest.raises(ValueError, match=message):
        TransformerDecoder(config, fuse).double()(*change(inputs(config)))


def test_weights_of_modules_that_are_not_plain() -> None:
    """Parametrized, pruned, wrapped, or given for one call."""
    config = small(num_layers=1)
    decoder = TransformerDecoder(config).double().requires_grad_(False)
    args, plain = inputs(config), copy.deepcopy(decoder)
    nn.utils.parametrizations.weight_norm(decoder.cls[6])
    nn.utils.prune.l1_unstructured(decoder.layers[0].ffn[0], "weight", 0.5)
    plain.layers[0].ffn[0].weight *= decoder.layers[0].ffn[0].weight_mask
    decoder.cls[3] = torch.compile(decoder.cls[3], backend="eager")
    assert_same(decoder(*args), plain(*args), 1e-12)
    halves = {name: p / 2 for name, p in plain.named_parameters()}
    actual = torch.func.functional_call(plain, halves, args)
    for p in plain.parameters():
        p /= 2
    assert_same(actual, plain(*args), 1e-12)


@pytest.mark.parametrize("fuse", ["block", "nodes"])
def test_weights_that_do_not_fit(fuse: str) -> None:
    """A kernel would read beyond them."""
    config = small(num_layers=1, learned_offsets=True, pool=True, num_groups=2, num_points=2)
    args = inputs(config)
    names = weight_names(vars(config))
    decoder = TransformerDecoder(config, fuse).double()
    decoder(*args)
    for name in names:
        wrong = copy.deepcopy(decoder)
        module, _, parameter = name.rpartition(".")
        p = getattr(wrong.get_submodule(module), parameter)
        setattr(wrong.get_submodule(module), parameter, nn.Parameter(torch.cat((p, p[:1])).detach()))
        got = re.escape(f"expects {name} {tuple(p.shape)} for this config; got {(len(p) + 1, *p.shape[1:])}")
        with pytest.raises(ValueError, match=got):
            wrong(*args)
    decoder.config = replace(config, num_groups=1)
    with pytest.raises(ValueError, match=r"svca\.attention_weights\.weight \(48, 16\) for this config; got \(96, 16\)"):
        decoder(*args)


def test_other_misuse() -> None:
    config = small()
    decoder, args = TransformerDecoder(config).double(), inputs(config)
    for feature in (args[3][0].int(), torch.zeros(2, 6, 1, 9, 23, 32)):
        with pytest.raises(TypeError, match=r"int8 as made by svexport.ops.to_chw32"):
            decoder(*args[:3], [feature, *args[3][1:]], args[4])
    with pytest.raises(ValueError, match="expects 74 weights for this config, got 73"):
        transformer_decoder(*args, decoder.weights()[1:], config)
    with pytest.raises(ValueError, match="fuse 'block' or 'nodes', got 'all'"):
        TransformerDecoder(config, fuse="all")
    with pytest.raises(ValueError, match="fuse 'block' or 'nodes', got 'node'"):
        decoder.fuse = "node"
    assert decoder.fuse == "block"


@pytest.mark.parametrize("fuse", ["block", "nodes"])
def test_dtypes_that_do_not_fit(fuse: str) -> None:
    config = small()
    query, query_pos, *rest = to(inputs(config), torch.float32)
    decoder = TransformerDecoder(config, fuse)
    for args, got in (
        ((query.half(), query_pos), r"torch\.float16, torch\.float32 and torch\.float32"),
        ((query, query_pos.half()), r"torch\.float32, torch\.float16 and torch\.float32"),
        ((query.double(), query_pos.double()), r"torch\.float64, torch\.float64 and torch\.float32"),
        ((query.long(), query_pos.long()), r"torch\.int64, torch\.int64 and torch\.float32"),
    ):
        with pytest.raises(TypeError, match=f"query, query_pos and weights of one floating-point dtype, got {got}"):
            decoder(*args, *rest)
    with pytest.raises(TypeError, match=r"floating-point reference_points, got torch\.int64"):
        decoder(query, query_pos, rest[0].long(), *rest[1:])
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TypeError, match=r"float64 and torch\.bfloat16; convert one or the other"),
    ):
        decoder(query.double(), query_pos.double(), *rest)
    decoder.cls[-1].half()
    with pytest.raises(TypeError, match=r"and torch\.float32, torch\.float16; convert one"):
        decoder(query, query_pos, *rest)


def test_checkpoint_of_other_shapes_or_without_a_layer() -> None:
    config = small()
    state = PlainDecoder(config).state_dict()
    decoder = TransformerDecoder(config)
    decoder.load_detr3d({"state_dict": {f"module.pts_bbox_head.{k}": v for k, v in state.items()}, "meta": {}})
    torch.testing.assert_close(decoder.cls[6].weight.detach(), state["cls_branches.1.6.weight"])
    with pytest.raises(RuntimeError, match=r"layers\.1\.mha_norm\.weight"):
        decoder.load_detr3d({k: v for k, v in state.items() if "layers.1.norms.0" not in k})
    with pytest.raises(RuntimeError, match="size mismatch"):
        TransformerDecoder(replace(config, num_cams=4)).load_detr3d(state)
    for other, got in (({"model": state}, "got 'model'"), ({}, "got nothing")):
        with pytest.raises(RuntimeError, match=rf"keys like 'transformer\.decoder\.layers\.0.*; {got}"):
            decoder.load_detr3d(other)
    with pytest.raises(RuntimeError, match="Unexpected"):  # a layer that the configuration lacks
        TransformerDecoder(replace(config, num_layers=1)).load_detr3d(state)


# ------------------------------------------------------------------ ONNX


def trained(config: TransformerDecoderConfig) -> TransformerDecoder:
    """No two weights alike, and steps of the points as small as training makes them."""
    torch.manual_seed(0)
    decoder = TransformerDecoder(config).eval().requires_grad_(False)
    for p in decoder.parameters():
        p += 0.1 * torch.randn_like(p)
    for layer in decoder.layers:
        layer.reg[4].weight *= 0.05
    return decoder


def exported(decoder: nn.Module, folder: Path, **options: Any) -> tuple[onnx.ModelProto, svexport.ExportReport]:
    report = svexport.export(decoder, path=folder / "decoder.onnx", **options)
    return onnx.load(report.path), report


@pytest.mark.parametrize(
    ("preset", "opset", "weights"),
    [
        ("seed", 11, "inputs"),
        ("seed", 17, "attributes"),
        ("detr3d", 11, "attributes"),
        ("detr3d", 20, "inputs"),
        ("stream", 17, "inputs"),
        ("stream", 20, "attributes"),
    ],
)
def test_one_node(preset: str, opset: int, weights: str, tmp_path: Path) -> None:
    decoder = trained(small(preset))
    model, report = exported(decoder, tmp_path, opset=opset, weights=weights)
    (node,) = model.graph.node
    assert node.op_type == "SvTransformerDecoder"
    assert report.max_abs < 1e-3
    args, expected = flat(decoder.example_inputs), decoder(*decoder.example_inputs)
    assert_same(svexport.load(report.path)(*args), expected, 1e-3)
    lowered = svexport.lower(model)
    onnx.checker.check_model(lowered, full_check=True)
    assert not list(svexport_nodes(lowered))
    assert lowered.ByteSize() < 2 * model.ByteSize() + 2**20
    assert_same(run_model(lowered, args), expected, 1e-3)


@pytest.mark.parametrize("opset", [11, 18])
def test_seed_file(opset: int, tmp_path: Path) -> None:
    """14 configuration values, and every weight exactly once, whichever way they travel."""
    sizes = TransformerDecoderConfig.preset("seed").feature_sizes
    config = replace(
        TransformerDecoderConfig.preset("seed"), num_queries=9, feature_sizes=[(h // 4, w // 4) for h, w in sizes]
    )
    decoder = trained(config)
    state = decoder.state_dict()
    held = sum(p.numel() * 4 for p in state.values())
    numbers = dict(zip([a.name for a in OP.attributes], config.attributes(), strict=True))
    for weights in ("inputs", "attributes"):
        model, report = exported(decoder, tmp_path, opset=opset, weights=weights, verify=False)
        (node,) = model.graph.node
        tensors = {a.name: a.t for a in node.attribute if a.type == AttributeProto.TENSOR}
        values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if a.name not in tensors}
        assert values.pop("plugin_namespace") == b"svexport"
        assert values.pop("plugin_version") == b"1"
        assert list(values) == list(numbers)
        for name, value in numbers.items():
            assert values[name] == (pytest.approx(value) if isinstance(value, (float, list)) else value), name
        if weights == "inputs":
            assert not tensors
            tensors = {t.name: t for t in model.graph.initializer}
            assert list(node.input[7:]) == weight_names(vars(config))
            assert len(node.input) == 7 + 138
        else:
            assert not model.graph.initializer
            assert list(tensors) == [name.replace(".", "_") for name in weight_names(vars(config))]
            assert len(node.input) == 7
        assert len(tensors) == 138
        for name, p in state.items():
            tensor = tensors[name if weights == "inputs" else name.replace(".", "_")]
            assert (numpy_helper.to_array(tensor) == p.numpy()).all()
        assert held < report.bytes < held + 9 * 2**14


@pytest.mark.parametrize("layers", [0, -1, 2**40])
def test_a_file_with_layers_that_no_model_has(layers: int, tmp_path: Path) -> None:
    model, _ = exported(trained(small(num_layers=1)), tmp_path, verify=False, target="8.6")
    next(a for a in model.graph.node[0].attribute if a.name == "num_layers").i = layers
    with pytest.raises(
        UnsupportedError, match=rf"SvTransformerDecoder\) expects num_layers of 1 to 1000, got {layers}"
    ):
        svexport.lower(model)


@pytest.mark.parametrize(("preset", "opset"), [("seed", 20), ("detr3d", 11), ("stream", 17), ("detr3d", 9)])
def test_small_nodes(preset: str, opset: int, tmp_path: Path) -> None:
    """The products stay native."""
    decoder = trained(small(preset))
    decoder.fuse = "nodes"
    _, report = exported(decoder, tmp_path, opset=opset)
    counts = report.nodes
    assert counts["SvCameraSample"] == 2
    assert counts["SvAddBiasResidualLayerNorm"] == 6
    assert not {"SvTransformerDecoder", "GridSample", "Einsum", "Shape", "Gather"} & counts.keys()
    assert counts["MatMul"] + counts.get("Gemm", 0) >= 2 * (2 + 2 + 1 + 1 + 2 + 2 + 3) + 3
    args = decoder.example_inputs
    assert_same(svexport.load(report.path)(*flat(args)), decoder(*args), 1e-3)


@pytest.mark.parametrize(("opset", "fuse"), [(11, "block"), (18, "block"), (9, "nodes"), (11, "nodes"), (18, "nodes")])
def test_dynamic_batch_and_queries(opset: int, fuse: str, tmp_path: Path) -> None:
    config = small(num_layers=1, num_queries=5, learned_offsets=True, num_points=2)
    decoder = trained(config)
    decoder.fuse = fuse
    names = ("query", "query_pos", "reference_points")
    shapes: dict[str, Any] = {name: {0: "batch", 1: "queries"} for name in names}
    shapes |= {"features": {0: "batch"}, "lidar2img": {0: "batch"}}
    _, report = exported(decoder, tmp_path, opset=opset, dynamic_shapes=shapes)
    engine = svexport.load(report.path)
    for batch, queries in ((1, 7), (3, 1)):
        args = to(inputs(replace(config, num_queries=queries), batch), torch.float32)
        args[2] = 0.5 + 0.4 * (args[2] - 0.5).sign() * (0.3 + 0.7 * args[2])
        assert_same(engine(*flat(args)), decoder(*args), 2e-3)


@pytest.mark.parametrize(("opset", "weights"), [(11, "attributes"), (18, "inputs")])
def test_int8_levels_in_a_file(opset: int, weights: str, tmp_path: Path) -> None:
    config = small("seed", num_layers=1, embed_dims=33, num_heads=3, scales=(0.03, 1.0, 0.02))
    decoder = trained(config)
    query, query_pos, points, features, lidar2img = decoder.example_inputs
    for level in (0, 2):
        q = quantize(features[level], config.scales[level])
        features[level] = to_chw32(q.flatten(0, 1)).unflatten(0, q.shape[:2]) if level else q
    args = query, query_pos, points, features, lidar2img
    report = svexport.export(decoder, args, tmp_path / "int8.onnx", opset=opset, weights=weights)
    assert sum(report.nodes.values()) == 1
    assert_same(svexport.load(report.path)(*flat(args)), decoder(*args), 1e-3)


def test_small_nodes_read_int8(tmp_path: Path) -> None:
    config = small("detr3d", num_layers=1, scales=(0.03, 0.02, 0.01))
    decoder = trained(config)
    decoder.fuse = "nodes"
    *args, features, lidar2img = decoder.example_inputs
    features = [quantize(f, scale) for f, scale in zip(features, config.scales, strict=True)]
    report = svexport.export(decoder, (*args, features, lidar2img), tmp_path / "int8.onnx")
    (node,) = (n for n in onnx.load(report.path).graph.node if n.op_type == "SvCameraSample")
    assert list(node.input[:3]) == ["features_0", "features_1", "features_2"]
    assert report.inputs["features_0"].startswith("int8")
    assert report.verified


def test_half_file(tmp_path: Path) -> None:
    decoder = trained(small(embed_dims=32))
    model, report = exported(decoder, tmp_path, dtype=torch.float16, weights="attributes")
    types = {a.t.data_type for n in svexport_nodes(model) for a in n.attribute if a.type == AttributeProto.TENSOR}
    assert types == {onnx.TensorProto.FLOAT16}
    assert report.verified


@pytest.mark.parametrize(("target", "bodies"), [("8.6", 0), ("11.0", 1)])
def test_file_for_tensorrt(target: str, bodies: int, tmp_path: Path) -> None:
    model, _ = exported(trained(small(num_layers=1)), tmp_path, target=target, weights="attributes")
    (node,) = model.graph.node
    assert len(node.attribute) == 2 + 14 + 32 + 10
    assert len(model.functions) == bodies


class Backbone(nn.Module):
    """A model around the decoder: images to boxes."""

    def __init__(self, config: TransformerDecoderConfig) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, config.embed_dims, 4, stride=4)
        self.down = nn.Conv2d(config.embed_dims, config.embed_dims, 2, stride=2)
        self.embedding = nn.Embedding(config.num_queries, 2 * config.embed_dims)
        self.reference_points = nn.Linear(config.embed_dims, 3)
        self.decoder = trained(config)

    def forward(self, images: Tensor, lidar2img: Tensor) -> dict[str, Tensor]:
        b, cams = images.shape[:2]
        fine = self.stem(images.flatten(0, 1)).relu()
        features = [f.view(b, cams, *f.shape[1:]) for f in (fine, self.down(fine))]
        query_pos, query = self.embedding.weight.expand(b, -1, -1).chunk(2, dim=-1)
        points = self.reference_points(query_pos).sigmoid()
        return self.decoder(query, query_pos, points, features, lidar2img)._asdict()


@pytest.mark.core
@pytest.mark.parametrize(("opset", "weights"), [(11, "inputs"), (17, "attributes")])
def test_in_a_model_as_one_node(opset: int, weights: str, tmp_path: Path) -> None:
    config = small("seed", image_size=(32, 80), feature_sizes=((8, 20), (4, 10)))
    torch.manual_seed(3)
    model = Backbone(config).eval()
    args = torch.randn(1, 6, 3, 32, 80), rig(config, 1).float()
    report = svexport.export(model, args, tmp_path / "model.onnx", opset=opset, weights=weights)
    assert [n.type for n in report.svexport_nodes] == ["SvTransformerDecoder"]
    assert report.nodes["Conv"] == 2
    engine = svexport.load(report.path)
    assert_same(engine(*args), list(model(*args).values()), 1e-3)


def test_replace_leaves_a_decoder_alone() -> None:
    model = nn.ModuleDict({"norm": nn.LayerNorm(16), "decoder": TransformerDecoder(small(num_layers=1))})
    replaced = svexport.replace(model, verbose=False)
    assert [r.name for r in replaced.svexport_replacements if r.name != "forward"] == ["norm"]
    assert not replaced.svexport_left_alone
    for fuse in ("block", "nodes"):
        model["decoder"].fuse = fuse
        assert not svexport.replace(model["decoder"], verbose=False).svexport_left_alone
        alone = svexport.replace(model["decoder"], model["decoder"].example_inputs, verbose=False)
        assert not alone.svexport_replacements


def test_weights_that_cannot_be_attributes(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="weights must be 'inputs' or 'attributes', got 'both'"):
        svexport.export(trained(small()), path=tmp_path / "x.onnx", weights="both")
    model, _ = exported(trained(small(num_layers=1)), tmp_path, verify=False)
    (node,) = model.graph.node
    node.input[7] = "computed"
    model.graph.node.insert(0, onnx.helper.make_node("Relu", ["layers.0.mha.in_proj_weight"], ["computed"]))
    with pytest.raises(UnsupportedError, match=r"layers_0_mha_in_proj_weight of node .* the model computes 'computed'"):
        hold_weights(model)


def test_weights_shared_with_another_node(tmp_path: Path) -> None:
    """They stay initializers for it."""
    model, _ = exported(trained(small(num_layers=1)), tmp_path, verify=False)
    model.graph.node.append(onnx.helper.make_node("Relu", ["cls.6.bias"], ["other"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("other", onnx.TensorProto.FLOAT, [10]))
    hold_weights(model)
    assert [t.name for t in model.graph.initializer] == ["cls.6.bias"]
    assert "cls_6_bias" in {a.name for a in model.graph.node[0].attribute}
