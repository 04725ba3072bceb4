"""Determines what TensorRT does with every node of a file."""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

import onnx
from onnx import TensorProto

from svexport.graph.guard import is_guarded
from svexport.graph.scope import constant_value, is_standard
from svexport.graph.walk import STANDARD, attributes_of, graphs, graphs_of, opset_of
from svexport.logging import logger
from svexport.tensorrt.check.report import Finding, listed
from svexport.tensorrt.check.types import OURS, our_ops
from svexport.tensorrt.support.documented import allowed_types
from svexport.tensorrt.support.node import Node, Undecided, UnknownTensor
from svexport.tensorrt.support.operators import INSTEAD, OPERATORS, Operator, is_parsed
from svexport.tensorrt.support.rule import Rule
from svexport.tensorrt.support.target import (
    DOMAIN_AS_NAMESPACE,
    LOCAL_FUNCTIONS,
    PLUGINS_BEFORE_FUNCTIONS,
    PLUGINS_FIRST,
    Target,
    dotted,
)

if TYPE_CHECKING:
    from svexport.ops._op import Op

__all__ = ["VERDICTS", "Nodes"]

VERDICTS = ("native", "plugin", "body", "unknown plugin", "undecided", "restricted", "unsupported")
"""Verdicts on nodes, from best to worst."""

_CONSEQUENCES = {
    "silent": "; the parser accepts it, but computes something else",
    "builder": "; it is parsed, but no engine can be built from it",
}
"""Of restrictions that the parser does not enforce, by their kind."""

INLINE = "inline them: onnx.inliner.inline_local_functions"
OTHERWISE = "write it with other ops, at another opset, or as a plugin"


