"""The definitions of a file, from its syntax tree: imported names, classes, and functions with what reaches them."""

from __future__ import annotations

import ast
import enum
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TypeVar

from svexport.advise.annotations import is_tensor_annotation, tensors_of_annotation
from svexport.advise.guards import excuses
from svexport.advise.source import Source
from svexport.advise.torch_names import (
    ACTIVATIONS,
    DATA_CLASSES,
    METHODS,
    MODULE_BASES,
    RANKS,
    SAME_RANK,
    TRAINING_CLASSES,
    UNMISTAKABLE,
)

__all__ = ["Class", "File", "Function", "Reach", "is_of_axes"]

Node = TypeVar("Node", bound=ast.AST)
Value = TypeVar("Value")
_DEPTH = 20  # of names of layers that stand for others
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Begins of names of what prepares a model, or shows it.
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
        names: dotted names of what is imported: ``{"F": "torch.nn.functional"}``.
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
            for child in ast.iter_child_nodes(node):
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
                pending.append((child, cls, inside))
        for function in self.functions:
            for nodes in function.nodes.values():  # a stack turns their order round
                nodes.sort(key=_place)

    @cached_property
    def helpers(self) -> dict[str, Function]:
        """Functions of the file itself by name."""
        return {f.name: f for f in self.functions if f.owner is None and f.parent is None}

    @cached_property
    def constants(self) -> dict[str, ast.expr]:
        """What names of the file itself are, where they are assigned once: ``MEAN = [0.485, 0.456, 0.406]``."""
        found: dict[str, list[ast.expr]] = {}
        for node in self.source.tree.body:
            for target in node.targets if isinstance(node, ast.Assign) else []:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(node.value)  # type: ignore[attr-defined]
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


