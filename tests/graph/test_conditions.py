from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import parser
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

import svexport
from svexport.graph.conditions import take_decided_branches
from tests.support import run_model

GRAPH = """<ir_version: 8, opset_import: ["": 13]>
g (float[2, rows, 5] x, bool flag) => (float[rows, 5] y, float[rows, 5] z, float[2, rows, 5] w)
{{
  shape = Shape(x)
  zero = Constant<value_ints = [{axis}]>()
  size = Gather(shape, zero)
  two = Constant<value_ints = [2]>()
  condition = Equal(size, two)
  y, z = If(condition) <
    then_branch = then () => (float[rows, 5] a, float[rows, 5] a) {{ t = Constant<value_ints = [0]>()
      a = ReduceSum<keepdims = 0>(x, t) }},
    else_branch = other () => (float[rows, 5] a, float[rows, 5] b) {{ t = Constant<value_ints = [0]>()
      b = ReduceSum<keepdims = 0>(x, t) a = Neg(b) }}
  >
  w = If(flag) <
    then_branch = yes () => (float[2, rows, 5] p) {{ p = If(condition) <
      then_branch = yes2 () => (float[2, rows, 5] q) {{ q = Identity(x) }},
      else_branch = no2 () => (float[2, rows, 5] q) {{ q = Neg(x) }} > }},
    else_branch = no () => (float[2, rows, 5] p) {{ p = Abs(x) }}
  >
}}"""


def ifs(model: onnx.ModelProto) -> int:
    from svexport.graph.walk import graphs

    return sum(node.op_type == "If" for graph in graphs(model.graph) for node in graph.node)


@pytest.mark.parametrize(
    ("axis", "rows", "left"), [(0, "3", 1), (2, "3", 1), (0, "rows", 1), (2, "rows", 1), (1, "rows", 3)]
)
def test_branches_that_sizes_decide_are_taken(axis: int, left: int, rows: str) -> None:
    """The size of axis 0 is 2, that of axis 2 is not, that of axis 1 may be dynamic."""
    model, expected = (parser.parse_model(GRAPH.format(axis=axis).replace("rows", rows)) for _ in range(2))
    decided = left == 1 or rows == "3"
    assert take_decided_branches(model, model) == decided
    assert ifs(model) == (1 if decided else left)
    x = torch.randn(2, 3, 5)
    for flag in (True, False):
        results = ReferenceEvaluator(expected).run(None, {"x": x.numpy(), "flag": np.array(flag)})
        for actual, e in zip(run_model(model, (x, torch.tensor(flag))), results, strict=True):
            torch.testing.assert_close(actual, torch.from_numpy(e))


class Tiled(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.tile(2, 1, 3), nn.functional.local_response_norm(x[None], 3)


@pytest.mark.parametrize("axes", [None, {"x": {0: "rows"}}], ids=["static", "dynamic"])
def test_no_branches_are_left_of_what_depends_on_ranks(axes: dict | None, tmp_path: Path) -> None:
    """TensorRT wants branches of one shape, which these do not have."""
    x = torch.randn(4, 5)
    report = svexport.export(Tiled(), x, tmp_path / "m.onnx", opset=17, dynamic_shapes=axes, verify=False)
    assert "If" not in report.nodes
    assert report.outputs["output_0"] == f"float32[2, {'rows' if axes else 4}, 15]"
    for given in (x, torch.randn(7, 5))[: 2 if axes else 1]:
        for actual, expected in zip(svexport.load(report.path)(given), Tiled()(given), strict=True):
            torch.testing.assert_close(actual, expected)
