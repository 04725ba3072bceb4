"""Records the forward of one module as a graph of torch's functions, with the values that it computed."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from svexport.exporter.patterns.guard import Guard, NotTraced
from svexport.tracing.arguments import rebuild
from svexport.tracing.as_in_files import AsInFiles
from svexport.tracing.swapped import swapped

__all__ = ["Argument", "Comparison", "NotTraced", "Traced", "is_literal", "operand", "trace"]


@dataclass(frozen=True)
class Argument:
    """One argument of a forward, as the graph was recorded for it.

    Attributes:
        name: name of the parameter.
        length: length of a list or tuple of tensors; None for anything else.
        ranks: ranks of the tensors.
        constant: whether it is the constant ``value`` instead of tensors.
        value: None, a bool, a number, a string, or lists, tuples and dictionaries of them.
    """

    name: str
    length: int | None = None
    ranks: tuple[int, ...] = ()
    constant: bool = False
    value: Any = None


@dataclass(frozen=True)
class Comparison:
    """A comparison of sizes of arguments, on which a forward branched.

    Attributes:
        left, right: a number; or an argument or attribute, by its node, and the dimension whose size it is.
        sign: the operator as Python text.
        holds: the outcome.
    """

    left: int | tuple[fx.Node, int]
    sign: str
    right: int | tuple[fx.Node, int]
    holds: bool


_CHANGES = {getattr(operator, f"i{name}") for name in ("add", "sub", "mul", "truediv", "pow", "and", "or")}


_COMPARISONS = {
    operator.eq: "==",
    operator.ne: "!=",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
}
_RANKS = {"dim", "ndimension"}
_CHANGED = "its forward changes tensors in place"


_BY_SIZE: set[Any] = {"unbind", "split", "chunk", "tensor_split", "hsplit", "vsplit", "dsplit"}
_BY_SIZE |= {getattr(torch, name) for name in _BY_SIZE} | {"tolist"}
"""Functions whose number of results depends on sizes or values."""


class _Proxy(fx.Proxy):
    """A proxy that knows the length of a shape or list, which follows from the ranks that the graph is for."""

    def __len__(self) -> int:
        found = self.tracer.length(self.node)  # type: ignore[attr-defined]
        return super().__len__() if found is None else found

    def __setitem__(self, index: Any, value: Any) -> None:
        raise NotTraced(_CHANGED)


class _Tracer(fx.Tracer):
    """Records one module's own code; its submodules are called unchanged, with their hooks.

    It also computes what it records, because code depends, for example, on the length of a shape.
    """

    proxy_buffer_attributes = True

    def __init__(
        self,
        arguments: Mapping[str, Any],
        signature: inspect.Signature,
        guard: Guard,
        inline: bool,
        leaves: Iterable[Callable[..., Any]],
    ) -> None:
        super().__init__(autowrap_modules=(math,), autowrap_functions=tuple(leaves))
        self.inline = inline
        self.inlined: dict[str, None] = {}
        self.given, self.signature, self.guard = arguments, signature, guard
        self.arguments: list[Argument] = []
        self.values: dict[fx.Node, Any] = {}
        self.versions: dict[fx.Node, int] = {}
        self.sizes: dict[tuple[fx.Node, int], int] = {}
        self.comparisons: dict[Comparison, None] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        library = type(m).__module__.partition(".")[0] in ("torch", "svexport")
        leaf = not self.inline or (library and not isinstance(m, nn.Sequential))
        if not leaf:
            self.inlined[module_qualified_name] = None
        return leaf

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> Any:
        sizes = [self._size(a) for a in args] if kind == "call_function" and target in _COMPARISONS else [None]
        if not any(size is None for size in sizes):
            left, right = (size if isinstance(size, int) else size[:2] for size in sizes)  # type: ignore[index]
            holds = bool(target(*(size if isinstance(size, int) else size[2] for size in sizes)))  # type: ignore[index]
            self.comparisons[Comparison(left, _COMPARISONS[target], right, holds)] = None
            return holds
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **more)
        if kind.startswith("call_"):
            if any(n not in self.values for n in proxy.node.all_input_nodes):
                raise NotTraced("its forward makes tensors of its own")
            given = fx.node.map_arg((proxy.node.args, proxy.node.kwargs), self.values.__getitem__)
            self.guard.asleep = True
            try:
                with AsInFiles(), _compiling(False):
                    self._is(proxy.node, _called(self.root, proxy.node, *given))
            finally:
                self.guard.asleep = False
        elif kind == "get_attr":
            self._is(proxy.node, functools.reduce(_held, target.split("."), self.root))
        return proxy

    def _is(self, node: fx.Node, value: Any) -> None:
        self.values[node] = value
        if isinstance(value, Tensor):
            self.versions[node] = value._version

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # Calls inside a submodule are not recorded while it is computed.
        return forward(*args, **kwargs) if self.guard.asleep else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        return attr_val if self.guard.asleep else super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def to_bool(self, obj: Any) -> bool:
        """The outcome of a comparison of ranks, which are fixed for the graph."""
        if obj.node.target in _COMPARISONS and all(n.target in _RANKS for n in obj.node.all_input_nodes):
            return bool(self.values[obj.node])
        return super().to_bool(obj)

    def iter(self, obj: Any) -> Iterator[Any]:
        length = self.length(obj.node)
        return super().iter(obj) if length is None else iter([obj[i] for i in range(length)])

    def length(self, node: fx.Node) -> int | None:
        """The length of a value, if it follows from ranks, or is noted as a size that the graph is for.

        Raises:
            NotTraced: if it follows from other sizes.
        """
        value = self.values.get(node)
        parts = isinstance(value, (tuple, list)) and node.target in _BY_SIZE
        if parts and not isinstance(operand(node, 1, "split_size"), (tuple, list)):
            raise NotTraced(f"its forward counts what {getattr(node.target, '__name__', node.target)} returns")
        if isinstance(value, Tensor) and value.dim():
            place = self._sized(node)
            if place is None:
                raise NotTraced("its forward counts the rows of a tensor that it computed")
            self.sizes[place] = value.shape[0]
            return value.shape[0]
        return len(value) if isinstance(value, (tuple, list)) else None

    def _size(self, value: Any) -> int | tuple[fx.Node, int, int] | None:
        """A number; or the argument or attribute whose size the value is, with its dimension and the size."""
        if type(value) is int:
            return value
        if not isinstance(value, fx.Proxy) or not isinstance(size := self.values.get(value.node), int):
            return None
        node = value.node
        if node.target is operator.getitem:
            shape, dim = node.args
            whole = isinstance(shape, fx.Node) and (
                shape.args[1:] == ("shape",)
                if shape.target is getattr
                else shape.target == "size" and len(shape.args) == 1
            )
            of = shape.args[0] if whole else None  # type: ignore[union-attr]
        else:
            of, dim = node.args if node.target == "size" and len(node.args) == 2 else (None, None)
        if type(dim) is not int or not isinstance(of, fx.Node) or (place := self._sized(of)) is None:
            return None
        return place[0], place[1] + dim % self.values[of].dim(), size

    def _sized(self, node: fx.Node) -> tuple[fx.Node, int] | None:
        """The argument or attribute, and its dimension, that gives a tensor its first size: itself, or a row of it."""
        if node.op in ("placeholder", "get_attr"):
            return node, 0
        row = node.target is operator.getitem and isinstance(node.args[1], int)
        above = self._sized(node.args[0]) if row else None  # type: ignore[arg-type]
        return None if above is None else (above[0], above[1] + 1)

    def create_args_for_root(self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None) -> Any:
        values = {name: self._placeholder(name, value) for name, value in self.given.items()}
        keywords = {name for name, p in self.signature.parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
        named = {name: value for name, value in values.items() if name in keywords}
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                keywords.add(name)
                named |= values[name]
        function = functools.partial(root_fn, **named) if named else root_fn
        return function, [self.root, *(value for name, value in values.items() if name not in keywords)]

    def text(self, graph: fx.Graph) -> tuple[str, list[str]]:
        """The text of a graph, and the sizes and comparisons that it is for."""
        return graph.python_code("self").src, [*map(str, self.sizes.items()), *map(str, self.comparisons)]

    def _placeholder(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.arguments.append(Argument(name, ranks=(value.dim(),)))
            return self._proxy(value)
        if type(value) in (list, tuple) and value and all(isinstance(t, Tensor) for t in value):
            self.arguments.append(Argument(name, len(value), tuple(t.dim() for t in value)))
            return type(value)(self._proxy(t) for t in value)
        if is_literal(value):
            self.arguments.append(Argument(name, constant=True, value=value))
            return value
        raise NotTraced(f"expects tensors, lists of them or constants as arguments, got {name}={type(value).__name__}")

    def _proxy(self, value: Tensor) -> fx.Proxy:
        proxy = self.create_proxy("placeholder", f"given_{len(self.values)}", (), {})
        self._is(proxy.node, value)
        return proxy


def is_literal(value: Any) -> bool:
    """Whether Python can read back a value's ``repr``: finite numbers, strings, and containers of them."""
    if type(value) in (list, tuple, set, dict):
        held = [*value, *value.values()] if isinstance(value, dict) else value
        return all(map(is_literal, held))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def _called(root: nn.Module, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if node.op == "call_function":
        return node.target(*args, **kwargs)  # type: ignore[operator]
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return root.get_submodule(str(node.target))(*args, **kwargs)


def _held(holder: Any, name: str) -> Any:
    """An attribute, without calling a module's ``__getattr__``, which records."""
    held = vars(holder)
    kinds = ("_parameters", "_buffers", "_modules") if isinstance(holder, nn.Module) else ()
    return next((held[kind][name] for kind in kinds if name in held[kind]), held.get(name))


@dataclass
class Traced:
    """A forward as a graph.

    Attributes:
        module: the module whose forward it is.
        graph: calls of torch's functions and methods, and of submodules.
        arguments: arguments of the forward, in the order of the graph's placeholders.
        values: the computed value of each node.
        changed: nodes whose value was changed in place later.
        reads: attributes that the forward read and that are neither tensors nor modules.
        inlined: names of the submodules whose own code is in the graph.
        sizes: sizes of arguments and attributes that the graph is for, by node and dimension.
        comparisons: comparisons of sizes, which must have the same outcome.
    """

    module: nn.Module
    graph: fx.Graph
    arguments: tuple[Argument, ...]
    values: dict[fx.Node, Any] = field(default_factory=dict)
    changed: set[fx.Node] = field(default_factory=set)
    reads: frozenset[str] = frozenset()
    inlined: tuple[str, ...] = ()
    sizes: dict[tuple[fx.Node, int], int] = field(default_factory=dict)
    comparisons: tuple[Comparison, ...] = ()
    _ancestors: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)

    def tensor(self, node: Any) -> Tensor | None:
        """The value of a node that is a tensor."""
        value = self.values.get(node) if isinstance(node, fx.Node) else None
        return value if isinstance(value, Tensor) else None

    def forget(self) -> None:
        """Drops cached ancestors; call it when the graph has changed."""
        self._ancestors.clear()

    def ancestors(self, node: fx.Node) -> frozenset[fx.Node]:
        """A node and all nodes that it is computed from."""
        if node not in self._ancestors:
            for each in self.graph.nodes:
                known = [self._ancestors[n] for n in each.all_input_nodes if n in self._ancestors]
                self._ancestors.setdefault(each, frozenset({each}).union(*known))
                if each is node:
                    break
        return self._ancestors[node]

    def region(
        self, output: fx.Node, given: Iterable[fx.Node], modules: Set[str] = frozenset()
    ) -> list[fx.Node] | None:
        """The nodes between ``given`` and ``output``, in order; None if the output depends on anything else.

        Sizes, dtypes and devices of other values count as known; so do constants made from these, and ``modules``.
        """
        stop, found, pending = set(given), set(), [output]
        while pending:
            node = pending.pop()
            if node in found or node in stop:
                continue
            if node.op in ("placeholder", "get_attr") or node in self.changed:
                return None
            called = self.called(node)
            if called is not None and node.target not in modules and not isinstance(called, _STATELESS):
                return None
            found.add(node)
            inputs = node.all_input_nodes
            pending += [n for n in inputs if not self._only_like(node, n)]
        return [node for node in self.graph.nodes if node in found]

    def _only_like(self, node: fx.Node, argument: fx.Node) -> bool:
        """Whether a node reads only the shape, dtype and device of an argument."""
        if node.target is getattr:
            return node.args[1] in ("shape", "dtype", "device", "ndim")
        if node.op == "call_method" and node.args and node.args[0] is argument:
            return node.target in _LIKE and argument not in (*node.args[1:], *node.kwargs.values())
        return node.target in _LIKES and node.args[0] is argument

    def called(self, node: fx.Node) -> nn.Module | None:
        """The submodule that a node calls; None for a node that calls none."""
        return self.module.get_submodule(str(node.target)) if node.op == "call_module" else None

    def evaluate(
        self, output: fx.Node, given: Mapping[fx.Node, Any], modules: dict[str, nn.Module] | None = None
    ) -> Any:
        """A node's value for other values of some nodes, computed in float64 whatever the model's dtype.

        Nodes that do not depend on these keep their recorded values.

        Args:
            modules: float64 copies of submodules, by name; missing ones are added to it.
        """
        values: dict[fx.Node, Any] = dict(given)
        needed: set[fx.Node] = set()
        pending = [output]
        while pending:
            if (node := pending.pop()) not in needed and node not in given:
                needed.add(node)
                pending += node.all_input_nodes
        modules = {} if modules is None else modules

        def value_of(node: fx.Node) -> Any:
            return values[node] if node in values else _double(self.values[node])

        for node in self.graph.nodes:
            if node not in needed or not any(n in values for n in node.all_input_nodes):
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
            if (called := self.called(node)) is not None:
                name = str(node.target)
                if name not in modules:
                    modules[name] = copy.deepcopy(called).double()
                values[node] = modules[name](*args, **kwargs)
            else:
                values[node] = _called(self.module, node, args, kwargs)
        return value_of(output)


