"""``SvSolve``: the body multiplies the inverse by elimination with B, then does one step of iterative refinement."""

from __future__ import annotations

from svexport.ops.solve import OP, is_vector
from svexport.symbolic._builder import Builder, Value
from svexport.symbolic._symbolic import Symbolic, TensorInfo
from svexport.symbolic.inverse import eliminate, product, size_of, wide

__all__ = ["convert", "solved"]


def body(b: Builder, A: Value, B: Value, n: int, left: bool, vector: bool) -> Value:
    return solved(b, A, B, n, left, vector)[0]


def solved(b: Builder, A: Value, B: Value, n: int, left: bool, vector: bool) -> tuple[Value, Value]:
    """The solution, and the inverse it is computed from."""
    a = wide(b, A, n)
    right = b.cast(b.unsqueeze(B, B.rank) if vector else B, a.dtype)
    if not left:
        a, right = _transposed(b, a), _transposed(b, right)
    inverse = eliminate(b, a)
    guess = product(b, inverse, right)
    residual = b.op("Sub", right, product(b, a, guess))
    result = b.op("Add", guess, product(b, inverse, residual))
    if not left:
        result = _transposed(b, result)
    return b.cast(b.squeeze(result, result.rank - 1) if vector else result, B.dtype), inverse


def _transposed(b: Builder, x: Value) -> Value:
    return b.transpose(x, [*range(x.rank - 2), x.rank - 1, x.rank - 2])


def convert(
    A: TensorInfo, B: TensorInfo, left: bool, *_: bool
) -> tuple[TensorInfo, TensorInfo, int, bool, bool] | None:
    """``aten::linalg_solve``, and ``aten::linalg_solve_ex``, whose last argument makes torch raise errors."""
    if A.shape is None or B.shape is None:
        return None
    return A, B, size_of(A, "torch.linalg.solve"), left, is_vector(A.shape, B.shape)


Symbolic(OP, body, aten={"linalg_solve": convert})
