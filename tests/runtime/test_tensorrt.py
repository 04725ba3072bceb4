"""TensorRT engines, with a TensorRT that runs on the CPU (tests/tensorrt/reference)."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from onnx import TensorProto, helper
from torch._subclasses.fake_tensor import FakeTensorMode

import svexport
from svexport import BuildError, EngineError, UnsupportedError
from svexport.runtime.tensorrt import TensorRTEngine
from tests.tensorrt.models import Sampler, model_of
from tests.tensorrt.reference import VERSIONS, Host
from tests.tensorrt.reference.fixtures import Install, every_version
from tests.tensorrt.reference.runtime import Context as ReferenceContext


@pytest.fixture
def plan(files: Path, tmp_path: Path, tensorrt: Install) -> Path:
    """Of the sampler, built by 10.16.1."""
    tensorrt()
    svexport.build(files / "sampler.onnx", tmp_path / "m.engine").close()
    return tmp_path / "m.engine"


@every_version
def test_it_computes_what_the_file_does(files: Path, tmp_path: Path, tensorrt: Install, version: str) -> None:
    tensorrt(version)
    svexport.build(files / "sampler.onnx", tmp_path / "m.engine").close()
    expected = svexport.load(files / "sampler.onnx", device="cpu")
    with svexport.load(tmp_path / "m.engine") as engine:
        assert isinstance(engine, TensorRTEngine)
        assert engine.input_names == ["image", "grid"]
        assert str(engine.inputs[0]) == "float32[?, 3, 8, 8]"
        for batch in (1, 3, 8):
            image, grid = torch.randn(batch, 3, 8, 8), torch.rand(batch, 5, 5, 2)
            got, wanted = engine(image, grid=grid), expected(image, grid)
            for a, b in zip(got, wanted, strict=True):
                torch.testing.assert_close(a, b)
            assert got.keys() == wanted.keys() == ["scores", "sampled"]
            assert torch.equal(got["sampled"][1], got[2])


def test_outputs_are_the_callers_own(plan: Path) -> None:
    with svexport.load(plan) as engine:
        args = torch.randn(2, 3, 8, 8), torch.rand(2, 5, 5, 2)
        first = engine(*args)
        kept = [t.clone() for t in first]
        engine(-args[0], args[1])
        for a, b in zip(first, kept, strict=True):
            assert torch.equal(a, b)


def test_any_layout_of_inputs(plan: Path) -> None:
    image, grid = torch.randn(2, 3, 8, 8), torch.rand(2, 5, 5, 2)
    with svexport.load(plan) as engine:
        wanted = engine(image, grid)
        for other in (
            image.to(memory_format=torch.channels_last),
            image.clone().requires_grad_(),
            torch.stack([image, image], -1)[..., 1],
            torch._neg_view(-image),
        ):
            for a, b in zip(engine(other, grid), wanted, strict=True):
                assert torch.equal(a, b)
                assert not a.requires_grad


def test_sizes_it_was_not_built_for(plan: Path) -> None:
    with svexport.load(plan) as engine:
        with pytest.raises(EngineError, match=r"built for image: \[1, 3, 8, 8\] to \[8, 3, 8, 8\].*got image: \[9, "):
            engine(torch.ones(9, 3, 8, 8), torch.ones(9, 5, 5, 2))
        with pytest.raises(EngineError, match=r"expects float32\[\?, 3, 8, 8\]"):
            engine(torch.ones(1, 4, 8, 8), torch.ones(1, 5, 5, 2))
        with pytest.raises(EngineError, match="lacks the input 'grid'"):
            engine(torch.ones(1, 3, 8, 8))


def test_empty_tensors(tensorrt: Install) -> None:
    tensorrt()
    with svexport.build(model_of({"a": ["n", 3]}), shapes={"a": ((0, 3), (1, 3), (2, 3))}) as engine:
        assert engine(torch.ones(0, 3)).shape == (0, 3)
        assert torch.equal(engine(torch.ones(2, 3)), -torch.ones(2, 3))


@every_version
def test_sizes_that_follow_from_numbers(tensorrt: Install, version: str) -> None:
    """By an output allocator: the size is known when the run has ended."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("NonZero", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["z"])],
        "g",
        [value("x", TensorProto.FLOAT, [2, 3])],
        [value("y", TensorProto.INT64, [2, None]), value("z", TensorProto.FLOAT, [2, 3])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    tensorrt(version)
    with svexport.build(model) as engine:
        results = []
        for x in (torch.eye(2, 3), torch.zeros(2, 3), torch.ones(2, 3)):
            found, negated = engine(x)
            wanted = x.nonzero().T.to(torch.int32 if version == "8.6.1" else torch.int64)
            assert torch.equal(found, wanted)
            assert torch.equal(negated, -x)
            results.append((found, wanted))
        assert all(torch.equal(a, b) for a, b in results)  # memory of one run is not that of the next


def test_no_memory_for_an_output(tensorrt: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("NonZero", ["x"], ["y"])],
        "g",
        [value("x", TensorProto.FLOAT, [2])],
        [value("y", TensorProto.INT64, [1, None])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    tensorrt()

    def allocate(self: Host, size: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with svexport.build(model) as engine:
        monkeypatch.setattr(Host, "allocate", allocate)
        with pytest.raises(EngineError, match="no memory for an output: CUDA out of memory"):
            engine(torch.ones(2))


@pytest.mark.parametrize("kind", [torch.float16, torch.int32, torch.int8, torch.bool, torch.int64, torch.float64])
def test_types(tensorrt: Install, kind: torch.dtype) -> None:
    number = {torch.float16: 10, torch.int32: 6, torch.int8: 3, torch.bool: 9, torch.int64: 7, torch.float64: 11}[kind]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])], "g", [value("x", number, [2, 3])], [value("y", number, [2, 3])]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    for version in VERSIONS:
        tensorrt(version)
        with svexport.build(model, check=False) as engine:
            narrowed = {torch.float64: torch.float32} | ({torch.int64: torch.int32} if version == "8.6.1" else {})
            x = torch.tensor([[1, 0, 3], [4, 5, 6]]).to(narrowed.get(kind, kind))
            y = engine(x)
            assert y.dtype == x.dtype
            assert torch.equal(y, x)


