"""svexport kernels list | explain | tune; tests/kernels tests that the planners choose well."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from svexport.kernels import planner, tune
from svexport.kernels.shapes import SHAPES, problem
from tests.csrc import CXX

pytestmark = pytest.mark.skipif(not CXX, reason="needs g++")

NORM = "add_bias_residual_layer_norm"


def test_list_names_every_op_with_a_planner(run):
    result = run("kernels", "list", "--json")
    assert result.code == 0
    assert set(result.json["ops"]) == set(SHAPES) == set(planner.problems())
    assert result.json["gpus"] == list(planner.GPUS)
    assert NORM in run("kernels", "list").out


def test_explain_shows_the_tactics_and_which_runs(run):
    asked = ("kernels", "explain", NORM, "--shape", "6x900x256", "--dtype", "float16", "--gpu", "orin")
    result = run(*asked, "--json")
    plan = planner.plan(NORM, planner.GPUS["orin"], rows=5400, columns=256, item_size=2)
    assert result.json["chosen"] == plan.chosen.id
    assert [t["id"] for t in result.json["tactics"]] == [t.id for t in plan.tactics]
    assert result.json["problem"]["rows"] == 5400
    first = next(line for line in run(*asked).out.splitlines() if "vector" in line)
    assert first.split()[:3] == ["*", "warp8", "vector"], "the cheapest first"


def test_explain_takes_the_other_numbers_of_a_problem(run):
    asked = ("kernels", "explain", NORM, "--shape", "100x511", "--gpu", "h100", "--json")
    dense, apart = run(*asked), run(*asked, "--set", "dense=0")
    constants = [next(t for t in r.json["tactics"] if t["id"] == r.json["chosen"])["constants"] for r in (dense, apart)]
    assert [c["access"] for c in constants] == ["shifted", "single"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expects an op and --shape"),
        (("relu", "--shape", "3x4"), "relu has no planner"),
        ((NORM, "--shape", "3x0"), r"a shape is that of x, \(\*, columns\); got 3x0"),
        ((NORM, "--shape", "3x4", "--dtype", "float64"), "compute in float32, float16, bfloat16; not in float64"),
        ((NORM, "--shape", "3x4", "--gpu", "voodoo"), "--gpu takes t4, .*; got voodoo"),
        ((NORM, "--shape", "3x4", "--set", "item_size=0"), "item_size follows from --shape, --dtype and --backward"),
        ((NORM, "--shape", "3x4", "--set", "lines=3"), "not of lines"),
    ],
)
def test_wrong_questions_are_refused(run, arguments, message):
    result = run("kernels", "explain", *arguments)
    assert result.code == 1
    assert re.search(message, result.err), result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("relu",), "relu has no planner"),
        (("--shape", "3x4"), "tune expects the op that --shape belongs to"),
        ((NORM, "--gpu", "t4"), "tune runs on this machine's GPU"),
        ((NORM, "--shape", "3x0"), "a shape is that of x"),
        ((NORM, "--shape", "3x4"), "timed on a GPU, and torch sees no CUDA device here"),
        ((), "torch sees no CUDA device here"),
    ],
)
def test_what_cannot_be_tuned_is_refused(run, arguments, message, monkeypatch):
    monkeypatch.setattr(planner, "this_gpu", lambda: None)
    result = run("kernels", "tune", *arguments)
    assert result.code == 1
    assert re.search(message, result.err), result.err


@pytest.mark.parametrize("named", [False, True])
def test_tune_keeps_what_is_fastest(run, monkeypatch, tmp_path, named):
    """Of one shape, or of all that are named, in both types; `explain` says what was timed."""
    planner.problems()  # compiled, before there is another cache
    monkeypatch.setenv("SVEXPORT_CACHE", str(tmp_path))
    gpu, asked = planner.GPUS["h200"], []
    monkeypatch.setattr(tune, "needed", lambda: gpu)
    monkeypatch.setattr(tune, "call_of", lambda *of, backward: asked.append((*of, backward)))

    def timed(call):
        op, shape, dtype, backward = asked[-1]
        numbers = planner.problems()[op] | problem(op, shape, dtype, backward=backward)
        plan = planner.by_cost(op, gpu, **numbers)
        return tune.Tuned(op, numbers, plan.chosen, plan.tactics[-1], {t.id: 2.5 for t in plan.tactics})

    monkeypatch.setattr(tune, "tune", timed)
    shape = ("--shape", "6x900x256", "--dtype", "float16")
    result = run("kernels", "tune", NORM, *(() if named else shape), "--json")
    assert result.code == 0, result.err
    assert len(asked) == len(result.json["tuned"]) == (2 * len(tune.NAMED[NORM]) if named else 1)
    assert json.loads(Path(result.json["table"]).read_text())["gpu"] == gpu.name
    shown = run("kernels", "tune", NORM, *shape)
    assert re.search(r"6x900x256\s+float16", shown.out), shown.out
    explained = run("kernels", "explain", NORM, *shape, "--gpu", "h200", "--json").json
    assert explained["timed"]
    assert explained["chosen"] == explained["tactics"][-1]["id"]


def test_wrong_numbers_are_wrong_usage(run):
    for arguments in (("--shape", "3xmany"), ("--shape", "3", "--set", "dense=-1"), ("--shape", "3", "--set", "dense")):
        assert run("kernels", "explain", NORM, *arguments).code == 2
