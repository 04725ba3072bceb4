"""Half models that sample where their float32 form does: what coordinates are computed from stays float32."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from svexport.exporter.typed import (
    CONVERTS,
    Call,
    Calls,
    Computed,
    Plan,
    at,
    coordinates_of,
    is_wide,
    mixed,
    put,
    takes_both,
)
from svexport.ops.grid_sample import grid_sample
from svexport.progress import phase
from svexport.tracing.arguments import Types, bind, eval_mode, in_type, leaves, rebuild
from svexport.tracing.state import unchanged

__all__ = ["Followed", "Origin", "half_model"]

Origin = Call | int | str
"""What numbers come from: a call, an input by its place, a parameter or buffer by its name."""

_PRODUCTS = {
    *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "tensordot", "einsum"),
    *("bilinear", "scaled_dot_product_attention"),
}
_LAYERS = {
    *_PRODUCTS,
    *("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc"),
    *("embedding", "embedding_bag", "batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm", "prelu"),
    *("multi_head_attention_forward", "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell"),
    *("rnn_relu_cell", "deform_conv2d", "add_bias_residual_layer_norm", "transformer_decoder"),
}
"""Functions that make features, of parameters."""

_JOINS = {"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack"} | CONVERTS
"""Functions that round nothing."""


@dataclass
class _Seen:
    """What was learned of a call.

    Attributes:
        before: what it is given, but constants.
        learned: whether that is parameters and what is computed of them alone.
        features: whether it is a layer, or is given what a layer made.
        border: whether coordinates are not followed beyond it: a layer, of more than parameters, or a product of
            features.
        types: of the tensors that it is given, by their places among them.
    """

    before: set[Origin] = field(default_factory=set)
    learned: bool = True
    features: bool = False
    border: bool = False
    types: dict[int, torch.dtype] = field(default_factory=dict)


class Followed(Calls):
    """Follows where the numbers of a forward come from.

    Attributes:
        seen: its calls, in the order of execution.
        coordinates: what samplers are given as such.
    """

    def __init__(self, model: nn.Module, inputs: Collection[Tensor] = ()) -> None:
        super().__init__(model)
        held = [*model.named_parameters(), *model.named_buffers()]
        self._parameters = {name for name, _ in model.named_parameters()}
        # Tensors with what they come from; they are kept alive, for others would get their ids.
        self._origins: dict[int, tuple[Tensor, frozenset[Origin]]] = {id(t): (t, frozenset({n})) for n, t in held}
        self._origins |= {id(t): (t, frozenset({place})) for place, t in enumerate(inputs)}
        self.seen: dict[Call, _Seen] = {}
        self.coordinates: set[Origin] = set()

    def call(self, call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Notes what it is given."""
        for place in coordinates_of(func, args, kwargs):
            self.coordinates |= self._of(at((args, kwargs), place))
        self._note(call, (args, kwargs))
        return self._mark(func(*args, **kwargs), {call})

    def typed(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Notes what is converted."""
        result = func(*args, **kwargs)
        if is_wide(result):
            call = self.place(name, sys._getframe(2))
            self._note(call, args[:1] if name in CONVERTS else ())
            self._mark(result, {call})
        return result

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result comes from where its numbers do."""
        return self._mark(func(*args, **kwargs), self._of((args, kwargs)))

    def in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What is changed comes from where all of it does."""
        origins = self._of((args, kwargs))
        result = super().in_place(func, args, kwargs)
        self._mark(args[:1], origins)
        return self._mark(result, origins)

    def upstream(self, places: Collection[Origin]) -> dict[Origin, None]:
        """What numbers are computed from, themselves first, up to layers and products of features."""
        waiting, found = sorted(places, key=str), dict[Origin, None]()
        while waiting:
            origin = waiting.pop()
            if origin in found or (isinstance(origin, Call) and self.seen[origin].border):
                continue
            found[origin] = None
            if isinstance(origin, Call):
                waiting += sorted(self.seen[origin].before, key=str)
        return found

    def parameters(self, calls: Collection[Call]) -> set[str]:
        """Names of the parameters and buffers that calls are given."""
        return {origin for call in calls for origin in self.seen[call].before if isinstance(origin, str)}

    def kept(self) -> dict[Origin, str]:
        """What stays float32: what coordinates are computed from, and what is computed of that alone."""
        kept = dict.fromkeys(self.upstream(self.coordinates), "coordinates")
        constant = self._constants()
        numbers = {call: seen.before - constant - {call} for call, seen in self.seen.items() if not seen.border}
        alone = {call for call, before in numbers.items() if any(not isinstance(origin, str) for origin in before)}
        while other := {call for call in alone - kept.keys() if not numbers[call] <= kept.keys() | alone}:
            alone -= other
        for call in [call for call in self.seen if call in alone - kept.keys()]:
            also = [call, *self.upstream(self.seen[call].before & constant)]
            kept = {**dict.fromkeys(also, "of coordinates alone"), **kept}
        for call, seen in self.seen.items():  # but what only moves numbers of half types
            before = seen.before - {call}
            if call in kept and call.function in _JOINS and before and kept.keys().isdisjoint(before):
                del kept[call]
        return kept

    def _constants(self) -> set[Origin]:
        found = set[Origin]()
        for call, seen in self.seen.items():
            if seen.before - {call} <= found:
                found.add(call)
        return found

    def _of(self, values: Any) -> set[Origin]:
        found = (self._origins.get(id(x)) for x in tree_leaves(values) if isinstance(x, Tensor))
        return {origin for one in found if one is not None for origin in one[1]}

    def _mark(self, result: Any, origins: Collection[Origin]) -> Any:
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._origins[id(x)] = x, frozenset(origins)
        return result

    def _note(self, call: Call, given: Any) -> None:
        seen = self.seen.setdefault(call, _Seen())
        operands = []
        for place, x in enumerate(tree_leaves(given)):
            if is_wide(x):
                before = seen.types.get(place, x.dtype)
                seen.types[place] = torch.promote_types(before, x.dtype)
                operands.append(self._of(x))
        seen.before |= {origin for operand in operands for origin in operand}
        learned = [bool(operand) and all(map(self._learned, operand)) for operand in operands]
        features = [any(map(self._features, operand)) for operand in operands]
        seen.learned &= all(learned)
        seen.border |= call.function in _LAYERS and any(learned) and not all(learned)
        seen.border |= call.function in _PRODUCTS and len(operands) > 1 and all(features)
        seen.features |= seen.border or any(features)

    def _learned(self, origin: Origin) -> bool:
        if isinstance(origin, Call):
            return self.seen[origin].learned and bool(self.seen[origin].before)
        return origin in self._parameters

    def _features(self, origin: Origin) -> bool:
        return isinstance(origin, Call) and self.seen[origin].features


@dataclass(frozen=True)
class _Sampling(Plan):
    """Coordinates in float32, everything else in the types that the half model has by itself.

    Attributes:
        given: the types of what the other calls are given, by its places.
        inputs: places of inputs that stay as they are.
        results: the types of the results.
    """

    given: Mapping[Call, Mapping[int, torch.dtype]] = field(default_factory=dict)
    inputs: frozenset[int] = frozenset()
    results: tuple[torch.dtype, ...] = ()

    @property
    def forward(self) -> Types:
        return Types(self.dtype, self.inputs, self.results, self.mode)

    def mode(self, model: nn.Module) -> TorchFunctionMode:
        return _AsSampled(model, self)


class _AsSampled(Computed):
    plan: _Sampling

    def call(self, call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args, kwargs
        flat, spec = tree_flatten(given)
        kept, types = call in self.plan.calls, self.plan.given.get(call, {})

        def typed(place: int, x: Any) -> Any:
            return x.to(torch.float32 if kept else types.get(place, self.plan.dtype)) if is_wide(x) else x

        args, kwargs = tree_unflatten([typed(place, x) for place, x in enumerate(flat)], spec)
        if kept or not takes_both(func):
            return func(*args, **kwargs)
        for place in coordinates_of(func, *given):
            args, kwargs = put((args, kwargs), place, at(given, place))
        if func is F.grid_sample and len({x.dtype for x in tree_leaves((args, kwargs)) if is_wide(x)}) > 1:
            func = grid_sample
        return func(*args, **kwargs)


def half_model(
    model: nn.Module, arguments: tuple[Any, dict[str, Any]], dtype: torch.dtype
) -> tuple[nn.Module, Plan | None]:
    """A copy in a half type that samples at float32 coordinates, and which calls that takes; None where none are.

    Where nothing is sampled, or forward cannot be followed (scripted modules), everything is in the type.
    """
    half = in_type(model, dtype)
    followed = _followed(half, arguments, dtype)
    kept = followed[0].kept() if followed else {}
    if followed is None or not kept:
        return half, None
    one, results = followed
    calls = {call: why for call, why in kept.items() if isinstance(call, Call)}
    kind = str(dtype).removeprefix("torch.")
    plan = _Sampling(
        dtype,
        calls,
        f"coordinates stay float32, {len(calls)} calls that compute them (report.kept); keep=[] has them in {kind}",
        {call: seen.types for call, seen in one.seen.items() if call not in calls},
        frozenset(place for place in kept if isinstance(place, int)),
        results,
    )
    return mixed(in_type(model, torch.float32), dtype, one.parameters(calls)), plan


def _followed(
    half: nn.Module, arguments: tuple[Any, dict[str, Any]], dtype: torch.dtype
) -> tuple[Followed, tuple[torch.dtype, ...]] | None:
    """A forward of a half model, without numbers if it takes that; with the types of its results."""
    if any(isinstance(m, torch.jit.ScriptModule) for m in half.modules()) or any(
        map(nn.parameter.is_lazy, half.parameters())
    ):
        return None
    phase("following coordinates")
    for numbers in (FakeTensorMode(allow_non_fake_inputs=True), nullcontext()):
        try:
            with eval_mode(half), unchanged(half), torch.no_grad(), numbers:
                return _forward(half, arguments, dtype)
        except Exception:  # noqa: BLE001 - it looks at numbers, or fails in the tracers, too, which say why
            continue
    return None


def _forward(
    half: nn.Module, arguments: tuple[Any, dict[str, Any]], dtype: torch.dtype
) -> tuple[Followed, tuple[torch.dtype, ...]]:
    bound, inputs = bind(half, *arguments), list[Tensor]()

    def take(t: Tensor) -> Tensor:
        # A result of a function, which is one without numbers where those are not asked for.
        inputs.append(torch.clone(t).to(dtype) if t.is_floating_point() else torch.clone(t))
        return inputs[-1]

    given = inspect.BoundArguments(bound.signature, rebuild(dict(bound.arguments), take))
    mode = Followed(half, inputs)
    with mode:
        result = half(*given.args, **given.kwargs)
    return mode, tuple(leaf.dtype for _, leaf in leaves(result) if isinstance(leaf, Tensor))
