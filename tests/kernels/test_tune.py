"""Tuning: which timed tactic wins, where it is kept, and that the planner takes it. The timings here are made up."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import svexport.ops
from svexport.errors import BackendNotAvailableError, UnsupportedError
from svexport.kernels import planner, shapes, tune
from svexport.ops import _cuda, _winners
from tests.csrc import CXX, built

pytestmark = pytest.mark.skipif(not CXX, reason="needs g++")

NORM, GPU = "add_bias_residual_layer_norm", planner.GPUS["h200"]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, but for what is compiled already."""
    planner.problems()
    if torch.cuda.is_available():
        _cuda.load()
    monkeypatch.setenv("SVEXPORT_CACHE", str(tmp_path))


class Kernels:
    """Operators that choose tactics for these problems, and do nothing."""

    def __init__(self, *problems: tuple[str, Mapping[str, int]]) -> None:
        self.problems, self.forced, self.on = problems, {}, False

    def _watch_problems(self, on: bool) -> list[str]:
        was, self.on = self.on, on
        return [" ".join(map(str, (op, *p.values()))) for op, p in self.problems] if was and not on else []

    def _force_tactic(self, op: str, tactic: int) -> None:
        self.forced[op] = tactic

    def _add_winners(self, lines: list[str]) -> None:
        """Asked where the kernels are loaded."""


def tuned(monkeypatch: pytest.MonkeyPatch, problem: dict[str, int], fastest: int, saves: float) -> tune.Tuned:
    """Of which one tactic takes that much less than all others."""
    kernels = Kernels((NORM, problem))
    monkeypatch.setattr(torch.ops, "svexport", kernels)
    monkeypatch.setattr(planner, "this_gpu", lambda: GPU)
    seen: dict[str, int] = {}

    def timer(calls: Mapping[str, Any]) -> dict[str, float]:
        for call in calls.values():
            call()
        return {name: 100.0 * (1 - saves) if int(name) == fastest else 100.0 for name in calls}

    found = tune.tune(lambda: seen.setdefault(str(kernels.forced.get(NORM, 0)), 1), timer)
    assert set(seen) == {"0", *(str(t) for t in found.times)}, "every tactic is forced while it is timed"
    assert kernels.forced == {NORM: 0}, "and none afterwards"
    return found


def problem_of(rows: int) -> dict[str, int]:
    return {**planner.problems()[NORM], "rows": rows, "columns": 256}


def test_the_fastest_is_kept_and_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(random.randint(1, 99_999))
    plan = planner.plan(NORM, GPU, **problem)
    other = random.choice([t for t in plan.tactics if t != plan.chosen])
    one = tuned(monkeypatch, problem, other.id, 0.5)
    assert (one.op, one.problem, one.chosen, one.winner) == (NORM, problem, plan.chosen, other)
    assert set(one.times) == {t.id for t in plan.tactics}
    file = tune.keep(GPU.name, [one])
    assert planner.plan(NORM, GPU, **problem) == planner.Plan(other, plan.tactics, True)
    assert planner.by_cost(NORM, GPU, **problem) == plan
    assert planner.plan(NORM, planner.GPUS["t4"], **problem).timed is False, "of another GPU"
    assert planner.plan(NORM, GPU, **{**problem, "rows": 100_000}).timed is False, "of another size"

    again, more = tuned(monkeypatch, problem, plan.chosen.id, 0.5), tuned(monkeypatch, problem_of(100_000), 1, 0.5)
    assert tune.keep(GPU.name, [again, more]) == file
    rows = json.loads(file.read_text())["winners"][NORM]
    assert [r["problem"]["rows"] for r in rows] == [problem["rows"], 100_000]
    assert planner.plan(NORM, GPU, **problem).chosen == plan.chosen


def test_what_saves_next_to_nothing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(900)
    plan = planner.plan(NORM, GPU, **problem)
    other = next(t for t in plan.tactics if t != plan.chosen)
    assert tuned(monkeypatch, problem, other.id, tune.LEAST / 2).winner == plan.chosen
    assert tuned(monkeypatch, problem, other.id, tune.LEAST * 2).winner == other


def test_a_call_chooses_one_tactic(monkeypatch: pytest.MonkeyPatch) -> None:
    for problems, message in (((), "none"), (((NORM, problem_of(1)), (NORM, problem_of(2))), "2")):
        monkeypatch.setattr(torch.ops, "svexport", Kernels(*problems))
        with pytest.raises(UnsupportedError, match=f"chooses one tactic, got one that chooses {message}"):
            tune.tune(lambda: None, lambda calls: {})


def test_calls_of_a_model_are_tuned_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    x, other = torch.randn(2, 3, 8), torch.randn(2, 3, 16)
    asked: list[torch.Size] = []

    def tuned(call: Any, timer: Any) -> tune.Tuned:
        asked.append(call.args[0].shape)
        if len(asked) == 2:
            raise UnsupportedError("no choice")
        plan = planner.by_cost(NORM, GPU, **problem_of(7))
        return tune.Tuned(NORM, problem_of(7), plan.chosen, plan.tactics[-1], {})

    monkeypatch.setattr(tune, "needed", lambda: GPU)
    monkeypatch.setattr(tune, "tune", tuned)
    expected = svexport.ops.fast_sigmoid(x).square()
    with tune.Tuning() as tuning:
        for one in (x, x.clone(), other):
            result = svexport.ops.fast_sigmoid(one).square()
            assert one is other or torch.equal(result, expected)
    assert asked == [x.shape, other.shape]
    assert [t.problem["rows"] for t in tuning.tuned] == [7]
    assert planner.plan(NORM, GPU, **problem_of(7)).timed


