"""The TorchScript exporter, with our symbolics in its registry for the duration of one export."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import onnx
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.onnx import symbolic_helper
from torch.overrides import TorchFunctionMode

from svexport.errors import ExportError, SvexportError
from svexport.exporter.complex import ComplexParts
from svexport.exporter.corrections import CORRECTIONS
from svexport.exporter.decompose import AS_TRACED, DecompositionError, InPlaceOf, advice_on, decomposable, decomposed
from svexport.exporter.failures import line_of, located
from svexport.exporter.jit_graph import GraphWriter, kinds_of, read, schema_of
from svexport.exporter.opsets import FIRST_TORCHSCRIPT_OPSET, LAST_TORCHSCRIPT_OPSET, LATER, OPSETS
from svexport.graph.nodes import PLUGIN_ATTRIBUTES
from svexport.graph.nothing import take_zero_for_a_size
from svexport.logging import logger
from svexport.ops._op import DOMAIN, Argument, Op, as_tuple
from svexport.symbolic import SYMBOLICS, Symbolic
from svexport.symbolic._symbolic import TensorInfo, node_of, qualified
from svexport.tracing.arguments import FlatModel, TracingStopped, own_failure
from svexport.tracing.source import shown_line, user_frame
from svexport.tracing.swapped import applied_by, swapped, untraced

try:
    from torch.onnx._internal.torchscript_exporter.registration import registry
except ImportError:  # torch < 2.9
    from torch.onnx._internal.registration import registry  # type: ignore[import-not-found, no-redef]

__all__ = ["SOURCE_ATTRIBUTE", "export", "registered"]

_LARGE = 2**30
"""Bytes of weights from which the exporter writes to a file, with external data, as one protobuf cannot hold them."""

SOURCE_ATTRIBUTE = "svexport_source"
"""Attribute that carries the user's source line through the exporter; removed when the file is read back."""


def export(
    model: FlatModel,
    tensors: Sequence[Tensor],
    path: Path,
    opset: int,
    input_names: Sequence[str],
    dynamic_axes: Mapping[str, Mapping[int, str]],
) -> onnx.ModelProto:
    """Exports ``model(*tensors)`` at ``opset`` or the exporter's first opset, whichever is later; a large model goes
    through ``path``. Raises :class:`ExportError` that names the operator and its source line."""
    options = {
        "dynamo": False,
        "opset_version": max(opset, FIRST_TORCHSCRIPT_OPSET),
        "input_names": list(input_names),
        "dynamic_axes": {name: dict(axes) for name, axes in dynamic_axes.items()},
    }
    written = _traced(model, tensors, opset, lambda: _written(model, tensors, path, options))
    take_zero_for_a_size(written)
    return written


def _traced(
    model: FlatModel, tensors: Sequence[Tensor], opset: int, write: Callable[[], onnx.ModelProto]
) -> onnx.ModelProto:
    """Calls ``write`` with functions decomposed; whenever the exporter refuses one more, decomposes it and retries."""
    others: list[str] = []
    modes = InPlaceOf(AS_TRACED), ComplexParts(own=False)
    cause: Exception
    while True:
        try:
            with (
                registered(),
                swapped(torch._C, _jit_onnx_log=lambda *_: None),  # it would print the whole graph before an error
                _without_reshapes_of_nothing(any(not t.numel() for t in tensors)),
                swapped(F, _unpool_output_size=untraced()(F._unpool_output_size)),  # type: ignore[attr-defined]
                applied_by(_opened),
                decomposed(others),
                model.traced_in(*modes),
            ):
                try:
                    return write()
                except TracingStopped:
                    with _TracingOn():
                        return write()
        except TracingStopped as error:
            raise ExportError(
                f"cannot be exported at opset {opset}: {error}; do not call what may fail, or {LATER}"
            ) from error
        except SvexportError as error:
            raise located(error, line_of(error)) from error.__cause__
        except Exception as error:
            made = isinstance(error, DecompositionError)
            if made and others:  # raise the exporter's error that led to this decomposition
                others.pop()
                break
            known = isinstance(error, torch.onnx.errors.OnnxExporterError)
            if not known and (own := own_failure(model, tensors)):
                raise own from error
            cause = error
            name = "" if made else _function_of(error)
            if name in others or not decomposable(name):
                break
        logger.info("{} cannot be exported at opset {}: tracing what it is made of", name, opset)
        others.append(name)
    with decomposed(others), model.traced_in(*modes):
        raise _failure(model, tensors, opset, cause) from cause


