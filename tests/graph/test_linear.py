"""Type inference of long graphs of svexport nodes is linear: each node is inferred once."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper

from svexport.graph import bodies
from svexport.graph.bodies import lower


def chain(count: int) -> onnx.ModelProto:
    """Svexport nodes in a row, with no ``value_info`` between them."""
    nodes = [
        helper.make_node("SvFastSigmoid", [f"y{i}"], [f"y{i + 1}"], name=f"n{i}", domain="svexport")
        for i in range(count)
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("y0", TensorProto.FLOAT, [2, "n"])],
        [helper.make_tensor_value_info(f"y{count}", TensorProto.FLOAT, None)],
    )
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("svexport", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def test_nodes_in_a_row(monkeypatch) -> None:
    """A thousand need as many inferences of whole graphs as ten."""
    asked: list[int] = []
    own = bodies.infer_types

    def counted(model, *args):
        asked.append(len(model.graph.node))
        return own(model, *args)

    monkeypatch.setattr(bodies, "infer_types", counted)
    counts = []
    for count in (10, 1000):
        asked.clear()
        lowered = lower(chain(count))
        assert not any(node.domain == "svexport" for node in lowered.graph.node)
        counts.append(len(asked))
    assert counts[0] == counts[1]
    assert sum(asked) < 3000


@pytest.mark.parametrize("count", [1, 3])
def test_types_found_on_the_way(count) -> None:
    model = chain(count)
    bodies.state_types(model)
    found = {v.name: [d.dim_value or None for d in v.type.tensor_type.shape.dim] for v in model.graph.value_info}
    assert found == {f"y{i}": [2, None] for i in range(1, count)}
