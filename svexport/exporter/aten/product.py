"""Products of all that comes before, and of matrices that are added to what may count for nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["FUNCTIONS", "OTHERWISE", "up_to_each"]


def _cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Of twice as many at each step; ReduceProd of integers is of doubles in ONNX Runtime."""
    integers = torch.int64 if not x.is_floating_point() else x.dtype
    x = x.to(dtype or integers)
    if not x.dim():
        return x.clone()
    size = x.size(dim)
    if not isinstance(size, int) or isinstance(size, Tensor):
        return up_to_each(x, dim, 1)[0].prod(-1).transpose(dim, -1)
    done = 1
    while done < size:
        products = x.narrow(dim, done, size - done) * x.narrow(dim, 0, size - done)
        x = torch.cat((x.narrow(dim, 0, done), products), dim)
        done *= 2
    return x.clone() if done == 1 else x


def up_to_each(x: Tensor, dim: int, rest: float) -> tuple[Tensor, Tensor]:
    """``(..., size, size)``: of each place along a dimension, which comes last, all elements up to it and ``rest`` in
    place of those behind it; and where these are, ``(size, size)``. The size may be dynamic."""
    place = torch.arange(x.size(dim), device=x.device)
    behind = place > place.unsqueeze(-1)
    return torch.where(behind, rest, x.transpose(dim, -1).unsqueeze(-2)).to(x.dtype), behind


def _added(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A product that something is added to, NaN and infinities of it too, unless ``beta`` is 0: then it is not read."""

    def function(input: Tensor, first: Tensor, second: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        found = product(first, second)
        if not (found.is_floating_point() or found.is_complex()):
            beta, alpha = int(beta), int(alpha)  # as torch cuts them off
        found = found if alpha == 1 else found * alpha
        if beta == 0:
            return found
        return (input if beta == 1 else input * beta) + found

    return function


def _tensordot(a: Tensor, b: Tensor, dims: Any = 2, dims_other: Sequence[int] | None = None, **_: Any) -> Tensor:
    """As ATen or Python calls it. The exporters make matrices, of sizes that nothing leaves open."""
    if isinstance(dims, Tensor):
        dims = dims.tolist()
    if dims_other is None:
        dims, dims_other = (range(a.dim() - dims, a.dim()), range(dims)) if isinstance(dims, int) else dims
    of_a, of_b = [*range(a.dim())], [*range(a.dim(), a.dim() + b.dim())]
    for dim, other in zip(dims, dims_other, strict=True):
        of_b[other] = of_a[dim]
    free = [label for label in (*of_a, *of_b) if (label in of_a) != (label in of_b)]
    return torch.einsum(a, of_a, b, of_b, free)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "aten::addbmm": _added(lambda x, y: torch.bmm(x, y).sum(0)),
    "aten::addmv": _added(torch.mv),
    "aten::baddbmm": _added(torch.bmm),
    "aten::cumprod": _cumprod,
    "aten::tensordot": _tensordot,
}

OTHERWISE = ("aten::addbmm", "aten::addmv", "aten::baddbmm", "aten::tensordot")
