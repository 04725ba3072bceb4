"""ONNX Runtime as an engine on torch tensors."""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import _from_dlpack  # what torch.utils.dlpack.from_dlpack calls for a capsule, without its checks

from svexport.errors import BackendNotAvailableError, EngineError, SvexportError, UnsupportedError
from svexport.graph.returned import returned_of
from svexport.runtime.engine import Engine, TensorSpec
from svexport.runtime.feeds import Feeds, sharing
from svexport.runtime.guard import from_one, guard
from svexport.runtime.recorded import Recorder, not_replayable

if TYPE_CHECKING:
    import onnx

__all__ = ["OnnxEngine", "element_type", "load"]

# The torch data type and the ONNX number of each type that ONNX Runtime and torch exchange without a copy.
_TYPES: dict[str, tuple[torch.dtype, int]] = {
    "tensor(float)": (torch.float32, 1),
    "tensor(uint8)": (torch.uint8, 2),
    "tensor(int8)": (torch.int8, 3),
    "tensor(uint16)": (torch.uint16, 4),
    "tensor(int16)": (torch.int16, 5),
    "tensor(int32)": (torch.int32, 6),
    "tensor(int64)": (torch.int64, 7),
    "tensor(bool)": (torch.bool, 9),
    "tensor(float16)": (torch.float16, 10),
    "tensor(double)": (torch.float64, 11),
    "tensor(uint32)": (torch.uint32, 12),
    "tensor(uint64)": (torch.uint64, 13),
    "tensor(bfloat16)": (torch.bfloat16, 16),
}
_ELEMENT = dict(_TYPES.values())


def element_type(dtype: torch.dtype) -> int:
    """The ONNX number of a data type that engines exchange."""
    return _ELEMENT[dtype]


_FATAL = 4  # ONNX Runtime's log severity; lower ones arrive as exceptions


def load(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    refit: str | os.PathLike[str] | onnx.ModelProto | None = None,
    cuda_graphs: int = 0,
    trusted: bool = False,
    kernels: bool = False,
    precision: str | None = None,
) -> Engine:
    """Loads an exported model: ``.onnx``, which ONNX Runtime runs, or ``.engine`` and ``.plan``, which TensorRT runs.

    >>> engine = svexport.load("model.onnx")
    >>> boxes, scores = engine(images)
    >>> engine(images)["boxes"]

    Args:
        path: path of the file, next to its external data. svexport nodes without bodies are lowered in memory.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; default: CUDA if ONNX Runtime and torch both have it, else CPU.
            TensorRT runs only on CUDA.
        refit: TensorRT: the ONNX file whose weights go into an engine that was built without them.
        cuda_graphs: CUDA: the number of input shapes whose launches are recorded as a CUDA graph and replayed.
        trusted: TensorRT: whether code in the file may run; version-compatible engines contain code.
        kernels: ONNX Runtime on CUDA: whether svexport's kernels run the nodes that they support, instead of the
            bodies. They are compiled on first use, which takes a minute or two, and cached.
        precision: ONNX Runtime on CUDA: ``"tf32"`` for float32 products on tensor cores, which round their operands to
            10 bits; default: full float32.

    Raises:
        EngineError: if the file is missing, malformed or of another kind.
        UnsupportedError: if it needs what the engine does not have, such as string inputs or an unknown op.
        BackendNotAvailableError: if the runtime it needs is not installed.
        PluginBuildError: if the kernels must be compiled and this fails.
    """
    suffix = Path(path).suffix.lower() if isinstance(path, (str, os.PathLike)) else None
    if suffix == ".onnx":
        if refit is not None or trusted:
            raise EngineError(f"refit and trusted are for engines of TensorRT, and {path} is an ONNX file")
        return OnnxEngine(path, device=device, kernels=kernels, precision=precision, cuda_graphs=cuda_graphs)
    if suffix in (".engine", ".plan"):
        if kernels or precision is not None:
            raise EngineError(
                f"kernels and precision are for ONNX files; {path} was built with plugins and types of its own"
            )
        from svexport.runtime.tensorrt import TensorRTEngine

        return TensorRTEngine(path, device=device, refit=refit, cuda_graphs=cuda_graphs, trusted=trusted)
    given = f"a {type(path).__name__}" if suffix is None else str(path)
    raise EngineError(f"expected the path of a .onnx, .engine or .plan file, got {given}")


