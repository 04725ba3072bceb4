"""The table of rules, one file per rule."""

from __future__ import annotations

from svexport.advise.rule import Rule
from svexport.advise.rules import (
    argmax_of_softmax,
    chained_permutes,
    channels_last,
    constant_in_forward,
    fill,
    frozen_size,
    inverse_sigmoid,
    item_in_loop,
    list_index,
    mul_sum,
    nonzero,
    permute_elementwise,
    repeat_elementwise,
    sigmoid_threshold,
    slice_write,
    strided_slices,
    tensor_loop,
)

__all__ = ["RULES"]

RULES: dict[str, Rule] = {
    module.RULE.code: module.RULE
    for module in (
        item_in_loop,
        tensor_loop,
        frozen_size,
        nonzero,
        slice_write,
        constant_in_forward,
        repeat_elementwise,
        fill,
        strided_slices,
        list_index,
        permute_elementwise,
        chained_permutes,
        channels_last,
        mul_sum,
        sigmoid_threshold,
        inverse_sigmoid,
        argmax_of_softmax,
    )
}
