"""Builds a plan from an ONNX file: checks, parses, builds, and turns TensorRT's messages into errors or reports."""

from __future__ import annotations

import contextvars
import json
import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx

from svexport.errors import BuildError, ExportError
from svexport.graph.nodes import svexport_nodes
from svexport.graph.returned import returned_of
from svexport.ops._cuda import cache_folder
from svexport.progress import phase
from svexport.tensorrt.bindings import Log, logger_for, version_of
from svexport.tensorrt.check import check as check_file
from svexport.tensorrt.check.report import CheckReport
from svexport.tensorrt.options import BuildOptions
from svexport.tensorrt.plugins import Registered, register_plugins
from svexport.tensorrt.profiles import Profile, profiles_of
from svexport.tensorrt.source import Source, source_lines
from svexport.tensorrt.support.target import Version, dotted

__all__ = ["build_plan", "timing_cache_path", "write"]


def checked(source: Source, version: Version, notes: list[str]) -> CheckReport | None:
    """Checks the file for this TensorRT version; None if the version is unknown.

    Raises:
        BuildError: if there are errors.
    """
    try:
        report = check_file(source.path if source.path and not source.stripped else source.model, dotted(version))
    except ExportError as error:
        notes.append(f"not checked before: {error}")
        return None
    if errors := report.errors:
        first = errors[0]
        where = ": ".join(filter(None, (first.op, first.node)))
        more = f" (and {len(errors) - 1} more: svexport check)" if len(errors) > 1 else ""
        raise BuildError(
            f"{source} is not for TensorRT {dotted(version)}: {where + ': ' if where else ''}"
            f"expected {first.expected}, came {first.came}; {first.todo}{more}. check=False tries all the same"
        )
    return report


@dataclass
class Built:
    """The result of :func:`build_plan`.

    Attributes:
        plan: the serialized engine.
        profiles: the sizes it is built for.
        registered: the plugins registered in the process; None if the file needs none.
        plugins: how each svexport node runs, by node name.
        seconds: time of each stage.
        check: result of the check for this version; None if it was not requested, or the version is unknown.
        notes: assumptions, and TensorRT's warnings.
    """

    plan: bytes
    profiles: list[Profile]
    registered: Registered | None
    plugins: dict[str, str]
    seconds: dict[str, float]
    check: CheckReport | None
    notes: list[str]

    @property
    def library(self) -> Path | None:
        """The plugin library that was loaded."""
        return None if self.registered is None else self.registered.library


def build_plan(
    trt: ModuleType,
    source: Source,
    options: BuildOptions,
    *,
    shapes: Any = None,
    values: Any = None,
    plugins: str | os.PathLike[str] | None = None,
    timing_cache: Path | None = None,
    check: bool = True,
) -> Built:
    """Builds a plan. It writes no file except the timing cache.

    Raises:
        BuildError: if the file does not parse or the engine does not build, with TensorRT's reason.
        KeyboardInterrupt: after the build has ended, if Ctrl-C came meanwhile.
    """
    version = version_of(trt)
    options.hold_to(version)
    source = source.for_version(version)
    notes: list[str] = []
    lap = _Laps()
    profiles = profiles_of(source.model.graph, shapes, values)
    notes += [note for profile in profiles for note in profile.notes]
    phase("checking")
    report = checked(source, version, notes) if check else None
    lap("check")
    phase("registering plugins")
    nodes = list(svexport_nodes(source.model))
    registered = register_plugins(plugins) if nodes or plugins is not None else None
    lap("plugins")

    log = Log()
    trt_logger = logger_for(trt, log)
    builder = trt.Builder(trt_logger)
    network = _network(trt, builder, source)
    phase("parsing")
    parser = parse(trt, network, trt_logger, log, source)
    lap("parse")

    config = builder.create_builder_config()
    options.apply(trt, config, source.half, source.integers)
    for profile in profiles:
        _add_profile(builder, network, config, profile)
    if registered is not None and registered.library is not None and options.version_compatible:
        config.plugins_to_serialize = [str(registered.library)]
    if timing_cache is not None:
        _load_timing_cache(config, timing_cache, notes)
    plan = _build(trt, builder, network, config, log)
    del parser
    if plan is None:
        raise BuildError(f"TensorRT {trt.__version__} builds no engine of {source}: {log.reason()}{_advice(log)}")
    content = bytes(plan)
    if timing_cache is not None:
        _save_timing_cache(config, timing_cache, notes)
    lap("build")
    notes += [f"TensorRT warns: {text}" for text in log.warnings[:5]]
    kinds = {} if registered is None else registered.kinds
    by_node = {node.name: kinds.get(node.op_type, "?") for node in nodes}
    return Built(content, profiles, registered, by_node, lap.seconds, report, notes)


