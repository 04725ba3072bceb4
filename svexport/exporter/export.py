"""``svexport.export``: a torch model in, a proven ONNX file out."""

from __future__ import annotations

import errno
import inspect
import os
import re
import shutil
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.backends import opt_einsum

from svexport._version import __version__
from svexport.errors import BackendNotAvailableError, ExportError
from svexport.exporter import dynamo
from svexport.exporter.arguments import FlatModel, bind, eval_mode, given_arguments, in_type, leaves, unique, unwrapped
from svexport.exporter.clean import clean, keep_inputs, name_sizes
from svexport.exporter.opsets import FIRST_WITH_BOTH, OPSETS
from svexport.exporter.quantizers import frozen
from svexport.exporter.report import ExportReport, Faults, NodeSource
from svexport.exporter.rounding import Tolerances
from svexport.exporter.sizes import Size, tiled
from svexport.exporter.source import is_library
from svexport.exporter.state import unchanged
from svexport.exporter.trace import second_tracer, traced
from svexport.exporter.verify import Verification
from svexport.exporter.verify import verify as verify_file
from svexport.graph.check import check
from svexport.logging import logger
from svexport.parity import Parity, check_tolerances
from svexport.progress import phase
from svexport.tensorrt.support.target import Target

if TYPE_CHECKING:
    import onnx

__all__ = ["export"]

FIRST_BFLOAT16_OPSET = 13

WEIGHTS = ("inputs", "attributes")

MAX_PROTOBUF_BYTES = 2**31 - 2**20
"""Larger models keep their weights in a file beside the ``.onnx``: protobuf ends at 2 GiB."""

_NO_PLACE = {errno.EDQUOT, errno.EFBIG, errno.ENOSPC, errno.EROFS}
"""Errors of writing: a quota, a limit of file sizes, a full disk, one that is read only."""

