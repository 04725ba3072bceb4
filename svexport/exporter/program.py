"""A program of torch.export made of functions that the exporter has, node by node.

``ExportedProgram.run_decompositions`` traces the whole program a second time for that, which takes longer than the
first trace; most nodes it leaves as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.export.graph_signature import InputKind, TensorArgument
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["decompose_nodes", "promote"]


class _Kept(Exception):
    """A function that stays as it is: what the table has for it does not take this call."""


_aten = torch.ops.aten

_NOTHING = {
    _aten.alias.default,
    _aten.detach.default,
    _aten.detach_.default,
    _aten.lift_fresh.default,
}
"""Functions that return what they are given."""

_EQUAL = {_aten.clone.default, _aten.contiguous.default, _aten.dropout.default}
"""Functions that return what they are given, or a copy of it, which is another tensor while some are written to."""

_VIEWS = {
    _aten.flatten.using_ints,
    _aten.ravel.default,
    _aten.reshape_as.default,
    _aten.unflatten.int,
    _aten.view_as.default,
}
"""Functions that change nothing but the shape."""

_CASTS = {_aten.to, _aten.type_as}

_NEW = {
    *(_aten.batch_norm.default, _aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default),
    *(_aten.conv_transpose2d.input, _aten.group_norm.default, _aten.layer_norm.default, _aten.linear.default),
    *(_aten.matmul.default, _aten.max_pool2d.default),
}
"""Functions that torch makes of others, of which the results are memory of their own."""

_WHOLE = _EQUAL | {_aten.reshape.default}
"""Functions that stay as they are, though torch makes them of others."""

_META = ("from_node", "nn_module_stack", "seq_nr", "source_fn_stack", "stack_trace", "torch_fn")
"""What the nodes of a function take over from the node that they replace."""


class _SecondTrace(Exception):
    """Something that this module does not decompose."""


def decompose_nodes(
    program: torch.export.ExportedProgram, table: Mapping[Any, Callable[..., Any]], composites: Collection[Any]
) -> bool:
    """Decomposes a program in place; False where it needs ``run_decompositions`` and is the same program still.

    That is so of dynamic sizes, of graphs within graphs, of complex numbers, and of writes to what other tensors see.

    Args:
        table: of the functions to decompose.
        composites: the functions that torch makes of others by itself and which are kept where they are not in
            ``table``.
    """
    graphs = [module for module in program.graph_module.modules() if isinstance(module, fx.GraphModule)]
    if len(graphs) > 1 or program.range_constraints:
        return False
    try:
        _Decomposition(program, table, composites).run()
    except _SecondTrace:
        return False
    finally:
        _name_outputs(program)
    return True


def _name_outputs(program: torch.export.ExportedProgram) -> None:
    """Has the signature name the nodes that are the program's outputs now."""
    (results,) = program.graph.output_node().args
    specs = program.graph_signature.output_specs
    for spec, result in zip(specs, results, strict=True):  # type: ignore[arg-type]
        if isinstance(spec.arg, TensorArgument) and isinstance(result, fx.Node):
            spec.arg = TensorArgument(name=result.name)