def _written(model: nn.Module, tensors: Sequence[Tensor], path: Path, options: dict[str, Any]) -> onnx.ModelProto:
    traced: nn.Module = model
    if any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
        # The exporter's own tracer refuses scripted submodules; torch.jit.trace takes them in.
        traced = torch.jit.trace(model, tuple(tensors), check_trace=False)
    size = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    written: Any = io.BytesIO() if size < _LARGE else str(path)
    torch.onnx.export(traced, tuple(tensors), written, **options)
    return onnx.load(written) if size >= _LARGE else onnx.load_from_string(written.getvalue())


class _TracingOn(TorchFunctionMode):
    """Continues tracing after an operator has raised. That would leave its node without outputs and end the trace.

    Used only where needed, because it makes the tracer's warnings name this file instead of the user's.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        state = torch._C._get_tracing_state()
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            if state is not None and not torch.jit.is_tracing():
                torch._C._set_tracing_state(state)  # type: ignore[attr-defined]
                _remove_unfinished(state.graph())
            raise


def _remove_unfinished(block: Any) -> None:
    for node in list(block.nodes()):
        for inner in node.blocks():
            _remove_unfinished(inner)
        if node.kind().startswith(("aten::", f"{DOMAIN}::")) and not node.outputsSize():
            node.destroy()


def _function_of(error: Exception) -> str:
    """The aten function that an exporter's error is about (``aten::outer``); empty if the message does not tell."""
    if "adaptive pooling, since output_size is not constant" in str(error):
        return "aten::adaptive_avg_pool2d"
    found = re.search(r"(?:operator '|in exporting )(aten::\w+)|ONNX export of (?:operator )?(\w+)", str(error))
    return "" if found is None else found[1] or f"aten::{found[2]}"


@contextmanager
def _without_reshapes_of_nothing(empty: bool) -> Iterator[None]:
    """Refuses to Reshape an empty tensor to an inferred size: the exporter divides by zero, which ends the process.

    ``empty`` says whether an input of the model has no elements; tensors of unknown shape then count as empty too.
    """
    own = torch._C._jit_pass_onnx_node_shape_type_inference  # type: ignore[attr-defined]

    def inferred(node: Any, *args: Any) -> Any:
        if node.kind() == "onnx::Reshape":
            data, shape = node.inputs()
            sizes = data.type().sizes() if isinstance(data.type(), torch._C.TensorType) else None
            known = shape.node().kind() == "onnx::Constant" and -1 not in shape.node().t("value")
            if (empty if sizes is None else 0 in sizes) and not known:
                raise ExportError(
                    "forward reshapes a tensor without elements, which ends the process in torch's exporter; give "
                    "example inputs that have elements, and declare the size dynamic if it may be 0"
                )
        return own(node, *args)

    with swapped(torch._C, _jit_pass_onnx_node_shape_type_inference=inferred):
        yield


