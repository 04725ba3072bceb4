"""Finds the parts of a module's forward that are ops, whatever they are called, in its graph.

A module's own code is recorded as a graph of torch's functions (:mod:`traced`). Finders propose parts of the graph that
an op may compute. A proposal is proven on the model's values, on other values and by its gradients, and then replaces
the part. The graph becomes the forward of a new class (:mod:`rewrite`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from svexport import ops
from svexport.exporter.functions import FUNCTIONS, NAMES, whole
from svexport.exporter.patterns import (
    attention,
    camera_sample,
    decoder,
    einsum,
    encoder,
    layer_norm,
    ms_deform_attn,
    projections,
    space_to_depth,
)
from svexport.exporter.patterns.pattern import Pattern, prove
from svexport.exporter.patterns.rewrite import Rewrite, apply, replace_nodes, rewrite_of, whole_of
from svexport.exporter.patterns.traced import NotTraced, Traced, trace
from svexport.exporter.proof import Proof
from svexport.ops._module import DropIn

__all__ = ["DECODER", "FINDERS", "Part", "Patterns"]

DECODER = decoder.OP

FINDERS: dict[str, Callable[[Traced], Iterator[Pattern]]] = {
    "camera_sample": camera_sample.find,
    "scaled_dot_product_attention": attention.find,
    "ms_deform_attn": lambda traced: chain(ms_deform_attn.find(traced), projections.find(traced)),
    "einsum": einsum.find,
    "space_to_depth": space_to_depth.find,
    "add_bias_residual_layer_norm": layer_norm.find,
}
"""Finders by op, the largest part first."""

_ANCHORS = camera_sample.SAMPLERS | attention.SOFTMAX | {torch.Tensor.softmax}
"""Functions of which parts have one: modules that call none, and no other of a part's, are not recorded."""

_ADDS = {torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__}
_PRODUCTS = {torch.mul, torch.multiply, torch.Tensor.mul, torch.Tensor.multiply}
_PRODUCTS |= {torch.Tensor.__mul__, torch.Tensor.__rmul__}
_SUMS = {torch.sum, torch.Tensor.sum}

FORWARD = "its forward as a graph"
"""What is left alone where no part can be looked for."""

FRUITLESS = 3
"""After this many modules of a class without a match, no more modules of that class are searched."""


@dataclass
class Part:
    """A part of a module's forward that is an op, or was nearly one.

    Attributes:
        what: the part in words, or the function of torch.
        op: its name.
        proof: of the two being the same; with a fault if the part is left as it is.
    """

    what: str
    op: str
    proof: Proof


