"""Opset 18 to 23: the torch.export based exporter, with our translations in its table."""

from __future__ import annotations

import copy
import functools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from svexport.errors import ExportError
from svexport.exporter.arguments import MODEL_ATTRIBUTE, FlatModel, own_failure
from svexport.exporter.complex import ComplexParts, has_complex
from svexport.exporter.constants import LINE, ConstantValues, NotTraced, sizes_stay_dynamic, without_assertions
from svexport.exporter.conversions import (
    Writer,
    bounded,
    extreme,
    extreme_along,
    is_floating,
    larger,
    mean_of_some,
    place_of_extreme,
    sorted_along,
)
from svexport.exporter.decompose import IN_PLACE_OF, advice_on
from svexport.exporter.exact import EXACT, exact_embeddings
from svexport.exporter.quantizers import FullRanges
from svexport.exporter.sizes import tiled
from svexport.exporter.source import user_frame
from svexport.graph.nodes import PLUGIN_ATTRIBUTES
from svexport.logging import logger, quiet
from svexport.ops._op import DOMAIN, OPS, Op
from svexport.symbolic import SYMBOLICS, Symbolic
from svexport.symbolic._symbolic import TensorInfo, qualified, without_computed

__all__ = ["batch_axes", "export", "translations"]

FIRST_OPSET = 18
"""What torch's exporter writes; models of lower ones are converted."""

_LOGGERS = (
    "onnx_ir",
    "onnxscript",
    "torch._subclasses.fake_tensor",
    "torch._export.non_strict_utils",
    "torch.export._trace",
    "torch.fx.experimental.symbolic_shapes",
    "torch.onnx._internal.exporter",
    "torch.onnx._internal.exporter._registration",
)


def export(
    model: FlatModel,
    tensors: Sequence[Tensor],
    path: Path,
    opset: int,
    input_names: Sequence[str],
    dynamic_axes: Mapping[str, Mapping[int, str]],
) -> onnx.ModelProto:
    """``model(*tensors)`` as ONNX, written to ``path``; raises :class:`ExportError` naming the operator and its source
    line."""
    shapes = None
    if dynamic_axes:
        # Axes of one name share one size, as they do in the file.
        shapes = {"tensors": tuple(dict(dynamic_axes.get(name, {})) for name in input_names)}
    options = {
        "dynamo": True,
        "opset_version": max(opset, FIRST_OPSET),
        "input_names": list(input_names),
        "dynamic_shapes": shapes,
        "custom_translation_table": translations(opset),
        "optimize": False,
        "verbose": False,
    }
    with quiet(*_LOGGERS):
        try:
            with _tracing(model, tensors, dynamic=bool(dynamic_axes)), _without_symbolics(opset):
                program = _exported(model, tensors, options)
        except torch.onnx.OnnxExporterError as error:
            if opset < FIRST_OPSET:  # there is another exporter
                reason, _ = _reason(error, input_names)
                where = _line(error)
                raise ExportError(reason + (f", at {where}" if where else "")) from error
            raise _failure(model, tensors, opset, input_names, error) from error
        assert program is not None  # it is only for dynamo=False
        _cast_back(program, model.output_dtypes)
        _save_optimized(program, path)
    written = onnx.load(str(path))
    if opset < FIRST_OPSET:
        from svexport.graph.opsets import convert_in_place

        convert_in_place(written, opset)
    return written


@contextmanager
def _tracing(model: FlatModel, tensors: Sequence[Tensor], dynamic: bool) -> Iterator[None]:
    """Everything that is to be another while a model is traced and decomposed."""
    with (
        _without_dump(),
        _registry_read_once(),
        _exact(),
        exact_embeddings(),
        FullRanges(),
        _InPlaceOf(dynamic),
        without_assertions(),
        sizes_stay_dynamic(),
        model.traced_in(ComplexParts(own=True) if has_complex(model, tensors) else None, ConstantValues(model)),
    ):
        yield


