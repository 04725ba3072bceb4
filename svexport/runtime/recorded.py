"""Records runs of ONNX Runtime on CUDA once per set of input shapes, and replays them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from svexport.runtime.context import Graphs, Recorded

if TYPE_CHECKING:
    import onnx

__all__ = ["Recorder", "Replays", "not_replayable"]

_RUNS = 3
"""ONNX Runtime records the third run, when its memory has reached its final size. Newer versions do all three runs in
the first call."""

_APART = 1e-2
"""Tolerance of a replay, relative to the largest number of a run: convolutions may use other algorithms. A wrong
recording differs more."""


class Replays(Protocol):
    """Replays a session's recorded run."""

    def replay(
        self, run: Callable[[], Any], own: Sequence[Tensor], given: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Copies the given inputs into the session's own, runs it, and returns copies of its outputs."""


class Recorder:
    """Records runs of one model.

    ONNX Runtime replays a recording only on the thread that recorded it, with the addresses and the memory of that run.
    Therefore each recording has its own session, inputs and outputs, which no other run changes, and one thread records
    and replays all of them.

    Args:
        size: maximum number of recordings (sets of input shapes); the most recently used ones are kept.
        session: makes a session that records, and the place where it replays.
        binding: binds inputs and outputs to a session.
        initialize: called first on the recording thread.
    """

    def __init__(
        self,
        size: int,
        session: Callable[[], tuple[Replays, Any]],
        binding: Callable[[Any, Sequence[Tensor], Sequence[Tensor]], Any],
        initialize: Callable[[], Any] | None = None,
    ) -> None:
        self._graphs = Graphs(size)
        self._session, self._binding = session, binding
        self._worker = ThreadPoolExecutor(1, "svexport-recorded", initialize)

    def get(self, tensors: Sequence[Tensor], compute: Callable[[Sequence[Tensor]], list[Tensor]]) -> Recorded | None:
        """A replay for inputs of these shapes, recorded on first use; None if recording is not possible.

        Args:
            tensors: inputs that have the engine's device, dtype and layout.
            compute: runs without recording, to compare a replay with.
        """
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        return self._graphs.get(shapes, lambda: self._record(tensors, compute))

    def info(self) -> dict[str, str]:
        """For each set of shapes ``recorded``, or the reason why recording failed."""
        return self._graphs.info()

    def close(self) -> None:
        """Drops all recordings and frees their memory."""
        self._graphs.clear()
        self._worker.shutdown()

    def _record(self, tensors: Sequence[Tensor], compute: Callable[[Sequence[Tensor]], list[Tensor]]) -> Recorded | str:
        expected = compute(tensors)  # an error here is the caller's: the run fails without recording too
        if not all(tensor.numel() for tensor in (*tensors, *expected)):
            return "an input or output is empty"
        try:
            place, session = self._session()
            if names := _read_on_host(session):
                return f"the numbers of {', '.join(names)} are read on the CPU in every run"
            own, outputs = [t.clone() for t in tensors], [torch.empty_like(t) for t in expected]
            binding = self._binding(session, own, outputs)

            def once() -> None:
                self._worker.submit(session.run_with_iobinding, binding).result()

            def run(given: Sequence[Tensor]) -> list[Tensor]:
                return place.replay(once, own, given, outputs)

            for _ in range(_RUNS):
                results = run(tensors)
            others = [_turned(tensor) for tensor in tensors]
            pairs = [*zip(results, expected, strict=True), *zip(run(others), compute(others), strict=True)]
        except Exception as error:  # noqa: BLE001 - whatever recording does not allow
            return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        if not all(_alike(*pair) for pair in pairs):
            return "a replay differs from a run, because of random numbers or what the CPU computes"
        return run


def not_replayable(model: onnx.ModelProto) -> str:
    """Why no run of a model can be replayed, as far as its nodes tell; empty if it may be possible."""
    from svexport.graph.walk import graphs

    names = {node.op_type for body in (model.graph, *model.functions) for graph in graphs(body) for node in graph.node}
    drawing = ", ".join(sorted(names & _RANDOM))
    return f"{drawing} would give the same random numbers in every replay" if drawing else ""


_RANDOM = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}


def _read_on_host(session: Any) -> list[str]:
    """Inputs that ONNX Runtime reads on the CPU, such as sizes; a replay would use their values of the recorded run.

    Raises:
        AttributeError: if this ONNX Runtime has no such query.
    """
    places = session.get_input_memory_infos()  # from 1.23 on
    return [value.name for value, place in zip(session.get_inputs(), places, strict=True) if place.name == "Cpu"]


def _turned(tensor: Tensor) -> Tensor:
    """A tensor with other numbers of the same range; integers are unchanged, because they may be indices."""
    return tensor.flatten().flip(0).view_as(tensor) if tensor.is_floating_point() else tensor


def _alike(actual: Tensor, expected: Tensor) -> bool:
    if not expected.is_floating_point():
        return torch.equal(actual, expected)
    finite = expected[expected.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(actual.double(), expected.double(), rtol=0.0, atol=_APART * largest, equal_nan=True)
