"""The classes of a file, from its syntax tree: their layers, buffers, and the methods that a forward reaches."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from svexport.advise.annotations import is_tensor_annotation
from svexport.advise.calls import argument
from svexport.advise.torch_names import DATA_CLASSES, MODULE_BASES, RANKS, SAME_RANK, TRAINING_CLASSES

if TYPE_CHECKING:
    from svexport.advise.functions import File, Function

__all__ = ["Class"]

Value = TypeVar("Value")
_DEPTH = 20  # limit on names of layers that stand for other names


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
        """Dotted names of its bases, including the bases of bases in this file."""
        return [name for cls in self.line for name in cls._named]

    @cached_property
    def _named(self) -> list[str]:
        names = [self.file.qualified(b.value if isinstance(b, ast.Subscript) else b) for b in self.node.bases]
        return [name for name in names if name is not None]

    @cached_property
    def line(self) -> list[Class]:
        """The class itself, then its bases in this file, nearest first."""
        line = [self]
        for cls in line:
            local = [self.file.classes[name] for name in cls._named if name in self.file.classes]
            line += [base for base in local if base not in line]
        return line

    def method(self, name: str) -> Function | None:
        """The method that ``self.name`` is, possibly inherited."""
        return next((cls.methods[name] for cls in self.line if name in cls.methods), None)

    @cached_property
    def is_module(self) -> bool:
        """Whether the class derives from ``torch.nn.Module``, judged by names."""
        if any(name.endswith("autograd.Function") or name == "Function" for name in self.bases):
            return False
        return any(name.rpartition(".")[2].endswith(MODULE_BASES) for name in self.bases) or (
            self.bases not in ([], ["object"]) and self.method("forward") is not None
        )

    @cached_property
    def is_training_only(self) -> bool:
        """Whether its name, or a base's, says that it is a loss, assigns targets or evaluates."""
        names = [self.node.name, *(name.rpartition(".")[2] for name in self.bases)]
        # At the end alone: MetricDepth is a model.
        return any(word in name for name in names for word in TRAINING_CLASSES) or any(
            name.endswith(("Metric", "Metrics")) for name in names
        )

    @cached_property
    def is_data(self) -> bool:
        """Whether its name, or a base's, says that it is a data set or prepares data."""
        names = [self.node.name, *(name.rpartition(".")[2] for name in self.bases)]
        return any(word in name for name in names for word in DATA_CLASSES)

    @cached_property
    def _assigned(self) -> dict[str, list[ast.expr]]:
        """All values that ``__init__`` assigns to each ``self.name``."""
        found: dict[str, list[ast.expr]] = {}
        init = self.methods.get("__init__")
        for node in init.all(ast.Assign) if init else ():
            for target in node.targets:
                pairs = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                comprehended = isinstance(target, ast.Tuple) and isinstance(
                    node.value, (ast.GeneratorExp, ast.ListComp)
                )
                each = node.value.elt if comprehended else node.value  # type: ignore[attr-defined]
                values = node.value.elts if pairs else [each] * len(parts)  # type: ignore[attr-defined]
                for part, value in zip(parts, values, strict=False):
                    if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                        found.setdefault(part.attr, []).append(value)
        return found

    def _inherited(self, own: Callable[[Class], dict[str, Value]]) -> dict[str, Value]:
        """Merges ``own`` of the class and its bases; for each attribute the nearest class that assigns it counts."""
        found: dict[str, Value] = {}
        known: set[str] = set()
        for cls in self.line:
            found |= {name: value for name, value in own(cls).items() if name.removeprefix("self.") not in known}
            known |= cls._assigned.keys()
        return found

    @cached_property
    def constants(self) -> dict[str, ast.expr]:
        """The values assigned in the body of the class: ``MEAN = [0.485, 0.456, 0.406]``."""
        assigned = [n for cls in reversed(self.line) for n in cls.node.body if isinstance(n, ast.Assign)]
        return {t.id: node.value for node in assigned for t in node.targets if isinstance(t, ast.Name)}

    @cached_property
    def attributes(self) -> dict[str, ast.expr]:
        """The values of attributes that ``__init__`` assigns once: ``{"conv": <nn.Conv2d(...)>}``."""
        return self._inherited(lambda cls: {name: v[0] for name, v in cls._assigned.items() if len(v) == 1})

    @cached_property
    def settled(self) -> frozenset[str]:
        """Attributes that only ``__init__`` or the body of the class assigns."""
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
        """Attributes that hold an argument of ``__init__`` annotated as a tensor."""
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
        """The value of ``self.attribute``, or the default of the ``__init__`` argument that it is assigned from."""
        value = self.attributes.get(attribute)
        init = next((cls.methods.get("__init__") for cls in self.line if attribute in cls._assigned), None)
        if init is None or not isinstance(value, ast.Name):
            return value
        a = init.node.args
        given = [*a.posonlyargs, *a.args]
        defaults = dict(zip([p.arg for p in reversed(given)], reversed(a.defaults), strict=False))
        defaults |= {p.arg: d for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is not None}
        return defaults.get(value.id)

    def is_whole(self, attribute: str) -> bool:
        """Whether ``self.attribute`` is an integer, by the annotation or default of the argument that it holds."""
        annotation = self._annotation(attribute)
        if annotation is not None:
            return self.file.qualified(annotation) == "int"
        told = [self.default(attribute)]
        if isinstance(told[0], ast.Name) or told[0] is None:  # no default: what the file makes it with
            told = self._made_with(attribute)
        return bool(told) and all(isinstance(one, ast.Constant) and type(one.value) is int for one in told)

    def _made_with(self, attribute: str) -> list[ast.expr | None]:
        """The arguments that this file gives for the one that ``self.attribute`` holds, where it makes the class."""
        value, init = self.attributes.get(attribute), self.method("__init__")
        if init is None or not isinstance(value, ast.Name):
            return []
        calls = [n for n in self.file.parents if isinstance(n, ast.Call) and self._called(n) == self.node.name]
        return [argument(init, call, value.id) for call in calls]

    def is_number(self, attribute: str) -> bool:
        """Whether ``self.attribute`` is a number: an argument that says so, or computed from numbers."""
        annotation = self._annotation(attribute)
        if annotation is not None:
            return self.file.qualified(annotation) in ("int", "float")
        value = self.default(attribute)
        return value is not None and not isinstance(value, ast.Name) and self._is_number(value)

    def _is_number(self, node: ast.expr) -> bool:
        """Whether an expression of ``__init__`` is a number; names in it are taken for numbers."""
        if isinstance(node, ast.Constant):
            return type(node.value) in (int, float)
        if isinstance(node, ast.BinOp):
            return self._is_number(node.left) and self._is_number(node.right)
        if isinstance(node, ast.UnaryOp):
            return self._is_number(node.operand)
        if isinstance(node, ast.Call):
            name = self.file.qualified(node.func) or ""
            return name.startswith("math.") or name in ("int", "float", "len")
        return isinstance(node, ast.Name)

    def _annotation(self, attribute: str) -> ast.expr | None:
        """The annotation of the ``__init__`` argument that ``self.attribute`` holds."""
        value = self.attributes.get(attribute)
        init = next((cls.methods.get("__init__") for cls in self.line if attribute in cls._assigned), None)
        given = init.parameters if init is not None and isinstance(value, ast.Name) else []
        return next((p.annotation for p in given if p.arg == value.id), None)  # type: ignore[union-attr]

    @cached_property
    def layers(self) -> dict[str, list[str]]:
        """The dotted classes that each ``self.name`` may be, if all are known: ``{"self.conv": ["torch.nn.Conv2d"]}``.

        An ``nn.Sequential`` is given as a class that makes the same kind of tensor.
        """
        return self._inherited(lambda cls: {f"self.{n}": f for n, v in cls._assigned.items() if (f := cls._of_all(v))})

    @cached_property
    def items(self) -> dict[str, list[str]]:
        """The dotted classes that the items of each list ``self.name`` may be, if all are known."""
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
        """The classes whose instance an expression of ``__init__`` may be; empty if unknown."""
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
            if not given and init is not None:
                told = [p.annotation for p in init.parameters if p.arg == value.id and p.annotation is not None]
                return [name for a in told if (name := self.file.qualified(a)) in self.file.classes and name]
            return self._of(given[0], depth + 1) if len(given) == 1 else []
        name = self._called(value)
        if name is None:
            return []
        arguments = value.args  # type: ignore[attr-defined]
        if name.rpartition(".")[2] == "deepcopy" and arguments:
            return self._of(arguments[0], depth + 1)
        return self._of_sequence(arguments, depth + 1) if name == "torch.nn.Sequential" else [name]

    def _of_sequence(self, arguments: list[ast.expr], depth: int) -> list[str]:
        """A class that makes what a sequence of layers makes: the last layer that determines the rank."""
        whole = ["torch.nn.Sequential"]
        for layer in reversed(arguments):
            names = {*self._of(layer, depth)}
            if not names <= SAME_RANK or not names:
                known = names <= {*RANKS} or (len(names) == 1 and names <= {*self.file.classes})
                return sorted(names) if known and names else whole
        return ["torch.nn.Linear"] if arguments else whole  # a Linear keeps all axes but the last

    def _parts(self, value: ast.expr) -> list[ast.expr | None]:
        """The expressions that make the items of a list of layers; None for unknown items."""
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
        """Its buffers and parameters by name, each with the one expression that makes it, if there is one."""
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
        """Finds the methods that a forward reaches, including those of its bases in this file."""
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
        """Finds the methods that set-up calls and no forward reaches; they are set-up as well."""
        pending = ["__init__"] if self.is_module else []
        while pending:
            name = pending.pop()
            if name not in self.set_up and name in self.methods and name not in self.reached:
                self.set_up.add(name)
                pending += self.methods[name].mentioned()
