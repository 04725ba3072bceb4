"""Mixed precision: which calls of a half model stay float32, by rule and by measurement, and a forward that does so."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from svexport.errors import ExportError
from svexport.ops._op import DOMAIN
from svexport.ops.grid_sample import grid_sample
from svexport.progress import phase
from svexport.tracing.arguments import bind, copied, eval_mode
from svexport.tracing.source import is_library, is_standard, shown_line

__all__ = ["KeptCall", "Plan", "mixed", "plan_for"]

LIMIT = 1e-4
"""Of the power of a result: what rounding to half may put into it, 40 dB; a hundredth of its root mean square."""

_WIDE = {torch.float32, torch.float16, torch.bfloat16}

_NORMS = {
    *("layer_norm", "group_norm", "instance_norm", "rms_norm", "local_response_norm", "normalize", "norm", "renorm"),
    *("vector_norm", "matrix_norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "cosine_similarity"),
    *("var", "std", "var_mean", "std_mean", "cdist", "pairwise_distance", "add_bias_residual_layer_norm"),
}
_MATRICES = {
    *("inverse", "inv", "inv_ex", "inverse_ex", "det", "logdet", "slogdet", "solve", "solve_ex", "solve_triangular"),
    *("pinverse", "pinv", "cholesky", "cholesky_inverse", "cholesky_solve", "qr", "lstsq", "matrix_exp", "svd"),
    *("linalg_inv", "linalg_solve", "linalg_det", "linalg_inv_ex", "linalg_solve_ex", "linalg_cholesky"),
    *("svdvals", "eigh", "eigvalsh"),
}
_COORDINATES: dict[str, dict[str, int]] = {
    "affine_grid": {"theta": 0},
    "bilinear_sample": {"grid": 1},
    "camera_sample": {"reference_points": 1, "lidar2img": 2},
    "deform_conv2d": {"offset": 1},
    "grid_sample": {"grid": 1},
    "grid_sampler": {"grid": 1},
    "ms_deform_attn": {"sampling_locations": 3},
}
"""Of each sampler, the arguments that have coordinates, with their places."""

_FOLLOWS = {
    *("reshape", "view", "view_as", "reshape_as", "permute", "transpose", "t", "adjoint", "swapaxes", "swapdims"),
    *("moveaxis", "movedim", "squeeze", "unsqueeze", "flatten", "unflatten", "ravel", "expand", "expand_as", "select"),
    *("broadcast_to", "__getitem__", "narrow", "index_select", "gather", "take_along_dim", "take", "chunk", "split"),
    *("tensor_split", "unbind", "hsplit", "vsplit", "contiguous", "detach", "clone", "repeat", "repeat_interleave"),
    *("tile", "roll", "flip", "fliplr", "flipud", "rot90", "unfold", "diagonal", "tril", "triu", "pixel_shuffle"),
    *("pixel_unshuffle", "channel_shuffle", "as_strided", "masked_select", "sort", "topk", "max_pool1d", "max_pool2d"),
    *("max_pool3d", "adaptive_max_pool2d", "dropout", "dropout2d", "alpha_dropout", "requires_grad_", "__iter__"),
    *("__reversed__", "msort", "kthvalue", "amax", "amin", "_pad", "pad"),
}
"""Functions that move or choose numbers, and compute none: in the type of what they are given."""

_ASKS = {
    *("size", "dim", "numel", "nelement", "stride", "item", "tolist", "numpy", "is_contiguous", "is_floating_point"),
    *("is_complex", "get_device", "element_size", "data_ptr", "storage_offset", "__len__", "__bool__", "__float__"),
    *(
        "__int__",
        "__repr__",
        "__format__",
        "__hash__",
        "__contains__",
        "ndimension",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
    ),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "equal", "isnan", "isinf", "isfinite", "isclose"),
    *("allclose", "argmax", "argmin", "argsort", "nonzero", "argwhere", "any", "all", "logical_not", "logical_and"),
    *("logical_or", "signbit", "searchsorted", "bucketize", "to", "float", "half", "double", "bfloat16", "type"),
    *("type_as", "long", "int", "short", "byte", "char", "bool", "cpu", "cuda", "zeros_like", "ones_like", "full_like"),
    *("empty_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"),
    *("result_type", "can_cast", "promote_types", "is_tensor", "__get__", "__set__", "__delete__", "__dlpack__"),
}
"""Functions that compute no floating-point numbers, or are told which type they make."""

_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod")} | {"__setitem__"}


_Given = tuple[tuple[Any, ...], dict[str, Any]]
"""What a function is called with."""


@dataclass(frozen=True)
class Call:
    """A place in a model: one line of one module calling one function, in every forward the same."""

    module: str
    function: str
    file: str
    line: int
    scope: str

    @property
    def source(self) -> str:
        return shown_line(self.file, self.line, self.scope) if self.file else ""


@dataclass(frozen=True)
class KeptCall:
    """A call that stays float32 in a half model.

    Attributes:
        module: that calls, ``"blocks.3.attention"``; empty of the model itself.
        function: ``"matmul"``.
        source: the user's line, empty where all of them are torch's.
        reason: why: a rule, or what was measured.
    """

    module: str
    function: str
    source: str
    reason: str

    def to_dict(self) -> dict[str, str]:
        """Its fields, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """What a half model keeps in float32.

    Attributes:
        dtype: of everything else.
        calls: that are kept, and why.
        note: what is left of the results, where that was measured.
    """

    dtype: torch.dtype
    calls: dict[Call, str] = field(default_factory=dict)
    note: str = ""

    def kept(self) -> list[KeptCall]:
        """The calls that stay in float32, each with the reason."""
        return [KeptCall(c.module, c.function, c.source, why) for c, why in self.calls.items()]

    def mode(self, model: nn.Module) -> TorchFunctionMode:
        """Has forward compute so; a mode is for one forward."""
        return _Mixed(model, self)


