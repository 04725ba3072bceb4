"""Restrictions of single ops, beyond what :mod:`svexport.tensorrt.support.rule` makes of words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from svexport.tensorrt.support.node import Node, Undecided, UnknownTensor, reduces_everything
from svexport.tensorrt.support.rule import FOLD, Came, Rule
from svexport.text import shape_text


def _number(node: Node, index: int) -> float:
    value = node.value(index)
    if value.size != 1:
        raise Undecided(f"{node.proto.input[index]!r} has {value.size} elements where one is expected")
    return value.ravel()[0].item()


def _pads_alike(node: Node) -> Came:
    pads = list(node.attribute("pads", ()))
    return None if pads[: len(pads) // 2] == pads[len(pads) // 2 :] else f"pads={pads}"


def _average_pads(node: Node) -> Came:
    pads = list(node.attribute("pads", ()))
    half = len(pads) // 2
    fits = all(after - before in (0, 1) for before, after in zip(pads[:half], pads[half:], strict=False))
    return None if fits else f"pads={pads}"


def _einsum_letters(node: Node) -> Came:
    equation = node.attribute("equation", "")
    wrong = sorted({c for c in equation if not ("a" <= c <= "z" or c in "->., ")})
    return f"{', '.join(wrong)} in {equation!r}" if wrong else None


def _einsum_plain(node: Node) -> Came:
    equation = node.attribute("equation", "")
    if "..." in equation:
        return f"an ellipsis in {equation!r}"
    return f"{len(node.proto.input)} operands of {equation!r}" if len(node.proto.input) > 2 else None


def _einsum_diagonal(node: Node) -> Came:
    equation = node.attribute("equation", "").replace(" ", "")
    terms, _, output = equation.replace(".", "").partition("->")
    twice = any(len(set(term)) < len(term) for term in [*terms.split(","), output])
    return f"a label twice in one operand of {equation!r}" if twice else None


def _einsum_sizes(node: Node) -> Came:
    equation = node.attribute("equation", "").replace(" ", "")
    if "..." in equation:
        return None
    sizes: dict[str, int | None] = {}
    for index, term in enumerate(equation.partition("->")[0].split(",")):
        for label, size in zip(term, node.shape(index), strict=False):
            before = sizes.setdefault(label, size)
            if 1 in (before, size) and size is not None and before is not None and before != size:
                return f"sizes {before} and {size} of {label!r} in {equation!r}"
    return None


def _equal_ranks(node: Node) -> Came:
    if node.opset >= 7:
        return None
    ranks = [len(node.shape(index)) for index in range(len(node.proto.input)) if node.has_input(index)]
    return (
        None if len(set(ranks)) < 2 else f"opset {node.opset} and inputs of {' and '.join(map(str, ranks))} dimensions"
    )


def _no_old_elementwise(node: Node) -> Came:
    return f"opset {node.opset}" if node.opset < 7 else None


def _gemm_bias(node: Node) -> Came:
    if node.opset >= 7 or not node.has_input(2) or len(node.shape(2)) == 2:
        return None
    return f"opset {node.opset} and a bias of {len(node.shape(2))} dimensions"


def _upper(node: Node) -> Came:
    try:
        same = node.attribute("upper") is not None or 0 in node.shape(0)
    except UnknownTensor:
        same = False
    return None if same else "no upper, which is taken for 0"


def _value_int(node: Node) -> Came:
    if node.attribute("value_int", 0):
        return f"value_int={node.attribute('value_int')}, which is taken for 0"
    return "value_ints, which is taken for empty" if node.attribute("value_ints", ()) else None


def _shape_part(node: Node) -> Came:
    start, end = node.attribute("start", 0), node.attribute("end")
    if not start and end is None:
        return None
    rank = len(node.shape(0))
    if slice(start, end).indices(rank)[:2] == (0, rank):
        return None
    given = [f"{name}={value}" for name, value in (("start", start), ("end", end)) if value]
    return f"{' and '.join(given) or 'end=0'}, which is not read"


def _reduce_axes(node: Node) -> Came:
    if not node.has_input(1) or node.is_constant(1):
        return None
    unread = node.version < (10, 0) and node.proto.op_type not in ("ReduceSum", "ReduceLogSum")  # as if there were none
    return None if unread and reduces_everything(node.proto, node.types) else node.origin(1)


def _nothing_to_reduce(node: Node) -> Came:
    if not node.has_input(1) or not node.is_constant(1) or node.shape(1) != (0,):
        return None
    return None if node.attribute("noop_with_empty_axes", 0) else f"{node.proto.input[1]!r}, which is empty"


def _nothing_reduced(node: Node) -> Came:
    given = node.attribute("noop_with_empty_axes", 0) and node.attribute("axes") is None and not node.has_input(1)
    return "noop_with_empty_axes=1" if given else None


def _axes_after_exp(node: Node) -> Came:
    if not node.has_input(1) or reduces_everything(node.proto, node.types):
        return None
    return "axes as an input, which is not read: all dimensions are reduced"


def _clip_bounds(node: Node) -> Came:
    bounds = [node.proto.input[index] for index in (1, 2) if node.has_input(index)]
    return f"FLOAT16 with {bounds[0]!r}" if bounds and node.dtype(0) == "FLOAT16" else None


def _vector_first(node: Node) -> Came:
    if len(node.shape(0)) != 1 or len(node.shape(1)) < 3:
        return None
    batch = node.shape(1)[:-2]
    if batch[-1] == 1 and len(batch) == 1:
        return None
    return f"a vector times {shape_text(node.shape(1))}, whose first dimension is dropped"


def _computed_scales(node: Node) -> Came:
    index = 1 if node.opset < 11 or node.proto.op_type == "Upsample" else 2
    if not node.has_input(index) or node.is_constant(index) or node.has_input(3):
        return None
    name = node.proto.input[index]
    if name in node.makers:
        raise Undecided(f"{node.origin(index)}: sizes times scales may or may not be whole numbers")
    return f"{node.origin(index)}: sizes are rounded before coordinates are computed from them"


def _sizes_of_tensorflow(node: Node) -> Came:
    if node.attribute("coordinate_transformation_mode", "half_pixel") != "tf_half_pixel_for_nn":
        return None
    return "sizes, which are not read" if node.opset >= 11 and node.has_input(3) else None


def _uneven_split(node: Node) -> Came:
    count = node.attribute("num_outputs")
    if count is None or node.has_input(1):
        return None
    shape = node.shape(0)
    size = shape[node.attribute("axis", 0)]
    if size is None:
        return None
    left = size - -(-size // count) * (count - 1)
    return f"{size} into {count} parts, the last of {left}" if left < 0 else None


def _kernel_shape(node: Node) -> Came:
    """Where weights or bias are computed, the parser does not look at the weights' sizes."""
    if node.attribute("kernel_shape") is not None:
        return None
    found = [index for index in (1, 2) if node.has_input(index) and not node.is_constant(index)]
    return f"none, and {('weights', 'a bias')[found[0] - 1]} of {node.origin(found[0])}" if found else None


