"""Functions that torch's TorchScript exporter does not know, traced as others that say the same."""

from __future__ import annotations

import itertools
import math
import operator
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from svexport.errors import SvexportError
from svexport.exporter import aten
from svexport.exporter.aten import pool
from svexport.exporter.aten.interpolate import nearest_exact
from svexport.exporter.aten.place import END, depends_on_size, fill_diagonal, unravel_index
from svexport.exporter.aten.span import linspace
from svexport.exporter.aten.special import floating
from svexport.exporter.embeddings import EMBEDDINGS
from svexport.exporter.exact import EXACT, floor_divide, truncated
from svexport.exporter.masks import CHOICES, by_places, is_mask_of_places
from svexport.symbolic._symbolic import taken_over
from svexport.tracing.swapped import untraced

__all__ = [
    *("AS_TRACED", "IN_PLACE_OF", "DecompositionError", "InPlaceOf", "advice_on", "decomposable", "decomposed"),
    *("index_reduce", "overloads_of"),
]


class DecompositionError(RuntimeError):
    """A function is not made of others."""


_FACTORIZATION = re.compile(r"aten[.:]+_?(linalg_)?(cholesky|eig|geqrf|ldl|lu|qr|svd)")


def advice_on(text: str) -> str:
    """What to do about a function named in a text, where no other opset helps; else empty."""
    if not _FACTORIZATION.search(text):
        return ""
    return (
        "ONNX has no matrix factorization at any opset: make its result an input, or a buffer if it does not depend on "
        "the inputs; use torch.linalg.solve to solve equations"
    )


def decomposable(name: str) -> bool:
    """Whether there is something to trace in place of ``aten::outer``, say."""
    if not name or name in _WHOLE | WRONG:
        return False
    return any(_decomposition(overload) is not None for overload in overloads_of(name))


@contextmanager
def decomposed(names: Collection[str]) -> Iterator[None]:
    """While torch.jit traces, records in place of each of these functions (``aten::outer``) what it is made of, and of
    those that the exporter makes something else of.

    By kernels for the tracer's dispatch key, which get a call whatever Python it came through. Scripted code makes no
    calls while it is traced, and keeps its functions.
    """
    library = torch.library.Library("aten", "IMPL")
    taking = torch.library.Library("svexport_taking", "FRAGMENT")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are replaced
            wrong = WRONG - taken_over()
            for overload, written in ((o, name in wrong) for name in (*wrong, *names) for o in overloads_of(name)):
                function = _ours(overload) if written else _decomposition(overload)
                if function is not None:
                    library.impl(overload, _once(overload, function, _taker(taking, overload)), "Tracer")
        yield
    finally:
        taking._destroy()
        library._destroy()  # which puts torch's kernels back


_WHOLE = {"aten::fake_quantize_per_channel_affine", "aten::fake_quantize_per_tensor_affine"}
"""Made of what no exporter knows at any opset."""


