"""``svexport.triton_repository``: writes a model repository for NVIDIA's Triton Inference Server."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from svexport.errors import EngineError, UnsupportedError
from svexport.parity import parity, tolerances
from svexport.report import Printed
from svexport.runtime.compare import named
from svexport.runtime.engine import Engine, TensorSpec
from svexport.runtime.session import OnnxEngine, load
from svexport.runtime.triton_config import DTYPES, Served, ensemble_config, model_config, pbtxt
from svexport.tensorrt.profiles import DEFAULT_BATCH
from svexport.text import dtype_text, number_of, shape_text, table

__all__ = ["TritonRepository", "triton_repository"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SCALES = (1.0, 100.0, 0.01)
"""Scales of the random rows in a trial batch."""
_LARGEST = 2**31 - 1
_IMAGE = "nvcr.io/nvidia/tritonserver:YY.MM-py3"


@dataclass(frozen=True, repr=False)
class TritonRepository(Printed):
    """Result of :func:`svexport.triton_repository`; ``print`` shows it.

    Attributes:
        folder: folder of the repository.
        models: the models that a client may request, by name: input and output tensors, and the largest batch.
        command: command that starts a server with the repository.
        notes: assumptions, and requested options that were not followed.
    """

    folder: Path
    models: dict[str, dict[str, Any]]
    command: str
    notes: list[str] = field(default_factory=list)

    def client(self, model: str) -> str:
        """A program that requests one result from the server (``pip install tritonclient[http]``).

        Raises:
            EngineError: if there is no model of that name.
        """
        if model not in self.models:
            raise EngineError(f"no model is named {model!r}; there are {', '.join(self.models)}")
        facts = self.models[model]
        bfloat16 = any(one["type"] == "BF16" for one in facts["inputs"].values())
        lines = [*["import ml_dtypes"] * bfloat16, "import numpy as np", "import tritonclient.http as http", "",
                 'client = http.InferenceServerClient("localhost:8000")', "inputs = []"]  # fmt: skip
        for name, one in facts["inputs"].items():
            shape = [1 if size is None else size for size in one["shape"]]
            lines.append(f"inputs.append(http.InferInput({name!r}, {shape}, {one['type']!r}))")
            lines.append(f"inputs[-1].set_data_from_numpy(np.zeros({shape}, {_numpy(one['type'])}))")
        lines.append(f"result = client.infer({model!r}, inputs)")
        lines += [f"print({name!r}, result.as_numpy({name!r}).shape)" for name in facts["outputs"]]
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON-serializable values."""
        return {
            "folder": str(self.folder),
            "models": self.models,
            "command": self.command,
            "notes": list(self.notes),
        }

    def tables(self) -> list[Any]:
        """The repository as rich renderables."""
        from rich.text import Text

        rows = []
        for name, facts in self.models.items():
            ends = (
                "\n".join(f"{n} {one['type']}{shape_text(one['shape'])}" for n, one in facts[kind].items())
                for kind in ("inputs", "outputs")
            )
            batch = str(facts["max_batch_size"]) if facts["max_batch_size"] else "as the file has it"
            rows.append((name, facts["file"], batch, *ends))
        models = number_of(len(self.models), "model")
        found = table(("model", "file", "largest batch", "inputs", "outputs"), rows)
        return [Text(f"{self.folder}: {models}", "bold"), found, Text(self.command)]

    def __repr__(self) -> str:
        return f"TritonRepository({self.folder}: {', '.join(self.models)})"


