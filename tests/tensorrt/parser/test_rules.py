"""The parser confirms the restrictions that ``svexport check`` knows: breaking one is refused, or misread."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx.reference
import pytest
import torch
from onnx import helper
from torch import Tensor

import svexport
from tests.tensorrt.parser.parser import Parsed, Parser, outcome
from tests.tensorrt.test_support import CASES, Case

# Numbers that make a difference where others would not.
TELLING = {
    "zero_point_type": {"x0": np.linspace(-200, 200, 32, dtype=np.float32).reshape(1, 4, 8)},
    "computed_scales": {"x2": np.float32([1, 1, 0.6, 0.6])},
}


def complete(model: onnx.ModelProto) -> onnx.ModelProto:
    """With types of its outputs, which every parser asks for."""
    inferred = onnx.shape_inference.infer_shapes(model)
    for value, found in zip(model.graph.output, inferred.graph.output):
        if found.type.tensor_type.elem_type:
            value.CopyFrom(found)
        else:
            value.CopyFrom(helper.make_tensor_value_info(value.name, onnx.TensorProto.FLOAT, None))
    return model


def inputs_of(model: onnx.ModelProto, given: dict[str, np.ndarray]) -> dict[str, Tensor] | None:
    """None where torch or numpy have no such type."""
    generator = np.random.default_rng(0)
    result = {}
    for value in model.graph.input:
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        shape = [d.dim_value if d.HasField("dim_value") else 2 for d in value.type.tensor_type.shape.dim]
        array = generator.random(shape) if np.issubdtype(kind, np.floating) else generator.integers(0, 2, shape)
        try:
            result[value.name] = torch.from_numpy(np.asarray(given.get(value.name, array), kind).reshape(shape))
        except TypeError:
            return None
    return result


def computed(model: onnx.ModelProto, feeds: dict[str, Tensor]) -> list[Tensor] | None:
    """By ONNX's own evaluator; None where it has no answer."""
    try:
        results = onnx.reference.ReferenceEvaluator(model).run(None, {name: t.numpy() for name, t in feeds.items()})
        return [torch.from_numpy(np.asarray(result)) for result in results]
    except Exception:  # noqa: BLE001 - models that break a restriction need not be runnable
        return None


def held(case: Case, parser: Parser) -> str:
    """The kind of the restriction that a case is about, if this version has it."""
    found = svexport.check(case.broken, str(parser)).findings
    came = [
        finding.came for finding in found if finding.rule == case.rule and finding.op and finding.severity == "error"
    ]
    if not came or "no engine can be built" in came[0]:
        return ""
    return "silent" if "computes something else" in came[0] else "error"


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.rule}-{case.broken.graph.node[-1].op_type}-{case.target}"
)
def test_restriction(parser: Parser, parse: Callable[..., Parsed], case: Case) -> None:
    kind = held(case, parser)
    if not kind:
        pytest.skip(f"TensorRT {parser} has no such restriction that shows in parsing")
    model = complete(case.broken)
    feeds = inputs_of(model, TELLING.get(case.rule, {}))
    found, why = outcome(parse(model), feeds, None if feeds is None else computed(model, feeds))
    assert found == "refused" if kind == "error" else found != "right", why


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.rule}-{case.kept.graph.node[-1].op_type}-{case.target}"
)
def test_no_restriction(parser: Parser, parse: Callable[..., Parsed], case: Case) -> None:
    """What check has nothing against, the parser takes rightly."""
    model = complete(case.kept)
    if not svexport.check(model, str(parser)).ok:
        pytest.skip(f"TensorRT {parser} takes no {case.kept.graph.node[-1].op_type} like this")
    feeds = inputs_of(model, TELLING.get(case.rule, {}))
    found, why = outcome(parse(model), feeds, None if feeds is None else computed(model, feeds))
    assert found in ("right", "taken"), why
