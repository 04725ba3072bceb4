"""The benchmark runner, as far as it runs without a GPU."""

from __future__ import annotations

import argparse
import json
import re
import sys
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from svexport.ops._op import as_tuple

pytest.importorskip("matplotlib")

from benchmarks import __main__ as runner
from benchmarks import _measure, models
from benchmarks.plot import plot


def row(ours: float, peer: float, minimum: float = 0.9) -> dict:
    times = {n: {"median": t, "min": t * minimum, "runs": 9} for n, t in (("ours", ours), ("torch", peer))}
    return {"module": "op", "workload": "op forward 1x2", "times": times, "peer": "torch", "ratio": ours / peer}


def test_slower_by_median_and_minimum() -> None:
    assert runner.is_slower(row(11, 10))
    assert not runner.is_slower(row(10.1, 10))  # within what two timings of one kernel differ by
    lucky = row(11, 10)
    lucky["times"]["ours"]["min"] = 8
    assert not runner.is_slower(lucky)


def test_line_says_whether_the_goal_is_met() -> None:
    assert " goal 0.500 MISSED " in runner.line({**row(6, 10), "goal": 0.5, "met": False})
    assert " limit 7.0 us met " in runner.line({**row(6, 10), "limit": 7.0, "met": True})


def test_whole_models_may_differ_as_the_original_does_and_take_no_more_memory(monkeypatch) -> None:
    def met(ours: float, again: float, memory: int) -> bool:
        medians = {"ours": ours, "original": 10.0, "original again": again}
        monkeypatch.setattr(runner, "eager_times", lambda calls, _: {n: {"median": medians[n]} for n in calls})
        monkeypatch.setattr(runner, "peak_memory", {"ours": memory, "original": 1000}.__getitem__)
        workload = runner.Workload("model", str, {"original": str}, goal=1.02, memory_goal=1.02, whole=True)
        return runner.measure(workload, {name: name for name in ("ours", "original")})["met"]

    assert met(10.2, 10, 1020)
    assert not met(10.3, 10, 1000)
    assert met(10.3, 10.2, 1000)
    assert met(10.3, 9.8, 1000)
    assert not met(10.0, 10, 1021)


def test_the_table_of_models_is_of_the_results() -> None:
    results = _measure.RESULTS / "nvidia-h200" / "models.json"
    notes = (Path(models.__file__).parent / "notes" / "models.md").read_text()
    lines = list(models.table(json.loads(results.read_text())["rows"]))
    assert "\n".join(lines) in notes, "python -m benchmarks.models benchmarks/results/nvidia-h200/models.json"
    assert len(lines) > 2 + len(models.EXAMPLES)


def test_unknown_module() -> None:
    with pytest.raises(SystemExit, match=r"expected names among .*; got nothing_here"):
        list(runner.modules(["nothing_here"]))


def test_every_module_has_workloads_or_a_main() -> None:
    with_workloads = {name for name, _ in runner.modules([])}
    assert {"grid_sample", "camera_sample", "ms_deform_attn"} <= with_workloads


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on CUDA."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def on_cpu(value):
            return "cpu" if isinstance(value, str) and value == "cuda" else value

        if function is torch.Tensor.cuda:
            return args[0]
        return function(*map(on_cpu, args), **{key: on_cpu(value) for key, value in (kwargs or {}).items()})


@pytest.mark.parametrize("name", [name for name, module in runner.modules([]) if hasattr(module, "sweep")])
def test_first_workload_of_the_sweep(name: str) -> None:
    """Ours and its first peer compute the same."""
    if name == "deform_conv2d":
        pytest.importorskip("torchvision", reason="its peer is torchvision, which is not installed")
    ((_, module),) = runner.modules([name])
    with OnCpu():
        workload = next(module.sweep())
        ours = as_tuple(workload.ours())
        # compiling takes half a minute, and F.grid_sample of few points in half is wrong on the CPU
        peers = [] if name in ("transformer_decoder", "ms_deform_attn") else list(workload.peers.values())
        expected = [as_tuple(peer()) for peer in peers[:1]]
    assert workload.bytes > 0
    assert all(x.isfinite().all() for x in ours)
    for others in expected:
        for actual, other in zip(ours, others, strict=False):  # inv_ex says more than inverse
            torch.testing.assert_close(actual, other, rtol=0, atol=1e-2)