class OnnxEngine(Engine):
    """An ONNX model in ONNX Runtime.

    Contiguous inputs on the engine's device are read in place, and outputs are ONNX Runtime's memory handed to torch:
    neither is copied. svexport nodes without a body are lowered in memory first.

    On CUDA it computes on its own stream, after earlier work on torch's current stream and before later work on it. A
    call returns when the outputs are computed. Threads take turns.

    A model file is data, never code: nothing is unpickled, no library that it names is loaded, and external data is
    read only from its own folder. It may still use any amount of time and memory when it runs.

    Args:
        model: the path of a file, or a model in memory, which must not change while the engine is used.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; default: CUDA if ONNX Runtime and torch both have it, else CPU.
        data_folder: folder with the external data of a model in memory.
        kernels: see :func:`load`.
        precision: see :func:`load`.
        cuda_graphs: the launches for this many input shapes, the most recently used, are recorded and replayed as CUDA
            graphs, which saves launch time on the CPU. The first call of a shape records: it takes as long as loading,
            nothing else may allocate on the GPU meanwhile (other calls of the engine wait), and each shape holds a new
            copy of the weights. Inputs are copied. Shapes that cannot be recorded run as usual; :meth:`info` says why.
        threads: number of compute threads on the CPU, which sleep when idle; default: one per core, spinning when idle.

    Attributes:
        kernels: the names of the nodes that svexport's kernels run.

    Raises:
        EngineError: if the file is missing, malformed or of another kind.
        UnsupportedError: on inputs or outputs that torch has no tensors for, or a node of a newer svexport; on kernels,
            TF32 or CUDA graphs without CUDA.
        BackendNotAvailableError: if ONNX Runtime is not installed, or has no CUDA when it is requested.
        PluginBuildError: if the kernels must be compiled and this fails.
    """

    _recorder: Recorder | None = None

    def __init__(
        self,
        model: str | os.PathLike[str] | onnx.ModelProto,
        *,
        device: str | torch.device | None = None,
        data_folder: str | os.PathLike[str] | None = None,
        kernels: bool = False,
        precision: str | None = None,
        cuda_graphs: int = 0,
        threads: int | None = None,
    ) -> None:
        onnxruntime = _onnxruntime()
        self.path = None
        if isinstance(model, (str, os.PathLike)):
            self.path = Path(model)
            model = self.path.absolute()  # model() reads it again, and the working directory may change
            data_folder = model.parent
        self._source: Path | onnx.ModelProto = model  # type: ignore[assignment]
        self._folder = data_folder
        self.device = _device(onnxruntime, device)
        _check_options(self.device, kernels, precision, cuda_graphs, threads)
        self._options: dict[str, Any] = {"kernels": kernels, "precision": precision, "threads": threads}
        self._cuda = _Cuda(self.device, precision) if self.device.type == "cuda" else None
        self.kernels: tuple[str, ...] = ()
        loaded = _read(self._source)
        try:
            guard(loaded, self._folder)
            library, chosen = None, loaded
            if kernels:
                library, chosen = self._with_kernels(onnxruntime, loaded)
            runnable = for_runtime(onnxruntime, _with_bodies(chosen))
            if self.path is not None and runnable is loaded:
                source: str | bytes = str(self._source)  # lets ONNX Runtime map the file
            else:
                source = runnable.SerializeToString()
            session = partial(
                _session, onnxruntime, source, folder=self._folder, library=library, threads=threads
            )  # for the recorder as well
            self._session = session(cuda=self._cuda)
            declared = (*loaded.graph.input, *loaded.graph.output)
            ranked = {value.name for value in declared if value.type.tensor_type.HasField("shape")}
            self.inputs = from_one(loaded, (_spec(value, value.name in ranked) for value in self._session.get_inputs()))
            self.outputs = tuple(_spec(value, value.name in ranked) for value in self._session.get_outputs())
            self._output_names = self.output_names
            self._bools = [i for i, spec in enumerate(self.outputs) if spec.dtype is torch.bool]
            # An input that is also an output comes back as the caller's own tensor, and is cloned.
            self._passed = [i for i, spec in enumerate(self.outputs) if spec.name in self.input_names]
            share = sharing(onnxruntime.capi.onnxruntime_pybind11_state.OrtValue)
            self._feeds = None if share is None or self.device.type != "cpu" else Feeds(self.inputs, share)
            kinds = {tensor.data_type for tensor in loaded.graph.initializer}
            self.returned = returned_of(loaded)
            self._weights = {dtype for dtype, number in _TYPES.values() if number in kinds}
        except SvexportError:
            raise
        except Exception as error:  # ONNX Runtime's, protobuf's, UnicodeDecodeError of a damaged name, ...
            reason = _reason(error)
            if "Could not find an implementation" in reason:
                raise EngineError(
                    f"ONNX Runtime lacks a kernel that {self} needs on {self.device}: {reason}"
                ) from error
            raise EngineError(
                f"ONNX Runtime cannot load {self}: {reason}\n  onnx.checker.check_model(path, full_check=True) tells "
                "whether the file is at fault, for example cut short: then export or copy it again. If it is not, "
                f"try another version of ONNX Runtime than {onnxruntime.__version__}, or another opset"
            ) from error
        if self.device.type == "cuda" and "CUDAExecutionProvider" not in self._session.get_providers():
            if device is not None:
                raise BackendNotAvailableError(
                    "ONNX Runtime has CUDA but cannot start it, usually because it lacks the CUDA and cuDNN libraries "
                    "it needs: https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html. "
                    'Install those, or give device="cpu"'
                )
            self.device, self._cuda = torch.device("cpu"), None
            self._feeds = None if share is None else Feeds(self.inputs, share)
        if self._cuda is not None and cuda_graphs:
            self._recorder = self._recorder_of(cuda_graphs, not_replayable(runnable), session)
        if self._cuda is not None:
            self._end = weakref.finalize(self, _end, self.__dict__, self._cuda)  # also runs at process exit

    def close(self) -> None:
        """Waits for enqueued work and frees the engine's resources; it cannot run again."""
        if self._cuda is not None:
            self._end()
        else:
            self._session = self._feeds = None

    def _with_kernels(self, onnxruntime: Any, model: onnx.ModelProto) -> tuple[Path | None, onnx.ModelProto]:
        """The kernel library and the model that uses it; no library for a model without such nodes."""
        from svexport.runtime.kernels import library, with_kernels

        changed, taken = with_kernels(model)
        self.kernels = tuple(taken)
        return (library(onnxruntime), changed) if taken else (None, model)

    def _recorder_of(self, size: int, reason: str, session: Callable[..., Any]) -> Recorder:
        """Makes the recorder. It must not reference the engine, so that the engine is freed with its last user."""
        precision, device, beside = self._options["precision"], self.device, self._cuda

        def make() -> tuple[_Cuda, Any]:
            if reason:
                raise UnsupportedError(reason)
            cuda = _Cuda(device, precision, beside)
            return cuda, session(cuda=cuda)

        binding = partial(_binding, self.inputs, self.outputs, device)
        return Recorder(size, make, binding, partial(torch.cuda.set_device, device))

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Data types of the file's weights."""
        return self._weights

    def model(self) -> onnx.ModelProto:
        """Reads the model that runs again, without its external data and with bodiless nodes lowered."""
        return _with_bodies(_read(self._source))

    def file(self) -> onnx.ModelProto:
        """A copy of the model as it was given: svexport nodes are kept, and external data is loaded."""
        import onnx
        from onnx.external_data_helper import load_external_data_for_model

        model = onnx.ModelProto()
        model.CopyFrom(_read(self._source))
        if self._folder is not None:
            load_external_data_for_model(model, str(self._folder))
        return model

    def with_outputs(self, names: Iterable[str]) -> OnnxEngine:
        """An engine of the same model that also returns values from inside its graph, after its own outputs.

        Raises:
            EngineError: on a name that no node of the outermost graph computes.
        """
        import onnx

        model = onnx.ModelProto()
        model.CopyFrom(self.model())  # a copy: it may be the caller's
        computed = {name for node in model.graph.node for name in node.output}
        present = {output.name for output in model.graph.output}
        for name in dict.fromkeys(names):
            if name not in computed:
                raise EngineError(f"{self} computes no value named {name!r}")
            if name not in present:
                model.graph.output.append(onnx.ValueInfoProto(name=name))  # ONNX Runtime infers its type
        return OnnxEngine(model, device=self.device, data_folder=self._folder, **self._options)

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """As for every engine, with a fast path for tensors that need no conversion, which matters for small runs."""
        try:
            feeds = None if self._feeds is None else self._feeds.of(tensors)
            if feeds is not None:
                return self._taken(self._session._sess.run_with_ort_values(feeds, self._output_names, None))
        except EngineError:
            raise
        except Exception as error:
            raise self._failure(error, tensors) from error
        return super().run(tensors)

    def _run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self._session is None if self._cuda is None else not self._end.alive:
            raise EngineError(f"{self} is closed; load it again")
        # Keep a reference to converted tensors until the run is over: ONNX Runtime reads their memory.
        ready = [tensor if self._fits(tensor) else self._ready(tensor) for tensor in tensors]
        try:
            replay = self._recorder.get(ready, self._computed) if self._recorder is not None else None
            return self._computed(ready) if replay is None else replay(ready)
        except EngineError:
            raise
        except Exception as error:
            raise self._failure(error, ready) from error

    def _failure(self, error: Exception, tensors: Sequence[Tensor]) -> EngineError:
        given = ", ".join(f"{s.name}: {list(t.shape)}" for s, t in zip(self.inputs, tensors, strict=True))
        return EngineError(f"{self} failed in ONNX Runtime on {given}: {_reason(error)}")

    def _fits(self, tensor: Tensor) -> bool:
        """Whether ONNX Runtime can read the tensor in place; this test is cheaper than conversions without effect."""
        if tensor.requires_grad or not tensor.is_contiguous() or tensor.is_neg():
            return False
        return tensor.is_cpu if self._cuda is None else tensor.device == self.device

    def _ready(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device).resolve_neg().contiguous()

    def _computed(self, ready: Sequence[Tensor]) -> list[Tensor]:
        if self._feeds is None:
            return self._taken(self._bound(ready))
        # Call the internal session: the public wrapper takes longer than a small run.
        return self._taken(self._session._sess.run_with_ort_values(self._feeds.made(ready), self._output_names, None))

    def _taken(self, values: Any) -> list[Tensor]:
        """The outputs of a run, as tensors that the caller owns."""
        outputs: list[Tensor] = values.to_dlpacks(_from_dlpack)
        if len(outputs) != len(self.outputs):
            raise EngineError(f"{self} returned {len(outputs)} of {len(self.outputs)} outputs: it is damaged")
        for i in self._bools:
            outputs[i] = outputs[i].view(torch.bool)  # DLPack returns bool as uint8
        for i in self._passed:
            outputs[i] = outputs[i].clone()
        return outputs

    def _bound(self, ready: Sequence[Tensor]) -> Any:
        """Runs with bound inputs and outputs; returns the outputs on the device where they are computed."""
        binding = _binding(self.inputs, self.outputs, self.device, self._session, ready)  # one per call, for threads
        if self._cuda is None:
            self._session.run_with_iobinding(binding)
        else:
            self._cuda.run(self._session, binding)
        return binding.get_outputs_as_ortvaluevector()

    def info(self) -> dict[str, Any]:
        """As for every engine, with ONNX Runtime's execution providers, and whether CUDA graphs are recorded."""
        return {
            **super().info(),
            "onnxruntime": _onnxruntime().__version__,
            "kernels": list(self.kernels),
            "precision": self._options["precision"],
            "cuda_graphs": {} if self._recorder is None else self._recorder.info(),
        }


