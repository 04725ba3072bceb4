"""RNN, LSTM and GRU."""

from __future__ import annotations

from svexport.graph.opsets.rules import Node, down, unchanged
from svexport.symbolic._builder import Builder, Value

__all__: list[str] = []

unchanged("RNN LSTM GRU", 22)


@down("RNN LSTM GRU", 14)
def layout(b: Builder, node: Node) -> tuple[Value | None, ...] | None:
    """The batch was never first."""
    if not node.attribute("layout"):
        node.remove("layout")
        return None
    swapped = {0, 5, 6}  # X, initial_h, initial_c
    inputs = [
        value if value is None or i not in swapped else b.op("Transpose", value, perm=[1, 0, 2])
        for i, value in enumerate(node.inputs)
    ]
    made = b.ops(node.proto.op_type, *inputs, outputs=len(node.proto.output))
    proto = b.nodes[-1]
    proto.attribute.extend(attribute for attribute in node.proto.attribute if attribute.name != "layout")
    outputs: list[Value | None] = []
    for index, perm in enumerate(([2, 0, 1, 3], [1, 0, 2], [1, 0, 2])[: len(made)]):
        if node.proto.output[index]:
            outputs.append(b.op("Transpose", made[index], perm=perm))
        else:
            proto.output[index] = ""
            outputs.append(None)
    return tuple(outputs)
