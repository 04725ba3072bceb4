"""If, Loop, Scan, sequences and optional values."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from svexport.graph.opsets.rules import Node, down, refused, unchanged
from svexport.symbolic._builder import Builder, Value

unchanged("If Loop", 11, 19, 21, 23, 24)
unchanged("Scan", 16, 19, 21, 23, 24)
unchanged("Identity", 13, 19, 21, 23, 24)
unchanged("SplitToSequence", 24)

refused(
    "ConcatFromSequence SequenceAt SequenceConstruct SequenceEmpty SequenceErase", 11, "there are no sequences there"
)
refused("SequenceInsert SequenceLength SplitToSequence", 11, "there are no sequences there")
refused("Optional OptionalGetElement OptionalHasElement", 15, "there are no optional values there")


@down("Identity", 14)
@down("If Loop", 13)
def _no_sequences(b: Builder, node: Node) -> None:
    if any(node.known.kind(name) == "sequence" for name in (*node.proto.input, *node.proto.output)):
        node.refuse(f"{node.proto.op_type} takes no sequences there")


@down("Identity If Loop", 16)
def _no_optional_values(b: Builder, node: Node) -> None:
    if any(node.known.kind(name) == "optional" for name in (*node.proto.input, *node.proto.output)):
        node.refuse(f"{node.proto.op_type} takes no optional values there")


@down("OptionalGetElement OptionalHasElement", 18)
def _of_optional_values(b: Builder, node: Node) -> Value | None:
    """A value that is not optional is always present."""
    x, asked = node.given(0), node.proto.op_type == "OptionalHasElement"
    if x is None and asked:
        return b.constant(False)
    if x is None or (node.known.kind(x.name) == "tensor" and x.dtype is None):
        node.refuse("whether its input is an optional value is not known")
    if node.known.kind(x.name) == "optional":
        return None
    return b.constant(True) if asked else x


@down("Scan", 11)
def _axes_from_front(b: Builder, node: Node) -> None:
    for name in ("scan_input_axes", "scan_output_axes"):
        if any(axis < 0 for axis in node.attribute(name, [])):
            node.refuse(f"its {name} count from the end")


@down("SequenceMap", 17)
def _sequence_map(b: Builder, node: Node) -> tuple[Value, ...]:
    """A loop over the places of the sequence."""
    proto, body = node.proto, node.attribute("body")
    graph = onnx.GraphProto(name=body.name or "body", initializer=body.initializer)
    place, go_on = f"{b.prefix}place", f"{b.prefix}go_on"
    info = helper.make_tensor_value_info
    graph.input.extend([info(place, TensorProto.INT64, []), info(go_on, TensorProto.BOOL, [])])
    for formal, name in zip(body.input, proto.input, strict=True):
        at = [name, place] if node.known.kind(name) == "sequence" else [name]
        graph.node.append(helper.make_node("SequenceAt" if len(at) > 1 else "Identity", at, [formal.name]))
    graph.node.extend(body.node)
    graph.node.append(helper.make_node("Identity", [go_on], [f"{go_on}_out"]))
    graph.output.append(info(f"{go_on}_out", TensorProto.BOOL, []))
    starts: list[Value] = []
    for index, output in enumerate(body.output):
        dtype, name = output.type.tensor_type.elem_type, f"{b.prefix}sequence_{index}"
        if not dtype:
            node.refuse("the data type of what its body makes is not stated")
        graph.input.append(helper.make_tensor_sequence_value_info(name, dtype, None))
        graph.output.append(helper.make_tensor_sequence_value_info(f"{name}_out", dtype, None))
        graph.node.append(helper.make_node("SequenceInsert", [name, output.name], [f"{name}_out"]))
        starts.extend(b.ops("SequenceEmpty", outputs=1, dtype=dtype))
    length = b.op("SequenceLength", node.input())
    return b.ops("Loop", length, None, *starts, outputs=len(starts), body=graph)
