"""Faults planted in models, over every kind of engine: comparison finds the first module that differs, and its line."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

import svexport
from svexport.graph.bodies import strip
from svexport.graph.nodes import svexport_nodes
from svexport.runtime.compare import Comparison
from tests.tensorrt.engines import EXAMPLES
from tests.tensorrt.reference.fixtures import Install

ROOT = Path(__file__).parents[2]


class Planted:
    """An exported example, and where in it modules begin.

    Attributes:
        model: the example.
        args: its inputs.
        path: of its file.
    """

    def __init__(self, name: str, folder: Path) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = importlib.import_module(name).model(**EXAMPLES[name]).eval()
        self.args = tuple(self.model.example_inputs)  # type: ignore[arg-type]
        self.path = folder / f"{name}.onnx"
        svexport.export(self.model, self.args, self.path, opset=17, verify=False)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Planted]:
    folder, made = tmp_path_factory.mktemp("planted"), {}

    def get(name: str) -> Planted:
        if name not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.syspath_prepend(str(ROOT / "examples"))
                made[name] = Planted(name, folder)
        return made[name]

    return get


# ------------------------------------------------------------------------------------------------------------- faults


def module_of(node: onnx.NodeProto) -> str:
    """The innermost module that a node is of; empty for none but the model itself."""
    named = [entry.value for entry in node.metadata_props if entry.key == "namespace"]
    return named[0].split("/")[-2].split(": ")[0] if named else ""


def middle(model: onnx.ModelProto, fits: Callable[[onnx.NodeProto], Any]) -> onnx.NodeProto:
    found = [node for node in model.graph.node if fits(node) and module_of(node)]
    return found[len(found) // 2]


def constants(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    return {tensor.name: tensor for tensor in model.graph.initializer}


def after(model: onnx.ModelProto, node: onnx.NodeProto, *made: onnx.NodeProto) -> None:
    """Nodes that read ``planted`` and write what the node wrote."""
    end = list(model.graph.node).index(node) + 1
    for one in made:
        one.metadata_props.extend(node.metadata_props)  # of the same module
    node.output[0], made[-1].output[0] = "planted", node.output[0]
    rest = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*rest[:end], *made, *rest[end:]])


def floats(model: onnx.ModelProto, rank: int) -> set[str]:
    """Values of this rank whose last two sizes are more than one."""
    inferred = onnx.shape_inference.infer_shapes(model)
    return {
        v.name
        for v in inferred.graph.value_info
        if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
        and len(v.type.tensor_type.shape.dim) >= rank
        and all(d.dim_value > 1 for d in v.type.tensor_type.shape.dim[-2:])
    }


def wrong_eps(model: onnx.ModelProto) -> onnx.NodeProto:
    kinds = ("BatchNormalization", "LayerNormalization", "InstanceNormalization")
    node = middle(model, lambda node: node.op_type in kinds)
    kept = [a for a in node.attribute if a.name != "epsilon"]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("epsilon", 0.5)])
    return node


def swapped_axes(model: onnx.ModelProto) -> onnx.NodeProto:
    """Transposed, and read in the shape that it had."""
    wide = floats(model, 3)
    node = middle(model, lambda node: node.op_type in ("Conv", "MatMul", "Gemm", "Relu") and node.output[0] in wide)
    inferred = onnx.shape_inference.infer_shapes(model)
    [shape] = [v.type.tensor_type.shape.dim for v in inferred.graph.value_info if v.name == node.output[0]]
    sizes = np.array([d.dim_value for d in shape], np.int64)
    axes = [*range(len(sizes) - 2), len(sizes) - 1, len(sizes) - 2]
    model.graph.initializer.append(numpy_helper.from_array(sizes, "planted_shape"))
    turned = helper.make_node("Transpose", ["planted"], ["planted_turned"], perm=axes)
    after(model, node, turned, helper.make_node("Reshape", ["planted_turned", "planted_shape"], ["?"]))
    return node


def half_overflow(model: onnx.ModelProto) -> onnx.NodeProto:
    """Through half, at a scale at which its largest is not enough."""
    wide = floats(model, 2)
    node = middle(model, lambda node: node.op_type in ("Conv", "MatMul", "Gemm") and node.output[0] in wide)
    model.graph.initializer.append(numpy_helper.from_array(np.array(1e6, np.float32), "planted_scale"))
    names = [f"planted_{number}" for number in range(3)]
    after(
        model,
        node,
        helper.make_node("Mul", ["planted", "planted_scale"], names[:1]),
        helper.make_node("Cast", names[:1], names[1:2], to=onnx.TensorProto.FLOAT16),
        helper.make_node("Cast", names[1:2], names[2:], to=onnx.TensorProto.FLOAT),
        helper.make_node("Div", [names[2], "planted_scale"], ["?"]),
    )
    return node


def padding_mode(model: onnx.ModelProto) -> onnx.NodeProto:
    """Zeros around a convolution become the border; or of a sampler, zeros outside of the image."""
    samplers = [node for node in svexport_nodes(model) if node.op_type == "SvGridSample"]
    if samplers:
        node = samplers[len(samplers) // 2]
        [mode] = [a for a in node.attribute if a.name == "padding_mode"]
        mode.i = 1 - min(mode.i, 1)
        strip(model)  # bodies are of the mode that it was
        return node

    def pads(node: onnx.NodeProto) -> list[int]:
        return next((list(a.ints) for a in node.attribute if a.name == "pads"), [])

    node = middle(model, lambda node: node.op_type == "Conv" and any(pads(node)))
    own = pads(node)
    half = len(own) // 2
    amounts = np.array([0, 0, *own[:half], 0, 0, *own[half:]], np.int64)
    model.graph.initializer.append(numpy_helper.from_array(amounts, "planted_pads"))
    pad = helper.make_node("Pad", [node.input[0], "planted_pads"], ["planted_padded"], mode="edge", name="planted_pad")
    node.input[0] = "planted_padded"
    kept = [a for a in node.attribute if a.name != "pads"]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("pads", [0] * len(own))])
    model.graph.node.insert(list(model.graph.node).index(node), pad)
    return node


def one_channel(model: onnx.ModelProto) -> onnx.NodeProto:
    weights = constants(model)
    node = middle(model, lambda node: node.op_type in ("Conv", "MatMul", "Gemm") and node.input[1] in weights)
    weight = numpy_helper.to_array(weights[node.input[1]]).copy()
    axis = 0 if node.op_type == "Conv" else weight.ndim - 1
    np.moveaxis(weight, axis, 0)[1] *= 1.5
    weights[node.input[1]].CopyFrom(numpy_helper.from_array(weight, node.input[1]))
    return node


FAULTS = {f.__name__: f for f in (wrong_eps, swapped_axes, half_overflow, padding_mode, one_channel)}


def plant(fault: str, model: onnx.ModelProto) -> str:
    """Plants it; the innermost module that computes what is wrong then."""
    return module_of(FAULTS[fault](model))


FIRST = {
    ("stgcn", "wrong_eps"),
    ("stgcn", "swapped_axes"),
    ("yolox_stem", "padding_mode"),
    ("yolox_stem", "one_channel"),
    ("fused_decoder", "half_overflow"),
}
WITHOUT_NORM = ("fused_decoder", "yolox_stem")
"""No normalization is left in their files."""

CASES = [
    pytest.param(name, fault, marks=() if (name, fault) in FIRST else pytest.mark.exhaustive)
    for name in EXAMPLES
    for fault in FAULTS
    if not (fault == "wrong_eps" and name in WITHOUT_NORM)
]


def names_it(found: Comparison, module: str) -> bool:
    """Whether the first layer that differs is that module, or ``conv+bn`` of which it is a part; or, where the module's
    own forward is wrong, the submodule that is called next in it."""
    assert found.first is not None
    first, *others = re.sub(r"( \(\d+\)|\[\d+\])$", "", found.first.name).split("+")
    around = first.rpartition(".")[0]
    return module in (first, around, *(f"{around}.{other}" for other in others))


@pytest.mark.parametrize(("name", "fault"), CASES)
def test_the_first_bad_module_is_named(
    planted: Callable[[str], Planted], name: str, fault: str, tmp_path: Path, tensorrt: Install
) -> None:
    """In a wrong file; and with the right file, where TensorRT computes it wrong."""
    example = planted(name)
    wrong = onnx.load(example.path)
    module = plant(fault, wrong)
    onnx.save(wrong, tmp_path / "wrong.onnx")
    found = svexport.compare(example.model, tmp_path / "wrong.onnx", example.args, layers=True)
    assert names_it(found, module), (found.first, module)
    tensorrt(kernel=lambda model: plant(fault, model))
    with svexport.build(example.path, tmp_path / "m.engine") as engine:
        bisected = svexport.compare(example.model, engine, example.args, layers=True)
    assert names_it(bisected, module), (bisected.first, module)
    assert len(bisected.layers) < len(found.layers) or name == "fused_decoder"
    for one in (found, bisected):
        assert not one.ok
        assert one.first is not None
        line = one.sources[one.first.name]
        assert re.match(r".*examples/\w+\.py:\d+ in \w+: ", line)
        assert f"beginning at {one.first.name} ({line})" in str(one).replace("\n", " ")
        if fault == "one_channel":
            assert str(one.where[-1]).startswith("on axis ")
            assert f"{one.first.name} differs on axis" in str(one)
