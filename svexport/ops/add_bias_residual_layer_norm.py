"""Bias, residual and layer norm fused into one op: the work between the matrix products of a transformer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from svexport.ops._op import Op, check_floating_point

__all__ = ["AddBiasResidualLayerNorm", "add_bias_residual_layer_norm"]


def reference(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, norm_bias: Tensor, eps: float, extra: Tensor | None
) -> tuple[Tensor, Tensor]:
    precise = torch.promote_types(x.dtype, torch.float32)
    s = x.to(precise) + bias + residual
    if extra is not None:
        s = s + extra
    y = F.layer_norm(s, weight.shape, weight.to(precise), norm_bias.to(precise), eps)
    return y.to(x.dtype), s.to(x.dtype).contiguous()


def fake(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    for shape, extra in [((2, 3, 7), True), ((5, 4), False), ((3, 1), True), ((0, 5), True), ((2, 1, 3, 8), False)]:
        vectors = [make(shape[-1]) for _ in range(3)]
        yield make(*shape), vectors[0], make(*shape), *vectors[1:], 1e-5, make(*shape) if extra else None


OP = Op(
    name="add_bias_residual_layer_norm",
    schema="(Tensor x, Tensor bias, Tensor residual, Tensor weight, Tensor norm_bias, float eps, Tensor? extra)"
    " -> (Tensor y, Tensor s)",
    reference=reference,
    samples=samples,
    fake=fake,
)


def add_bias_residual_layer_norm(
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor,
    eps: float = 1e-5,
    extra: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``s = x + bias + residual (+ extra)`` and ``y = F.layer_norm(s, s.shape[-1:], weight, norm_bias, eps)``.

    ``x`` is the product of a Linear without its ``bias``, ``s`` the residual of the next block.

    Shape:
        - x, residual, extra: ``(*, D)``, floating point
        - bias, weight, norm_bias: ``(D,)``
        - y, s: ``(*, D)``, the dtype of ``x``. Half is summed and normalized in float32; the rounding of ``s`` does not
          enter ``y``.

    Raises:
        ValueError: on shapes other than these.
        TypeError: if ``x`` is not floating point.
    """
    vectors = all(v.shape == x.shape[-1:] for v in (bias, weight, norm_bias))
    if not x.dim() or not vectors or residual.shape != x.shape or (extra is not None and extra.shape != x.shape):
        given = {"x": x, "bias": bias, "residual": residual, "weight": weight, "norm_bias": norm_bias, "extra": extra}
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in given.items() if t is not None)
        raise ValueError(
            "add_bias_residual_layer_norm expects x, residual, extra (*, D) and bias, weight, norm_bias (D,); "
            f"got {shapes}"
        )
    check_floating_point("add_bias_residual_layer_norm", "x", x)
    return OP(x, bias, residual, weight, norm_bias, eps, extra)


class AddBiasResidualLayerNorm(nn.LayerNorm):
    """Module form of :func:`add_bias_residual_layer_norm`, with the parameters of the ``nn.LayerNorm`` it replaces.

    Args:
        normalized_shape: ``D``, or a sequence that holds only ``D``.
        eps: added to the variance.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, device=device, dtype=dtype)
        if len(self.normalized_shape) != 1:
            raise ValueError(f"AddBiasResidualLayerNorm normalizes one dimension, got {self.normalized_shape}")

    def forward(  # type: ignore[override]
        self, x: Tensor, bias: Tensor, residual: Tensor, extra: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``x``, ``residual`` and ``extra`` of shape ``(..., C)``, ``bias`` ``(C,)``; returns the norm and the sum."""
        return add_bias_residual_layer_norm(x, bias, residual, self.weight, self.bias, self.eps, extra)
