"""Systems of linear equations with small square matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from svexport.ops._op import Op, precise_dtype
from svexport.ops.inverse import check_square

__all__ = ["Solve", "check_operands", "checked", "is_vector", "solve"]


def reference(A: Tensor, B: Tensor, n: int, left: bool, vector: bool) -> Tensor:
    return checked(A, B, n, left, vector)[0]


def checked(A: Tensor, B: Tensor, n: int, left: bool, vector: bool) -> tuple[Tensor, Tensor]:
    """The solution, NaN where A is singular, and torch's info: 0 where it is not."""
    torch._check(A.shape[-1] == n, lambda: f"solve: expected matrices of size {n}, got {tuple(A.shape)}")
    wide = precise_dtype(B)  # torch refuses integers
    columns = B.to(wide)[..., None] if vector else B.to(wide)
    result, info = torch.linalg.solve_ex(A.to(wide), columns, left=left)
    result = torch.where((info == 0)[..., None, None], result, torch.nan).to(B.dtype)
    return (result[..., 0] if vector else result).contiguous(), info


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    def matrices(*batch: int, n: int) -> Tensor:
        return (make(*batch, n, n) + (n + 2) * torch.eye(n).to(make(1))).flip(-2)

    yield matrices(2, 3, n=4), make(2, 3, 4, 5), 4, True, False
    yield matrices(2, 3, n=4), make(2, 3, 4), 4, True, True
    yield matrices(n=3), make(3), 3, True, True
    yield matrices(2, 1, n=3), make(5, 3, 1), 3, True, False
    yield matrices(5, n=2), make(2, 1, 3, 2), 2, False, False
    yield matrices(n=1), make(3, 1, 2), 1, True, False
    yield matrices(n=7), make(7, 2), 7, True, False
    yield matrices(0, n=3), make(0, 3, 2), 3, True, False
    yield matrices(2, n=3), make(2, 3, 0), 3, True, False


OP = Op(
    name="solve",
    schema="(Tensor A, Tensor B, int n, bool left, bool vector) -> Tensor",
    reference=reference,
    samples=samples,
    plugin=False,
)


def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """``torch.linalg.solve`` for small matrices: X with ``A X = B``, or ``X A = B`` if not ``left``.

    In a file it is computed as :func:`svexport.ops.inverse` is, half types in float32, with the same accuracy.
    Source: https://docs.pytorch.org/docs/stable/generated/torch.linalg.solve.html

    Shape:
        - A: ``(*, n, n)``; n is static and at most 16 in a file
        - B: ``(*, n, k)``, ``(*, k, n)`` if not ``left``, or vectors: ``(n,)``, or ``(*, n)`` with the batch of A.
          Otherwise the batches broadcast.
        - output: the shape of B with the batches broadcast, the dtype of B. Where A is singular
          (``torch.linalg.solve`` raises) it is NaN; in a file at least some of its elements are infinite or NaN.

    Raises:
        RuntimeError: if A is not a batch of square matrices, or B does not fit or holds integers.
    """
    check_operands("solve", A, B)
    return OP(A, B, A.shape[-1], left, is_vector(A.shape, B.shape))


def check_operands(op: str, A: Tensor, B: Tensor) -> None:
    """Raises RuntimeError if ``A`` is not a batch of square matrices, or ``B`` is a scalar; torch checks the rest."""
    check_square(op, A)
    if B.dim() == 0:
        raise RuntimeError(f"{op} expects B (*, n, k), (*, k, n) or vectors (*, n), got {tuple(B.shape)}")


def is_vector(A: tuple[int | None, ...], B: tuple[int | None, ...]) -> bool:
    """Whether torch treats the right-hand side B as vectors; None is a dynamic size."""
    return len(B) == 1 or (len(A) == len(B) + 1 and tuple(A[:-1]) == tuple(B))


class Solve(nn.Module):
    """Module form of :func:`solve`."""

    def __init__(self, *, left: bool = True) -> None:
        super().__init__()
        self.left = left

    def forward(self, A: Tensor, B: Tensor) -> Tensor:
        """Solves ``A X = B``, or ``X A = B`` with ``left=False``; shapes as for ``torch.linalg.solve``."""
        return solve(A, B, left=self.left)

    def extra_repr(self) -> str:
        """The side of the unknown, as ``print(module)`` shows it."""
        return f"left={self.left}"