def triton_repository(
    folder: str | os.PathLike[str],
    engines: Any,
    *,
    max_batch_size: int | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    instances: int = 1,
    device: str | torch.device | None = None,
    queue_delay: int | None = 100,
    warmup: bool = True,
    ensemble: str | None = None,
    connect: Mapping[str, str] | None = None,
    trusted: bool = False,
) -> TritonRepository:
    """Writes a model repository for Triton Inference Server: each file with its ``config.pbtxt``.

    >>> made = svexport.triton_repository("models", ["detector.onnx"])
    >>> print(made)  # with the command that starts the server
    >>> print(made.client("detector"))

    A server that batches puts rows of different requests into one run. A file is batched only if this is shown to be
    correct: the first axis of all inputs and outputs is open, and a run of two rows gives the same as two runs of one.
    ONNX files are written with svexport nodes lowered, because the version of the server's ONNX Runtime is unknown.
    They are configured to compute in float32 without TF32 (Triton 24.07 or later).

    Args:
        folder: folder of the repository; it must be empty or not exist. It is written under another name and renamed.
        engines: an engine or the path of a file, or several in a list, or in a dict by the names that clients use;
            default: the file names.
        max_batch_size: the largest batch; default: what a plan was built for, 8 for ONNX files, and 0 (no batching)
            if rows cannot be batched. In that case a given number is an error.
        shapes: for inputs with open sizes, a typical shape including the batch axis, to try batches and to warm up.
            Default for plans: what they were built for.
        instances: number of instances that run a model concurrently.
        device: device of the instances, ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; default: a GPU if the server has one.
        queue_delay: microseconds that a request waits for others to form a batch; None: each request runs alone.
        warmup: run each model on zeros before the first request.
        ensemble: the name of a further model that chains all others in order, such as preprocessing and detector.
            Tensors of the same name are connected.
        connect: for an ensemble, connects tensors of different names: ``{"images": "pixels"}`` for the input
            ``images`` and the output ``pixels`` of an earlier model.
        trusted: whether code in plans may run, here and in the server. Version-compatible plans need it, including
            those that carry svexport's plugin library.

    Raises:
        EngineError: if a file cannot be loaded, or names, sizes or options do not fit; nothing is written.
        UnsupportedError: on tensors that Triton does not have.
        BackendNotAvailableError: if the runtime of a file is not installed: plans are read by TensorRT on its GPU.
    """
    if not isinstance(folder, (str, os.PathLike)):
        raise EngineError(f"expected the path of a folder, got {folder!r}")
    folder = Path(folder)
    _check_options(folder, max_batch_size, instances, queue_delay, ensemble, connect, shapes)
    where = _where(device)
    with ExitStack() as stack:
        loaded: dict[str, Engine] = {}
        for name, engine in _named(engines, ensemble):
            if isinstance(engine, (str, os.PathLike)):
                plan = Path(engine).suffix.lower() != ".onnx"
                engine = load(engine, trusted=trusted) if plan else load(engine, device="cpu")
                stack.enter_context(engine)
            elif not isinstance(engine, Engine):
                engine = OnnxEngine(engine, device="cpu")
            loaded[name] = engine
        _check_shapes(loaded, shapes or {})
        models = [_serve(name, engine, shapes or {}, max_batch_size, warmup) for name, engine in loaded.items()]
        if ensemble is not None and not all(model.max_batch_size for model in models):
            for model in models:
                if model.max_batch_size:
                    model.max_batch_size = 0
                    model.notes.append(f"{model.name} is not batched, because another model of {ensemble} cannot be")
        configs = {model.name: model_config(model, instances, _of(model, where), queue_delay) for model in models}
        if ensemble is not None:
            configs[ensemble] = _chain(ensemble, models, connect or {})
        _write(folder, loaded, models, configs)
        notes = [note for model in models for note in model.notes]
        plans = [engine for engine in loaded.values() if not isinstance(engine, OnnxEngine)]
        notes += [f"{engine} loads in a server whose TensorRT is {_built_by(engine)}" for engine in plans]
    return TritonRepository(folder, _for_clients(configs), _command(folder, bool(plans), where, trusted), notes)


# ---------------------------------------------------------------------------------------------------- what was given


