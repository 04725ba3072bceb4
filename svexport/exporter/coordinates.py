"""What stays float32 in half models: coordinates, norms, and what these are computed from, back to products.

So a half model samples at the same coordinates as its float32 form. What is computed from parameters alone stays
float32 too. That costs nothing, because it is constant in the file.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from svexport.errors import UnsupportedError
from svexport.exporter.typed import (
    BIAS,
    CONVERTS,
    COORDINATES,
    LAYERS,
    MATRICES,
    PRODUCTS,
    TYPES,
    Call,
    Calls,
    Given,
    Plan,
    at,
    bias_of,
    cast,
    coordinates_of,
    differ,
    is_wide,
    mixed,
    of_one_type,
    with_bias,
    with_coordinates,
)
from svexport.ops.grid_sample import grid_sample
from svexport.progress import phase
from svexport.text import dtype_text
from svexport.tracing.arguments import Types, bind, eval_mode, in_type, rebuild
from svexport.tracing.state import unchanged

__all__ = ["Followed", "Origin", "half_model"]

Origin = Call | int | str
"""Where numbers come from: a call, an input (by index), or a parameter or buffer (by name)."""

_NORMS = {"layer_norm", "rms_norm"}
"""Norms of linear layers' results. Other norms take feature maps, which are large, or are one node with the sums before
them, which is float32 inside; ``keep="auto"`` also keeps those."""

_SUMS = {"add", "sub", "__radd__", "__rsub__", "relu"}
"""Functions before a norm that add numbers, or choose among them."""

_JOINS = {"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack"} | CONVERTS
"""Functions that join or convert tensors, and round nothing."""


@dataclass
class _Seen:
    """What was learned about a call.

    Attributes:
        before: origins of its arguments, without constants.
        learned: whether the arguments are parameters, or computed from them alone.
        fixed: whether it is computed from parameters, buffers and constants by functions that are no layers.
        features: whether it is a layer, or gets the result of a layer.
        border: whether coordinates are not followed past it: a layer of more than parameters, or a product of
            features.
        bias: origins of the bias, if it is a linear layer.
        made: dtype of its result.
    """

    before: set[Origin] = field(default_factory=set)
    learned: bool = True
    fixed: bool = True
    features: bool = False
    border: bool = False
    bias: set[Origin] = field(default_factory=set)
    made: torch.dtype = torch.float32


class Followed(Calls):
    """Follows where the numbers of a forward come from.

    Attributes:
        seen: the calls of the forward, in the order of execution.
        coordinates: origins of the coordinates that samplers get.
        differed: whether a function that takes one dtype was given several.
    """

    def __init__(self, model: nn.Module, inputs: Collection[Tensor] = ()) -> None:
        super().__init__(model)
        held = [*model.named_parameters(), *model.named_buffers()]
        self._parameters = {name for name, _ in model.named_parameters()}
        # Tensors with their origins, by id. The references keep them alive, so that no other tensor gets their id.
        self._origins: dict[int, tuple[Tensor, frozenset[Origin]]] = {id(t): (t, frozenset({n})) for n, t in held}
        self._origins |= {id(t): (t, frozenset({place})) for place, t in enumerate(inputs)}
        self.seen: dict[Call, _Seen] = {}
        self.coordinates: set[Origin] = set()
        self.differed = False

    def call(self, call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Notes the origins of its arguments.

        Raises:
            UnsupportedError: for ``out=``, because the numbers of such a tensor cannot be followed.
        """
        if kwargs.get("out") is not None:
            raise UnsupportedError(f"{call.function}(out=) is not followed; {call.source}")
        for place in coordinates_of(func, args, kwargs):
            self.coordinates |= self._of(at((args, kwargs), place))
        result = self._result(call.function, func, (args, kwargs))
        self._note(call, (args, kwargs), result)
        self.seen[call].bias |= self._of(bias_of(func, args, kwargs))
        return self._mark(result, {call})

    def typed(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Notes a conversion of dtype."""
        result = func(*args, **kwargs)
        if is_wide(result):
            call = self.place(name, sys._getframe(2))
            self._note(call, args[:1] if name in CONVERTS else (), result)
            self._mark(result, {call})
        return result

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result has the origins of the arguments."""
        return self._mark(func(*args, **kwargs), self._of((args, kwargs)))

    def _result(self, name: str, func: Any, given: Given) -> Any:
        """The result of a call in the dtypes that a plain half model has."""
        args, kwargs = of_one_type(name, given)
        self.differed |= differ(given) and (func is F.grid_sample or not differ((args, kwargs)))
        if func is F.grid_sample and differ(given):
            func = grid_sample
        half = next((x.dtype for x in tree_leaves(given) if is_wide(x)), torch.float32)
        if name not in MATRICES or half == torch.float32:
            return func(*args, **kwargs)
        args, kwargs = cast(given, torch.float32)
        return cast(func(*args, **kwargs), half)

    def in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The changed tensor gets the origins of all arguments."""
        self.differed |= differ((args, kwargs))
        origins = self._of((args, kwargs))
        result = super().in_place(func, args, kwargs)
        self._mark(args[:1], origins)
        return self._mark(result, origins)

    def upstream(self, places: Collection[Origin]) -> dict[Origin, None]:
        """The given origins, and all that they are computed from, up to layers and products of features."""
        waiting, found = sorted(places, key=str), dict[Origin, None]()
        while waiting:
            origin = waiting.pop()
            if origin in found or (isinstance(origin, Call) and self.seen[origin].border):
                continue
            found[origin] = None
            if isinstance(origin, Call):
                waiting += sorted(self.seen[origin].before, key=str)
        return found

    def parameters(self, calls: Mapping[Call, str]) -> set[str]:
        """Names of the parameters and buffers that calls get; for calls kept for their bias, only the bias."""
        given = (self.seen[call].bias if why == BIAS else self.seen[call].before for call, why in calls.items())
        return {origin for one in given for origin in one if isinstance(origin, str)}

    def kept(self, others: Mapping[Call, str] | None = None) -> dict[Origin, str]:
        """What stays float32: what coordinates are computed from, and what is computed from that alone; norms with the
        sums before them; and what is computed from parameters alone, which is constant in the file and rounded once.

        Args:
            others: further calls that stay float32, and why.
        """
        kept: dict[Origin, str] = dict.fromkeys(self.upstream(self.coordinates), "coordinates")
        for call in [call for call in self.seen if call.function in MATRICES]:
            given = self.upstream(self.seen[call].before)
            kept = {**dict.fromkeys(given, f"an argument of {call.function}"), call: "a matrix", **kept}
        constant = self._constants()
        for why, calls in (
            ("computed only from coordinates or matrices", self._alone(kept, constant)),
            ("computed only from parameters", self._of_parameters(constant)),
        ):
            for call in calls:
                also = [call, *self.upstream(self.seen[call].before & constant)]
                kept = {**dict.fromkeys(also, why), **kept}
        norms = [call for call in self.seen if call.function in _NORMS and call not in constant]
        kept = {**self._sums(norms), **dict.fromkeys(norms, "a norm"), **kept}
        kept |= dict[Origin, str]((others or {}).items())
        kept |= dict.fromkeys(self._biases(kept), BIAS)
        for call, seen in self.seen.items():  # except those that only move half numbers
            before = seen.before - {call}
            moves = call.function in _JOINS and not seen.fixed
            if moves and call in kept and before and kept.keys().isdisjoint(before):
                del kept[call]
        return kept

    def _sums(self, norms: Collection[Call]) -> dict[Origin, str]:
        """The sums that norms get, back to products."""
        waiting, found = list(norms), dict[Origin, str]()
        while waiting:
            for origin in sorted(self.seen[waiting.pop()].before - found.keys(), key=str):
                if isinstance(origin, Call) and self._adds(origin):
                    found[origin] = "a sum before a norm"
                    waiting.append(origin)
        return found

    def _biases(self, kept: Collection[Origin]) -> set[Call]:
        """Half linear layers whose results go to float32 calls: their biases stay float32 too."""
        before = {origin for call in kept if isinstance(call, Call) for origin in self.seen[call].before}
        layers = {call for call in before if isinstance(call, Call) and call not in kept}
        return {call for call in layers if self.seen[call].border and self.seen[call].bias}

    def _adds(self, call: Call) -> bool:
        """Whether a call is a sum, or a per-channel factor on the way to one."""
        numbers = [origin for origin in self.seen[call].before if not self._learned(origin)]
        return call.function in _SUMS or (call.function == "mul" and len(numbers) == 1)

    def _alone(self, kept: Collection[Origin], constant: set[Origin]) -> list[Call]:
        """Calls whose arguments are only what is kept, each other's results, parameters and constants."""
        numbers = {
            call: {origin for origin in seen.before - constant - {call} if not isinstance(origin, str)}
            for call, seen in self.seen.items()
            if not seen.border
        }
        alone = {call for call, before in numbers.items() if before}
        while other := {call for call in alone if not numbers[call] <= {*kept, *alone}}:
            alone -= other
        return [call for call in self.seen if call in alone]

    def _of_parameters(self, constant: set[Origin]) -> list[Call]:
        fixed = [call for call, seen in self.seen.items() if seen.fixed and call not in constant]
        return fixed if any(call.function not in _JOINS for call in fixed) else []

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

    def _note(self, call: Call, given: Any, result: Any) -> None:
        seen = self.seen.setdefault(call, _Seen())
        seen.made = next((x.dtype for x in tree_leaves(result) if is_wide(x)), seen.made)
        operands = [self._of(x) for x in tree_leaves(given) if is_wide(x)]
        seen.before |= {origin for operand in operands for origin in operand}
        learned = [bool(operand) and all(map(self._learned, operand)) for operand in operands]
        features = [any(map(self._features, operand)) for operand in operands]
        seen.learned &= all(learned)
        seen.fixed &= call.function not in LAYERS and all(map(self._fixed, seen.before - {call}))
        seen.border |= call.function in LAYERS and any(learned) and not all(learned)
        seen.border |= call.function in PRODUCTS and len(operands) > 1 and all(features)
        seen.features |= seen.border or any(features)

    def _learned(self, origin: Origin) -> bool:
        if isinstance(origin, Call):
            return self.seen[origin].learned and bool(self.seen[origin].before)
        return origin in self._parameters

    def _fixed(self, origin: Origin) -> bool:
        return self.seen[origin].fixed if isinstance(origin, Call) else isinstance(origin, str)

    def _features(self, origin: Origin) -> bool:
        return isinstance(origin, Call) and self.seen[origin].features


@dataclass(frozen=True)
class _Sampling(Plan):
    """Keeps some calls in float32, and everything else in the dtypes that the plain half model has.

    Attributes:
        made: dtypes in which forward sees the results of kept calls and samplers.
        inputs: indices of the inputs that coordinates are computed from.
        parameters: names of the parameters and buffers that coordinates are computed from.
    """

    made: Mapping[Call, torch.dtype] = field(default_factory=dict)
    inputs: frozenset[int] = frozenset()
    parameters: frozenset[str] = frozenset()

    @property
    def forward(self) -> Types:
        return Types(self.dtype, self.inputs, self.mode)

    def mode(self, model: nn.Module, inputs: Sequence[tuple[Tensor, Tensor]] = ()) -> TorchFunctionMode:
        return _AsSampled(model, self, inputs)


class _AsSampled(Calls):
    """Shows forward the half model's numbers. Each result of a kept call also has a float32 version, with which kept
    calls, samplers and comparisons compute."""

    def __init__(self, model: nn.Module, plan: _Sampling, inputs: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__(model)
        self._plan = plan
        self._single = {id(shown): (shown, single) for shown, single in inputs}  # references keep the ids valid
        held = [*model.named_parameters(), *model.named_buffers()]
        self._parameters = {id(t) for name, t in held if name in plan.parameters}

    def call(self, call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = self._singles((args, kwargs))
        if call in self._plan.biases and (bias := bias_of(func, *given)) is not None:
            return self._shown(call, with_bias(self._half((args, kwargs)), bias))
        if call in self._plan.calls:
            args, kwargs = cast(given, torch.float32)
            return self._shown(call, func(*args, **kwargs))
        args, kwargs = with_coordinates(func, of_one_type(call.function, self._half((args, kwargs))), given)
        if func is F.grid_sample and differ((args, kwargs)):
            func = grid_sample
        return self._shown(call, func(*args, **kwargs))

    def typed(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        (given, _) = self._singles((args, kwargs))
        if not is_wide(result):
            return func(*given, **kwargs) if name in CONVERTS else result
        call = self.place(name, sys._getframe(2))
        if call not in self._plan.calls:
            return result
        if name in CONVERTS:
            return self._shown(call, given[0].to(result.device, torch.float32))
        return self._shown(call, func(*args, **{**kwargs, "dtype": torch.float32}))

    def ask(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name not in TYPES and self._has_single((args, kwargs)):
            args, kwargs = cast(self._singles((args, kwargs)), torch.float32)
        return func(*args, **kwargs)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args, kwargs
        args, kwargs = self._half(given)
        result = func(*args, **kwargs)
        if not self._has_single(given):
            return result
        args, kwargs = cast(self._singles(given), torch.float32)
        single = func(*args, **kwargs)
        if not all(is_wide(x) for x in tree_leaves(single) if isinstance(x, Tensor)):  # indices, as of max
            return self._shown(None, single)
        for x, y in zip(tree_leaves(result), tree_leaves(single), strict=True):
            if isinstance(x, Tensor):
                self._single[id(x)] = x, y
        return result

    def in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (_, *rest), named = self._singles((args, kwargs))
        result = super().in_place(func, (args[0], *rest), named)
        if args and id(args[0]) in self._single:
            super().in_place(func, (self._single[id(args[0])][1], *rest), named)
        return result

    def _shown(self, call: Call | None, result: Any) -> Any:
        dtype = self._plan.dtype if call is None else self._plan.made.get(call, torch.float32)

        def shown(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.dtype != torch.float32 or dtype == torch.float32:
                return x
            half = x.to(dtype)
            self._single[id(half)] = half, x
            return half

        return tree_map(shown, result)

    def _half(self, values: Any) -> Any:
        return tree_map(lambda x: x.to(self._plan.dtype) if id(x) in self._parameters else x, values)

    def _singles(self, values: Any) -> Any:
        return tree_map(lambda x: self._single[id(x)][1] if id(x) in self._single else x, values)

    def _has_single(self, values: Any) -> bool:
        return any(id(x) in self._single or id(x) in self._parameters for x in tree_leaves(values))


def half_model(
    model: nn.Module, arguments: tuple[Any, dict[str, Any]], dtype: torch.dtype
) -> tuple[nn.Module, Plan | None]:
    """A copy in a half dtype whose norms and coordinates are float32, and the plan of the kept calls, if any.

    If it has neither, or forward cannot be followed (scripted modules), everything is in the half dtype.
    """
    half = in_type(model, dtype)
    followed = _followed(half, arguments, dtype)
    kept = followed.kept() if followed else {}
    if followed is None or not (kept or followed.differed):
        return half, None
    calls = {call: why for call, why in kept.items() if isinstance(call, Call)}
    parameters = followed.parameters(calls)
    kind = dtype_text(dtype)
    plan = _Sampling(
        dtype,
        calls,
        "",
        {call: seen.made for call, seen in followed.seen.items() if call in calls or call.function in COORDINATES},
        frozenset(place for place in kept if isinstance(place, int)),
        frozenset(parameters),
    )
    said = {
        "coordinates": bool(followed.coordinates & kept.keys()),
        "matrices": "a matrix" in calls.values(),
        "norms with the sums before them": "a norm" in calls.values(),
        "what follows from parameters alone": "computed only from parameters" in calls.values(),
    }
    what = " and ".join(", ".join(one for one, is_so in said.items() if is_so).rsplit(", ", 1))
    note = f"kept in float32: {what} (listed in report.kept; keep=[] computes all in {kind})" if what else ""
    return mixed(in_type(model, torch.float32), dtype, parameters), replace(plan, note=note)


def _followed(half: nn.Module, arguments: tuple[Any, dict[str, Any]], dtype: torch.dtype) -> Followed | None:
    """Follows a forward of a half model, on fake tensors if it allows that."""
    if any(isinstance(m, torch.jit.ScriptModule) for m in half.modules()) or any(
        map(nn.parameter.is_lazy, half.parameters())
    ):
        return None
    phase("following coordinates")
    for numbers in (FakeTensorMode(allow_non_fake_inputs=True), nullcontext()):
        try:
            with eval_mode(half), unchanged(half), torch.no_grad(), numbers:
                return _forward(half, arguments, dtype)
        except Exception:  # noqa: BLE001 - it reads values, or fails in the tracers too, which report why
            continue
    return None


def _forward(half: nn.Module, arguments: tuple[Any, dict[str, Any]], dtype: torch.dtype) -> Followed:
    bound, inputs = bind(half, *arguments), list[Tensor]()

    def take(t: Tensor) -> Tensor:
        # clone is a function call, whose result is fake in a fake mode.
        inputs.append(torch.clone(t).to(dtype) if t.is_floating_point() else torch.clone(t))
        return inputs[-1]

    given = inspect.BoundArguments(bound.signature, rebuild(dict(bound.arguments), take))  # type: ignore[arg-type]
    with Followed(half, inputs) as mode:
        half(*given.args, **given.kwargs)
    return mode
