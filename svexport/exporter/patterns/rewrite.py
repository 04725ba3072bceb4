"""Makes classes whose forward is a changed graph, next to the class that the author wrote."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import linecache
import operator
import re
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from svexport.exporter.patterns.pattern import has_plain_gradients, is_bare
from svexport.exporter.patterns.traced import NotTraced, Traced, is_literal
from svexport.ops._op import tracing

__all__ = ["FILES", "Rewrite", "apply", "replace_nodes", "rewrite_of", "weights_of", "whole_of"]


@dataclass(frozen=True)
class Rewrite:
    """A forward as plain data, from which another process makes the same class.

    Attributes:
        text: two functions: the graph, and the forward that calls it for the arguments that it was recorded for.
        names: what the text refers to: a name, the module that holds it and its path there.
        reads: attributes of the module that the graph holds as constants. When one is set, the forward is again the
            one that the author wrote.
        whole: of a graph that takes the place of submodules.
    """

    text: str
    names: tuple[tuple[str, str, str], ...]
    reads: frozenset[str]
    whole: Whole | None = None


@dataclass(frozen=True)
class Whole:
    """Submodules whose forward is part of a graph.

    Attributes:
        modules: each by the index of the one that holds it (0 is the module itself, then in this order from 1), its
            name there, and module and name of its class. While one is of another class, or has a hook, the forward is
            the author's.
        weights: of the op, by indices: of one module, or of those whose weights it has as one.
        gradients: whether it may run where gradients are recorded.
        plain: whether it may run for nothing else: not for tracers, and in inference too for no other types than
            gradients are written for.
    """

    modules: tuple[tuple[int, str, str, str], ...]
    weights: tuple[tuple[int, ...], ...]
    gradients: bool = False
    plain: bool = False


def whole_of(
    module: nn.Module,
    inlined: Iterable[str],
    steps: Sequence[tuple[str, ...]],
    *,
    gradients: bool,
    plain: bool = False,
) -> Whole:
    """The submodules of these names and those that hold them."""
    index: dict[str, int] = {"": 0}
    modules = []
    for path in (*inlined, *(path for step in steps for path in step)):
        for i in range(1, path.count(".") + 2):
            name = ".".join(path.split(".")[:i])
            if name not in index:
                holder, _, last = name.rpartition(".")
                kind = type(module.get_submodule(name))
                index[name] = len(index)
                modules.append((index[holder], last, kind.__module__, kind.__qualname__))
    return Whole(tuple(modules), tuple(tuple(index[path] for path in step) for step in steps), gradients, plain)


def _weights(root: nn.Module, whole: Whole) -> list[Any] | None:
    """The weights of a whole; None where its submodules are others than they were, or have hooks.

    Where gradients are recorded, those that the op has as one are a tuple; and there are none, None, for what gradients
    are not written for: autocast, half, transformations of them.
    """
    found = [root]
    for holder, name, module, kind in whole.modules:
        held = found[holder]._modules.get(name)
        if held is None or type(held).__qualname__ != kind or type(held).__module__ != module:
            return None
        if not is_bare(held) or vars(held).get("_svexport_stale"):
            return None
        if type(held) is nn.Dropout and held.training and held.p:
            return None
        found.append(held)
    steps: list[tuple[Any, ...]] = []  # a weight each, or as many as the op has as one
    for step in whole.weights:
        steps += [tuple(found[i]._parameters.get(name) for i in step) for name in ("weight", "bias")]
    weights = [w for step in steps for w in step]
    if any(w is None for w in weights):
        return None
    recorded = torch.is_grad_enabled()
    if (recorded or whole.plain) and (
        not has_plain_gradients(weights[0]) or any(w.dtype != weights[0].dtype for w in weights)
    ):
        return None
    return [step[0] if len(step) == 1 else step if recorded else torch.cat(step) for step in steps]


def weights_of(root: nn.Module, rewrite: Rewrite) -> list[Any] | None:
    """What the forward of a whole would be given now; None where it is the author's."""
    return None if rewrite.whole is None else _weights(root, rewrite.whole)


def _composed(whole: Whole) -> bool:
    """Whether the forward is the author's: where gradients are recorded that a whole has not, or by a tracer."""
    recorded = torch.is_grad_enabled()
    return (recorded and not whole.gradients) or ((recorded or whole.plain) and tracing())


FILES = "<svexport "
"""What the names of files of rewritten forwards begin with, in tracebacks."""

_GRAPH = "_svexport_graph"