class Class:
    """A class: whether it is a module, and which of its methods a forward reaches."""

    def __init__(self, node: ast.ClassDef, file: File) -> None:
        self.node = node
        self.file = file
        self.methods: dict[str, Function] = {}
        self.reached: set[str] = set()
        self.set_up: set[str] = set()

    @cached_property
    def bases(self) -> list[str]:
        """Dotted names of its bases, those of local bases included."""
        return [name for cls in self.line for name in cls._named]

    @cached_property
    def _named(self) -> list[str]:
        names = [self.file.qualified(b.value if isinstance(b, ast.Subscript) else b) for b in self.node.bases]
        return [name for name in names if name is not None]

    @cached_property
    def line(self) -> list[Class]:
        """Itself, then its bases of this file, nearest first."""
        line = [self]
        for cls in line:
            local = [self.file.classes[name] for name in cls._named if name in self.file.classes]
            line += [base for base in local if base not in line]
        return line

    def method(self, name: str) -> Function | None:
        """The method that ``self.name`` is, a base's included."""
        return next((cls.methods[name] for cls in self.line if name in cls.methods), None)

    @cached_property
    def is_module(self) -> bool:
        """Whether it derives from ``torch.nn.Module``, as far as names tell."""
        if any(name.endswith("autograd.Function") or name == "Function" for name in self.bases):
            return False
        return any(name.rpartition(".")[2].endswith(MODULE_BASES) for name in self.bases) or (
            self.bases not in ([], ["object"]) and self.method("forward") is not None
        )

    @cached_property
    def is_training_only(self) -> bool:
        """Whether its name, or a base's, is that of a loss or of what assigns targets."""
        names = [self.node.name, *(name.rpartition(".")[2] for name in self.bases)]
        return any(word in name for name in names for word in TRAINING_CLASSES)

    @cached_property
    def is_data(self) -> bool:
        """Whether its name, or a base's, is that of a data set or of what prepares data."""
        names = [self.node.name, *(name.rpartition(".")[2] for name in self.bases)]
        return any(word in name for name in names for word in DATA_CLASSES)

    @cached_property
    def _assigned(self) -> dict[str, list[ast.expr]]:
        """All that ``__init__`` assigns to ``self.name``."""
        found: dict[str, list[ast.expr]] = {}
        init = self.methods.get("__init__")
        for node in init.all(ast.Assign) if init else ():
            for target in node.targets:
                pairs = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                values = node.value.elts if pairs else [node.value] * len(parts)  # type: ignore[attr-defined]
                for part, value in zip(parts, values, strict=False):
                    if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                        found.setdefault(part.attr, []).append(value)
        return found

    def _inherited(self, own: Callable[[Class], dict[str, Value]]) -> dict[str, Value]:
        """What a class and its bases say of attributes, each by the first that assigns it."""
        found: dict[str, Value] = {}
        known: set[str] = set()
        for cls in self.line:
            found |= {name: value for name, value in own(cls).items() if name.removeprefix("self.") not in known}
            known |= cls._assigned.keys()
        return found

    @cached_property
    def constants(self) -> dict[str, ast.expr]:
        """What is assigned in the body of the class: ``MEAN = [0.485, 0.456, 0.406]``."""
        assigned = [n for cls in reversed(self.line) for n in cls.node.body if isinstance(n, ast.Assign)]
        return {t.id: node.value for node in assigned for t in node.targets if isinstance(t, ast.Name)}

    @cached_property
    def attributes(self) -> dict[str, ast.expr]:
        """What ``self.name`` is, where ``__init__`` assigns it once: ``{"conv": <nn.Conv2d(...)>}``."""
        return self._inherited(lambda cls: {name: v[0] for name, v in cls._assigned.items() if len(v) == 1})

    @cached_property
    def settled(self) -> frozenset[str]:
        """Attributes that ``__init__`` or the class itself assigns, and no other method."""
        changed = {
            node.attr
            for cls in self.line
            for method in cls.methods.values()
            for node in (method.every(ast.Attribute) if method.name != "__init__" else ())
            if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"
        }
        return frozenset(self.constants).union(*(cls._assigned for cls in self.line)) - changed

    @cached_property
    def tensors(self) -> frozenset[str]:
        """Attributes that are given a tensor: an argument of ``__init__`` that is annotated as one."""
        return frozenset(name for cls in self.line for name in cls._given_tensors) & self.settled

    @cached_property
    def _given_tensors(self) -> set[str]:
        init = self.methods.get("__init__")
        given = (
            {p.arg for p in init.parameters if is_tensor_annotation(p.annotation, self.file.qualified)}
            if init
            else set()
        )
        return {n for n, v in self._assigned.items() if all(isinstance(x, ast.Name) and x.id in given for x in v)}

    def default(self, attribute: str) -> ast.expr | None:
        """What ``self.attribute`` is, or has by default where an argument of ``__init__`` gives it."""
        value = self.attributes.get(attribute)
        init = next((cls.methods.get("__init__") for cls in self.line if attribute in cls._assigned), None)
        if init is None or not isinstance(value, ast.Name):
            return value
        a = init.node.args
        given = [*a.posonlyargs, *a.args]
        defaults = dict(zip([p.arg for p in reversed(given)], reversed(a.defaults), strict=False))
        defaults |= {p.arg: d for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is not None}
        return defaults.get(value.id)

    @cached_property
    def layers(self) -> dict[str, list[str]]:
        """Dotted classes that ``self.name`` may be one of, where all are known: ``{"self.conv": ["torch.nn.Conv2d"]}``.

        That of ``nn.Sequential`` is one that makes the same kind of tensor.
        """
        return self._inherited(lambda cls: {f"self.{n}": f for n, v in cls._assigned.items() if (f := cls._of_all(v))})

    @cached_property
    def items(self) -> dict[str, list[str]]:
        """The same of what ``self.name`` is a list of."""
        return self._inherited(lambda cls: cls._own_items)

    @cached_property
    def _own_items(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, values in self._assigned.items():
            parts = [part for value in values for part in self._parts(value)]
            found[f"self.{name}"] = [] if None in parts else self._of_all([p for p in parts if p is not None])
        init = self.methods.get("__init__")
        for call in init.all(ast.Call) if init else ():
            filled, _, last = (self.file.qualified(call.func) or "").rpartition(".")
            if last == "append" and len(call.args) == 1 and filled in found:
                found[filled] += self._of(call.args[0]) or [""]
        return found

    def _of_all(self, values: list[ast.expr]) -> list[str]:
        found = [self._of(value) for value in values]
        return sorted({name for names in found for name in names}) if all(found) else []

    def _of(self, value: ast.expr, depth: int = 0) -> list[str]:
        """Classes that an expression of ``__init__`` makes one of; none if that is not known."""
        if depth > _DEPTH:
            return []
        if isinstance(value, ast.IfExp):
            both = [self._of(value.body, depth + 1), self._of(value.orelse, depth + 1)]
            return both[0] + both[1] if all(both) else []
        if isinstance(value, ast.Name):
            init = self.methods.get("__init__")
            given = [
                node.value
                for node in (init.all(ast.Assign) if init else ())
                if any(isinstance(t, ast.Name) and t.id == value.id for t in node.targets)
            ]
            return self._of(given[0], depth + 1) if len(given) == 1 else []
        name = self._called(value)
        if name is None:
            return []
        arguments = value.args  # type: ignore[attr-defined]
        if name.rpartition(".")[2] == "deepcopy" and arguments:
            return self._of(arguments[0], depth + 1)
        return self._of_sequence(arguments, depth + 1) if name == "torch.nn.Sequential" else [name]

    def _of_sequence(self, arguments: list[ast.expr], depth: int) -> list[str]:
        """One class that makes what layers behind each other make: the last that says how many axes there are."""
        whole = ["torch.nn.Sequential"]
        for argument in reversed(arguments):
            names = {*self._of(argument, depth)}
            if not names <= SAME_RANK or not names:
                known = names <= {*RANKS} or (len(names) == 1 and names <= {*self.file.classes})
                return sorted(names) if known and names else whole
        return ["torch.nn.Linear"] if arguments else whole  # which keeps all axes but the last

    def _parts(self, value: ast.expr) -> list[ast.expr | None]:
        """What a list of layers is made of, None for what is not known."""
        if isinstance(value, (ast.List, ast.Tuple)):
            return list(value.elts)
        if isinstance(value, (ast.ListComp, ast.GeneratorExp)):
            return [value.elt]
        name = (self._called(value) or "").rpartition(".")[2]
        first = value.args[0] if isinstance(value, ast.Call) and value.args else None
        if name == "ModuleList":
            return self._parts(first) if first is not None else []
        if name in ("_get_clones", "get_clones", "clones", "_clones"):
            return [first]
        return [None]

    @cached_property
    def buffers(self) -> dict[str, ast.expr | None]:
        """Its buffers and parameters by name, with what they are made of, if that is one thing."""
        return self._inherited(lambda cls: cls._own_buffers)

    @cached_property
    def _own_buffers(self) -> dict[str, ast.expr | None]:
        found: dict[str, ast.expr | None] = {}
        for name, values in self._assigned.items():
            if all((self._called(v) or "").rpartition(".")[2] == "Parameter" for v in values):
                found[name] = values[0].args[0] if len(values) == 1 and values[0].args else None  # type: ignore[attr-defined]
        for method in self.methods.values():
            for call in method.all(ast.Call):
                called = self.file.qualified(call.func)
                if called in ("self.register_buffer", "self.register_parameter") and call.args:
                    first = call.args[0]
                    if isinstance(first, ast.Constant) and isinstance(first.value, str):
                        once = len(call.args) > 1 and first.value not in found
                        found[first.value] = call.args[1] if once else None
        return found

    def _called(self, node: ast.expr) -> str | None:
        return self.file.qualified(node.func) if isinstance(node, ast.Call) else None

    def settle(self) -> None:
        """Finds which methods a forward reaches, those of its bases in this file included."""
        if not self.is_module:
            return
        names = {name for cls in self.line for name in cls.methods}
        pending = [name for name in names if name == "forward" or name.startswith("forward_")]
        seen: set[str] = set()
        while pending:
            name = pending.pop()
            method = self.method(name)
            if name not in seen and method is not None and method.owner is not None:
                seen.add(name)
                method.owner.reached.add(name)
                pending += method.mentioned()

    def settle_set_up(self) -> None:
        """Finds what only set-up calls, which is part of it."""
        pending = ["__init__"] if self.is_module else []
        while pending:
            name = pending.pop()
            if name not in self.set_up and name in self.methods and name not in self.reached:
                self.set_up.add(name)
                pending += self.methods[name].mentioned()


class Function:
    """A function or method, nested ones apart.

    Attributes:
        owner: the class whose method it, or the function around it, is.
        parent: the function around it.
        nodes: what stands in it by type, in the order of the text.
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
        self.reach = Reach.OTHER

    def all(self, kind: type[Node]) -> list[Node]:
        """Its nodes of one type, in the order of the text."""
        return self.nodes.get(kind, [])  # type: ignore[return-value]

    def every(self, kind: type[Node]) -> Iterator[Node]:
        """Its nodes of one type, nested functions included."""
        return (node for node in ast.walk(self.node) if isinstance(node, kind))

    @cached_property
    def parameters(self) -> list[ast.arg]:
        """The function's own, positional ones first, without ``*args`` and ``**kwargs``."""
        a = self.node.args
        return [*a.posonlyargs, *a.args, *a.kwonlyargs]

    def mentioned(self) -> list[str]:
        """What a method takes from ``self``, but for what it does once or in training only."""
        return [
            node.attr
            for node in self.every(ast.Attribute)
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not self.guarded(node) and not self.is_kept(node)
        ]

    @cached_property
    def may_be_reached(self) -> bool:
        """Whether its name, decorators or class do not say that it is set-up, training or data."""
        of_data = self.owner is not None and self.owner.is_data
        return not (self._begins_as_set_up or self._is_set_up() or self._is_left_out() or of_data)

    @cached_property
    def takes_axes(self) -> bool:
        """Whether it takes something apart along axes: ``x[..., :2]``, ``x[:, 0]``."""
        given = {p.arg for p in self.parameters}
        return any(
            isinstance(node.value, ast.Name) and node.value.id in given and is_of_axes(node.slice)
            for node in self.all(ast.Subscript)
        )

    def settle(self) -> None:
        """Decides on ``reach``."""
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
        """Whether nothing but the begin of its name says that it is set-up: ``init_state``."""
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
        """Compilers are told to leave it alone, or it is a custom function's."""
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
        """``@torch.no_grad()``, or ``with torch.inference_mode():`` around a part of it: it computes with tensors."""
        items = [item.context_expr for item in self.all(ast.withitem)]
        called = [node.func if isinstance(node, ast.Call) else node for node in (*self.node.decorator_list, *items)]
        return any(self.file.qualified(node) in ("torch.no_grad", "torch.inference_mode") for node in called)

    def _is_own_forward(self, call: ast.Call, given: set[str]) -> bool:
        """Whether a module is called with what its method is given: ``self(x)``."""
        own = self.owner is not None and self.file.qualified(call.func) in ("self", "self.forward")
        return own and any(isinstance(a, ast.Name) and a.id in given for a in call.args)

    def _is_viewed(self, node: ast.Attribute) -> bool:
        """``x.size(1)``, ``x.view(a, b)``: numpy's size is no function, and its view takes a type."""
        call = self.file.parents[node]
        if not isinstance(call, ast.Call) or call.func is not node:
            return False
        return (node.attr == "size" and len(call.args) < 2) or (node.attr == "view" and len(call.args) > 1)

    def _is_method_of(self, call: ast.Call, given: set[str]) -> bool:
        """``(p / (1 - p)).log()``: neither numbers nor arrays of numpy have that."""
        attribute = call.func
        if not isinstance(attribute, ast.Attribute) or call.args or call.keywords or attribute.attr not in ACTIVATIONS:
            return False
        of = attribute.value
        return isinstance(of, ast.BinOp) and any(isinstance(n, ast.Name) and n.id in given for n in ast.walk(of))

    def _is_computed_from(self, call: ast.Call, given: set[str]) -> bool:
        """Whether a torch function computes something of what the function is given."""
        module, _, name = (self.file.qualified(call.func) or "").rpartition(".")
        if not module.startswith("torch") or name not in METHODS | {"cat", "stack", "einsum", "concat"}:
            return False
        return any(isinstance(node, ast.Name) and node.id in given for a in call.args for node in ast.walk(a))

    def above(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """(child, parent) from ``node`` up to this function."""
        while node is not self.node:
            parent = self.file.parents[node]
            yield node, parent
            node = parent

    def loops(self, node: ast.AST) -> list[ast.For]:
        """The for loops in whose body it is, the innermost first."""
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
        """Whether ``node`` runs only in training, only without a tracer, or once; or in an assertion or error."""
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
        """Whether ``node`` makes what is assigned to an attribute of ``self``: state, not made in every forward."""
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


def _place(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def is_of_axes(index: ast.expr) -> bool:
    """``[..., :2]``, ``[:, None]``: of what has axes."""
    items = index.elts if isinstance(index, ast.Tuple) else [index]
    several = len(items) > 1 and any(isinstance(item, ast.Slice) for item in items)
    return several or any(isinstance(item, ast.Constant) and item.value in (None, Ellipsis) for item in items)
