"""Layer normalization: ``F.layer_norm``, which ONNX has from opset 17 only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from svexport.ops._module import DropIn
from svexport.ops._op import Op

__all__ = ["LayerNorm", "layer_norm"]


def reference(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    x = input.to(torch.promote_types(input.dtype, torch.float32))  # squares of half numbers overflow above 255
    dims = tuple(range(-len(normalized_shape), 0))
    x = x - x.mean(dims, keepdim=True)
    x = x / (x.square().mean(dims, keepdim=True) + eps).sqrt()
    if weight is not None:
        x = x * weight
    if bias is not None:
        x = x + bias
    return x.to(input.dtype)


def fake(input: Tensor, *_: object) -> Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    for shape, normalized, weight, bias in [
        ((2, 3, 7), (7,), True, True),
        ((5, 4, 3), (4, 3), True, False),
        ((2, 3, 4, 5), (3, 4, 5), False, False),
        ((11,), (11,), False, True),
        ((3, 1), (1,), True, True),
        ((0, 5), (5,), True, True),
    ]:
        yield make(*shape), normalized, make(*normalized) if weight else None, make(*normalized) if bias else None, 1e-5


OP = Op(
    name="layer_norm",
    schema="(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    reference=reference,
    samples=samples,
    implementation=F.layer_norm,
    fake=fake,
    plugin=False,
)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.layer_norm``, with the same kernels.

    Up to opset 16 a file holds its definition, from opset 17 on ONNX LayerNormalization; the same is true of torch's.
    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.layer_norm.html

    Shape:
        - input: ``(*, *normalized_shape)``, floating point; half is normalized in float32
        - weight, bias: ``normalized_shape``
        - output: like ``input``

    Raises:
        RuntimeError: on an empty ``normalized_shape``, or one that ``input``, ``weight`` or ``bias`` does not have.
    """
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


class LayerNorm(DropIn, nn.LayerNorm):
    """``torch.nn.LayerNorm`` by :func:`layer_norm`: same constructor, parameters and result."""

    replaces = ("torch.nn.modules.normalization.LayerNorm",)
    requires = ("normalized_shape", "weight", "bias", "eps")

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes over the last axes, ``normalized_shape``; the result has the shape of the input."""
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
