"""Checks the placement of QuantizeLinear and DequantizeLinear: whether TensorRT's fusions and int8 products survive it.

Source: NVIDIA TensorRT developer guide, "Working with Quantized Types", Q/DQ layer-placement recommendations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import onnx

from svexport.graph.scope import constant_value, is_standard
from svexport.graph.walk import STANDARD, graphs
from svexport.tensorrt.check.report import Finding

__all__ = ["PLACEMENTS", "Placement", "placement_findings"]

DOMAIN = "svexport"
"""The domain of ``svexport.ops``, repeated here because importing that needs torch."""

_CONVOLUTIONS = {"Conv", "ConvTranspose"}
_MATRICES = {"MatMul", "Gemm"}
_ACTIVATIONS = {"Relu", "LeakyRelu", "Clip", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Elu", "Selu", "Softplus"}
_MOVES = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten")
_OF_GELU = {"Gelu", "Erf", "Div", "Mul", "Pow"}
"""Gelu, and the ops that a decomposed Gelu begins with."""


class _Graph:
    """The producer and the consumers of each tensor of a graph."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.nodes = graph.node
        self.outputs = {value.name for value in graph.output}
        self._makers = {name: node for node in graph.node for name in node.output if name}
        self._takers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self._takers.setdefault(name, []).append(node)
        self._constants = {tensor.name for tensor in graph.initializer}
        self._constants |= {n.output[0] for n in graph.node if is_standard(n, "Constant") and constant_value(n)}

    def maker(self, name: str, *types: str) -> onnx.NodeProto | None:
        """The node that outputs a tensor, if it is of one of these types."""
        node = self._makers.get(name)
        return node if node is not None and node.domain in STANDARD and (not types or node.op_type in types) else None

    def takers(self, name: str) -> list[onnx.NodeProto]:
        return self._takers.get(name, [])

    def is_constant(self, name: str) -> bool:
        """Whether a tensor is a constant, quantized or not."""
        for _ in range(3):
            node = self.maker(name, "QuantizeLinear", "DequantizeLinear")
            if name in self._constants or node is None:
                break
            name = node.input[0]
        return name in self._constants

    def quantized(self, name: str) -> bool:
        """Whether a tensor comes from a quantizer, possibly through nodes that only move data."""
        for _ in range(8):
            node = self.maker(name, "DequantizeLinear", *_MOVES)
            if node is None or node.op_type == "DequantizeLinear":
                return node is not None
            name = node.input[0]
        return False

    def pairs(self) -> Iterator[tuple[onnx.NodeProto, onnx.NodeProto]]:
        """Each QuantizeLinear of a computed tensor, with the DequantizeLinear nodes that follow it."""
        for node in self.nodes:
            if is_standard(node, "QuantizeLinear") and not self.is_constant(node.input[0]):
                for taker in self.takers(node.output[0]):
                    if is_standard(taker, "DequantizeLinear"):
                        yield node, taker

    def between(self) -> Iterator[tuple[onnx.NodeProto, onnx.NodeProto, onnx.NodeProto]]:
        """The node before each pair, the pair's QuantizeLinear, and a node after the pair."""
        for quantize, dequantize in self.pairs():
            before = self.maker(quantize.input[0])
            if before is not None:
                for after in self.takers(dequantize.output[0]):
                    yield before, quantize, after

    def chain(self, node: onnx.NodeProto | None, *types: str, through: set[str]) -> onnx.NodeProto | None:
        """The node itself if it is of these types, or the first such node reached through ``through`` nodes."""
        for _ in range(4):
            if node is None or node.op_type in types:
                return node
            if node.op_type not in through:
                return None
            node = next((m for name in node.input if not self.is_constant(name) and (m := self.maker(name))), None)
        return None


