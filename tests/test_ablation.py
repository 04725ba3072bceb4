"""Which tactics are worth keeping, from made-up timings; no GPU is needed."""

from __future__ import annotations

import json
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")

import svexport.ops
from benchmarks import ablation, einsum
from benchmarks._measure import Workload
from svexport.kernels import planner

NORM = "add_bias_residual_layer_norm"


def row(times: dict[str, float], family: str = "sweep", name: str = "one") -> dict[str, Any]:
    """Of an op with the tactics 1: fast and narrow, 2: fast and wide, 3: slow and wide."""
    labels = {"1": ("fast", "narrow"), "2": ("fast", "wide"), "3": ("slow", "wide")}
    constants = {
        t: {"kernel": labels[t][0], "access": labels[t][1], "tile": i + len(name)}
        for i, t in enumerate(times)
        if t in labels
    }
    return {
        "key": f"op {family} {name}", "family": family, "workload": name, "op": "op", "problem": {}, "chosen": "1",
        "constants": constants, "times": times,
    }  # fmt: skip


def test_a_loss_is_against_the_fastest_of_the_rest() -> None:
    one = row({"1": 10.0, "2": 12.0, "3": 20.0, "torch": 11.0})
    assert ablation.loss(one, {"3"}) == 0
    assert ablation.loss(one, {"1"}) == pytest.approx(0.2)
    assert ablation.loss(one, {"1", "2"}) == pytest.approx(1)
    assert ablation.loss(one, {"1", "2"}, ("torch", "plan")) == pytest.approx(0.1)
    assert ablation.loss(one, {"1", "2", "3"}) == float("inf")


def test_the_rule() -> None:
    """10 % of one named workload, or of more than one other shape in fifty."""
    others = [row({"1": 10.0, "2": 10.5}, name=f"shape {i}") for i in range(100)]
    slow = [row({"1": 10.0, "2": 12.0}, name=f"slow {i}") for i in range(3)]
    assert not ablation.verdict([*others, *slow[:2]], {"1"}).stays
    assert ablation.verdict([*others, *slow], {"1"}).stays
    assert not ablation.verdict([*others, row({"1": 10.0, "2": 10.9}, "named")], {"1"}).stays
    found = ablation.verdict([*others, row({"1": 10.0, "2": 11.2}, "example", "a model")], {"1"})
    assert found.stays
    assert found.where == "a model"
    assert (found.valid, found.fastest) == (101, 101)