def _check_options(
    folder: Path, max_batch_size: Any, instances: Any, queue_delay: Any, ensemble: Any, connect: Any, shapes: Any
) -> None:
    for what, given in {"connect": connect, "shapes": shapes}.items():
        if given is not None and not isinstance(given, Mapping):
            raise EngineError(f"{what} expects a dict by the name of an input, got {given!r}")
    if ensemble is not None and not isinstance(ensemble, str):
        raise EngineError(f"ensemble expects the name of a model, got {ensemble!r}")
    numbers = {"instances": (instances, 1)}
    numbers |= {"max_batch_size": (max_batch_size, 0)} if max_batch_size is not None else {}
    numbers |= {"queue_delay": (queue_delay, 0)} if queue_delay is not None else {}
    for what, (value, least) in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
            raise EngineError(f"{what} expects an integer from {least} to {_LARGEST}, got {value!r}")
    if connect and ensemble is None:
        raise EngineError('connect goes with an ensemble: ensemble="name"')
    if "\0" in str(folder):
        raise EngineError(f"expected the path of a folder, got {str(folder)!r}, with a NUL in it; take that out")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "is not empty" if folder.is_dir() else "is no folder"
        raise EngineError(f"{folder} {what}, and a repository is written whole; remove it, or choose another place")


def _where(device: str | torch.device | None) -> torch.device | None:
    try:
        found = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise EngineError(f'device expects "cpu", "cuda" or "cuda:1", got {device!r}') from error
    if found is not None and found.type not in ("cpu", "cuda"):
        raise UnsupportedError(f'Triton runs models on "cpu" or "cuda", not on {device!r}')
    return found


def _of(model: Served, where: torch.device | None) -> torch.device | None:
    if model.kind == "plan" and where is not None and where.type == "cpu":
        raise UnsupportedError(f"{model.name} is an engine of TensorRT, which runs on a GPU; leave device out")
    return where


def _named(engines: Any, ensemble: str | None) -> list[tuple[str, Any]]:
    """Pairs each engine with the name of its folder."""
    found = named(engines)
    if not isinstance(engines, Mapping):
        found = [(Path(name).stem if isinstance(e, (Engine, str, os.PathLike)) else name, e) for name, e in found]
    names = [name for name, _ in found] + ([ensemble] if ensemble is not None else [])
    if not found:
        raise EngineError("expected engines or paths of files, got none")
    for name in names:
        if not _NAME.fullmatch(name):
            raise EngineError(
                f"the name of a model is of letters, digits, '_', '-' and '.', got {name!r}; give engines as a dict by "
                "name"
            )
    twice = sorted({name for name in names if [n.lower() for n in names].count(name.lower()) > 1})
    if twice:
        raise EngineError(
            f"several models are named {', '.join(twice)}; give engines as a dict, each under its own name"
        )
    if ensemble is not None and len(found) < 2:
        raise EngineError(f"an ensemble is of two models or more, got {found[0][0]} alone")
    return found


def _check_shapes(engines: Mapping[str, Engine], shapes: Mapping[str, Sequence[int]]) -> None:
    specs = [(name, spec) for name, engine in engines.items() for spec in engine.inputs]
    for given, shape in shapes.items():
        own = [(name, spec) for name, spec in specs if spec.name == given]
        if not own:
            listed = ", ".join(dict.fromkeys(spec.name for _, spec in specs))
            raise EngineError(f"shapes names {given!r}, which is no input; there are {listed}")
        integers = isinstance(shape, (tuple, list)) and all(isinstance(size, int) and size >= 1 for size in shape)
        for name, spec in own:
            if not integers or not spec.accepts(shape):
                raise EngineError(f"shapes gives {given!r} of {name} as {shape!r}; it is {spec}")


# ------------------------------------------------------------------------------------------------------------ batches


