"""Recorded runs of ONNX Runtime, with CPU sessions that, like CUDA graphs, keep the buffers of the third run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor

from svexport.runtime import OnnxEngine
from svexport.runtime.recorded import Recorder, not_replayable
from svexport.runtime.session import _binding
from tests.support import in_threads

node, value = helper.make_node, helper.make_tensor_value_info


def model_of(nodes: Sequence[onnx.NodeProto], **shapes: Sequence[Any]) -> onnx.ModelProto:
    """Of float32 inputs with these shapes and outputs ``y`` and ``count``, of a shape that follows."""
    inputs = [value(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    outputs = [value("y", TensorProto.FLOAT, None), value("count", TensorProto.INT64, None)]
    graph = helper.make_graph(list(nodes), "graph", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


MODEL = model_of(
    [
        node("MatMul", ["a", "b"], ["product"]),
        node("Tanh", ["product"], ["y"]),
        node("ArgMax", ["product"], ["count"], axis=-1),
    ],
    a=["n", 5],
    b=[5, 7],
)


class Session:
    """Of ONNX Runtime on the CPU; ``fault`` is what goes wrong once a run is recorded."""

    def __init__(self, model: onnx.ModelProto, fault: str = "") -> None:
        self.own = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        self.fault, self.runs = fault, 0
        self.threads: set[int] = set()
        self.io_binding, self.get_inputs = self.own.io_binding, self.own.get_inputs

    def get_input_memory_infos(self) -> list[Any]:
        return [SimpleNamespace(name="Cpu" if self.fault == value.name else "Cuda") for value in self.get_inputs()]

    def run_with_iobinding(self, binding: Any) -> None:
        self.threads.add(threading.get_ident())
        self.runs += 1
        if self.fault == "refused" and self.runs == 3:
            raise RuntimeError("CUDA failure 900: operation not permitted when stream is capturing")
        if not (self.fault == "kept" and self.runs > 3):
            self.own.run_with_iobinding(binding)


class Place:
    """In the place of a stream; one run at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def replay(
        self, run: Callable[[], Any], own: Sequence[Tensor], given: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> list[Tensor]:
        with self._lock:
            for mine, tensor in zip(own, given, strict=True):
                mine.copy_(tensor)
            run()
            return [output.clone() for output in outputs]


def recorded(size: int = 2, fault: str = "", model: onnx.ModelProto = MODEL) -> tuple[OnnxEngine, list[Session]]:
    """An engine that records, and the sessions that it makes for it."""
    engine, sessions = OnnxEngine(model, device="cpu"), []

    def make() -> tuple[Place, Session]:
        sessions.append(Session(model, fault))
        return Place(), sessions[-1]

    def bind(session: Session, own: Sequence[Tensor], outputs: Sequence[Tensor]) -> Any:
        return _binding(engine.inputs, engine.outputs, engine.device, session, own, outputs)

    engine._recorder, engine._feeds = Recorder(size, make, bind), None  # as on CUDA
    return engine, sessions


def inputs(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 5), torch.randn(5, 7)


def check(engine: OnnxEngine, a: Tensor, b: Tensor) -> None:
    y, count = engine(a, b)
    product = a.double() @ b.double()
    torch.testing.assert_close(y.double(), product.tanh(), rtol=1e-5, atol=1e-6)
    assert torch.equal(count.flatten(), product.argmax(-1))


def test_runs_are_replayed_by_shape_and_the_last_ones_kept() -> None:
    engine, sessions = recorded()
    for n in (1, 2, 1, 2, 3, 1):
        check(engine, *inputs(n))
        check(engine, *inputs(n))
    assert len(sessions) == 4  # 1, 2, 3, and 1 again, which 3 had put out
    assert engine.info()["cuda_graphs"] == {"3x5, 5x7": "recorded", "1x5, 5x7": "recorded"}
    assert {thread for session in sessions for thread in session.threads} - {threading.get_ident()}
    assert len({thread for session in sessions for thread in session.threads}) == 1


def test_outputs_are_the_callers_own() -> None:
    engine, _ = recorded()
    (a, b), (c, d) = inputs(4), inputs(4)
    first = engine(a, b)
    kept = [t.clone() for t in first]
    second = engine(c, d)
    assert all(torch.equal(*pair) for pair in zip(first, kept, strict=True))
    assert not torch.equal(first[0], second[0])
    first[0].fill_(9)
    check(engine, a, b)


def test_threads() -> None:
    engine, sessions = recorded()
    wrong: list[BaseException] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for i in range(50):
                check(engine, torch.randn(1 + i % 2, 5, generator=generator), torch.randn(5, 7, generator=generator))
        except BaseException as error:  # noqa: BLE001 - raised where the test waits
            wrong.append(error)

    in_threads(4, work)
    assert not wrong
    assert len(sessions) == 2


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("b", "the numbers of b are read on the CPU in every run"),
        ("refused", "CUDA failure 900: operation not permitted when stream is capturing"),
        ("kept", "a replay differs from a run"),
    ],
)
def test_where_none_is_recorded_it_says_why_and_runs(fault: str, said: str) -> None:
    engine, sessions = recorded(fault=fault)
    for _ in range(3):
        check(engine, *inputs(3))
    assert len(sessions) == 1  # it is not tried again
    [reason] = engine.info()["cuda_graphs"].values()
    assert said in reason


def test_a_runtime_that_does_not_tell_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Session, "get_input_memory_infos")
    engine, _ = recorded()
    check(engine, *inputs(3))
    [reason] = engine.info()["cuda_graphs"].values()
    assert "get_input_memory_infos" in reason


def test_empty_tensors() -> None:
    engine, _ = recorded()
    check(engine, *inputs(0))
    assert engine.info()["cuda_graphs"] == {"0x5, 5x7": "an input or output is empty"}


def test_nodes_that_draw_are_found_wherever_they_are() -> None:
    assert not_replayable(MODEL) == ""
    drawing = [node("RandomNormalLike", ["a"], ["noise"]), node("Add", ["a", "noise"], ["y"])]
    plain = model_of([*drawing, node("ArgMax", ["a"], ["count"])], a=[3])
    assert "RandomNormalLike would give the same random numbers" in not_replayable(plain)
    opsets = [helper.make_opsetid("", 17)]
    called = model_of([node("Noisy", ["a"], ["y"], domain="own"), node("ArgMax", ["a"], ["count"])], a=[3])
    called.functions.append(helper.make_function("own", "Noisy", ["a"], ["y"], drawing, opsets))
    assert "RandomNormalLike" in not_replayable(called)


def test_what_a_run_raises_is_not_hidden() -> None:
    """It fails without a recording as well."""
    engine, _ = recorded(model=model_of([*MODEL.graph.node], a=["n", "k"], b=["j", 7]))
    with pytest.raises(Exception, match="failed in ONNX Runtime"):
        engine(torch.randn(2, 4), torch.randn(5, 7))


def test_close_ends_its_thread() -> None:
    engine, sessions = recorded()
    check(engine, *inputs(2))
    assert engine._recorder is not None
    engine._recorder.close()
    [worker] = sessions[0].threads
    assert worker not in {thread.ident for thread in threading.enumerate()}
    assert engine.info()["cuda_graphs"] == {}
