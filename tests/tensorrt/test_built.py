"""Level L6: what test_build.py and tests/runtime/test_tensorrt.py prove with a reference, by TensorRT itself."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import svexport
from svexport import BuildError
from tests.tensorrt.engines import EXAMPLES
from tests.tensorrt.models import BATCH, Sampler, exported
from tests.tensorrt.test_engines import TENSORRT

pytestmark = [
    *TENSORRT,
    pytest.mark.skipif(importlib.util.find_spec("tensorrt") is None, reason="TensorRT not installed"),
]
ROOT = Path(__file__).parents[2]


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

        def work() -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    x = torch.randn(2, 3, 8, 8, device="cuda")
                    y = plain(x, grid.expand(2, -1, -1, -1))["scores"]
                    if not torch.allclose(y, model.conv(x).relu().mean((2, 3)), rtol=1e-3, atol=1e-4):
                        wrong.append(y)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
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
