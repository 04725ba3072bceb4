"""Nodes that change nothing, and Reshapes that the next one makes good: taken out, to the last bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper

from svexport.graph.scope import Scope, drop_unused, scopes, used_inside, used_names
from svexport.graph.walk import STANDARD, attributes_of

__all__ = ["remove_idle"]

_VIEWS = {"Reshape", "Flatten", "Squeeze", "Unsqueeze"}
"""What moves no element: the order of the elements is all that a Reshape after it reads."""

_NEUTRAL: Mapping[str, tuple[float, bool]] = {"Mul": (1, True), "Div": (1, False), "Add": (-0.0, True), "Sub": (0, False)}
"""The number that leaves any other as it is, and whether it may come first. 0 does not leave -0."""

_LARGEST = 2**20
"""Bytes of the largest constant that is looked at."""


def remove_idle(model: onnx.ModelProto) -> None:
    """Takes out of all graphs of a model, in place: nodes whose output is their input (a Reshape or an Expand to the
    shape that is there, a Slice of all, a Pad by nothing, a product with ones, a Cast to the same type), and the first
    of two views in a row. Values stay the same to the last bit, NaN and -0 included, and so do inputs and outputs."""
    for scope in scopes(model):
        while _skip_views(scope) | _skip_idle(scope):
            pass


def _skip_views(scope: Scope) -> bool:
    """Has each view of a view read what the first one reads; tells whether any did."""
    graph, used, changed = scope.graph, used_names(scope.graph), False
    views = {n.output[0]: n for n in graph.node if n.domain in STANDARD and n.op_type in _VIEWS}
    kept = {value.name for value in graph.output}.union(*(used_inside(node) for node in graph.node))
    readers: dict[str, int] = {}
    for node in graph.node:
        for name in node.input:
            readers[name] = readers.get(name, 0) + 1
    for node in views.values():
        first = views.get(node.input[0])
        if first is None:
            continue
        sizes = _sizes(node, scope)
        alone = readers[first.output[0]] == 1 and first.output[0] not in kept
        if sizes is None or (node.op_type != "Reshape" and not alone):
            continue
        target = scope.constant(np.array(sizes, np.int64), f"{node.output[0]}_shape")
        node.op_type = "Reshape"
        node.input[:] = [first.input[0], target]
        del node.attribute[:]
        changed = True
    if changed:
        drop_unused(graph, used)
    return changed


def _sizes(node: onnx.NodeProto, scope: Scope) -> list[int] | None:
    """What a Reshape with the output of a view is given: sizes, at most one -1, no 0; None where there is no such."""
    if node.op_type == "Reshape":
        given = scope.array(node.input[1])
        if given is None:
            return None
        sizes = given.tolist()
        if 0 in sizes and not attributes_of(node).get("allowzero"):
            before = scope.shape(node.input[0]) or ()
            sizes = [(before[i] if i < len(before) else None) if s == 0 else s for i, s in enumerate(sizes)]
    else:
        shape = scope.shape(node.output[0])
        if shape is None:
            return None
        sizes = [-1 if size is None else size for size in shape]
    return None if None in sizes or 0 in sizes or sizes.count(-1) > 1 else sizes


def _skip_idle(scope: Scope) -> bool:
    """Takes out the nodes whose output is one of their inputs; tells whether there were any."""
    graph, used = scope.graph, used_names(scope.graph)
    results = {value.name for value in graph.output}
    inside = set().union(*(used_inside(node) for node in graph.node))
    producers = {name: node for node in graph.node for name in node.output}
    renamed: dict[str, str] = {}  # what is read instead
    gone: list[onnx.NodeProto] = []
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        same = _same(node, scope)
        if same is None or node.output[0] in inside:
            continue
        if node.output[0] not in results:
            renamed[node.output[0]] = same
        elif same in producers and same not in results and same not in inside and same not in scope.constants:
            _rename(graph.node, same, node.output[0])
            renamed = {name: node.output[0] if to == same else to for name, to in renamed.items()}
            producers[node.output[0]] = producers.pop(same)
        else:
            continue
        gone.append(node)
    if gone:
        kept = [node for node in graph.node if not any(node is other for other in gone)]
        del graph.node[:]
        graph.node.extend(kept)
        drop_unused(graph, used)
    return bool(gone)


def _rename(nodes: Iterable[onnx.NodeProto], name: str, new: str) -> None:
    for node in nodes:
        node.input[:] = [new if given == name else given for given in node.input]
        node.output[:] = [new if made == name else made for made in node.output]


def _same(node: onnx.NodeProto, scope: Scope) -> str | None:
    """The input that a node's only output equals, of that type and shape; None where it may differ."""
    if node.domain not in STANDARD or not node.input or not node.input[0]:
        return None
    if len(node.output) != 1:
        return None
    if node.op_type in _NEUTRAL:
        return _unchanged(node, scope)
    first, given = node.input[0], attributes_of(node)
    if node.op_type == "Identity" or (node.op_type == "Concat" and len(node.input) == 1):
        return first
    if node.op_type == "Cast":
        info = scope.infos.get(first)
        return first if info is not None and info.elem_type and info.elem_type == given["to"] else None
    if node.op_type == "Pad":
        pads = scope.array(node.input[1]) if len(node.input) > 1 else np.array(given.get("pads", [1]))
        return first if pads is not None and not pads.any() else None
    if node.op_type in {"Reshape", "Flatten", "Expand", "Slice", "Tile"} and _is_static_and_equal(node, scope):
        return first if node.op_type != "Slice" or _forwards(node, scope) else None
    return None


def _is_static_and_equal(node: onnx.NodeProto, scope: Scope) -> bool:
    shape = scope.shape(node.input[0])
    return shape is not None and None not in shape and shape == scope.shape(node.output[0])


def _forwards(node: onnx.NodeProto, scope: Scope) -> bool:
    """Whether a Slice has no steps but 1: backwards the sizes are the same as well."""
    if len(node.input) < 5 or not node.input[4]:
        return True
    steps = scope.array(node.input[4])
    return steps is not None and bool((steps == 1).all())


def _unchanged(node: onnx.NodeProto, scope: Scope) -> str | None:
    """What a constant leaves as it is, to the last bit."""
    number, either = _NEUTRAL[node.op_type]
    for other, name in ((0, node.input[1]), (1, node.input[0])) if either else ((0, node.input[1]),):
        tensor, value = scope.constants.get(name), node.input[other]
        shape = scope.shape(value)
        if tensor is None or value in scope.constants or shape is None or tensor.data_type == TensorProto.BFLOAT16:
            continue
        if helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize * int(np.prod(tensor.dims)) > _LARGEST:
            continue
        array = scope.array(name)
        assert array is not None
        spread = len(tensor.dims) > len(shape) or any(
            size not in (1, own) for size, own in zip(tensor.dims[::-1], shape[::-1], strict=False)
        )
        signed = array.dtype.kind != "f" or bool((np.signbit(array) == np.signbit(number)).all())
        if not spread and signed and bool((array == number).all()):
            return value
    return None
