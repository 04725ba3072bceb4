"""Which expressions of a function are tensors and sizes, as far as its text tells. What is not certain has no kind."""

from __future__ import annotations

import ast
import enum
from dataclasses import dataclass, field
from functools import cached_property

from svexport.advise.functions import File, Function, Reach, is_tensor_annotation
from svexport.advise.torch_names import (
    ELEMENTWISE_LAYERS,
    FUNCTIONS,
    LIKE_CREATORS,
    METHODS,
    MODULE_OUTPUT,
    SEVERAL,
    UNMISTAKABLE,
)

__all__ = ["Call", "Kind", "Kinds"]

_PREFIXES = ("torch.nn.functional.", "torch.", "nn.functional.")
_DEPTH = 60  # of expressions and names defined by names
_STEPS = 20_000  # per function: no text makes this take long


class Kind(enum.Enum):
    """What the value of an expression is, as far as a source tells."""

    TENSOR = "a tensor"
    TENSORS = "a tuple or list of tensors"
    SHAPE = "the sizes of a tensor"
    SIZE = "one size of a tensor"


@dataclass(frozen=True)
class Call:
    """A call of a torch function or of a method, in one form.

    Attributes:
        name: of the function or method: ``"sum"``, ``"linalg.inv"``.
        input: the tensor it is called on.
        arguments: what follows it.
    """

    node: ast.Call
    name: str
    input: ast.expr
    arguments: tuple[ast.expr, ...]
    is_method: bool

    @cached_property
    def keywords(self) -> dict[str | None, ast.expr]:
        """Arguments by keyword; those of ``**`` under None."""
        return {k.arg: k.value for k in self.node.keywords}

    def get(self, position: int, *names: str) -> ast.expr | None:
        """The argument at ``position`` after the input, or by one of ``names``."""
        if len(self.arguments) > position:
            return self.arguments[position]
        return next((self.keywords[name] for name in names if name in self.keywords), None)

    @cached_property
    def dims(self) -> tuple[int, ...] | None:
        """Its arguments where all are integers: ``permute(0, 2, 1)``, ``permute((0, 2, 1))``, ``transpose(1, 2)``."""
        items = list(self.arguments) or [v for k, v in self.keywords.items() if k in ("dims", "dim0", "dim1", "dim")]
        if len(items) == 1 and isinstance(items[0], (ast.Tuple, ast.List)):
            items = items[0].elts
        values = [integer(item) for item in items]
        return tuple(v for v in values if v is not None) if items and None not in values else None


@dataclass
class Binding:
    """How a name gets a value: ``value`` itself, its ``index``-th item or, without an index, each; or none known."""

    value: ast.expr | None
    item: bool = False
    index: int | None = None
    statement: ast.AST | None = field(default=None, repr=False)


