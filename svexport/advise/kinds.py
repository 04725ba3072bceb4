"""Which expressions of a function are tensors or sizes, judged by its text; uncertain expressions have no kind."""

from __future__ import annotations

import ast
import enum
from collections.abc import Iterable, Mapping
from functools import cached_property

from svexport.advise.annotations import is_tensor_annotation, tensors_of_annotation
from svexport.advise.calls import Call, argument, integer, parameter
from svexport.advise.flow import Binding, Flow
from svexport.advise.functions import File, Function, Reach, is_of_axes
from svexport.advise.torch_names import (
    ELEMENTWISE_LAYERS,
    FUNCTIONS,
    LIKE_CREATORS,
    METHODS,
    MODULE_OUTPUT,
    REDUCTIONS,
    SEVERAL,
    SOFTMAX_LAYERS,
    UNMISTAKABLE,
)

__all__ = ["Kind", "Kinds", "Peers"]

_PREFIXES = ("torch.nn.functional.", "torch.", "nn.functional.")
_DEPTH = 60  # limit on nested expressions and on names defined by names
_MOVED = ("to", "cuda", "cpu", "eval", "float", "half", "requires_grad_")  # methods of modules that return the module
_SHAPING = UNMISTAKABLE | {"view", "reshape", "flatten", "transpose", "squeeze"}
_STEPS = 20_000  # limit per function, so that no text takes long


class Kind(enum.Enum):
    """What the value of an expression is, judged by the source."""

    TENSOR = "a tensor"
    TENSORS = "a tuple or list of tensors"
    SHAPE = "the sizes of a tensor"
    SIZE = "one size of a tensor"


