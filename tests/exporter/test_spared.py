"""Work that is left out while a model is traced does not change the result."""

from __future__ import annotations

import contextlib
import random
import typing
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnxscript import rewriter
from torch import Tensor, fx, nn
from torch.fx import proxy
from torch.fx.experimental.proxy_tensor import make_fx

from svexport.exporter.spared import rules_where_they_may_match, spared


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.again(x)
        return x.softmax(-1)

    def again(self, x: Tensor, deep: int = 5) -> Tensor:
        return self.again(x, deep - 1) if deep else self.layers(x) + x


def exported() -> torch.export.ExportedProgram:
    return torch.export.export(Model().eval(), (torch.ones(2, 4),), strict=False)


def test_nodes_are_told_the_same_lines() -> None:
    programs = []
    for spare in (False, True):
        if spare:
            with spared():
                programs.append(exported())
        else:
            programs.append(exported())
    theirs, ours = ([(n.name, str(n.target), n.meta.get("stack_trace")) for n in p.graph.nodes] for p in programs)
    mine = [(name, target, lines) for name, target, lines in theirs if lines]
    assert len({lines for _, _, lines in mine}) > 1
    # The line of the export itself is another one; it is no frame of a forward.
    assert ours == theirs


def test_a_graph_runs_as_it_is_then() -> None:
    with spared():
        module = make_fx(lambda x: x.relu() + 1)(torch.ones(2))
        assert torch.equal(module(torch.tensor([-1.0, 2.0])), torch.tensor([1.0, 3.0]))
        for node in module.graph.nodes:
            if node.target is torch.ops.aten.add.Tensor:
                node.args = (node.args[0], 5)
        module.recompile()
        assert "5" in module.code
        assert "5" in str(module)
        assert torch.equal(module(torch.tensor([-1.0, 2.0])), torch.tensor([5.0, 7.0]))
        module.recompile()
        assert "def forward" in module.recompile().src
        module.recompile()
    assert torch.equal(type(module).forward(module, torch.tensor([-1.0, 2.0])), torch.tensor([5.0, 7.0]))
    assert torch.equal(module(torch.tensor([-1.0, 2.0])), torch.tensor([5.0, 7.0]))


def test_a_program_of_then_runs_later() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4)
    model = Model().eval()
    with spared():
        program = torch.export.export(model, (torch.ones(2, 4),), strict=False)
    torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.parametrize("operator", ["Clip", "Resize", "Split"])
def test_signatures_are_those_of_the_schema(operator: str) -> None:
    import onnx

    signature = ir.schemas.OpSignature
    for version in (13, 18):
        schema = onnx.defs.get_schema(operator, version, "")
        with spared():
            first, second = (signature.from_op_schema(schema) for _ in range(2))
            assert first is second
        fresh = signature.from_op_schema(schema)
        assert fresh is not first
        assert str(fresh) == str(first)
        assert fresh.since_version == first.since_version


def test_everything_is_put_back() -> None:
    def state() -> list[Any]:
        protocols = getattr(typing, "_get_protocol_attrs", None)
        late = ["_code" in vars(fx.GraphModule), "_lineno_map" in vars(fx.GraphModule)]
        return [fx.GraphModule.recompile, proxy.CapturedTraceback, protocols, vars(ir.schemas.OpSignature), late]  # type: ignore[attr-defined]

    before = state()
    with spared():
        assert fx.GraphModule.recompile is not before[0]
    assert state() == before


def test_types_that_are_known_are_not_inferred_again() -> None:
    """Of three results one is not known, another has an open size."""
    from onnxscript.optimizer import fold_constants

    text = """<ir_version: 8, opset_import: ["": 18]>
    graph (float[2,3] x) => (float[2,3] y) <float[2,3] a, float[2,n] b>
    { a = Relu(x)  b = Neg(a)  c = Exp(b)  y = Abs(c) }"""
    shapes = []
    for spare in (False, True):
        model = ir.from_onnx_text(text)
        with spared() if spare else contextlib.nullcontext():
            fold_constants(model, onnx_shape_inference=True)
        shapes.append([(node.outputs[0].dtype, str(node.outputs[0].shape)) for node in model.graph])
    assert shapes[0] == shapes[1] == [(ir.DataType.FLOAT, "[2,3]")] * 4


def model_in_no_order(generator: random.Random) -> ir.Model:
    """Nodes that rules of the optimizer are about, in no order of a model's."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2, 4]))
    half, twice = (ir.tensor(np.array(n, np.float32), name=str(n)) for n in (0.5, 2.0))
    given = [ir.Value(name=t.name, const_value=t, type=x.type, shape=ir.Shape([])) for t in (half, twice)]
    perm = {"perm": [1, 0]}
    made = [x]
    for _ in range(120):
        kind = generator.choice(["Transpose", "Mul", "Add", "Cast", "Relu", "MatMul", "Identity", "Sigmoid"])
        inputs = [generator.choice(made[-3:])]
        if kind in ("Mul", "Add", "MatMul"):
            inputs.insert(generator.randrange(2), generator.choice([*made[-2:], *given]))
        options = {"Transpose": perm, "Cast": {"to": 1}}.get(kind, {})
        made.append(ir.node(kind, inputs, options).outputs[0])
        made[-1].name, made[-1].type = f"v{len(made)}", x.type
    nodes = [value.producer() for value in made[1:]]
    graph = ir.Graph([x], made[-1:], nodes=nodes, initializers=given, opset_imports={"": 18})
    return ir.Model(graph, ir_version=10)


def matched(model: ir.Model) -> list[tuple[str | None, str | None]]:
    """Rules, and the nodes that each rewrites; trying them changes a model."""
    rules = rewriter._DEFAULT_REWRITE_RULES
    rules = rules.rules if hasattr(rules, "rules") else rules
    return [
        (str(rule), node.outputs[0].name)
        for node in list(model.graph)
        for rule in rules
        if rule.try_rewrite(model, model.graph, node) is not None
    ]


def test_rules_find_what_they_would_find() -> None:
    """As many match, and the same, as where all are tried on all."""
    seed = random.random()
    theirs = matched(model_in_no_order(random.Random(seed)))
    assert theirs
    with rules_where_they_may_match():
        assert matched(model_in_no_order(random.Random(seed))) == theirs
