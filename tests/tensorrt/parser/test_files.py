"""Files that svexport writes for a TensorRT, in that TensorRT's parser: examples, ops and functions of torch."""

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
from svexport.tensorrt.support.target import Target
from tests.support import op_model
from tests.tensorrt.cases import CASES, arguments, inputs_of
from tests.tensorrt.engines import EXAMPLES, of_network
from tests.tensorrt.parser.functions import FUNCTIONS, Function
from tests.tensorrt.parser.models import random_model
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


OPSETS = (11, 13, 17, 18, 20)


def known(parser: Parser, opset: int) -> None:
    if opset > Target.parse(str(parser)).opsets[1]:
        pytest.skip(f"TensorRT {parser} does not know opset {opset}")


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, tuple]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    model = importlib.import_module(name).model(**EXAMPLES[name]).eval()
    return model, tuple(model.example_inputs)


def held(parsed: Parsed, path: Path) -> None:
    """A creator was called for each node, with the fields that the op declares."""
    nodes = [node for node in onnx.load(path).graph.node if node.domain == "svexport"]
    assert [note["name"] for note in parsed.created()] == [node.op_type for node in nodes]
    for note in parsed.created():
        op = next(op for op in OPS.values() if op.node_type == note["name"])
        assert fields(op) <= {field["name"] for field in note["fields"]}


@pytest.mark.parametrize("plugins", [True, False], ids=["plugins", "lowered"])
@pytest.mark.parametrize("opset", OPSETS)
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
    """For the parser's own version: taken with the plugins registered, and without where no node stays."""
    known(parser, opset)
    path = tmp_path / "m.onnx"
    feeds, expected = export(*example(name, monkeypatch), path, parser, opset=opset, plugins=plugins)
    (parsed,) = parser.read([path], plugin_library if plugins else None)
    assert outcome(parsed, feeds, expected) == ("right", "")
    if plugins:
        held(parsed, path)


def never_something_else(
    parser: Parser, model: nn.Module, args: Sequence[Tensor], path: Path, library: Path, **options: Any
) -> None:
    """A file without a target is right or refused, with plugins and without; ``plugins=False`` is right."""
    with torch.no_grad():
        expected = tensors(model(*args))
    report = svexport.export(model, tuple(args), path, verify=False, **options)
    feeds = dict(zip(report.inputs, tensors(args), strict=False))
    nodes = any(node.domain == "svexport" for node in onnx.load(path).graph.node)
    for plugins in (library, None):
        (parsed,) = parser.read([path], plugins)
        found = outcome(parsed, feeds, expected)
        assert found[0] in ("right", "refused"), found
        if not nodes and svexport.check(path, str(parser)).ok:
            assert found == ("right", "")


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_without_target(
    parser: Parser, plugin_library: Path, tmp_path: Path, name: str, opset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, args = example(name, monkeypatch)
    for plugins in (True, False):
        never_something_else(parser, model, args, tmp_path / "m.onnx", plugin_library, opset=opset, plugins=plugins)


@pytest.mark.parametrize("seed", range(200))
def test_random_models(parser: Parser, plugin_library: Path, tmp_path: Path, seed: int) -> None:
    """Several nodes of one type, and inputs that are named like the inputs of bodies."""
    model, args, names = random_model(seed)
    newest = Target.parse(str(parser)).opsets[1]
    opset = [opset for opset in OPSETS if opset <= newest][seed % (3 if newest < 18 else 5)]
    path, options = tmp_path / "m.onnx", {"opset": opset, "input_names": names}
    never_something_else(parser, model, args, path, plugin_library, **options)
    for plugins in (True, False):
        feeds, expected = export(model, args, path, parser, plugins=plugins, **options)
        (parsed,) = parser.read([path], plugin_library if plugins else None)
        assert outcome(parsed, feeds, expected) == ("right", ""), (plugins, names)
        if plugins:
            held(parsed, path)


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
