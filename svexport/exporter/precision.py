"""Mixed precision: decides by rule and measurement which calls of a half model stay float32, and runs them so."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from svexport.errors import ExportError
from svexport.exporter.coordinates import Followed
from svexport.exporter.typed import (
    CONVERTS,
    MAKES,
    MATRICES,
    Call,
    Calls,
    Given,
    Plan,
    bias_of,
    cast,
    is_wide,
    mixed,
    rounded,
    with_bias,
    with_coordinates,
)
from svexport.ops.grid_sample import grid_sample
from svexport.progress import phase
from svexport.text import dtype_text
from svexport.tracing.arguments import bind, copied, eval_mode

__all__ = ["plan_for"]

LIMIT = 1e-4
"""Largest rounding noise of half in a result, relative to its power: 40 dB, a hundredth of its root mean square."""

_NORMS = {
    *("layer_norm", "group_norm", "instance_norm", "rms_norm", "local_response_norm", "normalize", "norm", "renorm"),
    *("vector_norm", "matrix_norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "cosine_similarity"),
    *("var", "std", "var_mean", "std_mean", "cdist", "pairwise_distance", "add_bias_residual_layer_norm"),
}


@dataclass(frozen=True)
class _Mixed(Plan):
    """Computes everything but the kept calls in the plan's dtype, whatever dtypes forward itself asks for."""

    def mode(self, model: nn.Module, inputs: Sequence[tuple[Tensor, Tensor]] = ()) -> TorchFunctionMode:
        return _InTypes(model, self)