@pytest.mark.parametrize("name", [name for name, module in runner.modules([]) if hasattr(module, "at_random")])
def test_shapes_at_random(name: str, monkeypatch) -> None:
    """A seed draws the same shapes again; ours and its first peer give results of the same shape and type."""
    if name == "deform_conv2d":
        pytest.importorskip("torchvision", reason="its peer is torchvision, which is not installed")
    monkeypatch.setattr("benchmarks._random.LARGEST", 3e4)
    for name_of in ("Stream", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name_of, MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    options = argparse.Namespace(random=60.0, seed=3, filter="", sweep=False)
    with OnCpu():
        workloads = list(islice(runner.chosen(name, options), 4))
        again = [w.name for w in islice(runner.chosen(name, options), 4)]
        for workload in workloads:
            ours = as_tuple(workload.ours())
            peers = [] if name == "ms_deform_attn" else [as_tuple(p()) for p in list(workload.peers.values())[:1]]
            for others in peers:
                for actual, other in zip(ours, others, strict=False):
                    assert actual.shape == other.shape
                    assert actual.dtype == other.dtype
    assert [w.name for w in workloads] == again
    assert len(set(again)) > 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, they do not fail")
def test_processes_that_fail(capfd) -> None:
    """They are left out, with their own words for it; nothing waits for them."""
    options = argparse.Namespace(
        sweep=False, random=None, filter="6x4x4 4 ", apart=60.0, compiled=None, replays=10, eager=False
    )
    with OnCpu():
        assert list(runner.apart("solve", options)) == []
    told = capfd.readouterr().err
    assert "CUDA" in told
    assert "solve 6x4x4 4 columns: failed" in told


def test_without_gpu(monkeypatch, capsys) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert runner.main([]) == 1
    assert "expected a CUDA GPU" in capsys.readouterr().err


def test_plot(tmp_path) -> None:
    """An overview with every op and direction, and for each file of workloads a picture beside it; none of a sweep."""
    record = {"device": "NVIDIA H200", "versions": {"torch": "2.11"}, "date": "2026-01-02"}
    (tmp_path / "gpu").mkdir()
    path, sweep = tmp_path / "gpu" / "op.json", tmp_path / "gpu" / "op-sweep.json"
    backward = {**row(4, 5), "workload": "op backward 3x4"}
    path.write_text(json.dumps({**record, "rows": [{**row(3, 10), "bytes": 10**7}, backward]}))
    sweep.write_text(json.dumps({**record, "date": "2026-01-04", "rows": [row(2, 5)]}))
    written = plot(path.parent)
    assert [str(p.relative_to(tmp_path)) for p in written] == ["gpu.png", "gpu.svg", "gpu/op.svg"]
    assert all(p.stat().st_size > 1000 for p in written)
    texts = [re.findall(r"<text[^>]*>([^<]*)</text>", p.read_text()) for p in written[1:]]
    assert {"op", "op, backward", "2.9x, 2, torch", "1.2x, 1, torch"} <= set(texts[0])
    assert "NVIDIA H200, torch 2.11, 2026-01-02 to 2026-01-04" in texts[0]
    assert {"op: NVIDIA H200, torch 2.11, 2026-01-02", "bytes floor", "svexport", "torch"} <= set(texts[1])
    first = [p.read_bytes() for p in written[1:]]
    assert [p.read_bytes() for p in plot(path.parent)[1:]] == first
    path.write_text(json.dumps({**record, "rows": [{"equation": "ab,bc->ac"}]}))
    sweep.unlink()
    with pytest.raises(ValueError, match="expected results written by python -m benchmarks"):
        plot(path.parent)


def test_command_in_the_record(monkeypatch) -> None:
    from benchmarks import _measure

    monkeypatch.setattr(sys, "argv", ["/x/benchmarks/__main__.py", "einsum"])
    assert _measure._module() == "benchmarks"
    monkeypatch.setattr(sys, "argv", ["/x/benchmarks/einsum.py"])
    assert _measure._module() == "benchmarks.einsum"


def test_models_whose_package_is_missing_are_left_out(monkeypatch, capsys) -> None:
    ((_, module),) = runner.modules(["models"])
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if name == "monai" else name)
    names = [workload.name for workload in module.workloads()]
    assert "monai_voxelmorph: left out: monai is not installed" in capsys.readouterr().err
    assert not any(name.startswith("monai") for name in names)
    assert {f"hf_swin batch {batch} half training eager" for batch in (1, 8, 32)} <= set(names)
    assert len(names) == len(set(names))


def test_what_the_gpu_has_no_room_for_is_left_out(monkeypatch, capsys) -> None:
    def prepare(workload: runner.Workload, _: object) -> dict:
        if workload.name == "large":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 99 GiB.")
        return {}

    made = [runner.Workload(name, int) for name in ("small", "large", "next")]
    monkeypatch.setattr(runner, "chosen", lambda *_: made)
    monkeypatch.setattr(runner, "prepare", prepare)
    monkeypatch.setattr(runner, "row_of", lambda name, workload, *_: {"workload": workload.name})
    rows = list(runner.one_by_one("models", argparse.Namespace(compiled=None)))
    assert [row["workload"] for row in rows] == ["small", "next"]
    assert "large: left out: CUDA out of memory" in capsys.readouterr().err
