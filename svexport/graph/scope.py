"""What is known of the tensors of each graph in a model: types, constants and used names."""

from __future__ import annotations

import heapq
import math
from collections import ChainMap, Counter
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from svexport.errors import UnsupportedError
from svexport.graph.permutation import Perm
from svexport.graph.walk import STANDARD, graphs, graphs_of, opset_of, refill

__all__ = [
    "Scope",
    "byte_size",
    "constant_value",
    "constants_as_tensors",
    "constants_in",
    "drop_unused",
    "is_standard",
    "light_copy",
    "readers_of",
    "sort_nodes",
    "scopes",
    "used_inside",
    "used_names",
]

LARGE = 2**16
"""Size in bytes above which constants are not copied if that can be avoided."""


@dataclass
class Scope:
    """One graph of a model, with what is visible of the graphs around it.

    Attributes:
        graph: the graph itself.
        opset: the opset of the default domain.
        ir_version: the IR version of the model.
        infos: types by name, stated by the file or inferred.
        constants: initializers and ``Constant`` nodes by name, except those that a caller may override and those
            stored in another file.
        taken: every name in the model, of values and of nodes.
    """

    graph: onnx.GraphProto
    opset: int
    ir_version: int
    infos: MutableMapping[str, onnx.TypeProto.Tensor]
    constants: MutableMapping[str, TensorProto]
    taken: set[str]
    _added: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def shape(self, name: str) -> tuple[int | None, ...] | None:
        """The sizes of a tensor, with None for a dynamic one; None if the rank is unknown."""
        info = self.infos.get(name)
        if info is None or not info.HasField("shape"):
            return None
        return tuple([d.dim_value if d.HasField("dim_value") else None for d in info.shape.dim])

    def set_rank(self, name: str, rank: int) -> None:
        """Records the rank of a tensor whose shape is unknown."""
        info = onnx.TypeProto.Tensor()
        if name in self.infos:
            info.CopyFrom(self.infos[name])
        info.shape.dim.extend([onnx.TensorShapeProto.Dimension() for _ in range(rank)])
        self.infos[name] = info

    def itemsize(self, name: str) -> int:
        """The size of an element in bytes; that of float32 if the type is unknown."""
        dtype = self.infos[name].elem_type or TensorProto.FLOAT
        return helper.tensor_dtype_to_np_dtype(dtype).itemsize

    def add_info(self, name: str, source: str, frame: Perm) -> None:
        """States the type of a transposed tensor in the file."""
        if not self.infos[source].elem_type:
            return
        info = self.graph.value_info.add(name=name).type.tensor_type
        info.elem_type = self.infos[source].elem_type
        info.shape.dim.extend([self.infos[source].shape.dim[i] for i in frame])

    def array(self, name: str) -> np.ndarray | None:
        """The value of a constant, None for any other tensor."""
        return numpy_helper.to_array(self.constants[name]) if name in self.constants else None

    def fresh(self, stem: str) -> str:
        """A name that is not used in the model yet; it counts as used from now on."""
        name, count = stem, 0
        while name in self.taken:
            name, count = f"{stem}_{count}", count + 1
        self.taken.add(name)
        return name

    def constant(self, array: np.ndarray, stem: str) -> str:
        """The name of a constant with this value; adds it to the graph unless an equal one was added before."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._added:
            name = self._added[key] = self.fresh(stem)
            tensor = numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
            if self.ir_version >= 4:
                self.graph.initializer.append(tensor)
            else:  # before IR version 4 an initializer has to be an input as well
                self.graph.node.insert(0, helper.make_node("Constant", [], [name], value=tensor))
            self.constants[name] = tensor
        return self._added[key]

    def drop_unused(self, before: set[str]) -> None:
        """Calls :func:`drop_unused` and forgets constants that it removed, so that they can be added again."""
        drop_unused(self.graph, before)
        left = {tensor.name for tensor in self.graph.initializer}.union(*(node.output for node in self.graph.node))
        self._added = {key: name for key, name in self._added.items() if name in left}


def is_standard(node: onnx.NodeProto, op_type: str) -> bool:
    """Whether a node is of this type in ONNX's own domain."""
    return node.op_type == op_type and node.domain in STANDARD


