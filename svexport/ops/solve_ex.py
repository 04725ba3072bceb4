"""Solutions of linear equations, with a flag for those that do not exist."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from svexport.ops._op import Op
from svexport.ops.solve import check_operands, checked, is_vector
from svexport.ops.solve import samples as solve_samples

__all__ = ["solve_ex"]


def reference(A: Tensor, B: Tensor, n: int, left: bool, vector: bool) -> tuple[Tensor, Tensor]:
    return checked(A, B, n, left, vector)


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    yield from list(solve_samples(make))[:5]


OP = Op(
    name="solve_ex",
    schema="(Tensor A, Tensor B, int n, bool left, bool vector) -> (Tensor result, Tensor info)",
    reference=reference,
    samples=samples,
    plugin=False,
    inline=True,
)


def solve_ex(A: Tensor, B: Tensor, *, left: bool = True) -> tuple[Tensor, Tensor]:
    """``torch.linalg.solve_ex``: :func:`svexport.ops.solve`, and which solutions do not exist.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.linalg.solve_ex.html

    Shape:
        - A, B, result: as for :func:`svexport.ops.solve`
        - info: the batch of A, int32: 0 where A has an inverse, otherwise the number of the first pivot that is zero; 1
          in a file

    Raises:
        RuntimeError: if A is not a batch of square matrices, or B does not fit or holds integers.
    """
    check_operands("solve_ex", A, B)
    return OP(A, B, A.shape[-1], left, is_vector(A.shape, B.shape))
