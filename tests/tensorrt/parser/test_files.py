"""What svexport writes for a TensorRT, in the parser of that TensorRT: examples, ops and functions of torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport.errors import SvexportError
from svexport.graph import strip
from svexport.ops._op import OPS, Op, as_tuple
from svexport.tensorrt.nodes import plugin_ops
from tests.support import op_model
from tests.tensorrt.cases import CASES, arguments, inputs_of
from tests.tensorrt.engines import EXAMPLES, of_network
from tests.tensorrt.parser.functions import FUNCTIONS, Function
from tests.tensorrt.parser.parser import Parsed, Parser, outcome


def tensors(value: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, Tensor)]


def export(
    model: nn.Module, args: Sequence[Tensor], path: Path, parser: Parser, **options: Any
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Writes a file for the parser's version; its inputs by name, and what they give."""
    report = svexport.export(model, tuple(args), path, target=str(parser), verify=False, **options)
    with torch.no_grad():
        expected = tensors(model(*args))
    assert report.check is not None
    if not report.check.ok:
        pytest.skip(f"check refuses it: {report.check.errors[0].came}")
    return dict(zip(report.inputs, tensors(args), strict=False)), expected


def fields(op: Op) -> set[str]:
    return {argument.name for argument in op.attributes}


@pytest.mark.parametrize("plugins", [True, False], ids=["plugins", "lowered"])
@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(
    parser: Parser,
    plugin_library: Path,
    tmp_path: Path,
    name: str,
    opset: int,
    plugins: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    model = importlib.import_module(name).model(**EXAMPLES[name]).eval()
    feeds, expected = export(model, model.example_inputs, tmp_path / "m.onnx", parser, opset=opset, plugins=plugins)
    (parsed,) = parser.read([tmp_path / "m.onnx"], plugin_library if plugins else None)
    assert outcome(parsed, feeds, expected) == ("right", "")
    nodes = [node for node in onnx.load(tmp_path / "m.onnx").graph.node if node.domain == "svexport"]
    assert [note["name"] for note in parsed.created()] == [node.op_type for node in nodes]
    assert bool(nodes) <= plugins
    for note in parsed.created():
        op = next(op for op in OPS.values() if op.node_type == note["name"])
        assert fields(op) <= {field["name"] for field in note["fields"]}


@pytest.mark.parametrize(("op", "i"), CASES, ids=[f"{op.name}-{i}" for op, i in CASES])
def test_nodes(parser: Parser, parse: Callable[..., Parsed], plugin_library: Path, op: Op, i: int) -> None:
    args = list(arguments(op))[i]
    if not of_network(op, args):
        pytest.skip("an empty tensor, or a type that a network does not begin with")
    model = op_model(op, args, 17, lowered=False)
    strip(model)
    node = model.graph.node[0]
    while not node.input[-1]:  # as exported nodes are
        del node.input[-1]
    given = dict(zip((value.name for value in model.graph.input), (t for _, t in inputs_of(op, args)), strict=True))
    parsed = parse(model, plugin_library)
    assert outcome(parsed, given, list(as_tuple(op(*args)))) == ("right", "")
    (note,) = parsed.created()
    assert note["name"] == op.node_type
    assert {field["name"] for field in note["fields"]} == fields(op)


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_bodies(parser: Parser, tmp_path: Path, op: Op, opset: int) -> None:
    """Every op in standard ONNX, with its own samples."""
    generator = torch.Generator().manual_seed(0)
    for i, args in enumerate(op.samples(lambda *shape: torch.randn(shape, generator=generator))):
        if not of_network(op, args):
            continue
        model = op_model(op, args, opset)
        if not svexport.check(model, str(parser)).ok:
            continue  # what is written for the target has other forms
        onnx.save(model, tmp_path / f"{i}.onnx")
        (parsed,) = parser.read([tmp_path / f"{i}.onnx"])
        given = dict(zip((value.name for value in model.graph.input), (t for _, t in inputs_of(op, args))))
        assert outcome(parsed, given, list(as_tuple(op(*args)))) == ("right", "")


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(parser: Parser, plugin_library: Path, tmp_path: Path, name: str, opset: int) -> None:
    function, args = FUNCTIONS[name]
    model = function if isinstance(function, nn.Module) else Function(function)
    try:
        feeds, expected = export(model.eval(), args, tmp_path / "m.onnx", parser, opset=opset)
    except SvexportError as error:
        pytest.skip(f"not exported for TensorRT {parser}: {error}")
    (parsed,) = parser.read([tmp_path / "m.onnx"], plugin_library)
    assert outcome(parsed, feeds, expected) == ("right", "")


def test_enough_functions() -> None:
    assert len(FUNCTIONS) >= 150
    assert len(plugin_ops()) >= 8