def scopes(model: onnx.ModelProto) -> Iterator[Scope]:
    """A scope for every graph of a model, innermost first."""
    taken = {model.graph.name}
    for graph in graphs(model.graph):
        for node in graph.node:
            taken.update(node.output, [node.name])
        taken.update(value.name for value in (*graph.input, *graph.initializer))
    outermost = Scope(model.graph, opset_of(model), model.ir_version, {}, {}, taken)
    yield from _inner_scopes(outermost, onnx.shape_inference.infer_shapes(light_copy(model)).graph)


def _inner_scopes(scope: Scope, inferred: onnx.GraphProto) -> Iterator[Scope]:
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        scope.infos[value.name] = value.type.tensor_type
    overridable = {value.name for value in scope.graph.input}
    for name, tensor in constants_in(scope.graph).items():
        scope.infos[name] = helper.make_tensor_type_proto(tensor.data_type, tensor.dims).tensor_type
        if name not in overridable and _is_plain(tensor):
            scope.constants[name] = tensor
    for node, same in zip(scope.graph.node, inferred.node, strict=True):
        for inner, inferred_inner in zip(graphs_of(node), graphs_of(same), strict=True):
            # Leaves large constants out: a nested graph would get its own transposed copies of them.
            small = {name: t for name, t in scope.constants.items() if byte_size(t) <= LARGE}
            child = Scope(inner, scope.opset, scope.ir_version, ChainMap({}, scope.infos), small, scope.taken)
            yield from _inner_scopes(child, inferred_inner)
    yield scope


def constant_value(node: onnx.NodeProto) -> TensorProto | None:
    """The value of a ``Constant`` node; None for a sparse one or strings."""
    types = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}
    for attribute in node.attribute:
        if attribute.name == "value":
            return attribute.t
        if attribute.name in types:
            return numpy_helper.from_array(np.array(helper.get_attribute_value(attribute), types[attribute.name]))
    return None


def constants_in(graph: onnx.GraphProto) -> dict[str, TensorProto]:
    """The initializers of one graph, and the values of its ``Constant`` nodes, by name."""
    found = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if is_standard(node, "Constant") and (tensor := constant_value(node)) is not None:
            found[node.output[0]] = tensor
    return found


def constants_as_tensors(model: onnx.ModelProto) -> None:
    """Turns numbers and lists in Constants into tensors, in place: before opset 12 a Constant holds only tensors, and
    TensorRT's parser up to 9.1 reads numbers as 0 and lists as empty."""
    for graph in graphs(model.graph):
        for node in graph.node:
            tensor = constant_value(node) if is_standard(node, "Constant") else None
            if tensor is not None and node.attribute[0].name != "value":
                node.attribute[0].CopyFrom(helper.make_attribute("value", tensor))


def _is_plain(tensor: TensorProto) -> bool:
    """Whether numpy can permute the tensor: it is stored in this file, and its elements are whole bytes."""
    types = tensor.data_type <= TensorProto.BFLOAT16 and tensor.data_type != TensorProto.STRING
    return types and tensor.data_location != TensorProto.EXTERNAL


def used_inside(node: onnx.NodeProto) -> list[str]:
    """Names that occur in the graphs nested in a node."""
    inner = [graph for outer in graphs_of(node) for graph in graphs(outer)]
    names = [name for graph in inner for each in graph.node for name in each.input]
    return list(dict.fromkeys(names + [output.name for graph in inner for output in graph.output]))