def _binding(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    device: torch.device,
    session: Any,
    tensors: Sequence[Tensor],
    results: Sequence[Tensor] | None = None,
) -> Any:
    """Binds inputs and outputs to a session; without ``results`` the run allocates the outputs."""
    place = device.type, device.index or 0
    binding = session.io_binding()
    for spec, tensor in zip(inputs, tensors, strict=True):
        binding.bind_input(spec.name, *place, _ELEMENT[spec.dtype], list(tensor.shape), tensor.data_ptr())
    for i, spec in enumerate(outputs):
        own = () if results is None else (_ELEMENT[spec.dtype], list(results[i].shape), results[i].data_ptr())
        binding.bind_output(spec.name, *place, *own)
    return binding


class _Cuda:
    """The stream on which a session computes on CUDA, ordered with the callers' streams. It runs one call at a time.

    Args:
        beside: for a recording session, the one whose lock it shares: an allocation on the device while ONNX Runtime
            records fails, in any thread, and breaks the recording.
    """

    def __init__(self, device: torch.device, precision: str | None, beside: _Cuda | None = None) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._callers: set[torch.cuda.Stream] = set()
        self._lock: threading.Lock = threading.Lock() if beside is None else beside._lock
        self.provider = (
            "CUDAExecutionProvider",
            {
                # Omit the default device 0: ONNX Runtime would warn that no plugin provider has it.
                **({"device_id": str(device.index)} if device.index else {}),
                **({"enable_cuda_graph": "1"} if beside is not None else {}),
                "user_compute_stream": str(self._stream.cuda_stream),
                "use_tf32": str(int(precision == "tf32")),
            },
        )

    def synchronize(self) -> None:
        self._stream.synchronize()

    def run(self, session: Any, binding: Any) -> None:
        with self._turn():
            # ONNX Runtime waits for the device. With disable_synchronize_execution_providers it would keep the host
            # buffers of every run until the session is freed, and free them in a stream callback. That callback, the
            # last owner of their allocator, calls CUDA where this is not allowed, and ends the process.
            session.run_with_iobinding(binding)

    def replay(
        self, run: Callable[[], Any], own: Sequence[Tensor], given: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """See :class:`svexport.runtime.recorded.Replays`."""
        with self._turn() as caller:
            with torch.cuda.stream(self._stream):
                for mine, tensor in zip(own, given, strict=True):
                    mine.copy_(tensor)
            run()
            caller.wait_stream(self._stream)
            copies = [output.clone() for output in outputs]
            for output in outputs:
                output.record_stream(caller)  # if it is freed now, its memory is reused only after the copy
            return copies

    @contextmanager
    def _turn(self) -> Iterator[torch.cuda.Stream]:
        """Orders one run after earlier work on all callers' streams, and before later work on this caller's stream."""
        current = torch.cuda.current_stream(self._device)
        with self._lock:
            self._callers.add(current)
            for stream in self._callers:  # all of them: memory of outputs freed by one caller is reused for any other
                self._stream.wait_stream(stream)
            try:
                yield current
            finally:
                current.wait_stream(self._stream)  # even if the run failed


def _end(attributes: dict[str, Any], cuda: _Cuda) -> None:
    """Frees a session after the device has finished its enqueued work, while Python and CUDA are still alive."""
    try:
        cuda.synchronize()
    finally:
        recorder = attributes.pop("_recorder", None)
        if recorder is not None:
            recorder.close()
        attributes.pop("_session", None)


def _onnxruntime() -> Any:
    try:
        import onnx  # noqa: F401
        import onnxruntime
    except ImportError as error:
        raise BackendNotAvailableError(
            f"running ONNX files needs ONNX Runtime ({error}); install it with: pip install onnx onnxruntime"
        ) from error
    return onnxruntime


def _device(onnxruntime: Any, requested: str | torch.device | None) -> torch.device:
    providers = onnxruntime.get_available_providers()
    has_cuda = "CUDAExecutionProvider" in providers and torch.cuda.is_available()
    try:
        device = torch.device(("cuda" if has_cuda else "cpu") if requested is None else requested)
    except (RuntimeError, TypeError) as error:
        raise EngineError(f'device expects "cpu", "cuda" or "cuda:1", got {requested!r}') from error
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f'ONNX files run on "cpu" or "cuda", not on {requested!r}')
    if device.type == "cuda" and not has_cuda:
        raise BackendNotAvailableError(
            f"{str(device)!r} needs ONNX Runtime and torch with CUDA; here ONNX Runtime has {', '.join(providers)} and "
            f"torch sees {torch.cuda.device_count()} GPUs. pip install onnxruntime-gpu in place of onnxruntime, "
            'or give device="cpu"'
        )
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _check_options(
    device: torch.device, kernels: bool, precision: str | None, cuda_graphs: int, threads: int | None
) -> None:
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 0):
        raise EngineError(f"threads expects their number, 0 or None for one per core, got {threads!r}")
    if precision not in (None, "tf32"):
        raise EngineError(f'precision expects None (float32 as it is) or "tf32", got {precision!r}')
    options = {"kernels": kernels, "precision": precision is not None, "cuda_graphs": bool(cuda_graphs)}
    for name, given in options.items():
        if given and device.type != "cuda":
            raise UnsupportedError(f"{name} is for engines on CUDA, and this one is on {device}: leave it out")


