"""Bodies in a model: lowers nodes to them, attaches them as local functions, and strips them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, helper, numpy_helper

from svexport.errors import UnsupportedError
from svexport.graph.guard import add_guard
from svexport.graph.nodes import arguments_of, separate_names, svexport_nodes, symbolic_of, weight_attributes
from svexport.graph.reading import check_whole, damaged, read_model
from svexport.graph.scope import light_copy
from svexport.graph.substitute import give_outputs, substitute
from svexport.graph.types import infer_types, types_of
from svexport.graph.walk import attributes_of, graphs, opset_of, refill
from svexport.ops._op import DOMAIN, OPS, Op
from svexport.symbolic._builder import Builder, Value

__all__ = [
    "attach",
    "drop_unused_bodies",
    "input_types",
    "ir_version",
    "lower",
    "node_types",
    "strip",
    "without_overloads",
]


def lower(model: onnx.ModelProto | str | Path, ops: Collection[str] | None = None) -> onnx.ModelProto:
    """Replaces svexport nodes by their bodies: standard ONNX, at the model's own opset.

    Args:
        model: an ONNX model or the path of one; it is not changed.
        ops: names of the ops to lower (``["grid_sample"]``); None lowers every one.

    Returns:
        A new model. Without svexport nodes left it imports the default domain only.

    Raises:
        UnsupportedError: on an unknown op, a node whose input data types and ranks cannot be inferred, or a damaged
            model.
        SvexportError: if the file is missing or is no ONNX model.
    """
    chosen = node_types(ops)
    if isinstance(model, onnx.ModelProto):
        lowered = onnx.ModelProto()
        lowered.CopyFrom(model)
    else:
        lowered = read_model(Path(model))
    what = "the model" if isinstance(model, onnx.ModelProto) else str(model)
    if lowered.HasField("graph"):
        opset_of(lowered)  # raises a clear error if the model has no opset
    check_whole(lowered, what)
    with damaged(what):
        if ops is None:
            for node in svexport_nodes(lowered):
                symbolic_of(node)  # raises on an unknown op, which would be left as it is
        lower_in_place(lowered, lambda node: node.op_type in chosen)
    return lowered


def ir_version(opset: int) -> int:
    """The IR version to write: runtimes refuse newer ones than they know, but float8 (opset 19) needs a later one."""
    return 8 if opset < 19 else 10


def node_types(ops: Collection[str] | None) -> set[str]:
    """The node types of the named ops; of all ops for None.

    Raises:
        UnsupportedError: on a name that is not an op's.
    """
    if isinstance(ops, str):
        raise UnsupportedError(f"expected a list of names of ops, got {ops!r}; give [{ops!r}]")
    unknown = sorted(set(ops or ()) - OPS.keys())
    if unknown:
        raise UnsupportedError(f"expected names of ops ({', '.join(sorted(OPS))}), got {', '.join(map(repr, unknown))}")
    return {op.node_type for name, op in OPS.items() if ops is None or name in ops}


def lower_in_place(model: onnx.ModelProto, chosen: Callable[[onnx.NodeProto], bool]) -> None:
    """Lowers the chosen svexport nodes like :func:`lower`, but in place."""
    if any(map(chosen, svexport_nodes(model))):
        _lower(model, chosen, input_types(model))
    drop_unused_bodies(model)


def _lower(model: onnx.ModelProto, chosen: Callable[[onnx.NodeProto], bool], types: dict[str, Value]) -> None:
    opset = opset_of(model)

    def build(node: onnx.NodeProto, prefix: str) -> Builder | None:
        if node.domain != DOMAIN or not chosen(node):
            return None
        builder = _build(node, types, opset, prefix)
        held = {a.name: a.t for a in node.attribute if a.type == AttributeProto.TENSOR}
        builder.constants.update({f"{prefix}{name}": tensor for name, tensor in held.items()})
        for inner in builder.nodes:
            inner.input[:] = [f"{prefix}{name}" if name in held else name for name in inner.input]
        return builder

    substitute(model, build)


def attach(model: onnx.ModelProto) -> None:
    """Gives every svexport node its body as a model-local function, in place.

    Nodes of one op share a body if one body serves them all; it is specialized by the static sizes they have in common.
    If they need different bodies (grids in two modes, say), each further body is an overload of the function (ONNX
    IR 10) and the node names it. ONNX Runtime honours overloads from 1.27 on; :func:`without_overloads` is for older
    versions. TensorRT's parser ignores overloads and mixes up names of bodies with those of the graph. So every body
    has a guard, which the parser refuses (:mod:`svexport.graph.guard`), and its values have names of their own.

    Raises:
        UnsupportedError: on an unknown op, or a node whose input data types and ranks cannot be inferred.
    """
    strip(model)
    nodes = list(svexport_nodes(model))
    if not nodes:
        return
    _attach(model, nodes, input_types(model))


def strip(model: onnx.ModelProto, node_types: Collection[str] | None = None) -> None:
    """Removes the bodies (only those of the given node types, if given), in place; the nodes stay."""
    for node in svexport_nodes(model):
        if node_types is None or node.op_type in node_types:
            node.ClearField("overload")
    _keep(model, [f for f in model.functions if f.domain != DOMAIN or f.name not in (node_types or (f.name,))])


def without_overloads(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model itself, or a copy in which each overload of a function is a function with a name of its own.

    The copy is for runtimes that take the first function of a name for all of its overloads. It is not for TensorRT,
    which finds plugins by op_type.
    """
    if not any(function.overload for function in model.functions):
        return model
    renamed = onnx.ModelProto()
    renamed.CopyFrom(model)
    for function in renamed.functions:
        if function.overload:
            function.name = f"{function.name}_{function.overload}"
            function.ClearField("overload")
    bodies = [onnx.GraphProto(node=function.node) for function in renamed.functions]
    for outer, function in zip(bodies, renamed.functions, strict=True):
        for graph in graphs(outer):
            _name_overloads(graph)
        refill(function.node, outer.node)
    for graph in graphs(renamed.graph):
        _name_overloads(graph)
    return renamed