@dataclass(frozen=True)
class Placement:
    """A rule of placement.

    Attributes:
        name: one word.
        severity: severity of its findings.
        expected: what TensorRT expects.
        found: given a graph, yields the nodes that break the rule, and what was found instead.
        todo: what to do.
    """

    name: str
    severity: str
    expected: str
    found: Callable[[_Graph], Iterator[tuple[onnx.NodeProto, str]]]
    todo: str


def placement_findings(model: onnx.ModelProto) -> Iterator[Finding]:
    """Where QuantizeLinear and DequantizeLinear prevent a fusion, by :data:`PLACEMENTS`."""
    for graph in graphs(model.graph):
        if not any(node.op_type in ("QuantizeLinear", "DequantizeLinear") for node in graph.node):
            continue
        look = _Graph(graph)
        for rule in PLACEMENTS:
            for node, came in rule.found(look):
                where, name = "" if graph is model.graph else graph.name, node.name or node.output[0]
                yield Finding(
                    rule.severity, f"quantizers_{rule.name}", node.op_type, name, where, rule.expected, came, rule.todo
                )


def _after_convolutions(graph: _Graph) -> Iterator[tuple[onnx.NodeProto, str]]:
    through = {"BatchNormalization", "Add"}
    behind = {"BatchNormalization", "Add", *_ACTIVATIONS}
    for before, quantize, after in graph.between():
        root = graph.chain(before, *_CONVOLUTIONS, through=through)
        if root is not None and after.op_type in behind and after.domain in STANDARD:
            yield quantize, f"a pair between {before.op_type} and {after.op_type} behind {root.op_type}"


def _after_matrices(graph: _Graph) -> Iterator[tuple[onnx.NodeProto, str]]:
    for before, quantize, after in graph.between():
        if after.domain not in STANDARD or graph.chain(before, *_MATRICES, through={"Add"}) is None:
            continue
        bias = after.op_type == "Add" and before.op_type == "MatMul" and any(map(graph.is_constant, after.input))
        if bias or (after.op_type in _ACTIVATIONS | _OF_GELU and not _to_softmax(graph, after)):
            yield quantize, f"a pair between {before.op_type} and {after.op_type}"


def _to_softmax(graph: _Graph, node: onnx.NodeProto) -> bool:
    """Whether a node leads to a softmax through scaling and masking."""
    for _ in range(4):
        if node.op_type == "Softmax":
            return True
        takers = [taker for name in node.output for taker in graph.takers(name)]
        if node.op_type not in ("Mul", "Div", "Add", "Where", "Reshape", "Cast") or len(takers) != 1:
            return False
        node = takers[0]
    return False


def _logits(graph: _Graph) -> Iterator[tuple[onnx.NodeProto, str]]:
    for before, quantize, after in graph.between():
        root = graph.chain(before, "MatMul", through={"Mul", "Div", "Add", "Where"})
        if root is not None and not any(map(graph.is_constant, root.input)) and _to_softmax(graph, after):
            yield quantize, f"a pair between {before.op_type} and {after.op_type} before Softmax"


def _halves_of_attention(graph: _Graph) -> Iterator[tuple[onnx.NodeProto, str]]:
    """Attentions with only one of the two products in int8."""
    for node in graph.nodes:
        if not is_standard(node, "Softmax"):
            continue
        first = graph.chain(graph.maker(node.input[0]), "MatMul", through={"Mul", "Div", "Add", "Where"})
        behind = node.output[0]
        for taker in graph.takers(behind):
            if is_standard(taker, "QuantizeLinear"):
                behind = next((t.output[0] for t in graph.takers(taker.output[0])), behind)
        second = next((t for t in graph.takers(behind) if is_standard(t, "MatMul")), None)
        if first is None or second is None:
            continue
        ways = [all(map(graph.quantized, product.input)) for product in (first, second)]
        if ways[0] != ways[1]:
            yield node, f"{'queries by keys' if ways[0] else 'weights by values'} in int8 alone"


