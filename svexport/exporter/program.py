"""Rewrites a torch.export program node by node to functions that the exporter supports.

``ExportedProgram.run_decompositions`` would trace the whole program a second time for this. That takes longer than the
first trace, although it leaves most nodes unchanged.
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

from svexport.exporter.writes import NOTHING, SecondTrace, is_composite, without_writes, writes

__all__ = ["decompose_nodes", "promote"]


class _Kept(Exception):
    """A function that stays as it is: what the table has for it does not take this call."""


_aten = torch.ops.aten

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

_SHAPED = {_aten.expand.default, _aten.reshape.default, _aten.view.default}
"""Functions that return what they are given where it has the shape that they are told."""

_CASTS = {_aten.to, _aten.type_as}

_TRUTHS = {_aten.all, _aten.any}
"""Functions whose result is of booleans, or of uint8 where that is what they are given: a conversion's business."""

_WHOLE = _EQUAL | {_aten.reshape.default}
"""Functions that stay as they are, though torch makes them of others."""

_META = ("from_node", "nn_module_stack", "seq_nr", "source_fn_stack", "stack_trace", "torch_fn")
"""Metadata that the nodes of a function inherit from the node that they replace."""


def decompose_nodes(
    program: torch.export.ExportedProgram, table: Mapping[Any, Callable[..., Any]], composites: Collection[Any]
) -> bool:
    """Decomposes a program in place; False where it needs ``run_decompositions`` and is the same program still.

    That is so of dynamic sizes, of graphs within graphs, of transforms of ``torch.func``, of complex numbers, and of
    writes to parameters, or to what may or may not share memory with what is read later.

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
    except SecondTrace:
        return False
    finally:
        _name_outputs(program)
    return True


def _name_outputs(program: torch.export.ExportedProgram) -> None:
    """Makes the signature name the nodes that are the program's outputs now."""
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
        self._module = program.graph_module
        self._graph = self._module.graph
        self._table = table
        self._composites = composites
        inputs = {
            spec.arg.name
            for spec in program.graph_signature.input_specs
            if spec.kind == InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument)
        }
        self._held = {n.name for n in self._graph.nodes if n.op == "placeholder" and n.name not in inputs}
        values = [node.meta.get("val") for node in self._graph.nodes if node.op == "placeholder"]
        self._fakes = torch._guards.detect_fake_mode(values)
        self._traced: dict[Any, fx.Graph] = {}

    def run(self) -> None:
        if self._fakes is None or any(map(_is_complex, self._graph.nodes)):  # of which torch's own makes constants
            raise SecondTrace
        if any(map(_is_transformed, self._graph.nodes)):
            raise SecondTrace
        if any(map(writes, self._graph.nodes)):
            self._write_elsewhere()
        while self._expand():  # what writes became is made of others, too
            self._write_elsewhere()
        for node in list(self._graph.nodes):
            if node.target is _aten.dropout.default and node.args[2]:
                raise SecondTrace
            if node.target in _EQUAL or (node.target in _SHAPED and _same_shape(node)):
                _replace(node, node.args[0])
        self._graph.eliminate_dead_code()

    def _write_elsewhere(self) -> None:
        self._graph = without_writes(self._graph, self._held, self._fakes)
        self._module.graph = self._graph

    # ------------------------------------------------------------ functions made of others

    def _expand(self) -> bool:
        """Replaces functions by their decompositions; returns whether any of these writes in place."""
        rest = [node for node in self._graph.nodes if node.op == "call_function"]
        written = False
        while rest:
            node = rest.pop()
            if node.target in NOTHING or _is_same_view(node):
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
                written |= writes(node)
        return written

    def _is_made_of_others(self, target: Any) -> bool:
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable or target in _WHOLE:
            return False
        return target in self._table or (is_composite(target) and target not in self._composites)

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
            raise SecondTrace
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
        """Replaces a node by the decomposition of its function; returns the new nodes."""
        given = list(dict.fromkeys(node.all_input_nodes))
        graph = self._graph_of(node, given)
        if any(inner.op == "call_function" and "val" not in inner.meta for inner in graph.nodes):
            raise SecondTrace  # a function without a result: it checks one
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
                    raise SecondTrace
        results = fx.node.map_arg(graph.output_node().args[0], copies.__getitem__)
        made = [copies[inner] for inner in graph.nodes if inner.op == "call_function"]
        if isinstance(results, fx.Node):
            _replace(node, results)
            return made
        for user in list(node.users):
            if user.target is not operator.getitem:
                raise SecondTrace
            _replace(user, results[user.args[1]])  # type: ignore[index]
        self._graph.erase_node(node)
        return made

    def _graph_of(self, node: fx.Node, given: list[fx.Node]) -> fx.Graph:
        """The decomposition of a function, with an input for each of the nodes that it is given."""
        target, places = node.target, {one: index for index, one in enumerate(given)}
        key = (target, repr(_placed(places, (node.args, node.kwargs))), *(_described(one.meta["val"]) for one in given))
        if key in self._traced:
            return self._traced[key]
        function = self._table.get(target) or target.decompose  # type: ignore[union-attr]

        def call(*tensors: Any) -> Any:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: tensors[places[one]])
            result = function(*args, **kwargs)
            if result is NotImplemented:
                raise SecondTrace if is_composite(target) else _Kept  # type: ignore[arg-type]
            return result

        values = [one.meta["val"] for one in given]
        for whole in (True, False):  # whether what torch makes of others by itself stays; some are made of themselves
            with self._fakes:  # type: ignore[union-attr]
                graph = make_fx(call, decomposition_table=dict(self._table), pre_dispatch=whole)(*values).graph
            if not any(inner.target is target for inner in graph.nodes):
                self._traced[key] = graph
                return graph
        raise SecondTrace


