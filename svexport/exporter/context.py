"""Everything that is patched while torch.export traces a model and its exporter decomposes the graph."""

from __future__ import annotations

import copy
import functools
import math
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from svexport.errors import ExportError
from svexport.exporter.aten import FUNCTIONS, made_by_torch, overload_of
from svexport.exporter.aten.interpolate import interpolate
from svexport.exporter.aten.pad import pad
from svexport.exporter.aten.span import linspace
from svexport.exporter.by_size import BY_SIZE
from svexport.exporter.complex import ComplexParts
from svexport.exporter.constants import (
    ConstantValues,
    NotTraced,
    lines_of_sizes,
    sizes_stay_dynamic,
    without_assertions,
)
from svexport.exporter.decompose import IN_PLACE_OF, InPlaceOf, index_reduce
from svexport.exporter.doubles import DOUBLES
from svexport.exporter.exact import EXACT, shapes_of_losses
from svexport.exporter.masks import by_places, is_mask_of_places
from svexport.exporter.opsets import FIRST_DYNAMO_OPSET
from svexport.exporter.picked import of_picked, of_two_or_more
from svexport.exporter.program import decompose_nodes, promote
from svexport.exporter.spared import rules_where_they_may_match, spared
from svexport.ops._op import OPS
from svexport.symbolic._symbolic import taken_over
from svexport.tracing.arguments import FlatModel
from svexport.tracing.quantizers import FullRanges, shapes_known
from svexport.tracing.source import lines_of_helpers
from svexport.tracing.swapped import applied_by, swapped

__all__ = ["other_functions", "tracing", "without_symbolics"]


@contextmanager
def tracing(model: FlatModel, tensors: Sequence[Tensor], dynamic: bool) -> Iterator[None]:
    """Applies every patch for tracing and decomposing a model."""
    with (
        _transforms_ended(),
        _without_dump(),
        spared(),
        lines_of_helpers(),
        _constants_kept(),
        rules_where_they_may_match(),  # last, so that it is asked first
        _constants_as_they_are(),
        _registry_read_once(),
        _composites_collected_once(),
        _exact(),
        shapes_of_losses(),
        _decomposed_by_node(),
        without_assertions(),
        lines_of_sizes(FlatModel.forward.__code__),
        sizes_stay_dynamic(),
        of_two_or_more(),
        shapes_known(),
        model.traced_in(*other_functions(dynamic), ComplexParts(own=True), ConstantValues(model)),
    ):
        yield


def other_functions(dynamic: bool) -> tuple[TorchFunctionMode, ...]:
    """Modes that replace some functions by others while tracing."""
    return FullRanges(), InPlaceOf(_ALWAYS | (_OF_DYNAMIC_SIZES if dynamic else of_picked(_OF_DYNAMIC_SIZES)))


@contextmanager
def without_symbolics(opset: int) -> Iterator[None]:
    """Leaves an ``autograd.Function`` that defines ``symbolic`` to the TorchScript exporter, which calls that."""
    if opset >= FIRST_DYNAMO_OPSET:
        yield
        return

    def apply(own: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(cls, "symbolic"):
            raise NotTraced(f"{cls.__name__} defines its ONNX nodes by symbolic, which torch.export does not read")
        return own(*args, **kwargs)

    with applied_by(apply):
        yield


@contextmanager
def _transforms_ended() -> Iterator[None]:
    """Pops ``torch.func`` transforms that an error has left open: all later computation would go through them."""
    functorch = torch._C._functorch
    depth = functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)


