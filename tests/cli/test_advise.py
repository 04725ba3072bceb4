from __future__ import annotations

from pathlib import Path

import pytest

from svexport.advise import RULES

pytestmark = pytest.mark.core

HABITS = """import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x: torch.Tensor):
        n = len(x)
        return n, torch.nonzero(x)
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(HABITS)
    return Path("model.py")


def test_findings(run, file):
    result = run("advise")
    assert result.code == 1
    lines = result.out.splitlines()
    assert lines[0] == "model.py:7:13: SVX103 [*] `len()` of a tensor freezes its size when traced: `x.shape[0]`"
    assert lines[1].startswith("model.py:8:19: SVX104 the size of `nonzero` depends on values")
    assert lines[2] == "Found 2 places in 1 file of 1; [*] 1 fixable with `--fix`."


def test_lines_are_never_cut(run, file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert run("advise").out.splitlines()[0].endswith("`x.shape[0]`")


def test_json(run, file):
    result = run("advise", "model.py", "--json")
    assert result.code == 1
    assert result.json["ok"] is False
    assert result.json["files"] == 1
    first, second = result.json["findings"]
    assert (first["file"], first["line"], first["column"], first["code"]) == ("model.py", 7, 13, "SVX103")
    assert (first["fixable"], second["fixable"]) == (True, False)
    assert result.json["unread"] == []


def test_fix(run, file):
    """Exit code 1 for what is left, 0 once nothing is."""
    result = run("advise", "model.py", "--fix")
    assert result.code == 1
    assert "Fixed 1 place in 1 file." in result.out
    assert file.read_text() == HABITS.replace("len(x)", "x.shape[0]")
    result = run("advise", "model.py", "--ignore", "SVX2,SVX104")
    assert (result.code, result.out) == (0, "Nothing found in 1 file.\n")


def test_a_file_that_does_not_parse(run, file):
    Path("bad.py").write_text("def f(:\n")
    result = run("advise", "bad.py")
    assert result.code == 1
    assert result.out.splitlines()[0] == "bad.py:1:7: error: does not parse: invalid syntax"
    assert "Nothing found" not in result.out


@pytest.mark.parametrize("code", RULES)
def test_explain(run, code):
    result = run("advise", "--explain", code.lower())
    assert result.code == 0
    assert result.out.startswith(f"{code}: {RULES[code].name}\n")
    for part in (RULES[code].why, *RULES[code].before.splitlines(), *RULES[code].after.splitlines(), RULES[code].note):
        assert part in result.out
    assert run("advise", "--explain", code, "--json").json["why"] == RULES[code].why


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("absent.py other", "no such: absent.py, other"),
        ("model.py --select SVX9", "got SVX9"),
        ("--explain SVX999", "expected the code of a rule, got 'SVX999'"),
    ],
)
def test_refused(run, file, words, message):
    result = run("advise", *words.split())
    assert (result.code, result.out) == (1, "")
    assert message in result.err
