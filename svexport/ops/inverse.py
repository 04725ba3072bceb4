"""Inverses of small square matrices, such as camera and lidar transforms; ONNX has no operator for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from svexport.ops._op import Op, precise_dtype

__all__ = ["Inverse", "check_square", "checked", "inverse"]


def reference(A: Tensor, n: int) -> Tensor:
    return checked(A, n)[0]


def checked(A: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The inverse, NaN where A is singular, and torch's info: 0 where it is not."""
    torch._check(A.shape[-1] == n, lambda: f"inverse: expected matrices of size {n}, got {tuple(A.shape)}")
    inverse, info = torch.linalg.inv_ex(A.to(precise_dtype(A)))  # refuses integers
    return torch.where((info == 0)[..., None, None], inverse, torch.nan).to(A.dtype).contiguous(), info


def check_square(op: str, A: Tensor) -> None:
    """Raises RuntimeError, as torch does, if ``A`` is no batch of square matrices."""
    if A.dim() < 2 or A.shape[-2] != A.shape[-1]:
        raise RuntimeError(f"{op} expects square matrices (*, n, n), got {tuple(A.shape)}")


def fake(A: Tensor, n: int) -> Tensor:
    return A.new_empty(A.shape)


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    for *batch, n in [(2, 3, 4), (3,), (1, 1), (5, 2), (2, 1, 3, 2, 3), (0, 3), (2, 7)]:
        # Rows in reverse: no pivot is on the diagonal.
        yield (make(*batch, n, n) + (n + 2) * torch.eye(n).to(make(1))).flip(-2), n


OP = Op(
    name="inverse",
    schema="(Tensor A, int n) -> Tensor",
    reference=reference,
    fake=fake,
    samples=samples,
    plugin=lambda attributes: attributes["n"] <= 8,
)


def inverse(A: Tensor) -> Tensor:
    """``torch.linalg.inv`` for small matrices; float16 and bfloat16 are computed in float32.

    In a file it is unrolled Gauss-Jordan elimination with partial pivoting and one Newton step, in elementwise sums and
    products: TensorRT would round a matrix product to TF32. In float32 its error relative to the norm of the inverse is
    below 1e-6 for rotations, for camera projections and for either with rows or columns in different units (condition
    number up to 1e6). For matrices that are ill-conditioned under any scaling it is that of ``torch.linalg.inv``:
    1e-7 times the condition number, 3e-2 at 1e6. On the CPU the op calls ``torch.linalg.inv``, whose error stays below
    1e-5 for all of the former.
    Source: https://docs.pytorch.org/docs/stable/generated/torch.linalg.inv.html

    Shape:
        - A: ``(*, n, n)``; in a file n is static and at most 16, and above 8 the op is written in standard ONNX
        - output: ``(*, n, n)``, the dtype of A. Where A is singular (``torch.linalg.inv`` raises) it is NaN; in a file
          at least some of its elements are infinite or NaN.

    Raises:
        RuntimeError: if A is not a batch of square matrices, or holds integers.
    """
    check_square("inverse", A)
    return OP(A, A.shape[-1])


class Inverse(nn.Module):
    """Module form of :func:`inverse`."""

    def forward(self, A: Tensor) -> Tensor:
        """Inverts every matrix of ``(..., n, n)``."""
        return inverse(A)
