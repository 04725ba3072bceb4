"""Classes whose forward is a graph that was changed, beside the one that their author wrote."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import linecache
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import fx, nn

from svexport.exporter.patterns.traced import NotTraced, Traced

__all__ = ["FILES", "Rewrite", "apply", "replace_node", "rewrite_of"]


@dataclass(frozen=True)
class Rewrite:
    """A forward as plain data, from which another process makes the same class.

    Attributes:
        text: two functions: the graph, and the forward that calls it for the arguments that it was recorded for.
        names: what the text refers to: a name, the module that holds it and its path there.
        reads: attributes of the module that the graph holds as constants. When one is set, the forward is again the
            one that the author wrote.
    """

    text: str
    names: tuple[tuple[str, str, str], ...]
    reads: frozenset[str]


FILES = "<svexport "
"""What the names of files of rewritten forwards begin with, in tracebacks."""

_GRAPH = "_svexport_graph"


def rewrite_of(traced: Traced) -> Rewrite:
    """The forward of a module with the changes that were made to its graph.

    Raises:
        NotTraced: if the graph calls what no other process would find.
    """
    code = traced.graph.python_code("self")
    _, _, body = code.src.partition("def forward(")
    graph = f"def {_GRAPH}({body}".replace(" -> _Tensor_:", ":", 1)
    text = f"{graph.strip()}\n\n{_forward(traced)}"
    words = set(re.findall(r"\w+", graph))
    names = [(name, *_place(value)) for name, value in code.globals.items() if name in words]
    return Rewrite(text, tuple(names), traced.reads)


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


def _forward(traced: Traced) -> str:
    """A forward of the author's parameters, which calls the graph where it was recorded for such arguments."""
    signature = inspect.signature(type(traced.module).forward)
    parameters, starred = [], False
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            parameters.append("*")
            starred = True
        has_default = parameter.default is not inspect.Parameter.empty
        parameters.append(f"{name}=None" if has_default else name)  # the author's defaults are set afterwards
    this = next(iter(signature.parameters))
    unlike, given, all_of_them = [f"{this}._svexport_stale"], [], []
    for argument in traced.arguments:
        name = argument.name
        keyword = signature.parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        all_of_them.append(f"{name}={name}" if keyword else name)
        if argument.constant:
            exact = argument.value is None or isinstance(argument.value, bool)
            unlike.append(f"{name} {'is not' if exact else '!='} {argument.value!r}")
        elif argument.length is None:
            unlike.append(f"{name} is None or {name}.dim() != {argument.ranks[0]}")
            given.append(name)
        else:
            unlike.append(f"{name} is None or len({name}) != {argument.length}")
            unlike += [f"{name}[{i}].dim() != {rank}" for i, rank in enumerate(argument.ranks)]
            given += [f"{name}[{i}]" for i in range(argument.length)]
    return (
        f"def forward({', '.join(parameters)}):\n"
        f"    if {' or '.join(unlike)}:\n"
        f"        return _svexport_theirs({this}, {', '.join(all_of_them)})\n"
        f"    return {_GRAPH}({', '.join([this, *given])})\n"
    )


class _Rewritten:
    """Mixin of a class whose forward is a graph."""

    _svexport_author: type
    _svexport_rewrite: Rewrite
    _svexport_stale = False

    def __init_subclass__(cls, **_: Any) -> None:
        """Keeps the class from those who collect the subclasses of its base."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._svexport_rewrite.reads:
            vars(self)["_svexport_stale"] = True
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """By the author's class: this one is no attribute of a module, where pickle could find it."""
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple):
            return reduced
        function, args, *rest = reduced
        args = tuple(self._svexport_author if arg is type(self) else arg for arg in args)
        return _remade, (self._svexport_rewrite, function, args), *rest


def _remade(rewrite: Rewrite, function: Callable[..., Any], args: tuple) -> Any:
    value = function(*args)
    apply(value, rewrite)
    return value


def apply(module: nn.Module, rewrite: Rewrite) -> None:
    """Gives a module that forward."""
    kind: Any = type(module)
    module.__class__ = _class(kind, rewrite)


@functools.lru_cache(maxsize=1024)
def _class(base: type, rewrite: Rewrite) -> type:
    forward, author = _compiled(rewrite), base.forward  # type: ignore[attr-defined]
    forward.__defaults__, forward.__kwdefaults__ = author.__defaults__, author.__kwdefaults__
    for name in functools.WRAPPER_ASSIGNMENTS:
        setattr(forward, name, getattr(author, name))
    new = type(base)(
        base.__name__,
        (_Rewritten, base),
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
    return new


def _compiled(rewrite: Rewrite) -> FunctionType:
    # No __name__: torch.compile would look for the others in the module of that name.
    names: dict[str, Any] = {name: _found(module, path) for name, module, path in rewrite.names}
    file = f"{FILES}{hashlib.sha256(rewrite.text.encode()).hexdigest()[:16]}>"
    lines = rewrite.text.splitlines(keepends=True)
    linecache.cache[file] = len(rewrite.text), None, lines, file  # for tracebacks
    exec(compile(rewrite.text, file, "exec"), names)  # noqa: S102 - written by torch.fx, from calls that were recorded
    return names["forward"]


def replace_node(graph: fx.Graph, old: fx.Node, new: fx.Node) -> None:
    """Has all users of a node use another, and erases it with what only it used."""
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    pending = [old]
    while pending:
        node = pending.pop()
        if node.users or node.op in ("placeholder", "output", "call_module") or node not in graph.nodes:
            continue
        inputs = node.all_input_nodes
        graph.erase_node(node)
        pending += inputs