_lock = threading.RLock()  # the exporters' registries are global


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
        dtype: ``torch.float16`` (or bfloat16) exports a strongly typed model of that type; inputs keep theirs.
        dynamic_shapes: by parameter name (nested like the argument) or input name, ``{"x": {0: "batch"}}``, or a tuple
            in the order of the arguments. Axes of one name have one size. ``"auto"``: the first axis of every input of
            which ``torch.export`` finds that the model allows it; a note of the report says which.
        dynamic_axes: the same, as ``torch.onnx.export`` spells it: ``{"x": {0: "batch"}}`` or ``{"x": [0]}``.
        input_names: default: the parameter names of ``forward`` (``features_0`` for nested ones).
        output_names: default: dict keys and positions of the result (``boxes``, ``output_0``; a single one is
            ``output``).
        simplify: fold constants, share equal nodes, make one space to depth of strided slices and remove the Transposes
            that cancel; a note of the report says what that left.
        weights: ``"inputs"`` or ``"attributes"``: how those of svexport nodes that have many (the transformer decoder)
            travel. A TensorRT plugin is created with its attributes, but given its inputs in every inference.
        verify: run the file in ONNX Runtime, and compare, on ``args``, on random inputs of both signs and several
            scales, on zeros, with other integers and masks, and with dynamic sizes larger, smaller and much larger, and
            on both sides of what ``forward`` compares them with (or the export is refused);
            ``report.skipped`` has the runs that the model itself does not take. Up to opset 17, lines of ``forward``
            that take values of inputs out of tensors (``if x.sum() > 0``), or how many a mask finds, are refused unless
            nothing follows from these values but what has been compared. ``"quick"``: on ``args`` alone, and not called
            verified.
            ``"thorough"`` plants single faults in the file, says how many of them these inputs notice, and searches for
            inputs that notice the others: ``report.faults``.
            ``F.grid_sample`` of a half model is compared as torch computes it on CUDA, with coordinates in float32, and
            ``topk(sorted=False)``, which torch leaves in any order, in that of files: sorted.
            Elements may be steps of a quantizer apart where torch takes them for the other step, too, once what it
            quantizes changes by some rounding errors, which is noted.
        rtol: relative tolerance of verification; default: 1e-3, of half models what their type can resolve, of whole
            numbers 0.
        atol: absolute tolerance of verification; default: 1e-4, of half models what their type can resolve, times the
            largest number of the output where that is below 1; more, up to that, where torch's own rounding is.
        freeze: names of inputs that become constants of the file, with the values in ``args``; the report's notes and
            the file's ``doc_string`` say so.

    Returns:
        An :class:`ExportReport`.

    Raises:
        ExportError: what cannot be exported, with the operator and the source line where they are known; lines that
            take values of inputs.
        VerificationError: the file differs from torch. No file is written, an older one of that name stays as it was.
    """
    started = time.perf_counter()
    if not isinstance(model, nn.Module):
        raise ExportError(f"expected a torch.nn.Module, got {type(model).__name__}; wrap functions in a module")
    if not isinstance(opset, int) or opset not in OPSETS:
        raise ExportError(
            f"opset must be an integer from {OPSETS.start} to {OPSETS[-1]}, got {opset!r}"
            + ("" if OPSETS[-1] == 23 else f"; this is torch {torch.__version__}, 21 to 23 need {FIRST_WITH_BOTH}")
        )
    platform = None if target is None else Target.parse(target)
    if platform is not None and not platform.opsets[0] <= opset <= platform.opsets[1]:
        raise ExportError(
            f"{platform} parses opset {platform.opsets[0]} to {platform.opsets[1]}, got opset={opset}; "
            f"use opset={min(opset, platform.opsets[1])}"
        )
    if dtype not in (None, torch.float32, torch.float16, torch.bfloat16, torch.float64):
        raise ExportError(f"dtype must be a floating-point torch.dtype or None, got {dtype!r}")
    check_tolerances(rtol, atol)
    kind = _kind(verify)
    if isinstance(freeze, str):
        raise ExportError(f"freeze expects a list of input names, got {freeze!r}; give freeze=[{freeze!r}]")
    if weights not in WEIGHTS:
        raise ExportError(f"weights must be {' or '.join(map(repr, WEIGHTS))}, got {weights!r}")
    arguments, model = given_arguments(model, args), unwrapped(model)
    path = Path(f"{type(model).__name__}.onnx" if path is None else path)
    _check_place(path)
    exported = model if dtype is None else in_type(model, dtype)
    with _lock, eval_mode(exported), frozen(exported), unchanged(exported) as state, torch.no_grad():
        bound = bind(exported, *arguments)
        flat = FlatModel(exported, bound, dtype, freeze)
        _check_tensors(flat, bound, dtype, opset)
        _check_devices(flat)
        held_to = Tolerances.of(rtol, atol, {dtype} if dtype else flat.dtypes)
        names = _names("input_names", input_names, flat.input_names)
        notes: list[str] = [f"{name} is a constant of the file (freeze): {text}" for name, text in flat.frozen.items()]
        if isinstance(dynamic_shapes, str):
            dynamic_shapes = _allowed_batches(flat, names, dynamic_shapes, notes)
        axes, sizes = _dynamic_axes(flat, names, dynamic_shapes, dynamic_axes)
        with _beside(path) as folder:
            file = folder / path.name
            tensors = [t.detach() for t in flat.tensors]
            phase("tracing")
            # Without opt_einsum, which makes numbers of dynamic sizes: the order of products is decided by ours.
            with _collected_warnings(notes), opt_einsum.flags(enabled=False), _installed(opset):
                fresh = [t.clone() for t in tensors]  # a model may work on its inputs in place
                given = _traceable(fresh, names, axes, sizes)
                written, guarded = traced(flat, given, file, opset, names, axes, notes, state)
                before = len(notes)
            warned = notes[before:]
            if not flat.output_names:
                flat(*(t.clone() for t in tensors))  # only the copy that torch.export's fallback traces knows the names
            was_traced = time.perf_counter()
            phase("writing nodes and bodies")
            result_names = _names("output_names", output_names, flat.output_names, taken=names)
            _check_axes_names(dynamic_axes, flat, names, result_names)

            done = _finish(
                written,
                file,
                opset,
                plugins,
                platform,
                dict(zip(names, tensors)),
                axes,
                sizes,
                result_names,
                simplify,
                weights,
                notes,
                flat.frozen,
                flat.output_keys,
            )
            finished = time.perf_counter()
            results: list[Parity] = []
            skipped: list[str] = []
            faults: Faults | None = None
            if kind != "none":
                verification = verify_file(
                    flat,
                    file,
                    tensors,
                    names,
                    result_names,
                    dynamic_axes=axes,
                    sizes=sizes,
                    held_to=held_to,
                    warned=warned,
                    state=state,
                    guarded=guarded,
                    kind=kind,
                )
                if kind == "thorough":
                    faults = _planted(verification, file, done.lines)
                results, skipped = verification.results, verification.skipped
                notes += verification.notes
            if platform is not None and not platform.bodies:
                done.facts["ir_version"] = _strip_file(file)
            verified = time.perf_counter()
            size = sum(f.stat().st_size for f in folder.iterdir())
            _move(folder, path)
    if target is not None:
        phase(f"checking for {platform}")
    checked = None if target is None else check(path, target)
    if checked is not None and (found := [*checked.errors, *checked.warnings]):
        what = ", ".join(dict.fromkeys(finding.op or finding.rule for finding in found))
        notes.append(f"{platform}: {checked.verdict} ({what}); print(report.check) lists them")
    seconds = {"trace": was_traced - started, "bodies": finished - was_traced}
    if kind != "none":
        seconds["verify"] = verified - finished
    logger.info("exported {} to {}", type(model).__name__, path)
    return ExportReport(
        path=path,
        model=type(model).__name__,
        target=None if platform is None else str(platform),
        bytes=size,
        check=checked,
        parity=results,
        rtol=held_to.most[0],
        atol=held_to.most[1],
        seconds=seconds,
        svexport_nodes=done.svexport_nodes,
        notes=notes,
        skipped=skipped,
        verify=kind,
        faults=faults,
        **done.facts,
    )


def _kind(verify: bool | str) -> str:
    """``"default"``, ``"quick"``, ``"thorough"`` or ``"none"``."""
    kinds = {True: "default", "default": "default", "quick": "quick", "thorough": "thorough", False: "none"}
    if not isinstance(verify, (bool, str)) or verify not in kinds:
        raise ExportError(f"verify={verify!r} is unknown; give True (or 'default'), 'quick', 'thorough' or False")
    return kinds[verify]


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
                f"{name} is a {str(tensor.dtype).removeprefix('torch.')} tensor, with which ONNX does not compute; "
                "pass torch.view_as_real of it, and put it together in forward"
            )
    if opset < FIRST_BFLOAT16_OPSET and torch.bfloat16 in {
        dtype,
        *(t.dtype for t in (*flat.tensors, *flat.parameters())),
    }:
        raise ExportError(f"bfloat16 needs opset {FIRST_BFLOAT16_OPSET} or later, got opset={opset}")


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


def _allowed_batches(flat: FlatModel, names: Sequence[str], spec: str, notes: list[str]) -> dict[str, dict[int, Any]]:
    """``dynamic_shapes="auto"``: the first axis of each input, where torch.export finds that the model allows it."""
    if spec != "auto":
        raise ExportError(f"dynamic_shapes expects sizes by input, or 'auto', got {spec!r}")
    found = dict(zip(names, dynamo.batch_axes(flat, [t.detach() for t in flat.tensors]), strict=True))
    dynamic = {name: {0: dim} for name, dim in found.items() if dim is not None}
    static = ", ".join(name for name, tensor in zip(names, flat.tensors, strict=True) if name not in dynamic)
    shown = ", ".join(
        f"{name} ({Size.of(dim, name).formula})"
        for name, (dim,) in ((name, tuple(spec.values())) for name, spec in dynamic.items())
    )
    notes.append(
        f"dynamic_shapes='auto': the first size is dynamic of {shown or 'no input'}"
        + (f"; the model takes it for a number of {static}" if static else "")
    )
    return dynamic


def _dynamic_axes(
    flat: FlatModel, names: Sequence[str], shapes: Any, axes: Mapping[str, Any] | None
) -> tuple[dict[str, dict[int, str]], dict[str, Size]]:
    """Both spellings as ``{input name: {axis: symbol}}``, and what is known of each symbol.

    Raises:
        ExportError: on an unknown input, an axis it does not have, or sizes that do not fit.
    """
    if shapes is not None and axes is not None:
        raise ExportError("give dynamic_shapes or dynamic_axes, not both")
    given = shapes if shapes is not None else axes
    if given is None:
        return {}, {}
    paths = flat.input_paths
    if not isinstance(given, Mapping):
        order = list(dict.fromkeys(path[0] for path in paths))
        if not isinstance(given, (tuple, list)) or len(given) != len(order):
            raise ExportError(
                f"dynamic_shapes expects a dict by name or a tuple of {len(order)} entries ({', '.join(order)}), "
                f"got {given!r}"
            )
        given = dict(zip(order, given, strict=True))
    known = {path[0] for path in paths} | set(names)
    unknown = set(given) - known
    if unknown and axes is None:  # dynamic_axes may name outputs too, whose sizes follow
        raise ExportError(f"dynamic_shapes names {sorted(unknown)}; the inputs are {', '.join(names)}")
    result: dict[str, dict[int, str]] = {}
    symbols: dict[str, Size] = {}
    roots: dict[str, tuple[int, str]] = {}
    for name, path, tensor in zip(names, paths, flat.tensors, strict=True):
        spec = given.get(name) if name in given else _follow(given, path)
        if not (spec is None or isinstance(spec, (Mapping, list, tuple))):
            raise ExportError(f"dynamic_shapes: {name} expects sizes by axis, {{0: 'batch'}} for one, got {spec!r}")
        found = {}
        for axis, size in _axes(spec):
            if not isinstance(axis, int) or not -tensor.dim() <= axis < tensor.dim():
                raise ExportError(
                    f"dynamic_shapes: {name} has {tensor.dim()} dimensions, axis {axis!r} is none of them"
                )
            axis %= tensor.dim()
            if (isinstance(size, int) and not isinstance(size, bool)) or size is torch.export.Dim.STATIC:
                continue
            one = Size.of(size, f"{name}_dim_{axis}")
            found[axis] = one.symbol
            symbols.setdefault(one.symbol, one)
            root = one.root_for(tensor.shape[axis])
            if one.size(root) != tensor.shape[axis]:
                raise ExportError(f"dynamic_shapes: {name} (axis {axis}) is {tensor.shape[axis]}, never {one.formula}")
            if not one.low <= root <= one.high:
                raise ExportError(
                    f"dynamic_shapes: {name} (axis {axis}) is {tensor.shape[axis]}, so {one.root} is {root}, and "
                    f"its Dim has the range {one.low} to {one.high}; widen it, or give an input within"
                )
            place = f"in {name} (axis {axis})"
            first, where = roots.setdefault(one.root, (root, place))
            if first != root:
                raise ExportError(
                    f"dynamic_shapes: {one.root!r} is {first} {where} and {root} {place}; "
                    "sizes that may differ need names of their own"
                )
        if found:
            result[name] = found
    return result, symbols


def _check_axes_names(
    axes: Mapping[str, Any] | None, flat: FlatModel, names: Collection[str], result_names: Collection[str]
) -> None:
    """``dynamic_axes`` may name outputs too, whose sizes follow; but nothing else."""
    unknown = set(axes or ()) - {path[0] for path in flat.input_paths} - {*names, *result_names}
    if unknown:
        raise ExportError(
            f"dynamic_axes names {sorted(unknown)}; the inputs are {', '.join(names)}, the outputs "
            f"{', '.join(result_names)}"
        )


def _follow(spec: Any, path: Sequence[str]) -> Any:
    """The entry of one tensor in a nested spec. ``{axis: size}`` above it stands for every tensor below."""
    for key in path:
        nested = isinstance(spec, Mapping) and any(isinstance(v, (Mapping, list, tuple)) for v in spec.values())
        if isinstance(spec, Mapping) and (nested or key in spec):
            spec = spec.get(key, spec.get(int(key)) if key.isdigit() else None)
        elif isinstance(spec, (list, tuple)) and key.isdigit():
            spec = spec[int(key)] if int(key) < len(spec) else None
        elif not isinstance(spec, Mapping):
            return None
    return spec


def _axes(spec: Any) -> Iterator[tuple[Any, Any]]:
    """(axis, size) pairs of one tensor's entry: a dict, a list of axes, or a list of one size per axis."""
    if isinstance(spec, Mapping):
        yield from ((axis, size) for axis, size in spec.items() if size is not None)
    elif isinstance(spec, (list, tuple)):
        if all(isinstance(axis, int) for axis in spec):
            yield from ((axis, "") for axis in spec)
        else:
            yield from ((axis, size) for axis, size in enumerate(spec) if size is not None)


