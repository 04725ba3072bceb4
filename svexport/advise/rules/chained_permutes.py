"""SVX206: chains of permutes and transposes, which one permute replaces."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from svexport.advise.axes import composed, permutation, permuted, permuting
from svexport.advise.calls import Call
from svexport.advise.rule import Found, Rule, Scope
from svexport.advise.source import Edit

__all__ = ["RULE"]


def find(scope: Scope) -> Iterator[Found]:
    for node in scope.function.all(ast.Call):
        outer = permuting(scope, node)
        inner = permuted(scope, outer.input) if outer is not None else None
        if outer is None or inner is None:
            continue
        if inner.node is not outer.input and _is_multiplied(scope, node):
            continue
        above = scope.parent(node)
        if isinstance(above, ast.Attribute) and permuting(scope, scope.parent(above)) is not None:
            continue  # only the last call of a chain is reported
        order = _order(outer, inner)
        message = f"`{inner.name}` and `{outer.name}` are one permute"
        if order is None:
            yield Found(node, message)
            continue
        axes = ", ".join(map(str, order))
        same = order == tuple(range(len(order)))
        message += ": they cancel, leave both out" if same else f": `permute({axes})`"
        edits: tuple[Edit, ...] = ()
        if inner.is_method and outer.is_method and inner.node is outer.input:
            receiver = scope.source.receiver(inner.node)
            edit = scope.source.replace(node, receiver if same else f"{receiver}.permute({axes})")
            edits = (edit,) if edit else ()
        yield Found(node, message, edits)


def _is_multiplied(scope: Scope, node: ast.Call) -> bool:
    """Whether a matrix product takes ``node``; it reads a transposed operand without a copy."""
    parent = scope.parent(node)
    if isinstance(parent, ast.BinOp):
        return isinstance(parent.op, ast.MatMult)
    call = scope.call(parent)
    return call is not None and call.name in ("matmul", "bmm", "baddbmm", "einsum")


def _order(outer: Call, inner: Call) -> tuple[int, ...] | None:
    rank = next((len(call.dims) for call in (outer, inner) if call.name == "permute" and call.dims), None)
    if rank is None:
        return None
    first, second = permutation(inner, rank), permutation(outer, rank)
    return composed(first, second) if first and second and len(first) == len(second) else None


RULE = Rule(
    code="SVX206",
    name="chained permutes and transposes",
    why=(
        "Each is a Transpose in the file, and a copy wherever a contiguous tensor is needed next. Permutes compose: "
        "one is enough."
    ),
    before="y = x.permute(0, 2, 1).transpose(0, 1)",
    after="y = x.permute(2, 0, 1)",
    find=find,
    fixes=True,
    note="fixed where the axes are written out and one of the two is a permute, which tells the rank",
)
