"""TensorRT engines on torch tensors."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from svexport.errors import EngineError, SvexportError, UnsupportedError
from svexport.graph.returned import parse_returned
from svexport.logging import logger
from svexport.runtime import place as places
from svexport.runtime.context import Context, Graphs, Recorded, Replay
from svexport.runtime.engine import Engine, TensorSpec
from svexport.tensorrt.bindings import Log, dtypes, load_tensorrt, logger_for
from svexport.tensorrt.build_report import BuildReport, Layer, read_layers
from svexport.tensorrt.plan import Plan, check_file, read_plan
from svexport.text import dtype_text

if TYPE_CHECKING:
    import onnx

__all__ = ["LayerTime", "TensorRTEngine", "place"]

place = places.cuda
"""Returns the place (device) that a caller requests for an engine."""


@dataclass(frozen=True)
class LayerTime:
    """The time of one layer in :meth:`TensorRTEngine.profile`.

    Attributes:
        name: name of the layer.
        milliseconds: mean over all runs.
        nodes: nodes of the file that the layer computes, as far as the engine tells.
        source: source line of the model for the first of these nodes that has one.
    """

    name: str
    milliseconds: float
    nodes: tuple[str, ...]
    source: str


class TensorRTEngine(Engine):
    """A TensorRT engine (8.6 or later) that runs on torch's current stream.

    Contiguous inputs on the engine's device are read in place; outputs are new tensors that the caller owns. A call
    returns as soon as the work is enqueued, as torch's operators do. Any number of threads may call: each run uses its
    own execution context, which is kept for later runs.

    A plan is untrusted: it is inspected before TensorRT loads it, and code in it (of version-compatible engines and
    the plugin libraries in them) is refused unless ``trusted``. svexport's plugins are registered before loading if
    possible. Use the engine as a context manager, or :meth:`close` it, to free its memory at once.

    Args:
        plan: the path of a plan, or its bytes.
        device: ``"cuda"`` or ``"cuda:1"``; default: torch's current one.
        refit: the ONNX file whose weights go into a plan that was built without weights.
        cuda_graphs: the launches for this many input shapes are recorded and replayed as CUDA graphs, which saves the
            CPU the time of enqueueing. Inputs are copied then. :meth:`info` says why a shape is not recorded.
        trusted: whether code in the plan may run.
        path: names the engine if ``plan`` is bytes.

    Attributes:
        version: version of the TensorRT that built it; empty if the plan does not say.
        report: report of :func:`svexport.build`; None for a loaded engine.
        sources: source line of the model for each node, for :meth:`profile`.
        built_from: the ONNX file (or model) and the options that :func:`svexport.build` used; None for a loaded engine.

    Raises:
        EngineError: if it is not a plan, or TensorRT refuses it: the error names the version that built it.
        UnsupportedError: on inputs or outputs that torch has no tensors for.
        BackendNotAvailableError: without TensorRT 8.6 or later, or without a GPU.
    """

    def __init__(
        self,
        plan: str | os.PathLike[str] | bytes,
        *,
        device: str | torch.device | None = None,
        refit: str | os.PathLike[str] | onnx.ModelProto | None = None,
        cuda_graphs: int = 0,
        trusted: bool = False,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        self.path = Path(path) if path is not None else None
        if isinstance(plan, bytes):
            read = Plan.parse(plan, str(self))
        else:
            if not isinstance(plan, (str, os.PathLike)):
                raise EngineError(f"expected the path of a plan, or its bytes, got {type(plan).__name__}")
            self.path = Path(plan)
            read = read_plan(self.path)
        self.version = read.version
        self.report: BuildReport | None = None
        self.sources: Mapping[str, str] = {}
        self.built_from: tuple[Any, dict[str, Any]] | None = None
        self._trt = trt = load_tensorrt()
        self._place = place(device)
        self.device = self._place.device
        self._log = Log()
        self._lock = threading.Lock()
        self._closed = False
        self._idle: list[Context] = []
        self._graphs = Graphs(cuda_graphs)
        self._logger = logger_for(trt, self._log)
        with self._place.active():
            self._register_plugins()
            self._runtime = trt.Runtime(self._logger)
            if trusted:
                self._runtime.engine_host_code_allowed = True
            self._engine = self._runtime.deserialize_cuda_engine(read.content)
            if self._engine is None:
                raise EngineError(self._refused())
            self._bytes = len(read.content)
            try:
                if refit is not None:
                    self.refit(refit)
                self._read_tensors()
                self._idle.append(self._new_context())  # so that missing resources raise now
            except BaseException:
                self.close()
                raise
        self.returned = parse_returned(self._engine.name or "", len(self.outputs))

    # ------------------------------------------------------------------------------------------------------ loading

    def _register_plugins(self) -> None:
        from svexport.tensorrt.plugins import register_plugins

        self._plugins = ""
        try:
            register_plugins()
        except SvexportError as error:  # most engines need no plugins; one that does will be refused
            self._plugins = f" (svexport's plugins are not registered: {error})"
            logger.debug("plugins are not registered: {}", error)

    def _refused(self) -> str:
        here, reason = self._trt.__version__, self._log.reason()
        if self.version and _release(self.version) != _release(here):
            return (
                f"{self} was built by TensorRT {self.version}, this is {here}, which does not load it: {reason}. Build "
                "it again here, or install that version; an engine that was built version_compatible by an earlier "
                "one loads with trusted=True"
            )
        by = f", built by TensorRT {self.version}" if self.version else ""
        advice = self._plugins or ". If it was cut short or is of another GPU, build or copy it again"
        return f"TensorRT {here} does not load {self}{by}: {reason}{advice}"

    def _read_tensors(self) -> None:
        trt, engine = self._trt, self._engine
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        known = dtypes(trt)
        self._profiles = engine.num_optimization_profiles
        self._on_host: set[str] = set()
        found: dict[Any, list[TensorSpec]] = {trt.TensorIOMode.INPUT: [], trt.TensorIOMode.OUTPUT: []}
        for name in names:
            kind = engine.get_tensor_dtype(name)
            if kind not in known:
                listed = ", ".join(map(dtype_text, known.values()))
                raise UnsupportedError(f"{name!r} of {self} is {kind}; engines exchange {listed}")
            if engine.get_tensor_format(name) != trt.TensorFormat.LINEAR:
                raise UnsupportedError(
                    f"{name!r} of {self} is in the format {engine.get_tensor_format_desc(name)!r}, and torch's tensors "
                    "are linear; build it without formats of inputs and outputs"
                )
            if engine.get_tensor_location(name) == trt.TensorLocation.HOST:
                self._on_host.add(name)
            shape = tuple(None if size < 0 else int(size) for size in engine.get_tensor_shape(name))
            found[engine.get_tensor_mode(name)].append(TensorSpec(name, known[kind], shape))
        self.inputs = tuple(found[trt.TensorIOMode.INPUT])
        self.outputs = tuple(found[trt.TensorIOMode.OUTPUT])
        self._ranges = [self._ranges_of(number) for number in range(self._profiles)]

    def _ranges_of(self, profile: int) -> dict[str, tuple[Any, Any, Any]]:
        """Smallest, usual and largest shape of each input with open sizes."""
        return {
            spec.name: tuple(tuple(s) for s in self._engine.get_tensor_profile_shape(spec.name, profile))  # type: ignore[misc]
            for spec in self.inputs
            if spec.shape is not None and None in spec.shape
        }

    def refit(self, model: str | os.PathLike[str] | onnx.ModelProto) -> None:
        """Replaces the engine's weights by those of an ONNX file; nothing may run meanwhile.

        Raises:
            EngineError: if the engine was not built with ``refit``, or the file does not fit.
            UnsupportedError: before TensorRT 10.
        """
        trt, engine = self._trt, self._opened()
        if not hasattr(trt, "OnnxParserRefitter"):
            raise UnsupportedError(f"weights are exchanged from TensorRT 10 on, this is {trt.__version__}")
        if not engine.refittable:
            raise EngineError(f"{self} was not built to have its weights exchanged: build it with refit=True")
        refitter = trt.Refitter(engine, self._logger)
        parser = trt.OnnxParserRefitter(refitter, self._logger)
        if isinstance(model, (str, os.PathLike)):
            check_file(Path(model))
            done = parser.refit_from_file(str(model))
        elif not hasattr(model, "SerializeToString"):
            raise EngineError(f"expected the path of an ONNX file or an onnx.ModelProto, got {type(model).__name__}")
        else:
            done = parser.refit_from_bytes(model.SerializeToString())
        if not done or not refitter.refit_cuda_engine():
            said = [parser.get_error(i).desc() for i in range(parser.num_errors)]
            raise EngineError(f"{self} does not take the weights: {(said or [self._log.reason()])[0]}")

    # ------------------------------------------------------------------------------------------------------ running

    def _run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self._opened()
        profile = self.profile_for(tensors)  # first: sizes that fit no profile need no context
        with self._place.active():
            try:
                ready = [self._ready(spec, tensor) for spec, tensor in zip(self.inputs, tensors, strict=True)]
                if self._graphs.size:
                    shapes = tuple(tuple(t.shape) for t in ready)
                    graph = self._graphs.get(shapes, lambda: self._record(ready, profile))
                    if graph is not None:
                        return graph(ready)
                with self._context() as context:
                    return context.run(ready, profile)
            except SvexportError:
                raise
            except Exception as error:  # no memory for an output, or sizes that the bindings cannot tell
                given = ", ".join(f"{spec.name}: {list(t.shape)}" for spec, t in zip(self.inputs, tensors, strict=True))
                reason = str(error).strip() or type(error).__name__
                raise EngineError(f"{self} failed on {given}: {reason}") from error

    def _opened(self) -> Any:
        """TensorRT's engine.

        Raises:
            EngineError: if it is closed.
        """
        engine = self._engine
        if self._closed or engine is None:
            raise EngineError(f"{self} is closed; load it again")
        return engine

    def _ready(self, spec: TensorSpec, tensor: Tensor) -> Tensor:
        device = torch.device("cpu") if spec.name in self._on_host else self.device
        return tensor.detach().to(device).resolve_neg().contiguous()

    @contextmanager
    def _context(self) -> Iterator[Context]:
        with self._lock:
            context = self._idle.pop() if self._idle else None
        if context is None:
            context = self._new_context()
        try:
            yield context
        except BaseException:
            context.release()  # a failed context is not reused
            raise
        else:
            with self._lock:
                if not self._closed:
                    self._idle.append(context)

    def _new_context(self) -> Context:
        made = self._opened().create_execution_context()
        if made is None:
            raise EngineError(
                f"TensorRT makes no execution context of {self}, which needs {self._memory() / 1e6:.1f} MB of the GPU: "
                f"{self._log.reason()}. Free memory there, or build with a smaller largest shape"
            )
        return Context(self, made)

    def _memory(self) -> int:
        name = "device_memory_size_v2" if hasattr(self._engine, "device_memory_size_v2") else "device_memory_size"
        return int(getattr(self._engine, name))

    def profile_for(self, tensors: Sequence[Tensor]) -> int:
        """The index of the first profile that was built for these sizes.

        Raises:
            EngineError: if there is none; it says what sizes the engine was built for.
        """
        if not any(self._ranges):
            return 0
        for number, ranges in enumerate(self._ranges):
            if all(
                all(low <= size <= high for low, size, high in zip(r[0], t.shape, r[2], strict=True))
                for spec, t in zip(self.inputs, tensors, strict=True)
                if (r := ranges.get(spec.name))
            ):
                return number
        given = ", ".join(f"{spec.name}: {list(t.shape)}" for spec, t in zip(self.inputs, tensors, strict=True))
        built = " or ".join(
            ", ".join(f"{name}: {list(r[0])} to {list(r[2])}" for name, r in ranges.items()) for ranges in self._ranges
        )
        raise EngineError(f"{self} was built for {built}, got {given}; build it with shapes= that hold these")

    def _record(self, tensors: Sequence[Tensor], profile: int) -> Recorded | str:
        """A CUDA graph for inputs of these shapes, or the reason why there is none."""
        if self._on_host:
            return f"the numbers of {', '.join(sorted(self._on_host))} are read on the CPU in every run"
        context = None
        try:
            context = self._new_context()
            own = [tensor.clone() for tensor in tensors]
            outputs = context.prepare(own, profile)
            if outputs is not None:
                return Replay(self._place, context, own, outputs, self._place.capture(context.enqueue))
            reason = "the sizes of its outputs follow from its numbers"
        except Exception as error:  # noqa: BLE001 - whatever capturing does not allow
            reason = f"{type(error).__name__}: {error}"
        if context is not None:
            context.release()
        return reason

    # -------------------------------------------------------------------------------------------------- what it tells

    def layers(self) -> list[Layer]:
        """The engine's layers, as far as it stores them (``profilingVerbosity``)."""
        inspector = self._opened().create_engine_inspector()
        return read_layers(inspector.get_engine_information(self._trt.LayerInformationFormat.JSON))

    def profile(self, *tensors: Tensor, runs: int = 10, **named: Tensor) -> list[LayerTime]:
        """Times every layer on these inputs, in order of execution.

        Raises:
            EngineError: as for calling the engine, or if ``runs`` is not an integer of at least 1.
        """
        if isinstance(runs, bool) or not isinstance(runs, int) or runs < 1:
            raise EngineError(f"runs expects a number of runs from 1 on, got {runs!r}")
        ordered = self._in_order(tensors, named)
        self.run(ordered)  # checks the inputs, and warms up
        trt = self._trt

        class Profiler(trt.IProfiler):  # type: ignore[name-defined, misc]
            def __init__(self) -> None:
                trt.IProfiler.__init__(self)
                self.times: dict[str, float] = {}

            def report_layer_time(self, layer_name: str, ms: float) -> None:
                self.times[layer_name] = self.times.get(layer_name, 0.0) + ms

        profiler = Profiler()
        with self._place.active():
            ready = [self._ready(spec, tensor) for spec, tensor in zip(self.inputs, ordered, strict=True)]
            context = self._new_context()
            try:
                context.profiler = profiler
                for _ in range(runs):
                    context.run(ready, self.profile_for(ready))
                    self._place.synchronize()
            finally:
                context.release()
        nodes = {layer.name: layer.nodes for layer in self.layers()}
        found = []
        for name, total in profiler.times.items():
            own = nodes.get(name, ())
            line = next((self.sources[node] for node in own if node in self.sources), "")
            found.append(LayerTime(name, total / runs, own, line))
        return found

    def info(self) -> dict[str, Any]:
        """As for every engine, with details from TensorRT.

        Raises:
            EngineError: if it is closed.
        """
        engine = self._opened()
        return {
            **super().info(),
            "built_by": self.version or None,
            "tensorrt": self._trt.__version__,
            "device": self._place.name,
            "bytes": self._bytes,
            "memory": self._memory(),
            "layers": int(engine.num_layers),
            "profiles": [{name: [list(s) for s in r] for name, r in ranges.items()} for ranges in self._ranges],
            "refittable": bool(engine.refittable),
            "contexts": len(self._idle),
            "cuda_graphs": self._graphs.info(),
        }

    def close(self) -> None:
        """Frees the engine after waiting for its work on the device."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._place.synchronize()
        self._idle.clear()
        self._graphs.clear()
        self._engine = self._runtime = None


def _release(version: str) -> list[str]:
    return version.split(".")[:3]