def _name_overloads(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        if node.overload:
            node.op_type = f"{node.op_type}_{node.overload}"
            node.ClearField("overload")


def _keep(model: onnx.ModelProto, functions: Sequence[onnx.FunctionProto]) -> None:
    """Keeps only these functions; if no overload is left, sets the IR version back to what it was before them."""
    overloads = any(f.overload for f in model.functions)
    refill(model.functions, functions)
    if overloads and not any(f.overload for f in functions):
        model.ir_version = min(model.ir_version, ir_version(opset_of(model)))


def _attach(model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], types: dict[str, Value]) -> None:
    opset = opset_of(model)
    general_types = {name: _general(value) for name, value in types.items()}
    taken = _names(model.graph)
    by_type: dict[str, list[onnx.NodeProto]] = {}
    for node in nodes:
        by_type.setdefault(node.op_type, []).append(node)
    for same in by_type.values():
        functions = _functions(same, types, opset)
        if len({key for key, _ in functions}) > 1:
            general = _functions(same, general_types, opset)
            if len({key for key, _ in general}) == 1:
                functions = general
        overloads: dict[bytes, str] = {}
        for node, (key, function) in zip(same, functions, strict=True):
            if key not in overloads:
                overloads[key] = str(len(overloads)) if overloads else ""
                function.overload = overloads[key]
                _set_apart(function, f"body{len(model.functions)}", taken)
                model.functions.append(function)
            node.overload = overloads[key]
        if len(overloads) > 1:
            model.ir_version = max(model.ir_version, 10)  # the first IR version with overloads


def _names(graph: onnx.GraphProto) -> set[str]:
    """The names of all values of a graph and of the graphs nested in it."""
    names: set[str] = set()
    for one in graphs(graph):
        names.update(value.name for value in (*one.input, *one.initializer))
        names.update(name for node in one.node for name in node.output)
    return names


def _set_apart(function: onnx.FunctionProto, prefix: str, taken: Collection[str]) -> None:
    """Renames the values of a function so that nothing else in the file has their names, in place."""
    while any(name.startswith(f"{prefix}/") for name in taken):
        prefix += "_"
    new = lambda name: name and f"{prefix}/{name}"  # noqa: E731 - an absent input keeps its empty name
    function.input[:] = map(new, function.input)
    function.output[:] = map(new, function.output)
    for node in function.node:
        node.input[:] = map(new, node.input)
        node.output[:] = map(new, node.output)


def _general(value: Value) -> Value:
    """The value without its static sizes, except sizes of 1, which broadcast."""
    return replace(value, shape=value.shape and tuple(1 if size == 1 else None for size in value.shape))