class Kinds:
    """The kinds of a function's expressions."""

    def __init__(self, function: Function, around: Kinds | None = None) -> None:
        self.function = function
        self.file: File = function.file
        self._around = around
        self._known: dict[ast.AST, Kind | None] = {}
        self._names: dict[str, Kind | None] = {}
        self._steps = self._depth = 0

    def is_tensor(self, node: ast.AST) -> bool:
        """Whether an expression is known to be a tensor."""
        return self.kind(node) is Kind.TENSOR

    def call(self, node: ast.AST) -> Call | None:
        """``node`` as a call of a torch function with an input, or of a method of what is not an imported module."""
        if not isinstance(node, ast.Call):
            return None
        name = self.file.qualified(node.func)
        if name is not None:
            for prefix in _PREFIXES:
                if name.startswith(prefix):
                    return self._function_call(node, name.removeprefix(prefix))
        if not isinstance(node.func, ast.Attribute):
            return None
        layer = self._layer(name)
        if layer is not None:
            return Call(node, layer, node.args[0], (), False) if len(node.args) == 1 and not node.keywords else None
        root: ast.AST = node.func.value
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id in self.file.names:
            return None
        return Call(node, node.func.attr, node.func.value, tuple(node.args), True)

    def _layer(self, name: str | None) -> str | None:
        """The function that a layer of ``self`` computes elementwise."""
        if name is None or not name.startswith("self.") or self.function.owner is None:
            return None
        return ELEMENTWISE_LAYERS.get(self.function.owner.module(name.removeprefix("self.")) or "")

    def _function_call(self, node: ast.Call, name: str) -> Call | None:
        first = (
            node.args[0] if node.args else next((k.value for k in node.keywords if k.arg in ("input", "tensors")), None)
        )
        if first is None or any(isinstance(a, ast.Starred) for a in node.args[:1]):
            return None
        return Call(node, name, first, tuple(node.args[1:]), False)

    @cached_property
    def bindings(self) -> dict[str, list[Binding]]:
        """Everything that gives the function's own names values."""
        found: dict[str, list[Binding]] = {}

        def bind(target: ast.expr, binding: Binding) -> None:
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(binding)
            elif isinstance(target, ast.Starred):
                bind(target.value, Binding(None, statement=binding.statement))
            elif isinstance(target, (ast.Tuple, ast.List)):
                pairs = isinstance(binding.value, (ast.Tuple, ast.List)) and not binding.item
                values = binding.value.elts if pairs else []  # type: ignore[union-attr]
                for i, part in enumerate(target.elts):
                    if pairs and len(values) == len(target.elts):
                        bind(part, Binding(values[i], statement=binding.statement))
                    elif binding.item:
                        bind(part, Binding(None, statement=binding.statement))
                    else:
                        bind(part, Binding(binding.value, True, i, binding.statement))

        f = self.function
        for node in f.all(ast.Assign):
            for target in node.targets:
                bind(target, Binding(node.value, statement=node))
        for annotated in f.all(ast.AnnAssign):
            if annotated.value is not None:
                bind(annotated.target, Binding(annotated.value, statement=annotated))
        for augmented in f.all(ast.AugAssign):
            bind(augmented.target, Binding(augmented.target, statement=augmented))
        for walrus in f.all(ast.NamedExpr):
            bind(walrus.target, Binding(walrus.value, statement=walrus))
        loops: list[ast.For | ast.AsyncFor | ast.comprehension]
        loops = [*f.all(ast.For), *f.all(ast.AsyncFor), *f.all(ast.comprehension)]
        for loop in loops:
            targets = loop.target.elts if isinstance(loop.target, (ast.Tuple, ast.List)) else []
            function = self.file.qualified(loop.iter.func) if isinstance(loop.iter, ast.Call) else None
            given = loop.iter.args if isinstance(loop.iter, ast.Call) else []
            if function == "enumerate" and len(targets) == 2 and given:
                bind(targets[0], Binding(None, statement=loop))
                bind(targets[1], Binding(given[0], True, None, loop))
            elif function == "zip" and len(targets) == len(given):
                for part, value in zip(targets, given, strict=True):
                    bind(part, Binding(value, True, None, loop))
            else:
                bind(loop.target, Binding(loop.iter, True, None, loop))
        for item in f.all(ast.withitem):
            if item.optional_vars is not None:
                bind(item.optional_vars, Binding(None))
        names = [n.name for n in f.all(ast.FunctionDef)] + [n.name for n in f.all(ast.ClassDef)]
        names += [n.name for n in f.all(ast.ExceptHandler) if n.name]
        names += [n.name for n in f.all(ast.MatchAs) if n.name] + [n.name for n in f.all(ast.MatchStar) if n.name]
        names += [name for n in f.all(ast.Global) for name in n.names]
        names += [name for n in f.all(ast.Nonlocal) for name in n.names]
        for name in names:
            found.setdefault(name, []).append(Binding(None))
        for lambda_ in f.all(ast.Lambda):
            for argument in lambda_.args.args:
                found.setdefault(argument.arg, []).append(Binding(None))
        return found

    @cached_property
    def uses(self) -> dict[str, list[ast.Name]]:
        """Where names are read, nested functions included."""
        found: dict[str, list[ast.Name]] = {}
        for node in self.function.every(ast.Name):
            if isinstance(node.ctx, ast.Load):
                found.setdefault(node.id, []).append(node)
        return found

    def value_of(self, node: ast.expr) -> ast.expr:
        """What a name that is bound once stands for; any other expression itself."""
        for _ in range(_DEPTH):
            if not isinstance(node, ast.Name) or self._is_parameter(node.id):
                return node
            bindings = self.bindings.get(node.id, [])
            if len(bindings) != 1 or bindings[0].item or bindings[0].value is None:
                return node
            node = bindings[0].value
        return node

    def only_value(self, node: ast.AST) -> str | None:
        """The name that ``node``, the whole right side of an assignment, is given to, if nothing else ever is."""
        parent = self.file.parents[node]
        if isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Name):
            name = parent.targets[0].id
            if len(self.bindings.get(name, [])) == 1 and not self._is_parameter(name):
                return name
        return None

    def reads(self, node: ast.expr) -> list[ast.expr]:
        """Where what ``node`` computes is read: itself, or each use of the one name that it is given to.

        A name that has other values besides counts where the next statement is the last to read this one.
        """
        name = self.only_value(node)
        if name is not None:
            return list(self.uses.get(name, []))
        following = self._beside(node, 1)
        name = self._target(self.function.statement(node))
        if following is None or name is None or self.file.parents[node] is not self.function.statement(node):
            return [node]
        return self._reads_last(following, name) or [node]

    def value_just_before(self, name: ast.Name) -> ast.expr:
        """What the statement before gave a name that is read this once and then has another value; else itself."""
        before = self._beside(name, -1)
        if before is None or self._target(before) != name.id or not isinstance(before, ast.Assign):
            return name
        return before.value if self._reads_last(self.function.statement(name), name.id) == [name] else name

    def _reads_last(self, statement: ast.AST, name: str) -> list[ast.expr]:
        """Where a statement reads a name whose value is lost after it; nowhere if it is not."""
        if not isinstance(statement, ast.Return) and self._target(statement) != name:
            return []
        if any(isinstance(parent, ast.Try) for _, parent in self.function.above(statement)):
            return []  # what is run at the end may read it
        return [
            n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)
        ]

    def _target(self, statement: ast.AST) -> str | None:
        """The name of ``name = value``."""
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else None

    def _beside(self, node: ast.AST, step: int) -> ast.stmt | None:
        """The statement next to the one that ``node`` is in, of the same block."""
        statement = self.function.statement(node)
        around = self.file.parents[statement]
        for block in (getattr(around, part, []) for part in ("body", "orelse", "finalbody")):
            if isinstance(block, list) and statement in block:
                at = block.index(statement) + step  # type: ignore[arg-type]
                return block[at] if 0 <= at < len(block) else None
        return None

    def kind(self, node: ast.AST) -> Kind | None:
        """The kind of an expression, None where it is not certain."""
        if node not in self._known:
            if self._steps > _STEPS or self._depth > _DEPTH:
                return None
            self._known[node] = None  # for what is defined by itself
            self._steps += 1
            self._depth += 1
            try:
                self._known[node] = self._kind(node)
            finally:
                self._depth -= 1
        return self._known[node]

    def _kind(self, node: ast.AST) -> Kind | None:
        if isinstance(node, ast.Name):
            return self._kind_of_name(node.id)
        if isinstance(node, ast.Call):
            return self._kind_of_call(node)
        if isinstance(node, ast.Attribute):
            return self._kind_of_attribute(node)
        if isinstance(node, ast.Subscript):
            return self._kind_of_item(node)
        if isinstance(node, ast.BinOp):
            kinds = {self.kind(node.left), self.kind(node.right)}
            if Kind.TENSOR in kinds:
                return Kind.TENSOR
            plain = all(self.kind(side) is Kind.SIZE or integer(side) is not None for side in (node.left, node.right))
            whole = isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod))
            return Kind.SIZE if plain and whole and Kind.SIZE in kinds else None
        if isinstance(node, ast.UnaryOp):
            return self.kind(node.operand) if not isinstance(node.op, ast.Not) else None
        if isinstance(node, ast.Compare):
            values = any(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in node.ops)
            sides = [node.left, *node.comparators]
            return Kind.TENSOR if not values and any(self.is_tensor(side) for side in sides) else None
        if isinstance(node, ast.IfExp):
            kind = self.kind(node.body)
            return kind if kind is self.kind(node.orelse) else None
        if isinstance(node, ast.NamedExpr):
            return self.kind(node.value)
        return None

    def _is_parameter(self, name: str) -> bool:
        return any(p.arg == name for p in self.function.parameters)

    def _kind_of_name(self, name: str) -> Kind | None:
        if name in self._names:
            return self._names[name]
        bindings = self.bindings.get(name, [])
        parameter = next((p for p in self.function.parameters if p.arg == name), None)
        if parameter is None and not bindings:
            return self._around._kind_of_name(name) if self._around is not None else None
        self._names[name] = None
        kinds = self._kinds_of(bindings, parameter)
        if Kind.TENSOR in kinds and None in kinds:
            # What ``x = x.flatten(1)`` makes of a tensor is one: taken for granted, then dropped if that fails.
            known, names = dict(self._known), dict(self._names)
            self._names[name] = Kind.TENSOR
            for binding in bindings:
                self._forget(binding.value)
            kinds = self._kinds_of(bindings, parameter)
            if kinds != {Kind.TENSOR}:
                self._known, self._names = known, names
        kind = kinds.pop() if len(kinds) == 1 else None
        if kind is None and parameter is None and self._is_result(name, bindings):
            kind = Kind.TENSOR
        self._names[name] = kind
        return kind

    def _is_result(self, name: str, bindings: list[Binding]) -> bool:
        """Whether a name stands for what a layer returned in forward, and is used as only a tensor can be."""
        if len(bindings) != 1 or bindings[0].item or self.function.reach is not Reach.FORWARD:
            return False
        made = bindings[0].value
        if not isinstance(made, ast.Call) or not isinstance(made.func, ast.Attribute):
            return False
        root: ast.AST = made.func
        while isinstance(root, (ast.Attribute, ast.Subscript)):
            root = root.value
        own = isinstance(root, ast.Name) and root.id == "self"
        parents = isinstance(root, ast.Call) and isinstance(root.func, ast.Name) and root.func.id == "super"
        return (own or parents) and any(self._shows_tensor(use) for use in self.uses.get(name, []))

    def _forget(self, node: ast.AST | None) -> None:
        for part in ast.walk(node) if node is not None else ():
            self._known.pop(part, None)

    def _kinds_of(self, bindings: list[Binding], parameter: ast.arg | None) -> set[Kind | None]:
        kinds = {self._kind_of_parameter(parameter)} if parameter is not None else set()
        for binding in bindings:
            if isinstance(binding.value, ast.Constant) and binding.value.value is None:
                continue  # set later, on the way to its use
            if not isinstance(binding.statement, ast.AugAssign):  # which leaves a tensor one
                kinds.add(self._kind_of_binding(binding))
        return kinds

    def _kind_of_parameter(self, parameter: ast.arg) -> Kind | None:
        if parameter.annotation is not None:
            return Kind.TENSOR if is_tensor_annotation(parameter.annotation, self.file) else None
        name = parameter.arg
        if any(self._asks_for_type(call, name) for call in self.function.all(ast.Call)):
            return None
        bound = [getattr(b.statement, "lineno", 0) for b in self.bindings.get(name, [])]
        for use in self.uses.get(name, []):
            # Later on it is what it was bound to, which may have been made of something else.
            if use.lineno < min(bound, default=use.lineno + 1) and self._shows_tensor(use):
                return Kind.TENSOR
        return None

    def _asks_for_type(self, call: ast.Call, name: str) -> bool:
        """Whether it is ``isinstance(name, ...)``: the name may be something else as well."""
        first = call.args[0] if call.args else None
        return self.file.qualified(call.func) == "isinstance" and isinstance(first, ast.Name) and first.id == name

    def _shows_tensor(self, use: ast.Name) -> bool:
        """Whether a name is used as only a tensor can be; in a forward, whose arguments are no arrays of numpy."""
        parent = self.file.parents[use]
        in_forward = self.function.reach is Reach.FORWARD
        if isinstance(parent, ast.Attribute):
            if in_forward and parent.attr in ("shape", "ndim", "device", "dtype"):
                return True
            call = self.file.parents[parent]
            methods = (
                UNMISTAKABLE | METHODS | {"size", "dim", "unbind", "chunk", "topk"} if in_forward else UNMISTAKABLE
            )
            return isinstance(call, ast.Call) and call.func is parent and parent.attr in methods - {"type", "take"}
        if not in_forward or not isinstance(parent, ast.Call) or parent.args[:1] != [use]:
            return False
        name = self.file.qualified(parent.func) or ""
        if name.startswith("self.") and self.function.owner is not None:
            return self.function.owner.module(name.removeprefix("self.")) in MODULE_OUTPUT
        module, _, last = name.rpartition(".")
        return module in ("torch", "torch.nn.functional") and last in METHODS | LIKE_CREATORS

    def _kind_of_binding(self, binding: Binding) -> Kind | None:
        if binding.value is None:
            return None
        kind = self.kind(binding.value)
        if not binding.item:
            return kind
        if kind is Kind.SHAPE and binding.index is not None:
            return Kind.SIZE
        return Kind.TENSOR if kind in (Kind.TENSOR, Kind.TENSORS) else None

    def _kind_of_call(self, node: ast.Call) -> Kind | None:
        name = self.file.qualified(node.func) or ""
        if name.rpartition(".")[2] == "Parameter":
            return Kind.TENSOR
        if name.startswith("self.") and name.count(".") == 1 and self.function.owner is not None:
            submodule = self.function.owner.module(name.removeprefix("self."))
            if submodule in MODULE_OUTPUT:
                return Kind.TENSOR
        if self._returns_tensor(name):
            return Kind.TENSOR
        if name == "len" and node.args and self.is_tensor(node.args[0]):
            return Kind.SIZE
        if name == "int" and node.args and self.kind(node.args[0]) is Kind.SIZE:
            return Kind.SIZE
        if name.startswith(_PREFIXES) and next(name[len(p) :] for p in _PREFIXES if name.startswith(p)) in FUNCTIONS:
            # torch.where(condition) is a tuple of indices.
            several = (name == "torch.where" and len(node.args) == 1) or any(k.arg == "as_tuple" for k in node.keywords)
            return Kind.TENSORS if several else Kind.TENSOR
        call = self.call(node)
        if call is None:
            return None
        if call.name in SEVERAL:
            return Kind.TENSORS if not call.is_method or self.is_tensor(call.input) else None
        if not call.is_method:
            return None
        if call.name in UNMISTAKABLE:
            return Kind.TENSOR
        if call.name == "size":
            if self.kind(call.input) is not Kind.TENSOR and not isinstance(call.input, (ast.Name, ast.Attribute)):
                return None
            return Kind.SIZE if node.args or node.keywords else Kind.SHAPE
        known = call.name in METHODS | FUNCTIONS and "as_tuple" not in call.keywords
        return Kind.TENSOR if known and self.is_tensor(call.input) else None

    def _returns_tensor(self, name: str) -> bool:
        """Whether it is a function of this file, or a method of this class, that says so."""
        owner = self.function.owner
        if name.startswith("self.") and owner is not None:
            called = owner.methods.get(name.removeprefix("self."))
        else:
            called = self.file.helpers.get(name)
        returns = called.node.returns if called is not None else None
        return returns is not None and is_tensor_annotation(returns, self.file)

    def _kind_of_attribute(self, node: ast.Attribute) -> Kind | None:
        if node.attr == "shape":
            return Kind.SHAPE if not self._is_foreign(node.value) else None
        if node.attr in ("T", "mT", "data", "real", "imag", "grad", "H"):
            return self.kind(node.value)
        owner = self.function.owner
        if owner is not None and isinstance(node.value, ast.Name) and node.value.id == "self":
            return Kind.TENSOR if node.attr in owner.buffers else None
        return None

    def _is_foreign(self, node: ast.AST) -> bool:
        """Whether it is known not to be a tensor: a call into another package, such as numpy."""
        if isinstance(node, ast.Name):
            bindings = self.bindings.get(node.id, [])
            return bool(bindings) and all(b.value is not None and self._calls_foreign(b.value) for b in bindings)
        return self._calls_foreign(node)

    def _calls_foreign(self, node: ast.AST) -> bool:
        name = self.file.qualified(node.func) if isinstance(node, ast.Call) else None
        return name is not None and name.startswith(("numpy.", "np.", "cv2.", "PIL.", "jax", "tensorflow"))

    def _kind_of_item(self, node: ast.Subscript) -> Kind | None:
        kind = self.kind(node.value)
        if kind is Kind.SHAPE:
            return Kind.SHAPE if isinstance(node.slice, ast.Slice) else Kind.SIZE
        if kind is Kind.TENSORS:
            return Kind.TENSORS if isinstance(node.slice, ast.Slice) else Kind.TENSOR
        return kind if kind is Kind.TENSOR else None


def integer(node: ast.AST | None) -> int | None:
    """The integer that ``node`` writes out, None if it is something else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = integer(node.operand)
        return None if value is None else -value
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool):
        return node.value
    return None