@contextmanager
def _without_symbolics(opset: int) -> Iterator[None]:
    """Leaves an ``autograd.Function`` that says by ``symbolic`` what it is in a file to the exporter that asks it."""
    if opset >= FIRST_OPSET:
        yield
        return
    function = torch.autograd.Function
    own = function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(cls, "symbolic"):
            raise NotTraced(
                f"{cls.__name__} says by symbolic what it is in a file, for which torch.export does not ask"
            )
        return own.__get__(None, cls)(*args, **kwargs)

    function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        function.apply = own  # type: ignore[method-assign]


@contextmanager
def _registry_read_once() -> Iterator[None]:
    """Keeps the exporter's own conversions, of which it otherwise reads the source code in every export."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    own = ONNXRegistry.__dict__["from_torchlib"]

    def from_torchlib(cls: Any, *args: Any, **kwargs: Any) -> Any:
        key = args, tuple(kwargs.items())
        if key not in _registries:
            _registries[key] = own.__get__(None, cls)(*args, **kwargs)
        registry = copy.copy(_registries[key])  # ours are registered in it
        registry.functions = {target: list(found) for target, found in registry.functions.items()}
        return registry

    ONNXRegistry.from_torchlib = classmethod(from_torchlib)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ONNXRegistry.from_torchlib = own  # type: ignore[method-assign]


_registries: dict[Any, Any] = {}


def batch_axes(model: FlatModel, tensors: Sequence[Tensor]) -> list[Any]:
    """Of each input, its first size as ``torch.export`` finds it where all of them may be dynamic.

    Returns:
        A ``torch.export.Dim`` for each that the model allows to be another, one for those that are the same, or a
        formula of one; None of the others.

    Raises:
        ExportError: if torch.export does not take the model.
    """
    given = _of_more_than_one(model, tensors)
    shapes = {"tensors": tuple({0: torch.export.Dim.AUTO} if t.dim() else None for t in given)}
    with quiet(*_LOGGERS):
        try:
            with _tracing(model, given, dynamic=True):
                program = torch.export.export(model, tuple(given), dynamic_shapes=shapes, strict=False)
        except Exception as error:
            raise _failure(model, tensors, 18, model.input_names, error) from error
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    sizes = [values[name].shape[:1] for name in program.graph_signature.user_inputs]
    roots: dict[Any, Any] = {}
    found: list[Any] = []
    for size, name in zip(sizes, model.input_names, strict=True):
        formula = size[0].node.expr if size and isinstance(size[0], torch.SymInt) else None
        symbols = sorted(formula.free_symbols, key=str) if formula is not None else []
        if len(symbols) != 1:
            found.append(None)
            continue
        (symbol,) = symbols
        factor, offset = int(formula.coeff(symbol)), int(formula.subs(symbol, 0))
        if formula - factor * symbol - offset != 0 or factor < 1:
            found.append(None)
            continue
        if symbol not in roots:
            limits = program.range_constraints.get(symbol)
            least, most = (0, math.inf) if limits is None else (int(limits.lower), limits.upper)
            bounds = ({"min": least} if least > 2 else {}) | ({"max": int(most)} if most < 2**31 else {})
            roots[symbol] = torch.export.Dim(f"{name}_batch" if roots else "batch", **bounds)
        dim = roots[symbol] * factor if factor > 1 else roots[symbol]
        found.append(dim + offset if offset else dim)
    return found


def _of_more_than_one(model: FlatModel, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The inputs with first sizes that torch.export does not take for numbers, as it does 0 and 1: twice as large, of
    all of them or of matrices alone, as the model takes them."""
    for least in (1, 2) if any(t.dim() and t.shape[0] < 2 for t in tensors) else ():
        larger = [tiled(t, (t.shape[0] * 2 or 2, *t.shape[1:])) if t.dim() >= least else t for t in tensors]
        with suppress(Exception):  # of the user's code
            model(*(t.clone() for t in larger))
            return larger
    return [t.clone() for t in tensors]