def _opened(own: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Traces the forward of an ``autograd.Function`` like any other code.

    The tracer would make one node of it, in which writes in place are lost. Functions that define ``symbolic`` stay
    nodes.
    """
    if hasattr(cls, "symbolic") or not torch.jit.is_tracing():
        return own(*args, **kwargs)
    if cls.setup_context is not torch.autograd.Function.setup_context:
        return cls.forward(*args, **kwargs)
    context = torch.autograd.function.FunctionCtx()
    context.needs_input_grad = (False,) * len(args)  # type: ignore[attr-defined]
    return cls.forward(context, *args, **kwargs)


@contextmanager
def registered() -> Iterator[None]:
    """Puts our symbolics into torch.onnx's registry: for ``torch.ops.svexport``, for the aten functions that these
    replace, and for what the exporter gets wrong.

    The registry is restored exactly, also after an error.
    """
    for opset in range(OPSETS.start, LAST_TORCHSCRIPT_OPSET + 1):  # torch.onnx imports them only when it exports
        import_module(f"torch.onnx.symbolic_opset{opset}")
    conversions = {}
    for symbolic in SYMBOLICS.values():
        conversions[f"{DOMAIN}::{symbolic.op.name}"] = _to_node_of(symbolic)
        for name in {name.partition(".")[0] for name in symbolic.aten}:
            conversions[qualified(name)] = _to_node_of(symbolic, name)
    for name, convert in CORRECTIONS.items():
        conversions[name] = _corrected(convert, conversions[name]) if name in conversions else convert
    functions = {name: _function(name, convert) for name, convert in conversions.items()}
    with swapped(registry, _registry={name: own for name, own in registry._registry.items() if name not in functions}):
        for name, function in functions.items():
            registry.register(name, FIRST_TORCHSCRIPT_OPSET, function)
        yield


def _function(name: str, convert: Callable[..., Any]) -> Callable[..., Any]:
    """The function that torch.onnx calls for each node ``name``; ``convert`` gets the exporter's own as an argument."""
    group: Any = registry.get_function_group(name) or {}

    def missing(g: Any, *values: torch._C.Value) -> Any:  # raises only if called
        first = next((opset for opset in range(g.opset, LAST_TORCHSCRIPT_OPSET + 1) if group.get(opset)), None)
        raise torch.onnx.errors.UnsupportedOperatorError(name, g.opset, first)

    def function(g: Any, *values: torch._C.Value) -> Any:
        try:
            return convert(g, group.get(g.opset) or missing, *values)
        except ExportError as error:
            raise located(error, user_frame(g.original_node.sourceRange())) from error.__cause__

    return function


def _corrected(correct: Callable[..., Any], convert: Callable[..., Any]) -> Callable[..., Any]:
    """The correction of a function that one of our ops replaces: it corrects the conversion to that op."""
    return lambda g, own, *values: correct(g, lambda g, *given: convert(g, own, *given), *values)


def _to_node_of(symbolic: Symbolic, aten: str | None = None) -> Callable[..., Any]:
    """The conversion to an op's node: from the op itself, or from an aten function that it replaces."""

    def convert(g: Any, own: Callable[..., Any], *values: torch._C.Value) -> Any:
        if aten is None:
            return _emit(g, symbolic.op, [read(v, a.kind) for v, a in zip(values, symbolic.op.arguments, strict=True)])
        if symbolic.until is not None and g.opset > symbolic.until:
            with suppress(torch.onnx.errors.OnnxExporterError):  # emit our node if the exporter refuses
                return own(g, *values)
        schema = schema_of(g.original_node)
        taken = symbolic.aten.get(aten) or symbolic.aten.get(f"{aten}.{schema.overload_name}")
        arguments = taken and taken(*map(read, values, kinds_of(schema)))
        return own(g, *values) if arguments is None else _emit(g, symbolic.op, arguments)

    return convert


def _emit(g: Any, op: Op, arguments: Sequence[Any]) -> Any:
    """Emits the svexport node, and sets its output types, which later symbolics read."""
    tensors, computed, numbers = node_of(op, arguments)
    inputs = [symbolic_helper._optional_input_placeholder_tensor(g) if value is None else value for value in tensors]
    write = GraphWriter(g)  # the exporter types the result of math.floor as a float
    inputs += [write("Reshape", write.typed(n, torch.int64), write.constant(torch.tensor([1]))) for n in computed]
    attributes = numbers | PLUGIN_ATTRIBUTES | {SOURCE_ATTRIBUTE: user_frame(g.original_node.sourceRange())}
    outputs = write(f"{DOMAIN}::{op.node_type}", *inputs, outputs=op.num_outputs, **attributes)
    types = _output_types(op, arguments, g.original_node)
    for output, type_ in zip((outputs,) if op.num_outputs == 1 else outputs, types, strict=True):
        if type_ is not None:
            output.setType(type_)
    return outputs


def _output_types(op: Op, arguments: Sequence[Any], node: torch._C.Node) -> list[torch._C.TensorType | None]:
    """Output types from the op's fake, run on meta tensors with two choices of dynamic sizes: an output size that
    differs between the two is dynamic.

    If the fake refuses the sizes tried, every output size is dynamic, and dtype and rank come from the trace of
    ``node``.
    """
    primes = (1009, 1013, 1019, 1021, 1031), (2003, 2011, 2017, 2027, 2029)
    try:
        results = [as_tuple(op(*_tried(op, arguments, itertools.cycle(fresh)))) for fresh in primes]
    except (RuntimeError, TypeError, AttributeError, ValueError, IndexError):
        return [_of_any_size(output.type()) for output in node.outputs()]
    types: list[torch._C.TensorType | None] = []
    for first, second in zip(*results, strict=True):
        shape = [a if a == b else None for a, b in zip(first.shape, second.shape, strict=True)]
        type_ = torch._C.TensorType.create_from_tensor(torch.empty(0, dtype=first.dtype))
        types.append(type_.with_sizes(shape))
    return types


def _tried(op: Op, arguments: Sequence[Any], fresh: Iterator[int]) -> list[Any]:
    """The arguments with numbers in place of dynamic sizes, which the exporter marks by negative symbols."""
    sizes: dict[int, int] = {}

    def tried(argument: Argument, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [tried(argument, each) for each in value]
        if not isinstance(value, TensorInfo):
            return value
        if argument.kind != "tensors" and not argument.is_tensor:
            return next(fresh)
        type_ = value.value.type()
        shape = [size if size >= 0 else sizes.setdefault(size, next(fresh)) for size in type_.symbolic_sizes()]
        return torch.empty(shape, dtype=type_.dtype(), device="meta")

    return list(map(tried, op.arguments, arguments))


def _of_any_size(type_: Any) -> torch._C.TensorType | None:
    rank = type_.dim() if isinstance(type_, torch._C.TensorType) else None
    return None if rank is None else type_.with_sizes([None] * rank)


def _failure(model: nn.Module, tensors: Sequence[Tensor], opset: int, error: Exception) -> ExportError:
    """The exporter's error with the user's source line, which one more trace finds."""
    message = str(error)
    if not isinstance(error, torch.onnx.errors.UnsupportedOperatorError):  # raised inside a conversion
        reason = message.split("  [Caused by")[0].split("\n")[0] or type(error).__name__
        if "because it is not constant" in message:
            reason = "what is an attribute in ONNX is computed from sizes or values"
            if place := re.search(r" # ([^\n]+):(\d+):\d+$", message, re.MULTILINE):
                reason += f"\n  at {shown_line(place[1], int(place[2]), None)}\n  make it a constant"
        return ExportError(f"cannot be exported at opset {opset}: {reason}\n  {LATER}")
    name = message.split("'")[1] if "'" in message else ""
    where: dict[str, None] = {}
    with suppress(Exception):  # only the source line would be lost
        graph = torch.jit.trace(model, tuple(tensors), check_trace=False).inlined_graph  # nodes do not keep it alive
        frames = (user_frame(node.sourceRange()) for node in graph.findAllNodes(name, recurse=True))
        where = dict.fromkeys(filter(None, frames))
    at = "".join(f"\n  at {frame}" for frame in [*where][:5])
    needs = message.rsplit("added in version ", 1)
    advice = (
        f"export with opset={needs[1].split(',')[0]} or later"
        if len(needs) == 2
        else advice_on(name) or f"replace it by supported functions, or {LATER}"
    )
    return ExportError(f"operator {name or message} cannot be exported at opset {opset}{at}\n  {advice}")