def rewrite_of(traced: Traced, whole: Whole | None = None) -> Rewrite:
    """The forward of a module with the changes that were made to its graph.

    Raises:
        NotTraced: if the graph calls what no other process would find.
    """
    code = traced.graph.python_code("self")
    _, _, body = code.src.partition("def forward(")
    graph = re.sub(r"\A(.*?\)) -> .*?:\n", r"\1:\n", f"def {_GRAPH}({body}")  # annotations have no names here
    text = f"{graph.strip()}\n\n{_forward(traced, whole is not None)}"
    words = set(re.findall(r"\w+", graph))
    names = [(name, *_place(value)) for name, value in code.globals.items() if name in words]
    return Rewrite(text, tuple(names), traced.reads, whole)


def _place(value: Any) -> tuple[str, str]:
    """Where another process finds a value: a module, and its path there."""
    if inspect.ismodule(value):
        return value.__name__, ""
    path = getattr(value, "__qualname__", getattr(value, "__name__", None))
    places = [(getattr(value, "__module__", None), path)]
    places += [("math", name) for name in ("inf", "nan") if value is getattr(importlib.import_module("math"), name)]
    if isinstance(value, float):
        places += [("math", "inf" if value > 0 else "nan")]
    places += [("torch", str(value).removeprefix("torch.")), ("torch", path), ("builtins", path), ("types", path)]
    for module, where in places:
        if module and where and _found(module, where) is value:
            return module, where
    raise NotTraced(f"its forward calls {path or value}, which has no name of its own")


def _found(module: str, path: str) -> Any:
    try:
        found = importlib.import_module(module)
        return operator.attrgetter(path)(found) if path else found
    except (ImportError, AttributeError):
        return None


def _forward(traced: Traced, whole: bool) -> str:
    """A forward of the author's parameters, which calls the graph where it was recorded for such arguments."""
    signature = inspect.signature(type(traced.module).forward)
    parameters, starred = [], False
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            parameters.append(f"**{name}")
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            parameters.append("*")
            starred = True
        has_default = parameter.default is not inspect.Parameter.empty
        parameters.append(f"{name}=None" if has_default else name)  # the author's defaults are set afterwards
    this = next(iter(signature.parameters))
    unlike, given, all_of_them = [f"{this}._svexport_stale"], [], []
    for name in sorted(traced.reads):
        value = vars(traced.module)[name]
        if type(value) in (dict, list, set):  # which may be changed and stay the same object
            if not is_literal(value):  # which cannot be compared at every call
                raise NotTraced(f"its forward reads {name}, a {type(value).__name__} of more than plain values")
            unlike.append(f"{this}.{name} != {value!r}")
    for argument in traced.arguments:
        name = argument.name
        kind = signature.parameters[name].kind
        rest = kind is inspect.Parameter.VAR_KEYWORD
        all_of_them.append(
            f"**{name}" if rest else f"{name}={name}" if kind is inspect.Parameter.KEYWORD_ONLY else name
        )
        if isinstance(argument.value, (list, tuple, dict)):
            empty = rest and not argument.value
            unlike.append(name if empty else f"_svexport_differs({name}, {argument.value!r})")
        elif argument.constant:
            exact = argument.value is None or isinstance(argument.value, bool)
            unlike.append(f"{name} {'is not' if exact else '!='} {argument.value!r}")
        elif argument.length is None:
            unlike.append(f"{name} is None or {name}.dim() != {argument.ranks[0]}")
            given.append(name)
        else:
            unlike.append(f"{name} is None or len({name}) != {argument.length}")
            unlike += [f"{name}[{i}].dim() != {rank}" for i, rank in enumerate(argument.ranks)]
            given += [f"{name}[{i}]" for i in range(argument.length)]
    recorded = [n for n in traced.graph.nodes if n.op == "placeholder" and str(n.target).startswith("given_")]
    texts = dict(zip(recorded, given, strict=True))

    def size(place: int | tuple[fx.Node, int]) -> str:
        if isinstance(place, int):
            return str(place)
        node, dim = place
        return f"{f'{this}.{node.target}' if node.op == 'get_attr' else texts[node]}.shape[{dim}]"

    unlike += [f"{size(place)} != {number}" for place, number in traced.sizes.items()]
    for made in traced.comparisons:
        text = f"{size(made.left)} {made.sign} {size(made.right)}"
        unlike.append(f"not {text}" if made.holds else text)
    if whole:
        unlike.insert(0, "_svexport_composed()")
        given.insert(0, "weights")
    theirs = f"_svexport_theirs({this}, {', '.join(all_of_them)})"
    weights = f"    weights = _svexport_weights({this})\n    if weights is None:\n        return {theirs}\n"
    return (
        f"def forward({', '.join(parameters)}):\n"
        f"    if {' or '.join(unlike)}:\n"
        f"        return {theirs}\n"
        f"{weights if whole else ''}"
        f"    return {_GRAPH}({', '.join([this, *given])})\n"
    )


