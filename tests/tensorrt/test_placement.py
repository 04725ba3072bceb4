"""Quantizers that prevent fusions: one model breaks each rule, and one keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import svexport
from svexport.tensorrt.check.placement import PLACEMENTS

Q = "quantized"
"""A pair of QuantizeLinear and DequantizeLinear."""


class Graph:
    """A file of nodes, one line each: ``"y = Conv(x, w)"``, with pairs where they are written."""

    def __init__(self, lines: Sequence[str], constants: dict[str, tuple[int, ...]], x: tuple[int, ...]) -> None:
        self.nodes: list[onnx.NodeProto] = []
        for line in lines:
            result, _, call = line.partition(" = ")
            kind, _, inputs = call.rstrip(")").partition("(")
            names = [name.strip() for name in inputs.split(",")]
            if kind == Q:
                self._pair(names[0], result)
            else:
                domain, _, kind = kind.rpartition("::")
                self.nodes.append(helper.make_node(kind, names, [result], f"the_{result}", domain=domain))
        tensors = [numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in constants.items()]
        tensors += [
            numpy_helper.from_array(np.float32(0.1), "scale"),
            numpy_helper.from_array(np.int8(0), "zero"),
        ]
        last = self.nodes[-1].output[0]
        graph = helper.make_graph(
            self.nodes,
            "graph",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
            [helper.make_tensor_value_info(last, TensorProto.FLOAT, None)],
            tensors,
        )
        imports = [helper.make_opsetid("", 20), helper.make_opsetid("svexport", 1)]
        self.model = helper.make_model(graph, opset_imports=imports, ir_version=9)

    def _pair(self, name: str, result: str) -> None:
        inputs = ["scale", "zero"]
        self.nodes.append(helper.make_node("QuantizeLinear", [name, *inputs], [f"{result}_q"], f"q_{result}"))
        self.nodes.append(helper.make_node("DequantizeLinear", [f"{result}_q", *inputs], [result], f"dq_{result}"))


CONV = ["a = quantized(x)", "v = quantized(w)", "b = Conv(a, v)"]
PRODUCT = ["a = quantized(x)", "v = quantized(w)", "b = MatMul(a, v)"]
W_CONV = {"w": (4, 4, 1, 1)}
ONE_D = {"bn": (4,), "bias": (4,)}

CASES: dict[str, list[tuple[list[str], list[str]]]] = {
    "convolution": [
        ([*CONV, "c = quantized(b)", "y = Relu(c)"], [*CONV, "c = Relu(b)", "y = quantized(c)"]),
        (
            [*CONV, "c = quantized(b)", "y = BatchNormalization(c, bn, bn, bn, bn)"],
            [*CONV, "c = BatchNormalization(b, bn, bn, bn, bn)", "y = quantized(c)"],
        ),
        (
            [*CONV, "c = quantized(b)", "d = Add(c, a)", "y = Relu(d)"],
            [*CONV, "d = Add(b, a)", "e = Relu(d)", "y = quantized(e)"],
        ),
        (
            [*CONV, "d = Add(b, a)", "c = quantized(d)", "y = Relu(c)"],
            [*CONV, "d = Add(b, a)", "c = Relu(d)", "y = quantized(c)"],
        ),
    ],
    "product": [
        (
            [*PRODUCT, "c = quantized(b)", "d = Add(c, bias)", "y = Gelu(d)"],
            [*PRODUCT, "d = Add(b, bias)", "e = Gelu(d)", "y = quantized(e)"],
        ),
        (
            [*PRODUCT, "c = Add(b, bias)", "d = quantized(c)", "y = Gelu(d)"],
            [*PRODUCT, "c = Add(b, bias)", "d = Relu(c)", "y = quantized(d)"],
        ),
    ],
    "logits": [
        (
            ["q = quantized(x)", "k = quantized(x)", "b = MatMul(q, k)", "c = quantized(b)", "d = Mul(c, one)",
             "y = Softmax(d)"],
            ["q = quantized(x)", "k = quantized(x)", "b = MatMul(q, k)", "d = Mul(b, one)", "y = Softmax(d)"],
        ),
    ],
    "attention": [
        (
            ["q = quantized(x)", "k = quantized(x)", "b = MatMul(q, k)", "d = Softmax(b)", "y = MatMul(d, x)"],
            ["q = quantized(x)", "k = quantized(x)", "b = MatMul(q, k)", "d = Softmax(b)", "e = quantized(d)",
             "v = quantized(x)", "y = MatMul(e, v)"],
        ),
    ],
    "both": [
        (["v = quantized(w)", "y = Conv(x, v)"], [*CONV, "y = Identity(b)"]),
        (["v = quantized(x)", "y = MatMul(v, x)"], ["v = quantized(x)", "y = MatMul(v, v)"]),
        (
            ["v = quantized(x)", "t = Transpose(x)", "y = MatMul(v, t)"],
            ["v = quantized(x)", "t = Transpose(v)", "y = MatMul(v, t)"],
        ),
    ],
    "residual": [
        (
            [*CONV, "d = Add(b, x)", "e = Relu(d)", "y = quantized(e)"],
            [*CONV, "d = Add(b, a)", "e = Relu(d)", "y = quantized(e)"],
        ),
    ],
    "dangling": [
        (
            ["q = QuantizeLinear(x, scale, zero)", "y = Identity(x)"],
            ["a = quantized(x)", "y = Identity(a)"],
        ),
        (
            ["q = QuantizeLinear(x, scale, zero)", "r = MatMulInteger(q, q)", "y = Cast(x)"],
            ["q = QuantizeLinear(x, scale, zero)", "r = Reshape(q, s)", "y = DequantizeLinear(r, scale, zero)"],
        ),
    ],
    "plugin": [
        (
            ["q = QuantizeLinear(x, scale, zero)", "r = Transpose(q)", "y = svexport::SvCameraSample(r)"],
            ["r = Transpose(x)", "q = QuantizeLinear(r, scale, zero)", "y = svexport::SvCameraSample(q)"],
        ),
        (
            ["q = QuantizeLinear(x, scale, zero)", "r = Reshape(q, w)", "y = svexport::SvMsDeformAttn(r, x)"],
            ["r = Reshape(x, w)", "q = QuantizeLinear(r, scale, zero)", "y = svexport::SvMsDeformAttn(q, x)"],
        ),
        (
            ["q = QuantizeLinear(x, scale, zero)", "r = Slice(q, w)", "y = svexport::SvGridSample(r, x)"],
            ["r = Slice(x, w)", "q = QuantizeLinear(r, scale, zero)", "y = svexport::SvGridSample(q, x)"],
        ),
    ],
}  # fmt: skip


def rules(model: onnx.ModelProto | Path) -> set[str]:
    found = svexport.check(model, "10.12").findings
    return {one.rule.removeprefix("quantizers_") for one in found if one.rule.startswith("quantizers_")}


def test_each_rule_has_a_case() -> None:
    assert set(CASES) == {rule.name for rule in PLACEMENTS}


@pytest.mark.parametrize(("name", "number"), [(name, i) for name, cases in CASES.items() for i in range(len(cases))])
def test_rule(name: str, number: int) -> None:
    broken, kept = CASES[name][number]
    constants = {**W_CONV, **ONE_D, "one": ()} if "MatMul(a" not in " ".join(broken) else {"w": (4, 4), **ONE_D}
    shape = (1, 4, 4, 4)
    assert name in rules(Graph(broken, constants, shape).model)
    assert rules(Graph(kept, constants, shape).model) == set()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(3))
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 8)
        self.out, self.rows = nn.Linear(8, 4), nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x)).relu()
        x = x + self.rows(x).mean(-1, keepdim=True)  # a product with a transposed weight
        y = self.c(self.b(x).relu())
        return self.out(nn.functional.gelu(self.head(y.mean((-2, -1)))))


@pytest.mark.parametrize("opset", [13, 17, 20])
def test_what_quantize_makes_breaks_none(opset: int, tmp_path: Path) -> None:
    x = torch.randn(2, 8, 6, 5)
    svexport.export(svexport.quantize(Block(), [x]), x, tmp_path / "m.onnx", opset=opset)
    assert rules(tmp_path / "m.onnx") == set()
    assert svexport.check(tmp_path / "m.onnx", "10.12").ok


def test_moved_quantizers_are_found_in_a_real_file(tmp_path: Path) -> None:
    """The file of a model with a quantizer before the activation runs, and is told of."""

    class Before(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.fake_quantize_per_tensor_affine(self.norm(self.a(x)), 0.05, 0, -128, 127)
            return y.relu()

    x = torch.randn(2, 8, 6, 5)
    svexport.export(svexport.quantize(Before(), [x]), x, tmp_path / "m.onnx", opset=17)
    assert rules(tmp_path / "m.onnx") == {"convolution"}
    assert onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, {"x": x.numpy()})[0].shape == (2, 8, 6, 5)