def test_what_can_go_together() -> None:
    """2 and 3 can each go for the other, not both; 1 is only beside 2."""
    rows = [row({"2": 10.0, "3": 10.2}, name=f"wide {i}") for i in range(10)]
    rows += [row({"1": 10.0, "2": 10.1}, name=f"narrow {i}") for i in range(10)]
    assert ablation.eliminated(rows) == ["3", "1"]
    with_torch = [{**r, "times": {**r["times"], "torch": 9.0}} for r in rows]
    assert sorted(ablation.eliminated(with_torch, ("torch",))) == ["1", "2", "3"]
    items = ablation.items_of(rows)
    assert items == {
        "fast narrow (1)": {"1"}, "fast wide (2)": {"2"}, "slow wide (3)": {"3"}, "kernel=fast": {"1", "2"},
        "access=wide": {"2", "3"},
    }  # fmt: skip


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row({"1": 10.0, "2": 20.0}, "named", "a b"), row({"2": 10.0, "3": 10.2}), {"key": "k", "skipped": "no"}]
    rows[1]["chosen"] = "3"
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert ablation.main(["report", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "3 rows, 1 without a time" in lines
    assert any("geometric mean 1.010, over 1.1 in 0.0%, worst 1.02: one" in line for line in lines)
    words = {line.split(")")[0] + ")": line.split() for line in lines if ")" in line}
    assert words["fast narrow (1)"][3:9] == ["1", "1", "100%", "0.0%", "100%", "0.0%"]
    assert words["fast narrow (1)"][9] == "yes"
    assert words["slow wide (3)"][9] == "no"
    assert "all of these can go together: slow wide (3)" in lines


def test_sweeps_are_made_when_they_are_timed() -> None:
    """Lazily made, they are those of the sweep, and the module is as it was."""
    calls = ablation.lazily(einsum, "sweep")
    assert [c.func for c in calls] == [einsum.swept] * len(calls)
    asked: list[tuple] = []
    original = einsum.swept
    einsum.swept = lambda *a: asked.append(a)  # type: ignore[assignment]
    try:
        list(einsum.sweep())
    finally:
        einsum.swept = original
    assert [c.args for c in calls] == asked
    first, again = (list(islice(ablation.others("einsum", 3), 40)) for _ in range(2))
    assert [c.key for c in first] == [c.key for c in again]
    assert {c.family for c in first} == {"sweep", "random"}
    assert [c.key for c in first] != [c.key for c in islice(ablation.others("einsum", 4), 40)]


def test_rows_are_timed_once_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tactic is forced while its call is recorded; what ended the process is not tried again."""
    problem = {**planner.problems()[NORM], "rows": 40, "columns": 300}
    plan = planner.plan(NORM, planner.GPUS["h200"], **problem)
    watching, tactics, log = [False], {}, []

    def watch(on: bool) -> list[str]:
        watching[0], was = on, watching[0]
        return [" ".join(map(str, (NORM, *problem.values())))] * 2 if was else []

    fake = SimpleNamespace(_watch_problems=watch, _force_tactic=tactics.__setitem__)
    monkeypatch.setattr(torch.ops, "svexport", fake)
    monkeypatch.setattr(planner, "this_gpu", lambda: planner.GPUS["h200"])
    monkeypatch.setattr(ablation, "captured", lambda calls: {n: partial(log.append, tactics.get(NORM)) for n in calls})

    def timed(calls: dict[str, Any], runs: int) -> dict[str, dict]:
        for call in calls.values():
            call()
        return {name: {"median": 10.0 + i} for i, name in enumerate(calls)}

    monkeypatch.setattr(ablation, "queued_times", timed)

    path, case = tmp_path / "rows.jsonl", ablation.Case(NORM, "named", 0, lambda: Workload("w", lambda: None))
    results = ablation.Results(path)
    results.take(case)
    results.take(case)
    (found,) = ablation.read(path)
    assert set(found["times"]) == {str(t.id) for t in plan.tactics}
    assert len(plan.tactics) > 3
    assert log == [t.id for t in plan.tactics] * 2
    assert found["chosen"] == str(plan.chosen.id)
    assert tactics == {NORM: 0}

    path.with_suffix(".begun").write_text("that one")
    again = ablation.Results(path)
    assert again.keys == {case.key, "that one"}
    again.take(case._replace(at=1, make=lambda: 1 / 0))
    assert ablation.read(path)[-1]["skipped"] == "division by zero"


@pytest.mark.parametrize(
    ("op", "problem", "names"),
    [
        ("grid_sample", {}, {"grid_sample", "bilinear_sample"}),
        ("grid_sample_backward", {}, {"grid_sample_backward", "bilinear_sample_backward"}),
        ("ms_deform_attn", {"backward": 0}, {"ms_deform_attn"}),
        ("ms_deform_attn", {"backward": 1}, {"ms_deform_attn_backward"}),
    ],
)
def test_what_is_forced(op: str, problem: dict, names: set, monkeypatch: pytest.MonkeyPatch) -> None:
    tactics: dict[str, int] = {}
    monkeypatch.setattr(torch.ops, "svexport", SimpleNamespace(_force_tactic=tactics.__setitem__))
    with ablation.forced(op, problem, 7):
        assert tactics == dict.fromkeys(names, 7)
    assert tactics == dict.fromkeys(names, 0)


def test_calls_of_a_model_are_kept() -> None:
    """Each once for its sizes, with copies of its arguments."""
    x = torch.randn(1, 3, 8, 8)
    grid = torch.rand(1, 4, 4, 2, requires_grad=True)
    with ablation.Calls() as calls:
        for _ in range(2):
            svexport.ops.grid_sample(x, grid, align_corners=False).sum().backward()
        svexport.ops.grid_sample(x.double(), grid.double(), align_corners=False)
    names = [func.name() for func, _ in calls.found.values()]
    assert names.count("svexport::grid_sample") == 2
    function, args = next(iter(calls.found.values()))
    assert torch.equal(function(*args), svexport.ops.grid_sample(x, grid, align_corners=False))


def test_gradients_of_an_einsum_are_one_call_each() -> None:
    function = torch.ops.svexport.einsum_backward.default
    calls = dict(ablation._one_by_one(function, ("grads", "operands", [True, False, True])))
    assert [call.args[-1] for call in calls.values()] == [[True, False, False], [False, False, True]]
    assert list(calls) == [" 0", " 2"]