def _functions(
    nodes: Sequence[onnx.NodeProto], types: dict[str, Value], opset: int
) -> list[tuple[bytes, onnx.FunctionProto]]:
    """The bodies of nodes as functions, each with a key that tells equal ones; nodes with equal inputs share one."""
    built: dict[tuple[Any, ...], tuple[bytes, onnx.FunctionProto]] = {}
    result = []
    for node in nodes:
        inputs = [replace(types[name], name="") if name in types else bool(name) for name in node.input]
        attributes = onnx.NodeProto(attribute=node.attribute).SerializeToString(deterministic=True)
        key = (*inputs, len(node.output), attributes)
        if key not in built:
            function = _function(node, types, opset)
            built[key] = function.SerializeToString(deterministic=True), function
        result.append(built[key])
    return result


def _function(node: onnx.NodeProto, types: dict[str, Value], opset: int) -> onnx.FunctionProto:
    """The body of a node as a function; equal bodies give equal functions."""
    op = symbolic_of(node).op
    inputs = _input_names(op, node)
    renamed = onnx.NodeProto()
    renamed.CopyFrom(node)
    renamed.input[:] = [new if old else "" for new, old in zip(inputs, node.input, strict=True)]
    renamed.output[:] = [f"output_{i}" for i in range(len(node.output))]
    types = {new: replace(types[old], name=new) for new, old in zip(inputs, node.input, strict=True) if old in types}
    builder = _build(renamed, types, opset)
    add_guard(builder, [types[name] for name in renamed.input if name], renamed.output, op.node_type)
    constants = [helper.make_node("Constant", [], [name], value=t) for name, t in builder.constants.items()]
    for attribute in node.attribute:
        if attribute.type == AttributeProto.TENSOR:
            constants.append(helper.make_node("Constant", [], [attribute.name]))
            constants[-1].attribute.add(name="value", type=AttributeProto.TENSOR, ref_attr_name=attribute.name)
    return helper.make_function(
        DOMAIN,
        op.node_type,
        inputs,
        list(renamed.output),
        constants + builder.nodes,
        [helper.make_opsetid("", opset)],
        attributes=[a.name for a in node.attribute],
        doc_string=f"Standard-ONNX body of the svexport op {op.name}.",
    )


def _input_names(op: Op, node: onnx.NodeProto) -> list[str]:
    tensors = [a for a in op.arguments if a.is_tensor]
    attributes = attributes_of(node)
    weights = weight_attributes(op, attributes)
    if weights:
        tensors.pop()
        weights = [] if weights[0] in attributes else weights
    count = len(node.input) - len(weights)
    names: list[str] = []
    for argument in tensors:
        if argument.kind == "tensors":
            names += [f"{argument.name}_{i}" for i in range(count - len(tensors) + 1)]
        else:
            names.append(argument.name)
    return names[:count] + [f"size_{i}" for i in range(count - len(names))] + weights


def _build(node: onnx.NodeProto, types: dict[str, Value], opset: int, prefix: str = "") -> Builder:
    """A node's body, producing the node's own outputs."""
    symbolic = symbolic_of(node)
    builder = Builder(opset, prefix)
    arguments = arguments_of(node, symbolic.op, types)
    try:
        outputs = symbolic.build(builder, arguments)
    except (LookupError, ValueError) as error:
        raise UnsupportedError(
            f"node {node.name!r} (svexport::{node.op_type}) has attributes or inputs that its op does not know: "
            f"{type(error).__name__}: {error}"
        ) from error
    give_outputs(builder, outputs, node)
    return builder


def state_types(model: onnx.ModelProto) -> None:
    """Adds the types of svexport nodes' inputs as ``value_info`` where the file does not state them, in place.

    Raises:
        UnsupportedError: on a node whose input data types and ranks cannot be inferred.
    """
    types = input_types(model)
    stated = types_of(model)
    untyped = {name for n in svexport_nodes(model) for name in n.input if name and not _known(name, stated)}
    for graph in graphs(model.graph):
        made = [name for node in graph.node for name in node.output if name in untyped]
        infos = [info for info in graph.value_info if info.name not in untyped]
        infos += [_info(types[name]) for name in made]
        if made:
            refill(graph.value_info, infos)


