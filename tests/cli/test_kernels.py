"""svexport kernels list | explain; that the planners choose well is tests/kernels' business."""

from __future__ import annotations

import re

import pytest

from svexport.kernels import planner
from svexport.kernels.shapes import SHAPES
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
        ((), "takes an op and its --shape"),
        (("relu", "--shape", "3x4"), "relu has no planner"),
        ((NORM, "--shape", "3x0"), r"a shape is that of x, \(\*, columns\); got 3x0"),
        ((NORM, "--shape", "3x4", "--dtype", "float64"), "compute in float32, float16, bfloat16; not in float64"),
        ((NORM, "--shape", "3x4", "--gpu", "voodoo"), "--gpu takes t4, .*; got voodoo"),
        ((NORM, "--shape", "3x4", "--set", "item_size=0"), "say what item_size is, not --set"),
        ((NORM, "--shape", "3x4", "--set", "lines=3"), "not of lines"),
    ],
)
def test_wrong_questions_are_refused(run, arguments, message):
    result = run("kernels", "explain", *arguments)
    assert result.code == 1
    assert re.search(message, result.err), result.err


def test_wrong_numbers_are_wrong_usage(run):
    for arguments in (("--shape", "3xmany"), ("--shape", "3", "--set", "dense=-1"), ("--shape", "3", "--set", "dense")):
        assert run("kernels", "explain", NORM, *arguments).code == 2
