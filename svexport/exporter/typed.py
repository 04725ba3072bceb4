"""The calls of a model as a mode sees them, with the types that they compute in; half models are built from these."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from svexport.ops._op import DOMAIN
from svexport.tracing.arguments import Types, copied
from svexport.tracing.source import is_library, is_standard, shown_line

__all__ = [
    "BIAS",
    "Call",
    "Calls",
    "Given",
    "KeptCall",
    "Plan",
    "at",
    "bias_of",
    "cast",
    "coordinates_of",
    "differ",
    "is_wide",
    "mixed",
    "of_one_type",
    "rounded",
    "storages",
    "with_bias",
    "with_coordinates",
]

_WIDE = {torch.float32, torch.float16, torch.bfloat16}

COORDINATES: dict[str, dict[str, int]] = {
    "affine_grid": {"theta": 0},
    "bilinear_sample": {"grid": 1},
    "camera_sample": {"reference_points": 1, "lidar2img": 2},
    "deform_conv2d": {"offset": 1},
    "grid_sample": {"grid": 1},
    "grid_sampler": {"grid": 1},
    "ms_deform_attn": {"sampling_locations": 3},
    "transformer_decoder": {"reference_points": 2, "lidar2img": 4},
}
"""By sampler, the arguments that hold coordinates, with their positions."""

_FOLLOWS = {
    *("reshape", "view", "view_as", "reshape_as", "permute", "transpose", "t", "adjoint", "swapaxes", "swapdims"),
    *("moveaxis", "movedim", "squeeze", "unsqueeze", "flatten", "unflatten", "ravel", "expand", "expand_as", "select"),
    *("broadcast_to", "__getitem__", "narrow", "index_select", "gather", "take_along_dim", "take", "chunk", "split"),
    *("tensor_split", "unbind", "hsplit", "vsplit", "contiguous", "detach", "clone", "repeat", "repeat_interleave"),
    *("tile", "roll", "flip", "fliplr", "flipud", "rot90", "unfold", "diagonal", "tril", "triu", "pixel_shuffle"),
    *("pixel_unshuffle", "channel_shuffle", "as_strided", "masked_select", "sort", "topk", "max_pool1d", "max_pool2d"),
    *("max_pool3d", "adaptive_max_pool2d", "dropout", "dropout2d", "alpha_dropout", "requires_grad_", "__iter__"),
    *("__reversed__", "msort", "kthvalue", "amax", "amin", "_pad", "pad", "meshgrid", "__get__"),
}
"""Functions that move or choose numbers, and compute none: in the type of what they are given."""

_ASKS = {
    *("size", "dim", "numel", "nelement", "stride", "item", "tolist", "numpy", "is_contiguous", "is_floating_point"),
    *("is_complex", "get_device", "element_size", "data_ptr", "storage_offset", "ndimension", "eq", "ne", "lt", "le"),
    *("gt", "ge", "equal", "isnan", "isinf", "isfinite", "isclose", "allclose", "argmax", "argmin", "argsort", "any"),
    *("all", "nonzero", "argwhere", "logical_not", "logical_and", "logical_or", "signbit", "searchsorted", "bucketize"),
    *("long", "int", "short", "byte", "char", "bool", "cpu", "cuda", "result_type", "can_cast", "promote_types"),
    *("rand_like", "randn_like", "is_tensor"),
    *(f"__{name}__" for name in ("len", "bool", "float", "int", "repr", "format", "hash", "contains", "set", "delete")),
    *(f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "dlpack")),
}
"""Functions that compute no floating-point numbers, or draw them."""

TYPES = {"is_floating_point", "element_size", "result_type", "can_cast", "promote_types", "is_tensor", "rand_like"}
"""Those of the functions above that ask for a type."""

CONVERTS = {"to", "type", "type_as", "float", "half", "double", "bfloat16"}
MAKES = {
    *("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"),
    *("new_tensor", "tensor", "as_tensor", "zeros", "ones", "full", "empty", "eye", "arange", "linspace"),
}
"""Functions that are told which type they make."""

PRODUCTS = {
    *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "tensordot", "einsum"),
    *("bilinear", "scaled_dot_product_attention"),
}
LAYERS = {
    *PRODUCTS,
    *("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc"),
    *("embedding", "embedding_bag", "batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm", "prelu"),
    *("multi_head_attention_forward", "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell"),
    *("rnn_relu_cell", "deform_conv2d", "add_bias_residual_layer_norm", "transformer_decoder"),
}
"""Functions that make features, of parameters."""

MATRICES = {
    *("inverse", "inv", "inv_ex", "inverse_ex", "det", "logdet", "slogdet", "solve", "solve_ex", "solve_triangular"),
    *("pinverse", "pinv", "cholesky", "cholesky_inverse", "cholesky_solve", "qr", "lstsq", "matrix_exp", "svd"),
    *("linalg_inv", "linalg_solve", "linalg_det", "linalg_inv_ex", "linalg_solve_ex", "linalg_cholesky"),
    *("svdvals", "eigh", "eigvalsh"),
}
"""Functions of matrices, which torch has none of in half."""

_ONE_TYPE = LAYERS | {"scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_put"}
"""Functions that take no tensors of several types."""

_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod")} | {"__setitem__"}


Given = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and keyword arguments of a call."""


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
        """The user's line; empty where there is none."""
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
        """The fields, as JSON-serializable values."""
        return asdict(self)


