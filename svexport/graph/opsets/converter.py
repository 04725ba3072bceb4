"""The conversion loop: applies each op's rules to every node, one version at a time, down to the target opset."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import onnx

from svexport.graph.opsets.dtypes import fit
from svexport.graph.opsets.known import Known
from svexport.graph.opsets.rules import BROKEN, REFUSED, RULES, Node, Refusal, schema_of
from svexport.graph.scope import used_names
from svexport.graph.substitute import give_outputs
from svexport.graph.walk import STANDARD, graphs, graphs_of, refill
from svexport.symbolic._builder import Builder, Value

__all__ = ["Converter", "Refused", "names_in"]


@dataclass(frozen=True)
class Refused:
    """A node without an exact form.

    Attributes:
        name: name of the node.
        op_type: op type of the node in the model.
        opset: the lowest opset in which it can be written.
        reason: why it cannot be written below that.
    """

    name: str
    op_type: str
    opset: int
    reason: str

    def __str__(self) -> str:
        return f"node {self.name!r} ({self.op_type}) cannot be written below opset {self.opset}: {self.reason}"


class Converter:
    """Converts a graph and those nested in it, in place.

    Args:
        taken: names of values and nodes that are in use.
        opset: the target opset.

    Attributes:
        refused: nodes without an exact form, which are not changed.
    """

    def __init__(self, taken: Iterable[str], opset: int) -> None:
        self.opset = opset
        self.refused: list[Refused] = []
        self._folders = {name[: i + 1] for name in taken for i, letter in enumerate(name) if letter == "/"}
        self._constants: dict[tuple[Any, ...], str] = {}
        self._made: list[onnx.TensorProto] = []

    def graph(self, graph: onnx.GraphProto, opset: int, known: Known) -> None:
        """Converts a model's graph; new constants become its initializers."""
        self._graph(graph, opset, self.opset, known)
        used = used_names(graph)
        graph.initializer.extend(tensor for tensor in self._made if tensor.name in used)
        self._made.clear()

    def _graph(self, graph: onnx.GraphProto, opset: int, to: int, known: Known) -> None:
        overridable = {value.name for value in graph.input}
        known.add_tensors(tensor for tensor in graph.initializer if tensor.name not in overridable)
        nodes = self._nodes(graph.node, opset, to, known)
        refill(graph.node, nodes)

    def _nodes(self, nodes: Iterable[onnx.NodeProto], opset: int, to: int, known: Known) -> list[onnx.NodeProto]:
        result: list[onnx.NodeProto] = []
        for node in nodes:
            label = node.name or next(iter(node.output), ""), node.op_type
            pending = [(node, opset)]
            while pending:
                each, at = pending.pop()
                known.add_node(each, at)
                version = _version(each, at)
                if version > to:
                    for graph in graphs_of(each):
                        self._graph(graph, at, version - 1, known)
                    made = self._down(each, version, known, label)
                    if made is not None:
                        pending.extend((one, version - 1) for one in reversed(made))
                        continue
                else:
                    for graph in graphs_of(each):
                        self._graph(graph, at, to, known)
                known.add_node(each, to)
                result.append(each)
        return result

    def _down(
        self, proto: onnx.NodeProto, version: int, known: Known, label: tuple[str, str]
    ) -> list[onnx.NodeProto] | None:
        """Rewrites a node in ops of the opset below its version; None if there is no rule."""
        rule = RULES.get((proto.op_type, version))
        builder = Builder(version - 1, self._prefix(proto))
        node = Node(proto, version, known)
        try:
            if rule is None:
                node.refuse(REFUSED.get((proto.op_type, version), "svexport has no rule for it"))
            outputs = rule(builder, node)
            if outputs is None:
                made = [*builder.nodes, proto]
            else:
                values = [outputs] if isinstance(outputs, Value) else list(outputs)
                give_outputs(builder, [value or Value("") for value in values], proto)
                made = builder.nodes
            self._keep_constants(builder, made, known)
            made = self._fitted(made, version - 1, known, builder.prefix)
            if len(made) > 1 or builder.constants:
                self._folders.add(builder.prefix)
            for one in made:
                if one is not proto:
                    one.doc_string = proto.doc_string
                    one.metadata_props.extend(proto.metadata_props)
            return made
        except Refusal as refusal:
            reason = str(refusal)
        except BROKEN as error:
            reason = f"it is not as ONNX defines it, or too little is known: {error}"
        inner = "" if proto.op_type == label[1] else f"it is written with {proto.op_type}: "
        self.refused.append(Refused(*label, version, inner + reason))
        return None

    def _prefix(self, node: onnx.NodeProto) -> str:
        """The prefix of the names of new values, which nothing else in the model has."""
        prefix = f"{node.name or next(iter(node.output), node.op_type)}/"
        while prefix in self._folders:
            prefix = f"{prefix[:-1]}_/"
        return prefix

    def _keep_constants(self, builder: Builder, nodes: list[onnx.NodeProto], known: Known) -> None:
        """Takes over the constants of a builder; equal ones become one."""
        names: dict[str, str] = {}
        for name, tensor in builder.constants.items():
            key = tensor.data_type, tuple(tensor.dims), tensor.raw_data
            if key in self._constants:
                names[name] = self._constants[key]
            else:
                self._constants[key] = name
                self._made.append(tensor)
                known.add_tensors([tensor])
        if names:
            for node in nodes:
                node.input[:] = [names.get(name, name) for name in node.input]
                for graph in (inner for outer in graphs_of(node) for inner in graphs(outer)):
                    for one in graph.node:
                        one.input[:] = [names.get(name, name) for name in one.input]

    def _fitted(self, nodes: list[onnx.NodeProto], opset: int, known: Known, prefix: str) -> list[onnx.NodeProto]:
        """The nodes with data types that their ops take at an opset."""
        result: list[onnx.NodeProto] = []
        for index, node in enumerate(nodes):
            if node.domain in STANDARD:
                known.add_node(node, opset)
                fitted = fit(node, opset, known, f"{prefix}{index}/")
                for one in fitted or ():  # the node makes other values now
                    known.add_node(one, opset)
                result += fitted or [node]
            else:
                result.append(node)
        return result


def _version(node: onnx.NodeProto, opset: int) -> int:
    """The version (``since_version``) of the op that a node of this opset uses; 0 for a non-standard op."""
    if node.domain not in STANDARD:
        return 0
    schema = schema_of(node.op_type, opset)
    return 0 if schema is None else schema.since_version


def names_in(graph: onnx.GraphProto) -> set[str]:
    """Names of values and nodes, including nested graphs."""
    names = {name for each in graphs(graph) for node in each.node for name in (*node.output, node.name)}
    return names.union(value.name for g in graphs(graph) for value in (*g.input, *g.initializer, *g.value_info))