@contextmanager
def _without_dump() -> Iterator[None]:
    """Keeps torch.export from printing its whole graph where the first of its ways fails on a model."""
    from torch.export import _trace

    _trace.print = lambda *_, **__: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del _trace.print  # type: ignore[attr-defined]


def _exported(model: FlatModel, tensors: Sequence[Tensor], options: dict[str, Any]) -> Any:
    """The exporter's program, of the second of torch.export's ways where the first refuses the model.

    But not where a value is missing, which neither has and the second looks for at length.
    """
    from torch.onnx._internal.exporter import _capture_strategies

    own = _capture_strategies.CAPTURE_STRATEGIES
    errors: list[torch.onnx.OnnxExporterError] = []
    for way in own[:2]:
        _capture_strategies.CAPTURE_STRATEGIES = (way,)  # type: ignore[assignment]
        try:
            return torch.onnx.export(model, tuple(tensors), **options)
        except torch.onnx.OnnxExporterError as error:
            errors.append(error)
            if any(isinstance(one, NotTraced) or "data-dependent" in str(one) for one in _chain(error)):
                break
        finally:
            _capture_strategies.CAPTURE_STRATEGIES = own
    raise errors[0]


@contextmanager
def _exact() -> Iterator[None]:
    """Has the exporter decompose functions that it converts to something else than torch, as the other exporter has
    them."""
    from torch.onnx._internal.exporter import _decomp

    own = _decomp.create_onnx_friendly_decomposition_table

    def table(*args: Any, **kwargs: Any) -> dict[Any, Callable[..., Any]]:
        return own(*args, **kwargs) | {_overload(name): function for name, function in (EXACT | _ALSO).items()}

    _decomp.create_onnx_friendly_decomposition_table = table
    try:
        yield
    finally:
        _decomp.create_onnx_friendly_decomposition_table = own


def _normalized_by_itself(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """BatchNormalization that is told to train gives its statistics in another order, and another variance."""
    if not training:
        return NotImplemented
    axes = [axis for axis in range(x.dim()) if axis != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)
    mean = x.mean(axes)
    apart = x - mean.reshape(shape)
    squares = (apart * apart).sum(axes)
    count = x.numel() // x.shape[1]
    scale = (squares / count + eps).rsqrt()
    normal = apart * scale.reshape(shape)
    if weight is not None:
        normal = normal * weight.reshape(shape)
    if bias is not None:
        normal = normal + bias.reshape(shape)
    running_mean = (1 - momentum) * running_mean + momentum * mean
    running_var = (1 - momentum) * running_var + momentum * squares / (count - 1)
    return normal, mean, scale, running_mean, running_var


def _averaged(axes: int) -> Callable[..., Any]:
    """The exporter's own forgets the divisor."""
    pool = getattr(torch.ops.aten, f"avg_pool{axes}d")

    def function(
        x: Tensor,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        if divisor_override is None:
            return NotImplemented
        if ceil_mode:
            raise ExportError(
                f"avg_pool{axes}d with ceil_mode and divisor_override; pad the input, and leave ceil_mode"
            )
        sizes = list(kernel_size) * (axes if len(kernel_size) == 1 else 1)
        return pool(x, kernel_size, stride, padding, False, True) * (math.prod(sizes) / divisor_override)

    return function


_ALSO: dict[str, Callable[..., Any]] = {
    "aten::_native_batch_norm_legit_functional": _normalized_by_itself,
    "aten::avg_pool2d": _averaged(2),
    "aten::avg_pool3d": _averaged(3),
}
"""As :data:`EXACT`, of what the other exporter has right or another form of."""


def _overload(name: str) -> Any:
    function, _, form = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, function), form or "default")


class _InPlaceOf(TorchFunctionMode):
    """Has functions traced in place of those that the exporter does not know, or not of booleans, or for constant sizes
    only."""

    def __init__(self, dynamic: bool) -> None:
        super().__init__()
        self._functions = IN_PLACE_OF | _OF_MASKS | (_OF_DYNAMIC_SIZES if dynamic else {})

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        return self._functions.get(func, func)(*args, **(kwargs or {}))


