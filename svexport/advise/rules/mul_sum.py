"""SVX301: products of broadcast tensors, summed: matrix products."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from svexport.advise.axes import inserted
from svexport.advise.kinds import integer
from svexport.advise.rule import Found, Rule, Scope

__all__ = ["RULE"]


def find(scope: Scope) -> Iterator[Found]:
    for node in scope.function.all(ast.Call):
        call = scope.call(node)
        if call is None or call.name != "sum" or "dtype" in call.keywords:
            continue
        factors = _factors(scope, scope.value_of(call.input))
        dims = _integers(call.get(0, "dim", "axis"))
        if factors is None or not dims:
            continue
        left, right = (inserted(scope, factor) for factor in factors)
        if not left.axes or not right.axes:
            continue
        rank = left.rank if left.rank is not None else right.rank
        if rank is not None:
            a, b = ({axis % rank for axis in side.axes if -rank <= axis < rank} for side in (left, right))
            dims = {dim % rank for dim in dims if -rank <= dim < rank}
        elif len({axis < 0 for axis in (*left.axes, *right.axes, *dims)}) == 1:
            a, b = set(left.axes), set(right.axes)
        else:
            continue
        if a & b or dims & (a | b):
            continue
        message = "a product of two broadcast tensors, summed, is a matrix product: `torch.einsum` or `torch.matmul`"
        yield Found(node, message)


def _integers(node: ast.expr | None) -> set[int]:
    """The axes that are written out, one or several; none if one is not."""
    items = node.elts if isinstance(node, (ast.Tuple, ast.List)) else [node]
    values = [integer(item) for item in items]
    return {v for v in values if v is not None} if None not in values else set()


def _factors(scope: Scope, node: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return node.left, node.right
    call = scope.call(node)
    if call is not None and call.name in ("mul", "multiply") and len(call.arguments) == 1:
        return call.input, call.arguments[0]
    return None


RULE = Rule(
    code="SVX301",
    name="multiply and sum in place of a matrix product",
    why=(
        "The product of all pairs is written to memory before it is summed. On a CPU this took 20 to 50 times the "
        "time and 16 to 40 times the memory of a MatMul; `nkctv,kvw->nctw` at (64, 3, 64, 300, 25) on an H200 10.4 ms "
        "and 9.4 GB, against 0.53 ms."
    ),
    before="y = (x.unsqueeze(-1) * w.unsqueeze(-3)).sum(-2)",
    after='y = torch.einsum("...ik,...kj->...ij", x, w)    # svexport.ops.einsum where opset 11 has to take it',
    find=find,
    note="the equation follows from the ranks, which the text does not always tell",
)