def _half_quantized(graph: _Graph) -> Iterator[tuple[onnx.NodeProto, str]]:
    for node in graph.nodes:
        if node.domain in STANDARD and node.op_type in _CONVOLUTIONS | _MATRICES and len(node.input) > 1:
            first, second = map(graph.quantized, node.input[:2])
            if first != second:
                yield node, f"its {'second' if first else 'first'} input in floating point"


def _residuals(graph: _Graph) -> Iterator[tuple[onnx.NodeProto, str]]:
    for node in graph.nodes:
        if not is_standard(node, "Add") or any(map(graph.is_constant, node.input)):
            continue
        roots = [graph.chain(graph.maker(n), *_CONVOLUTIONS, through={"BatchNormalization"}) for n in node.input]
        int8 = [root is not None and graph.quantized(root.input[0]) for root in roots]
        requantized = any(
            is_standard(taker, "QuantizeLinear")
            for last in (node.output[0], *(t.output[0] for t in graph.takers(node.output[0]) if t.op_type == "Relu"))
            for taker in graph.takers(last)
        )
        others = [name for name, one in zip(node.input, int8, strict=True) if not one]
        if any(int8) and requantized and others and not any(map(graph.quantized, others)):
            yield node, "the other summand in floating point"


def _dangling(graph: _Graph) -> Iterator[tuple[onnx.NodeProto, str]]:
    moves = {*_MOVES, "Slice", "Concat", "Gather", "Identity"}
    for node in graph.nodes:
        if not is_standard(node, "QuantizeLinear"):
            continue
        takers = graph.takers(node.output[0])
        wrong = [t.op_type for t in takers if not (t.domain == DOMAIN or t.op_type in {"DequantizeLinear", *moves})]
        if wrong or (not takers and node.output[0] not in graph.outputs):
            yield node, f"its result goes to {wrong[0]}" if wrong else "nothing takes its result"


def _to_plugins(graph: _Graph) -> Iterator[tuple[onnx.NodeProto, str]]:
    """Int8 maps that are not quantized directly before the plugin that reads them."""
    for node in graph.nodes:
        if node.domain != DOMAIN:
            continue
        for name in node.input:
            moved = graph.maker(name, *_MOVES, "Concat", "Slice")
            sources = [] if moved is None else [m for i in moved.input if (m := graph.maker(i, "QuantizeLinear"))]
            if moved is not None and sources:
                yield node, f"{moved.op_type} between QuantizeLinear and the int8 input {name!r}"


PLACEMENTS: tuple[Placement, ...] = (
    Placement(
        "convolution",
        "note",
        "nothing between a convolution and the norm, sum and activation fused into it",
        _after_convolutions,
        "quantize behind the activation, before the next convolution",
    ),
    Placement(
        "product",
        "note",
        "nothing between a matrix product and the bias and activation fused into it",
        _after_matrices,
        "quantize behind the activation, before the next product",
    ),
    Placement(
        "logits",
        "note",
        "nothing between the logits of attention and their Softmax",
        _logits,
        "quantize queries, keys, values and the result of Softmax instead",
    ),
    Placement(
        "attention",
        "note",
        "both products of attention in int8, or none",
        _halves_of_attention,
        "quantize both inputs of the other product, or of none",
    ),
    Placement(
        "both",
        "note",
        "both inputs of a product quantized: it runs in int8 then, else in floating point",
        _half_quantized,
        "quantize the other input, too",
    ),
    Placement(
        "residual",
        "note",
        "both summands of a sum quantized that is quantized itself: the convolution writes int8 then",
        _residuals,
        "quantize the other summand, by the scale with which it goes into its convolution",
    ),
    Placement(
        "dangling",
        "warning",
        "a DequantizeLinear, or a plugin, behind each QuantizeLinear",
        _dangling,
        "put DequantizeLinear behind it, with the same scale",
    ),
    Placement(
        "plugin",
        "note",
        "QuantizeLinear right before the plugin that reads int8 maps: TensorRT writes them in its layout then",
        _to_plugins,
        "move the node before QuantizeLinear",
    ),
)
"""The rules, in the order of findings."""