def _serve(
    name: str, engine: Engine, shapes: Mapping[str, Sequence[int]], max_batch_size: int | None, warmup: bool
) -> Served:
    """Determines how Triton runs an engine."""
    if not engine.inputs:
        raise UnsupportedError(f"{name} takes no inputs, and Triton has no such models")
    onnx = isinstance(engine, OnnxEngine)
    model = Served(name, "onnx" if onnx else "plan", engine.inputs, engine.outputs)
    ranges = {} if onnx else engine._ranges[0] if engine._ranges else {}  # type: ignore[attr-defined]
    model.shape_inputs = frozenset() if onnx else frozenset(engine._on_host)  # type: ignore[attr-defined]
    if onnx:
        assert isinstance(engine, OnnxEngine)
        if any(node.op_type == "QuantizeLinear" for node in engine.model().graph.node):
            model.notes.append(
                f"{name} has quantizers; the server's ONNX Runtime multiplies integers around them and rounds biases, "
                "so elements may be a quantizer's step off"
            )
    for spec in engine.inputs:
        typical = shapes.get(spec.name) or (ranges[spec.name][1] if spec.name in ranges else spec.shape)
        if typical is None:
            continue
        # An unknown first axis, if it is the only unknown one, is taken for a batch of 1.
        sizes = [1 if axis == 0 and not isinstance(size, int) else size for axis, size in enumerate(typical)]
        if all(isinstance(size, int) for size in sizes):
            model.sizes[spec.name] = tuple(sizes)  # type: ignore[arg-type]
    largest = min((r[2][0] for r in ranges.values()), default=DEFAULT_BATCH[2])
    reason = "" if max_batch_size == 0 else _unbatched(engine, model, ranges)
    if reason and max_batch_size:
        raise EngineError(f"{name} cannot be batched, and max_batch_size is {max_batch_size}: {reason}")
    if max_batch_size and max_batch_size > largest and ranges:
        raise EngineError(f"{name} was built for batches up to {largest}, got max_batch_size {max_batch_size}")
    if reason:
        model.notes.append(f"{name} is not batched: {reason}")
    elif max_batch_size != 0:
        model.max_batch_size = max_batch_size or largest
    if warmup:
        why = _cold(engine, model)
        model.warm = not why
        if why:
            model.notes.append(f"{name} is not warmed up: {why}")
    return model


def _unbatched(engine: Engine, model: Served, ranges: Mapping[str, Any]) -> str:
    """Why rows of different requests must not share a run; empty if they may."""
    if model.shape_inputs:
        return f"the numbers of {', '.join(sorted(model.shape_inputs))} are sizes"
    for spec in (*engine.inputs, *engine.outputs):
        if spec.shape is None or not spec.shape or isinstance(spec.shape[0], int):
            return f"the first axis of {spec.name!r}, {spec}, is of one size; export it with dynamic_shapes"
    names = {spec.shape[0] for spec in (*engine.inputs, *engine.outputs) if spec.shape} - {None}
    if len(names) > 1:
        return f"first axes are of different sizes: {', '.join(sorted(map(str, names)))}"
    if any(low[0] > 1 or high[0] < 1 for low, _, high in ranges.values()):
        return f"it was built for batches from {max(r[0][0] for r in ranges.values())} on, and Triton sends single rows"
    if missing := [spec.name for spec in engine.inputs if spec.name not in model.sizes]:
        return f"that was not tried, because {', '.join(missing)} has open sizes; give shapes"
    return _mixes_rows(engine, model, min((high[0] for _, _, high in ranges.values()), default=len(_SCALES)))


def _mixes_rows(engine: Engine, model: Served, largest: int) -> str:
    """Why rows in one run give other results than each row alone; empty if they give the same."""
    scales = _SCALES[:largest]
    count = len(scales)
    generator = torch.Generator().manual_seed(0)
    rows = [[_random(spec, model.sizes[spec.name], scale, generator) for spec in engine.inputs] for scale in scales]
    try:
        alone = [engine.run(row) for row in rows]
        together = engine.run([torch.cat(column) for column in zip(*rows)])
    except EngineError as error:
        return f"a run on random numbers failed: {error}"
    rtol, atol = tolerances(None, None, {t.dtype for t in together} | engine.dtypes)
    for index, (spec, actual) in enumerate(zip(engine.outputs, together, strict=True)):
        parts = [outputs[index] for outputs in alone]
        if any(part.dim() != actual.dim() or part.shape[0] != 1 for part in parts) or actual.shape[0] != count:
            return f"the first axis of {spec.name!r} is {actual.shape[0]} for {count} rows: it is no batch"
        if any(part.shape[1:] != actual.shape[1:] for part in parts):
            return f"the shape of {spec.name!r} follows from its numbers"
        if actual.is_floating_point() and actual.numel() and not actual.isfinite().any():
            return f"{spec.name!r} is not finite on random numbers, so batching was not tried"
        if not parity(spec.name, torch.cat(parts), actual, rtol=rtol, atol=atol).ok:
            return f"a row of {spec.name!r} depends on the other rows of its batch"
    return ""


