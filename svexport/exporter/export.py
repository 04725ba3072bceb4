"""``svexport.export``: a torch model in, a proven ONNX file out."""

from __future__ import annotations

import inspect
import os
import sys
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import torch
from torch import nn
from torch.backends import opt_einsum

from svexport.errors import BackendNotAvailableError, ExportError
from svexport.exporter.beside import FileBeside
from svexport.exporter.coordinates import half_model
from svexport.exporter.dynamic import allowed_batches, check_axes_names, traceable
from svexport.exporter.dynamic import dynamic_axes as axes_of
from svexport.exporter.finish import Finished, Signature, Wanted, description, finish
from svexport.exporter.fp8 import refuse_fp8
from svexport.exporter.memory import without_collections
from svexport.exporter.opsets import FIRST_WITH_BOTH, OPSETS
from svexport.exporter.precision import plan_for
from svexport.exporter.report import ExportReport, Faults
from svexport.exporter.rounding import Tolerances
from svexport.exporter.trace import second_tracer, traced
from svexport.exporter.typed import Plan
from svexport.exporter.verify import Verification
from svexport.exporter.verify import verify as verify_file
from svexport.exporter.way import Guards
from svexport.graph.bodies import node_types
from svexport.graph.saving import beside, check_place, describe, move, strip_file
from svexport.logging import logger
from svexport.parity import Parity, check_tolerances
from svexport.progress import phase
from svexport.tensorrt.check import check
from svexport.tensorrt.check.report import CheckReport
from svexport.tensorrt.support.target import Target
from svexport.tracing.arguments import (
    FlatModel,
    Types,
    bind,
    eval_mode,
    given_arguments,
    in_type,
    leaves,
    unique,
    unwrapped,
)
from svexport.tracing.quantizers import frozen
from svexport.tracing.sizes import Size
from svexport.tracing.source import is_library, is_own, shown_path
from svexport.tracing.state import State, unchanged

__all__ = ["export"]

FIRST_BFLOAT16_OPSET = 13

HALF = (torch.float16, torch.bfloat16)

WEIGHTS = ("inputs", "attributes")

_lock = threading.RLock()  # the exporters' registries are global

_MANY = 2**20
"""Elements of inputs and parameters from which on torch runs while the file is written. With fewer, both are mostly
Python, and threads that take turns make them slower."""


