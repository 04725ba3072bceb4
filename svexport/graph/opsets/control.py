"""If, Loop, Scan, sequences and optional values."""

from __future__ import annotations

from svexport.graph.opsets.rules import Node, down, refused, unchanged
from svexport.symbolic._builder import Builder

unchanged("If Loop", 11, 19, 21, 23, 24)
unchanged("Scan", 16, 19, 21, 23, 24)
unchanged("Identity", 13, 19, 21, 23, 24)
unchanged("SplitToSequence", 24)

refused(
    "ConcatFromSequence SequenceAt SequenceConstruct SequenceEmpty SequenceErase", 11, "there are no sequences below"
)
refused("SequenceInsert SequenceLength SplitToSequence", 11, "there are no sequences below")
refused("Optional OptionalGetElement OptionalHasElement", 15, "there are no optional values below")


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
def _of_optional_values(b: Builder, node: Node) -> None:
    if not node.proto.input or node.known.kind(node.proto.input[0]) != "optional":
        node.refuse(f"{node.proto.op_type} takes optional values only there")


@down("Scan", 11)
def _axes_from_front(b: Builder, node: Node) -> None:
    for name in ("scan_input_axes", "scan_output_axes"):
        if any(axis < 0 for axis in node.attribute(name, [])):
            node.refuse(f"its {name} count from the end")