def _random(spec: TensorSpec, sizes: Sequence[int], scale: float, generator: torch.Generator) -> Tensor:
    """A random row."""
    shape = (1, *sizes[1:])
    if spec.dtype.is_floating_point:
        return (torch.randn(shape, generator=generator) * scale).to(spec.dtype)
    return torch.randint(0, 2, shape, generator=generator).to(spec.dtype)


def _cold(engine: Engine, model: Served) -> str:
    """Why a warm-up run on zeros does not work; empty if it does."""
    if model.shape_inputs:
        return f"the numbers of {', '.join(sorted(model.shape_inputs))} are sizes"
    if missing := [spec.name for spec in engine.inputs if spec.name not in model.sizes]:
        return f"{', '.join(missing)} has open sizes; give shapes"
    try:
        engine.run([torch.zeros(model.sizes[spec.name], dtype=spec.dtype) for spec in engine.inputs])
    except EngineError as error:
        return f"it does not run on zeros: {error}"
    return ""


# ---------------------------------------------------------------------------------------------------------- ensembles


def _chain(name: str, models: Sequence[Served], connect: Mapping[str, str]) -> dict[str, Any]:
    """The configuration of an ensemble of all models in order. A tensor is identified by the model that outputs it."""
    made: dict[str, tuple[Served, TensorSpec]] = {}  # the last output of each name
    inputs: dict[str, tuple[Served, TensorSpec]] = {}
    outer: dict[tuple[str, str], str] = {}  # for each output, its name in the ensemble
    steps: list[tuple[Served, dict[str, str], dict[str, str]]] = []
    used: set[str] = set()
    unknown = set(connect)
    for model in models:
        takes: dict[str, str] = {}
        for spec in model.inputs:
            key = next((k for k in (f"{model.name}.{spec.name}", spec.name) if k in connect), spec.name)
            source = connect.get(key)
            unknown.discard(key)
            if source is not None and source not in made:
                raise EngineError(
                    f"connect has {spec.name!r} of {model.name} from {source!r}, which no model before it returns; "
                    f"there are {', '.join(made) or 'none'}"
                )
            maker = made.get(source or spec.name)
            if maker is None:
                other = inputs.setdefault(spec.name, (model, spec))
                _fits(name, other, (model, spec))
                takes[spec.name] = spec.name
            else:
                _fits(name, maker, (model, spec))
                takes[spec.name] = outer[maker[0].name, maker[1].name]
                used.add(takes[spec.name])
        if steps and not used.intersection(takes.values()):
            before = ", ".join(made)
            raise EngineError(
                f"{model.name} takes nothing of what the models before it return ({before}); connect says which of its "
                f"inputs ({', '.join(takes)}) is which"
            )
        gives: dict[str, str] = {}
        for spec in model.outputs:
            plainly = spec.name not in {*outer.values(), *inputs}
            gives[spec.name] = outer[model.name, spec.name] = spec.name if plainly else f"{model.name}.{spec.name}"
            made[spec.name] = made[f"{model.name}.{spec.name}"] = model, spec
        steps.append((model, takes, gives))
    if unknown:
        raise EngineError(f"connect names {', '.join(map(repr, sorted(unknown)))}, which is no input of {name}")
    by_name = {(model.name, spec.name): (model, spec) for model in models for spec in model.outputs}
    outputs = {label: by_name[key] for key, label in outer.items() if label not in used}
    return ensemble_config(name, steps, inputs, outputs)


