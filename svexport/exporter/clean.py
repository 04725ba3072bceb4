"""Cleans an exporter's file: restores the user's names, adds svexport nodes' source lines, removes leftovers."""

from __future__ import annotations

import math
import re
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor

from svexport.exporter.torchscript import SOURCE_ATTRIBUTE
from svexport.graph.nodes import rename, set_attributes, symbolic_of
from svexport.graph.scope import constants_in, light_copy
from svexport.graph.types import infer_types, types_of
from svexport.graph.walk import attributes_of, graphs, refill, remove_attribute
from svexport.ops._op import DOMAIN
from svexport.symbolic._builder import Value
from svexport.tracing.arguments import MODEL_ATTRIBUTE
from svexport.tracing.sizes import Size
from svexport.tracing.source import user_frame

__all__ = ["clean", "keep_inputs", "keep_zero_padding", "name_sizes"]

_STACK_TRACE, _NAMESPACE = "pkg.torch.onnx.stack_trace", "namespace"

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Address in the name of a function without a module, such as ``torch.sym_max``; it differs in every process."""


def clean(model: onnx.ModelProto, input_names: Sequence[str], output_names: Sequence[str]) -> dict[str, str]:
    """Removes the wrapper module from every name, and names inputs and outputs, in place. Of the exporters' metadata it
    keeps only each svexport node's source line (``doc_string``) and each node's module (``namespace``).

    Returns the source lines of nodes by name, as far as the exporter records them.
    """
    lines: dict[str, str] = {}
    nodes = [node for graph in graphs(model.graph) for node in graph.node]
    taken = {name for node in nodes for name in (node.name, *node.output)}
    taken |= {value.name for value in model.graph.input}  # forward(self, w) in a model with self.w

    @cache
    def unwrapped(name: str) -> str:
        new = _without_wrapper(name)
        if new == name:
            return name
        while new in taken:  # the wrapper's own casts may have the name
            new += "_inner"
        taken.add(new)
        return new

    line_of = cache(user_frame)  # nodes of one line have one trace
    for graph in graphs(model.graph):
        for node in graph.node:
            node.name = unwrapped(node.name)
            node.input[:] = map(unwrapped, node.input)
            node.output[:] = map(unwrapped, node.output)
            if line := _clean_node(node, line_of):
                lines[node.name] = line
        for value in (*graph.initializer, *graph.value_info, *graph.input, *graph.output):
            value.name = unwrapped(value.name)
            del value.metadata_props[:]
        for value in (*graph.initializer, *graph.value_info):
            value.doc_string = ""
        del graph.metadata_props[:]
    _join_constants(model)
    _count_axes_from_the_front(model)
    _rename_outputs(model.graph, output_names)
    rename(
        model.graph, {i.name: name for i, name in zip(model.graph.input, input_names, strict=True) if i.name != name}
    )
    del model.metadata_props[:]
    return lines


def _join_constants(model: onnx.ModelProto) -> None:
    """Removes each Identity by which an exporter gives one initializer several names, in place: TensorRT does not see
    an initializer behind it, and requires one for the bias of a convolution."""
    constants = {tensor.name for graph in graphs(model.graph) for tensor in graph.initializer}
    results = {value.name for graph in graphs(model.graph) for value in graph.output}
    names: dict[str, str] = {}
    for graph in graphs(model.graph):
        kept = []
        for node in graph.node:
            source = names.get(node.input[0], node.input[0]) if node.op_type == "Identity" else ""
            if source in constants and node.output[0] not in results:
                names[node.output[0]] = source
            else:
                kept.append(node)
        if len(kept) < len(graph.node):
            refill(graph.node, kept)
    rename(model.graph, names)


def _count_axes_from_the_front(model: onnx.ModelProto) -> None:
    """Makes axes of reductions non-negative, in place, if ranks are known: along negative axes ONNX Runtime does not
    reduce tensors without elements."""
    constants = ChainMap(*map(constants_in, graphs(model.graph)))
    found: list[tuple[onnx.GraphProto, onnx.NodeProto, list[int]]] = []
    for graph in graphs(model.graph):
        for node in graph.node:
            if not node.op_type.startswith("Reduce"):
                continue
            axes = [axis for attribute in node.attribute if attribute.name == "axes" for axis in attribute.ints]
            if len(node.input) > 1 and node.input[1] in constants:
                axes = numpy_helper.to_array(constants[node.input[1]]).reshape(-1).tolist()
            if any(axis < 0 for axis in axes):
                found.append((graph, node, axes))
    if not found:
        return
    ranks = _ranks(types_of(model))
    if any(node.input[0] not in ranks for _, node, _ in found):
        ranks |= _ranks(types_of(onnx.shape_inference.infer_shapes(light_copy(model))))
    for graph, node, axes in found:
        rank = ranks.get(node.input[0])
        if not rank:
            continue
        axes = [axis % rank for axis in axes]
        if len(node.input) > 1:
            node.input[1] = f"{node.output[0]}_axes"
            graph.initializer.append(numpy_helper.from_array(np.array(axes, np.int64), node.input[1]))
        else:
            next(attribute for attribute in node.attribute if attribute.name == "axes").ints[:] = axes


def keep_zero_padding(model: onnx.ModelProto) -> None:
    """Puts a Concat of one tensor between a zero Pad and the MaxPool after it, in place: ONNX Runtime would fuse these
    into a pool that pads with minus infinity instead of zeros."""
    for graph in graphs(model.graph):
        constants = constants_in(graph)
        padded = {n.output[0] for n in graph.node if n.op_type == "Pad" and not _pads_with_less(n, constants)}
        nodes = []
        for node in graph.node:
            if node.op_type == "MaxPool" and node.input[0] in padded:
                name = f"{node.output[0]}_padded"
                nodes.append(helper.make_node("Concat", [node.input[0]], [name], name=name, axis=0))
                node.input[0] = name
            nodes.append(node)
        if len(nodes) > len(graph.node):
            refill(graph.node, nodes)


def _pads_with_less(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> bool:
    """Whether a Pad pads with minus infinity, as ``F.max_pool2d`` itself does."""
    value = attributes_of(node).get("value", 0.0)
    if len(node.input) > 2 and node.input[2] in constants:
        value = numpy_helper.to_array(constants[node.input[2]]).item()
    return bool(value == -math.inf)


def _ranks(types: Mapping[str, Value]) -> dict[str, int]:
    return {name: len(value.shape) for name, value in types.items() if value.shape is not None}


def keep_inputs(model: onnx.ModelProto, tensors: Mapping[str, Tensor], axes: Mapping[str, Mapping[int, str]]) -> None:
    """Restores inputs that the TorchScript exporter dropped because nothing uses them, in place."""
    present = {value.name: value for value in model.graph.input}
    if len(present) == len(tensors):
        return
    inputs = []
    for name, tensor in tensors.items():
        shape = [axes.get(name, {}).get(i, size) for i, size in enumerate(tensor.shape)]
        kind: Any = torch.onnx.JitScalarType.from_dtype(tensor.dtype).onnx_type()
        inputs.append(present.get(name) or helper.make_tensor_value_info(name, kind, shape))
    refill(model.graph.input, inputs)


def name_sizes(model: onnx.ModelProto, lowered: onnx.ModelProto, sizes: Mapping[str, Size]) -> None:
    """Names dynamic sizes of outputs after equal sizes of inputs, or else after the output, in place.
    Sizes of inputs that are computed from others get their formulas; sizes that turn out static get their numbers.

    The TorchScript exporter names sizes after nodes (``Mul14_dim_0``), and sometimes gives different sizes one name.
    Which sizes are equal is inferred on the same model in standard ONNX, ``lowered``, which also loses such names.
    """
    of_inputs = lambda name: not sizes.keys().isdisjoint(re.findall(r"\w+", name))  # noqa: E731 - "2*batch" too
    for graph in (*graphs(model.graph), *graphs(lowered.graph)):
        for dim in (dim for value in (*graph.value_info, *graph.output) for dim in _dims(value)):
            if dim.dim_param and not of_inputs(dim.dim_param):
                dim.ClearField("dim_param")
    if not all(dim.WhichOneof("value") for output in model.graph.output for dim in _dims(output)):
        for output in lowered.graph.output:
            output.type.tensor_type.ClearField("shape")  # an untaken branch may have another rank
        inferred, types = onnx.shape_inference.infer_shapes(lowered, data_prop=True), dict[str, Value]()
        for output, known in zip(model.graph.output, inferred.graph.output, strict=True):
            if not known.type.tensor_type.HasField("shape"):  # infer_types also follows computed numbers
                types = types or infer_types(lowered)
                shape = types[output.name].shape if output.name in types else None
                known.CopyFrom(output if shape is None else _info(output.name, shape))
            if len(_dims(output)) != len(_dims(known)):
                output.type.tensor_type.shape.CopyFrom(known.type.tensor_type.shape)
            for axis, (dim, same) in enumerate(zip(_dims(output), _dims(known), strict=True)):
                if dim.WhichOneof("value"):
                    continue
                if same.HasField("dim_value"):
                    dim.dim_value = same.dim_value
                else:
                    dim.dim_param = same.dim_param if of_inputs(same.dim_param) else f"{output.name}_dim_{axis}"
    for graph in graphs(model.graph):
        for dim in (dim for value in (*graph.input, *graph.value_info, *graph.output) for dim in _dims(value)):
            if dim.dim_param:
                dim.dim_param = _with_formulas(dim.dim_param, sizes)


def _with_formulas(name: str, sizes: Mapping[str, Size]) -> str:
    formulas = {symbol: size.formula for symbol, size in sizes.items() if size.formula != symbol}
    return formulas.get(name) or re.sub(
        r"\w+", lambda word: f"({formulas[word[0]]})" if word[0] in formulas else word[0], name
    )


def _info(name: str, shape: Sequence[int | None]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)


def _dims(value: onnx.ValueInfoProto) -> Sequence[onnx.TensorShapeProto.Dimension]:
    return value.type.tensor_type.shape.dim


def _without_wrapper(name: str) -> str:
    # The wrapper is a scope in "/_svexport_model/conv", or "/_svexport_model.0" for a Sequential; it is a prefix in
    # "_svexport_model.conv.weight".
    return re.sub(rf"(^|/)(?:{MODEL_ATTRIBUTE}[./])+", r"\1", name)


def _clean_node(node: onnx.NodeProto, line_of: Callable[[str], str]) -> str:
    """Cleans a node; returns its source line, which ``line_of`` reads from a stack trace."""
    properties = {p.key: p.value for p in node.metadata_props}
    del node.metadata_props[:]
    if _NAMESPACE in properties:
        # ": FlatModel/_svexport_model: pkg.Net/_svexport_model.conv: torch.nn.Conv2d/...": without its first module
        modules = properties[_NAMESPACE].replace(f"{MODEL_ATTRIBUTE}.", "").split(f"/{MODEL_ATTRIBUTE}: ", 1)
        value = _ADDRESS.sub("", f": {modules[1]}" if len(modules) == 2 else modules[0])
        node.metadata_props.add(key=_NAMESPACE, value=value)
    node.doc_string = ""
    if node.op_type == "Conv":
        _state_padding(node)
    if node.op_type == "TopK":  # sorted satisfies any order, and TensorRT supports only that
        remove_attribute(node, "sorted")
    line = line_of(properties.get(_STACK_TRACE, ""))
    if node.domain != DOMAIN:
        return line
    while node.input and not node.input[-1]:  # TensorRT's parser makes null tensors of absent inputs
        node.input.pop()
    node.doc_string = line
    attributes = attributes_of(node)
    if SOURCE_ATTRIBUTE in attributes:
        node.doc_string = attributes[SOURCE_ATTRIBUTE].decode()
    op = symbolic_of(node).op
    set_attributes(node, op, [attributes.get(a.name, []) for a in op.attributes])  # the exporters drop empty lists
    return node.doc_string


def _state_padding(node: onnx.NodeProto) -> None:
    """Writes ``padding="same"`` as explicit pads: ONNX Runtime does not support ``auto_pad`` with dilations."""
    attributes = attributes_of(node)
    if attributes.get("auto_pad") == b"SAME_UPPER" and set(attributes["strides"]) == {1}:
        totals = [d * (k - 1) for d, k in zip(attributes["dilations"], attributes["kernel_shape"], strict=True)]
        pads = [total // 2 for total in totals] + [total - total // 2 for total in totals]
        remove_attribute(node, "auto_pad")
        node.attribute.append(helper.make_attribute("pads", pads))


def _rename_outputs(graph: onnx.GraphProto, names: Sequence[str]) -> None:
    """Names the graph's outputs; one that is an input, a constant, or returned twice gets an Identity."""
    fixed = {value.name for value in (*graph.input, *graph.initializer)}
    olds = [output.name for output in graph.output]
    inner = {n for node in graph.node for n in node.output} - set(olds)
    inner.update(tensor.name for tensor in graph.initializer)
    renames = {name: f"{name}_inner" for name in inner.intersection(names)}  # inner values that have an output's name
    copied: list[tuple[str, str]] = []
    for old, output, name in zip(olds, graph.output, names, strict=True):
        if old in fixed or old in renames:
            copied.append((old, name))
        else:
            renames[old] = name
        output.name = name
    rename(graph, renames)
    for old, name in copied:
        graph.node.append(helper.make_node("Identity", [renames.get(old, old)], [name], name=f"Identity_{name}"))