class _Calls(TorchFunctionMode):
    """Has calls that compute floating-point numbers looked at by :meth:`call`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(module): name for name, module in model.named_modules()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        if name in _ASKS or not any(map(_is_wide, tree_leaves((args, kwargs)))):
            return func(*args, **kwargs)
        if name in _FOLLOWS:
            return self.follow(func, args, kwargs)
        if name in _IN_PLACE or kwargs.get("inplace") or (name.endswith("_") and not name.endswith("__")):
            return self.in_place(func, args, kwargs)
        return self.call(self._call(name, sys._getframe(1)), func, args, kwargs)

    def call(self, call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In the type of what is changed."""
        if not args or not _is_wide(args[0]):
            return func(*args, **kwargs)
        rest, kwargs = _cast((args[1:], kwargs), args[0].dtype)
        return func(args[0], *rest, **kwargs)

    def _call(self, name: str, frame: FrameType | None) -> Call:
        """The place of a call: the innermost module that is running, and the innermost line of the user's."""
        module: str | None = None
        while frame is not None:
            path = frame.f_code.co_filename
            if module is None:
                module = self._names.get(id(frame.f_locals.get("self")))
            if not is_library(path) and not is_standard(path):
                break
            if module == "":  # the model itself is torch's: there is no line
                frame = None
                break
            frame = frame.f_back
        if frame is None:
            return Call(module or "", name, "", 0, "")
        line, scope = (frame.f_lineno, frame.f_code.co_name), frame
        while module is None and frame is not None:
            module = self._names.get(id(frame.f_locals.get("self")))
            frame = frame.f_back
        return Call(module or "", name, scope.f_code.co_filename, line[0], line[1])