class _Laps:
    """Measures the time of stages; each call ends a stage.

    Attributes:
        seconds: time of each stage, by name.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    def __call__(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage], self._started = now - self._started, now


def _network(trt: ModuleType, builder: Any, source: Source) -> Any:
    """An empty network, strongly typed if this TensorRT supports it."""
    version, flags = version_of(trt), 0
    for name in ("STRONGLY_TYPED", "EXPLICIT_BATCH"):  # the latter is the only mode from 10 on, and removed in 11
        if hasattr(trt.NetworkDefinitionCreationFlag, name) and (name == "STRONGLY_TYPED" or version < (10, 0)):
            flags |= 1 << int(getattr(trt.NetworkDefinitionCreationFlag, name))
    network = builder.create_network(flags)
    network.name = _network_name(source.model)
    return network


def parse(trt: ModuleType, network: Any, trt_logger: Any, log: Log, source: Source) -> Any:
    """Fills a network. The returned parser owns the weights, and must stay alive until the engine is built.

    Raises:
        BuildError: with the parser's message, and the line of the model that the node came from.
    """
    parser = trt.OnnxParser(network, trt_logger)
    path = None if source.path is None else str(source.path.absolute())
    try:
        content = source.model.SerializeToString()
    except ValueError as error:
        raise BuildError(f"{source} is above 2 GiB; save its weights beside it, as external data") from error
    if parser.parse(content, path):
        return parser
    said = [_parser_error(parser.get_error(i), source.model) for i in range(parser.num_errors)]
    said = list(dict.fromkeys(said)) or [log.reason()]
    more = f" (and {len(said) - 1} more)" if len(said) > 1 else ""
    raise BuildError(f"TensorRT {trt.__version__} does not parse {source}: {said[0]}{more}{_plugin_advice(said[0])}")


def _parser_error(error: Any, model: onnx.ModelProto) -> str:
    text = error.desc().strip()
    name = error.node_name() if hasattr(error, "node_name") else ""
    index = error.node()
    if not name and 0 <= index < len(model.graph.node):
        name = model.graph.node[index].name
    if not name:
        return text
    line = source_lines(model).get(name)
    return f"{text} (node {name!r}{f', {line}' if line else ''})"


def _plugin_advice(said: str) -> str:
    if match := re.search(r"\bSv[A-Z]\w+", said):
        return (
            f". {match[0]} is a plugin of svexport: register it (svexport plugins build makes the library), or export "
            "with plugins=False"
        )
    return "; svexport check says what it takes"


def _advice(log: Log) -> str:
    if "memory" in log.reason().lower():
        return ". Free memory of the GPU, or give a smaller workspace= or largest shape"
    return ". To find the cause, try an export with plugins=False, or a lower optimization_level"


def _network_name(model: onnx.ModelProto) -> str:
    """The network's name, which the engine keeps. It records how a model's returned dict holds the outputs."""
    returned = returned_of(model)
    return model.graph.name[:200] or "model" if returned is None else json.dumps(returned, separators=(",", ":"))


def _add_profile(builder: Any, network: Any, config: Any, profile: Profile) -> None:
    made = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        shapes, values = profile.shapes.get(tensor.name), profile.values.get(tensor.name)
        if shapes:
            made.set_shape(tensor.name, *shapes)
        if values:
            made.set_shape_input(tensor.name, *values)
        elif tensor.is_shape_tensor:
            raise BuildError(
                f"the numbers of {tensor.name!r} are sizes in this network: give values="
                f'{{"{tensor.name}": (smallest, usual, largest)}}, each a tuple of its numbers'
            )
    if config.add_optimization_profile(made) < 0:
        raise BuildError(f"TensorRT refuses the profile {profile}; its log says why")


def _build(trt: ModuleType, builder: Any, network: Any, config: Any, log: Log) -> Any:
    """The plan, or None. It builds in another thread, so that this one receives Ctrl-C meanwhile."""
    cancelled = threading.Event()
    if hasattr(config, "progress_monitor"):
        config.progress_monitor = monitor = _monitor(trt, cancelled.is_set)  # noqa: F841 - lives as long as the build
        phase("building")
    else:
        phase("building; Ctrl-C takes effect when it has ended")
    result: list[Any] = [None]
    failure: list[BaseException] = []

    def work() -> None:
        follow()
        try:
            result[0] = builder.build_serialized_network(network, config)
        except BaseException as error:  # noqa: BLE001 - raised where the caller waits
            failure.append(error)

    with _device_of_thread() as follow, _interrupt(cancelled):
        told = contextvars.copy_context()  # keeps the listeners to phases
        thread = threading.Thread(target=told.run, args=(work,), name="svexport build", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.1)
    if cancelled.is_set():
        raise KeyboardInterrupt
    if failure and isinstance(failure[0], KeyboardInterrupt):
        raise failure[0]
    if failure:
        raise BuildError(
            f"TensorRT fails to build: {type(failure[0]).__name__}: {failure[0]}; {log.reason()}"
        ) from failure[0]
    return result[0]


@contextmanager
def _device_of_thread() -> Iterator[Callable[[], None]]:
    """A function that gives another thread the CUDA device of this one."""
    import torch

    if not torch.cuda.is_available():
        yield lambda: None
        return
    device = torch.cuda.current_device()
    yield lambda: torch.cuda.set_device(device)


@contextmanager
def _interrupt(cancelled: threading.Event) -> Iterator[None]:
    """Makes Ctrl-C set ``cancelled``, if this thread receives signals and nobody else has installed a handler."""
    usual = signal.getsignal(signal.SIGINT)
    ours = threading.current_thread() is threading.main_thread() and callable(usual)
    if not ours:
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: cancelled.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def _monitor(trt: ModuleType, cancelled: Callable[[], bool]) -> Any:
    """A progress monitor: reports build phases to :mod:`svexport.progress`, and tells TensorRT whether to continue."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.phases: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.phases[phase_name] = num_steps
            phase(f"building: {phase_name}")

        def step_complete(self, phase_name: str, step: int) -> bool:
            total = self.phases.get(phase_name, 0)
            phase(f"building: {phase_name}, {min(step + 1, total)} of {total}")
            return not cancelled()

        def phase_finish(self, phase_name: str) -> None:
            self.phases.pop(phase_name, None)

    return Monitor()


def timing_cache_path(trt_version: str, device: str) -> Path:
    """The path of the timing cache of a device."""
    name = re.sub(r"[^\w.]+", "-", f"{trt_version}-{device}")
    return cache_folder() / "tensorrt" / "timing" / f"{name}.cache"


def _load_timing_cache(config: Any, path: Path, notes: list[str]) -> None:
    try:
        kept = path.read_bytes()
    except OSError:
        kept = b""
    cache = config.create_timing_cache(kept)
    if cache is None or not config.set_timing_cache(cache, False):
        notes.append(f"the timings in {path} are not of this device and version: measured anew")
        config.set_timing_cache(config.create_timing_cache(b""), False)


def _save_timing_cache(config: Any, path: Path, notes: list[str]) -> None:
    cache = config.get_timing_cache()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if cache is not None:
            write(path, bytes(cache.serialize()))
    except (OSError, BuildError) as error:
        notes.append(f"timings are not kept: {error}")


def write(path: Path, content: bytes) -> None:
    """Writes a file under another name and renames it.

    Raises:
        BuildError: if it cannot be written.
    """
    beside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(content)
        os.replace(beside, path)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError):
            raise BuildError(f"cannot write {path}: {error.strerror or error}; choose another place") from error
        raise
