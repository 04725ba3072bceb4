"""Functions of torch that people's models consist of, each with arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["FUNCTIONS", "Function"]


class Function(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def _make() -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    generator = torch.Generator().manual_seed(0)

    def r(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, y, row, image, cube = r(2, 9, 11), r(2, 9, 11), r(2, 11), r(1, 4, 8, 10), r(1, 2, 4, 6, 6)
    positive, unit, square = r(2, 9, 11).abs() + 0.1, r(2, 9, 11).tanh() * 0.9, r(3, 5, 5)
    ints = torch.randint(1, 9, (2, 9, 11), generator=generator)
    index = torch.randint(0, 9, (2, 4, 11), generator=generator)
    yes, no = x > 0, y > 0
    weight, weight1, weight3 = r(6, 4, 3, 3), r(6, 9, 3), r(3, 2, 2, 3, 3)
    bias, upward, mean, mixing = r(6), r(4, 5, 3, 3), r(4), r(4, 3)
    one: dict[str, Callable[..., Any]] = {
        "abs": torch.abs,
        "neg": torch.neg,
        "exp": torch.exp,
        "exp2": torch.exp2,
        "expm1": torch.expm1,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "sin": torch.sin,
        "cos": torch.cos,
        "tan": torch.tan,
        "sinh": torch.sinh,
        "cosh": torch.cosh,
        "atan": torch.atan,
        "asinh": torch.asinh,
        "erf": torch.erf,
        "floor": torch.floor,
        "ceil": torch.ceil,
        "round": torch.round,
        "trunc": torch.trunc,
        "frac": torch.frac,
        "sign": torch.sign,
        "square": torch.square,
        "relu": F.relu,
        "relu6": F.relu6,
        "leaky_relu": lambda t: F.leaky_relu(t, 0.2),
        "elu": F.elu,
        "selu": F.selu,
        "celu": F.celu,
        "gelu": F.gelu,
        "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
        "silu": F.silu,
        "mish": F.mish,
        "softplus": F.softplus,
        "softsign": F.softsign,
        "logsigmoid": F.logsigmoid,
        "hardtanh": F.hardtanh,
        "hardsigmoid": F.hardsigmoid,
        "hardswish": F.hardswish,
        "softshrink": F.softshrink,
        "hardshrink": F.hardshrink,
        "tanhshrink": F.tanhshrink,
        "threshold": lambda t: F.threshold(t, 0.1, 2.0),
        "glu": lambda t: F.glu(torch.cat((t, t), 1), 1),
        "softmax": lambda t: F.softmax(t, 1),
        "log_softmax": lambda t: F.log_softmax(t, -1),
        "softmin": lambda t: F.softmin(t, -1),
        "normalize": lambda t: F.normalize(t, dim=1),
        "layer_norm": lambda t: F.layer_norm(t, (11,)),
        "clamp": lambda t: t.clamp(-0.5, 0.7),
        "clamp_min": lambda t: t.clamp(min=0.1),
        "nan_to_num": lambda t: torch.nan_to_num(t / (t - t), 0.0),
        "sum": lambda t: t.sum(1),
        "sum_all": lambda t: t.sum(),
        "mean": lambda t: t.mean((0, 2), keepdim=True),
        "prod": lambda t: t.prod(1),
        "amax": lambda t: t.amax(-1),
        "amin": lambda t: t.amin((1, 2)),
        "max_dim": lambda t: t.max(1),
        "min_dim": lambda t: t.min(2, keepdim=True),
        "argmax": lambda t: t.argmax(1),
        "argmin": lambda t: t.argmin(-1, keepdim=True),
        "logsumexp": lambda t: torch.logsumexp(t, 1),
        "var": lambda t: t.var(1),
        "std": lambda t: t.std((1, 2), keepdim=True),
        "norm": lambda t: t.norm(dim=1),
        "norm1": lambda t: t.norm(1, dim=-1),
        "cumsum": lambda t: t.cumsum(1),
        "topk": lambda t: t.topk(3, 1),
        "sort": lambda t: t.sort(1, descending=True).values,
        "argsort": lambda t: t.argsort(-1),
        "kthvalue": lambda t: t.sort(-1).values[..., 2],
        "flip": lambda t: t.flip(1),
        "roll": lambda t: t.roll((1, 2), (1, 2)),
        "transpose": lambda t: t.transpose(1, 2),
        "permute": lambda t: t.permute(2, 0, 1),
        "reshape": lambda t: t.reshape(2, -1, 3),
        "flatten": lambda t: t.flatten(1),
        "unflatten": lambda t: t.unflatten(1, (3, 3)),
        "squeeze": lambda t: t[:, None].squeeze(1),
        "unsqueeze": lambda t: t.unsqueeze(-1),
        "expand": lambda t: t[:, None].expand(2, 3, 9, 11),
        "repeat": lambda t: t.repeat(1, 2, 1),
        "repeat_interleave": lambda t: t.repeat_interleave(2, 1),
        "tile": lambda t: t.tile(2, 1),
        "split": lambda t: t.split(4, 1),
        "chunk": lambda t: t.chunk(3, 1),
        "unbind": lambda t: t.unbind(0),
        "narrow": lambda t: t.narrow(1, 2, 4),
        "select": lambda t: t.select(1, 3),
        "slice": lambda t: t[:, 1:-1:2, ::3],
        "index_list": lambda t: t[:, [0, 4, 2]],
        "ellipsis_none": lambda t: t[..., None, 3],
        "pad": lambda t: F.pad(t, (1, 2)),
        "pad_reflect": lambda t: F.pad(t, (2, 1), mode="reflect"),
        "pad_replicate": lambda t: F.pad(t, (2, 1), mode="replicate"),
        "tril": torch.tril,
        "triu": lambda t: torch.triu(t, 1),
        "diagonal": lambda t: torch.diagonal(t, 0, 1, 2),
        "zeros_like": lambda t: torch.zeros_like(t) + t,
        "full_like": lambda t: torch.full_like(t, 2.5) * t,
        "arange": lambda t: t + torch.arange(11),
        "linspace": lambda t: t * torch.linspace(0, 1, 11),
        "meshgrid": lambda t: torch.stack(torch.meshgrid(t[0, 0], t[0, 1], indexing="ij")),
        "masked_fill": lambda t: t.masked_fill(t > 0, -1.0),
        "where_scalar": lambda t: torch.where(t > 0, t, 0.0),
        "unfold_dim": lambda t: t.unfold(1, 3, 2),
        "einsum": lambda t: torch.einsum("bij,bkj->bik", t, t),
        "movedim": lambda t: t.movedim(0, 2),
        "half": lambda t: t.half().float(),
        "int": lambda t: (t * 3).int(),
    }
    functions = {name: (function, (x,)) for name, function in one.items()}
    functions |= {
        name: (function, (positive,))
        for name, function in {
            "log": torch.log,
            "log2": torch.log2,
            "log10": torch.log10,
            "log1p": torch.log1p,
            "sqrt": torch.sqrt,
            "rsqrt": torch.rsqrt,
            "reciprocal": torch.reciprocal,
            "pow_scalar": lambda t: t**2.5,
        }.items()
    }
    functions |= {
        name: (function, (unit,))
        for name, function in {"asin": torch.asin, "acos": torch.acos, "atanh": torch.atanh}.items()
    }
    functions |= {
        name: (function, (x, y))
        for name, function in {
            "add": torch.add,
            "sub": torch.sub,
            "mul": torch.mul,
            "div": torch.div,
            "maximum": torch.maximum,
            "minimum": torch.minimum,
            "atan2": torch.atan2,
            "fmod": torch.fmod,
            "remainder": torch.remainder,
            "floor_divide": torch.floor_divide,
            "eq": torch.eq,
            "lt": torch.lt,
            "ge": torch.ge,
            "cat": lambda a, b: torch.cat((a, b), 1),
            "stack": lambda a, b: torch.stack((a, b), 1),
            "where": lambda a, b: torch.where(a > b, a, b),
            "lerp": lambda a, b: torch.lerp(a, b, 0.3),
            "addcmul": lambda a, b: torch.addcmul(a, a, b),
            "matmul": lambda a, b: a @ b.transpose(1, 2),
            "bmm": lambda a, b: torch.bmm(a, b.transpose(1, 2)),
            "vector_matmul": lambda a, b: a[0, :, 0] @ b,
            "outer": lambda a, b: torch.outer(a[0, 0], b[0, 1]),
            "cosine_similarity": lambda a, b: F.cosine_similarity(a, b, dim=1),
            "cdist": lambda a, b: torch.cdist(a, b),
            "attention": lambda a, b: F.scaled_dot_product_attention(a, b, b),
            "mse_loss": F.mse_loss,
            "smooth_l1_loss": F.smooth_l1_loss,
        }.items()
    }
    functions |= {
        "linear": (F.linear, (x, r(5, 11), r(5))),
        "addmm": (torch.addmm, (r(4, 5), r(4, 3), r(3, 5))),
        "baddbmm": (torch.baddbmm, (r(3, 5, 5), square, square)),
        "logical_and": (torch.logical_and, (yes, no)),
        "logical_or": (torch.logical_or, (yes, no)),
        "logical_xor": (torch.logical_xor, (yes, no)),
        "logical_not": (torch.logical_not, (yes,)),
        "any": (lambda t: t.any(1), (yes,)),
        "all": (lambda t: t.all(-1), (yes,)),
        "int_add": (lambda t: t + 3, (ints,)),
        "int_remainder": (lambda t: t % 4, (ints,)),
        "int_divide": (lambda t: t // 4, (ints,)),
        "gather": (lambda t, i: t.gather(1, i), (x, index)),
        "scatter": (lambda t, i, u: t.scatter(1, i, u), (x, index.sort(1).values.unique(dim=1), r(2, 4, 11))),
        "index_select": (lambda t: t.index_select(1, torch.tensor([4, 0, 7])), (x,)),
        "embedding": (F.embedding, (ints, r(9, 5))),
        "one_hot": (lambda t: F.one_hot(t, 9), (ints,)),
        "conv1d": (lambda t, w: F.conv1d(t, w, padding=1), (x, weight1)),
        "conv2d": (lambda t, w: F.conv2d(t, w, stride=2, padding=1), (image, weight)),
        "conv2d_fixed": (lambda t: F.conv2d(t, weight, bias, padding="same"), (image,)),
        "conv3d": (lambda t, w: F.conv3d(t, w), (cube, weight3)),
        "conv_transpose2d": (lambda t: F.conv_transpose2d(t, upward, stride=2, output_padding=1), (image,)),
        "max_pool1d": (lambda t: F.max_pool1d(t, 2), (x,)),
        "max_pool2d": (lambda t: F.max_pool2d(t, 3, 2, 1), (image,)),
        "max_pool2d_ceil": (lambda t: F.max_pool2d(t, 3, 2, ceil_mode=True), (image,)),
        "max_pool3d": (lambda t: F.max_pool3d(t, 2), (cube,)),
        "avg_pool1d": (lambda t: F.avg_pool1d(t, 2), (x,)),
        "avg_pool2d": (lambda t: F.avg_pool2d(t, 3, 2, 1), (image,)),
        "avg_pool2d_exclude": (lambda t: F.avg_pool2d(t, 3, 2, 1, count_include_pad=False), (image,)),
        "avg_pool3d": (lambda t: F.avg_pool3d(t, 2), (cube,)),
        "adaptive_avg_pool2d": (lambda t: F.adaptive_avg_pool2d(t, (4, 5)), (image,)),
        "adaptive_max_pool2d": (lambda t: F.adaptive_max_pool2d(t, 1), (image,)),
        "batch_norm": (lambda t: F.batch_norm(t, mean, mean.abs() + 0.5, mean, mean), (image,)),
        "group_norm": (lambda t: F.group_norm(t, 2), (image,)),
        "instance_norm": (lambda t: F.instance_norm(t), (image,)),
        "local_response_norm": (lambda t: F.local_response_norm(t, 3), (image,)),
        "prelu": (F.prelu, (image, r(4))),
        "interpolate_nearest": (lambda t: F.interpolate(t, scale_factor=2), (image,)),
        "interpolate_bilinear": (lambda t: F.interpolate(t, (12, 15), mode="bilinear"), (image,)),
        "interpolate_corners": (lambda t: F.interpolate(t, (5, 7), mode="bilinear", align_corners=True), (image,)),
        "interpolate_trilinear": (lambda t: F.interpolate(t, scale_factor=2, mode="trilinear"), (cube,)),
        "interpolate_area": (lambda t: F.interpolate(t, (4, 5), mode="area"), (image,)),
        "pixel_shuffle": (lambda t: F.pixel_shuffle(t, 2), (image,)),
        "pixel_unshuffle": (lambda t: F.pixel_unshuffle(t, 2), (image,)),
        "channel_shuffle": (lambda t: F.channel_shuffle(t, 2), (image,)),
        "grid_sample": (lambda t, g: F.grid_sample(t, g.tanh(), align_corners=False), (image, r(1, 5, 6, 2))),
        "affine_grid": (lambda t: F.affine_grid(t, (1, 4, 5, 6), align_corners=False), (r(1, 2, 3),)),
        "fold": (lambda t: F.fold(t, (8, 10), 2, stride=2), (r(1, 12, 20),)),
        "unfold": (lambda t: F.unfold(t, 3, padding=1), (image,)),
        "inverse": (torch.inverse, (square[:, :3, :3] + 3 * torch.eye(3),)),
        "det": (torch.det, (square[:, :2, :2],)),
        "cross": (lambda a, b: torch.cross(a, b, dim=-1), (r(2, 5, 3), r(2, 5, 3))),
        "mv": (torch.mv, (r(4, 11), row[0])),
        "dot": (torch.dot, (row[0], row[1])),
        "bilinear": (F.bilinear, (r(4, 3), r(4, 5), r(2, 3, 5))),
        "masked_mean": (lambda t, m: (t * m).sum(1) / m.sum(1).clamp(min=1), (x, yes.float())),
        "lstm": (nn.LSTM(11, 7).eval(), (x,)),
        "gru": (nn.GRU(11, 7, bidirectional=True).eval(), (x,)),
        "multihead_attention": (nn.MultiheadAttention(12, 3).eval(), (r(5, 2, 12), r(6, 2, 12), r(6, 2, 12))),
        "transformer_layer": (nn.TransformerEncoderLayer(12, 3, 20).eval(), (r(5, 2, 12),)),
        "einsum_fixed": (lambda t: torch.einsum("nchw,ck->nkhw", t, mixing), (image,)),
    }
    return functions


FUNCTIONS = _make()
