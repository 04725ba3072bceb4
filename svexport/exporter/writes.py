"""Rewrites functions that write in place to functions that do not, in a graph of torch.export.

A write changes the tensor, the base that it is a view of, and all other views of that base. The new value is put back
into the base, and a view is taken again where it is read. torch's own way would trace the whole program once more.

Source: Torch, *functionalization*, https://dev-discuss.pytorch.org/t/functionalization-in-pytorch/965.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["NOTHING", "SecondTrace", "without_writes", "writes"]

_aten = torch.ops.aten

NOTHING = {
    _aten.alias.default,
    _aten.detach.default,
    _aten.detach_.default,
    _aten.lift_fresh.default,
}
"""Functions that return what they are given."""

_NEW = {
    *(_aten.batch_norm.default, _aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default),
    *(_aten.conv_transpose2d.input, _aten.group_norm.default, _aten.layer_norm.default, _aten.linear.default),
    *(_aten.matmul.default, _aten.max_pool2d.default),
}
"""Functions that torch makes of others, of which the results are memory of their own."""


class SecondTrace(Exception):
    """Something that needs a second trace of the whole program."""


def writes(node: fx.Node) -> bool:
    """Whether a node writes to what it is given."""
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and (node.target not in NOTHING)
    )


def is_composite(target: torch._ops.OpOverload) -> bool:
    """Whether torch makes a function of others by itself."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")


def without_writes(graph: fx.Graph, held: Collection[str], fakes: Any) -> fx.Graph:
    """A graph that computes the same and writes nothing in place.

    Args:
        held: names of inputs that are the program's own: parameters, buffers and constants.
        fakes: the mode of the values that nodes note.

    Raises:
        SecondTrace: where one of those is written to, or what is read may or may not have been.
    """
    return _Functional(graph, held, fakes).run()


class _Memory:
    """The memory shared by a tensor and its views."""

    def __init__(self, held: bool) -> None:
        self.held = held
        self.version = 0  # how often it was written to
        self.lost = False  # whether its numbers are no longer known
        self.others = {self}  # which may be this one

    def join(self, other: _Memory) -> None:
        if other not in self.others:
            self.others |= other.others
            for one in other.others:
                one.others = self.others