# -------------------------------------------------------------------------------------------------- contexts, threads


@pytest.mark.parametrize("version", VERSIONS[:2])
def test_threads_each_have_a_context(files: Path, tmp_path: Path, tensorrt: Install, version: str) -> None:
    """Before 10 only because profiles are shared."""
    tensorrt(version)
    svexport.build(files / "sampler.onnx", tmp_path / "m.engine").close()
    with svexport.load(tmp_path / "m.engine") as engine:
        inputs = [(torch.randn(1 + i % 8, 3, 8, 8), torch.rand(1 + i % 8, 5, 5, 2)) for i in range(8)]
        wanted = [engine(*args) for args in inputs]
        wrong: list[Any] = []

        def work(i: int) -> None:
            for _ in range(25):
                for a, b in zip(engine(*inputs[i]), wanted[i], strict=True):
                    if not torch.equal(a, b):
                        wrong.append((i, a, b))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert 1 <= engine.info()["contexts"] <= 8


def test_a_context_that_failed_is_not_used_again(files: Path, tmp_path: Path, tensorrt: Install) -> None:
    trt = tensorrt()
    x = torch.ones(3, 4)
    with svexport.build(files / "scale.onnx", tmp_path / "m.engine") as engine:
        engine(x)
        trt.faults["execute"] = "an illegal memory access was encountered"
        with pytest.raises(EngineError, match=r"m\.engine failed in TensorRT: an illegal memory access"):
            engine(x)
        assert engine.info()["contexts"] == 0
        del trt.faults["execute"]
        assert torch.equal(engine(x), 2 * x + 1)
        trt.faults["context"] = "out of memory"
        assert torch.equal(engine(x), 2 * x + 1)  # the one that there is