def _traceable(
    tensors: Sequence[Tensor],
    names: Sequence[str],
    axes: Mapping[str, Mapping[int, str]],
    sizes: Mapping[str, Size],
) -> list[Tensor]:
    """The inputs to trace with: dynamic sizes of 0 and 1 become 2 or more, for both exporters take those as static."""
    least: dict[str, int] = {}
    for size in sizes.values():
        least[size.root] = max(least.get(size.root, 0), size.root_for(2))
    result = []
    for name, tensor in zip(names, tensors, strict=True):
        shape = list(tensor.shape)
        for axis, symbol in axes.get(name, {}).items():
            size = sizes[symbol]
            shape[axis] = max(shape[axis], size.size(least[size.root]))
        result.append(tiled(tensor, shape))
    return result


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


def _check_place(path: Path) -> None:
    if "\0" in str(path):
        raise ExportError(f"expected the path of a file, got {str(path)!r}, with a NUL in it; take that out")
    try:
        if path.is_dir():
            raise ExportError(f"expected the path of a file, got the folder {path}; add a file name")
        if path.exists() and not path.is_file():  # a pipe or a device, which a renamed file would replace
            raise ExportError(
                f"expected the path of a file, got {path}, which is no regular file; choose another place"
            )
    except OSError as error:  # too long a name, say
        raise ExportError(f"cannot write {path}: {error.strerror or error}; choose another name") from error


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A temporary folder next to the file, so that the finished one can be renamed into place."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror or error}; choose a writable folder") from error
    try:
        yield folder
    except OSError as error:
        if error.errno not in _NO_PLACE:  # the user's code may raise others
            raise
        raise ExportError(
            f"cannot write {path}: {error.strerror}; make room there, or choose another folder. No file was written"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write(model: onnx.ModelProto, path: Path) -> None:
    """Writes a model beside its place and moves it there: a file of that name is whole at any time."""
    _check_place(path)
    with _beside(path) as folder:
        save(model, folder / path.name)
        _move(folder, path)


def _move(folder: Path, path: Path) -> None:
    try:
        for file in sorted(folder.iterdir(), key=lambda f: f.name == path.name):  # the .onnx last, after its data
            os.replace(file, path.parent / file.name)
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def _collected_warnings(notes: list[str]) -> Iterator[None]:
    """The tracers' warnings about the model become notes of the report; those about themselves are dropped."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield
    for warning in caught:
        if issubclass(warning.category, torch.jit.TracerWarning) and not is_library(warning.filename):
            first = str(warning.message).split(". ")[0].split("\n")[0]
            note = f"{os.path.relpath(warning.filename)}:{warning.lineno}: {first}"
            if note not in notes:
                notes.append(note)


@dataclass(frozen=True)
class _Finished:
    """What :func:`_finish` learned of the file, besides writing it."""

    svexport_nodes: list[NodeSource]
    lines: Mapping[str, str]  # the user's, by name of a node, as far as the tracer tells
    facts: dict[str, Any]  # of the report, by field


def _finish(
    model: onnx.ModelProto,
    file: Path,
    opset: int,
    plugins: bool | Collection[str],
    target: Target | None,
    inputs: Mapping[str, Tensor],
    axes: Mapping[str, Mapping[int, str]],
    sizes: Mapping[str, Size],
    output_names: Sequence[str],
    simplify: bool,
    weights: str,
    notes: list[str],
    frozen: Mapping[str, str],
    returned: Sequence[tuple[str, ...]],
) -> _Finished:
    """From what the exporter wrote to what was asked for: names, sources, bodies, IR version; saved and checked."""
    import onnx

    from svexport.graph.bodies import attach, ir_version, lower_in_place, node_types, state_types
    from svexport.graph.conditions import take_decided_branches
    from svexport.graph.fold import fold_constants
    from svexport.graph.forms import write_for, write_plainly
    from svexport.graph.nodes import beyond_plugin, separate_names, svexport_nodes
    from svexport.graph.returned import note_returned
    from svexport.graph.scope import light_copy
    from svexport.graph.simplify import simplify as simplified
    from svexport.graph.types import infer_types
    from svexport.graph.walk import opset_of
    from svexport.graph.weights import hold_weights
    from svexport.ops._op import OPS

    if opset_of(model) != opset:
        raise ExportError(f"the exporter wrote opset {opset_of(model)} where {opset} was asked for; try another opset")
    keep_inputs(model, inputs, axes)
    lines = clean(model, list(inputs), output_names)
    traced = _counts(model)

    keep = set() if plugins is False else node_types(None if plugins is True else plugins)
    only_plugins = plugins is True or target is not None
    keep -= {op.node_type for op in OPS.values() if op.inline or (only_plugins and not op.has_plugin)}

    def goes(node: onnx.NodeProto) -> bool:
        return node.op_type not in keep or beyond_plugin(node)

    nodes = [NodeSource(n.name, n.op_type, n.doc_string, goes(n)) for n in svexport_nodes(model)]
    model.ir_version = ir_version(opset)
    state_types(model)
    lower_in_place(model, goes)
    if simplify:
        before, model = _counts(model), simplified(model, plugins=OPS["space_to_depth"].node_type in keep)
        after = _counts(model)
        notes.append(
            f"simplify: {sum(before.values())} nodes became {sum(after.values())}, "
            f"{before.get('Transpose', 0)} Transposes {after.get('Transpose', 0)}"
        )
    write_plainly(model)
    lowered = _lowered(model)
    while fold_constants(model, lowered) or take_decided_branches(model, lowered):
        lowered = _lowered(model)
    if target is not None:
        separate_names(model)
        write_for(model, target, infer_types(lowered))
        lowered = _lowered(model)
    name_sizes(model, lowered, sizes)
    if weights == "attributes":
        hold_weights(model)
    attach(model)
    model.producer_name, model.producer_version = "svexport", __version__
    model.graph.name = "svexport"
    if returned:
        note_returned(model, returned)
    model.doc_string = "".join(f"{name} is a constant: {text}\n" for name, text in frozen.items()).strip()
    try:
        onnx.checker.check_model(light_copy(model), full_check=True)
    except Exception as error:
        raise ExportError(f"the exported file is not valid ONNX: {error}{_later(str(error), opset)}") from error
    save(model, file)

    facts = {
        "opset": opset_of(model),
        "ir_version": model.ir_version,
        "inputs": {i.name: _describe(i) for i in model.graph.input},
        "outputs": {o.name: _describe(o) for o in model.graph.output},
        "nodes": _counts(model),
        "traced_nodes": traced,
        "lowered_nodes": _counts(lowered),
    }
    return _Finished(nodes, lines, facts)


def _lowered(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in standard ONNX, without its large weights."""
    from svexport.graph.bodies import lower_in_place
    from svexport.graph.scope import light_copy

    lowered = light_copy(model)
    lower_in_place(lowered, lambda _: True)
    return lowered


def _later(error: str, opset: int) -> str:
    """Of an operator that a model's own symbolic wrote: the opset from which it is another one."""
    import onnx

    found = re.search(r"for operator (\w+)", error) or re.search(r"OpType: (\w+)", error)
    schemas = onnx.defs.get_all_schemas_with_history() if found else []
    versions = sorted({s.since_version for s in schemas if found and s.name == found[1] and not s.domain})
    later = next((version for version in versions if version > opset), None)
    return f"\n  {found[1]} has changed in opset {later}: try opset={later} or later" if found and later else ""


def _counts(model: onnx.ModelProto) -> dict[str, int]:
    """Nodes by type, nested graphs included, constants left out."""
    from svexport.graph.walk import graphs

    return dict(Counter(n.op_type for g in graphs(model.graph) for n in g.node if n.op_type != "Constant"))


def _describe(info: onnx.ValueInfoProto) -> str:
    from svexport.symbolic._builder import dtype_name

    tensor = info.type.tensor_type
    dims = ", ".join(d.dim_param or (str(d.dim_value) if d.HasField("dim_value") else "?") for d in tensor.shape.dim)
    return f"{dtype_name(tensor.elem_type)}[{dims}]"


def _strip_file(file: Path) -> int:
    """Takes the bodies off a file, and says which IR version it has then."""
    import onnx

    from svexport.graph.bodies import strip

    model = onnx.load(str(file))
    strip(model)
    save(model, file)
    return model.ir_version


def save(model: onnx.ModelProto, file: Path) -> None:
    """Writes a model, its weights beside it where they do not fit into one protobuf. ``model`` keeps its weights."""
    import onnx

    from svexport.graph.scope import byte_size
    from svexport.graph.wire import write_model

    for data in file.parent.glob("*"):  # what the exporter left, loaded by now
        data.unlink()
    size = sum(map(byte_size, model.graph.initializer))
    if size < MAX_PROTOBUF_BYTES:
        with file.open("wb") as stream:
            write_model(model, stream)
        return
    outside = onnx.ModelProto()
    outside.CopyFrom(model)
    onnx.save(outside, str(file), save_as_external_data=True, location=f"{file.name}.data", size_threshold=1024)