def _placed(places: Mapping[fx.Node, int], value: Any) -> Any:
    return fx.node.map_arg(value, lambda one: f"%{places[one]}")


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.device
    return repr(value)


def _replace(node: fx.Node, new: Any) -> None:
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _same_shape(node: fx.Node) -> bool:
    return node.meta["val"].shape == node.args[0].meta["val"].shape  # type: ignore[union-attr]


def _is_complex(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_complex()


def _is_transformed(node: fx.Node) -> bool:
    """Whether a node is within ``torch.vmap``, where it has other axes than what it notes."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def _is_same_view(node: fx.Node) -> bool:
    """Whether ``as_strided_`` states but strides of axes of size 1, by which torch notes a memory format."""
    if node.target is not _aten.as_strided_.default or len(node.args) > 3:
        return False
    x, size, stride = node.args
    value = x.meta["val"]  # type: ignore[union-attr]
    same = [a for a, n in zip(value.stride(), value.shape, strict=True) if n > 1]
    return list(value.shape) == size and same == [a for a, n in zip(stride, size, strict=True) if n > 1]  # type: ignore[arg-type]


# ---------------------------------------------------------------- types


_AS_CAT = torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND.NO_OPMATH
"""The type promotion with which the exporter joins tensors of several types."""


def promote(module: fx.GraphModule) -> None:
    """Has the functions of a graph given tensors and numbers of the type in which they compute, in place.

    The exporter's own pass runs the whole graph for that, with fake tensors.
    """
    from torch.onnx._internal.fx.passes import type_promotion

    table = type_promotion.TypePromotionTable()
    table.add_rule(type_promotion.ElementwiseTypePromotionRule("aten", "stack", [0], [], _AS_CAT))
    promoting = type_promotion._TypePromotionInterpreter(module, table)
    promoting.env = {node: node.meta.get("val") for node in module.graph.nodes}
    fakes = torch._guards.detect_fake_mode(list(promoting.env.values()))
    with fakes or nullcontext(), enable_python_dispatcher(), fx.traceback.preserve_node_meta():
        for node in list(module.graph.nodes):
            if node.target is _aten.clamp.default and any(isinstance(bound, float) for bound in node.args):
                # of one number and another that it makes a tensor there is no clamp
                node.args = tuple(float(bound) if isinstance(bound, int) else bound for bound in node.args)
            known = node.op != "call_function" or getattr(node.target, "overloadpacket", None) in _TRUTHS
            rule = None if known else type_promotion.get_type_promotion_rule(node, table)
            if rule is not None:
                with promoting._set_current_node(node):
                    promoting._maybe_promote_node(node, rule)
