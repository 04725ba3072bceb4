"""SVX301: sums of products of broadcast tensors, which are matrix products."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from svexport.advise.calls import integer
from svexport.advise.rule import Found, Rule, Scope, Shape
from svexport.advise.shapes import shape

__all__ = ["RULE"]


def find(scope: Scope) -> Iterator[Found]:
    for node in scope.function.all(ast.Call):
        call = scope.call(node)
        if call is None or call.name != "sum" or "dtype" in call.keywords:
            continue
        product = scope.value_of(call.input)
        binding = scope.definition(call.input)
        if product is not call.input and binding is not None and not all(_is_summed(scope, u) for u in binding.uses):
            continue  # the product is needed for itself
        factors = _factors(scope, product)
        dims = _integers(call.get(0, "dim", "axis"))
        if factors is None or not dims:
            continue
        if not _contracts(shape(scope, factors[0]), shape(scope, factors[1]), dims):
            continue
        message = "a product of two broadcast tensors, summed, is a matrix product: `torch.einsum` or `torch.matmul`"
        yield Found(node, message)


def _is_summed(scope: Scope, use: ast.AST) -> bool:
    """Whether a use of a product is its sum, or asks for its sizes."""
    parent = scope.parent(use)
    call = scope.call(scope.parent(parent) if isinstance(parent, ast.Attribute) else parent)
    sized = isinstance(parent, ast.Attribute) and parent.attr in ("shape", "size", "device", "dtype")
    return sized or (call is not None and call.input is use and call.name == "sum")


def _contracts(left: Shape, right: Shape, dims: set[int]) -> bool:
    """Whether each factor has axes that the other lacks, and the sum is over axes that both have."""
    ranks = [side.rank for side in (left, right) if side.rank is not None]
    if ranks:
        rank = max(ranks)
        a, b = ({*_aligned(side, rank)} for side in (left, right))
        dims = {dim % rank for dim in dims if -rank <= dim < rank}
        if rank - 1 not in a | b | dims:
            return False  # a batch along the last axis: a matrix product would have to move that axis to the front
    elif len({axis < 0 for axis in (*left.ones, *right.ones, *dims)}) == 1:
        a, b = {*left.ones}, {*right.ones}
    else:
        return False
    return bool(a - b) and bool(b - a) and not dims & (a | b)


def _aligned(side: Shape, rank: int) -> Iterator[int]:
    """The axes of size 1 (including those it lacks) of ``side`` broadcast to ``rank`` axes, from the front."""
    missing = rank - side.rank if side.rank is not None else 0
    yield from range(missing)
    for axis in side.ones:
        yield axis % rank if axis < 0 else axis + missing


def _integers(node: ast.expr | None) -> set[int]:
    """The axes if all are integer literals, one or several; else empty."""
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
