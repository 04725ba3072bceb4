"""Runs of ONNX Runtime on CUDA that are recorded once, by shapes of the inputs, and replayed."""

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
"""ONNX Runtime records the third run, as soon as its memory has the size that it keeps; newer ones do all three at
once."""

_APART = 1e-2
"""How far a replay may be from a run, of the largest number there: convolutions may be other ones. What was recorded
wrong is farther."""


class Replays(Protocol):
    """Where a session replays what it recorded."""

    def replay(
        self, run: Callable[[], Any], own: Sequence[Tensor], given: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Copies the given inputs to the session's own, runs it, and returns copies of its outputs."""


class Recorder:
    """Records runs of one model.

    ONNX Runtime replays what it recorded for the thread that ran it, at the addresses of that run, with what it had
    allocated for it. So each of them has a session, inputs and outputs of its own, which no other run changes, and all
    are made and replayed by one thread.

    Args:
        size: for how many shapes of the inputs, the last used ones.
        session: makes a session that records, and where it does.
        binding: binds inputs and outputs to a session.
        initialize: what the thread does first.
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
        """What replays a run on inputs of these shapes, recorded the first time; None where that cannot be.

        Args:
            tensors: where and as the engine reads them.
            compute: a run that is not recorded, which a replay is compared with.
        """
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        return self._graphs.get(shapes, lambda: self._record(tensors, compute))

    def info(self) -> dict[str, str]:
        """By shapes, ``recorded``, or why they could not be."""
        return self._graphs.info()

    def close(self) -> None:
        """Forgets what was recorded, and frees its memory."""
        self._graphs.clear()
        self._worker.shutdown()

    def _record(self, tensors: Sequence[Tensor], compute: Callable[[Sequence[Tensor]], list[Tensor]]) -> Recorded | str:
        expected = compute(tensors)  # what it raises is the caller's: it fails without a recording as well
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
            return "a replay has given something else than a run: random numbers, or what was computed on the CPU"
        return run


def not_replayable(model: onnx.ModelProto) -> str:
    """Why no run of a model can be replayed, as far as its nodes tell; empty where one may."""
    from svexport.graph.walk import graphs

    names = {node.op_type for body in (model.graph, *model.functions) for graph in graphs(body) for node in graph.node}
    drawing = ", ".join(sorted(names & _RANDOM))
    return f"{drawing} would give the same random numbers in every replay" if drawing else ""


_RANDOM = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}


def _read_on_host(session: Any) -> list[str]:
    """Inputs that ONNX Runtime reads on the CPU, as sizes for one: a replay would have those of the recorded run.

    Raises:
        AttributeError: by an ONNX Runtime that does not tell.
    """
    places = session.get_input_memory_infos()  # from 1.23 on
    return [value.name for value, place in zip(session.get_inputs(), places, strict=True) if place.name == "Cpu"]


def _turned(tensor: Tensor) -> Tensor:
    """Other numbers of the same range; integers, which may be indices, as they are."""
    return tensor.flatten().flip(0).view_as(tensor) if tensor.is_floating_point() else tensor


def _alike(actual: Tensor, expected: Tensor) -> bool:
    if not expected.is_floating_point():
        return torch.equal(actual, expected)
    finite = expected[expected.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(actual.double(), expected.double(), rtol=0.0, atol=_APART * largest, equal_nan=True)
