"""SVX207: copies of channels-last tensors to channels-first for functions that read both layouts."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from svexport.advise.axes import permuting
from svexport.advise.kinds import Kinds
from svexport.advise.rule import Found, Rule, Scope
from svexport.advise.torch_names import CONVOLUTIONS

__all__ = ["RULE"]

_DEPTH = 4  # limit on functions of the file that call one another


def find(scope: Scope) -> Iterator[Found]:
    for node in scope.function.all(ast.Call):
        call = scope.call(node)
        if call is None or call.name != "contiguous" or node.args or node.keywords:
            continue
        if not _is_to_front(scope, call.input):
            continue
        uses = scope.reads(node)
        if not uses or not all(_is_read_as_it_is(scope, use) for use in uses):
            continue
        message = (
            "the permuted tensor is channels-last already, which the layer reads as it is: leave `.contiguous()` out"
        )
        yield Found(node, message)


def _is_to_front(scope: Kinds, node: ast.expr, depth: int = 0) -> bool:
    """Whether it is ``x.permute(0, 3, 1, 2)`` or ``x.movedim(-1, 1)``, or a function of the file that returns that."""
    moved = scope.call(node)
    if moved is not None and moved.is_method and moved.name in ("float", "half", "to", "type_as"):
        return _is_to_front(scope, moved.input, depth)  # a cast keeps the order in memory
    if moved is not None and moved.name in ("movedim", "moveaxis"):
        return moved.dims in ((-1, 1), (3, 1))
    made = scope.called(node) if isinstance(node, ast.Call) else None
    if made is not None and depth < _DEPTH:
        returned = [n.value for n in made.function.all(ast.Return)]
        return bool(returned) and all(r is not None and _is_to_front(made, r, depth + 1) for r in returned)
    permuted = permuting(scope, node)
    return permuted is not None and permuted.name == "permute" and permuted.dims in ((0, 3, 1, 2), (0, -1, 1, 2))


def _is_read_as_it_is(scope: Scope, node: ast.AST) -> bool:
    parent = scope.parent(node)
    if not isinstance(parent, ast.Call) or not parent.args or parent.args[0] is not node:
        return False
    name = scope.file.qualified(parent.func) or ""
    return name in CONVOLUTIONS or (bool(layers := scope.layers(parent.func)) and {*layers} <= CONVOLUTIONS)


RULE = Rule(
    code="SVX207",
    name="channels-last left unused",
    why=(
        "`x.permute(0, 3, 1, 2)` of a contiguous (N, H, W, C) tensor is channels-last memory, which convolutions, "
        "pooling, `grid_sample` and `interpolate` read as it is. `.contiguous()` copies it to be channels-first. "
        "Sampling pays for that again: a first kernel of grid_sample took 9.4 us at 900 points of six 256x116x200 "
        "images channels-last, and 36 us channels-first, on an H200."
    ),
    before="y = F.conv2d(x.permute(0, 3, 1, 2).contiguous(), weights)",
    after="y = F.conv2d(x.permute(0, 3, 1, 2), weights)",
    find=find,
    note="what follows may ask for `.view`, which a channels-last result refuses where a channels-first one did not",
)