@second_tracer
def export(
    model: nn.Module,
    args: Any = None,
    path: str | os.PathLike[str] | None = None,
    *,
    opset: int = 11,
    plugins: bool | Collection[str] = True,
    target: str | None = None,
    dtype: torch.dtype | None = None,
    dynamic_shapes: Mapping[str, Any] | Sequence[Any] | str | None = None,
    dynamic_axes: Mapping[str, Any] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    simplify: bool = False,
    weights: str = "inputs",
    verify: bool | str = True,
    rtol: float | None = None,
    atol: float | None = None,
    freeze: Collection[str] = (),
    keep: Collection[str] | str | None = None,
) -> ExportReport:
    """Exports a torch model to ONNX and proves the file against torch in ONNX Runtime.

    The model needs no edits: ``torch.einsum``, ``F.grid_sample`` and the like become svexport nodes, up to opset 17
    inside scripted submodules too. ``torch.export`` traces it; below opset 18 the file is converted, exactly, and what
    ``torch.export`` refuses TorchScript traces, which a note of the report says. It is exported in eval mode and is
    left as it was, with its parameters, as are the states of random numbers and the default type.

    Args:
        model: any ``nn.Module``; up to opset 17 it may be scripted or have scripted submodules.
        args: what ``forward`` is called with: a tuple, a dict by parameter name, or a single argument; tensors may be
            nested in lists, tuples, dicts, dataclasses and the attributes of other objects (a key-value cache, say);
            everything else becomes a constant of the file. Default: ``model.example_inputs``,
            ``model.example_input_array``, or the last forward seen by ``svexport.record(model)``.
        path: of the file to write; default: the class name, ``./Model.onnx``. Weights of models above 2 GiB go beside
            it (``<name>.onnx.data``).
        opset: 9 to 23; the file has exactly that one.
        plugins: True keeps the svexport nodes that TensorRT has a plugin for, each with its body attached as a local
            function, and lowers the others (einsum, say) to standard ONNX; False lowers all of them; a list of op names
            keeps those. The bodies are for ONNX Runtime alone: TensorRT runs the plugins (:mod:`svexport.tensorrt`), or
            refuses the file by name.
        target: a TensorRT version (``"8.6"``) the file is for. Its parser takes every op as ONNX means it; files for
            versions below 10.7, which look at bodies first, carry none, and nodes without a plugin are lowered whatever
            ``plugins`` says. The file is verified all the same, before its bodies are taken off, and held to what that
            version parses: ``report.check``, see :func:`svexport.check`.
        dtype: ``torch.float16`` (or bfloat16) exports a strongly typed model of that type; inputs keep theirs. Behind
            products float32 stay what coordinates of samplers are computed from, layer norms with the sums before them,
            inverses, and what is computed from parameters alone: ``report.kept``.
        dynamic_shapes: by parameter name (nested like the argument) or input name, ``{"x": {0: "batch"}}``, or a tuple
            in the order of the arguments. Axes of one name have one size. ``"auto"``: the first axis of every input of
            which ``torch.export`` finds that the model allows it; a note of the report says which.
        dynamic_axes: the same, as ``torch.onnx.export`` spells it: ``{"x": {0: "batch"}}`` or ``{"x": [0]}``.
        input_names: default: the parameter names of ``forward`` (``features_0`` for nested ones).
        output_names: default: dict keys and positions of the result (``boxes``, ``output_0``; a single one is
            ``output``).
        simplify: fold constants, share equal nodes, take out those that change nothing, make one space to depth of
            strided slices and remove the Transposes that cancel; a note of the report says what that left.
        weights: ``"inputs"`` or ``"attributes"``: how those of svexport nodes that have many (the transformer decoder)
            travel. A TensorRT plugin is created with its attributes, but given its inputs in every inference.
        verify: run the file in ONNX Runtime, and compare, on ``args``, on random inputs of both signs and several
            scales, on zeros, with other integers and masks, and with dynamic sizes larger, smaller and much larger, and
            on both sides of what ``forward`` compares them with (or the export is refused), and with sizes of 0 (where
            the model takes that and the file does not, report and ``doc_string`` say ``sizes from 1``);
            ``report.skipped`` has the runs that the model itself does not take. Up to opset 17, lines of ``forward``
            that take values of inputs out of tensors (``if x.sum() > 0``), or how many a mask finds, are refused unless
            nothing follows from these values but what has been compared. ``"quick"``: on ``args`` alone, and not called
            verified.
            ``"thorough"`` plants single faults in the file, says how many of them these inputs notice, and searches for
            inputs that notice the others: ``report.faults``. It holds the file to five times torch's own rounding, and
            takes minutes where the file has hundreds of nodes.
            ``F.grid_sample`` of a half model is compared as torch computes it on CUDA, with coordinates in float32, and
            ``topk(sorted=False)``, which torch leaves in any order, in that of files: sorted.
            Elements may be steps of a quantizer apart where torch takes them for the other step, too, once what it
            quantizes changes by some rounding errors, which is noted.
        rtol: relative tolerance of verification; default: 1e-3, of half models what their type can resolve, of whole
            numbers 0.
        atol: absolute tolerance of verification; default: 1e-4, of half models what their type can resolve, times the
            largest number of the output where that is below 1; more, up to that, where torch's own rounding is. Where
            both are the default, nor half types or quantizers take part, ten times torch's own rounding, of what
            differs by more than 2**-17 of that number.
        freeze: names of inputs that become constants of the file, with the values in ``args``; the report's notes and
            the file's ``doc_string`` say so.
        keep: with a half ``dtype``, what stays float32 in place of that: names of modules, or patterns of them
            (``"head.*"``), with all that they call, none for ``[]``; or ``"auto"``: the same, other norms, and of all
            other calls those that overflow on ``args`` or lose more than 40 dB there, or that it takes for results
            which lose no more. ``report.kept`` names each with its line and the reason. Inputs then are rounded where
            they are used, and results come in the type they are computed in. The file is verified against the model
            that computes so.

    Returns:
        An :class:`ExportReport`.

    Raises:
        ExportError: what cannot be exported, with the operator and the source line where they are known; lines that
            take values of inputs.
        VerificationError: the file differs from torch. No file is written, an older one of that name stays as it was.
    """
    started = time.perf_counter()
    _check_options(model, opset, dtype, simplify, weights, freeze, keep, plugins)
    check_tolerances(rtol, atol)
    kind, platform = _kind(verify), _platform(target, opset)
    arguments, model = given_arguments(model, args), unwrapped(model)
    path = Path(f"{type(model).__name__}.onnx" if path is None else path)
    check_place(path)
    early_notes = [*refuse_fp8(model, opset, platform), *_left_in_training(model)]
    exported, plan = _in_precision(model, arguments, dtype, keep)
    with _lock, eval_mode(exported), frozen(exported), unchanged(exported) as state, torch.no_grad():
        bound = bind(exported, *arguments)
        flat = FlatModel(exported, bound, freeze, plan.forward if plan else Types(dtype))
        _check_tensors(flat, bound, dtype, opset)
        held_to = Tolerances.of(rtol, atol, {dtype} if dtype else flat.dtypes)
        names = _names("input_names", input_names, flat.input_names)
        frozen_notes = [f"{name} is a constant of the file (freeze): {text}" for name, text in flat.frozen.items()]
        notes: list[str] = [*frozen_notes, *early_notes, *([plan.note] if plan and plan.note else [])]
        if isinstance(dynamic_shapes, str):
            dynamic_shapes = allowed_batches(flat, names, dynamic_shapes, notes)
        axes, sizes = axes_of(flat, names, dynamic_shapes, dynamic_axes)
        with beside(path) as folder:
            file = folder / path.name
            with without_collections():
                trace = _trace(flat, file, opset, names, (axes, sizes), notes, state)
                was_traced = time.perf_counter()
                phase("writing nodes and bodies")
                signature = _signature(flat, names, output_names, dynamic_axes, (axes, sizes))
                wanted = Wanted(opset, plugins, platform, simplify, weights)
                write = partial(_finish, trace.written, file, wanted, signature)
                running = FileBeside(file, write, kind not in ("none", "quick"), list(signature.inputs.values()))
            proof = _prove(flat, running, signature, held_to, trace, state, kind)
            done, finished = running.written
            del running, write, trace  # or a frame that torch.export keeps has them until garbage is collected
            notes += [*done.notes, *proof.notes]
            if platform is not None and not platform.bodies:
                done.facts["ir_version"] = strip_file(file)
            verified = time.perf_counter()
            size = sum(f.stat().st_size for f in folder.iterdir())
            move(folder, path)
    seconds = {"trace": was_traced - started, "bodies": finished - was_traced, "verify": verified - finished}
    logger.info("exported {} to {}", type(model).__name__, path)
    return ExportReport(
        path=path,
        model=type(model).__name__,
        target=None if platform is None else str(platform),
        bytes=size,
        check=None if platform is None else _check(path, platform, notes),
        parity=proof.results,
        rtol=held_to.most[0],
        atol=held_to.most[1],
        seconds=seconds if kind != "none" else {k: v for k, v in seconds.items() if k != "verify"},
        svexport_nodes=done.svexport_nodes,
        notes=notes,
        skipped=proof.skipped,
        verify=kind,
        faults=proof.faults,
        kept=plan.kept() if plan else [],
        **done.facts,
    )