class _Decomposition:
    """Of one program.

    Args:
        program, table, composites: as of :func:`decompose_nodes`.
    """

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        table: Mapping[Any, Callable[..., Any]],
        composites: Collection[Any],
    ) -> None:
        self._graph = program.graph
        self._table = table
        self._composites = composites
        inputs = {
            spec.arg.name
            for spec in program.graph_signature.input_specs
            if spec.kind == InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument)
        }
        self._held = {n for n in self._graph.nodes if n.op == "placeholder" and n.name not in inputs}
        values = [node.meta.get("val") for node in self._graph.nodes if node.op == "placeholder"]
        self._fakes = torch._guards.detect_fake_mode(values)
        self._traced: dict[Any, fx.Graph] = {}

    def run(self) -> None:
        if self._fakes is None or any(map(_is_complex, self._graph.nodes)):  # of which torch's own makes constants
            raise _SecondTrace
        writes = any(map(_writes, self._graph.nodes))
        if writes:
            self._write_elsewhere()
        if self._expand():
            self._write_elsewhere()
        for node in list(self._graph.nodes):
            if node.target in _EQUAL:
                if node.target is _aten.dropout.default and node.args[2]:
                    raise _SecondTrace
                _replace(node, node.args[0])
        self._graph.eliminate_dead_code()

    # ------------------------------------------------------------ in place

    def _write_elsewhere(self) -> None:
        """Makes functions that write in place ones that do not, where no other tensor shares what they write to."""
        place = {node: index for index, node in enumerate(self._graph.nodes)}
        sharing: dict[fx.Node, list[fx.Node]] = {}
        for node in list(self._graph.nodes):
            if node.target in _NOTHING:
                _replace(node, node.args[0])
                continue
            sharing[node] = [node]
            if _writes(node):
                new = self._functional(node)
                x = node.args[0]
                assert isinstance(x, fx.Node)
                others = [other for other in sharing[x] if other is not x]
                seen = any(place[user] > place[node] for other in others for user in other.users)
                if seen or not self._held.isdisjoint(sharing[x]):
                    raise _SecondTrace
                place[new] = place[node]
                sharing[new] = [new]
                x.replace_all_uses_with(new, lambda user, node=node: place.get(user, 0) > place[node])  # type: ignore[misc]
                node.replace_all_uses_with(new)
                self._graph.erase_node(node)
            elif node.op == "call_function" and _may_share(node.target):
                for given in node.all_input_nodes:
                    _join(sharing, node, given)

    def _functional(self, node: fx.Node) -> fx.Node:
        """A node that computes what another one writes to its first argument."""
        schema = node.target._schema  # type: ignore[union-attr]
        written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
        namespace, _, name = schema.name.partition("::")
        packet = getattr(_aten, name.removesuffix("_"), None) if namespace == "aten" and name.endswith("_") else None
        function = getattr(packet, schema.overload_name or "default", None)
        if function is None or written != [index == 0 for index in range(len(written))]:
            raise _SecondTrace
        if [a.name for a in function._schema.arguments] != [a.name for a in schema.arguments]:
            raise _SecondTrace
        with self._fakes:  # type: ignore[union-attr]
            value = function(*_values(node.args), **_values(node.kwargs))
        before = node.meta["val"]
        if not isinstance(value, Tensor) or (value.dtype, value.shape) != (before.dtype, before.shape):
            raise _SecondTrace
        with self._graph.inserting_before(node):
            new = self._graph.call_function(function, node.args, node.kwargs)
        new.meta = node.meta | {"val": value}
        return new

    # ------------------------------------------------------------ functions made of others

    def _expand(self) -> bool:
        """Puts what functions are made of in their place; whether any of it writes in place."""
        rest = [node for node in self._graph.nodes if node.op == "call_function"]
        writes = False
        while rest:
            node = rest.pop()
            if node.target in _NOTHING or _is_same_view(node):
                _replace(node, node.args[0])
            elif node.target is _aten._assert_tensor_metadata.default:
                self._graph.erase_node(node)
            elif node.target in _VIEWS:
                with self._graph.inserting_before(node):
                    shape = list(node.meta["val"].shape)
                    self._put(node, self._graph.call_function(_aten.reshape.default, (node.args[0], shape)))
            elif getattr(node.target, "overloadpacket", None) in _CASTS:
                self._cast(node)
            elif node.target is _aten.batch_norm.default:
                self._normalize(node)
            elif self._is_made_of_others(node.target):
                with suppress(_Kept):
                    rest += self._put_together(node)
            else:
                writes |= _writes(node)
        return writes

    def _is_made_of_others(self, target: Any) -> bool:
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable or target in _WHOLE:
            return False
        return target in self._table or (_is_composite(target) and target not in self._composites)

    def _cast(self, node: fx.Node) -> None:
        x, dtype = node.args[0], node.meta["val"].dtype
        with self._graph.inserting_before(node):
            if x.meta["val"].dtype == dtype:  # type: ignore[union-attr]
                self._put(node, self._graph.call_function(_aten.clone.default, (x,)))
            else:
                self._put(node, self._graph.call_function(_aten._to_copy.default, (x,), {"dtype": dtype}))

    def _normalize(self, node: fx.Node) -> None:
        x, weight, bias, mean, variance, training, momentum, eps = node.args[:8]
        if training:
            raise _SecondTrace
        function = _aten._native_batch_norm_legit_no_training.default
        with self._graph.inserting_before(node):
            new = self._graph.call_function(function, (x, weight, bias, mean, variance, momentum, eps))
            first = self._graph.call_function(operator.getitem, (new, 0))
        nothing = node.meta["val"].new_empty(0)
        new.meta = node.meta | {"val": (node.meta["val"], nothing, nothing)}
        self._put(node, first)

    def _put(self, node: fx.Node, new: fx.Node) -> None:
        new.meta = dict(node.meta)
        _replace(node, new)

    def _put_together(self, node: fx.Node) -> list[fx.Node]:
        """Puts in place of a node what its function is made of; these nodes."""
        given = list(dict.fromkeys(node.all_input_nodes))
        graph = self._graph_of(node, given)
        if any(inner.op == "call_function" and "val" not in inner.meta for inner in graph.nodes):
            raise _SecondTrace  # a function without a result: it checks one
        names = iter(given)
        copies: dict[fx.Node, fx.Node] = {}
        meta = {key: node.meta[key] for key in _META if key in node.meta}
        with self._graph.inserting_before(node):
            for inner in graph.nodes:
                if inner.op == "placeholder":
                    copies[inner] = next(names)
                elif inner.op == "call_function":
                    copies[inner] = self._graph.node_copy(inner, copies.__getitem__)
                    copies[inner].meta = meta | {"val": inner.meta["val"]}
                elif inner.op != "output":  # a constant
                    raise _SecondTrace
        results = fx.node.map_arg(graph.output_node().args[0], copies.__getitem__)
        made = [copies[inner] for inner in graph.nodes if inner.op == "call_function"]
        if isinstance(results, fx.Node):
            _replace(node, results)
            return made
        for user in list(node.users):
            if user.target is not operator.getitem:
                raise _SecondTrace
            _replace(user, results[user.args[1]])  # type: ignore[index]
        self._graph.erase_node(node)
        return made

    def _graph_of(self, node: fx.Node, given: list[fx.Node]) -> fx.Graph:
        """What a function is made of, with an input for each of the nodes that it is given."""
        target, places = node.target, {one: index for index, one in enumerate(given)}
        key = (target, repr(_placed(places, (node.args, node.kwargs))), *(_described(one.meta["val"]) for one in given))
        if key in self._traced:
            return self._traced[key]
        function = self._table.get(target) or target.decompose  # type: ignore[union-attr]

        def call(*tensors: Any) -> Any:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: tensors[places[one]])
            result = function(*args, **kwargs)
            if result is NotImplemented:
                raise _SecondTrace if _is_composite(target) else _Kept  # type: ignore[arg-type]
            return result

        values = [one.meta["val"] for one in given]
        for whole in (True, False):  # whether what torch makes of others by itself stays; some are made of themselves
            with self._fakes:  # type: ignore[union-attr]
                graph = make_fx(call, decomposition_table=dict(self._table), pre_dispatch=whole)(*values).graph
            if not any(inner.target is target for inner in graph.nodes):
                self._traced[key] = graph
                return graph
        raise _SecondTrace