def _differs(given: Any, recorded: Any) -> bool:
    """Whether a container is not the one that a graph is for; sizes that a tracer has as symbols are not compared."""
    if isinstance(recorded, (list, tuple, dict)):
        if type(given) is not type(recorded) or len(given) != len(recorded):
            return True
        if isinstance(recorded, dict):
            return any(name not in given or _differs(given[name], value) for name, value in recorded.items())
        return any(map(_differs, given, recorded))
    return isinstance(given, torch.SymInt) or given != recorded


class _Rewritten:
    """Mixin of a class whose forward is a graph."""

    _svexport_author: type
    _svexport_rewrite: Rewrite
    _svexport_stale = False

    def __init_subclass__(cls, **_: Any) -> None:
        """Keeps the class from those who collect the subclasses of its base."""

    def __setattr__(self, name: str, value: Any) -> None:
        rewrites = [vars(kind).get("_svexport_rewrite") for kind in type(self).__mro__]
        if any(name in rewrite.reads for rewrite in rewrites if rewrite is not None):
            vars(self)["_svexport_stale"] = True
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles by the author's class: this one is not an attribute of a module, where pickle could find it."""
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple):
            return reduced
        function, args, *rest = reduced
        author: Any = self._svexport_author
        rewrites = [self._svexport_rewrite]
        while issubclass(author, _Rewritten):
            author, rewrites = author._svexport_author, [author._svexport_rewrite, *rewrites]
        args = tuple(author if arg is type(self) else arg for arg in args)
        return _remade, (tuple(rewrites), function, args), *rest


def _remade(rewrites: Iterable[Rewrite], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    value = function(*args)
    for rewrite in rewrites:
        apply(value, rewrite)
    return value


def apply(module: nn.Module, rewrite: Rewrite) -> None:
    """Gives a module that forward."""
    kind: Any = type(module)
    module.__class__ = _class(kind, rewrite)


@functools.lru_cache(maxsize=1024)
def _class(base: type, rewrite: Rewrite) -> type:
    forward, author = _compiled(rewrite), base.forward  # type: ignore[attr-defined]
    # torch.jit.script compiles the author's text, with the names that it has.
    forward.__wrapped__ = author  # type: ignore[attr-defined]
    for name in author.__code__.co_names:
        if name in author.__globals__ and name != "__name__":  # see _compiled
            forward.__globals__.setdefault(name, author.__globals__[name])
    forward.__defaults__, forward.__kwdefaults__ = author.__defaults__, author.__kwdefaults__
    for name in functools.WRAPPER_ASSIGNMENTS:
        setattr(forward, name, getattr(author, name))
    new = type(base)(
        base.__name__,
        (base,) if issubclass(base, _Rewritten) else (_Rewritten, base),
        {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "forward": forward,
            "_svexport_author": base,
            "_svexport_rewrite": rewrite,
        },
    )

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        return super(new, self).forward(*args, **kwargs)  # type: ignore[misc, arg-type]

    forward.__globals__["_svexport_theirs"] = theirs
    forward.__globals__["_svexport_differs"] = _differs
    if (whole := rewrite.whole) is not None:
        forward.__globals__["_svexport_composed"] = lambda: _composed(whole)
        forward.__globals__["_svexport_weights"] = lambda root: _weights(root, whole)
    return new


def _compiled(rewrite: Rewrite) -> FunctionType:
    # No __name__: torch.compile would look for the others in the module of that name.
    names: dict[str, Any] = {name: _found(module, path) for name, module, path in rewrite.names}
    file = f"{FILES}{hashlib.sha256(rewrite.text.encode()).hexdigest()[:16]}>"
    lines = rewrite.text.splitlines(keepends=True)
    linecache.cache[file] = len(rewrite.text), None, lines, file  # for tracebacks
    exec(compile(rewrite.text, file, "exec"), names)  # noqa: S102 - written by torch.fx, from calls that were recorded
    return names["forward"]


def replace_nodes(
    graph: fx.Graph, old: Sequence[fx.Node], new: Sequence[fx.Node], modules: Set[str] = frozenset()
) -> None:
    """Has all users of nodes use others, and erases these with what only they used; of submodules ``modules`` alone."""
    for before, after in zip(old, new, strict=True):
        before.replace_all_uses_with(after)
    pending = list(old)
    while pending:
        node = pending.pop()
        called = node.op == "call_module" and node not in old and node.target not in modules
        kept = node.op in ("placeholder", "output") or called
        if node.users or kept or node not in graph.nodes:
            continue
        inputs = node.all_input_nodes
        graph.erase_node(node)
        pending += inputs