BIAS = "its bias, added in float32"
"""Why a layer is kept of which the product is in half."""


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

    @cached_property
    def biases(self) -> frozenset[Call]:
        """The linear layers among the calls whose bias alone is added in float32; the product is in the type."""
        return frozenset(call for call, why in self.calls.items() if why == BIAS)

    def kept(self) -> list[KeptCall]:
        """The calls that stay in float32, each with the reason."""
        computing = {call: why for call, why in self.calls.items() if call.function not in CONVERTS | MAKES}
        return [KeptCall(c.module, c.function, c.source, why) for c, why in computing.items()]

    @property
    def forward(self) -> Types:
        """The types of a forward that computes so."""
        return Types(mode=self.mode)

    def mode(self, model: nn.Module, inputs: Sequence[tuple[Tensor, Tensor]] = ()) -> TorchFunctionMode:
        """A mode in which forward computes in these types, for one forward. ``inputs``: as in :class:`Types`."""
        raise NotImplementedError


class Calls(TorchFunctionMode):
    """Passes calls that compute floating-point numbers to :meth:`call`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(module): name for name, module in model.named_modules()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name in CONVERTS or name in MAKES:
            return self.typed(name, func, args, kwargs)
        if not any(map(is_wide, tree_leaves((args, kwargs)))):
            return func(*args, **kwargs)
        if name in _ASKS:
            return self.ask(name, func, args, kwargs)
        if name in _FOLLOWS:
            return self.follow(func, args, kwargs)
        if name in _IN_PLACE or kwargs.get("inplace") or (name.endswith("_") and not name.endswith("__")):
            return self.in_place(func, args, kwargs)
        return self.call(self.place(name, sys._getframe(1)), func, args, kwargs)

    def call(self, call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called for functions that compute."""
        raise NotImplementedError

    def typed(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called for functions that are told their result type: :data:`CONVERTS` and :data:`MAKES`."""
        return func(*args, **kwargs)

    def ask(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called for functions that compute no floating-point numbers."""
        return func(*args, **kwargs)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called for functions that move or select elements."""
        return func(*args, **kwargs)

    def in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In the type of what is changed."""
        if not args or not is_wide(args[0]):
            return func(*args, **kwargs)
        rest, kwargs = cast((args[1:], kwargs), args[0].dtype)
        return func(args[0], *rest, **kwargs)

    def place(self, name: str, frame: FrameType | None) -> Call:
        """The place of a call: the innermost module that is running, and the innermost line of the user's."""
        module: str | None = None
        while frame is not None:
            path = frame.f_code.co_filename
            if module is None:
                module = self._names.get(id(frame.f_locals.get("self")))
            if path.startswith("<eval_with_key>"):  # a graph: a copy's has another number
                return Call(module or "", name, "", frame.f_lineno, "")
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


def mixed(model: nn.Module, dtype: torch.dtype, wide: Collection[str]) -> nn.Module:
    """A copy in a type, but for parameters and buffers of those names, which are float32; float64 stays."""
    result = copied(model)
    stay = {place for place, names in storages(result).items() if not names.isdisjoint(wide)}

    def converted(t: Tensor) -> Tensor:
        if not is_wide(t):
            return t
        return t.float() if t.untyped_storage().data_ptr() in stay else t.to(dtype)

    return result._apply(converted)


def storages(model: nn.Module) -> dict[int, set[str]]:
    """Names of parameters and buffers by where their numbers are."""
    result: dict[int, set[str]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.numel():
            result.setdefault(tensor.untyped_storage().data_ptr(), set()).add(name)
    return result


def coordinates_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int | str]:
    """The positions and names of a call's arguments that hold coordinates."""
    if getattr(func, "namespace", DOMAIN) != DOMAIN:  # torchvision's has other arguments in these places
        return []
    found: list[int | str] = []
    for keyword, place in COORDINATES.get(name_of(func), {}).items():
        if keyword in kwargs:
            found.append(keyword)
        elif place < len(args) and is_wide(args[place]):
            found.append(place)
    return found


def at(given: Given, place: int | str) -> Any:
    """The argument in a place or of a name."""
    return given[1][place] if isinstance(place, str) else given[0][place]


def bias_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The bias that a linear layer is given."""
    if func is not F.linear:
        return None
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    return bias if is_wide(bias) else None


def with_bias(half: Given, bias: Tensor) -> Tensor:
    """A linear layer whose product is in half, and whose bias is added in float32: (…, out), float32."""
    args, kwargs = half
    named = {**dict(zip(("input", "weight"), args, strict=False)), **kwargs, "bias": None}
    return F.linear(**named).float() + bias.float()


def differ(values: Any) -> bool:
    """Whether there are tensors of several such types."""
    return len({x.dtype for x in tree_leaves(values) if is_wide(x)}) > 1


def of_one_type(name: str, given: Given) -> Given:
    """What a function is given, in half where that is of several types and it takes one: numbers that forward itself
    makes are float32 (``torch.zeros``, ``arange``, ``.float()``)."""
    if name not in _ONE_TYPE or not differ(given):
        return given
    return cast(given, next(x.dtype for x in tree_leaves(given) if is_wide(x) and x.dtype != torch.float32))


def with_coordinates(func: Any, half: Given, given: Given, dtype: torch.dtype | None = None) -> Given:
    """What a call is given in half, but for coordinates as they are given, where a sampler takes both, as ours do.

    Args:
        dtype: that coordinates are cast to; None: none.
    """
    if func is not F.grid_sample and getattr(func, "namespace", "") != DOMAIN:
        return half
    args, kwargs = list(half[0]), dict(half[1])
    for place in coordinates_of(func, *given):
        value = at(given, place) if dtype is None else at(given, place).to(dtype)
        if isinstance(place, str):
            kwargs[place] = value
        else:
            args[place] = value
    return tuple(args), kwargs


def is_wide(x: Any) -> bool:
    """Whether it is a tensor of a type that a half model computes in."""
    return isinstance(x, Tensor) and x.dtype in _WIDE


def cast(values: Any, dtype: torch.dtype) -> Any:
    """The same with all such tensors in one type."""
    return tree_map(lambda x: x.to(dtype) if is_wide(x) else x, values)


def rounded(values: Any, dtype: torch.dtype) -> Any:
    """The same with the numbers of all such tensors as they are in one type, in their own."""
    return tree_map(lambda x: x.to(dtype).to(x.dtype) if is_wide(x) else x, values)


def name_of(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", str(func)).partition(".")[0]