def _placed(places: Mapping[fx.Node, int], value: Any) -> Any:
    return fx.node.map_arg(value, lambda one: f"%{places[one]}")


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.device
    return repr(value)


def _values(value: Any) -> Any:
    return fx.node.map_arg(value, lambda node: node.meta["val"])


def _replace(node: fx.Node, new: Any) -> None:
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _is_complex(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_complex()


def _writes(node: fx.Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and (node.target not in _NOTHING)
    )


def _is_same_view(node: fx.Node) -> bool:
    """Whether ``as_strided_`` states but strides of axes of size 1, by which torch notes a memory format."""
    if node.target is not _aten.as_strided_.default or len(node.args) > 3:
        return False
    x, size, stride = node.args
    value = x.meta["val"]  # type: ignore[union-attr]
    same = [a for a, n in zip(value.stride(), value.shape, strict=True) if n > 1]
    return list(value.shape) == size and same == [a for a, n in zip(stride, size, strict=True) if n > 1]  # type: ignore[arg-type]


def _is_composite(target: torch._ops.OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")


def _may_share(target: Any) -> bool:
    """Whether a result may lie in the memory of an argument. What torch makes of other functions does not say."""
    if not isinstance(target, torch._ops.OpOverload):
        return True
    returns = target._schema.returns
    aliases = any(one.alias_info is not None for one in returns)
    return aliases or (_is_composite(target) and target not in _NEW)


def _join(sharing: dict[fx.Node, list[fx.Node]], *nodes: fx.Node) -> None:
    first, second = (sharing[node] for node in nodes)
    if first is second:
        return
    first += second
    for node in second:
        sharing[node] = first


# ---------------------------------------------------------------- types


def promote(module: fx.GraphModule) -> None:
    """Has the functions of a graph given tensors and numbers of the type in which they compute, in place.

    The exporter's own pass runs the whole graph for that, with fake tensors.
    """
    from torch.onnx._internal.fx.passes import type_promotion

    table = type_promotion.TypePromotionTable()
    promoting = type_promotion._TypePromotionInterpreter(module, table)
    promoting.env = {node: node.meta.get("val") for node in module.graph.nodes}
    fakes = torch._guards.detect_fake_mode(list(promoting.env.values()))
    with fakes or nullcontext(), enable_python_dispatcher(), fx.traceback.preserve_node_meta():
        for node in list(module.graph.nodes):
            rule = type_promotion.get_type_promotion_rule(node, table) if node.op == "call_function" else None
            if rule is not None:
                with promoting._set_current_node(node):
                    promoting._maybe_promote_node(node, rule)
