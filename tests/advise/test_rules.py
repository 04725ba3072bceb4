"""Each habit is found where it is planted and not in its better form, and its fix computes the same.

In `cases/before` a comment names the habit of a line, with a star if it can be fixed: `# SVX201 *`; `cases/after` has
the better form.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections import Counter
from pathlib import Path
from textwrap import indent

import pytest
import torch

from svexport.advise import RULES, advise

CASES = Path(__file__).parent / "cases"
NAMES = sorted(path.stem for path in (CASES / "before").glob("*.py"))


def planted(path):
    """(line, code, fixable) of every comment."""
    found = Counter()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for code, star in re.findall(r"(SVX\d+)( \*)?", line.partition("  # ")[2]):
            found[number, code, bool(star)] += 1
    return found


def outputs(path):
    """What the file's model makes of its inputs, with weights that follow from a seed."""
    spec = importlib.util.spec_from_file_location(f"advised_{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    inputs = module.example_inputs()
    torch.manual_seed(1)
    return module.Model()(*inputs)


def test_there_are_30_cases_and_one_of_every_rule():
    codes = {code for name in NAMES for _, code, _ in planted(CASES / "before" / f"{name}.py")}
    assert len(NAMES) >= 30
    assert codes == set(RULES)
    assert sorted(path.stem for path in (CASES / "after").glob("*.py")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_found_where_planted(name):
    path = CASES / "before" / f"{name}.py"
    expected = planted(path)
    lines = {code: [line for line, other, _ in expected if other == code] for _, code, _ in expected}
    found = Counter()
    for f in advise([path]).findings:  # a comment may stand on the last line of what it is about
        marked = [line for line in lines.get(f.code, []) if f.line <= line <= f.end_line]
        found[min(marked, default=f.line), f.code, f.fixable] += 1
    assert found == expected


@pytest.mark.parametrize("name", NAMES)
def test_not_found_in_the_better_form(name):
    assert advise([CASES / "after" / f"{name}.py"]).ok


@pytest.mark.parametrize("name", NAMES)
def test_the_better_form_computes_the_same(name):
    torch.testing.assert_close(outputs(CASES / "after" / f"{name}.py"), outputs(CASES / "before" / f"{name}.py"))


@pytest.mark.parametrize("name", NAMES)
def test_fix(name, tmp_path):
    """The same bits, what cannot be fixed as it was, and nothing more on a second run."""
    before = CASES / "before" / f"{name}.py"
    path = Path(shutil.copy(before, tmp_path / "fixed.py"))
    report = advise([path], fix=True)
    fixable = sum(count for (_, _, star), count in planted(before).items() if star)
    assert not any(f.fixable for f in report.findings)
    assert sum(report.fixed.values()) >= fixable
    assert bool(report.fixed) == bool(fixable)
    assert Counter(f.code for f in report.findings) == Counter(
        code for (_, code, star), count in planted(before).items() if not star for _ in range(count)
    )
    torch.testing.assert_close(outputs(path), outputs(before), rtol=0, atol=0)
    text = path.read_bytes()
    advise([path], fix=True)
    assert path.read_bytes() == text


SCAFFOLD = """
import svexport
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Model(nn.Module):
"""
FORWARD = "def forward(self, x: Tensor, weights, w, h, n, mask: Tensor, logits, scales: Tensor, boxes: Tensor, scale):"


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.code)
def test_explanations_are_examples_of_themselves(rule, tmp_path):
    """What a rule shows as a habit is found; what it shows as better is not."""
    for text, expected in ((rule.before, {rule.code}), (rule.after, set())):
        if "(x" in text and text.startswith("def "):  # a helper of a forward
            forward = "def forward(self, x):\n    return inverse_sigmoid(x.sigmoid())"
            source = text + SCAFFOLD + indent(forward, "    ")
        else:
            source = SCAFFOLD + indent(text if "def " in text else f"{FORWARD}\n{indent(text, '    ')}", "    ")
        path = tmp_path / "example.py"
        path.write_text("import torch\n" + source + "\n")
        assert {f.code for f in advise([path]).findings} == expected, source
