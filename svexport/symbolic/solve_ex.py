"""``SvSolveEx``: the body of ``SvSolve``, and a test that the inverse it uses is finite."""

from __future__ import annotations

from svexport.ops.solve_ex import OP
from svexport.symbolic._builder import Builder, Value
from svexport.symbolic._symbolic import Symbolic
from svexport.symbolic.inverse_ex import failed
from svexport.symbolic.solve import convert, solved

__all__: list[str] = []


def body(b: Builder, A: Value, B: Value, n: int, left: bool, vector: bool) -> tuple[Value, Value]:
    result, inverse = solved(b, A, B, n, left, vector)
    return result, failed(b, inverse)


Symbolic(OP, body, aten={"linalg_solve_ex": convert})