def test_nothing_is_held_after_close(plan: Path, tensorrt: Install) -> None:
    trt = tensorrt()
    engine = svexport.load(plan)
    args = torch.randn(2, 3, 8, 8), torch.rand(2, 5, 5, 2)
    outputs = engine(*args)
    engine.close()
    engine.close()
    gc.collect()
    assert not list(trt.alive)
    assert outputs[0].shape == (2, 4)
    with pytest.raises(EngineError, match="closed"):
        engine(*args)
    for _ in range(3):
        with svexport.load(plan) as again:
            again(*args)
    gc.collect()
    assert not list(trt.alive)


# ------------------------------------------------------------------------------------------------------------- graphs


def test_runs_are_recorded_by_shape_and_the_last_ones_kept(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with svexport.load(plan) as plain, svexport.load(plan, cuda_graphs=2) as engine:
        made = []
        monkeypatch.setattr(Host, "capture", lambda self, run: (made.append(run), lambda: run(0))[1])
        for batch in (1, 2, 1, 2, 3, 1):
            args = torch.randn(batch, 3, 8, 8), torch.rand(batch, 5, 5, 2)
            results = [engine(*args), engine(*args)]
            for got in results:
                for a, b in zip(got, plain(*args), strict=True):
                    assert torch.equal(a, b)
            assert results[0][0].data_ptr() != results[1][0].data_ptr()
        assert len(made) == 4  # 1, 2, 3, and 1 again, which 3 had put out
        assert engine.info()["cuda_graphs"] == {
            "3x3x8x8, 3x5x5x2": "recorded",
            "1x3x8x8, 1x5x5x2": "recorded",
        }


def test_where_no_graph_is_recorded_it_says_why(
    files: Path, tmp_path: Path, tensorrt: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensorrt()
    svexport.build(files / "scale.onnx", tmp_path / "m.engine").close()

    def refuse(self: Any, run: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Host, "capture", refuse)
    x = torch.ones(3, 4)
    with svexport.load(tmp_path / "m.engine", cuda_graphs=1) as engine:
        assert torch.equal(engine(x), 2 * x + 1)
        assert "not permitted" in engine.info()["cuda_graphs"]["3x4"]


def test_a_graph_holds_what_its_launches_use(plan: Path, tensorrt: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Execution contexts own memory that a replay computes in; a graph of CUDA does not keep them."""
    trt = tensorrt()

    def capture(self: Host, run: Any) -> Any:
        run(0)
        return lambda: None

    monkeypatch.setattr(Host, "capture", capture)
    engine = svexport.load(plan, cuda_graphs=1)
    idle = contexts(trt)
    for batch in (1, 2, 3):
        engine(torch.randn(batch, 3, 8, 8), torch.rand(batch, 5, 5, 2))
        assert contexts(trt) == idle + 1
    engine.close()
    assert contexts(trt) == 0


def test_a_graph_that_there_is_no_memory_for(plan: Path, tensorrt: Install) -> None:
    trt = tensorrt()
    args = torch.randn(1, 3, 8, 8), torch.rand(1, 5, 5, 2)
    with svexport.load(plan, cuda_graphs=1) as engine, svexport.load(plan) as plain:
        trt.faults["context"] = "out of memory"
        assert torch.equal(engine(*args)[0], plain(*args)[0])
        assert "out of memory" in engine.info()["cuda_graphs"]["1x3x8x8, 1x5x5x2"]


@pytest.mark.parametrize("size", [-1, 1.5, "2", True, None])
def test_wrong_numbers_of_graphs(plan: Path, size: Any) -> None:
    with pytest.raises(EngineError, match="cuda_graphs expects a number of shapes"):
        svexport.load(plan, cuda_graphs=size)


# ------------------------------------------------------------------------------------------------------------- misuse


def contexts(trt: Any) -> int:
    gc.collect()
    return sum(isinstance(one, ReferenceContext) for one in trt.alive)


def test_what_failed_is_freed_though_its_error_is_kept(plan: Path, tensorrt: Install) -> None:
    """A notebook keeps the last one, with its frames."""
    trt = tensorrt()
    args = torch.randn(1, 3, 8, 8), torch.rand(1, 5, 5, 2)
    with svexport.load(plan) as engine:
        trt.faults["execute"] = "an illegal memory access was encountered"
        with pytest.raises(EngineError, match="illegal") as kept:
            engine(*args)
        assert contexts(trt) == 0
        del trt.faults["execute"]
        assert len(engine(*args)) == 3
        assert kept.tb is not None


def test_sizes_that_fit_no_profile_cost_no_context(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with svexport.load(plan) as engine:
        made: list[Any] = []
        monkeypatch.setattr(engine, "_new_context", lambda: made.append(1))
        for _ in range(3):
            with pytest.raises(EngineError, match="was built for"):
                engine(torch.ones(9, 3, 8, 8), torch.ones(9, 5, 5, 2))
        engine(torch.ones(1, 3, 8, 8), torch.ones(1, 5, 5, 2))
        assert not made


def test_what_torch_raises_in_a_run(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(self: Host, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    args = torch.randn(1, 3, 8, 8), torch.rand(1, 5, 5, 2)
    with svexport.load(plan) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(Host, "empty", empty)
            with pytest.raises(EngineError, match=r"failed on image: \[1, 3, 8, 8\], grid: .*: CUDA out of memory"):
                engine(*args)
        assert len(engine(*args)) == 3


def test_a_closed_engine_says_so(plan: Path) -> None:
    engine = svexport.load(plan)
    with engine:
        pass
    for call in (engine.info, engine.layers, lambda: engine.refit(plan)):
        with pytest.raises(EngineError, match="is closed"):
            call()
    with engine, pytest.raises(EngineError, match="is closed"):
        engine.profile(torch.ones(1, 3, 8, 8), torch.ones(1, 5, 5, 2))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(EngineError, match="not copied or pickled"):
            copied(engine)


def test_inputs_without_memory_of_their_own(plan: Path) -> None:
    image, grid = torch.randn(1, 3, 8, 8), torch.rand(1, 5, 5, 2)
    wrong = {
        "a FakeTensor, whose memory": FakeTensorMode().from_tensor(image),
        "a nested tensor": torch.nested.nested_tensor([image[0]], layout=torch.strided),
        "a meta tensor": image.to("meta"),
        "a sparse tensor": image.to_sparse(),
    }
    with svexport.load(plan) as engine:
        for said, given in wrong.items():
            with pytest.raises(EngineError, match=said):
                engine(given, grid)
        assert len(engine(image, grid)) == 3


def test_unusual_networks(tensorrt: Install) -> None:
    """No inputs, no axes, names that are no identifiers, very many outputs; none shares memory with another."""
    tensorrt()
    value = helper.make_tensor_value_info
    names = [f"out/{i}:0" for i in range(200)]
    graph = helper.make_graph(
        [helper.make_node("Mul", ["in/x:0", "c"], [name]) for name in names],
        "g/1",
        [value("in/x:0", TensorProto.FLOAT, [])],
        [value(name, TensorProto.FLOAT, [2]) for name in names],
        [helper.make_tensor("c", TensorProto.FLOAT, [2], [1, -2])],
    )
    opsets = [helper.make_opsetid("", 13)]
    with svexport.build(helper.make_model(graph, opset_imports=opsets, ir_version=8)) as engine:
        outputs = engine(**{"in/x:0": torch.tensor(3.0)})
        assert list(outputs.keys()) == names
        outputs[0].fill_(7)
        assert all(torch.equal(outputs[name], torch.tensor([3.0, -6.0])) for name in names[1:])
    alone = helper.make_graph(
        [helper.make_node("Neg", ["c"], ["y"])], "g", [], [value("y", TensorProto.FLOAT, [2])], graph.initializer
    )
    with svexport.build(helper.make_model(alone, opset_imports=opsets, ir_version=8)) as engine:
        assert torch.equal(engine(), torch.tensor([-1.0, 2.0]))


# ---------------------------------------------------------------------------------------------------------- untrusted


def test_paths_that_are_no_plan(tmp_path: Path, tensorrt: Install) -> None:
    tensorrt()
    os.mkfifo(tmp_path / "pipe.engine")
    os.mkfifo(tmp_path / "pipe.onnx")
    (tmp_path / "folder.engine").mkdir()
    for name, said in (("pipe", "is a pipe"), ("folder", "cannot read"), ("none", "cannot read"), ("a\0", "NUL")):
        with pytest.raises(EngineError, match=said):
            svexport.load(tmp_path / f"{name}.engine")
    with pytest.raises(EngineError, match="path of a plan, or its bytes, got int"):
        TensorRTEngine(5)  # type: ignore[arg-type]
    with pytest.raises(BuildError, match="is a pipe"):
        svexport.build(tmp_path / "pipe.onnx")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "0 bytes"),
        (b"ftrt", "4 bytes"),
        (b"\x08\x08" + bytes(100), "probably an ONNX file"),
        (b"PK\x03\x04" + bytes(100), "no TensorRT engine: it should begin with 'ftrt'"),
        (b"ftrt" + bytes(20) + bytes([8, 5, 3, 1]) + bytes(50), r"built by TensorRT 8\.5\.3\.1, this is 10\.16\.1\.9"),
        (
            b"ftrt" + bytes(20) + bytes([10, 16, 1, 9]) + bytes(50),
            "does not load .*built by TensorRT 10.*: Serial",
        ),
        (b"ftrt" + b"\x01" * 100, "does not load"),
    ],
)
def test_what_is_no_plan_of_this_version(tmp_path: Path, tensorrt: Install, content: bytes, said: str) -> None:
    trt = tensorrt()
    (tmp_path / "m.engine").write_bytes(content)
    with pytest.raises(EngineError, match=said):
        svexport.load(tmp_path / "m.engine")
    assert not list(trt.alive)


def test_a_plan_that_was_cut_short_or_changed(plan: Path) -> None:
    content = plan.read_bytes()
    for size in (29, 40, 200, len(content) // 2):
        plan.write_bytes(content[:size])
        with pytest.raises(EngineError, match="does not load"):
            svexport.load(plan)


def test_each_version_names_the_one_that_built_it(files: Path, tmp_path: Path, tensorrt: Install) -> None:
    trt = tensorrt("10.1.0")
    svexport.build(files / "scale.onnx", tmp_path / "m.engine").close()
    built = trt.__version__
    for version in ("8.6.1", "10.16.1", "11.4.0"):
        trt = tensorrt(version)
        with pytest.raises(EngineError, match=f"built by TensorRT {built}, this is {trt.__version__}"):
            svexport.load(tmp_path / "m.engine")


def test_code_in_a_plan_runs_only_if_trusted(plan: Path) -> None:
    for trusted in (False, True):
        with svexport.load(plan, trusted=trusted) as engine:
            assert engine._runtime.engine_host_code_allowed is trusted


def test_formats_that_torch_has_no_tensors_for(files: Path, tmp_path: Path, tensorrt: Install) -> None:
    trt = tensorrt(chw32="x")
    with pytest.raises(UnsupportedError, match=r"'x' of m\.engine is in the format 'Thirty-two wide"):
        svexport.build(files / "scale.onnx", tmp_path / "m.engine")
    gc.collect()
    assert not list(trt.alive)


def test_names_of_engines_that_say_nothing_of_outputs(tensorrt: Install) -> None:
    tensorrt()
    for name in ("g", '{"y": 0}x', '{"y": 3}', '{"a": {"b": ' * 20, "[0]", '{"y": true}', '{"y": 0, "z": 0}'):
        model = model_of({"a": [2]})
        model.graph.name = name
        with svexport.build(model) as engine:
            assert engine.returned is None
            assert isinstance(engine(torch.ones(2)), torch.Tensor)


# --------------------------------------------------------------------------------------------------- what it tells


def test_layers_are_timed_with_their_lines(files: Path, tmp_path: Path, tensorrt: Install) -> None:
    tensorrt()
    with svexport.build(files / "sampler.onnx", tmp_path / "m.engine") as engine:
        image, grid = Sampler.example_inputs
        for runs in (0, "a", True):
            with pytest.raises(EngineError, match="runs expects a number of runs from 1 on, got"):
                engine.profile(image, grid=grid, runs=runs)
        times = engine.profile(image, grid=grid, runs=4)
        assert [t.milliseconds for t in times] == [0.25] * len(engine.report.layers)
        [sampled] = [t for t in times if t.nodes == tuple(engine.report.plugins)]
        assert "models.py" in sampled.source
        with pytest.raises(EngineError, match="lacks the input"):
            engine.profile(image)


def test_compared_with_torch(files: Path, tmp_path: Path, tensorrt: Install) -> None:
    torch.manual_seed(0)
    model = Sampler().eval()
    tensorrt()
    with svexport.build(files / "sampler.onnx", tmp_path / "m.engine") as engine:
        comparison = svexport.compare(model, engine, model.example_inputs)
        assert comparison.ok
        assert len(comparison.outputs) == 3
        model.conv.weight.data[1] *= 1.1
        assert not svexport.compare(model, tmp_path / "m.engine", model.example_inputs).ok


def test_what_a_run_allocates_goes_with_its_outputs(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    plain = Host.empty

    def noted(self: Host, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        made = plain(self, shape, dtype)
        alive.add(made)
        return made

    monkeypatch.setattr(Host, "empty", noted)
    with svexport.load(plan) as engine:
        args = torch.randn(8, 3, 8, 8), torch.rand(8, 5, 5, 2)
        for _ in range(20):
            outputs = engine(*args)
            assert len(alive) <= 2 * len(outputs)
        del outputs
        assert not len(alive)


def test_the_default_stream_is_not_what_an_engine_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """On it TensorRT waits for the device: the lane takes one of its own, after and before the caller's."""
    from svexport.runtime import place

    said: list[Any] = []

    class Stream:
        def __init__(self, device: Any = None, number: int = 7) -> None:
            self.cuda_stream = number

        def wait_stream(self, other: Any) -> None:
            said.append((self.cuda_stream, "waits for", other.cuda_stream))

        def wait_event(self, event: Any) -> None:
            said.append((self.cuda_stream, "waits for event"))

    class Event:
        def record(self, stream: Any) -> None:
            said.append(("recorded on", stream.cuda_stream))

    current = Stream(number=0)
    fake = SimpleNamespace(
        Stream=Stream, Event=Event, current_stream=lambda device: current, stream=lambda s: nullcontext()
    )
    monkeypatch.setattr(place, "torch", SimpleNamespace(cuda=fake))
    lane = place._CudaLane(torch.device("cuda", 0))
    for _ in range(2):
        with lane.stream() as handle:
            assert handle == 7
    once = [(7, "waits for", 0), ("recorded on", 7), (0, "waits for", 7)]
    assert said == [*once, once[0], (7, "waits for event"), *once[1:]]
    current.cuda_stream, said[:] = 3, []
    with lane.stream() as handle:
        assert handle == 3
    assert said == [(3, "waits for event"), ("recorded on", 3)]