@contextmanager
def _constants_kept() -> Iterator[None]:
    """Works around onnxscript's rules, which overwrite constants of the same name: the second ``clamp(0, 1)`` of a
    tensor removes the constants of the first."""
    from onnxscript.rewriter._rewrite_rule import RewriteRule

    own = RewriteRule.try_rewrite

    def try_rewrite(self: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        found = own(self, model, graph, node, **options)
        if found is None:
            return None
        for made in found.new_initializers:
            while (before := graph.initializers.get(made.name)) is not None and any(
                use.node not in found.match.nodes for use in before.uses()
            ):
                made.name = f"{made.name}_"
        return found

    with swapped(RewriteRule, try_rewrite=try_rewrite):
        yield


@contextmanager
def _constants_as_they_are() -> Iterator[None]:
    """Compares constants exactly: onnxscript's rules take 1e-12 for 0, and drop what guards a division by 0."""
    from onnxscript.rewriter import _matcher

    def isclose(a: float, b: float, **tolerances: float) -> bool:
        return math.isclose(a, b, rel_tol=2**-24, abs_tol=0)  # equal in float32

    with swapped(_matcher, math=SimpleNamespace(isclose=isclose)):
        yield


@contextmanager
def _registry_read_once() -> Iterator[None]:
    """Caches the exporter's own conversions; it would read their source code in every export."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    own = ONNXRegistry.__dict__["from_torchlib"]

    def from_torchlib(cls: Any, *args: Any, **kwargs: Any) -> Any:
        key = args, tuple(kwargs.items())
        if key not in _registries:
            _registries[key] = own.__get__(None, cls)(*args, **kwargs)
        registry = copy.copy(_registries[key])  # our conversions are registered in the copy
        registry.functions = {target: list(found) for target, found in registry.functions.items()}
        return registry

    with swapped(ONNXRegistry, from_torchlib=classmethod(from_torchlib)):
        yield


_registries: dict[Any, Any] = {}


@contextmanager
def _composites_collected_once() -> Iterator[None]:
    """Caches the list of composite functions until functions are added, and has torch write their types without making
    them. Together these take half of the export of a small model."""
    from torch.export import decomp_utils, exported_program

    places = [module for module in (decomp_utils, exported_program) if hasattr(module, "_collect_all_valid_cia_ops")]
    own = [module._collect_all_valid_cia_ops for module in places]

    def collected() -> Any:
        count = len(torch._C._dispatch_get_all_op_names())
        if count not in _composites:
            _composites.clear()
            _composites[count] = own[0]()
        return set(_composites[count])

    with ExitStack() as stack:
        for module in places:
            stack.enter_context(swapped(module, _collect_all_valid_cia_ops=collected))
        if "Callable" in vars(torch._ops):
            stack.enter_context(swapped(torch._ops, Callable=typing.Callable))  # caches subscripted types
        yield


_composites: dict[int, Any] = {}


@contextmanager
def _without_dump() -> Iterator[None]:
    """Keeps torch.export from printing its whole graph if its first strategy fails on a model."""
    from torch.export import _trace

    with swapped(_trace, print=lambda *_, **__: None):
        yield


@contextmanager
def _decomposed_by_node() -> Iterator[None]:
    """Has the exporter decompose node by node, and trace a program a second time only if that is not enough."""
    from torch.export import decomp_utils
    from torch.onnx._internal.exporter import _decomp, _fx_passes

    own = _fx_passes.decompose_with_registry

    def decompose(program: torch.export.ExportedProgram, registry: Any) -> torch.export.ExportedProgram:
        if any(isinstance(value, torch._subclasses.FakeTensor) for value in program.constants.values()):
            raise NotTraced("forward makes a constant whose values torch.export loses, which ends the process")
        known = set(_decomp.get_onnx_implemented_overloads(registry))
        table = _decomp.create_onnx_friendly_decomposition_table(known)
        composites = decomp_utils._collect_all_valid_cia_ops()  # type: ignore[attr-defined]
        return program if decompose_nodes(program, table, composites) else own(program, registry)

    def promoted(module: torch.fx.GraphModule) -> None:
        for inner in module.modules():
            promote(inner)  # type: ignore[arg-type]

    with swapped(_fx_passes, decompose_with_registry=decompose, insert_type_promotion_nodes=promoted):
        yield


@contextmanager
def _exact() -> Iterator[None]:
    """Has the exporter decompose functions that it converts differently from torch, as for the TorchScript
    exporter."""
    from torch.onnx._internal.exporter import _decomp

    own = _decomp.create_onnx_friendly_decomposition_table

    taken = taken_over()
    exact = {name: function for name, function in EXACT.items() if name.partition(".")[0] not in taken}

    def table(*args: Any, **kwargs: Any) -> dict[Any, Callable[..., Any]]:
        return own(*args, **kwargs) | {
            overload_of(name): function for name, function in (exact | FUNCTIONS | _ALSO).items()
        }

    with swapped(_decomp, create_onnx_friendly_decomposition_table=table):
        yield


def _normalized_by_itself(
    x: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, *rest: float
) -> Any:
    """Batch norm in training. ONNX's returns its statistics in another order, and another variance."""
    if not training:
        return NotImplemented
    whole = made_by_torch("aten::_native_batch_norm_legit_functional")
    return whole(x, weight, bias, running_mean, running_var, training, *rest)


def _cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Cross entropy. The exporter's own ignores ``label_smoothing``, and takes neither probabilities nor one sample."""
    if x.dim() > 1 and not label_smoothing and not target.is_floating_point():
        return NotImplemented
    whole = torch.ops.aten.cross_entropy_loss.default
    composed = torch._C.DispatchKey.CompositeImplicitAutograd  # whole.decompose() may call this function
    return whole._op_dk(composed, x, target, weight, reduction, ignore_index, label_smoothing)


def _unfold_side_by_side(x: Tensor, dimension: int, size: int, step: int) -> Any:
    """``unfold`` whose windows do not overlap: splits the dimension in two."""
    dimension %= x.dim() or 1
    length = x.shape[dimension] if x.dim() else None
    if size != step or not isinstance(length, int) or length < size:
        return NotImplemented
    kept = x.narrow(dimension, 0, length // size * size)
    return kept.unflatten(dimension, (-1, size)).movedim(dimension + 1, -1)


def _patches_side_by_side(
    x: Tensor, kernel_size: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Any:
    """``im2col`` whose patches do not overlap, likewise."""
    sizes = x.shape[-2:]
    plain = list(kernel_size) == list(stride) and set(dilation) == {1} and set(padding) == {0} and x.dim() == 4
    if not plain or any(not isinstance(n, int) or n % k for n, k in zip(sizes, kernel_size, strict=True)):
        return NotImplemented
    (rows, columns), (height, width) = kernel_size, (n // k for n, k in zip(sizes, kernel_size, strict=True))
    patches = x.reshape(x.shape[0], x.shape[1], height, rows, width, columns).permute(0, 1, 3, 5, 2, 4)
    return patches.reshape(x.shape[0], x.shape[1] * rows * columns, height * width)


def _by_long_indices(name: str) -> Callable[..., Any]:
    """Widens int32 indices: the exporter passes them to GatherND and ScatterND, which take int64."""

    def function(x: Tensor, indices: Sequence[Tensor | None], *rest: Any, **kwargs: Any) -> Any:
        if all(index is None or index.dtype != torch.int32 for index in indices):
            return NotImplemented
        longer = [index.long() if index is not None and index.dtype == torch.int32 else index for index in indices]
        return overload_of(name)(x, longer, *rest, **kwargs)

    return function


def _projected_lstm(input: Tensor, hx: Sequence[Tensor], *args: Any) -> Any:
    """An LSTM with projected state, step by step: ONNX's LSTM has no projection."""
    if hx[0].shape[-1] == hx[1].shape[-1]:
        return NotImplemented
    return made_by_torch("aten::lstm.input")(input, hx, *args)


def _all_dropped(x: Tensor, p: float, train: bool | None) -> Any:
    """Dropout of every number, which ONNX does not take for a ratio."""
    return (x * 0, torch.zeros_like(x, dtype=torch.bool)) if train and p == 1 else NotImplemented


def _copied(x: Tensor, values: Tensor, non_blocking: bool = False) -> Any:
    """``copy``. The exporter's own does not expand the values to the shape of ``x``."""
    if list(map(str, x.shape)) == list(map(str, values.shape)):
        return NotImplemented
    return values.to(x.dtype).expand(x.shape).clone()


_ALSO: dict[str, Callable[..., Any]] = {
    **DOUBLES,
    "aten::_native_batch_norm_legit_functional": _normalized_by_itself,
    **{
        f"aten::{name}": _by_long_indices(f"aten::{name}")
        for name in ("_unsafe_index.Tensor", "_unsafe_index_put", "index.Tensor", "index_put")
    },
    "aten::copy": _copied,
    "aten::cross_entropy_loss": _cross_entropy,
    "aten::im2col": _patches_side_by_side,
    "aten::index_reduce": index_reduce,  # of index_reduce_
    "aten::lstm.input": _projected_lstm,
    "aten::native_dropout": _all_dropped,
    "aten::unfold": _unfold_side_by_side,
}
"""Like :data:`EXACT`, for torch.export alone: TorchScript's exporter converts these correctly or in another form."""


def _affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
    return OPS["affine_grid"](theta, size, bool(align_corners))


def _as_numbers(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Casts booleans to numbers: for booleans, the exporters divide by 0 without the epsilon that torch adds."""
    return function(*map(_number, args), **{name: _number(x) for name, x in kwargs.items()})


def _number(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype == torch.bool else x


def _by_places(function: Callable[..., Any], input: Tensor, index: Any, *values: Any) -> Any:
    """Replaces masks by indices: if a mask comes with other indices, the exporter takes those for masks as well."""
    indices = index if isinstance(index, tuple) else (index,)
    if any(map(is_mask_of_places, indices)) and sum(isinstance(i, (Tensor, list)) for i in indices) > 1:
        index = tuple(by_places(indices))
    return function(input, index, *values)


def _by_a_tensor(function: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Passes dynamic sizes as tensors: the exporter would make constants of them."""

    def tensor(value: Any) -> Any:
        if not isinstance(value, (torch.SymInt, torch.SymFloat)):
            return value
        kind = input.dtype if isinstance(value, torch.SymInt) else torch.result_type(input, 1.0)
        return input.new_full((), value, dtype=kind)  # type: ignore[arg-type]

    return function(input, *map(tensor, args), **{name: tensor(value) for name, value in kwargs.items()})


def _arithmetic(function: Callable[..., Any], input: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
    """Arithmetic that the exporter gets wrong: it writes Add for masks, which ONNX does not define; it makes a constant
    of a quotient of sizes next to an integer tensor; and it fails on a float minus an integer tensor."""
    fractions = (torch.SymFloat, float) if "rsub" in function.__name__ else torch.SymFloat
    if isinstance(input, Tensor) and isinstance(other, fractions) and not input.is_floating_point():
        input = input.to(torch.result_type(input, 1.0))
    masks = all(isinstance(x, Tensor) and x.dtype == torch.bool for x in (input, other)) and not (args or kwargs)
    if masks and function.__name__ in ("add", "__add__"):
        return torch.logical_or(input, other)
    if masks and function.__name__ in ("add_", "__iadd__"):
        return input.logical_or_(other)
    return function(input, other, *args, **kwargs)


def _of_nothing(function: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``addmm`` with an empty inner dimension: ONNX Runtime's Gemm then ignores ``beta``."""
    if len(args) != 2 or not isinstance(args[0].shape[-1], int) or args[0].shape[-1]:
        return function(input, *args, **kwargs)
    beta = kwargs.get("beta", 1)
    added = input * beta if beta else torch.zeros_like(input)
    return added.expand(args[0].shape[0], args[1].shape[1]).clone()


def _of_a_number(function: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``nonzero`` of a scalar: rows without columns, for which ONNX's NonZero makes columns."""
    if input.dim() or args or kwargs.get("as_tuple"):
        return function(input, *args, **kwargs)
    return function(input.reshape(1))[:, :0]


def _parts(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Splits of a dynamic size. The exporter writes a sequence, on which its optimizer and TensorRT fail."""
    parts = function(*args, **kwargs)
    input: Tensor = args[0] if args else kwargs["input" if "input" in kwargs else "tensor"]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    if not isinstance(input.shape[dim], torch.SymInt):
        return parts
    start, slices = 0, []
    for part in parts:
        slices.append(input.narrow(dim, start, part.shape[dim]))
        start = start + part.shape[dim]
    return tuple(slices)


def _arange(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    """Counts the steps of ``arange`` in float64, as torch does; ONNX's Range counts in the dtype of the numbers."""
    names = ("end",) if len(args) == 1 else ("start", "end", "step")
    given = {"start": 0, "step": 1, **dict(zip(names, args, strict=False))}
    start, end, step = (kwargs.pop(name, given.get(name)) for name in ("start", "end", "step"))
    numbers = start, end, step
    dynamic = any(isinstance(x, (torch.SymInt, torch.SymFloat)) for x in numbers)
    if not dynamic or not any(isinstance(x, (float, torch.SymFloat)) for x in numbers):
        return torch.arange(start, end, step, dtype=dtype, **kwargs)
    dtype = dtype or torch.get_default_dtype()
    if not dtype.is_floating_point:
        raise ExportError(
            f"torch.arange by floats between dynamic sizes has no form as {dtype}; leave dtype out, and cast"
        )
    place = torch.arange(math.ceil((end - start) / step), dtype=dtype, **kwargs)
    first, by = (x.to(place) if isinstance(x, Tensor) else place.new_full((), x) for x in (start, step))
    return first + place * by


def _each(function: Callable[..., Any], *called: Callable[..., Any]) -> dict[Callable[..., Any], Callable[..., Any]]:
    """By what Python calls, ``function`` with that as its first argument."""
    return {one: functools.partial(function, one) for one in called}


_ARITHMETIC = (
    *(getattr(torch, name) for name in ("add", "div", "mul", "rsub", "sub", "true_divide")),
    *(getattr(Tensor, name) for name in ("add", "div", "mul", "sub", "true_divide", "add_", "__iadd__")),
    *(getattr(Tensor, f"__{r}{name}__") for name in ("add", "mul", "sub", "truediv") for r in ("", "r")),
)
_ALWAYS: dict[Callable[..., Any], Callable[..., Any]] = {
    **IN_PLACE_OF,
    **_each(_as_numbers, F.cosine_embedding_loss, torch.cosine_embedding_loss),
    **_each(_by_places, Tensor.__getitem__, Tensor.__setitem__),
    **_each(_of_nothing, torch.addmm, Tensor.addmm),
    **_each(_of_a_number, torch.argwhere, torch.nonzero, Tensor.argwhere, Tensor.nonzero),
    F.interpolate: interpolate,
    F.pad: pad,
    **_each(_arithmetic, *_ARITHMETIC),
}
_OF_DYNAMIC_SIZES: dict[Callable[..., Any], Callable[..., Any]] = {
    **BY_SIZE,
    F.affine_grid: _affine_grid,
    torch.arange: _arange,
    torch.linspace: linspace,
    **_each(_parts, torch.chunk, torch.split, Tensor.chunk, Tensor.split),
    **_each(_by_a_tensor, torch.pow, torch.remainder, Tensor.__mod__, Tensor.__pow__, Tensor.pow, Tensor.remainder),
}
