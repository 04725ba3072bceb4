"""The definitions of a file, from its syntax tree: imported names, and functions with their reach."""

from __future__ import annotations

import ast
import enum
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TypeVar

from svexport.advise.annotations import is_tensor_annotation, tensors_of_annotation
from svexport.advise.classes import Class
from svexport.advise.guards import excuses
from svexport.advise.source import Source
from svexport.advise.torch_names import ACTIVATIONS, METHODS, UNMISTAKABLE

__all__ = ["File", "Function", "Reach", "is_of_axes"]

Node = TypeVar("Node", bound=ast.AST)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Prefixes of the names of functions that prepare a model or show it.
_SET_UP = (
    *("from_", "init_", "initiali", "reset", "load", "convert"),
    *("remap", "test", "checkpoint", "save", "plot", "draw"),
)


class Reach(enum.IntEnum):
    """What is known of when a function runs."""

    OTHER = 0  # set-up, checkpoints, data, or unknown
    TENSORS = 1  # it takes tensors, or calls torch
    FORWARD = 2  # a module's forward, or called from one


class File:
    """One file's imports, classes and functions.

    Attributes:
        names: the dotted name behind each imported name: ``{"F": "torch.nn.functional"}``.
        parents: each node's parent.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.names: dict[str, str] = {}
        self.parents: dict[ast.AST, ast.AST] = {}
        self.classes: dict[str, Class] = {}
        self.functions: list[Function] = []
        self._visit(source.tree)
        for function in self.functions:
            if function.owner is not None and function.parent is None:
                function.owner.methods[function.name] = function
        for cls in self.classes.values():
            cls.settle()
        for cls in self.classes.values():
            cls.settle_set_up()
        for function in self.functions:  # outer ones come first
            function.settle()

    def _visit(self, tree: ast.Module) -> None:
        pending: list[tuple[ast.AST, Class | None, Function | None]] = [(tree, None, None)]
        while pending:
            node, owner, function = pending.pop()
            for child in _children(node):
                self.parents[child] = node
                inside, cls = function, owner
                if isinstance(child, FUNCTIONS):
                    inside = Function(child, self, owner, function)
                    self.functions.append(inside)
                elif isinstance(child, ast.ClassDef):
                    cls, inside = Class(child, self), None
                    self.classes.setdefault(child.name, cls)
                elif isinstance(child, (ast.Import, ast.ImportFrom)):
                    self._import(child)
                if function is not None and inside is function:
                    function.nodes.setdefault(type(child), []).append(child)
                elif function is not None:
                    function.has_inner = True
                pending.append((child, cls, inside))
        for function in self.functions:
            for nodes in function.nodes.values():  # the stack above does not visit nodes in the order of the text
                nodes.sort(key=_place)

    @cached_property
    def helpers(self) -> dict[str, Function]:
        """The module-level functions of the file, by name."""
        return {f.name: f for f in self.functions if f.owner is None and f.parent is None}

    @cached_property
    def constants(self) -> dict[str, ast.expr]:
        """The values of module-level names that are assigned once: ``MEAN = [0.485, 0.456, 0.406]``."""
        found: dict[str, list[ast.expr]] = {}
        for node in self.source.tree.body:
            for target in node.targets if isinstance(node, ast.Assign) else []:
                for part, value in _pairs(target, node.value):  # type: ignore[attr-defined]
                    found.setdefault(part, []).append(value)
        return {name: values[0] for name, values in found.items() if len(values) == 1}

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                self.names[alias.asname or alias.name] = f"{node.module or ''}.{alias.name}".lstrip(".")
            elif alias.asname:
                self.names[alias.asname] = alias.name
            else:
                root = alias.name.partition(".")[0]
                self.names[root] = root

    def qualified(self, node: ast.AST) -> str | None:
        """The dotted name of an expression, imports resolved: ``F.relu`` is ``"torch.nn.functional.relu"``."""
        attributes = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        return ".".join([self.names.get(node.id, node.id), *reversed(attributes)])


class Function:
    """A function or method; nested functions are functions of their own.

    Attributes:
        owner: the class of which it, or the function around it, is a method.
        parent: the function around it.
        nodes: its nodes by type, in the order of the text.
        has_inner: whether there are functions or classes in it.
        reach: what is known of when it runs.
    """

    def __init__(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, file: File, owner: Class | None, parent: Function | None
    ) -> None:
        self.node = node
        self.name = node.name
        self.file = file
        self.owner = owner
        self.parent = parent
        self.nodes: dict[type[ast.AST], list[ast.AST]] = {}
        self.has_inner = False
        self._every: dict[type[ast.AST], Sequence[ast.AST]] = {}
        self.reach = Reach.OTHER

    def all(self, kind: type[Node]) -> list[Node]:
        """Its nodes of one type, in the order of the text."""
        return self.nodes.get(kind, [])  # type: ignore[return-value]

    def every(self, kind: type[Node]) -> list[Node]:
        """Its nodes of one type, including those of nested functions and classes."""
        if not self.has_inner:
            return self.all(kind)
        if kind not in self._every:
            self._every[kind] = [node for node in ast.walk(self.node) if isinstance(node, kind)]
        return self._every[kind]  # type: ignore[return-value]

    @cached_property
    def parameters(self) -> list[ast.arg]:
        """The function's own parameters, positional ones first, without ``*args`` and ``**kwargs``."""
        a = self.node.args
        return [*a.posonlyargs, *a.args, *a.kwonlyargs]

    def mentioned(self) -> list[str]:
        """The attributes of ``self`` that a method reads, except where it does so once or only in training."""
        return [
            node.attr
            for node in self.every(ast.Attribute)
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not self.guarded(node) and not self.is_kept(node)
        ]

    @cached_property
    def may_be_reached(self) -> bool:
        """Whether neither its name, its decorators nor its class say that it is set-up, training or data."""
        of_data = self.owner is not None and self.owner.is_data
        return not (self._begins_as_set_up or self._is_set_up() or self._is_left_out() or of_data)

    @cached_property
    def takes_axes(self) -> bool:
        """Whether it indexes a parameter along axes: ``x[..., :2]``, ``x[:, 0]``."""
        given = {p.arg for p in self.parameters}
        return any(
            isinstance(node.value, ast.Name) and node.value.id in given and is_of_axes(node.slice)
            for node in self.all(ast.Subscript)
        )

    def settle(self) -> None:
        """Sets ``reach``."""
        if self.parent is not None:
            self.reach = self.parent.reach
        elif not self.may_be_reached:
            return
        elif self.owner is not None and self.name in self.owner.reached:
            self.reach = Reach.FORWARD
        elif self._takes_tensors():
            self.reach = Reach.TENSORS

    @cached_property
    def is_set_up_by_name(self) -> bool:
        """Whether only the prefix of its name says that it is set-up: ``init_state``."""
        return self._begins_as_set_up and not (self._is_set_up() or self._is_left_out())

    @cached_property
    def _begins_as_set_up(self) -> bool:
        return self.name.lstrip("_").startswith(_SET_UP)

    def _is_set_up(self) -> bool:
        bare = self.name.lstrip("_")
        return (
            bare in ("init", "post_init", "new", "extra_repr", "repr__", "main", "setup")
            or self.name == "__init__"
            or any(word in bare for word in ("loss", "train", "denois"))
            or (self.owner is not None and self.name in self.owner.set_up)
        )

    def _is_left_out(self) -> bool:
        """Whether a decorator excludes it (hidden from compilers, fixture, cache), or its class is for training."""
        names = [self.file.qualified(d.func if isinstance(d, ast.Call) else d) or "" for d in self.node.decorator_list]
        last = [name.rpartition(".")[2] for name in names]
        if any(name in ("ignore", "unused", "disable", "fixture", "jit") or "cache" in name for name in last):
            return True
        return self.owner is not None and self.owner.is_training_only

    def _takes_tensors(self) -> bool:
        annotations = [p.annotation for p in self.parameters if p.annotation is not None]
        if any(
            is_tensor_annotation(a, self.file.qualified) or tensors_of_annotation(a, self.file.qualified)
            for a in annotations
        ):
            return True
        if self.is_without_gradients:
            return True
        if self.owner is not None and not self.owner.is_module:
            return False
        given = {p.arg for p in self.parameters}
        return any(
            (node.attr in UNMISTAKABLE or node.attr == "device" or self._is_viewed(node))
            and isinstance(node.value, ast.Name)
            and node.value.id in given
            for node in self.all(ast.Attribute)
        ) or any(
            self._is_computed_from(n, given) or self._is_method_of(n, given) or self._is_own_forward(n, given)
            for n in self.all(ast.Call)
        )

    @cached_property
    def is_without_gradients(self) -> bool:
        """Whether ``@torch.no_grad()`` or ``with torch.inference_mode():`` says that it computes with tensors."""
        items = [item.context_expr for item in self.all(ast.withitem)]
        called = [node.func if isinstance(node, ast.Call) else node for node in (*self.node.decorator_list, *items)]
        return any(self.file.qualified(node) in ("torch.no_grad", "torch.inference_mode") for node in called)

    def _is_own_forward(self, call: ast.Call, given: set[str]) -> bool:
        """Whether a method calls its own module with one of its arguments: ``self(x)``."""
        own = self.owner is not None and self.file.qualified(call.func) in ("self", "self.forward")
        return own and any(isinstance(a, ast.Name) and a.id in given for a in call.args)

    def _is_viewed(self, node: ast.Attribute) -> bool:
        """Whether it is ``x.size(1)`` or ``x.view(a, b)``: numpy's size is no function, its view takes a type."""
        call = self.file.parents[node]
        if not isinstance(call, ast.Call) or call.func is not node:
            return False
        return (node.attr == "size" and len(call.args) < 2) or (node.attr == "view" and len(call.args) > 1)

    def _is_method_of(self, call: ast.Call, given: set[str]) -> bool:
        """Whether it is ``(p / (1 - p)).log()``: neither numbers nor numpy arrays have that method."""
        attribute = call.func
        if not isinstance(attribute, ast.Attribute) or call.args or call.keywords or attribute.attr not in ACTIVATIONS:
            return False
        of = attribute.value
        return isinstance(of, ast.BinOp) and any(isinstance(n, ast.Name) and n.id in given for n in ast.walk(of))

    def _is_computed_from(self, call: ast.Call, given: set[str]) -> bool:
        """Whether ``call`` is a torch function that takes one of the ``given`` names."""
        module, _, name = (self.file.qualified(call.func) or "").rpartition(".")
        if not module.startswith("torch") or name not in METHODS | {"cat", "stack", "einsum", "concat"}:
            return False
        return any(isinstance(node, ast.Name) and node.id in given for a in call.args for node in ast.walk(a))

    def above(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Pairs (child, parent) from ``node`` up to this function."""
        while node is not self.node:
            parent = self.file.parents[node]
            yield node, parent
            node = parent

    def loops(self, node: ast.AST) -> list[ast.For]:
        """The for loops whose bodies hold ``node``, innermost first."""
        return [parent for child, parent in self.above(node) if isinstance(parent, ast.For) and child in parent.body]

    def in_loop(self, node: ast.AST) -> bool:
        """Whether ``node`` is evaluated once per round of a loop or comprehension."""
        for child, parent in self.above(node):
            if isinstance(parent, (ast.For, ast.AsyncFor)) and child in parent.body:
                return True
            if isinstance(parent, ast.While) and child not in parent.orelse:
                return True
            if isinstance(parent, ast.comprehension) and child is not parent.iter:
                return True
            if isinstance(parent, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)) and (
                child is not parent.generators[0]
            ):
                return True
        return False

    def guarded(self, node: ast.AST) -> bool:
        """Whether ``node`` runs only in training, only without a tracer, once, or in an assertion or error."""
        for child, parent in self.above(node):
            if isinstance(parent, (ast.Assert, ast.Raise)):
                return True
            if isinstance(parent, (ast.If, ast.IfExp)):
                if child is parent.test:
                    continue
                body = parent.body if isinstance(parent.body, list) else [parent.body]
                if excuses(parent.test, child in body):
                    return True
        return False

    def is_kept(self, node: ast.AST) -> bool:
        """Whether ``node`` makes a value assigned to an attribute of ``self``: state, not made in every forward."""
        statement = self.statement(node)
        if not isinstance(statement, ast.Assign) or node in ast.walk(statement.targets[0]):
            return False
        target = statement.targets[0]
        return isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"

    def statement(self, node: ast.AST) -> ast.stmt:
        """The statement that ``node`` is part of."""
        while not isinstance(node, ast.stmt):
            node = self.file.parents[node]
        return node


def _children(node: ast.AST) -> list[ast.AST]:
    """The nodes right below a node; ``ast.iter_child_nodes`` took a fifth of the time for all of a file."""
    found: list[ast.AST] = []
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            found += [item for item in value if isinstance(item, ast.AST)]
        elif isinstance(value, ast.AST):
            found.append(value)
    return found


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """The names that an assignment binds, each with its value: ``X, Y = 0, 1``, ``X, Y, Z = range(3)``."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, (ast.Tuple, ast.List)):
        count = len(target.elts)
        values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "range":
            values = [ast.Constant(i) for i in range(count)] if len(value.args) == 1 else []
        for part, one in zip(target.elts, values, strict=False) if len(values) == count else ():
            if isinstance(part, ast.Name):
                yield part.id, one


def _place(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def is_of_axes(index: ast.expr) -> bool:
    """Whether an index is such that only a value with axes takes it: ``[..., :2]``, ``[:, None]``."""
    items = index.elts if isinstance(index, ast.Tuple) else [index]
    several = len(items) > 1 and any(isinstance(item, ast.Slice) for item in items)
    return several or any(isinstance(item, ast.Constant) and item.value in (None, Ellipsis) for item in items)