def _signature(
    flat: FlatModel,
    names: Sequence[str],
    output_names: Sequence[str] | None,
    dynamic_axes: Mapping[str, Any] | None,
    dynamic: tuple[dict[str, dict[int, str]], dict[str, Size]],
) -> Signature:
    """Of a model that was traced: ``flat`` knows the names of its outputs."""
    axes, sizes = dynamic
    result_names = _names("output_names", output_names, flat.output_names, taken=names)
    check_axes_names(dynamic_axes, flat, names, result_names)
    inputs = {name: t.detach() for name, t in zip(names, flat.tensors, strict=True)}
    return Signature(inputs, axes, sizes, result_names, flat.output_keys, flat.frozen)


def _left_in_training(model: nn.Module) -> list[str]:
    """Layers that a model in eval mode holds in training mode, and compute something else there; of one in training
    mode, modules whose ``train`` may change more than is changed for an export."""
    norms, dropouts = nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd
    trained = [(name or "the model", m) for name, m in model.named_modules() if m.training]
    own = [at for at in trained if type(at[1]).train is not nn.Module.train]
    kept = [at for at in trained if isinstance(at[1], norms) and at[1].track_running_stats]
    kept += [at for at in trained if isinstance(at[1], dropouts) and at[1].p]

    def listed(found: list[tuple[str, nn.Module]]) -> str:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return ", ".join(f"{name} ({type(m).__name__})" for name, m in found[:3]) + more

    notes = []
    if kept and not model.training:
        notes.append(f"exported in eval mode, including {listed(kept)}, which the model keeps in training mode")
    if own:
        notes.append(
            f"exported in eval mode without a call of the train() that {listed(own)} overrides: "
            "call model.eval() before, if it changes more than training"
        )
    return notes


