"""The GPU that a TensorRT engine runs on: memory, streams and graphs, through torch. All CUDA calls are here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from svexport.errors import BackendNotAvailableError, EngineError, UnsupportedError

__all__ = ["Cuda", "Lane", "Place", "cuda"]


class Lane(Protocol):
    """Serializes the runs of one execution context, whatever streams the callers use."""

    def stream(self) -> AbstractContextManager[int]:
        """A stream ordered after earlier work on the caller's stream, and before later work on it."""


class Place(Protocol):
    """The device interface that recorded runs need; see :class:`Cuda`."""

    def lane(self) -> Lane:
        """A new lane on the device."""

    def keep_for_caller(self, tensors: Sequence[Tensor]) -> None:
        """Hands memory that was allocated on the lane's stream over to the caller's stream."""

    def synchronize(self) -> None:
        """Waits for all work on the device."""


class _CudaLane:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own: torch.cuda.Stream | None = None
        self._done = torch.cuda.Event()
        self._ran = False

    @contextmanager
    def stream(self) -> Iterator[int]:
        current = torch.cuda.current_stream(self._device)
        used = current
        if not current.cuda_stream:  # on the default stream TensorRT synchronizes the whole device
            if self._own is None:
                self._own = torch.cuda.Stream(self._device)
            used = self._own
            used.wait_stream(current)
        if self._ran:
            used.wait_event(self._done)
        try:
            with torch.cuda.stream(used):
                yield used.cuda_stream
        finally:
            self._done.record(used)
            self._ran = True
            if used is not current:
                current.wait_stream(used)


class Cuda:
    """A CUDA device.

    Attributes:
        device: the torch device.
        name: name of the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = torch.cuda.get_device_name(device)

    def active(self) -> AbstractContextManager[Any]:
        """Makes this the current device."""
        return torch.cuda.device(self.device)

    def lane(self) -> Lane:
        """A new lane on the device."""
        return _CudaLane(self.device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocates memory for an output, on the caller's stream."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def allocate(self, size: int) -> Tensor:
        """Allocates bytes for an output whose size is known only while the engine runs, on the engine's stream."""
        return torch.empty(max(size, 1), dtype=torch.uint8, device=self.device)

    def keep_for_caller(self, tensors: Sequence[Tensor]) -> None:
        """Hands memory that a run allocated on its own stream over to the caller's stream."""
        stream = torch.cuda.current_stream(self.device)
        for tensor in tensors:
            tensor.record_stream(stream)

    def synchronize(self) -> None:
        """Waits for all work on the device."""
        torch.cuda.synchronize(self.device)

    def capture(self, run: Callable[[int], None]) -> Callable[[], None]:
        """Captures what ``run`` enqueues on a stream; the returned function replays it on torch's current stream."""
        run_on = torch.cuda.Stream(self.device)
        run_on.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(run_on):
            run(run_on.cuda_stream)  # warm up, so that first-use allocations are not captured
        run_on.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile; in the default mode that would fail in both threads.
        with torch.cuda.graph(graph, stream=run_on, capture_error_mode="thread_local"):
            run(run_on.cuda_stream)
        return graph.replay


def cuda(device: str | torch.device | None) -> Cuda:
    """The requested CUDA device; by default torch's current one.

    Raises:
        EngineError: if ``device`` is not the name of a device.
        UnsupportedError: on another kind of device.
        BackendNotAvailableError: if torch sees no such GPU.
    """
    try:
        found = torch.device("cuda" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise EngineError(f'device expects "cuda" or "cuda:1", got {device!r}') from error
    if found.type != "cuda":
        raise UnsupportedError(f'engines of TensorRT run on "cuda", not on {str(device)!r}; ONNX files run on the CPU')
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count <= (found.index or 0):
        raise BackendNotAvailableError(
            f"engines of TensorRT need a GPU, and torch sees {count} here, none of them {str(found)!r}; see "
            "nvidia-smi, and that torch is built for CUDA (svexport doctor), or run the ONNX file on the CPU"
        )
    return Cuda(torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index))
