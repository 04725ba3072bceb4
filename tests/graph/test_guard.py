"""Guards and unique names keep TensorRT from running a body."""

from __future__ import annotations

from collections import Counter

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import svexport
from svexport.graph import lower
from svexport.graph.guard import is_guarded
from svexport.graph.simplify import simplify
from svexport.graph.walk import graphs
from svexport.ops._einsum.labels import parse
from svexport.ops._op import OPS, Op
from svexport.tensorrt.support.operators import OPERATORS
from tests.support import op_model, run_model

SEQUENCES = {"SequenceConstruct", "SequenceLength"}


def with_bodies(op: Op, opset: int) -> onnx.ModelProto:
    generator = torch.Generator().manual_seed(0)
    args = next(iter(op.samples(lambda *shape: torch.randn(shape, generator=generator))))
    return op_model(op, args, opset, lowered=False)


def op_types(nodes) -> list[str]:
    return [node.op_type for node in nodes]


@pytest.mark.parametrize("opset", [9, 11, 13, 18, 23])
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_every_body_has_one(op: Op, opset: int) -> None:
    """What it computes is compared with torch in tests/ops; here, that TensorRT meets a node that it does not know."""
    model = with_bodies(op, opset)
    (body,) = model.functions
    assert is_guarded(body)
    guard = next(node for node in body.node if node.op_type not in OPERATORS)
    assert guard.op_type == ("SequenceConstruct" if opset >= 11 else "Compress")
    assert guard.name == f"TensorRT needs the plugin {op.node_type}"
    reached = set(guard.output)  # an optimizer drops what reaches no result
    for node in body.node:
        if not reached.isdisjoint(node.input):
            reached.update(node.output)
    assert not reached.isdisjoint(body.output)
    assert not SEQUENCES & set(op_types(lower(model).graph.node))


def test_a_body_that_uses_no_input() -> None:
    op = OPS["einsum"]
    x = torch.ones(3, 0)
    model = op_model(op, ([x], *parse("ij->i", (2,))), 13, lowered=False)
    assert is_guarded(model.functions[0])
    torch.testing.assert_close(run_model(model, [x])[0], torch.zeros(3))


class Sampled(nn.Module):
    """Two bodies of one op and one of another."""

    def forward(self, image, grid, a, b, residual):
        near = F.grid_sample(image, grid, mode="nearest", align_corners=False)
        y = (F.grid_sample(image, grid, align_corners=False) + near).mean((2, 3))
        return svexport.ops.add_bias_residual_layer_norm(y, a, residual, a, b)[0] + near.sum()


def arguments() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    grid = torch.rand(1, 3, 3, 2) * 2 - 1
    return torch.randn(1, 4, 5, 6), grid, torch.randn(4), torch.randn(4), torch.randn(1, 4)


def names(graph: onnx.GraphProto) -> set[str]:
    return {name for node in graph.node for name in (*node.input, *node.output)} | {v.name for v in graph.input}


NAMES = ["input", "grid", "weight", "body0/grid", "output_0"]
"""Of the inputs: those of inputs and values of bodies."""


@pytest.mark.parametrize("opset", [11, 18])
def test_no_name_of_a_body_is_another_of_the_file(tmp_path, opset: int) -> None:
    report = svexport.export(Sampled(), arguments(), tmp_path / "m.onnx", opset=opset, input_names=NAMES)
    assert report.verified
    model = onnx.load(tmp_path / "m.onnx")
    assert [value.name for value in model.graph.input] == NAMES
    assert Counter(body.name for body in model.functions) == {"SvGridSample": 2, "SvAddBiasResidualLayerNorm": 1}
    taken = set().union(*map(names, graphs(model.graph)))
    for body in model.functions:
        assert is_guarded(body)
        own = {*body.input, *body.output} | {name for node in body.node for name in (*node.input, *node.output)}
        assert not own & taken
        taken |= own


@pytest.mark.parametrize("opset", [11, 18])
def test_tools_leave_it(tmp_path, opset: int) -> None:
    """Ours, which looks at no body, and the optimizer of onnxscript in bodies and inlined."""
    import onnx_ir as ir
    from onnx import inliner
    from onnx_ir.passes import common
    from onnxscript.optimizer import fold_constants

    svexport.export(Sampled(), arguments(), tmp_path / "m.onnx", opset=opset, verify=False)
    model = onnx.load(tmp_path / "m.onnx")
    assert simplify(model).functions == model.functions
    graph = ir.from_proto(model)
    fold_constants(graph, onnx_shape_inference=True)
    common.RemoveUnusedNodesPass()(graph)
    assert all(map(is_guarded, ir.to_proto(graph).functions))
    inlined = inliner.inline_local_functions(model)
    assert op_types(inlined.graph.node).count("SequenceConstruct") == len(model.functions)
    assert not SEQUENCES & set(op_types(lower(model).graph.node))