def _read(source: Path | onnx.ModelProto) -> onnx.ModelProto:
    """Reads the model without its external data."""
    import onnx
    from google.protobuf.message import DecodeError

    from svexport.graph.reading import check_regular

    if isinstance(source, onnx.ModelProto):
        return source
    if not isinstance(source, Path):
        raise EngineError(f"expected the path of an ONNX file or an onnx.ModelProto, got {type(source).__name__}")
    try:
        check_regular(source)
        model = onnx.load_model_from_string(source.read_bytes())
    except SvexportError as error:
        raise EngineError(str(error)) from error
    except OSError as error:
        raise EngineError(f"cannot read {source}: {error.strerror or error}; check the path") from error
    except DecodeError as error:
        raise EngineError(f"{source} is not an ONNX file, or it was cut short; export or copy it again") from error
    if not model.HasField("graph"):
        raise EngineError(f"{source} holds no ONNX graph ({source.stat().st_size} bytes); export or copy it again")
    return model


def _with_bodies(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model itself if every svexport node has a body, else a lowered copy."""
    from svexport.graph import lower
    from svexport.graph.nodes import svexport_nodes, symbolic_of

    bodies = {(f.domain, f.name, f.overload) for f in model.functions}
    bare = [node for node in svexport_nodes(model) if (node.domain, node.op_type, node.overload) not in bodies]
    for node in bare:
        symbolic_of(node)  # raises on an unknown op
    return lower(model) if bare else model


def _before_overloads(onnxruntime: Any) -> bool:
    return tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 27)


def for_runtime(onnxruntime: Any, model: onnx.ModelProto) -> onnx.ModelProto:
    """Adapts the model to this ONNX Runtime: before 1.27 it uses the first body of a name for all overloads."""
    from svexport.graph.bodies import without_overloads

    return without_overloads(model) if _before_overloads(onnxruntime) else model


def broken_optimizers(onnxruntime: Any) -> list[str]:
    """Optimizers of this ONNX Runtime that reject valid models (Reshapes to sizes that a body computes, some
    LayerNorms) or change results: one removes any Relu before a QuantizeLinear to fp8, whose minimum is not zero."""
    refusing = ["ReshapeFusion", "SkipLayerNormFusion"] if _before_overloads(onnxruntime) else []
    return [*refusing, "ReluQuantRewrite"]


def _session(
    onnxruntime: Any,
    source: str | bytes,
    cuda: _Cuda | None,
    folder: str | os.PathLike[str] | None,
    library: Path | None,
    threads: int | None,
) -> Any:
    options = onnxruntime.SessionOptions()
    if threads is not None:
        options.intra_op_num_threads, options.enable_mem_pattern = threads, False  # patterns reallocate in run two
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = _FATAL
    options.use_deterministic_compute = True
    # Run the file as it is: the optimizer would fuse quantizers and a Conv to an integer node that rounds the bias too.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if isinstance(source, bytes) and folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.fspath(folder))
    if library is not None:
        options.register_custom_ops_library(str(library))
    providers: list[Any] = [*([cuda.provider] if cuda else ()), "CPUExecutionProvider"]
    # Disable the fallback, which prints to stdout and tries the same again.
    disabled = broken_optimizers(onnxruntime)
    return onnxruntime.InferenceSession(
        source, options, providers=providers, enable_fallback=0, disabled_optimizers=disabled
    )


def _spec(value: Any, ranked: bool) -> TensorSpec:
    if value.type not in _TYPES:
        raise UnsupportedError(f"{value.name!r} is a {value.type}; engines exchange {', '.join(_TYPES)}")
    dtype, _ = _TYPES[value.type]
    if not ranked and not value.shape:  # ONNX Runtime reports an unknown rank like a scalar
        return TensorSpec(value.name, dtype, None)
    return TensorSpec(value.name, dtype, tuple(None if isinstance(s, int) and s < 0 else s for s in value.shape))


def _reason(error: Exception) -> str:
    """ONNX Runtime's innermost message, without the prefix ``[ONNXRuntimeError] : 1 : FAIL : ``."""
    return re.split(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", str(error))[-1].strip() or type(error).__name__