def _in_precision(
    model: nn.Module, arguments: Any, dtype: torch.dtype | None, keep: Collection[str] | str | None
) -> tuple[nn.Module, Plan | None]:
    """The model that is exported, and what of a half one stays float32."""
    if dtype is None:
        return model, None
    if keep is not None:
        return plan_for(model, arguments, dtype, keep)
    return half_model(model, arguments, dtype) if dtype in HALF else (in_type(model, dtype), None)


class _Trace(NamedTuple):
    """What a tracer made of a model: its graph, the guards on values of inputs, and the warnings it gave."""

    written: onnx.ModelProto
    guarded: Guards
    warned: list[str]


def _trace(
    flat: FlatModel,
    file: Path,
    opset: int,
    names: list[str],
    dynamic: tuple[dict[str, dict[int, str]], dict[str, Size]],
    notes: list[str],
    state: State,
) -> _Trace:
    """Traces the model, with warnings added to ``notes``; ``flat`` knows the names of its outputs afterwards."""
    axes, sizes = dynamic
    tensors = [t.detach() for t in flat.tensors]
    phase("tracing")
    # Without opt_einsum, which makes numbers of dynamic sizes: the order of products is decided by ours.
    with _collected_warnings(notes), opt_einsum.flags(enabled=False), _installed(opset):
        given = traceable(tensors, names, axes, sizes)
        written, guarded = traced(flat, given, file, opset, names, axes, notes, state)
        before = len(notes)
    state.restore()  # what was kept while it was traced are no numbers
    warned = notes[before:]
    if not flat.output_names:
        flat(*(t.clone() for t in tensors))  # only the copy that torch.export's fallback traces knows the names
    return _Trace(written, guarded, warned)


@dataclass
class _Proof:
    """What running a file beside torch said; nothing where it was not run."""

    results: list[Parity] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    faults: Faults | None = None


