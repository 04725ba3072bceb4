"""Matrix inverses, with a flag for those that do not exist."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from svexport.ops._op import Op
from svexport.ops.inverse import check_square, checked
from svexport.ops.inverse import samples as inverse_samples

__all__ = ["inverse_ex"]


def reference(A: Tensor, n: int) -> tuple[Tensor, Tensor]:
    return checked(A, n)


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    yield from list(inverse_samples(make))[:4]


OP = Op(
    name="inverse_ex",
    schema="(Tensor A, int n) -> (Tensor inverse, Tensor info)",
    reference=reference,
    samples=samples,
    plugin=False,
    inline=True,
)


def inverse_ex(A: Tensor) -> tuple[Tensor, Tensor]:
    """``torch.linalg.inv_ex``: :func:`svexport.ops.inverse`, and which inverses do not exist.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.linalg.inv_ex.html

    Shape:
        - A: ``(*, n, n)``; n is static and at most 16 in a file
        - inverse: ``(*, n, n)``, the dtype of A; NaN where A is singular (in a file infinite or NaN in some elements)
        - info: ``(*)``, int32: 0 where the inverse exists, otherwise the number of the first pivot that is zero; 1 in a
            file

    Raises:
        RuntimeError: if A is not a batch of square matrices, or holds integers.
    """
    check_square("inverse_ex", A)
    return OP(A, A.shape[-1])
