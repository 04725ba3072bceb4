"""Random models of two to six svexport ops, several of one type, with inputs named like the formal inputs of bodies."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from svexport import ops
from svexport.ops._op import OPS

__all__ = ["Steps", "random_model"]

Step = Callable[[Tensor, Tensor], Tensor]
"""From a map (2, 8, 6, 6) and another input to the next map."""

N, C, H, W = 2, 8, 6, 6


def _weight(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.3


def _grid(mode: str, padding: str, align: bool) -> Step:
    return lambda x, other: ops.grid_sample(x, other.tanh(), mode, padding, align)


def _bilinear(x: Tensor, other: Tensor) -> Tensor:
    output, mask = ops.bilinear_sample(x, other.sigmoid() * 7)
    return output + mask.permute(0, 3, 1, 2)


def _deform(seed: int, modulated: bool) -> Step:
    weight, bias = _weight(C, C, 3, 3, seed=seed), _weight(C, seed=seed + 1)

    def step(x: Tensor, other: Tensor) -> Tensor:
        mask = other[:, :9].sigmoid() if modulated else None
        return ops.deform_conv2d(x, other, weight, bias, padding=1, mask=mask)

    return step


def _einsum(equation: str, *shape: int, seed: int) -> Step:
    weight = _weight(*shape, seed=seed)
    return lambda x, other: ops.einsum(equation, x, weight) + other


def _layer_norm(seed: int) -> Step:
    weight = _weight(W, seed=seed)
    return lambda x, other: ops.layer_norm(x, (W,), weight) + other


def _add_norm(seed: int, eps: float) -> Step:
    bias, weight, shift = (_weight(W, seed=seed + i) for i in range(3))

    def step(x: Tensor, other: Tensor) -> Tensor:
        y, s = ops.add_bias_residual_layer_norm(x, bias, other, weight, shift, eps)
        return y + 0.1 * s

    return step


def _inverse(n: int) -> Step:
    def step(x: Tensor, other: Tensor) -> Tensor:
        matrix = x[..., :n, :n].tanh() + 3 * torch.eye(n)
        return F.pad(ops.inverse(matrix), (0, W - n, 0, H - n)) + other

    return step


def _deformable_attention(x: Tensor, other: Tensor) -> Tensor:
    value = x.flatten(2).transpose(1, 2).reshape(N, H * W, 2, C // 2)
    shapes, starts = torch.tensor([[H, W]]), torch.tensor([0])
    weights = other[..., 0].softmax(-1)
    y = ops.ms_deform_attn(value, shapes, starts, other.sigmoid(), weights)
    return y.transpose(1, 2).reshape(N, C, H, W) + x


def _space_to_depth(x: Tensor, other: Tensor) -> Tensor:
    return ops.space_to_depth(x).reshape(N, C, H, W) + other


def _threshold(value: float) -> Step:
    return lambda x, other: torch.where(ops.sigmoid_gt(x, value), x, other)


MAP = (N, C, H, W)
# A maker of steps for a random number generator, and the shape of the other input.
KINDS: dict[str, tuple[Callable[[random.Random], Step], tuple[int, ...]]] = {
    "grid_sample": (
        lambda r: _grid(
            r.choice(("bilinear", "nearest", "bicubic")), r.choice(("zeros", "border", "reflection")), r.random() < 0.5
        ),
        (N, H, W, 2),
    ),
    "bilinear_sample": (lambda r: _bilinear, (N, H, W, 2)),
    "deform_conv2d": (lambda r: _deform(r.randrange(99), r.random() < 0.5), (N, 18, H, W)),
    "einsum_channels": (lambda r: _einsum("nchw,cd->ndhw", C, C, seed=r.randrange(99)), MAP),
    "einsum_transposed": (lambda r: _einsum("nchw,dc->ndhw", C, C, seed=r.randrange(99)), MAP),
    "einsum_rows": (lambda r: _einsum("nchw,hv->ncvw", H, H, seed=r.randrange(99)), MAP),
    "layer_norm": (lambda r: _layer_norm(r.randrange(99)), MAP),
    "add_bias_residual_layer_norm": (lambda r: _add_norm(r.randrange(99), r.choice((1e-5, 1e-3))), MAP),
    "inverse": (lambda r: _inverse(r.choice((2, 3, 4))), MAP),
    "ms_deform_attn": (lambda r: _deformable_attention, (N, H * W, 2, 1, 3, 2)),
    "space_to_depth": (lambda r: _space_to_depth, MAP),
    "sigmoid_gt": (lambda r: _threshold(r.choice((0.3, 0.5, 0.8))), MAP),
}


class Steps(nn.Module):
    """Steps one after another, each with an input of its own."""

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        for step, other in zip(self.steps, others, strict=True):
            x = step(x, other)
        return x


def random_model(seed: int) -> tuple[Steps, tuple[Tensor, ...], list[str]]:
    """A model, its arguments and the names of its inputs."""
    r = random.Random(seed)
    kinds = r.choices(list(KINDS), k=r.randint(2, 6))
    kinds[-1] = kinds[0]  # at least two of one type
    steps = [KINDS[kind][0](r) for kind in kinds]
    generator = torch.Generator().manual_seed(seed)
    shapes = [MAP, *(KINDS[kind][1] for kind in kinds)]
    args = tuple(torch.randn(shape, generator=generator) for shape in shapes)
    formal = sorted({argument.name for op in OPS.values() for argument in op.arguments} | {"output", "y", "step"})
    return Steps(steps), args, r.sample(formal, len(args))
