"""TensorRT execution contexts: inputs, outputs and their memory, and recorded runs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from svexport.errors import EngineError
from svexport.logging import logger

if TYPE_CHECKING:
    from svexport.runtime.place import Place
    from svexport.runtime.tensorrt import TensorRTEngine

__all__ = ["Context", "Graphs", "Recorded", "Replay"]

Shapes = tuple[tuple[int, ...], ...]
Recorded = Callable[[Sequence[Tensor]], list[Tensor]]
"""Replays a recorded run on the given inputs."""


class Context:
    """An execution context, for one run at a time."""

    def __init__(self, engine: TensorRTEngine, context: Any) -> None:
        self._engine, self._context = engine, context
        self._lane = engine._place.lane()
        self._profile = 0
        self._allocators: dict[str, Any] = {}
        self._held: list[Tensor] = []
        self._nothing: Tensor | None = None

    @property
    def profiler(self) -> Any:
        """TensorRT's IProfiler of the execution context."""
        return self._context.profiler

    @profiler.setter
    def profiler(self, profiler: Any) -> None:
        self._context.profiler = profiler

    def run(self, tensors: Sequence[Tensor], profile: int) -> list[Tensor]:
        """The outputs for inputs that have the engine's device, dtype and layout, with a profile for their sizes."""
        engine = self._engine
        with self._lane.stream() as stream:
            self._set_inputs(tensors, profile, stream)
        outputs = self._set_outputs()
        with self._lane.stream() as stream:
            self.enqueue(stream)
        results = []
        for spec in engine.outputs:
            if spec.name in outputs:
                results.append(outputs[spec.name])
                continue
            allocator = self._allocators[spec.name]
            engine._place.keep_for_caller([allocator.memory])
            results.append(allocator.take(spec.dtype))
        self._held = []
        return [tensor.to(engine.device) for tensor in results]

    def prepare(self, tensors: Sequence[Tensor], profile: int) -> list[Tensor] | None:
        """Sets inputs and outputs; returns the outputs' memory, or None if every run allocates it."""
        with self._lane.stream() as stream:
            self._set_inputs(tensors, profile, stream)
        outputs = self._set_outputs()
        return [outputs[spec.name] for spec in self._engine.outputs] if not self._allocators else None

    def enqueue(self, stream: int) -> None:
        """Enqueues the engine on the CUDA stream with this handle, without waiting."""
        engine = self._engine
        if self._context.execute_async_v3(stream):
            return
        for allocator in self._allocators.values():
            if allocator.failure is not None:
                raise EngineError(f"{engine} got no memory for an output: {allocator.failure}") from allocator.failure
        raise EngineError(f"{engine} failed in TensorRT: {engine._log.reason()}")

    def release(self) -> None:
        """Frees the context when the device has finished; it must not run again. Without this, a kept exception would
        keep its frames, and these the memory."""
        with suppress(Exception):  # the device may have failed
            self._engine._place.synchronize()
        self._context, self._held, self._allocators = None, [], {}

    def _set_inputs(self, tensors: Sequence[Tensor], profile: int, stream: int) -> None:
        engine, context = self._engine, self._context
        if profile != self._profile:
            if not context.set_optimization_profile_async(profile, stream):
                raise EngineError(f"{engine} does not take its profile {profile}: {engine._log.reason()}")
            self._profile = profile
        self._held = []
        for spec, tensor in zip(engine.inputs, tensors, strict=True):
            if not context.set_input_shape(spec.name, tuple(tensor.shape)):
                raise EngineError(f"{engine} does not take {spec.name!r} of shape {list(tensor.shape)}")
            self._held.append(tensor)
            self._set_address(spec.name, tensor)
        if missing := context.infer_shapes():
            raise EngineError(f"{engine} cannot tell its sizes without the shapes or values of {', '.join(missing)}")

    def _set_outputs(self) -> dict[str, Tensor]:
        engine, outputs = self._engine, {}
        for spec in engine.outputs:
            shape = tuple(int(size) for size in self._context.get_tensor_shape(spec.name))
            if -1 in shape:
                self._set_allocator(spec.name)
                continue
            if spec.name in engine._on_host:
                outputs[spec.name] = torch.empty(shape, dtype=spec.dtype)
            else:
                outputs[spec.name] = engine._place.empty(shape, spec.dtype)
            self._set_address(spec.name, outputs[spec.name])
        return outputs

    def _set_address(self, name: str, tensor: Tensor) -> None:
        if not tensor.numel() and self._nothing is None:
            self._nothing = self._engine._place.allocate(1)  # an empty torch tensor has no address
        address = tensor.data_ptr() if tensor.numel() or self._nothing is None else self._nothing.data_ptr()
        if not self._context.set_tensor_address(name, address):
            raise EngineError(f"TensorRT refuses memory for {name!r}: {self._engine._log.reason()}")

    def _set_allocator(self, name: str) -> None:
        if name not in self._allocators:
            self._allocators[name] = _allocator(self._engine._trt, self._engine._place.allocate)
            if not self._context.set_output_allocator(name, self._allocators[name]):
                raise EngineError(f"TensorRT refuses an allocator for {name!r}: {self._engine._log.reason()}")