def _finish(model: onnx.ModelProto, file: Path, wanted: Wanted, signature: Signature) -> tuple[Finished, float]:
    """With the time when it was over."""
    return finish(model, file, wanted, signature), time.perf_counter()


def _prove(
    flat: FlatModel,
    file: FileBeside[tuple[Finished, float]],
    signature: Signature,
    held_to: Tolerances,
    trace: _Trace,
    state: State,
    kind: str,
) -> _Proof:
    if kind == "none":
        return _Proof()
    try:
        if sum(tensor.numel() for tensor in (*flat.tensors, *flat.parameters())) < _MANY:
            file.written  # noqa: B018 - waits
        verification = verify_file(
            flat,
            file,
            signature,
            held_to=held_to,
            warned=trace.warned,
            state=state,
            guarded=trace.guarded,
            kind=kind,
        )
    finally:
        file.end()  # before its folder goes, whatever failed
    faults = _planted(verification, file.path, file.written[0].lines) if kind == "thorough" else None
    if verification.from_one:
        describe(file.path, description(signature, verification.from_one))
    return _Proof(verification.results, verification.skipped, verification.notes, faults)


def _check_options(
    model: Any,
    opset: Any,
    dtype: torch.dtype | None,
    simplify: Any,
    weights: str,
    freeze: Collection[str],
    keep: Collection[str] | str | None,
    plugins: bool | Collection[str],
) -> None:
    if not isinstance(model, nn.Module):
        raise ExportError(f"expected a torch.nn.Module, got {type(model).__name__}; wrap functions in a module")
    if not isinstance(opset, int) or opset not in OPSETS:
        raise ExportError(
            f"opset must be an integer from {OPSETS.start} to {OPSETS[-1]}, got {opset!r}"
            + ("" if OPSETS[-1] == 23 else f"; this is torch {torch.__version__}, 21 to 23 need {FIRST_WITH_BOTH}")
        )
    if dtype not in (None, torch.float32, torch.float16, torch.bfloat16, torch.float64):
        raise ExportError(f"dtype must be a floating-point torch.dtype or None, got {dtype!r}")
    if not isinstance(simplify, bool):
        raise ExportError(f"simplify must be True or False, got {simplify!r}")
    if isinstance(freeze, str):
        raise ExportError(f"freeze expects a list of input names, got {freeze!r}; give freeze=[{freeze!r}]")
    if weights not in WEIGHTS:
        raise ExportError(f"weights must be {' or '.join(map(repr, WEIGHTS))}, got {weights!r}")
    _check_keep(keep, dtype)
    node_types(plugins if not isinstance(plugins, bool) else None)


def _check_keep(keep: Collection[str] | str | None, dtype: torch.dtype | None) -> None:
    if keep is None:
        return
    if dtype not in HALF:
        raise ExportError(
            f"keep says what stays float32 in a half model, got dtype={dtype}; give dtype=torch.float16 "
            "(--dtype float16)"
        )
    if isinstance(keep, str) and keep != "auto":
        raise ExportError(f"keep expects 'auto' or a list of names of modules, got {keep!r}; give keep=[{keep!r}]")


def _platform(target: str | None, opset: int) -> Target | None:
    platform = None if target is None else Target.parse(target)
    if platform is not None and not platform.opsets[0] <= opset <= platform.opsets[1]:
        raise ExportError(
            f"{platform} parses opset {platform.opsets[0]} to {platform.opsets[1]}, got opset={opset}; "
            f"use opset={min(opset, platform.opsets[1])}"
        )
    return platform


def _kind(verify: bool | str) -> str:
    """``"default"``, ``"quick"``, ``"thorough"`` or ``"none"``."""
    kinds = {True: "default", "default": "default", "quick": "quick", "thorough": "thorough", False: "none"}
    if not isinstance(verify, (bool, str)) or verify not in kinds:
        raise ExportError(f"verify={verify!r} is unknown; give True (or 'default'), 'quick', 'thorough' or False")
    return kinds[verify]