_STATELESS = (nn.Sigmoid, nn.Softmax, nn.ReLU, nn.Identity, nn.Flatten, nn.Unflatten)
_LIKE = {"size", "dim", "ndimension", "numel", "new_tensor", "new_zeros", "new_ones", "new_full", "new_empty"}
_LIKES = {torch.zeros_like, torch.ones_like, torch.full_like}


def _double(value: Any) -> Any:
    return rebuild(value, lambda t: t.detach().double() if t.is_floating_point() else t.detach())


def operand(node: fx.Node, index: int, name: str) -> Any:
    """An argument of a node, by position or name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name)


def _compiling(on: bool) -> AbstractContextManager[None]:
    """Sets what ``torch.compiler.is_compiling`` returns."""
    return swapped(torch.compiler, _is_compiling_flag=on)


@contextmanager
def _modes(module: nn.Module, training: bool) -> Iterator[None]:
    before = {m: m.training for m in module.modules()}
    try:
        for m in before:
            m.training = False  # submodules are computed in eval mode
        module.training = training
        yield
    finally:
        for m, mode in before.items():
            m.training = mode


def trace(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    inline: bool = False,
    leaves: Iterable[Callable[..., Any]] = (),
) -> Traced:
    """Records a module's forward.

    Args:
        module: in any mode; its forward must be one graph in both.
        args, kwargs: the arguments of the call.
        inline: whether to record its submodules too, down to torch's.
        leaves: functions of the forward's own module that are recorded as one call.

    Raises:
        NotTraced: if the forward is no fixed sequence of torch functions and submodules: it branches on values or
            sizes, changes its own state, prints, draws random numbers or sets a mode.
    """
    if "forward" in vars(module):
        raise NotTraced("it has a forward of its own")
    signature = inspect.signature(module.forward)
    kinds = {p.kind for p in signature.parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}:
        raise NotTraced("its forward takes any number of arguments without names")
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    recorded = []
    for training in (True, False):
        with _modes(module, training):
            recorded.append(_record(module, bound.arguments, signature, inline, leaves))
    (trained, of_training, _), (tracer, graph, reads) = recorded
    if tracer.guard.asks_whether_compiling:
        with _modes(module, False), _compiling(True):
            compiled, of_compiling, _ = _record(module, bound.arguments, signature, inline, leaves)
        if compiled.text(of_compiling) != tracer.text(graph):
            raise NotTraced("its forward takes another path when it is compiled")
    _join(of_training, graph, tracer)
    if trained.text(of_training) != tracer.text(graph):
        raise NotTraced("its forward takes another path in training")
    changed = {n for n, version in tracer.versions.items() if tracer.values[n]._version != version}
    inlined = tuple(tracer.inlined)
    return Traced(
        module,
        graph,
        tuple(tracer.arguments),
        tracer.values,
        changed,
        reads,
        inlined,
        tracer.sizes,
        tuple(tracer.comparisons),
    )


def _join(of_training: fx.Graph, graph: fx.Graph, tracer: _Tracer) -> None:
    """Makes the graphs read ``self.training`` where they differ in one constant: True in training, False otherwise.

    A forward passes such a constant to functions such as ``F.dropout``.
    """

    def differs(a: Any, b: Any) -> bool:
        return a is True and b is False

    nodes = list(zip(of_training.nodes, graph.nodes, strict=False))
    if len(of_training.nodes) != len(graph.nodes):
        return
    mode: dict[fx.Graph, fx.Node] = {}
    for theirs, ours in nodes:
        if ours.op != "call_function" or theirs.target is not ours.target or len(theirs.args) != len(ours.args):
            continue
        places = [i for i, pair in enumerate(zip(theirs.args, ours.args, strict=True)) if differs(*pair)]
        names = [k for k in ours.kwargs if differs(theirs.kwargs.get(k), ours.kwargs[k])]
        for node in (theirs, ours) if places or names else ():
            if node.graph not in mode:
                first = next(n for n in node.graph.nodes if n.op != "placeholder")
                with node.graph.inserting_before(first):
                    mode[node.graph] = node.graph.get_attr("training")
            for i in places:
                node.update_arg(i, mode[node.graph])
            for k in names:
                node.update_kwarg(k, mode[node.graph])
    if graph in mode:
        tracer.values[mode[graph]] = False


def _record(
    module: nn.Module,
    arguments: Mapping[str, Any],
    signature: inspect.Signature,
    inline: bool,
    leaves: Iterable[Callable[..., Any]],
) -> tuple[_Tracer, fx.Graph, frozenset[str]]:
    before = _state(module)
    reads: set[str] = set()
    kind: Any = type(module)

    def read(self: Any, name: str) -> Any:
        if not name.startswith("_") and name in object.__getattribute__(self, "__dict__"):
            reads.add(name)
        return kind.__getattribute__(self, name)

    guard, profile, collects = Guard(), sys.getprofile(), gc.isenabled()
    tracer = _Tracer(arguments, signature, guard, inline, leaves)
    try:
        names = {"__getattribute__": read, "__module__": kind.__module__}
        module.__class__ = type(kind)(kind.__name__, (_Unseen, kind), names)
    except TypeError as error:
        raise NotTraced(f"its class cannot be watched: {error}") from None
    try:
        gc.disable()  # callbacks of a collection, which may read a clock, are no part of the forward
        sys.setprofile(guard)
        graph = tracer.trace(module)
    except NotTraced:
        raise
    except Exception as error:  # noqa: BLE001 - a forward may do anything with a proxy that is no tensor
        text = str(error).strip().partition("\n")[0].partition(". ")[0]
        raise NotTraced(f"its forward is no fixed graph: {type(error).__name__}: {text}") from None
    finally:
        sys.setprofile(profile)
        if collects:
            gc.enable()
        module.__class__ = kind
    if guard.found:
        raise NotTraced(f"its forward uses {guard.found}")
    if before != _state(module):
        raise NotTraced("its forward changes the module")
    if any(node.op == "get_attr" and not _is_registered(module, str(node.target)) for node in graph.nodes):
        raise NotTraced("its forward makes tensors of its own")
    if any(node.target in _CHANGES or node.target is operator.setitem for node in graph.nodes):
        raise NotTraced(_CHANGED)
    for node in reversed(graph.nodes):
        asked = node.target in _RANKS | _COMPARISONS.keys() and not isinstance(tracer.values[node], Tensor)
        if not node.users and (asked or node.target in (getattr, operator.getitem)):  # left from unpacking a shape
            graph.erase_node(node)
    return tracer, graph, frozenset(reads - {"training"})


class _Unseen:
    """Skips the base's ``__init_subclass__`` hook for the class that watches a module."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass


def _state(module: nn.Module) -> dict[str, Any]:
    """The state that a forward could change, in a form that can be compared."""

    def shallow(value: Any) -> Any:
        if isinstance(value, (list, tuple, set)):
            return type(value).__name__, [id(v) for v in value]
        return {k: id(v) for k, v in value.items()} if isinstance(value, dict) else id(value)

    return {
        f"{name}.{key}": shallow(value)
        for name, m in module.named_modules()
        for key, value in vars(m).items()
        if not key.startswith("_tensor_constant")
    }


def _is_registered(module: nn.Module, name: str) -> bool:
    holder = module.get_submodule(name.rpartition(".")[0])
    last = name.rpartition(".")[2]
    return last in holder._parameters or last in holder._buffers