def _allocator(trt: Any, allocate: Callable[[int], Tensor]) -> Any:
    """An output allocator for one output whose size is known only while the engine runs."""

    class Allocator(trt.IOutputAllocator):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.memory: Tensor = torch.empty(0, dtype=torch.uint8)
            self.shape: tuple[int, ...] = ()
            self.failure: Exception | None = None

        def reallocate_output(self, tensor_name: str, memory: Any, size: int, alignment: int) -> int:
            try:
                self.memory = allocate(size)
            except Exception as error:  # noqa: BLE001 - TensorRT would print it, and forget it
                self.failure = error
                return 0
            return self.memory.data_ptr()

        def reallocate_output_async(self, tensor_name: str, memory: Any, size: int, alignment: int, stream: int) -> int:
            return self.reallocate_output(tensor_name, memory, size, alignment)

        def notify_shape(self, tensor_name: str, shape: Iterable[int]) -> None:
            self.shape = tuple(int(size) for size in shape)

        def take(self, dtype: torch.dtype) -> Tensor:
            """Returns the output and hands its memory over to the caller."""
            count = torch.Size(self.shape).numel()
            needed = count * dtype.itemsize
            made = self.memory[:needed].view(dtype).reshape(self.shape)
            self.memory = torch.empty(0, dtype=torch.uint8)
            return made

    return Allocator()


class Replay:
    """A CUDA graph of one run, with all memory that its launches use: execution context, inputs and outputs.

    Any thread may call it, on any stream. A replay begins after the results of the previous one are copied.
    """

    def __init__(
        self,
        place: Place,
        context: Context,
        own: Sequence[Tensor],
        outputs: Sequence[Tensor],
        launch: Callable[[], None],
    ) -> None:
        self._place, self._context = place, context
        self._own, self._outputs, self._launch = own, outputs, launch
        self._lane, self._lock = place.lane(), threading.Lock()

    def __call__(self, given: Sequence[Tensor]) -> list[Tensor]:
        """The outputs for inputs that have the engine's device, dtype and layout."""
        with self._lock:
            with self._lane.stream():
                for mine, tensor in zip(self._own, given, strict=True):
                    mine.copy_(tensor)
                self._launch()
                results = [output.clone() for output in self._outputs]
            self._place.keep_for_caller(results)
            return results

    def __del__(self) -> None:
        with suppress(Exception):  # CUDA may already be shut down at process exit
            self._place.synchronize()  # the last replay may still use the memory


@dataclass
class Graphs:
    """Recorded runs by shapes of the inputs; keeps the most recently used ones."""

    size: int
    _by_shapes: OrderedDict[Shapes, Recorded | None] = field(default_factory=OrderedDict)
    _reasons: dict[Shapes, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 0:
            raise EngineError(f"cuda_graphs expects a number of shapes, 0 for none, got {self.size!r}")

    def get(self, shapes: Shapes, record: Callable[[], Recorded | str]) -> Recorded | None:
        """The CUDA graph for these shapes, recorded on first use; None if it cannot be recorded."""
        with self._lock:
            if shapes not in self._by_shapes:
                made = record()
                if isinstance(made, str):
                    self._reasons[shapes] = made
                    logger.info("no CUDA graph for {}: {}", shapes, made)
                self._by_shapes[shapes] = None if isinstance(made, str) else made
                while len(self._by_shapes) > self.size:
                    self._reasons.pop(self._by_shapes.popitem(last=False)[0], None)
            self._by_shapes.move_to_end(shapes)
            return self._by_shapes[shapes]

    def info(self) -> dict[str, str]:
        """For each set of shapes ``recorded``, or the reason why recording failed."""
        return {
            ", ".join("x".join(map(str, shape)) for shape in shapes): self._reasons.get(shapes, "recorded")
            for shapes in self._by_shapes
        }

    def clear(self) -> None:
        """Forgets every CUDA graph."""
        with self._lock:
            self._by_shapes.clear()