def sort_nodes(model: onnx.ModelProto) -> None:
    """Puts nodes behind those that they read, in place, as ONNX requires. Edited files may have another order,
    which ONNX Runtime takes. Nodes that are in order stay where they are.

    Raises:
        UnsupportedError: if nodes read one another's results.
    """
    for outer in (model.graph, *model.functions):
        nested = [inner for node in outer.node for graph in graphs_of(node) for inner in graphs(graph)]
        for graph in (*reversed(nested), outer):  # those inside first: sorting copies nodes
            if (ordered := _sorted(graph.node)) is not None:
                refill(graph.node, ordered)


def _sorted(nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto] | None:
    """The nodes in order; None if they are in order already. The first of those that can come next comes next."""
    made = {name: place for place, node in enumerate(nodes) for name in node.output if name}
    reads = [{made[name] for name in (*node.input, *used_inside(node)) if name in made} for node in nodes]
    if all(place < own for own, places in enumerate(reads) for place in places):
        return None
    readers: dict[int, list[int]] = {}
    for own, places in enumerate(reads):
        for place in places:
            readers.setdefault(place, []).append(own)
    missing = [len(places) for places in reads]
    ready = [own for own, count in enumerate(missing) if not count]  # ascending, so a heap
    ordered = []
    while ready:
        own = heapq.heappop(ready)
        ordered.append(nodes[own])
        for reader in readers.get(own, ()):
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, reader)
    if len(ordered) < len(nodes):
        first = nodes[next(own for own, count in enumerate(missing) if count)]
        raise UnsupportedError(
            f"the model is not as ONNX defines it: node {first.name or first.output[0]!r} ({first.op_type}) waits for "
            "its own result, or for one that does"
        )
    return ordered


def used_names(graph: onnx.GraphProto) -> set[str]:
    """The names of all values that a graph uses."""
    names = {output.name for output in graph.output}
    for node in graph.node:
        names.update(node.input, used_inside(node))
    return names


def readers_of(graph: onnx.GraphProto) -> Counter[str]:
    """How often each tensor is read; results, and tensors read by nested graphs, count at least twice."""
    counts = Counter(name for node in graph.node for name in node.input)
    for name in [value.name for value in graph.output] + [name for node in graph.node for name in used_inside(node)]:
        counts[name] += 2
    return counts


def drop_unused(graph: onnx.GraphProto, before: set[str]) -> None:
    """Removes nodes and initializers of values that were used ``before`` and are no longer, and their types."""
    used = {output.name for output in graph.output}
    nodes = []
    for node in reversed(graph.node):
        if not before.issuperset(node.output) or not used.isdisjoint(node.output):
            nodes.append(node)
            used.update(node.input, used_inside(node))
    tensors = [tensor for tensor in graph.initializer if tensor.name in used or tensor.name not in before]
    names = {name for node in nodes for name in node.output}.union(value.name for value in (*graph.input, *tensors))
    infos = [info for info in graph.value_info if info.name in names]
    for items, kept in ((graph.node, nodes[::-1]), (graph.initializer, tensors), (graph.value_info, infos)):
        if len(kept) < len(items):
            refill(items, kept)


def byte_size(tensor: TensorProto) -> int:
    """The size of a tensor's values in bytes, without the copy that the library makes to compute it."""
    if tensor.data_type == TensorProto.STRING:
        return tensor.ByteSize()
    return math.prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


def light_copy(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model with its large weights turned into inputs: enough to check it and to infer types."""
    light = onnx.ModelProto(ir_version=max(model.ir_version, 4), opset_import=model.opset_import)
    light.functions.extend(model.functions)
    graph = light.graph
    graph.name = model.graph.name
    graph.node.extend(model.graph.node)
    graph.input.extend(model.graph.input)
    graph.output.extend(model.graph.output)
    graph.value_info.extend(model.graph.value_info)
    given = {value.name for value in graph.input}
    for tensor in model.graph.initializer:
        if byte_size(tensor) <= LARGE:
            graph.initializer.append(tensor)
        elif tensor.name not in given:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return light