def test_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the package, by how a device's name begins; those of the cache go before, and what is none is left out."""
    folder = tmp_path / "tables"
    folder.mkdir()
    monkeypatch.setattr(_winners, "TABLES", folder)

    def row(rows: int, tactic: int) -> dict[str, Any]:
        return {"problem": problem_of(rows), "tactic": tactic}

    for gpu, rows in {"NVIDIA H200": [row(1, 5), row(2, 6)], "NVIDIA H100": [row(3, 7)]}.items():
        (folder / f"{gpu[-4:]}.json").write_text(json.dumps({"gpu": gpu, "figures": {}, "winners": {NORM: rows}}))
    (folder / "default.json").write_text('{"gpu": "default", "figures": {}}')
    assert _winners.read("NVIDIA H200 NVL") == {NORM: [row(1, 5), row(2, 6)]}
    _winners.write("NVIDIA H200", {NORM: [row(2, 8)], "einsum": [row(4, 9)]})
    assert _winners.read("NVIDIA H200") == {NORM: [row(1, 5), row(2, 8)], "einsum": [row(4, 9)]}
    assert [_winners.winner("NVIDIA H200", NORM, problem_of(rows)) for rows in (1, 2, 3)] == [5, 8, 0]
    for text in ("{", '{"gpu": "NVIDIA H200", "winners": {"einsum": [{"tactic": 3}]}}', "[]"):
        _winners.path("NVIDIA H200").write_text(text)
        with pytest.warns(UserWarning, match="is no table of tactics, and left out"):
            assert _winners.read("NVIDIA H200") == {NORM: [row(1, 5), row(2, 6)]}


def test_kernels_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[list[str]] = []
    monkeypatch.setattr(torch.ops, "svexport", SimpleNamespace(_add_winners=lines.append))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", ["NVIDIA H200", "NVIDIA A10"].__getitem__)
    monkeypatch.setattr(torch.cuda, "device", lambda device: pytest.MonkeyPatch.context())
    _winners.write("NVIDIA H200", {"op": [{"problem": {"a": 3, "b": 7}, "tactic": 5}]})
    _winners.tell()
    assert lines == [["op 3 7 5"]]


def test_launchers_take_winners() -> None:
    """Theirs is the choice of tuned.h, whose keys tell problems and GPUs apart."""
    source = Path(__file__).parent / "winners.cpp"
    flags = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{_cuda.CSRC / 'cuda'}")
    program = built("winners", (CXX, *flags, source), [source])
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("op", tune.NAMED)
def test_named_shapes_are_of_planned_ops(op: str) -> None:
    assert set(tune.NAMED) == set(shapes.SHAPES)
    for shape, backward in tune.NAMED[op]:
        assert planner.plan(op, GPU, **shapes.problem(op, shape, "float16", backward=backward)).tactics


SMALL = {
    NORM: (3, 5, 24), "camera_sample": (1, 7, 2, 3, 16), "deform_conv2d": (2, 4, 6, 5, 9),
    "einsum": (2, 3, 2, 5, 3, 4, 2), "grid_sample": (2, 3, 5, 7, 11), "grid_sample_backward": (2, 3, 5, 7, 11),
    "ms_deform_attn": (2, 3, 2, 8, 8),
}  # fmt: skip


@pytest.mark.parametrize("op", SMALL)
def test_calls_of_a_shape(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are calls of the op, on tensors of that shape; any device can run them."""
    both = op in (NORM, "ms_deform_attn")
    for backward in (False, True) if both else (op.endswith("backward"),):
        results = tune.call_of(op, SMALL[op], "float32", backward=backward, device="cpu")()
        for result in results if isinstance(results, list | tuple) else [results]:
            assert result.numel()
            assert result.isfinite().all()
    with pytest.raises(UnsupportedError, match="a shape is that of"):
        tune.call_of(op, (3, 0), "float32", backward=op.endswith("backward"))


def test_a_gpu_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "this_gpu", lambda: None)
    with pytest.raises(BackendNotAvailableError, match="torch sees no CUDA device here"):
        tune.needed()
    monkeypatch.setattr(planner, "this_gpu", lambda: GPU)
    monkeypatch.setattr(_cuda, "load", lambda: False)
    with pytest.raises(BackendNotAvailableError, match="there are no CUDA kernels to time"):
        tune.needed()


@needs_cuda
@pytest.mark.gpu
def test_winners_run() -> None:
    """What is asked for a call is what is kept, and the call takes the winner of it from then on."""
    gpu = tune.needed()
    x = torch.randn(2, 8, 33, 31, device="cuda")
    grid = torch.rand(2, 40, 25, 2, device="cuda") * 2 - 1
    expected = torch.nn.functional.grid_sample(x, grid, align_corners=False)

    def call() -> torch.Tensor:
        return svexport.ops.grid_sample(x, grid, align_corners=False)

    for fastest in range(2):  # of those that there are, each in turn
        one = tune.tune(call, lambda calls, n=fastest: {k: 1.0 if i == n else 2.0 for i, k in enumerate(calls)})
        tune.keep(gpu.name, [one])
        assert planner.plan(one.op, gpu, **one.problem).chosen == one.winner
        torch.testing.assert_close(call(), expected, rtol=1e-4, atol=1e-4)
    with tune.Tuning() as tuning:
        torch.testing.assert_close(call(), expected, rtol=1e-4, atol=1e-4)
    (times,) = [one.times for one in tuning.tuned]
    assert len(times) > 1
    assert all(us > 0 for us in times.values())
