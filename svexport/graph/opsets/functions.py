"""Model-local functions: each is converted with the types that all its calls share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import onnx
import onnx.inliner
from onnx import helper

from svexport.graph.nodes import separate_names
from svexport.graph.opsets.converter import Converter, names_in
from svexport.graph.opsets.known import Known, known_of
from svexport.graph.scope import drop_unused, used_names
from svexport.graph.walk import STANDARD, graphs, refill
from svexport.symbolic._builder import Value

__all__ = ["convert_functions", "inlined"]

Key = tuple[str, str, str]
Calls = dict[Key, list[list[Value | None]]]


def convert_functions(model: onnx.ModelProto, opset: int, known: Known) -> list[Converter]:
    """Converts the functions of a model whose graph has been converted, in place.

    Args:
        model: a model whose functions are not recursive.
        opset: the target opset.
        known: known facts about the tensors of the graph.

    Returns:
        The converter of each function, with the nodes that it refused.
    """
    functions = {_key(function): function for function in model.functions}
    calls: Calls = {key: [] for key in functions}
    _note(model.graph, known, calls)
    done = []
    for function in _callers_first(functions):
        entry = next((entry for entry in function.opset_import if entry.domain in STANDARD), None)
        given = [_together(values) for values in zip(*calls[_key(function)], strict=False)]
        graph = onnx.GraphProto(name=function.name, node=function.node)
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in function.output)
        for name, value in zip(function.input, given or [None] * len(function.input), strict=False):
            if value is None or value.dtype is None:
                graph.input.append(onnx.ValueInfoProto(name=name))
            else:
                graph.input.append(helper.make_tensor_value_info(name, value.dtype, value.shape))
        wrapper = onnx.ModelProto(ir_version=model.ir_version, graph=graph, opset_import=function.opset_import)
        wrapper.functions.extend(model.functions)
        separate_names(wrapper)
        graph = wrapper.graph
        inner = known_of(wrapper)
        converter = Converter(names_in(graph), opset)
        done.append(converter)
        if entry is not None and entry.version > opset:
            used = used_names(graph)
            converter.graph(graph, entry.version, inner)
            drop_unused(graph, used)
            entry.version = opset
        _note(graph, inner, calls)
        constants = [helper.make_node("Constant", [], [t.name], t.name, value=t) for t in graph.initializer]
        refill(function.node, [*constants, *graph.node])
    return done


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the nodes of its functions in place of their calls."""
    functions = {_key(function): function for function in model.functions}
    for holder in (model.graph, *(onnx.GraphProto(node=f.node) for f in model.functions)):
        for graph in graphs(holder):
            for node in graph.node:
                function = functions.get((node.domain, node.op_type, node.overload))
                given = {attribute.name for attribute in node.attribute}
                for attribute in function.attribute_proto if function is not None else ():
                    if attribute.name not in given:  # the library leaves out what is left to its default
                        node.attribute.append(attribute)
    return onnx.inliner.inline_local_functions(model)


def _key(function: onnx.FunctionProto) -> Key:
    return function.domain, function.name, function.overload


def _note(graph: onnx.GraphProto, known: Known, calls: Calls) -> None:
    """Adds the inputs of the calls in a graph."""
    for each in graphs(graph):
        for node in each.node:
            key = (node.domain, node.op_type, node.overload)
            if key in calls:
                calls[key].append([known.value(name) if name else None for name in node.input])


def _together(values: Iterable[Value | None]) -> Value | None:
    """The common part of the types of several values."""
    first, *rest = values
    for other in rest:
        if first is None or other is None or first.dtype != other.dtype:
            return None
        if first.shape is None or other.shape is None or len(first.shape) != len(other.shape):
            first = replace(first, shape=None)
        else:
            same = tuple(a if a == b else None for a, b in zip(first.shape, other.shape, strict=True))
            first = replace(first, shape=same)
    return first


def _callers_first(functions: Mapping[Key, onnx.FunctionProto]) -> Iterator[onnx.FunctionProto]:
    """The functions, each before those that it calls."""
    order: list[Key] = []
    met: set[Key] = set()

    def visit(key: Key) -> None:
        met.add(key)
        for graph in graphs(onnx.GraphProto(node=functions[key].node)):
            for node in graph.node:
                inner = (node.domain, node.op_type, node.overload)
                if inner in functions and inner not in met:
                    visit(inner)
        order.append(key)

    for key in functions:
        if key not in met:
            visit(key)
    return (functions[key] for key in reversed(order))