@dataclass
class Patterns:
    """Finds the parts in every module of a model that its forward calls.

    Attributes:
        chosen: whether a part of a module, by its name, may be an op.
        skipped: names of whole functions that are none.
        rewrites: new forwards by the module's name.
        wholes: likewise, that run in the place of submodules.
        cores: likewise, with nothing but the parts of decoders as ops.
        parts: what was found there, and what was nearly.
        proofs: of the same parts of the same graphs before, which are not proven again.
        unread: by the module's name, what could not be read as a graph, and why.
    """

    chosen: Callable[[str, str], bool]
    skipped: Set[str] = frozenset()
    rewrites: dict[str, Rewrite] = field(default_factory=dict)
    wholes: dict[str, Rewrite] = field(default_factory=dict)
    cores: dict[str, Rewrite] = field(default_factory=dict)
    parts: dict[str, list[Part]] = field(default_factory=dict)
    proofs: dict[Any, tuple[int | None, Proof, str]] = field(default_factory=dict)
    unread: dict[str, tuple[str, str]] = field(default_factory=dict)

    def watch(self, model: nn.Module) -> _Anchors:
        """A context for a forward of a model, which looks into its modules when they are first called."""
        seen: set[nn.Module] = set()
        fruitless: Counter[type] = Counter()
        unread: dict[type, str] = {}
        anchors = _Anchors()

        def looks(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
                called = anchors.leave()
                if module in seen or anchors.is_asleep:
                    return
                seen.add(module)
                with anchors.asleep():
                    if called and fruitless[type(module)] < FRUITLESS:
                        self._look(name, module, args, kwargs)
                        fruitless[type(module)] += name not in self.parts
                        if name in self.unread:
                            unread[type(module)] = self.unread[name][1]
                    elif called and type(module) in unread:
                        self.unread[name] = FORWARD, unread[type(module)]
                    self._look_at_whole(name, module, args, kwargs)

            return hook

        for name, module in model.named_modules():
            library = type(module).__module__.partition(".")[0] in ("torch", "svexport")
            if not library and not isinstance(module, (DropIn, torch.jit.ScriptModule)):
                module.register_forward_pre_hook(lambda *_: anchors.enter())
                module.register_forward_hook(looks(name), prepend=True, with_kwargs=True)
        return anchors

    def applied(self, model: nn.Module) -> nn.Module:
        """The model, its modules with their new forwards."""
        for name, rewrite in (*self.rewrites.items(), *self.wholes.items()):
            apply(model.get_submodule(name), rewrite)
        return model

    def _look(self, name: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if not any(self.chosen(name, op) for op in FINDERS):
            return
        try:
            traced = trace(module, args, kwargs, leaves=self._wholes(module))
            parts = self._parts(name, traced)
        except Exception as error:  # noqa: BLE001 - a forward that cannot be read stays as it is
            self.unread[name] = FORWARD, _reason(error)
            return
        if any(not part.proof.fault for part in parts):
            try:
                self.rewrites[name] = rewrite_of(traced)
            except NotTraced as error:
                for part in parts:
                    part.proof = Proof(fault=str(error))
        if parts:
            self.parts[name] = parts

    def _look_at_whole(self, name: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Whether a module that holds some with parts is a decoder, or an encoder; the innermost is."""
        prefix = f"{name}." if name else ""
        below = {n: parts for n, parts in self.parts.items() if n != name and n.startswith(prefix)}
        held = Counter(part.op for parts in below.values() for part in parts if not part.proof.fault)
        layers = {held[op] for op in decoder.PARTS}  # of each part one a layer
        if not held[decoder.OP] and len(layers) == 1 and 0 not in layers and self.chosen(name, decoder.OP):
            self._look_at_decoder(name, module, args, kwargs)
        projected = [
            n for n, parts in below.items() if any(p.what == projections.WHAT and not p.proof.fault for p in parts)
        ]
        if len(projected) > 1 and not self.wholes.keys() & {name, *below} and self.chosen(name, encoder.OP):
            self._look_at_encoder(name, module, args, kwargs)

    @contextmanager
    def _cores(self, name: str, module: nn.Module) -> Iterator[set[type]]:
        """Gives submodules forwards with only the parts as ops; yields their classes."""
        prefix = f"{name}." if name else ""
        below = [n for n in self.cores if n != name and n.startswith(prefix)]
        inner = {module.get_submodule(n.removeprefix(prefix)): self.cores[n] for n in below}
        kinds: dict[nn.Module, Any] = {m: type(m) for m in inner}
        try:
            for m, rewrite in inner.items():
                apply(m, rewrite)
            yield {type(m) for m in inner}
        finally:
            for m, kind in kinds.items():
                m.__class__ = kind

    def _look_at_decoder(self, name: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        prefix = f"{name}." if name else ""
        try:
            with self._cores(name, module) as kinds:
                with _ops_recorded(kinds):
                    traced = trace(module, args, kwargs, inline=True)
                found = decoder.find(traced)
                if found is None:
                    return
                proof, joined = decoder.prove(traced, found)
                if not proof.fault:
                    decoder.put(traced, found, bool(joined))
                    whole = whole_of(module, traced.inlined, found.modules, gradients=joined is not None)
                    self.wholes[name] = rewrite_of(traced, whole)
                    self.unread = {
                        n: u for n, u in self.unread.items() if u[0] != decoder.WHAT or not n.startswith(prefix)
                    }
        except Exception as error:  # noqa: BLE001 - a graph that is read as a decoder may be anything
            self.unread.setdefault(name, (decoder.WHAT, _reason(error)))
            return
        what = decoder.WHAT if joined is not None else f"{decoder.WHAT}, without gradients"
        self.parts.setdefault(name, []).append(Part(what, decoder.OP, proof))

    def _look_at_encoder(self, name: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        try:
            with self._cores(name, module) as kinds, _ops_recorded(kinds):
                traced = trace(module, args, kwargs, inline=True)
            found = encoder.find(traced)
            if found is None:
                return
            encoder.put(traced, found)
            steps = [(path,) for path in found.modules]
            whole = whole_of(module, (*traced.inlined, *found.between), steps, gradients=True, plain=True)
            rewrite = rewrite_of(traced, whole)
            proof = encoder.prove(module, rewrite, args, kwargs)
        except Exception as error:  # noqa: BLE001 - a graph that is read as an encoder may be anything
            self.unread.setdefault(name, (encoder.WHAT, _reason(error)))
            return
        if not proof.fault:
            self.wholes[name] = rewrite
        self.parts.setdefault(name, []).append(Part(encoder.WHAT, encoder.OP, proof))

    def _parts(self, name: str, traced: Traced) -> list[Part]:
        parts = []
        key = _key(traced)
        for op, find in FINDERS.items():
            if not self.chosen(name, op):
                continue
            count = 0
            while True:
                found, proof, what = self._first(traced, find, (key, op, count, self._skipped(name)))
                if found is None:
                    if proof.fault:
                        parts.append(Part(what, op, proof))
                    break
                count += 1
                parts.append(Part(found.what, op, proof))
                _put(traced, found)
            if op in (decoder.PARTS[-1], encoder.OP) and any(not part.proof.fault for part in parts):
                with suppress(NotTraced):
                    self.cores[name] = rewrite_of(traced)
        if any(not part.proof.fault for part in parts):
            parts += _functions(traced, lambda op: self.chosen(name, op))
        return parts

    def _wholes(self, module: nn.Module) -> list[FunctionType]:
        """The functions around a module's forward that are known to be an op as a whole."""
        known = [f for f in type(module).forward.__globals__.values() if isinstance(f, FunctionType)]  # type: ignore[attr-defined]
        return [f for f in known if f.__code__.co_name not in self.skipped and whole(f.__code__)]

    def _skipped(self, name: str) -> tuple[str, ...]:
        return tuple(op for op in FINDERS if not self.chosen(name, op))

    def _first(
        self, traced: Traced, find: Callable[[Traced], Iterator[Pattern]], key: Any
    ) -> tuple[Pattern | None, Proof, str]:
        """The first that is proven, or the fault of the first that is not."""
        if key in self.proofs:
            index, proof, what = self.proofs[key]
            patterns = (p for i, p in enumerate(find(traced)) if i == index)
            return (None if index is None else next(patterns)), proof, what
        fault, what = Proof(), ""
        for index, pattern in enumerate(find(traced)):
            proof = prove(traced, pattern)
            if not proof.fault:
                self.proofs[key] = index, proof, pattern.what
                return pattern, proof, pattern.what
            if not fault.fault:
                fault, what = proof, pattern.what
        self.proofs[key] = None, fault, what
        return None, fault, what


def _put(traced: Traced, found: Pattern) -> None:
    """Replaces a part by an op."""
    first = next(node for node in traced.graph.nodes if node in found.outputs)
    with traced.graph.inserting_before(first):
        built = found.build(traced.graph)
    new = built if found.more else (built,)
    for node, old in zip(new, found.outputs, strict=True):
        traced.values[node] = traced.values[old]
    replace_nodes(traced.graph, found.outputs, new, found.modules)
    traced.forget()


@contextmanager
def _ops_recorded(kinds: Iterable[Any]) -> Iterator[None]:
    """Makes new forwards of these classes record the ops of parts, which check their arguments, as one call each."""
    changed: list[tuple[dict[str, Any], str, Any]] = []
    plain = [getattr(ops, op) for op in decoder.PARTS]

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            proxies: list[fx.Proxy] = []
            for value in (*args, *kwargs.values()):
                proxies += [
                    v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, fx.Proxy)
                ]
            if not proxies:
                return function(*args, **kwargs)
            return proxies[0].tracer.create_proxy("call_function", function, args, kwargs)

        return call

    def attends(layers: Sequence[nn.Module], shape: tuple[int, int, int], *tensors: Any) -> Any:
        return recorded(encoder.Attention(layers, shape))(*tensors)

    for kind in kinds:
        names = kind.forward.__globals__
        for name, value in list(names.items()):
            if value in plain or value is projections.projected_deform_attn:
                changed.append((names, name, value))
                names[name] = recorded(value) if value in plain else attends
    try:
        yield
    finally:
        for names, name, value in changed:
            names[name] = value


class _Anchors(TorchFunctionMode):
    """Notes which modules' own code calls what parts have."""

    def __init__(self) -> None:
        super().__init__()
        self._called = [False]
        self._sums: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._products: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.is_asleep = False

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.is_asleep:
            self._called[-1] |= self._is_anchor(func, args, result)
        return result

    def _is_anchor(self, func: Any, args: Sequence[Any], result: Any) -> bool:
        if func in _ADDS and isinstance(result, Tensor):
            self._sums[result] = True
        elif func in _PRODUCTS and all(isinstance(x, Tensor) and x.numel() < result.numel() for x in args):
            self._products[result] = True
        if func in _SUMS:
            return bool(args) and args[0] in self._products
        if func is F.layer_norm:
            return bool(args) and args[0] in self._sums
        if func in space_to_depth.CATS:
            images = args[0] if args and len(args[0]) == 4 else ()
            return len({t.untyped_storage().data_ptr() for t in images if t.dim() == 4}) == 1
        return func in _ANCHORS

    def enter(self) -> None:
        if not self.is_asleep:
            self._called.append(False)

    def leave(self) -> bool:
        """Whether the module that is left, by its own code, called one."""
        return False if self.is_asleep else self._called.pop()

    @contextmanager
    def asleep(self) -> Iterator[None]:
        self.is_asleep = True
        try:
            yield
        finally:
            self.is_asleep = False


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, NotTraced) else f"{type(error).__name__}: {error}"


def _key(traced: Traced) -> Any:
    """A key of everything but weights that decides how a graph's parts turn out."""
    values = [traced.tensor(node) for node in traced.graph.nodes]
    sizes = tuple((tuple(t.shape), t.dtype, t.device) for t in values if t is not None)
    return type(traced.module), traced.graph.python_code("self").src, sizes


def _functions(traced: Traced, chosen: Callable[[str], bool]) -> list[Part]:
    """Replaces the remaining calls of torch's functions in a graph by ops, where they are equivalent."""
    parts = []
    for node in list(traced.graph.nodes):
        name, ours, op = _known(node)
        if not op or node not in traced.values or not chosen(op):
            continue
        known = all(n in traced.values for n in node.all_input_nodes)
        if not known or node.kwargs.get("out") is not None:
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: traced.values[n])
        proof = Proof()
        proof.add(traced.values[node], lambda: ours(*args, **kwargs))  # noqa: B023 - called at once
        parts.append(Part(name, op, proof))
        if not proof.fault:
            node.op, node.target = "call_function", ours
    return parts


def _known(node: fx.Node) -> tuple[str, Any, str]:
    """For a call of a function that may be an op: its name, our function, the op's name; empty for any other node."""
    name = NAMES.get(node.target, "") if node.op == "call_function" else ""  # type: ignore[arg-type]
    if node.op == "call_method":
        name = f"torch.Tensor.{node.target}"
    if name in FUNCTIONS:
        return name, FUNCTIONS[name].ours, FUNCTIONS[name].op
    code = node.target.__code__ if isinstance(node.target, FunctionType) else None
    found = whole(code) if code is not None else None
    return ("", None, "") if found is None else (code.co_name, *found)  # type: ignore[union-attr]