class InPlaceOf(TorchFunctionMode):
    """Has functions traced in place of those that an exporter does not know, or not as torch means them; of what they
    return NotImplemented for, torch's own."""

    def __init__(self, functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self._functions = functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = self._functions.get(func, func)(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is NotImplemented else result


def _assigned(x: Tensor, key: Any, values: Any) -> Any:
    """``x[0, 1:3] = y`` as a value for all of ``x``, put together of parts: the exporter makes indices of slices, of
    the sizes of the trace, and takes no indices apart, or of several dimensions (``x[i, :, j] = y``)."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if sum(one is not ... and not _is_whole(one) for one in keys) > 1:
        keys = by_places(keys)
    rest = x.dim() - sum(one.dim() if is_mask_of_places(one) else 1 for one in keys if one is not ...)
    place = next((i for i, one in enumerate(keys) if one is ...), len(keys))
    keys[place : place + 1] = [slice(None)] * rest
    if isinstance(key, Tensor) or not all(map(_is_place, keys)):
        return NotImplemented
    if isinstance(values, Tensor):
        values = values.to(x.device, x.dtype)
    elif isinstance(values, (bool, int, float, complex)):
        values = torch.full((), values, dtype=x.dtype, device=x.device)
    else:
        values = torch.as_tensor(values, dtype=x.dtype, device=x.device)
    x.copy_(_put(x, keys, values))
    return None


def _put(x: Tensor, keys: Sequence[Any], values: Tensor) -> Tensor:
    """``x`` with values at a key for each dimension; numbers and slices come first, as torch has it, then indices."""
    dim = next((i for i, one in enumerate(keys) if not isinstance(one, Tensor) and not _is_whole(one)), None)
    if dim is None:
        indices = [one if isinstance(one, Tensor) else None for one in keys]
        some = any(one is not None for one in indices)
        return torch.ops.aten.index_put(x, indices, values) if some else torch.ops.aten.copy(x, values)
    before, key, after = keys[:dim], keys[dim], keys[dim + 1 :]
    if isinstance(key, int):
        return x.select_scatter(_put(x.select(dim, key), [*before, *after], values), dim, key)
    inner = _put(torch.ops.aten.slice(x, dim, *_bounds(key)), [*before, slice(None), *after], values)
    return x.slice_scatter(inner, dim, *_bounds(key))


def _is_whole(key: Any) -> bool:
    return isinstance(key, slice) and key == slice(None)


def _is_place(key: Any) -> bool:
    """Whether a key is an index, or a span of numbers that any size has in that order."""
    if not isinstance(key, slice):
        return isinstance(key, (int, Tensor)) and not isinstance(key, bool)
    bounds = _bounds(key)
    return key.step in (None, 1) and all(isinstance(n, int) for n in bounds) and not depends_on_size(*bounds)


def _bounds(key: slice) -> tuple[Any, Any]:
    return 0 if key.start is None else key.start, END if key.stop is None else key.stop


def _taker(library: torch.library.Library, overload: torch._ops.OpOverload) -> Callable[..., None]:
    """Takes the traced numbers of a call, which the arguments' parser leaves for the kernel under their names.

    A kernel of Python has no way to them; what lies there at the next function with an argument of that name, in any
    trace of the process, ends in an assertion. A function of the same names, whose node nothing uses, takes them.
    """
    numbers = [a.name for a in overload._schema.arguments if str(a.type) in ("List[int]", "Optional[List[int]]")]
    if not numbers:
        return lambda *_, **__: None
    name = overload.name().replace("::", "_").replace(".", "_")
    library.define(f"{name}(Tensor x, {', '.join(f'int[] {n}' for n in numbers)}) -> Tensor")
    library.impl(name, lambda x, *_: x.new_empty(0), "CompositeExplicitAutograd")

    def take(*args: Any, **kwargs: Any) -> None:
        given = {**dict(zip((a.name for a in overload._schema.arguments), args, strict=False)), **kwargs}
        lists = [given.get(number) or [] for number in numbers]
        getattr(torch.ops.svexport_taking, name)(args[0], *([int(n) for n in one] for one in lists))

    return take


def overloads_of(name: str) -> list[torch._ops.OpOverload]:
    """Every overload of a function and of its in-place form, without those that write to an argument ``out``; none of a
    library that is not imported."""
    library, _, function = name.partition("::")
    packets = [getattr(getattr(torch.ops, library), n, None) for n in (function, f"{function}_")]
    overloads = [getattr(packet, form) for packet in packets if packet is not None for form in packet.overloads()]
    known = (o for o in overloads if torch._C._dispatch_has_kernel(o.name()))  # scripts have others, of numbers
    return [o for o in known if not any(a.is_out for a in o._schema.arguments)]


def _once(
    overload: torch._ops.OpOverload, function: Callable[..., Any], take: Callable[..., None]
) -> Callable[..., Any]:
    """The function, with errors of its own. Some are in the end made of themselves."""
    inside = False

    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            raise DecompositionError(f"{overload} is made of itself")
        inside = True
        try:
            take(*args, **kwargs)
            result = function(*args, **kwargs)
            if result is NotImplemented and (other := _torchs(overload)):
                result = other(*args, **kwargs)
            return result
        except (DecompositionError, SvexportError):  # ours say why not
            raise
        except Exception as error:
            raise DecompositionError(f"{overload} cannot be decomposed: {error}") from error
        finally:
            inside = False

    return kernel


def _decomposition(overload: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """What to trace in place of a function: of ours, else of torch's."""
    return _ours(overload) or _torchs(overload)


def _torchs(overload: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """What torch's C++ calls for a function, else what its Python does."""
    if overload._can_decompose():
        return overload.decompose
    python = torch._decomp.decomposition_table.get(overload)
    if python is None or overload._schema.is_mutable:
        return None

    def function(*args: Any, **kwargs: Any) -> Any:
        from torch.fx.experimental.proxy_tensor import make_fx

        with untraced():
            graph = make_fx(lambda *inputs: python(*inputs, **kwargs))(*args)
        return _Aten(graph).run(*args)

    return function


def _ours(overload: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """What is written here in place of a function, and in place of its in-place form."""
    name = overload.name()
    if name in _OURS:
        return _OURS[name]
    function, _, form = name.partition(".")
    ours = _OURS.get(function.removesuffix("_") + (f".{form}" if form else ""))
    if ours is None or not overload._schema.is_mutable:
        return None
    return lambda x, *args, **kwargs: x.copy_(ours(x, *args, **kwargs))


class _Aten(torch.fx.Interpreter):
    """Runs a graph with the functions of ATen that torch's primitives (``prims::rsqrt``) stand for."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(getattr(target, "impl_aten", target), args, kwargs)


# ---------------------------------------------------------------- ours: where torch has none, or one of fixed sizes


def _repeat_interleave(
    input: Tensor, repeats: int | Tensor, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    if isinstance(repeats, Tensor):  # as the tracer has sizes
        if repeats.numel() != 1:
            raise DecompositionError("each element repeated a number of times of its own")
        repeats = repeats.reshape(())
    if dim is None:
        input, dim = input.flatten(), 0
    dim %= input.dim()
    times: list[Any] = [repeats if i == dim + 1 else 1 for i in range(input.dim() + 1)]
    return input.unsqueeze(dim + 1).repeat(times).flatten(dim, dim + 1)


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = None) -> Tensor:
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


def _pdist(input: Tensor, p: float = 2.0) -> Tensor:
    """Of rows and those behind them; torch has nothing but a kernel."""
    size = input.shape[0]
    if type(size) is int:
        first, second = torch.triu_indices(size, size, 1, device=input.device)
    else:
        rows = torch.arange(size, device=input.device)
        first, second = (rows.unsqueeze(1) < rows).nonzero(as_tuple=True)
    return torch.linalg.vector_norm(input[first] - input[second], p, 1)


def _cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """The exporter's own makes float32 of half precision, torch's casts what has its type already."""
    x1, x2 = (x / torch.clamp_min((x * x).sum(dim, keepdim=True).sqrt(), eps) for x in (x1, x2))
    return (x1 * x2).sum(dim)


def index_reduce(
    input: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    index = index.reshape([-1 if i == dim % input.dim() else 1 for i in range(input.dim())]).expand_as(source)
    return input.scatter_reduce(dim, index, source, reduce, include_self=include_self)


def _masked_select(input: Tensor, mask: Tensor) -> Tensor:
    input, mask = torch.broadcast_tensors(input, mask)
    return input.reshape(-1)[mask.reshape(-1)]


def _max_unpool(input: Tensor, indices: Tensor, output_size: Sequence[int], *_: Any) -> Tensor:
    axes = len(output_size)
    flat = input.new_zeros((*input.shape[:-axes], math.prod(output_size)))
    flat = flat.scatter(-1, indices.flatten(-axes), input.flatten(-axes))
    return flat.unflatten(-1, tuple(output_size))


def _rrelu(
    input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: Any = False
) -> Any:
    return NotImplemented if training else F.leaky_relu(input, (lower + upper) / 2, inplace)


def _searchsorted(
    sorted_sequence: Tensor,
    input: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """NaN is larger than all numbers."""
    if sorter is not None:
        sorted_sequence = sorted_sequence.gather(-1, sorter)
    values = torch.as_tensor(input, dtype=sorted_sequence.dtype, device=sorted_sequence.device)
    ends = sorted_sequence.unsqueeze(-2) if sorted_sequence.dim() > 1 else sorted_sequence
    behind = ends > values.unsqueeze(-1) if right or side == "right" else ends >= values.unsqueeze(-1)
    return (~behind).sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def _bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Weights added up at as many places as are counted without any."""
    if weights is None:
        return NotImplemented
    counts = torch.bincount(input, minlength=minlength)
    kind = torch.float32 if weights.dtype == torch.float32 else torch.float64
    return torch.zeros_like(counts, dtype=kind).index_add(0, input.long(), weights.to(kind))


def _combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """By their places; torch's own finds those by a mask."""
    size = input.shape[0]
    if type(size) is not int:
        return NotImplemented
    of = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = torch.tensor(list(of(range(size), r)), dtype=torch.int64, device=input.device)
    return input[places.reshape(-1, r)]


_CALLED: dict[str, Callable[..., Any]] = {
    "bincount": _bincount,
    "cdist": _cdist,
    "combinations": _combinations,
    "floor_divide": floor_divide,
    "index_reduce": index_reduce,
    "masked_select": _masked_select,
    "pdist": _pdist,
    "rrelu": _rrelu,
    "searchsorted": _searchsorted,
    "unravel_index": unravel_index,
}

IN_PLACE_OF: dict[Callable[..., Any], Callable[..., Any]] = {
    **aten.IN_PLACE_OF,
    **pool.AS_CALLED,
    **CHOICES,
    **EMBEDDINGS,
    **{called: function for name, function in _CALLED.items() for called in aten.as_called(name)},
    Tensor.__floordiv__: floor_divide,
    Tensor.fill_diagonal_: lambda x, *args, **kwargs: x.copy_(fill_diagonal(x, *args, **kwargs)),
}
"""Functions that an exporter does not know, or not as torch means them, as Python calls them."""

AS_TRACED = IN_PLACE_OF | {Tensor.__setitem__: _assigned, torch.linspace: linspace}
"""The same of TorchScript."""

_OURS: dict[str, Callable[..., Any]] = {
    **EXACT,
    **aten.FUNCTIONS,
    "aten::_to_copy": lambda x, *, dtype=None, **_: x.clone() if dtype in (None, x.dtype) else x.to(dtype),
    **{f"aten::_upsample_nearest_exact{axes}d{form}": nearest_exact for axes in (1, 2, 3) for form in ("", ".vec")},
    "aten::addcmul": lambda x, y, z, *, value=1: x + (y * z if value == 1 else y * z * value),
    "aten::bitwise_and.Tensor": operator.and_,
    "aten::bitwise_xor.Tensor": operator.xor,
    "aten::channel_shuffle": lambda x, groups: x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2),
    "aten::cosine_similarity": _cosine_similarity,
    "aten::erfc": lambda x: 1 - x.erf(),
    "aten::exp2": lambda x: (x * math.log(2)).exp(),
    "aten::fill_diagonal": fill_diagonal,
    "aten::index_reduce": index_reduce,
    "aten::log10": lambda x: floating(x).log() * (1 / math.log(10)),
    **{f"aten::max_unpool{axes}d": _max_unpool for axes in (2, 3)},
    **{f"aten::repeat_interleave.self_{form}": _repeat_interleave for form in ("Tensor", "int")},
    "aten::trunc": truncated,
}

_OTHERWISE = ("addcmul", "cosine_similarity", "fill_diagonal", "log10")
WRONG = frozenset(name.partition(".")[0] for name in (*EXACT, *aten.OTHERWISE, *map("aten::{}".format, _OTHERWISE)))
"""Functions that the exporter converts to something else than torch computes: always traced as what we have."""
