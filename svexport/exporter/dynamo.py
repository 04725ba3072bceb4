"""The exporter built on torch.export, with our translations in its table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import Tensor
from torch.backends import opt_einsum

from svexport.errors import ExportError
from svexport.exporter.assumed import assumptions
from svexport.exporter.batch_norms import join_batch_norms
from svexport.exporter.constants import NotTraced, texts_of_sizes
from svexport.exporter.context import other_functions, tracing, without_symbolics
from svexport.exporter.failures import chain, failure, line_of, reason_of
from svexport.exporter.memory import without_collections
from svexport.exporter.opsets import FIRST_DYNAMO_OPSET
from svexport.exporter.translations import translations
from svexport.exporter.way import Guards
from svexport.logging import quiet
from svexport.tracing.arguments import FlatModel
from svexport.tracing.sizes import tiled
from svexport.tracing.state import derivative_levels
from svexport.tracing.swapped import swapped

__all__ = ["batch_axes", "export"]

_LOGGERS = ("onnx_ir", "onnxscript", "torch")


def export(
    model: FlatModel,
    tensors: Sequence[Tensor],
    opset: int,
    input_names: Sequence[str],
    dynamic_axes: Mapping[str, Mapping[int, str]],
) -> tuple[onnx.ModelProto, Guards]:
    """Exports ``model(*tensors)`` at ``opset`` or the exporter's first opset, whichever is later. Returns the model and
    torch.export's guards. Raises :class:`ExportError` that names the operator and its source line."""
    shapes = tuple(dict(dynamic_axes.get(name, {})) for name in input_names)  # one name is one size, as in ONNX
    options = {
        "dynamo": True,
        "opset_version": max(opset, FIRST_DYNAMO_OPSET),
        "input_names": list(input_names),
        "dynamic_shapes": {"tensors": shapes} if dynamic_axes else None,
        "custom_translation_table": translations(opset),
        "optimize": False,
        "verbose": False,
    }
    with quiet(*_LOGGERS):
        try:
            with (
                tracing(model, tensors, dynamic=bool(dynamic_axes)),
                without_symbolics(opset),
                texts_of_sizes() as texts,
            ):
                program = _exported(model, tensors, options)
                _cast_back(program, model.output_dtypes)
                join_batch_norms(program.model)
                program.optimize()
        except (torch.onnx.OnnxExporterError, ir.passes.PassError) as error:
            if opset < FIRST_DYNAMO_OPSET:  # TorchScript is tried next
                reason, _ = reason_of(error, input_names)
                raise ExportError(reason + (f", at {where}" if (where := line_of(error)) else "")) from error
            raise failure(model, tensors, opset, input_names, error) from error
    return program.model_proto, Guards(values=True, sizes=not texts, assumed=assumptions(program.exported_program))


def batch_axes(model: FlatModel, tensors: Sequence[Tensor]) -> list[Any]:
    """The first size of each input, as ``torch.export`` infers it when all first sizes may be dynamic.

    Returns:
        A ``torch.export.Dim``, or a formula of one, for each size that may vary; equal sizes share one. None for
        inputs whose first size is static.

    Raises:
        ExportError: if torch.export does not take the model.
    """
    given = _of_more_than_one(model, tensors)
    shapes = {"tensors": tuple({0: torch.export.Dim.AUTO} if t.dim() else None for t in given)}
    with quiet(*_LOGGERS):
        try:
            # opt_einsum would turn dynamic sizes into constants.
            with opt_einsum.flags(enabled=False), without_collections(), tracing(model, given, dynamic=True):
                program = torch.export.export(model, tuple(given), dynamic_shapes=shapes, strict=False)
        except Exception as error:
            raise failure(model, tensors, None, model.input_names, error) from error
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    sizes = [values[name].shape[:1] for name in program.graph_signature.user_inputs]
    roots: dict[Any, Any] = {}
    found: list[Any] = []
    for size, name in zip(sizes, model.input_names, strict=True):
        formula: Any = size[0].node.expr if size and isinstance(size[0], torch.SymInt) else None
        symbols = getattr(formula, "free_symbols", ())
        symbol: Any = next(iter(symbols)) if len(symbols) == 1 else None
        factor, offset = (0, 0) if symbol is None else (int(formula.coeff(symbol)), int(formula.subs(symbol, 0)))
        if factor < 1 or formula - factor * symbol - offset != 0:
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
    """The inputs with first sizes above 1, because torch.export specializes 0 and 1. The first sizes of all inputs are
    doubled, or if the model refuses that, only of those with two or more dimensions."""
    for least in (1, 2) if any(t.dim() and t.shape[0] < 2 for t in tensors) else ():
        larger = [tiled(t, (t.shape[0] * 2 or 2, *t.shape[1:])) if t.dim() >= least else t for t in tensors]
        with suppress(Exception):  # the user's code may raise anything
            model(*(t.clone() for t in larger))
            return larger
    return [t.clone() for t in tensors]


def _exported(model: FlatModel, tensors: Sequence[Tensor], options: dict[str, Any]) -> Any:
    """The exporter's program. If the first capture strategy refuses the model, others are tried.

    No other is tried if a value is missing: no strategy has it, and dynamo would search for it at length.
    """
    from torch.onnx._internal.exporter import _capture_strategies

    first, strict = _capture_strategies.CAPTURE_STRATEGIES[:2]
    errors: list[torch.onnx.OnnxExporterError] = []
    shapes = options["dynamic_shapes"]
    for way in (first, _of_given_sizes(first, shapes["tensors"]), strict) if shapes else (first, strict):
        try:
            with derivative_levels(), ExitStack() as stack:
                stack.enter_context(swapped(_capture_strategies, CAPTURE_STRATEGIES=(way,)))
                for mode in other_functions(bool(shapes)) if way is strict else ():
                    stack.enter_context(mode)  # dynamo does not carry modes into forward
                return torch.onnx.export(model, tuple(tensors), **options)
        except torch.onnx.OnnxExporterError as error:
            errors.append(error)
            if any(isinstance(one, NotTraced) or "data-dependent" in str(one) for one in chain(error)):
                break
    raise errors[0]


def _of_given_sizes(way: Any, shapes: Sequence[Mapping[int, str]]) -> Any:
    """The exporter's non-strict strategy, but with plain ``torch.export``, which uses the given sizes as hints.

    The exporter's own lets every dynamic size be 1, and treats sizes of one name as different: it does not see that
    the last size of ``depth.view(x.shape[0], 1, depth.shape[1], -1)`` is 1 and is broadcast. With hints, sizes of
    different names may be merged, for example after ``if h == w``; such a program is refused.
    """

    class OfGivenSizes(way):  # type: ignore[misc]
        def _capture(self, model: Any, args: Any, kwargs: Any, dynamic_shapes: Any) -> Any:
            program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
            values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
            names: dict[str, str] = {}
            for value, axes in zip(program.graph_signature.user_inputs, shapes, strict=True):
                for axis, name in axes.items():
                    if names.setdefault(str(values[value].shape[axis]), name) != name:
                        raise ExportError(f"forward needs {name} to equal another size")
            return program

    return OfGivenSizes


def _cast_back(program: torch.onnx.ONNXProgram, dtypes: Sequence[torch.dtype]) -> None:
    """Casts outputs back to their dtypes: the exporter reduces half types in float32, and omits the cast after the last
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