class _Functional:
    def __init__(self, graph: fx.Graph, held: Collection[str], fakes: Any) -> None:
        self._graph, self._held, self._fakes = graph, held, fakes
        self._new = fx.Graph()
        self._memory: dict[fx.Node, _Memory] = {}
        self._wholes: dict[fx.Node, fx.Node] = {}  # of views
        self._values: dict[fx.Node, tuple[int, fx.Node]] = {}  # in the new graph, at a version of the memory

    def run(self) -> fx.Graph:
        for node in self._graph.nodes:
            if writes(node):
                self._write(node)
            elif node.target in NOTHING or _is_view(node):
                self._view(node, node.args[0])
            else:
                self._copy(node)
        self._new.set_codegen(self._graph._codegen)
        return self._new

    def _copy(self, node: fx.Node) -> None:
        memory = _Memory(held=node.op == "placeholder" and node.name in self._held)
        self._memory[node] = memory
        self._values[node] = 0, self._new.node_copy(node, self._now)
        if node.op == "call_function" and _may_share(node.target):
            for given in node.all_input_nodes:
                memory.join(self._memory[given])

    def _view(self, node: fx.Node, whole: Any) -> None:
        self._wholes[node], self._memory[node] = whole, self._memory[whole]
        self._now(node)

    def _now(self, node: fx.Node) -> fx.Node:
        """The node that holds a tensor's current numbers."""
        memory = self._memory[node]
        if memory.lost:
            raise SecondTrace
        version, value = self._values.get(node, (None, None))
        if value is None or version != memory.version:
            same = node.target in NOTHING or writes(node)
            value = self._now(self._wholes[node]) if same else self._taken(node)
            self._values[node] = memory.version, value
        return value

    def _taken(self, node: fx.Node) -> fx.Node:
        """A view of its whole, which lies in memory as it does no longer once it was put together of others."""
        copy = self._new.node_copy(node, self._now)
        if node.target is _aten.view.default and self._memory[node].version:
            copy.target = _aten.reshape.default
        return copy

    def _write(self, node: fx.Node) -> None:
        written = [node.args[0]]
        while written[-1] in self._wholes:
            written.append(self._wholes[written[-1]])  # type: ignore[index,arg-type]
        memory = self._memory[written[0]]  # type: ignore[index]
        if any(other.held for other in memory.others):
            raise SecondTrace
        before = [self._now(one) for one in written]  # type: ignore[arg-type]
        value = self._functional(node)
        for other in memory.others - {memory}:
            other.lost = True
        memory.version += 1
        for index, one in enumerate(written):
            self._values[one] = memory.version, value  # type: ignore[index]
            if index + 1 < len(written):
                value = self._put_back(one, before[index + 1], value)  # type: ignore[arg-type]
        self._view(node, written[0])

    def _functional(self, node: fx.Node) -> fx.Node:
        """A node that computes what another one writes to its first argument."""
        schema = node.target._schema  # type: ignore[union-attr]
        written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
        namespace, _, name = schema.name.partition("::")
        packet = getattr(_aten, name.removesuffix("_"), None) if namespace == "aten" and name.endswith("_") else None
        function = _overload(packet, schema)
        if function is None or written != [index == 0 for index in range(len(written))]:
            raise SecondTrace
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._now)
        with self._fakes:
            value = function(*_values(args), **_values(kwargs))
        before = node.meta["val"]
        if not isinstance(value, Tensor) or (value.dtype, value.shape) != (before.dtype, before.shape):
            raise SecondTrace
        return self._call(function, args, kwargs, node.meta | {"val": value})

    def _put_back(self, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
        """The value of a base when a view of it has other numbers."""
        if view.target in NOTHING or writes(view):
            return part
        call = _PUT_BACK.get(view.target)  # type: ignore[arg-type]
        if call is None:
            raise SecondTrace
        function, args = call(whole, part, *view.args[1:])
        return self._call(function, args, {}, view.meta | {"val": whole.meta["val"]})

    def _call(self, function: Any, args: Any, kwargs: Any, meta: dict[str, Any]) -> fx.Node:
        new = self._new.call_function(function, args, kwargs)
        new.meta = meta
        return new


def _overload(packet: Any, schema: Any) -> Any:
    """The overload that computes the same but does not write: ``pow.Tensor_Scalar`` for ``pow_.Scalar``; or None."""
    name, wanted = schema.overload_name or "default", _arguments(schema)
    found = [] if packet is None else [getattr(packet, one) for one in packet.overloads()]
    same = [one for one in found if _arguments(one._schema) == wanted]
    named = [one for one in same if one._overloadname == name]
    new = [one for one in same if not any(value.alias_info for value in one._schema.returns)]
    return next(iter(named + new), None)


def _arguments(schema: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in schema.arguments]


def _values(value: Any) -> Any:
    return fx.node.map_arg(value, lambda node: node.meta["val"])


def _is_view(node: fx.Node) -> bool:
    """Whether a node is a view of its first argument, the same whatever the strides of that are."""
    target = node.target
    if target in _TURNED:
        return not node.kwargs
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or is_composite(target):
        return False
    returns = target._schema.returns
    alone = len(returns) == 1 and isinstance(returns[0].type, torch.TensorType) and returns[0].alias_info is not None
    return alone and target not in {_aten.as_strided.default, _aten.view.dtype} and not node.kwargs


def _may_share(target: Any) -> bool:
    """Whether a result may lie in the memory of an argument. What torch makes of other functions does not say."""
    if not isinstance(target, torch._ops.OpOverload):
        return True
    returns = target._schema.returns
    aliases = any(one.alias_info is not None for one in returns)
    return aliases or (is_composite(target) and target not in _NEW)


def _reshaped(whole: fx.Node, part: fx.Node, *_: Any) -> Any:
    return _aten.reshape.default, (part, list(whole.meta["val"].shape))


def _permuted(_: fx.Node, part: fx.Node, axes: list[int]) -> Any:
    axes = [axis % len(axes) for axis in axes]
    return _aten.permute.default, (part, [axes.index(axis) for axis in range(len(axes))])


_TURNED: dict[Any, Callable[..., Any]] = {
    **{one: lambda *axes, one=one: (one, axes) for one in (_aten.mT.default, _aten.numpy_T.default)},
    **{one: lambda *axes, one=one: (one, axes) for one in (_aten.swapaxes.default, _aten.swapdims.default)},
    _aten.movedim.int: lambda source, destination: (_aten.movedim.int, (destination, source)),
}
"""Functions that torch makes of others, and which are views always: the call that turns the axes back."""


def _turned_back(target: Any) -> Callable[..., Any]:
    def call(_: fx.Node, part: fx.Node, *args: Any) -> Any:
        function, given = _TURNED[target](*args)
        return function, (part, *given)

    return call


_PUT_BACK: dict[Any, Callable[..., Any]] = {
    **{target: _turned_back(target) for target in _TURNED},
    _aten.permute.default: _permuted,
    _aten.select.int: lambda whole, part, *args: (_aten.select_scatter.default, (whole, part, *args)),
    _aten.slice.Tensor: lambda whole, part, *args: (_aten.slice_scatter.default, (whole, part, *args)),
    _aten.t.default: lambda _, part: (_aten.t.default, (part,)),
    _aten.transpose.int: lambda _, part, *axes: (_aten.transpose.int, (part, *axes)),
    **dict.fromkeys((_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims), _reshaped),
    **dict.fromkeys((_aten.unsqueeze.default, _aten.view.default), _reshaped),
}
"""By view function, the call that returns the base with other numbers in place of the view."""