def _pool_ceil(node: Node) -> Came:
    """A window that begins behind the data: ONNX drops it, TensorRT does not."""
    if not node.attribute("ceil_mode", 0) or node.attribute("auto_pad", "NOTSET") != "NOTSET":
        return None
    kernel = list(node.attribute("kernel_shape", ()))
    n = len(kernel)
    strides, pads = list(node.attribute("strides", [1] * n)), list(node.attribute("pads", [0] * 2 * n))
    for i, (k, stride) in enumerate(zip(kernel, strides)):
        before, after = pads[i], pads[n + i]
        if after + stride <= k:
            continue  # whatever the size
        size = node.shape(0)[2 + i]
        if size is None:
            raise Undecided(f"sizes of {node.proto.input[0]!r} are dynamic")
        windows = -(-(size + before + after - k) // stride) + 1
        if (windows - 1) * stride >= size + before:
            return f"ceil_mode=1 of {size} elements, stride {stride} and pads {before} and {after}"
    return None


def _odd_int4(node: Node) -> Came:
    shape = node.shape(0)
    if node.dtype(0) != "INT4" or not shape or shape[-1] is None or shape[-1] % 2 == 0:
        return None
    return f"INT4 of shape {shape_text(shape)}"


def _no_axes(node: Node) -> Came:
    if not node.has_input(1) or not node.is_constant(1) or node.shape(1) != (0,):
        return None
    return f"{node.proto.input[1]!r}, which is empty"


def _loop_condition(node: Node) -> Came:
    if not node.has_input(1) or node.is_constant(1) or node.proto.input[1] in node.makers:
        return None
    inside = node.attribute("body").input[1].name
    return f"{node.proto.input[1]!r}, an input of the graph, which becomes {inside!r}"


def _used(body: Any, index: int) -> str:
    """The name of an input of a body, if it is used there."""
    name = body.input[index].name
    used = {name for inside in body.node for name in inside.input} | {value.name for value in body.output}
    return name if name in used else ""


_ELEMENTWISE = ("Identity", "Cast", "Add", "Sub", "Mul", "Div", "Mod", "Less", "Greater", "Equal")
"""Ops that a vector of one element serves as well as a number."""


def _loop_counter(node: Node) -> Came:
    body = node.attribute("body")
    counter = body.input[0].name
    users = [inside.op_type for inside in body.node if counter in inside.input]
    others = [name for name in users if name not in _ELEMENTWISE]
    return f"{counter!r}, of shape [1] in the body, as an input of {others[0]}" if others else None


def _loop_given(node: Node) -> Came:
    used = [_used(node.attribute("body"), index) for index in (0, 1) if not node.has_input(index)]
    return next((f"{name!r}, used in the body" for name in used if name), None)


def _topk_k(node: Node) -> Came:
    k = node.attribute("k") if node.opset < 10 else _number(node, 1)
    return None if k is None or k <= 3840 else f"K={k:g}"


def _zero_point(node: Node) -> Came:
    if not node.has_input(2):
        return None
    name = node.proto.input[2]
    return f"{name!r} with other values" if np.any(np.asarray(node.value(2), np.float64)) else None


def _zero_point_type(node: Node) -> Came:
    kind = node.dtype(2) if node.has_input(2) else "UINT8"
    if kind == "UINT8" and node.attribute("output_dtype", 0) == 0:
        return f"UINT8 ({node.proto.input[2]!r})" if node.has_input(2) else "no zero point, which stands for UINT8"
    return None


def _scales(node: Node) -> Came:
    if not node.is_constant(1):
        return None  # the parser looks at constants only
    scales = np.asarray(node.value(1), np.float64)
    return None if scales.size and np.all(scales > 0) else f"{node.proto.input[1]!r} with other values"


def _directions(count: int) -> Callable[[Node], Came]:
    def came(node: Node) -> Came:
        if node.attribute("direction", "forward") != "bidirectional":
            return None
        for name in ("activations", "activation_alpha", "activation_beta"):
            given = list(node.attribute(name, ()))
            if len(given) > count and given[:count] != given[count:]:
                return f"{name}={given}"
        return None

    return came


def _dropout(node: Node) -> Came:
    if node.opset < 12 or not node.has_input(2):
        return None
    return "training_mode is true" if np.any(node.value(2)) else None


def _resized(last: int) -> Callable[[Node], Came]:
    """Whether no more than the last dimensions change; of sizes the same is asked by TensorRT's layer."""

    def came(node: Node) -> Came:
        if node.attribute("axes") is not None or not node.has_input(0):
            return None
        index = 1 if node.opset < 11 or node.proto.op_type == "Upsample" else 2
        if not node.has_input(index) or not node.is_constant(index):
            return None  # the parser looks at constants only
        scales = node.value(index).ravel().tolist()
        return f"scales {scales}" if any(scale != 1 for scale in scales[:-last]) else None

    return came


def _resize_linear(node: Node) -> Came:
    return _resized(3)(node) if node.attribute("mode", "nearest") in ("linear", "bilinear") else None


def _resize_cubic(node: Node) -> Came:
    return _resized(2)(node) if node.attribute("mode", "nearest") == "cubic" else None


def _resize_corners(node: Node) -> Came:
    """Corners are aligned with those of the sizes as they are; ONNX aligns them with size times scale."""
    if node.attribute("coordinate_transformation_mode", "half_pixel") != "align_corners":
        return None
    if node.opset < 11 or not node.has_input(2) or not node.is_constant(2):
        return None
    scales = node.value(2).ravel().tolist()
    axes = node.attribute("axes", range(len(scales)))
    shape = node.shape(0)
    for axis, scale in zip(axes, scales, strict=False):
        if float(scale).is_integer():
            continue
        if (size := shape[axis]) is None:
            raise Undecided(f"sizes of {node.proto.input[0]!r} are dynamic")
        if abs(size * scale - round(size * scale)) > 1e-4:
            return f"{size} elements times {scale:g}"
    return None


def _resize_axes(node: Node) -> Came:
    axes = node.attribute("axes")
    if axes is None or not node.has_input(2) or node.is_constant(2):
        return None
    return None if list(axes) == list(range(len(node.shape(0)))) else f"axes={list(axes)} with computed scales"


def _not_nearest_of_tensorflow(node: Node) -> Came:
    if node.attribute("coordinate_transformation_mode", "half_pixel") != "tf_half_pixel_for_nn":
        return None
    found = node.attribute("mode", "nearest")
    return None if found == "nearest" else f"mode={found!r}"


def _nearest_of_tensorflow(node: Node) -> Came:
    if node.attribute("coordinate_transformation_mode", "half_pixel") != "tf_half_pixel_for_nn":
        return None
    found = node.attribute("nearest_mode", "round_prefer_floor")
    return None if found == "round_prefer_floor" else f"nearest_mode={found!r}"


def _mod(node: Node) -> Came:
    kind = node.dtype(0)
    return f"fmod=0 and {kind}" if not node.attribute("fmod", 0) and kind not in ("INT32", "INT64") else None


def _rounded_quotient(node: Node) -> Came:
    """``x - y * trunc(x / y)`` of floats: a quotient that rounds to a whole number takes one ``y`` too many."""
    if node.attribute("fmod", 0) and node.dtype(0) not in ("INT8", "INT32", "INT64"):
        raise Undecided("x - y * trunc(x / y) in TensorRT, off by y where x / y rounds up to a whole number")
    return None


def _clipped_cell(node: Node) -> Came:
    if node.attribute("clip", 0):
        raise Undecided("the cell state is clipped too, as ONNX has it; ONNX Runtime clips the gates alone")
    return None


def _branches(node: Node) -> tuple[Any, Any]:
    return node.attribute("then_branch"), node.attribute("else_branch")


def _if_count(node: Node) -> Came:
    counts = [len(branch.output) for branch in _branches(node)]
    return None if counts[0] == counts[1] else f"{counts[0]} and {counts[1]} outputs"


def _if_ranks(node: Node) -> Came:
    for one, other in zip(*(branch.output for branch in _branches(node)), strict=False):
        ranks = [len(node.shape_of(value.name)) for value in (one, other)]
        if ranks[0] != ranks[1]:
            return f"{one.name!r} with {ranks[0]} and {other.name!r} with {ranks[1]} dimensions"
    return None


def _if_names(node: Node) -> Came:
    pairs = zip(*(branch.output for branch in _branches(node)), strict=False)
    return next((f"{one.name!r} in both" for one, other in pairs if one.name == other.name), None)


def _loop_states(node: Node) -> Came:
    body = node.attribute("body")
    for index in range(2, min(len(node.proto.input), len(body.output) + 1)):
        before, after = node.shape(index), node.shape_of(body.output[index - 1].name)
        if len(before) != len(after) or any(None not in pair and pair[0] != pair[1] for pair in zip(before, after)):
            return f"{node.proto.input[index]!r} of shape {shape_text(before)}, {shape_text(after)} after an iteration"
        if None in (*before, *after):
            raise Undecided(f"sizes of {node.proto.input[index]!r} are dynamic")
    return None


def _loop_scans(node: Node) -> Came:
    states = max(len(node.proto.input) - 2, 0)
    if len(node.proto.output) <= states:
        return None
    return None if node.has_input(0) and node.is_constant(0) else "scan outputs, and a trip count that is computed"


def _squeeze(node: Node) -> Came:
    if node.has_input(1) or node.attribute("axes") is not None or None not in node.shape(0):
        return None
    return f"no axes, and {node.proto.input[0]!r} of shape {shape_text(node.shape(0))}"


def _output_shape(node: Node) -> Came:
    """Pads of given output shapes: the parser puts the odd one at the end, ONNX at the beginning; with auto_pad it does
    not read them."""
    wanted = node.attribute("output_shape")
    if wanted is None:
        return None
    x, kernel = node.shape(0)[2:], node.shape(1)[2:]
    auto, ones = node.attribute("auto_pad", "NOTSET"), [1] * len(x)
    if None in x or None in kernel:
        raise Undecided("sizes are dynamic")
    parts = [node.attribute(name, ones) for name in ("strides", "dilations")]
    more = node.attribute("output_padding", [0] * len(x))
    for n, k, size, step, apart, extra in zip(x, kernel, wanted[-len(x) :], *parts, more, strict=True):
        assert n is not None
        assert k is not None
        if auto.startswith("SAME") and size != n * step:
            return f"output_shape={list(wanted)} with auto_pad={auto!r}"
        pads = step * (n - 1) + extra + (k - 1) * apart + 1 - size
        if auto == "NOTSET" and pads > 0 and pads % 2:
            return f"output_shape={list(wanted)}, of an odd number of pads"
    return None


def _factors_beside_half(node: Node) -> Came:
    factors = {name: node.attribute(name, 1.0) for name in ("alpha", "beta")}
    if set(factors.values()) == {1.0} or node.dtype(0) != "FLOAT16":
        return None
    return f"FLOAT16, alpha={factors['alpha']:g} and beta={factors['beta']:g}"


def _half_statistics(node: Node) -> Came:
    found = [node.proto.input[i] for i in range(1, 5) if node.has_input(i) and not node.is_constant(i)]
    return f"FLOAT16 with {found[0]!r}, which is computed" if found and node.dtype(0) == "FLOAT16" else None


def _axes_left_out(node: Node) -> Came:
    if node.opset < 10 or node.has_input(3) or not node.is_constant(1):
        return None
    count, rank = node.value(1).size, len(node.shape(0))
    return None if count == rank else f"no axes for {count} of {rank} dimensions"


def _negative_pads(node: Node) -> Came:
    if node.opset >= 11 and not node.is_constant(1):
        return None
    pads = node.value(1).ravel().tolist() if node.opset >= 11 else node.attribute("pads", [])
    return f"pads={pads}" if min(pads, default=0) < 0 else None


def _padded(node: Node) -> Came:
    return f"{node.proto.output[0]!r}, whose last rows may be no boxes"


def _reduction_given(node: Node) -> Came:
    found = node.attribute("reduction")
    return None if found is None else f"reduction={found!r}"


def _scattered(node: Node) -> Came:
    """Of a scatter that adds nothing up: the layer wants no more indices than data along any axis."""
    if node.attribute("reduction", "none") != "none":
        return None
    data, index = node.shape(0), node.shape(1)
    larger = any(a is not None and b is not None and b > a for a, b in zip(data, index, strict=False))
    return f"indices of shape {shape_text(index)} for data of {shape_text(data)}" if larger else None


def _scalar(node: Node) -> Came:
    return f"{node.proto.input[0]!r} of shape [], which becomes [1]" if node.shape(0) == () else None


def _reduction(node: Node) -> Came:
    found = node.attribute("reduction", "none")
    return None if found == "none" else f"reduction={found!r}"


OLD_BROADCAST = Rule(
    "old_broadcast", "opset 7 or later, where inputs are broadcast", _equal_ranks, "export with opset=9 or later"
)
OLD_ELEMENTWISE = Rule("old_broadcast", "opset 7 or later", _no_old_elementwise, "export with opset=9 or later")
OLD_BIAS = Rule(
    "old_broadcast", "opset 7 or later, or a bias of 2 dimensions", _gemm_bias, "export with opset=9 or later"
)
UPPER = Rule("upper", "upper written out", _upper, "write upper=1 out: no version knows ONNX's default")
VALUE_INT = Rule("value_int", "integers as a tensor (value)", _value_int, "write value, a tensor")
SHAPE_PART = Rule("shape_part", "no start or end", _shape_part, "take the part with Slice")
AXES_AFTER_EXP = Rule(
    "axes_after_exp",
    "axes as an attribute",
    _axes_after_exp,
    "export at opset 17 or below, or write it as Log(ReduceSum(Exp(x)))",
)
CLIP_BOUNDS = Rule("bounds", "no bounds for FLOAT16", _clip_bounds, "write Max and Min, or cast to FLOAT before it")
VECTOR_FIRST = Rule(
    "vector_first", "a matrix before a batch of matrices", _vector_first, "unsqueeze the vector, and squeeze the result"
)
COMPUTED_SCALES = Rule("computed_scales", "scales as an initializer, or sizes", _computed_scales, FOLD)
SIZES_OF_TENSORFLOW = Rule("sizes", "scales with tf_half_pixel_for_nn", _sizes_of_tensorflow, "give scales, not sizes")
UNEVEN_SPLIT = Rule("uneven_split", "parts that are not negative", _uneven_split, "give the sizes of the parts")
LOOP_CONDITION = Rule(
    "renamed_input", "a condition that is no input of the graph", _loop_condition, "pass it through Identity first"
)
LOOP_COUNTER = Rule(
    "loop_counter",
    "an iteration number whose shape does not matter",
    _loop_counter,
    "count in a state of the loop",
)
LOOP_GIVEN = Rule(
    "loop_given", "trip count and condition as inputs, where the body uses them", _loop_given, "write them out"
)
KERNEL_SHAPE = Rule("kernel_shape", "kernel_shape, where weights or a bias are computed", _kernel_shape, "write it out")
POOL_CEIL = Rule("ceil_mode", "no window behind the data", _pool_ceil, "pad in the model, and pool without ceil_mode")
ODD_INT4 = Rule("int4", "an even last dimension", _odd_int4, "pad the weights")
ALL_AXES = Rule("empty_axes", "axes, or none at all", _nothing_to_reduce, "leave the input out: all are reduced then")
EMPTY_AXES = Rule("empty_axes", "axes that are not empty", _no_axes, "leave the node out")
REDUCE_AXES = Rule("constant_axes", "axes as an initializer", _reduce_axes, FOLD)
PAIRED_PADS = Rule("pads", "equal pads at both ends", _pads_alike)
AVERAGE_PADS = Rule("pads", "equal pads at both ends, or 1 more at the end", _average_pads)
EINSUM_LETTERS = Rule("equation", "labels of a to z", _einsum_letters, "write the equation in lower-case letters")
EINSUM_PLAIN = Rule("equation", "two operands, and no ellipsis", _einsum_plain)
EINSUM_DIAGONAL = Rule("equation", "no diagonal", _einsum_diagonal)
EINSUM_SIZES = Rule("equation", "no broadcasting of size 1", _einsum_sizes)
TOPK_K = Rule("topk_k", "K of at most 3840", _topk_k)
ZERO_POINT = Rule("zero_point", "a zero point of 0", _zero_point, "quantize symmetrically")
UINT8_ZERO_POINT = Rule(
    "zero_point_type", "an INT8 zero point", _zero_point_type, "quantize to INT8: a UINT8 zero point is taken for INT8"
)
SCALES = Rule("scales", "scales above 0", _scales)
DROPOUT = Rule("training_mode", "no training_mode", _dropout, "export in eval mode")
RESIZE_LINEAR = Rule("resize", "linear over the last 3 dimensions only", _resize_linear)
RESIZE_CUBIC = Rule("resize", "cubic over the last 2 dimensions only", _resize_cubic)
RESIZE_CORNERS = Rule(
    "corners", "whole numbers of elements with align_corners", _resize_corners, "give sizes, not scales"
)
RESIZE_AXES = Rule("resize", "axes of all dimensions in order, where scales are computed", _resize_axes)
RESIZE_NEAREST = Rule(
    "nearest_mode", "nearest_mode='round_prefer_floor' with tf_half_pixel_for_nn", _nearest_of_tensorflow
)
RESIZE_NOT_NEAREST = Rule("mode", "mode='nearest' with tf_half_pixel_for_nn", _not_nearest_of_tensorflow)
MOD = Rule("fmod", "integers where fmod is 0", _mod, "export torch.fmod, or cast to integers")
ROUNDED_QUOTIENT = Rule("rounded_quotient", "integers, or no x that is close to a multiple of y", _rounded_quotient)
CLIPPED_CELL = Rule("clip", "no clip, or a cell state within it", _clipped_cell)
IF_COUNT = Rule("if_outputs", "as many outputs in both branches", _if_count)
IF_RANKS = Rule("if_outputs", "outputs of the same rank in both branches", _if_ranks)
IF_NAMES = Rule("if_names", "different names for the outputs of the branches", _if_names, "rename those of one branch")
LOOP_STATES = Rule("loop_shapes", "states that keep their shape over all iterations", _loop_states)
LOOP_SCANS = Rule("loop_scans", "scan outputs of a length that is known", _loop_scans)
SQUEEZE = Rule("squeeze_axes", "axes, where sizes are dynamic", _squeeze, "name the dimensions to squeeze")
NOOP = Rule(
    "noop_with_empty_axes",
    "axes, or no attribute noop_with_empty_axes",
    _nothing_reduced,
    "leave out the node, which reduces nothing",
)
HALF_FACTORS = Rule(
    "factors", "FLOAT, where alpha or beta is not 1", _factors_beside_half, "multiply before it, or cast to FLOAT"
)
HALF_STATISTICS = Rule(
    "statistics", "statistics as initializers, or FLOAT", _half_statistics, "cast to FLOAT before it, and back"
)
OUTPUT_SHAPE = Rule("output_shape", "pads, and no output_shape", _output_shape, "write the pads that follow from it")
SLICE_AXES = Rule("slice_axes", "axes, where not all dimensions have a start", _axes_left_out, "write the axes")
NEGATIVE_PADS = Rule("negative_pads", "no negative pads", _negative_pads, "slice, and pad what is left")
PADDED = Rule("padded", "a graph that takes boxes padded to max_output_boxes_per_class", _padded)
REDUCTION_GIVEN = Rule("reduction", "no attribute reduction, whatever it says", _reduction_given, "leave it out")
SCATTERED = Rule("scattered", "no more indices than data along any axis", _scattered, "scatter in several steps")
SCALAR = Rule("scalar", "a tensor of one dimension at least", _scalar, "quantize a tensor of shape [1]")
REDUCTION = Rule("reduction", "reduction='none'", _reduction)


def directions(count: int) -> Rule:
    """Of a recurrent op with so many activations."""
    return Rule("activations", "the same activations in both directions", _directions(count))