def _check(path: Path, platform: Target, notes: list[str]) -> CheckReport:
    phase(f"checking for {platform}")
    checked = check(path, platform)
    if found := [*checked.errors, *checked.warnings]:
        what = ", ".join(dict.fromkeys(finding.op or finding.rule for finding in found))
        notes.append(f"{platform}: {checked.verdict} ({what}); print(report.check) lists them")
    return checked


def _planted(verification: Verification, file: Path, lines: Mapping[str, str]) -> Faults:
    from svexport.exporter.thorough import thorough
    from svexport.graph.bodies import lower

    return thorough(verification, lower(file), lines)


def _check_tensors(flat: FlatModel, bound: inspect.BoundArguments, dtype: torch.dtype | None, opset: int) -> None:
    if not flat.tensors:
        kinds = sorted({type(leaf).__name__ for _, leaf in leaves(dict(bound.arguments))})
        raise ExportError(
            f"expected at least one tensor among the arguments, got {', '.join(kinds) or 'none'}"
            f"{'; torch.from_numpy makes tensors of arrays' if 'ndarray' in kinds else ''}"
        )
    for name, tensor in zip(flat.input_names, flat.tensors, strict=True):
        if tensor.is_complex():
            raise ExportError(
                f"{name} is a {str(tensor.dtype).removeprefix('torch.')} tensor, which ONNX does not compute with; "
                "pass torch.view_as_real of it, and call torch.view_as_complex in forward"
            )
    if opset < FIRST_BFLOAT16_OPSET and torch.bfloat16 in {
        dtype,
        *(t.dtype for t in (*flat.tensors, *flat.parameters())),
    }:
        raise ExportError(f"bfloat16 needs opset {FIRST_BFLOAT16_OPSET} or later, got opset={opset}")
    _check_devices(flat)


def _check_devices(flat: FlatModel) -> None:
    held = {str(t.device) for t in (*flat.parameters(), *flat.buffers())}
    given = {str(t.device) for t in flat.tensors}
    if len(held) == 1 and held != given:
        raise ExportError(
            f"the model is on {', '.join(held)}, its inputs on {', '.join(sorted(given))}; move one to the other, "
            f"model.cpu() for instance"
        )


def _names(option: str, given: Sequence[str] | None, derived: list[str], taken: Sequence[str] = ()) -> list[str]:
    if given is None:
        return unique(derived, taken)
    if len(given) != len(derived) or len({*given, *taken}) != len(given) + len(taken) or not all(given):
        raise ExportError(
            f"{option} expects {len(derived)} different names ({', '.join(derived)} are the default)"
            f"{' that no input has' if taken else ''}, got {list(given)!r}"
        )
    return list(given)


@contextmanager
def _installed(opset: int) -> Iterator[None]:
    """Says of packages that torch's exporters import late how to get them."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("onnx", "onnx_ir", "onnxscript"):
            raise
        raise BackendNotAvailableError(
            f"exporting at opset {opset} needs {error.name}, which is not installed here: pip install {error.name}"
        ) from error


@contextmanager
def _collected_warnings(notes: list[str]) -> Iterator[None]:
    """The tracers' warnings about the model become notes of the report; those about themselves are dropped."""
    found: dict[str, None] = {}

    def noted(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
        frame = sys._getframe(2)  # that warns, behind the one of warnings.py
        while is_own(filename) and frame.f_back:  # a mode of ours that calls the function
            frame = frame.f_back
            filename, lineno = frame.f_code.co_filename, frame.f_lineno
        if issubclass(category, torch.jit.TracerWarning) and not is_library(filename):
            first = str(message).split(". ")[0].split("\n")[0]
            found[f"{shown_path(filename)}:{lineno}: {first}"] = None

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = noted  # type: ignore[assignment]
        yield
    notes += [note for note in found if note not in notes]