def _info(value: Value) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(value.name, value.dtype or 0, value.shape)


def _known(name: str, types: Mapping[str, Value]) -> bool:
    return name in types and types[name].shape is not None


def input_types(model: onnx.ModelProto) -> dict[str, Value]:
    """Types by name of at least every svexport node's inputs, inferred through the bodies where the file states none.

    Values of nested graphs whose names are not unique in the model are renamed, in place.

    Raises:
        UnsupportedError: on a node whose input data types and ranks cannot be inferred.
    """
    separate_names(model)
    types = types_of(model)
    typed = lambda node: all(_known(name, types) for name in node.input if name)  # noqa: E731
    missing = [n for n in svexport_nodes(model) if not typed(n)]
    if missing:
        trial = light_copy(model)
        strip(trial)
        found = infer_types(trial, _Outputs(opset_of(model), model.ir_version))
        types |= {name: value for name, value in found.items() if value.shape is not None and not _known(name, types)}
        missing = [n for n in missing if not typed(n)]
    while missing:  # types that depend on sizes computed along the whole graph: infer through lowered bodies
        trial = light_copy(model)
        strip(trial)
        _lower(trial, typed, types)
        types |= {name: value for name, value in infer_types(trial).items() if value.shape is not None}
        still = [n for n in missing if not typed(n)]
        if len(still) == len(missing):
            node = still[0]
            unknown = [name for name in node.input if name and not _known(name, types)]
            raise UnsupportedError(
                f"the data type and rank of {', '.join(map(repr, unknown))}, input of {node.name!r} "
                f"(svexport::{node.op_type}), cannot be inferred; export the model with svexport.export, which records "
                "them, or add them as value_info"
            )
        missing = still
    return types


class _Outputs:
    """Infers the types of svexport nodes' outputs from each node's body alone; equal nodes share the result."""

    def __init__(self, opset: int, ir_version: int) -> None:
        self._opset, self._ir_version = opset, ir_version
        self._known: dict[tuple[Any, ...], list[tuple[int, tuple[int | None, ...] | None]]] = {}

    def __call__(
        self, node: onnx.NodeProto, types: Mapping[str, Value], values: Mapping[str, np.ndarray]
    ) -> Iterator[Value]:
        if node.domain != DOMAIN or not all(_known(name, types) for name in node.input if name):
            return
        given = tuple((types[n].dtype, types[n].shape) if n else None for n in node.input)
        numbers = tuple(values[n].tobytes() if n in values else None for n in node.input)
        same = tuple(map(list(node.input).index, node.input))
        attributes = onnx.NodeProto(attribute=node.attribute).SerializeToString(deterministic=True)
        key = node.op_type, attributes, given, numbers, same, len(node.output)
        if key not in self._known:
            self._known[key] = list(self._infer(node, types, values))
        for name, (dtype, shape) in zip(node.output, self._known[key], strict=False):
            if name and dtype:
                yield Value(name, dtype, shape)

    def _infer(
        self, node: onnx.NodeProto, types: Mapping[str, Value], values: Mapping[str, np.ndarray]
    ) -> Iterator[tuple[int, tuple[int | None, ...] | None]]:
        alone = onnx.ModelProto(ir_version=self._ir_version)
        alone.opset_import.extend([helper.make_opsetid("", self._opset), helper.make_opsetid(DOMAIN, 1)])
        alone.graph.node.append(node)
        for name in dict.fromkeys(filter(None, node.input)):
            if name in values:
                alone.graph.initializer.append(numpy_helper.from_array(values[name], name))
            else:
                alone.graph.input.append(_info(types[name]))
        _lower(alone, lambda _: True, {name: types[name] for name in node.input if name})
        found = infer_types(alone)
        for name in node.output:
            value = found.get(name)
            yield (0, None) if value is None else (value.dtype or 0, value.shape)


def drop_unused_bodies(model: onnx.ModelProto) -> None:
    """Removes functions and domain imports that no node refers to, in place."""
    used = {(n.op_type, n.overload) for n in svexport_nodes(model)}
    functions = [f for f in model.functions if f.domain != DOMAIN or (f.name, f.overload) in used]
    if len(functions) != len(model.functions):
        _keep(model, functions)
    if not used:
        imports = [entry for entry in model.opset_import if entry.domain != DOMAIN]
        refill(model.opset_import, imports)