class Nodes:
    """All nodes of a model, including those of nested graphs and of called local functions.

    Attributes:
        counts: number of nodes by type.
        verdicts: number of nodes by verdict.
    """

    def __init__(self, model: onnx.ModelProto, target: Target, types: Mapping[str, onnx.TypeProto.Tensor]) -> None:
        self.counts: Counter[str] = Counter()
        self.verdicts: Counter[str] = Counter()
        self._findings: list[Finding] = []
        self._model = model
        self._target = target
        self._types = types
        self._ops = our_ops(model)
        self._local = {function.name: function for function in model.functions}  # by name only, as in the parser
        self._called: set[str] = set()  # names of functions that nodes call
        self._tensors = {name for graph in graphs(model.graph) for name in _names(graph)}
        self._unknown: dict[str, list[str]] = {}  # tensors, and the nodes whose restrictions depend on them
        self._rules: dict[str, tuple[list[Rule], list[str]]] = {}  # by op, for this version

    def findings(self) -> list[Finding]:
        """Checks all nodes and returns the findings."""
        self._graph(self._model.graph, opset_of(self._model), "")
        self._functions()
        self._unknown_tensors()
        return self._findings

    def _add(
        self,
        severity: str,
        rule: str,
        expected: str,
        came: str,
        todo: str,
        node: onnx.NodeProto | None,
        where: str = "",
    ) -> None:
        op, name = ("", "") if node is None else (node.op_type, _label(node))
        self._findings.append(Finding(severity, rule, op, name, where, expected, came, todo))

    # Where nodes are --------------------------------------------------------------------------------------------------

    def _graph(
        self,
        graph: onnx.GraphProto | onnx.FunctionProto,
        opset: int,
        where: str,
        constants: MutableMapping[str, TensorProto] | None = None,
        makers: MutableMapping[str, onnx.NodeProto] | None = None,
        inputs: frozenset[str] = frozenset(),
        in_function: bool = False,
    ) -> None:
        """Checks every node of a graph and of its nested graphs, which see its constants, producers and inputs."""
        constants = ChainMap({}, constants or {})
        makers = ChainMap({}, makers or {})
        if isinstance(graph, onnx.GraphProto):
            constants.update((tensor.name, tensor) for tensor in graph.initializer)
            inputs |= {value.name for value in graph.input} | {t.values.name for t in graph.sparse_initializer}
        else:
            inputs = frozenset(graph.input)
        for node in graph.node:
            makers.update((name, node) for name in node.output if name)
            if is_standard(node, "Constant") and node.output and (tensor := constant_value(node)) is not None:
                constants[node.output[0]] = tensor
        types = {} if in_function else self._types
        for node in graph.node:
            self.counts[node.op_type] += 1
            if lost := [n for n in node.input if n and not (n in makers or n in constants or n in inputs)]:
                came = f"{listed(lost)}, which no node makes"
                self._add("error", "missing_input", "inputs that exist", came, "export it again", node, where)
            known = Node(node, opset, self._target.version, types, constants, makers, in_function)
            self.verdicts[self._verdict(known, where)] += 1
            for nested in graphs_of(node):
                inside = f"{where}/{_label(node)}" if where else _label(node)
                self._graph(nested, opset, inside, constants, makers, inputs, in_function)

    def _functions(self) -> None:
        """Checks the local functions that nodes call, each once."""
        done: set[str] = set()
        while names := self._called - done:
            name = min(names)
            done.add(name)
            function = self._local[name]
            opset = next((e.version for e in function.opset_import if e.domain in STANDARD), opset_of(self._model))
            where = f"function {function.domain}::{name}"
            self._graph(function, opset, where, in_function=True)
            if freed := [n.output[0] for n in function.node if is_standard(n, "Constant") and n.output]:
                expected = "functions without constants, which the parser reads after they are freed"
                self._add("error", "function_constants", expected, listed(freed), INLINE, None, where)

    def _call(self, node: onnx.NodeProto, where: str) -> str:
        """The verdict on a node that the parser treats as a function call, and checks of the function's names."""
        function = self._local[node.op_type]
        self._called.add(node.op_type)
        if sum(other.name == function.name for other in self._model.functions) > 1:
            came = f"several functions {node.op_type}, and the parser looks at names alone: the first is taken for all"
            self._add("error", "overloads", "one function of a name", came, INLINE, node, where)
            return "restricted"
        pairs = list(zip(function.input, node.input, strict=False))
        if captured := [formal for formal, given in pairs if formal != given and formal in self._tensors]:
            expected = "inputs of functions that are named like no tensor of the graph"
            came = f"{listed(captured)}, for which the parser takes that tensor"
            self._add("error", "captured_names", expected, came, INLINE, node, where)
            return "restricted"
        if len(node.input) != len(function.input) or not all(node.input):
            expected = f"all {len(function.input)} inputs of the function"
            came = f"{sum(map(bool, node.input))} of them"
            self._add("error", "function_inputs", expected, came, INLINE, node, where)
            return "restricted"
        return "body"

    # What becomes of them ---------------------------------------------------------------------------------------------

    def _verdict(self, node: Node, where: str) -> str:
        """The verdict on a node, in the parser's order: its own importers, by op_type; local functions; plugins."""
        proto, version = node.proto, self._target.version
        name, standard = proto.op_type, proto.domain in STANDARD
        meant = standard or not onnx.defs.has(name)  # some of the parser's own ops have another domain
        asked_first = version >= PLUGINS_FIRST and any(a.name == "plugin_namespace" for a in proto.attribute)
        if is_parsed(name, version) and (meant or not asked_first):
            if not meant:
                expected = f"an op_type of its own for what is not ONNX's {name}"
                came = f"{proto.domain}::{name}, taken for ONNX's: the parser looks at op_type alone"
                self._add("warning", "shadowing", expected, came, "rename it, unless that is meant", proto, where)
            return self._native(node, OPERATORS[name], where)
        if proto.domain == OURS:
            return self._ours(proto, where)
        if name in self._local and not standard:
            if version >= LOCAL_FUNCTIONS:
                return self._call(proto, where)
            expected = f"TensorRT {dotted(LOCAL_FUNCTIONS)} or later: the first that parses local functions"
            self._add("error", "local_function", expected, str(self._target), INLINE, proto, where)
            return "unsupported"
        if (meant and name in OPERATORS) or onnx.defs.has(name, "" if standard else proto.domain):
            first = OPERATORS[name].first if name in OPERATORS else None
            expected = f"TensorRT {dotted(first)} or later: the first that parses {name}" if first else ""
            expected = expected or f"ops that TensorRT parses: no version has {name}"
            todo = INSTEAD.get(name, OTHERWISE)
            self._add("error", "unsupported", expected, str(self._target), todo, proto, where)
            return "unsupported"
        return self._foreign(proto, where)

    def _foreign(self, node: onnx.NodeProto, where: str) -> str:
        """The verdict on an unknown op: a third-party plugin, or a mistake."""
        namespace = next((a.s.decode(errors="replace") for a in node.attribute if a.name == "plugin_namespace"), "")
        spaces = [namespace]
        if node.domain and self._target.version >= DOMAIN_AS_NAMESPACE:
            spaces.append(node.domain)
        expected = f"a plugin {node.op_type} registered in namespace {' or '.join(map(repr, dict.fromkeys(spaces)))}"
        came = f"{node.domain or 'ai.onnx'}::{node.op_type}, which neither ONNX nor svexport has"
        todo = "load the library that has it before parsing"
        if node.op_type.endswith("_TRT"):
            todo = "call initLibNvInferPlugins, as TensorRT's own plugins are named so; check that this version has it"
        self._add("warning", "unknown_plugin", expected, came, todo, node, where)
        return "unknown plugin"

    def _ours(self, node: onnx.NodeProto, where: str) -> str:
        op = self._ops.get(node.op_type)
        if op is None:
            came = f"svexport::{node.op_type}, which this svexport does not have"
            todo = "upgrade svexport: a newer one wrote the file"
            self._add("error", "svexport_node", "nodes of this svexport", came, todo, node, where)
            return "unsupported"
        version = self._target.version
        again = f"export with target={dotted(version)!r}"
        lowered = f"plugins=False, or svexport lower FILE -o OUT --ops {op.name}"
        if not _has_plugin(op, node):
            came = f"svexport::{node.op_type}, for which there is none"
            todo = f"{again}, with plugins=True or {lowered}"
            self._add("error", "svexport_node", "nodes that have a plugin", came, todo, node, where)
            return "unsupported"
        body = self._local.get(node.op_type)
        if body is not None and LOCAL_FUNCTIONS <= version < PLUGINS_BEFORE_FUNCTIONS:
            expected = f"no body before TensorRT {dotted(PLUGINS_BEFORE_FUNCTIONS)}, which looks for plugins first"
            came = "a body, which is refused" if is_guarded(body) else "a body, which is taken for the plugin"
            todo = f"{again}, which leaves bodies out, and load the plugins; or {lowered}"
            self._add("error", "body", expected, came, todo, node, where)
            return "unsupported"
        if body is not None and version >= LOCAL_FUNCTIONS and not is_guarded(body):
            came = "a body that is taken for it where the plugin is missing"
            self._add("warning", "body", "bodies that only ONNX Runtime takes", came, "export it again", node, where)
        came = f"svexport::{node.op_type}, refused without it"
        todo = "svexport plugins build, or svexport.tensorrt.register_plugins(); or plugins=False, which needs none"
        self._add("note", "plugin", "svexport's plugin library", came, todo, node, where)
        return "plugin" if self._plugin_attributes(op, node, where) else "restricted"

    def _plugin_attributes(self, op: Op, node: onnx.NodeProto, where: str) -> bool:
        """Whether TensorRT finds the plugin, and the plugin finds all its fields."""
        given = attributes_of(node)
        found, version = given.get("plugin_namespace"), given.get("plugin_version", b"1")
        todo = "export it again: svexport writes it on every node"
        wrong = []
        if found != OURS.encode():
            found_by_domain = found is None and self._target.version >= DOMAIN_AS_NAMESPACE
            wrong.append(("plugin_namespace", f"plugin_namespace={OURS!r}", found, found_by_domain))
        if version != b"1":
            wrong.append(("plugin_version", "plugin_version='1'", version, False))
        for argument in op.attributes:
            if argument.name not in given:
                wrong.append(("attributes", f"the attribute {argument.name}", None, False))
        for rule, expected, came, harmless in wrong:
            severity = "warning" if harmless else "error"
            self._add(severity, rule, expected, "none" if came is None else repr(came), todo, node, where)
        return all(harmless for *_, harmless in wrong)

    def _native(self, node: Node, entry: Operator, where: str) -> str:
        """The verdict on a node with an importer in the parser, by the importer's restrictions."""
        if node.proto.op_type not in self._rules:
            version = self._target.version
            rules = [rule for rule in entry.rules if rule.since <= version < rule.before]
            self._rules[node.proto.op_type] = rules, allowed_types(entry.types, version)
        rules, types = self._rules[node.proto.op_type]
        outcomes = [(rule.name, self._restriction(node, rule, where)) for rule in rules]
        if types and ("type", "restricted") not in outcomes:
            outcomes.append(("documented", self._documented_type(node, entry, types, where)))
        return max(("native", *(verdict for _, verdict in outcomes)), key=VERDICTS.index)

    def _restriction(self, node: Node, rule: Rule, where: str) -> str:
        proto, todo = node.proto, rule.todo or OTHERWISE
        try:
            came = rule.came(node)
        except UnknownTensor as unknown:
            if not node.in_function:
                self._unknown.setdefault(unknown.name, []).append(_label(proto))
            return "native" if node.in_function else "undecided"
        except Undecided as undecided:
            if node.in_function:  # its inputs are known only where it is called
                return "native"
            self._add("warning", rule.name, rule.expected, f"not decided: {undecided}", todo, proto, where)
            return "undecided"
        except Exception as error:  # noqa: BLE001 - attributes or constants of a malformed node
            logger.debug("{} of {} is not decided: {}", rule.name, _label(proto), error)
            came = f"not decided: {type(error).__name__} in reading the node"
            self._add("warning", rule.name, rule.expected, came, "see whether the node is valid ONNX", proto, where)
            return "undecided"
        if came is None:
            return "native"
        if rule.kind == "documented":
            self._add("warning", rule.name, f"{rule.expected}, as documented", came, todo, proto, where)
            return "undecided"
        self._add("error", rule.name, rule.expected, came + _CONSEQUENCES.get(rule.kind, ""), todo, proto, where)
        return "restricted"

    def _documented_type(self, node: Node, entry: Operator, types: list[str], where: str) -> str:
        """Checks a node's type against the documented ones; the parser takes more, so this is no error."""
        try:
            kind = node.dtype(entry.data) if node.has_input(entry.data) else types[0]
        except Undecided:
            return "native"  # restrictions that depend on it say so
        if kind in types:
            return "native"
        expected, came = f"{' or '.join(types)}, as documented", f"{kind} ({node.proto.input[entry.data]!r})"
        self._add("warning", "type", expected, came, "cast before it, if the parser refuses it", node.proto, where)
        return "undecided"

    def _unknown_tensors(self) -> None:
        """One finding for each unknown tensor, at the node that outputs it."""
        makers = {name: node for graph in graphs(self._model.graph) for node in graph.node for name in node.output}
        for name, users in self._unknown.items():
            came = f"{name!r} has none; {listed(list(dict.fromkeys(users)))} depend on it"
            todo = "add value_info to the file, or see what its maker returns"
            self._add("warning", "unknown_type", "types and ranks that can be inferred", came, todo, makers.get(name))


def _label(node: onnx.NodeProto) -> str:
    return node.name or next((name for name in node.output if name), "")


def _has_plugin(op: Op, node: onnx.NodeProto) -> bool:
    try:
        beyond = op.beyond_plugin(attributes_of(node))
    except Exception:  # noqa: BLE001 - of attributes that are missing, which is told where the plugin would need them
        beyond = False
    return op.has_plugin and not beyond


def _names(graph: onnx.GraphProto) -> set[str]:
    """The names of all tensors of a graph."""
    made = {name for node in graph.node for name in node.output}
    return made.union(value.name for value in (*graph.input, *graph.initializer))
