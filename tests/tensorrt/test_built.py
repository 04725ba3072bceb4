"""Level L6: TensorRT itself confirms what test_build.py and tests/runtime/test_tensorrt.py prove with a reference."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import svexport
from svexport import BuildError, EngineError
from tests.support import in_threads
from tests.tensorrt.engines import EXAMPLES
from tests.tensorrt.models import BATCH, Sampler, exported, reshape_by_input
from tests.tensorrt.test_engines import TENSORRT

pytestmark = [
    *TENSORRT,
    pytest.mark.skipif(importlib.util.find_spec("tensorrt") is None, reason="TensorRT not installed"),
]
ROOT = Path(__file__).parents[2]
DEVICE = "cuda"


def moved(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cuda, value)


def target() -> str | None:
    """The installed version, where it takes bodies for plugins."""
    import tensorrt

    major, minor = tensorrt.__version__.split(".")[:2]
    return f"{major}.{minor}" if (int(major), int(minor)) < (10, 7) else None


@pytest.fixture
def sampler(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return exported(Sampler(), tmp_path / "m.onnx", dynamic_shapes=BATCH, target=target())


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From export to benchmark."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    model = importlib.import_module(name).model(**EXAMPLES[name]).eval().cuda()
    args = moved(tuple(model.example_inputs))
    file = tmp_path / "m.onnx"
    svexport.export(model.cpu(), tuple(model.example_inputs), file, opset=17, target=target())
    with svexport.build(file) as engine:
        assert engine.report is not None
        assert engine.report.layers
        assert svexport.compare(model.cuda(), engine, args).ok
        result = svexport.bench(model, [engine], args, runs=20)
        assert result.ok
        print(engine.report, result, sep="\n")


def test_sizes_threads_streams_and_graphs(sampler: Path) -> None:
    svexport.build(sampler).close()
    plan = sampler.with_suffix(".engine")
    model = exported_model()
    with svexport.load(plan) as plain, svexport.load(plan, cuda_graphs=4) as recorded:
        for batch in (1, 3, 8, 1):
            image, grid = torch.randn(batch, 3, 8, 8, device="cuda"), torch.rand(batch, 5, 5, 2, device="cuda")
            wanted = model(image, grid)
            for engine in (plain, recorded):
                got = engine(image, grid)
                torch.testing.assert_close(got["scores"], wanted["scores"], rtol=1e-3, atol=1e-4)
                torch.testing.assert_close(got["sampled"][0], wanted["sampled"][0], rtol=1e-3, atol=1e-4)
        assert set(recorded.info()["cuda_graphs"].values()) == {"recorded"}
        assert plain.profile(image, grid)
        wrong: list[Any] = []

        def work(_: int) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    x = torch.randn(2, 3, 8, 8, device="cuda")
                    y = plain(x, grid.expand(2, -1, -1, -1))["scores"]
                    if not torch.allclose(y, model.conv(x).relu().mean((2, 3)), rtol=1e-3, atol=1e-4):
                        wrong.append(y)

        in_threads(4, work)
        assert not wrong


def exported_model() -> Sampler:
    torch.manual_seed(0)
    return Sampler().eval().cuda().requires_grad_(False)


def test_sizes_that_follow_from_numbers(tmp_path: Path) -> None:
    class Found(torch.nn.Module):
        example_inputs = (torch.eye(3),)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.nonzero()

    exported(Found(), tmp_path / "m.onnx")
    with svexport.build(tmp_path / "m.onnx") as engine:
        for x in (torch.eye(3), torch.zeros(3, 3), torch.ones(3, 3)):
            assert torch.equal(engine(x.cuda()).cpu().long(), x.nonzero())


def test_builds_that_fail_or_are_cancelled_leave_nothing(sampler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from svexport.tensorrt import builder

    with pytest.raises(BuildError):
        svexport.build(sampler, workspace=1, optimization_level=0)
    assert not sampler.with_suffix(".engine").exists()
    if target() == "8.6":
        return  # which is not asked whether to go on

    def interrupt(name: str) -> None:
        if name.startswith("building:"):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(builder, "phase", interrupt)
    with pytest.raises(KeyboardInterrupt):
        svexport.build(sampler)
    assert not sampler.with_suffix(".engine").exists()


def test_weights_are_exchanged(sampler: Path, tmp_path: Path) -> None:
    with svexport.build(sampler, refit=True) as engine:
        engine.refit(sampler)
        image, grid = moved(Sampler.example_inputs)
        wanted = exported_model()(image, grid)
        torch.testing.assert_close(engine(image, grid)["scores"], wanted["scores"], rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------------------------------------------- builds


def wanted_of(batch: int, seed: int = 0) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Inputs of the sampler, and its scores."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(batch, 3, 8, 8, generator=generator).to(DEVICE)
    grid = (torch.rand(batch, 5, 5, 2, generator=generator) * 2 - 1).to(DEVICE)
    torch.manual_seed(0)
    model = Sampler().eval().to(DEVICE).requires_grad_(False)
    return (image, grid), model(image, grid)["scores"]


def close(engine: Any, batch: int = 2, seed: int = 0) -> None:
    args, wanted = wanted_of(batch, seed)
    torch.testing.assert_close(engine(*args)["scores"], wanted, rtol=1e-3, atol=1e-4)


def test_timings_are_kept(sampler: Path, tmp_path: Path) -> None:
    cache = tmp_path / "timings"
    for content in (None, None, b"garbage" * 100):
        if content is not None:
            cache.write_bytes(content)
        with svexport.build(sampler, timing_cache=cache) as engine:
            close(engine)
            assert engine.report is not None
            assert any("measured anew" in note for note in engine.report.notes) == (content is not None)
        assert cache.stat().st_size > 0
        assert cache.read_bytes() != content


@pytest.mark.parametrize(
    "options",
    [
        {"version_compatible": True},
        {"hardware_compatibility": "ampere+"},
        {"optimization_level": 0},
        {"workspace": "64M"},
        {"tf32": True},
        {"timing_cache": False, "check": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options(sampler: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    svexport.build(sampler, tmp_path / "m.plan", **options).close()
    with svexport.load(tmp_path / "m.plan", trusted="version_compatible" in options) as engine:
        args, wanted = wanted_of(3)
        loose = {"rtol": 1e-2, "atol": 1e-2} if "tf32" in options else {"rtol": 1e-3, "atol": 1e-4}
        torch.testing.assert_close(engine(*args)["scores"], wanted, **loose)


def test_weights_are_left_out(tmp_path: Path) -> None:
    class Wide(nn.Linear):
        example_inputs = (torch.ones(2, 512),)

    model = Wide(512, 512)
    exported(model, tmp_path / "m.onnx")
    if target() == "8.6":
        with pytest.raises(svexport.UnsupportedError, match="needs TensorRT 10"):
            svexport.build(tmp_path / "m.onnx", strip_weights=True)
        return
    svexport.build(tmp_path / "m.onnx", tmp_path / "whole.plan").close()
    svexport.build(tmp_path / "m.onnx", tmp_path / "thin.plan", strip_weights=True).close()
    assert (tmp_path / "thin.plan").stat().st_size < (tmp_path / "whole.plan").stat().st_size - 500_000
    x = torch.randn(2, 512)
    with svexport.load(tmp_path / "thin.plan", refit=tmp_path / "m.onnx") as engine:
        torch.testing.assert_close(engine(x.to(DEVICE)).cpu(), model(x).detach(), rtol=1e-3, atol=1e-4)


def test_int8(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3)).eval()
    x = torch.randn(2, 3, 16, 16)
    quantized = svexport.quantize(model, [x])
    svexport.export(quantized, (x,), tmp_path / "m.onnx", opset=17)
    with svexport.build(tmp_path / "m.onnx") as engine:
        got, wanted = engine(x.to(DEVICE)).cpu(), quantized(x).detach()
        assert (got - wanted).abs().max() < 0.02 * wanted.abs().max()  # steps, at which a rounding error is another one
        assert engine.report is not None
        assert any("INT8" in str(layer).upper() for layer in engine.report.layers)


def test_numbers_that_are_sizes() -> None:
    model = reshape_by_input()
    with svexport.build(model, check=False, values={"size": ((1, 1), (3, 4), (12, 12))}) as engine:
        x = torch.arange(12.0, device=DEVICE)
        for size in ((4, 3), (1, 12), (12, 1), (2, 6)):
            assert torch.equal(engine(x, torch.tensor(size, dtype=engine.inputs[1].dtype)), x.reshape(size))


def test_the_command_builds_the_same(sampler: Path, tmp_path: Path) -> None:
    if shutil.which("trtexec") is None:
        pytest.skip("no trtexec")
    with svexport.build(sampler, tmp_path / "m.plan") as engine:
        assert engine.report is not None
        command = engine.report.trtexec
    (tmp_path / "m.plan").unlink()
    subprocess.run(shlex.split(command), check=True, capture_output=True, timeout=900)
    with svexport.load(tmp_path / "m.plan") as engine:
        close(engine)


# --------------------------------------------------------------------------------------------------------------- runs


def test_recorded_runs_of_many_threads(sampler: Path, tmp_path: Path) -> None:
    """On streams of their own, in more shapes than are kept, while others allocate."""
    svexport.build(sampler, tmp_path / "m.plan").close()
    cases = [wanted_of(batch, seed=batch) for batch in (1, 2, 5)]
    wrong: list[Any] = []
    with svexport.load(tmp_path / "m.plan", cuda_graphs=2) as engine:

        def work(number: int) -> None:
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    for i in range(60):
                        args, wanted = cases[(number + i) % 3]
                        shift = torch.full((), float(i), device=DEVICE)
                        got = engine(args[0] + shift - shift, args[1])["scores"]
                        if not torch.allclose(got, wanted, rtol=1e-3, atol=1e-3):
                            wrong.append((number, i))
            except BaseException as error:  # noqa: BLE001 - raised where the test waits
                wrong.append(error)

        in_threads(4, work)
        assert set(engine.info()["cuda_graphs"].values()) == {"recorded"}
    assert not wrong


def test_it_runs_after_errors(sampler: Path, tmp_path: Path) -> None:
    svexport.build(sampler, tmp_path / "m.plan").close()
    engine = svexport.load(tmp_path / "m.plan")
    (image, grid), _ = wanted_of(9)
    for args, said in (((image, grid), "was built for"), ((image[:2], grid[:3]), "failed|does not take|refuses")):
        with pytest.raises(EngineError, match=said):
            engine(*args)
        close(engine)
    engine.close()
    with pytest.raises(EngineError, match="is closed"):
        engine(image[:1], grid[:1])


def test_plans_that_were_cut_short_or_changed(sampler: Path, tmp_path: Path) -> None:
    svexport.build(sampler, tmp_path / "m.plan").close()
    content = (tmp_path / "m.plan").read_bytes()
    changed = content[:24] + bytes([99]) + content[25:]
    for other in (content[: len(content) // 2], content[:40], changed):
        (tmp_path / "m.plan").write_bytes(other)
        with pytest.raises(EngineError, match="does not load"):
            svexport.load(tmp_path / "m.plan")


# ------------------------------------------------------------------------------------------ compared, reduced, served


def test_the_first_bad_module_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3)).eval()
    x = torch.randn(1, 3, 16, 16)
    svexport.export(model, (x,), tmp_path / "m.onnx", opset=17)
    with svexport.build(tmp_path / "m.onnx") as engine:
        model, x = model.to(DEVICE), x.to(DEVICE)
        assert svexport.compare(model, engine, (x,), layers=True).ok
        with torch.no_grad():
            model[2].weight[1] *= 1.5
        found = svexport.compare(model, engine, (x,), layers=True)
        assert not found.ok
        assert found.first is not None
        assert found.first.name == "2"


def test_what_does_not_build_is_reduced(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info
    nodes = [helper.make_node("Relu", [f"x{i}"], [f"x{i + 1}"], f"n{i}") for i in range(8)]
    nodes[5].op_type = "NoSuchOperator"
    graph = helper.make_graph(
        nodes, "g", [value("x0", TensorProto.FLOAT, [2, 3])], [value("x8", TensorProto.FLOAT, [2, 3])],
        value_info=[value(f"x{i}", TensorProto.FLOAT, [2, 3]) for i in range(1, 8)],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    found = svexport.reduce(model, "build", tmp_path / "small.onnx")
    assert found.nodes == [("n5", "NoSuchOperator")]
    assert [node.name for node in onnx.load(tmp_path / "small.onnx").graph.node] == ["n5"]


def test_it_is_served(sampler: Path, tmp_path: Path) -> None:
    shapes = {"image": ((1, 3, 8, 8), (2, 3, 8, 8), (6, 3, 8, 8))}
    svexport.build(sampler, tmp_path / "m.plan", shapes=shapes).close()
    made = svexport.triton_repository(tmp_path / "models", tmp_path / "m.plan")
    assert made.models["m"]["max_batch_size"] == 6
    assert (tmp_path / "models/m/1/model.plan").read_bytes() == (tmp_path / "m.plan").read_bytes()