class _Mixed(_Calls):
    """Has calls of a plan computed in float32, the others in its type, whatever comes in."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        super().__init__(model)
        self._plan = plan

    def __enter__(self) -> _Mixed:
        self._hook = register_module_forward_pre_hook(_as_weights)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()
        super().__exit__(*error)

    def call(self, call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if call in self._plan.calls:
            args, kwargs = _cast((args, kwargs), torch.float32)
            return func(*args, **kwargs)
        half = _cast((args, kwargs), self._plan.dtype)
        if _takes_both(func):
            given = args, kwargs
            for place in _coordinates(call.function, *given):
                half = _put(half, place, _at(given, place).float())
        args, kwargs = half
        return (grid_sample if func is F.grid_sample else func)(*args, **kwargs)


def _as_weights(module: nn.Module, args: Any) -> Any:
    """What recurrent layers are given, in the type of their weights: they look, before they call a function."""
    if not isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return None
    return _cast(args, next(module.parameters()).dtype)


@dataclass
class _Seen:
    """What was learned of a call.

    Attributes:
        before: calls whose results it is given.
        layer: whether it is given parameters.
        reason: why it has to stay float32, empty where it has not.
        first: whether what it is given has to come in float32, too.
        coordinates: calls that coordinates come from.
    """

    before: set[Call] = field(default_factory=set)
    layer: bool = False
    reason: str = ""
    first: bool = False
    coordinates: set[Call] = field(default_factory=set)


class _Measured(_Calls):
    """Compares each call with itself in half, on what it is given in float32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(model)
        self._dtype = dtype
        self._held = _storages(model)
        self._made: dict[int, tuple[Tensor, Call]] = {}  # results with the calls they come from; kept alive
        self.calls: dict[Call, _Seen] = {}
        self.parameters: dict[Call, set[str]] = {}

    def call(self, call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen = self.calls.setdefault(call, _Seen())
        given = [x for x in tree_leaves((args, kwargs)) if _is_wide(x)]
        seen.before |= {c for x in given if (c := self._origin(x)) is not None}
        names = {name for x in given for name in self._held.get(x.untyped_storage().data_ptr(), ())}
        self.parameters.setdefault(call, set()).update(names)
        seen.layer |= bool(names)
        points = [_at((args, kwargs), place) for place in _coordinates(call.function, args, kwargs)]
        seen.coordinates |= {c for x in points if (c := self._origin(x)) is not None}
        result = func(*args, **kwargs)
        if not seen.reason:
            seen.reason, first = self._reason(call, func, (args, kwargs), result)
            seen.first |= first
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._made[id(x)] = x, call
        return result

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._passed(func(*args, **kwargs), args, kwargs)

    def in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._passed(super().in_place(func, args, kwargs), args, kwargs)

    def _passed(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        origin = next((c for x in tree_leaves((args, kwargs)) if (c := self._origin(x)) is not None), None)
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and origin is not None and id(x) not in self._made:
                self._made[id(x)] = x, origin
        return result

    def _origin(self, x: Any) -> Call | None:
        return self._made[id(x)][1] if id(x) in self._made else None

    def _reason(self, call: Call, func: Any, given: _Given, result: Any) -> tuple[str, bool]:
        """Why a call stays float32, and whether what it is given has to as well."""
        if call.function in _NORMS:
            return "a norm", False
        if call.function in _MATRICES:
            return "a matrix", True
        if call.function == "affine_grid":
            return "coordinates", True

        def rounded(x: Any) -> Any:
            return x.to(self._dtype).to(x.dtype) if _is_wide(x) else x

        half = tree_map(rounded, given)
        if _takes_both(func):
            for place in _coordinates(call.function, *given):
                half = _put(half, place, _at(given, place))
        with _Rounded(self._dtype):
            computed = func(*half[0], **half[1])
        lost = _noise([result], [computed])
        if lost <= LIMIT:
            return "", False
        before = _noise([result], [func(*half[0], **half[1])])
        what = "overflows" if math.isinf(lost) else f"leaves {_decibels(lost)}"
        return f"{what} in {str(self._dtype).removeprefix('torch.')}", LIMIT < before < math.inf


class _Alone(_Calls):
    """Has one call computed in half, and all others in float32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, alone: Call) -> None:
        super().__init__(model)
        self._dtype, self._alone = dtype, alone

    def call(self, call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if call != self._alone:
            return func(*args, **kwargs)
        args, kwargs = tree_map(lambda x: x.to(self._dtype).to(x.dtype) if _is_wide(x) else x, (args, kwargs))
        with _Rounded(self._dtype):
            return func(*args, **kwargs)


class _Rounded(TorchDispatchMode):
    """Rounds every result to a type, as where it is computed there, sums in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(r.alias_info is not None for r in func._schema.returns):
            return result
        return tree_map(lambda x: x.to(self._dtype).to(x.dtype) if _is_wide(x) else x, result)


def plan_for(
    model: nn.Module, arguments: tuple[Any, dict[str, Any]], dtype: torch.dtype, keep: Collection[str] | str
) -> tuple[nn.Module, Plan]:
    """A copy of a model in half but for the parameters of what stays float32, and what that is.

    With ``keep="auto"``, by rule: norms, matrices that are inverted and the like, and coordinates, back to where a
    layer makes them. Then each call that overflows on the arguments, or loses more than :data:`LIMIT`. Then, as long as
    more than that is lost of the results, the calls that lose most of them when each alone is in half.

    Raises:
        ExportError: if there is nothing of a name in ``keep``, or the model cannot be looked into.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ExportError("keep looks into forward, which scripted modules have none of; export the module they are of")
    single = copied(model)._apply(lambda t: t.float() if _is_wide(t) else t)
    bound = bind(single, *arguments)
    with eval_mode(single), torch.no_grad(), _plain_attention():
        measured = _Measured(single, dtype)
        phase("measuring each call in half")
        expected = _run(single, bound, measured)
        calls = _named(measured, keep, single) if not isinstance(keep, str) else _kept(measured)
        plan = Plan(dtype, calls)
        if isinstance(keep, str):
            plan = _enough(model, single, bound, plan, measured, expected)
    return mixed(model, plan, measured.parameters), plan


def mixed(model: nn.Module, plan: Plan, parameters: dict[Call, set[str]]) -> nn.Module:
    """A copy in the plan's type, but for parameters and buffers that kept calls are given."""
    wide = {name for call in plan.calls for name in parameters.get(call, ())}
    result = copied(model)
    places = _storages(result)
    stay = {place for place, names in places.items() if wide.intersection(names)}

    def converted(t: Tensor) -> Tensor:
        if not _is_wide(t):
            return t
        return t.float() if t.untyped_storage().data_ptr() in stay else t.to(plan.dtype)

    return result._apply(converted)


def _named(measured: _Measured, keep: Collection[str], model: nn.Module) -> dict[Call, str]:
    """Calls in modules of those names, patterns of them, or inside such modules."""
    names = [name for name, _ in model.named_modules()]
    if none := [one for one in keep if not any(fnmatchcase(name, one) for name in names)]:
        raise ExportError(
            f"keep: no module of {type(model).__name__} is named {', '.join(map(repr, none))}; expected 'auto', or "
            f"names as in model.named_modules(), such as {', '.join([n for n in names if n][:8])}"
        )
    return {
        call: "named in keep"
        for call in measured.calls
        if any(fnmatchcase(outer, one) for one in keep for outer in _outer(call.module))
    }


def _outer(module: str) -> Iterator[str]:
    parts = module.split(".")
    yield from (".".join(parts[: i + 1]) for i in range(len(parts)))


def _kept(measured: _Measured) -> dict[Call, str]:
    calls = {call: seen.reason for call, seen in measured.calls.items() if seen.reason}
    for call in list(calls):
        if measured.calls[call].first:
            _upstream(measured, measured.calls[call].before, f"what {call.function} is given", calls)
    for seen in measured.calls.values():
        _upstream(measured, seen.coordinates, "coordinates", calls)
    return calls


def _upstream(measured: _Measured, places: Collection[Call], why: str, calls: dict[Call, str]) -> None:
    """Adds calls, and those before them, up to layers."""
    waiting, seen = list(places), set()
    while waiting:
        call = waiting.pop()
        if call in seen or measured.calls[call].layer:
            continue
        seen.add(call)
        calls.setdefault(call, why)
        waiting += measured.calls[call].before


def _enough(model: nn.Module, single: nn.Module, bound: Any, plan: Plan, measured: _Measured, expected: Any) -> Plan:
    """The plan, with as many more calls as it takes for the results."""

    def lost(tried: Plan) -> float:
        half = mixed(model, tried, measured.parameters)
        with eval_mode(half):
            try:
                return _noise([expected], [_run(half, bound, tried.mode(half))])
            except RuntimeError:  # a number too large for the type, say
                return math.inf

    phase("measuring the results in half")
    if (noise := lost(plan)) <= LIMIT:
        return _noted(plan, noise)
    others = [call for call in measured.calls if call not in plan.calls]
    alone = {}
    for i, call in enumerate(others, 1):
        phase(f"measuring call {i} of {len(others)} alone in half")
        alone[call] = _noise([expected], [_run(single, bound, _Alone(single, plan.dtype, call))])
    ranking = sorted(others, key=lambda call: -alone[call])

    def with_first(count: int) -> Plan:
        reasons = {c: f"in half, alone, it leaves {_decibels(alone[c])} in the results" for c in ranking[:count]}
        return Plan(plan.dtype, {**plan.calls, **reasons})

    low, high = 0, 1  # low is too few
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
    kind = str(plan.dtype).removeprefix("torch.")
    note = f"{len(plan.calls)} calls stay float32 (report.kept), the others in {kind} leave {_decibels(noise)}"
    return replace(plan, note=f"{note} in the results on the given inputs")


def _run(model: nn.Module, bound: Any, mode: TorchFunctionMode) -> Any:
    args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (bound.args, bound.kwargs))
    with mode:
        return model(*args, **kwargs)


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Attention of parts, as files have it, whose logits are numbers like others."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        yield


def _noise(expected: Sequence[Any], actual: Sequence[Any]) -> float:
    """The largest part that differences have of the power of a tensor; infinite where one became not finite."""
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
    """A signal to noise ratio in words."""
    if not noise:
        return "everything"
    return "nothing" if noise >= 1 else f"{-10 * math.log10(noise):.0f} dB of signal over noise"


def _storages(model: nn.Module) -> dict[int, set[str]]:
    """Names of parameters and buffers by where their numbers are."""
    result: dict[int, set[str]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.numel():
            result.setdefault(tensor.untyped_storage().data_ptr(), set()).add(name)
    return result


def _takes_both(func: Any) -> bool:
    """Whether a sampler takes coordinates in float32 beside what is half, as ours do."""
    return func is F.grid_sample or getattr(func, "namespace", "") == DOMAIN


def _coordinates(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int | str]:
    """Where a call has coordinates: places and names of arguments."""
    found: list[int | str] = []
    for keyword, place in _COORDINATES.get(name, {}).items():
        if keyword in kwargs:
            found.append(keyword)
        elif place < len(args) and _is_wide(args[place]):
            found.append(place)
    return found


def _at(given: _Given, place: int | str) -> Any:
    return given[1][place] if isinstance(place, str) else given[0][place]


def _put(given: _Given, place: int | str, value: Any) -> _Given:
    args, kwargs = given
    if isinstance(place, str):
        return args, {**kwargs, place: value}
    return (*args[:place], value, *args[place + 1 :]), kwargs


def _is_wide(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in _WIDE


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda x: x.to(dtype) if _is_wide(x) else x, values)


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", str(func)).partition(".")[0]
