"""SVX207: channels-last tensors copied to be channels-first for what reads either."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from svexport.advise.axes import permuting
from svexport.advise.rule import Found, Rule, Scope
from svexport.advise.torch_names import CONVOLUTIONS

__all__ = ["RULE"]


def find(scope: Scope) -> Iterator[Found]:
    for node in scope.function.all(ast.Call):
        call = scope.call(node)
        if call is None or call.name != "contiguous" or node.args or node.keywords:
            continue
        permuted = permuting(scope, call.input)
        if permuted is None or permuted.name != "permute" or permuted.dims not in ((0, 3, 1, 2), (0, -1, 1, 2)):
            continue
        name = scope.only_value(node)
        uses: list[ast.AST] = list(scope.uses.get(name, [])) if name else [node]
        if not uses or not all(_is_read_as_it_is(scope, use) for use in uses):
            continue
        message = (
            "the permuted tensor is channels-last already, which the layer reads as it is: leave `.contiguous()` out"
        )
        yield Found(node, message)


def _is_read_as_it_is(scope: Scope, node: ast.AST) -> bool:
    parent = scope.parent(node)
    if not isinstance(parent, ast.Call) or not parent.args or parent.args[0] is not node:
        return False
    name = scope.file.qualified(parent.func) or ""
    owner = scope.function.owner
    if name.startswith("self.") and owner is not None:
        name = owner.module(name.removeprefix("self.")) or ""
    return name in CONVOLUTIONS


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
