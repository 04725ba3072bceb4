"""The benchmark runner, as far as it goes without a GPU."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import __main__ as runner
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


def test_unknown_module() -> None:
    with pytest.raises(SystemExit, match=r"expected names among .*; got nothing_here"):
        list(runner.modules(["nothing_here"]))


def test_every_module_has_workloads_or_a_main() -> None:
    with_workloads = {name for name, _ in runner.modules([])}
    assert {"grid_sample", "camera_sample", "ms_deform_attn"} <= with_workloads


def test_without_gpu(monkeypatch, capsys) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert runner.main([]) == 1
    assert "expected a CUDA GPU" in capsys.readouterr().err


def test_plot(tmp_path) -> None:
    record = {"device": "NVIDIA H200", "versions": {"torch": "2.11"}, "date": "2026-01-02"}
    (tmp_path / "gpu").mkdir()
    path = tmp_path / "gpu" / "op.json"
    path.write_text(json.dumps({**record, "rows": [{**row(3, 10), "bytes": 10**7}, row(4, 5)]}))
    written = plot(path.parent)
    assert [p.name for p in written] == ["gpu.png", "gpu.svg"]
    assert all(p.stat().st_size > 1000 for p in written)
    path.write_text(json.dumps({**record, "rows": [{"equation": "ab,bc->ac"}]}))
    with pytest.raises(ValueError, match="expected results written by python -m benchmarks"):
        plot(path.parent)


def test_command_in_the_record(monkeypatch) -> None:
    from benchmarks import _measure

    monkeypatch.setattr(sys, "argv", ["/x/benchmarks/__main__.py", "einsum"])
    assert _measure._module() == "benchmarks"
    monkeypatch.setattr(sys, "argv", ["/x/benchmarks/einsum.py"])
    assert _measure._module() == "benchmarks.einsum"