def _affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
    return OPS["affine_grid"](theta, size, bool(align_corners))


def _of_masks(function: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Of booleans, the largest and where it is: ONNX has neither for them before opset 20, and TensorRT at none."""
    if input.dtype != torch.bool:
        return function(input, *args, **kwargs)
    numbers = [x.float() if isinstance(x, Tensor) and x.dtype == torch.bool else x for x in (input, *args)]
    result = function(*numbers, **kwargs)
    return result.bool() if isinstance(result, Tensor) else type(result)((result[0].bool(), result[1]))


def _by_a_tensor(function: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The exporter makes a number of what may be the size of a tensor."""

    def tensor(value: Any) -> Any:
        if not isinstance(value, (torch.SymInt, torch.SymFloat)):
            return value
        kind = input.dtype if isinstance(value, torch.SymInt) else torch.result_type(input, 1.0)
        return input.new_full((), value, dtype=kind)  # type: ignore[arg-type]

    return function(input, *map(tensor, args), **{name: tensor(value) for name, value in kwargs.items()})


def _parts(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The exporter makes a sequence of the parts of a dynamic size, on which its optimizer fails, and TensorRT too."""
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


def _linspace(start: Any, end: Any, steps: Any, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    """The exporter's own is for constant numbers. Computed from both ends to the middle, as torch's is."""
    if not any(isinstance(x, (torch.SymInt, torch.SymFloat)) for x in (start, end, steps)):
        return torch.linspace(start, end, steps, dtype=dtype, **kwargs)
    dtype = dtype or torch.get_default_dtype()
    if not dtype.is_floating_point:
        raise ExportError(f"torch.linspace of {dtype} between dynamic sizes; use floating-point numbers, and cast them")
    place = torch.arange(steps, dtype=dtype, device=kwargs.get("device"))
    first, last = (x.to(place) if isinstance(x, Tensor) else place.new_full((), x) for x in (start, end))
    step = (last - first) / place.new_full((), steps - 1).clamp(min=1)
    return torch.where(place < (steps + 1) // 2, first + place * step, last - (steps - 1 - place) * step)


_OF_MASKS: dict[Callable[..., Any], Callable[..., Any]] = {
    function: functools.partial(_of_masks, function)
    for name in ("amax", "amin", "max", "maximum", "min", "minimum")
    for function in (getattr(torch, name), getattr(Tensor, name))
}
_OF_DYNAMIC_SIZES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.affine_grid: _affine_grid,
    torch.linspace: _linspace,
    **{f: functools.partial(_parts, f) for f in (torch.chunk, torch.split, Tensor.chunk, Tensor.split)},
    **{
        f: functools.partial(_by_a_tensor, f)
        for f in (torch.pow, torch.remainder, Tensor.__mod__, Tensor.__pow__, Tensor.pow, Tensor.remainder)
    },
}


def _cast_back(program: torch.onnx.ONNXProgram, dtypes: Sequence[torch.dtype]) -> None:
    """Outputs to their data types: the exporter reduces half types in float32, and forgets to go back behind the last
    node."""
    outputs = program.model.graph.outputs
    for place, (value, dtype) in enumerate(zip(outputs, dtypes, strict=False)):
        wanted = {torch.float16: ir.DataType.FLOAT16, torch.bfloat16: ir.DataType.BFLOAT16}.get(dtype)
        if value is None or wanted is None or value.dtype != ir.DataType.FLOAT:
            continue
        node = ir.node("Cast", [value], {"to": wanted})
        node.outputs[0].name, node.outputs[0].dtype, node.outputs[0].shape = f"{value.name}_cast", wanted, value.shape
        program.model.graph.append(node)
        outputs[place] = node.outputs[0]


def _save_optimized(program: torch.onnx.ONNXProgram, path: Path) -> None:
    """Saves the program as the exporter's optimizer leaves it, or with constants folded where that makes it invalid.

    onnxscript 0.7 breaks some graphs: two equal ``clamp(0, 1)`` of one tensor lose the node that both share. On
    others it fails. As it was traced, a program has sequences of the parts of splits, and computes biases of
    convolutions that have none.
    """
    plain = path.with_name("plain.onnx")
    program.save(str(plain))
    try:
        program.optimize()
        program.save(str(path))
        onnx.checker.check_model(str(path))
    except (onnx.checker.ValidationError, ir.passes.PassError) as error:
        from onnxscript import optimizer

        logger.warning("folded constants only: the optimizer broke the graph ({})", str(error).splitlines()[0])
        folded = ir.load(str(plain))
        try:
            optimizer.fold_constants(folded)
            optimizer.remove_unused_nodes(folded)
        except ir.passes.PassError:  # as it was traced, then
            folded = ir.load(str(plain))
        ir.save(folded, str(path))


def translations(opset: int = FIRST_OPSET) -> dict[Any, Callable[..., Any]]:
    """``custom_translation_table`` for torch.onnx.export: our operators, and the aten functions they replace."""
    table: dict[Any, Callable[..., Any]] = {operator.floordiv: _floor_divide_sizes} | _conversions()
    for symbolic in SYMBOLICS.values():
        table[symbolic.op.torch_op] = _translation(symbolic)
        if symbolic.until is not None and (opset > symbolic.until or symbolic.until >= FIRST_OPSET):
            continue  # the exporter's own is right, and below exact by the converter
        for key, convert in symbolic.aten.items():
            name, _, only = key.partition(".")
            library, _, function = qualified(name).partition("::")
            packet = getattr(getattr(torch.ops, library), function, None)
            if packet is None:  # a library that is not imported
                continue
            for overload in [only] if only else packet.overloads():
                target = getattr(packet, overload)
                table[target] = _translation(symbolic, convert, target._schema.arguments)
    return table


class _OnnxscriptWriter:
    """Writes nodes by onnxscript: :class:`svexport.exporter.conversions.Writer`."""

    opset = 18

    def __call__(self, op_type: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        from onnxscript import opset18

        return getattr(opset18, op_type)(*inputs, **attributes)

    def constant(self, tensor: Tensor) -> Any:
        from onnxscript import opset18

        return opset18.Constant(value=ir.tensor(tensor))  # type: ignore[arg-type]

    def dtype(self, value: Any) -> torch.dtype | None:
        return None if value.dtype is None else _TORCH_DTYPES.get(value.dtype)

    def rank(self, value: Any) -> int | None:
        return None if value.shape is None else len(value.shape)

    def reduced(self, op_type: str, x: Any, axes: Sequence[int] | None, keepdims: bool) -> Any:
        given = [] if axes is None else [self.constant(torch.tensor(list(axes)))]
        return self(op_type, x, *given, keepdims=int(keepdims))

    def squeezed(self, x: Any, axis: int) -> Any:
        return self("Squeeze", x, self.constant(torch.tensor([axis])))


_TORCH_DTYPES = {
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.BOOL: torch.bool,
    ir.DataType.DOUBLE: torch.float64,
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.INT16: torch.int16,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT64: torch.int64,
    ir.DataType.INT8: torch.int8,
    ir.DataType.UINT8: torch.uint8,
}


def _conversions() -> dict[Any, Callable[..., Any]]:
    """Of functions that the exporter converts to something else than torch, by the rules of both exporters."""
    aten, write = torch.ops.aten, _OnnxscriptWriter()

    def sorted_stably(x: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
        return sort(x, dim, descending)

    def sort(x: Any, dim: int = -1, descending: bool = False) -> Any:
        size = write("Gather", write("Shape", x), write.constant(torch.tensor([dim]))) if write.rank(x) else None
        return sorted_along(write, x, size, dim, descending)

    def topk(x: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        one = torch.tensor([k if isinstance(k, int) else 1])
        count = write.constant(one) if isinstance(k, int) else write("Reshape", k, write.constant(one))
        return sorted_along(write, x, count, dim, largest)

    def bound(x: Any, number: Any) -> Any:
        if number is None or not isinstance(number, (bool, int, float)):
            return number if number is None or number.dtype == x.dtype else write("CastLike", number, x)
        return write.constant(torch.tensor(number, dtype=write.dtype(x)))

    def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
        low, high = bound(x, min), bound(x, max)
        if isinstance(min, (int, float)) and isinstance(max, (int, float)) and is_floating(write, x):
            return write("Clip", x, low, high)
        return bounded(write, x, low, high)

    def relu(x: Any) -> Any:
        return write("Relu", x) if is_floating(write, x) else clamp(x, 0)

    def mean(x: Any, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: int | None = None) -> Any:
        if dtype not in (None, -1):
            x = write("Cast", x, to=dtype)
        if write.rank(x) == 0:
            return write("Identity", x)
        result = write.reduced("ReduceMean", x, list(dim) if dim else None, keepdim)
        sizes = [None] if x.shape is None else [x.shape[axis] for axis in dim or range(len(x.shape))]
        chosen = any(s == 0 if isinstance(s, int) else str(getattr(s, "value", s)).startswith("u") for s in sizes)
        return mean_of_some(write, result, x, dim) if chosen else result

    table: dict[Any, Callable[..., Any]] = {
        aten.clamp.default: clamp,
        aten.clamp.Tensor: clamp,
        aten.clamp_max.default: lambda x, max: clamp(x, None, max),
        aten.clamp_max.Tensor: lambda x, max: clamp(x, None, max),
        aten.clamp_min.default: clamp,
        aten.clamp_min.Tensor: clamp,
        aten.hardtanh.default: lambda x, min_val=-1, max_val=1: clamp(x, min_val, max_val),
        aten.mean.default: lambda x, *, dtype=None: mean(x, dtype=dtype),
        aten.mean.dim: mean,
        aten.relu.default: relu,
        aten.relu6.default: lambda x: clamp(x, 0, 6),
        aten.sort.default: sort,
        aten.sort.stable: sorted_stably,
        aten.topk.default: topk,
    }
    for name in ("Max", "Min"):
        table |= _extremes(write, name)
    return table


def _extremes(write: Writer, name: str) -> dict[Any, Callable[..., Any]]:
    aten, reduce = torch.ops.aten, f"Reduce{name}"

    def whole(x: Any) -> Any:
        return extreme(write, reduce, x, None, False)

    def along(x: Any, dim: int, keepdim: bool = False) -> Any:
        return extreme_along(write, reduce, x, dim, keepdim)

    def along_all(x: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
        return extreme(write, reduce, x, list(dim) or None, keepdim)

    def place(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is not None or write.rank(x) == 0:
            return place_of_extreme(write, f"Arg{name}", x, dim or 0, keepdim)
        flat = write("Reshape", x, write.constant(torch.tensor([-1])))
        found = place_of_extreme(write, f"Arg{name}", flat, 0, False)
        shape = write.constant(torch.tensor([1] * (write.rank(x) or 0)))
        return write("Reshape", found, shape) if keepdim else found

    def two(x: Any, y: Any) -> Any:
        return larger(write, name, x, y)

    small = name.lower()
    return {
        getattr(aten, small).default: whole,
        getattr(aten, small).dim: along,
        getattr(aten, f"a{small}").default: along_all,
        getattr(aten, f"arg{small}").default: place,
        getattr(aten, f"{small}imum").default: two,
    }


def _floor_divide_sizes(x: Any, y: Any) -> Any:
    """The exporter's own rounds towards zero, which is another number in ``-(-size // 8)``."""
    from onnxscript import opset18

    if _not_negative(x) and _not_negative(y):
        return opset18.Div(x, y)
    return opset18.Div(opset18.Sub(x, opset18.Mod(x, y)), y)


def _not_negative(size: Any) -> bool:
    """Whether a number is surely not negative: a size, or made of some by what keeps it so."""
    if isinstance(size, (int, float)):
        return size >= 0
    node = size.producer() if hasattr(size, "producer") else None
    if node is None:
        return False
    if node.op_type == "Constant":
        value = node.attributes["value"].as_tensor() if "value" in node.attributes else None
        return value is not None and bool((value.numpy() >= 0).all())
    if node.op_type in ("Shape", "Size"):
        return True
    inputs = node.inputs[:1] if node.op_type in _OF_THE_FIRST else node.inputs
    return node.op_type in _OF_THE_FIRST | _OF_ALL and all(map(_not_negative, inputs))


_OF_THE_FIRST = {"Cast", "Gather", "Identity", "Reshape", "Squeeze", "Unsqueeze"}
_OF_ALL = {"Add", "Div", "Mul", "Max", "Min", "Mod"}


def _translation(
    symbolic: Symbolic, convert: Callable[..., Sequence[Any] | None] | None = None, schema: Sequence[Any] = ()
) -> Callable[..., Any]:
    from onnxscript import opset18, values

    op = symbolic.op
    domain = values.Opset(DOMAIN, 1)

    def function(*args: Any, **kwargs: Any) -> Any:
        arguments: Sequence[Any] = args
        if convert is not None:
            rest = schema[len(args) :]  # all of them by position, as the TorchScript exporter gives them
            converted = convert(*map(_info, args), *(_info(kwargs.get(a.name, a.default_value)) for a in rest))
            if converted is None:
                raise ExportError(f"{op.node_type} cannot take over this call at opset 18 and later")
            arguments = converted
        inputs: list[Any] = []
        computed: list[Any] = []
        attributes: dict[str, Any] = {}
        for argument, value in zip(op.arguments, arguments, strict=True):
            if argument.symbolic:
                value = without_computed(_info(value), computed)
            if argument.kind == "tensors":
                inputs += [_value(t) for t in value]
            elif argument.is_tensor:
                inputs.append(_value(value))
            elif argument.kind in ("int", "float"):
                attributes[argument.name] = (float if argument.kind == "float" else int)(value)
            elif value:  # an empty list has no type; it is written when the file is cleaned
                number = float if argument.kind == "floats" else int
                attributes[argument.name] = [number(v) for v in value]
        while inputs and inputs[-1] is None and not computed:
            inputs.pop()
        inputs += [opset18.Reshape(size, opset18.Constant(value_ints=[1])) for size in computed]  # type: ignore[arg-type]
        attributes |= PLUGIN_ATTRIBUTES
        return values.Op(domain, op.node_type, _schema(op, len(inputs)))(*inputs, **attributes)

    return function


def _info(value: Any) -> Any:
    """The exporter's tensors as :class:`TensorInfo`, lists of them too; anything else as it is."""
    if isinstance(value, (list, tuple)):
        return [_info(v) for v in value]
    if not hasattr(value, "producer") or not hasattr(value, "shape"):
        return value
    shape = value.shape
    return TensorInfo(value, None if shape is None else tuple(d if isinstance(d, int) else None for d in shape))


def _value(value: Any) -> Any:
    return value.value if isinstance(value, TensorInfo) else value


def _schema(op: Op, num_inputs: int) -> Any:
    from onnx import defs

    schema = defs.OpSchema
    kinds = {"int": schema.AttrType.INT, "float": schema.AttrType.FLOAT, "ints": schema.AttrType.INTS}
    kinds["floats"] = schema.AttrType.FLOATS
    attributes = [schema.Attribute(a.name, kinds[a.kind], "", required=False) for a in op.attributes]
    attributes += [schema.Attribute(name, schema.AttrType.STRING, "") for name in PLUGIN_ATTRIBUTES]
    tensors = [
        "tensor(float)",
        "tensor(float16)",
        "tensor(bfloat16)",
        "tensor(double)",
        "tensor(int8)",
        "tensor(uint8)",
    ]
    tensors += ["tensor(int32)", "tensor(int64)", "tensor(bool)"]
    optional = schema.FormalParameterOption.Optional  # a variadic input could not be absent
    return schema(
        op.node_type,
        DOMAIN,
        1,
        inputs=[schema.FormalParameter(f"input_{i}", "T", param_option=optional) for i in range(num_inputs)],
        outputs=[schema.FormalParameter(f"output_{i}", "T") for i in range(op.num_outputs)],
        type_constraints=[("T", tensors, "")],
        attributes=attributes,
    )


def _failure(
    model: nn.Module, tensors: Sequence[Tensor], opset: int, input_names: Sequence[str], error: BaseException
) -> ExportError:
    """The root cause of the exporter's chain of errors, with the user's source line where one is known."""
    for one in reversed(_chain(error)):
        if isinstance(one, ExportError):
            return one
    if own := own_failure(model, tensors):
        return own
    where = _line(error) or _source_of(_text(error), model, tensors)
    reason, advice = _reason(error, input_names)
    scripted = [name for name, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    if scripted:
        place = scripted[0].replace(MODEL_ATTRIBUTE, "model", 1)
        advice = (
            f"{place} is scripted, which torch.export does not take: put the module it was made of in its place, or "
            "export with opset=17 or less (another exporter)"
        )
    return ExportError(
        f"cannot be exported at opset {opset}: {reason}" + (f"\n  at {where}" if where else "") + f"\n  {advice}"
    )


def _reason(error: BaseException, input_names: Sequence[str]) -> tuple[str, str]:
    """Why torch.export, or the exporter behind it, does not take a model, and what to do about it."""
    text, chain = _text(error), _chain(error)
    reason = _first_line(next((one for one in reversed(chain) if isinstance(one, ExportError)), chain[-1]))
    fixed = re.findall(r"static shape of (\d+) for dimension inputs\['tensors'\]\[(\d+)\]\.shape\[(\d+)\]", text)
    if fixed:
        size, index, axis = fixed[0]
        return (
            f"axis {axis} of {input_names[int(index)]} is to be dynamic, but forward takes it for the number {size}",
            "keep int(), range() and branches off sizes, make it static, or try opset=17 (another exporter)",
        )
    if "data-dependent" in text:
        return (
            f"forward needs the value of a tensor in Python: {reason}",
            "a file has one way for all inputs: compute both and choose by torch.where, or make a constant of it; "
            "opset=17 or less takes the way of the given inputs, and tries others with which it would not hold",
        )
    if re.search(r"Unsupported attribute type: .*Symbolic", text):
        return (
            "a number that ONNX has as an attribute is a dynamic size, such as groups=x.shape[0] of a convolution",
            "make that size static, or compute it by functions that take tensors, such as torch.einsum",
        )
    return reason, advice_on(reason) or "replace the function by supported ones, or try opset=17 (another exporter)"


def _line(error: BaseException) -> str:
    """The user's line, where the error is one of what a function was given, or names one."""
    return next((getattr(one, LINE) for one in _chain(error) if hasattr(one, LINE)), "") or user_frame(_text(error))


def _text(error: BaseException) -> str:
    return "\n".join(map(str, _chain(error)))


def _chain(error: BaseException) -> list[BaseException]:
    """An error, and what led to it, the first cause last."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    return chain


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _source_of(text: str, model: nn.Module, tensors: Sequence[Tensor]) -> str:
    """The source line of the operator that an error message names, found by tracing once more."""
    try:
        program = torch.export.export(model, tuple(tensors), strict=False)
        nodes = [*program.graph.nodes, *program.run_decompositions().graph.nodes]
    except Exception:  # noqa: BLE001 - only the source line would be lost
        return ""
    for node in nodes:
        if node.op == "call_function" and (f"%{node.name} " in text or f"'{node.target}'".rsplit(".", 1)[0] in text):
            return user_frame(node.meta.get("stack_trace") or "")
    return ""