class _InTypes(Calls):
    """Computes calls of a plan in float32, and the others in its dtype, whatever the dtypes of their arguments."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        super().__init__(model)
        self._plan = plan

    def __enter__(self) -> _InTypes:
        self._hook = register_module_forward_pre_hook(_as_weights)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()
        super().__exit__(*error)

    def call(self, call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bias = bias_of(func, args, kwargs) if call in self._plan.biases else None
        if call in self._plan.calls and bias is None:
            args, kwargs = cast((args, kwargs), torch.float32)
            return func(*args, **kwargs)
        half = cast((args, kwargs), self._plan.dtype)
        if bias is not None:
            return with_bias(half, bias)
        args, kwargs = with_coordinates(func, half, (args, kwargs), torch.float32)
        return (grid_sample if func is F.grid_sample else func)(*args, **kwargs)


def _as_weights(module: nn.Module, args: Any) -> Any:
    """Casts the inputs of recurrent layers to the dtype of their weights, which they check before they compute."""
    if not isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return None
    return cast(args, next(module.parameters()).dtype)


class _Measured(Followed):
    """Compares each call with the same call in half, on its float32 arguments.

    Attributes:
        reasons: for each call that has to stay float32, why.
        first: those calls whose arguments have to be float32 too.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, inputs: Collection[Tensor]) -> None:
        super().__init__(model, inputs)
        self._dtype = dtype
        self.reasons: dict[Call, str] = {}
        self.first: set[Call] = set()

    def call(self, call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().call(call, func, args, kwargs)
        if call not in self.reasons:
            reason, first = self._reason(call, func, (args, kwargs), result)
            if reason:
                self.reasons[call] = reason
            if first:
                self.first.add(call)
        return result

    def _reason(self, call: Call, func: Any, given: Given, result: Any) -> tuple[str, bool]:
        """Why a call stays float32 (empty if it does not), and whether its arguments have to as well."""
        if call.function in _NORMS:
            return "a norm", False
        if call.function in MATRICES:
            return "a matrix", True
        if call.function == "affine_grid":
            return "coordinates", True
        half = with_coordinates(func, rounded(given, self._dtype), given)
        with _Rounded(self._dtype):
            computed = func(*half[0], **half[1])
        lost = _noise([result], [computed])
        if lost <= LIMIT:
            return "", False
        before = _noise([result], [func(*half[0], **half[1])])
        what = "overflows" if math.isinf(lost) else f"leaves {_decibels(lost)}"
        return f"{what} in {str(self._dtype).removeprefix('torch.')}", LIMIT < before < math.inf


class _Alone(Calls):
    """Computes one call in half, and all others in float32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, alone: Call) -> None:
        super().__init__(model)
        self._dtype, self._alone = dtype, alone

    def call(self, call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if call != self._alone:
            return func(*args, **kwargs)
        args, kwargs = rounded((args, kwargs), self._dtype)
        with _Rounded(self._dtype):
            return func(*args, **kwargs)


class _Rounded(TorchDispatchMode):
    """Rounds every result to a dtype, as if it were computed in it with float32 sums."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(r.alias_info is not None for r in func._schema.returns):
            return result
        return rounded(result, self._dtype)


def plan_for(
    model: nn.Module, arguments: tuple[Any, dict[str, Any]], dtype: torch.dtype, keep: Collection[str] | str
) -> tuple[nn.Module, Plan]:
    """A half copy of a model, except the parameters of what stays float32; and the plan that says what stays.

    ``keep="auto"`` first keeps by rule: what every half model keeps, other norms, and matrix functions like inverses.
    Then it keeps each call that overflows on the arguments, or loses more than :data:`LIMIT`. Then, while the results
    lose more than that, it keeps the calls that cost the results most when each alone is in half.

    Raises:
        ExportError: if a name in ``keep`` matches nothing, or the model has scripted modules.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ExportError(
            "keep follows the Python forward, which scripted modules lack; export the module that was scripted"
        )
    single = copied(model)._apply(lambda t: t.float() if is_wide(t) else t)
    bound = bind(single, *arguments)
    with eval_mode(single), torch.no_grad(), _plain_attention():
        given = args, kwargs = _cloned((bound.args, bound.kwargs))
        phase("measuring each call in half")
        with _Measured(single, dtype, [x for x in tree_leaves(given) if isinstance(x, Tensor)]) as measured:
            expected = single(*args, **kwargs)
        plan: Plan = _Mixed(dtype, _named(measured, keep, single) if not isinstance(keep, str) else {})
        if isinstance(keep, str):
            plan = _enough(model, single, bound, replace(plan, calls=_kept(measured)), measured, expected)
    return mixed(model, dtype, measured.parameters(plan.calls)), plan


def _named(measured: _Measured, keep: Collection[str], model: nn.Module) -> dict[Call, str]:
    """Calls in modules whose name, or whose parent's name, matches a pattern in ``keep``."""
    names = [name for name, _ in model.named_modules()]
    if none := [one for one in keep if not any(fnmatchcase(name, one) for name in names)]:
        raise ExportError(
            f"keep: no module of {type(model).__name__} is named {', '.join(map(repr, none))}; expected 'auto', or "
            f"names as in model.named_modules(), such as {', '.join([n for n in names if n][:8])}"
        )
    return {
        call: "named in keep"
        for call in measured.seen
        if any(fnmatchcase(outer, one) for one in keep for outer in _outer(call.module))
    }


def _outer(module: str) -> Iterator[str]:
    parts = module.split(".")
    yield from (".".join(parts[: i + 1]) for i in range(len(parts)))


def _kept(measured: _Measured) -> dict[Call, str]:
    """What every half model keeps, and the measured calls, with those whose results they need in float32."""
    calls = {call: why for call, why in measured.kept(measured.reasons).items() if isinstance(call, Call)}
    for call in measured.first:
        upstream = [origin for origin in measured.upstream(measured.seen[call].before) if isinstance(origin, Call)]
        calls = {**dict.fromkeys(upstream, f"an argument of {call.function}"), **calls}
    return calls


def _enough(model: nn.Module, single: nn.Module, bound: Any, plan: Plan, measured: _Measured, expected: Any) -> Plan:
    """The plan with as many more calls as the results need."""

    def lost(tried: Plan) -> float:
        half = mixed(model, tried.dtype, measured.parameters(tried.calls))
        with eval_mode(half):
            try:
                return _noise([expected], [_run(half, bound, tried.mode(half))])
            except RuntimeError:  # for example a number too large for the dtype
                return math.inf

    phase("measuring the results in half")
    if (noise := lost(plan)) <= LIMIT:
        return _noted(plan, noise)
    whole = plan.calls.keys() - plan.biases
    others = [call for call in measured.seen if call not in whole and call.function not in CONVERTS | MAKES]
    alone = {}
    for i, call in enumerate(others, 1):
        phase(f"measuring call {i} of {len(others)} alone in half")
        alone[call] = _noise([expected], [_run(single, bound, _Alone(single, plan.dtype, call))])
    ranking = sorted(others, key=lambda call: -alone[call])

    def with_first(count: int) -> Plan:
        reasons = {c: f"alone in half it leaves {_decibels(alone[c])} in the results" for c in ranking[:count]}
        return replace(plan, calls={**plan.calls, **reasons})

    low, high = 0, 1  # ``low`` calls are too few
    while high < len(ranking) and lost(with_first(high)) > LIMIT:
        low, high = high, 2 * high
    high = min(high, len(ranking))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if lost(with_first(middle)) <= LIMIT else (middle, high)
    result = with_first(high)
    if (noise := lost(result)) > LIMIT:
        raise ExportError(
            f"keep='auto': with every call in float32 {type(model).__name__} leaves {_decibels(noise)}: forward asks "
            "for types itself (x.half()), works in place, or draws random numbers; export it in float32"
        )
    return _noted(result, noise)


def _noted(plan: Plan, noise: float) -> Plan:
    kind = dtype_text(plan.dtype)
    note = f"{len(plan.kept())} calls stay float32 (report.kept), the others in {kind} leave {_decibels(noise)}"
    return replace(plan, note=f"{note} in the results on the given inputs")


def _run(model: nn.Module, bound: Any, mode: TorchFunctionMode) -> Any:
    args, kwargs = _cloned((bound.args, bound.kwargs))
    with mode:
        return model(*args, **kwargs)


def _cloned(given: Any) -> Any:
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, given)


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Runs attention as separate functions, as files have it, so that its logits are visible."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        yield


def _noise(expected: Sequence[Any], actual: Sequence[Any]) -> float:
    """The largest ratio of the differences' power to a tensor's; infinite if a finite number became non-finite."""
    worst = 0.0
    for e, a in zip(tree_leaves(expected), tree_leaves(actual), strict=True):
        if not isinstance(e, Tensor) or not e.is_floating_point():
            continue
        e, a = e.double(), a.double()
        finite = e.isfinite()
        if not bool(a[finite].isfinite().all()):
            return math.inf
        power, noise = float(e[finite].square().sum()), float((a - e)[finite].square().sum())
        worst = max(worst, noise / power if power else (math.inf if noise else 0.0))
    return worst


def _decibels(noise: float) -> str:
    """The signal-to-noise ratio in words."""
    if not noise:
        return "everything"
    return "nothing" if noise >= 1 else f"{-10 * math.log10(noise):.0f} dB of signal over noise"