class Peers(dict[Function, "Kinds"]):
    """The functions of a file with the kinds of their expressions.

    Attributes:
        flows: the flow of each function, found once however often kinds are.
    """

    def __init__(self, flows: dict[Function, Flow]) -> None:
        super().__init__()
        self.flows = flows

    @cached_property
    def _by_node(self) -> dict[ast.AST, Kinds]:
        return {function.node: kinds for function, kinds in self.items()}

    def holding(self, node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> Kinds | None:
        """The function that holds a node."""
        while node in parents and node not in self._by_node:
            node = parents[node]
        return self._by_node.get(node)

    @cached_property
    def sites(self) -> dict[Function, list[tuple[Kinds, ast.Call]]]:
        """The calls of each function from functions of the file."""
        found: dict[Function, list[tuple[Kinds, ast.Call]]] = {}
        for peer in self.values():
            for call in peer.function.all(ast.Call):
                target = peer.target(call)
                if target is not None:
                    found.setdefault(target, []).append((peer, call))
        return found


class Kinds:
    """The kinds of a function's expressions."""

    def __init__(self, function: Function, around: Kinds | None = None) -> None:
        self.function = function
        self.file: File = function.file
        self.peers = Peers({})
        self._around = around
        self._known: dict[ast.AST | Binding, Kind | None] = {}
        self._open: set[Binding] = set()
        self._assumed: list[tuple[Binding, Kind | None]] = []
        self._returned: dict[int | None, Kind | None] = {}
        self._shown: dict[Binding, bool] = {}
        self._steps = self._depth = 0

    @cached_property
    def flow(self) -> Flow:
        """The bindings that reach the function's names."""
        flows = self.peers.flows
        if self.function not in flows:
            flows[self.function] = Flow(self.function)
        return flows[self.function]

    @property
    def bindings(self) -> dict[str, list[Binding]]:
        """All bindings of the function's own names except parameters, by name."""
        return self.flow.bindings

    def definition(self, node: ast.AST) -> Binding | None:
        """The one binding that reaches a name; None if there may be several."""
        reached = self.flow.definitions.get(node, frozenset()) if isinstance(node, ast.Name) else frozenset()
        return next(iter(reached)) if len(reached) == 1 else None

    def is_tensor(self, node: ast.AST) -> bool:
        """Whether an expression is known to be a tensor."""
        return self.kind(node) is Kind.TENSOR

    def is_state(self, node: ast.expr) -> bool:
        """Whether ``node`` is a buffer or parameter, whose size is the same in every forward."""
        name = self.file.qualified(self.value_of(node)) or ""
        owner = self.function.owner
        return owner is not None and name.startswith("self.") and name.removeprefix("self.") in owner.buffers

    def call(self, node: ast.AST) -> Call | None:
        """``node`` as a call of a torch function with an input, or of a method of anything but an imported module."""
        if not isinstance(node, ast.Call):
            return None
        name = self.file.qualified(node.func)
        if name is not None:
            for prefix in _PREFIXES:
                if name.startswith(prefix):
                    return self._function_call(node, name.removeprefix(prefix))
        layer = self._layer(node.func)
        if layer is not None:
            plain = len(node.args) == 1 and not node.keywords
            return Call(node, layer[0], node.args[0], layer[1], False) if plain else None
        if not isinstance(node.func, ast.Attribute):
            return None
        root: ast.AST = node.func.value
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id in self.file.names:
            return None
        return Call(node, node.func.attr, node.func.value, tuple(node.args), True)

    def _layer(self, layer: ast.expr) -> tuple[str, tuple[ast.expr, ...]] | None:
        """The function that a layer without parameters computes, and its arguments after the input.

        The layer is one of ``self``, or made where it is used: ``nn.Softmax(dim=1)(x)``.
        """
        name, owner = self.file.qualified(layer) or "", self.function.owner
        if owner is not None and name.startswith("self.") and len(owner.layers.get(name, [])) == 1:
            layer = owner.attributes.get(name.removeprefix("self."), layer)
            made = owner.layers[name][0]
        else:
            made = (self.file.qualified(layer.func) or "") if isinstance(layer, ast.Call) else ""
        if made in ELEMENTWISE_LAYERS:
            return ELEMENTWISE_LAYERS[made], ()
        if made in SOFTMAX_LAYERS and isinstance(layer, ast.Call):
            dim = next((k.value for k in layer.keywords if k.arg == "dim"), layer.args[0] if layer.args else None)
            return (SOFTMAX_LAYERS[made], (dim,)) if dim is not None else None
        return None

    def _function_call(self, node: ast.Call, name: str) -> Call | None:
        given = (k.value for k in node.keywords if k.arg in ("input", "tensors", "end", "n"))
        first = node.args[0] if node.args else next(given, None)
        if first is None or any(isinstance(a, ast.Starred) for a in node.args[:1]):
            return None
        return Call(node, name, first, tuple(node.args[1:]), False)

    def value_of(self, node: ast.expr) -> ast.expr:
        """The expression that a name stands for if only one binding reaches it; any other expression itself."""
        for _ in range(_DEPTH):
            binding = self.definition(node)
            if binding is None or binding.item or binding.value is None or isinstance(binding.statement, ast.AugAssign):
                return node
            node = binding.value
        return node

    def is_of_file(self, name: ast.Name) -> bool:
        """Whether neither this function nor one around it binds a name."""
        around: Kinds | None = self
        while around is not None:
            if name.id in around.flow.bindings or name.id in around.flow.parameters:
                return False
            around = around._around
        return True

    def integer(self, node: ast.expr | None) -> int | None:
        """The integer that an expression is: a literal, or a name for one, in this function or in the file."""
        value = self.value_of(node) if node is not None else None
        if isinstance(value, ast.Name) and self.is_of_file(value):
            value = self.file.constants.get(value.id)
        return integer(value)

    def binding_of(self, node: ast.AST) -> Binding | None:
        """The binding of ``node`` to one name, if ``node`` is the whole right side of an assignment."""
        parent = self.file.parents[node]
        if isinstance(parent, (ast.Assign, ast.AnnAssign)) and parent.value is node:
            bound = self.flow.bound_by(parent)
            target = parent.targets[0] if isinstance(parent, ast.Assign) else parent.target
            return bound[0] if len(bound) == 1 and isinstance(target, ast.Name) else None
        return None

    def reads(self, node: ast.expr) -> list[ast.expr]:
        """The expressions that read the value of ``node``: each use of the name that it is assigned to.

        It is ``node`` itself if it has no such name, or if one of the uses may have another value.
        """
        binding = self.binding_of(node)
        if binding is None or not all(self.is_only(use, binding) for use in binding.uses):
            return [node]
        return list(binding.uses)

    def is_only(self, use: ast.Name, binding: Binding) -> bool:
        """Whether only ``binding`` reaches ``use``; in a nested function, whether the name has no other binding."""
        if use in self.flow.definitions:
            return self.definition(use) is binding
        return self.bindings.get(use.id) == [binding] and use.id not in self.flow.parameters

    def kind(self, node: ast.AST) -> Kind | None:
        """The kind of an expression, None where it is not certain."""
        return self._settled(node)

    def _settled(self, node: ast.AST | Binding) -> Kind | None:
        if node not in self._known:
            if self._steps > _STEPS or self._depth > _DEPTH:
                return None
            self._known[node] = None  # ends the recursion of values defined by themselves
            self._steps += 1
            self._depth += 1
            try:
                known = self._kind_of_binding(node) if isinstance(node, Binding) else self._kind(node)
            finally:
                self._depth -= 1
            self._known.pop(node, None)
            self._known[node] = known  # moved behind the entries it rests on: _kind_of_open drops by order
        return self._known[node]

    def kind_of_any(self, bindings: Iterable[Binding]) -> Kind | None:
        """The kind of a name that may have any of these bindings; None if they differ.

        The kind of ``x`` in ``x = x.flatten(1)`` rests on itself: it is assumed, then dropped if that proves wrong.
        """
        kinds, open_ = set(), []
        for binding in bindings:
            if isinstance(binding.value, ast.Constant) and binding.value.value is None and not binding.item:
                continue  # ``x = None``: another binding sets it before its use
            if binding in self._open:
                open_.append(binding)
            else:
                kinds.add(self._kind_of_open(binding))
        kind = kinds.pop() if len(kinds) == 1 else None
        self._assumed += [(binding, kind) for binding in open_]
        return kind

    def _kind_of_open(self, binding: Binding) -> Kind | None:
        if binding in self._known:
            return self._known[binding]
        before = len(self._known)
        self._open.add(binding)
        kind = self._settled(binding)
        self._open.discard(binding)
        wrong = any(assumed is not kind for b, assumed in self._assumed if b is binding)
        self._assumed = [(b, assumed) for b, assumed in self._assumed if b is not binding]
        if wrong:
            for node in list(self._known)[before:]:
                del self._known[node]
            kind = self._known[binding] = None
        return kind

    def _kind(self, node: ast.AST) -> Kind | None:
        if isinstance(node, ast.Name):
            return self._kind_of_name(node)
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
        if isinstance(node, (ast.Tuple, ast.List)):
            return Kind.TENSORS if node.elts and all(map(self.is_tensor, node.elts)) else None
        return None

    def _kind_of_name(self, node: ast.Name) -> Kind | None:
        reached = self.flow.definitions.get(node)
        return self.kind_of_any(reached) if reached is not None else self._kind_around(node.id)

    def _kind_around(self, name: str) -> Kind | None:
        """The kind of a name of an enclosing function, over all of its bindings there."""
        if self._around is None:
            return None
        flow = self._around.flow
        bindings = [*flow.bindings.get(name, []), *([flow.parameters[name]] if name in flow.parameters else [])]
        return self._around.kind_of_any(bindings) if bindings else self._around._kind_around(name)

    def _kind_of_binding(self, binding: Binding) -> Kind | None:
        if binding.parameter is not None:
            return self._kind_of_parameter(binding)
        if isinstance(binding.statement, ast.AugAssign):
            target = binding.statement.target
            return self.kind(target) or self.kind(binding.statement.value) if isinstance(target, ast.Name) else None
        kind = self._kind_of_value(binding)
        return Kind.TENSOR if kind is None and self._is_result(binding) else kind

    def _kind_of_value(self, binding: Binding) -> Kind | None:
        if binding.value is None:
            return None
        if not binding.item:
            return self.kind(binding.value)
        if binding.index is not None and isinstance(binding.value, ast.Call):
            called = self.called(binding.value)
            kind = called.returned(binding.index) if called is not None else None
            if kind is not None:
                return kind
        kind = self.kind(binding.value)
        if kind is Kind.SHAPE and binding.index is not None:
            return Kind.SIZE
        return Kind.TENSOR if kind in (Kind.TENSOR, Kind.TENSORS) else None

    def _is_result(self, binding: Binding) -> bool:
        """Whether the value is the result of a call in a forward and is used as only a tensor can be."""
        if binding.value is None or self.function.reach is not Reach.FORWARD:
            return False
        root: ast.AST = binding.value
        while isinstance(root, (ast.Attribute, ast.Subscript, ast.Call)):
            root = root.func if isinstance(root, ast.Call) else root.value
        if not isinstance(root, ast.Name) or (root.id in self.file.names and root.id != "super"):
            return False
        known = isinstance(binding.value, ast.Call) and not binding.item
        return any(self._shows_tensor(use, known) for use in binding.uses if self.is_only(use, binding))

    def _kind_of_parameter(self, binding: Binding) -> Kind | None:
        parameter = binding.parameter
        assert parameter is not None
        if parameter.annotation is not None:
            if is_tensor_annotation(parameter.annotation, self.file.qualified):
                return Kind.TENSOR
            return Kind.TENSORS if tensors_of_annotation(parameter.annotation, self.file.qualified) else None
        name = parameter.arg
        if any(self._asks_for_type(call, name) for call in self.function.all(ast.Call)):
            return None
        return Kind.TENSOR if self._is_used_as_tensor(binding) else self._kind_given(name)

    def _is_used_as_tensor(self, binding: Binding) -> bool:
        """Whether one of the uses of a parameter is such as only a tensor has."""
        if binding not in self._shown:
            self._shown[binding] = False  # ends the recursion of functions that call each other
            # A use that another binding may reach tells nothing of the parameter itself.
            only = (use for use in binding.uses if self.is_only(use, binding))
            self._shown[binding] = any(self._shows_tensor(use) for use in only)
        return self._shown[binding]

    def kind_of_parameter(self, name: str) -> Kind | None:
        """The kind of a parameter."""
        return self.kind_of_any([self.flow.parameters[name]])

    def _kind_given(self, name: str) -> Kind | None:
        """The kind of the argument that all callers in this file give for a parameter; None if they differ."""
        sites = self.peers.sites.get(self.function, [])
        given = {peer.kind(a) if (a := argument(self.function, call, name)) else None for peer, call in sites}
        return given.pop() if len(given) == 1 else None

    def target(self, call: ast.Call) -> Function | None:
        """The function of this file that a call runs: a helper, a method of ``self``, or a layer's forward."""
        name = self.file.qualified(call.func) or ""
        if name in self.file.helpers and name not in self.bindings:
            return self.file.helpers[name]
        owner = self.function.owner
        attribute = "forward" if name == "self" else name.removeprefix("self.")
        method = owner.method(attribute) if owner and (name == "self" or name.startswith("self.")) else None
        if method is not None:
            return method
        layer: ast.expr = call.func
        of_layer = "forward"
        if not self.layers(layer) and isinstance(layer, ast.Attribute):  # self.cell.start(x)
            of_layer = layer.attr
            layer = layer.value
        classes = {self.file.classes.get(c) for c in self.layers(layer)}
        (only,) = classes if len(classes) == 1 else (None,)
        return only.method(of_layer) if only is not None else None

    def called(self, call: ast.Call) -> Kinds | None:
        """The function of this file that a call runs, with its kinds."""
        target = self.target(call)
        return self.peers.get(target) if target is not None else None

    def layers(self, node: ast.AST) -> list[str]:
        """The classes that a layer may be: ``self.conv``, ``self.layers[i]``, or a name for one.

        A name is one by the annotation of an argument, as the target of a loop over a list, or where it is made.
        """
        owner, binding = self.function.owner, self.definition(node)
        if binding is not None and binding.parameter is not None:
            name = self.file.qualified(binding.parameter.annotation) if binding.parameter.annotation else None
            return [name] if name in self.file.classes and name else []
        if isinstance(node, ast.Call):  # Model(), Model().cuda().eval()
            moved = isinstance(node.func, ast.Attribute) and node.func.attr in _MOVED
            name = self.file.qualified(node.func) or ""
            return self.layers(node.func.value) if moved else [name] if name in self.file.classes else []  # type: ignore[attr-defined]
        if owner is None:
            return self.layers(binding.value) if binding is not None and binding.value and not binding.item else []
        if binding is not None and binding.value is not None and (binding.index is None or not binding.item):
            names = self.layers(binding.value)
            return owner.items.get(self.file.qualified(binding.value) or "", []) if binding.item else names
        if isinstance(node, ast.Subscript):
            return owner.items.get(self.file.qualified(node.value) or "", [])
        return owner.layers.get(self.file.qualified(node) or "", [])

    def returned(self, index: int | None = None) -> Kind | None:
        """The kind of the function's result, or of the item ``index`` of its result."""
        if index not in self._returned:
            self._returned[index] = None
            self._returned[index] = self._kind_returned(index)
        return self._returned[index]

    def _kind_returned(self, index: int | None) -> Kind | None:
        annotation = self.function.node.returns
        if annotation is not None and index is None and is_tensor_annotation(annotation, self.file.qualified):
            return Kind.TENSOR
        kinds = set()
        for node in self.function.all(ast.Return):
            if node.value is None:
                return None
            value = self.value_of(node.value)
            if index is not None and isinstance(value, ast.Tuple):
                kinds.add(self.kind(value.elts[index]) if index < len(value.elts) else None)
            else:
                kind = self.kind(value)
                kinds.add(Kind.TENSOR if index is not None and kind is Kind.TENSORS else None if index else kind)
        return kinds.pop() if len(kinds) == 1 else None

    def _asks_for_type(self, call: ast.Call, name: str) -> bool:
        """Whether ``call`` is ``isinstance(name, ...)``, so that the name may be something other than a tensor."""
        first = call.args[0] if call.args else None
        return self.file.qualified(call.func) == "isinstance" and isinstance(first, ast.Name) and first.id == name

    def _shows_tensor(self, use: ast.Name, certain: bool = True) -> bool:
        """Whether a name is used as only a tensor can be; more counts in a forward, which takes no numpy arrays.

        Args:
            certain: whether methods that other classes have too are enough.
        """
        parent = self.file.parents[use]
        in_forward = self.function.reach is Reach.FORWARD
        if isinstance(parent, ast.Attribute):
            if in_forward and parent.attr in ("shape", "ndim", "device", "dtype"):
                return certain or parent.attr in ("shape", "ndim")
            call = self.file.parents[parent]
            methods = UNMISTAKABLE
            if in_forward:
                methods |= METHODS | {"size", "dim", "unbind", "chunk", "topk"} if certain else _SHAPING
            called = isinstance(call, ast.Call) and call.func is parent
            if called and in_forward and parent.attr == "split":  # strings have it too, but without axes
                return any(k.arg == "dim" for k in call.keywords)  # type: ignore[attr-defined]
            return called and parent.attr in methods - {"type", "take"}
        if isinstance(parent, ast.Subscript) and parent.value is use:
            return in_forward and is_of_axes(parent.slice)
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.MatMult):
            return in_forward
        if not in_forward or not isinstance(parent, ast.Call):
            return False
        callee = self.called(parent)
        if callee is not None:
            return callee.takes_tensor(parent, use)
        if parent.args[:1] != [use]:
            return False
        name = self.file.qualified(parent.func) or ""
        if self.layers(parent.func):
            return {*self.layers(parent.func)} <= MODULE_OUTPUT
        module, _, last = name.rpartition(".")
        return module in ("torch", "torch.nn.functional") and last in METHODS | LIKE_CREATORS

    def takes_tensor(self, call: ast.Call, given: ast.expr) -> bool:
        """Whether the function's parameter, for which ``call`` gives a value, is a tensor by annotation or uses."""
        p = parameter(self.function, call, given)
        if p is None or p.annotation is not None:
            return p is not None and is_tensor_annotation(p.annotation, self.file.qualified)
        asked = any(self._asks_for_type(call, p.arg) for call in self.function.all(ast.Call))
        return not asked and self._is_used_as_tensor(self.flow.parameters[p.arg])

    def _kind_of_call(self, node: ast.Call) -> Kind | None:
        name = self.file.qualified(node.func) or ""
        if name.rpartition(".")[2] == "Parameter":
            return Kind.TENSOR
        layers = {*self.layers(node.func)}
        if layers and layers <= MODULE_OUTPUT:
            return Kind.TENSOR
        called = self.called(node)
        if called is not None:
            return called.returned()
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
        dim = integer(call.keywords.get("dim"))  # numpy calls it axis
        if call.name in ("max", "min") and integer(call.get(0, "dim")) is None:  # of all elements, or of two tensors
            return Kind.TENSOR if self.is_tensor(call.input) else None
        if call.name in SEVERAL:
            return Kind.TENSORS if not call.is_method or dim is not None or self.is_tensor(call.input) else None
        if not call.is_method:
            return None
        if call.name in UNMISTAKABLE or (call.name in REDUCTIONS and dim is not None):
            return Kind.TENSOR
        if call.name == "size":
            if self.kind(call.input) is not Kind.TENSOR and not isinstance(call.input, (ast.Name, ast.Attribute)):
                return None
            return Kind.SIZE if node.args or node.keywords else Kind.SHAPE
        known = call.name in METHODS | FUNCTIONS and "as_tuple" not in call.keywords
        return Kind.TENSOR if known and self.is_tensor(call.input) else None

    def _kind_of_attribute(self, node: ast.Attribute) -> Kind | None:
        if node.attr == "shape":
            return Kind.SHAPE if not self._is_foreign(node.value) else None
        if node.attr in ("T", "mT", "data", "real", "imag", "grad", "H"):
            return self.kind(node.value)
        if node.attr in ("values", "indices"):
            call = self.call(self.value_of(node.value))
            return Kind.TENSOR if call is not None and call.name in SEVERAL and self.kind(call.node) else None
        owner = self.function.owner
        if owner is not None and isinstance(node.value, ast.Name) and node.value.id == "self":
            return Kind.TENSOR if node.attr in owner.buffers or node.attr in owner.tensors else None
        return Kind.TENSOR if node.attr in ("weight", "bias") and self.layers(node.value) else None

    def _is_foreign(self, node: ast.AST) -> bool:
        """Whether ``node`` is known to be no tensor: it calls another package, such as numpy."""
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