def _fits(name: str, one: tuple[Served, TensorSpec], other: tuple[Served, TensorSpec]) -> None:
    (model, spec), (second, wanted) = one, other
    sizes = zip(spec.shape or (), wanted.shape or ())
    same = not (isinstance(spec.shape, tuple) and isinstance(wanted.shape, tuple)) or (
        len(spec.shape) == len(wanted.shape)
        and all(a == b for a, b in sizes if isinstance(a, int) and isinstance(b, int))
    )
    if spec.dtype != wanted.dtype or not same:
        raise EngineError(
            f"in {name}, {spec.name!r} of {model.name} is {spec}, and {wanted.name!r} of {second.name} is {wanted}: "
            "they cannot be one tensor"
        )


# ------------------------------------------------------------------------------------------------------------ writing


def _write(
    folder: Path, engines: Mapping[str, Engine], models: Sequence[Served], configs: Mapping[str, dict[str, Any]]
) -> None:
    """Writes the folder under another name, and renames it when it is complete."""
    try:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.absolute().parent))
    except OSError as error:
        raise EngineError(f"cannot write {folder}: {error.strerror or error}; choose another place") from error
    try:
        for name, config in configs.items():
            (beside / name / "1").mkdir(parents=True)
            (beside / name / "config.pbtxt").write_text(pbtxt(config), encoding="utf-8")
        for model in models:
            _write_file(engines[model.name], beside / model.name / "1" / model.file)
        beside.chmod(0o755)  # a server reads it as another user
        os.replace(beside, folder.absolute())
    except OSError as error:
        raise EngineError(f"cannot write {folder}: {error.strerror or error}; choose another place") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_file(engine: Engine, place: Path) -> None:
    if isinstance(engine, OnnxEngine):
        from svexport.graph.bodies import lower
        from svexport.graph.saving import save

        save(lower(engine.file()), place)
    elif engine.path is None or not engine.path.is_file():
        raise EngineError("an engine of TensorRT is copied from its file, and this one has none; build it with a path")
    else:
        shutil.copyfile(engine.path, place)


def _built_by(engine: Engine) -> str:
    return getattr(engine, "version", "") or "the one that built it"


def _command(folder: Path, plans: bool, where: torch.device | None, trusted: bool) -> str:
    gpus = [] if where is not None and where.type == "cpu" else ["--gpus all"]
    words = [
        "docker run --rm",
        *gpus,
        "-p 8000:8000 -p 8001:8001",
        f"-v {shlex.quote(str(folder.absolute()))}:/models:ro",
        _IMAGE,
    ]
    words += ["tritonserver --model-repository=/models --disable-auto-complete-config"]
    if plans and trusted:
        words.append("--backend-config=tensorrt,version-compatible=true")
    return " ".join(words)


def _for_clients(configs: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    def ends(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
        batch = [None] if config["max_batch_size"] else []
        return {
            one["name"]: {
                "type": one["data_type"].removeprefix("TYPE_"),
                "shape": [*batch, *(None if size < 0 else size for size in one["dims"])],
            }
            for one in config[kind]
        }

    kinds = {"onnxruntime_onnx": "model.onnx", "tensorrt_plan": "model.plan", "ensemble": "an ensemble"}
    return {
        name: {
            "file": kinds[config["platform"]],
            "max_batch_size": config["max_batch_size"],
            "inputs": ends(config, "input"),
            "outputs": ends(config, "output"),
        }
        for name, config in configs.items()
    }


def _numpy(kind: str) -> str:
    """numpy's name for a Triton data type."""
    if kind == "BF16":
        return "ml_dtypes.bfloat16"
    return "np." + next(dtype_text(dtype) for dtype, name in DTYPES.items() if name == kind)
