"""Traces a model to ONNX: first with torch.export and the down-converter, then with TorchScript if that fails."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor

from svexport.errors import ExportError, SvexportError
from svexport.exporter import torchscript
from svexport.exporter.assumed import Assumption
from svexport.exporter.opsets import FIRST_DYNAMO_OPSET, LAST_TORCHSCRIPT_OPSET, LATER
from svexport.exporter.report import ExportReport
from svexport.exporter.rounded import refuse_rounded
from svexport.exporter.way import Guards
from svexport.graph.walk import opset_of
from svexport.logging import logger
from svexport.tracing.arguments import FlatModel
from svexport.tracing.state import State

__all__ = ["second_tracer", "torch_export_first", "traced"]

_first = LAST_TORCHSCRIPT_OPSET < FIRST_DYNAMO_OPSET


@contextmanager
def torch_export_first(first: bool = True) -> Iterator[None]:
    """Makes torch.export the first tracer at every opset, or, if ``first`` is False, at opset 18 and later only."""
    global _first
    before, _first = _first, first
    try:
        yield
    finally:
        _first = before


def second_tracer(export: Callable[..., ExportReport]) -> Callable[..., ExportReport]:
    """Wraps ``export``: retries with TorchScript if the file that torch.export led to is wrong; the report says so."""

    @functools.wraps(export)
    def tried(*args: Any, **kwargs: Any) -> ExportReport:
        token = _converted.set([])
        try:
            return export(*args, **kwargs)
        except SvexportError as error:
            if not _converted.get():
                raise
            reason = str(error).split("\n")[0]
            logger.warning("TorchScript traces the model, because the file by torch.export is not right: {}", reason)
            with torch_export_first(False):
                try:
                    report = export(*args, **kwargs)
                except SvexportError:
                    raise error from None
        finally:
            _converted.reset(token)
        report.notes.append(f"traced by TorchScript, because the file by torch.export is not right: {reason}")
        return report

    return tried


_converted: ContextVar[list[Sequence[Assumption]]] = ContextVar("converted", default=[])  # noqa: B039 - set anew
"""The assumptions about sizes of each torch.export in this call; TorchScript may break the same ones."""


def traced(
    model: FlatModel,
    tensors: Sequence[Tensor],
    path: Path,
    opset: int,
    input_names: Sequence[str],
    dynamic_axes: Mapping[str, Mapping[int, str]],
    notes: list[str],
    state: State,
) -> tuple[onnx.ModelProto, Guards]:
    """Traces ``model(*tensors)``; returns the ONNX model, and what the tracer guards.

    The tensors are not modified, even if the model works on its inputs in place. The model's state is restored to
    ``state`` between the two tracers.

    Raises:
        ExportError: if neither tracer takes the model; it names the operator and its source line.
    """
    if opset > LAST_TORCHSCRIPT_OPSET:
        return _by_torch_export(model, _unshared(tensors), opset, input_names, dynamic_axes)
    reason, refusal = _refused(model) if _first else "it goes second", ""
    if not reason:
        try:
            written = _by_torch_export(model, _unshared(tensors), opset, input_names, dynamic_axes)
            _converted.get().append(written[1].assumed)
            return written
        except Exception as error:  # noqa: BLE001 - whatever a library raises, the other tracer may take the model
            refusal = str(error).strip() or type(error).__name__
            reason = refusal.splitlines()[0]
            state.restore()
            logger.info("TorchScript traces the model, because torch.export refuses it: {}", reason)
    try:
        given = [tensor.clone() for tensor in tensors]
        written = torchscript.export(model, given, path, opset, input_names, dynamic_axes)
        _lower(written, opset)
    except ExportError as error:
        raise _of_neither(error, refusal, opset) if refusal else error from error
    if dynamic_axes:
        refuse_rounded(written)
    if _first:
        notes.append(f"traced by TorchScript, because torch.export refuses the model: {reason}")
    return written, Guards(values=False, sizes=False, assumed=[one for each in _converted.get() for one in each])


def _unshared(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Inputs for torch.export, which computes with none of their values. Only tensors that are not contiguous, or that
    share memory with another, are copied."""
    seen: set[int] = set()
    given = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        plain = type(tensor) is Tensor and tensor.is_contiguous() and storage.nbytes() == tensor.nbytes
        given.append(tensor if plain and storage.data_ptr() not in seen else tensor.clone())
        seen.add(storage.data_ptr())
    return given


def _by_torch_export(
    model: FlatModel, tensors: Sequence[Tensor], opset: int, *names: Any
) -> tuple[onnx.ModelProto, Guards]:
    from svexport.exporter import dynamo  # on first use: the import takes as long as a trace by TorchScript

    written, guards = dynamo.export(model, tensors, opset, *names)
    _lower(written, opset)
    return written, guards


def _lower(model: onnx.ModelProto, opset: int) -> None:
    """Converts the model to ``opset`` if the tracer could only write a later one."""
    if opset_of(model) > opset:
        from svexport.graph.opsets import convert_in_place

        convert_in_place(model, opset)


def _of_neither(error: ExportError, refusal: str, opset: int) -> ExportError:
    """The error when both tracers refuse a model, without the advice to use a later opset. The message that names a
    function, or says more, comes first."""
    begin = f"cannot be exported at opset {opset}: "
    text = str(error).replace(f", or {LATER}", "").replace(f"\n  {LATER}", "")
    if "cannot be exported" not in text:  # for example an error that forward itself raises
        return error
    if text.startswith(begin):
        return ExportError(f"{begin}{refusal}\n  nor does TorchScript take the model: {text.removeprefix(begin)}")
    return ExportError(f"{text}\n  nor does torch.export take the model: {refusal}")


def _refused(model: FlatModel) -> str:
    """The reason to skip torch.export; empty if it may take the model."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return "it has scripted modules"
    return ""
