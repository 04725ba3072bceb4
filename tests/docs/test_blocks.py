"""Every block of code in the README and on the site's pages runs, with the page's own model and with a reader's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.docs.blocks import ROOT, blocks_of, check, environment, run

PAGES = {
    str(path.relative_to(ROOT)): path.read_text("utf-8")
    for path in (ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md")))
}
ALONE = ("docs/adding-an-op.md",)
"""Pages that leave something behind in the process: an op."""

with_code = [name for name, page in PAGES.items() if any(block.runs for block in blocks_of(page))]
with_model = [
    name
    for name, page in PAGES.items()
    if any(re.search(r"^model(, x)? = ", b.text, re.MULTILINE) for b in blocks_of(page) if b.runs)
]


class Own(nn.Module):
    """A reader's model: an image, turned as a small network says, then attention among its pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        theta = self.turn(x.mean((2, 3))).view(-1, 2, 3)
        turned = F.grid_sample(x, F.affine_grid(theta, [x.shape[0], 4, 5, 6], align_corners=False), align_corners=False)
        tokens = self.norm(turned.flatten(2).transpose(1, 2))
        return tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]


def own() -> tuple[nn.Module, Tensor]:
    return Own().eval(), torch.randn(3, 4, 12, 20)


@pytest.mark.parametrize("name", [name for name in with_code if name not in ALONE and "zh-CN" not in name])
def test_runs_and_prints_what_the_page_says(name, tmp_path, monkeypatch):
    environment(monkeypatch, tmp_path)
    run(name, PAGES[name], tmp_path)


@pytest.mark.parametrize("name", ALONE)
def test_runs_in_a_process_of_its_own(name, tmp_path, monkeypatch):
    environment(monkeypatch, tmp_path)
    program = "import sys, pathlib, tests.docs.blocks as b; b.run('page', sys.stdin.read(), pathlib.Path.cwd())"
    done = subprocess.run(
        [sys.executable, "-c", program], input=PAGES[name], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [name for name in with_model if "zh-CN" not in name])
def test_runs_on_the_model_of_a_reader(name, tmp_path, monkeypatch):
    environment(monkeypatch, tmp_path)
    run(name, PAGES[name], tmp_path, own)


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if blocks_of(page)])
def test_what_does_not_run_is_right_as_far_as_one_can_tell(name):
    for block in blocks_of(PAGES[name]):
        assert block.language, f"line {block.line}: say what language it is"
        if not block.runs:
            check(block)


def test_both_readmes_have_the_same_code():
    """So what one proves holds for the other."""
    assert [(b.language, b.text, b.mark) for b in blocks_of(PAGES["README.md"])] == [
        (b.language, b.text, b.mark) for b in blocks_of(PAGES["README.zh-CN.md"])
    ]
    headings = [re.findall(r"^(#+) ", PAGES[name], re.MULTILINE) for name in ("README.md", "README.zh-CN.md")]
    assert headings[0] == headings[1]


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_links_of_readmes_lead_somewhere(name):
    targets = re.findall(r"\]\(([^)#\s]+)", PAGES[name])
    assert len(targets) > 5
    assert [target for target in targets if "://" not in target and not (ROOT / target).exists()] == []


# The tests' own: a page that is wrong has to fail.
def page(python: str, output: str | None = None) -> str:
    return f"```python\n{python}\n```\n" + ("" if output is None else f"\n```text\n{output}\n```\n")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (page("raise ValueError"), ValueError),
        (page("print('one')", "two"), AssertionError),
        (page("print('a', 1)", "a"), AssertionError),
        ("```sh\nfalse\ntrue\n```\n", AssertionError),
        ("```sh\nsvexport check no-such-file.onnx --target 8.4\n```\n", AssertionError),
        ("```sh\nsvexport chekc\n```\n", SystemExit),  # codespell:ignore chekc
    ],
)
def test_a_wrong_page_fails(text, error, tmp_path, monkeypatch):
    environment(monkeypatch, tmp_path)
    with pytest.raises(error):
        run("page", text, tmp_path)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```sh\nfor x in\n```\n", subprocess.CalledProcessError),
        ("```sh\nsvexport export --no-such-option\n```\n", SystemExit),
        ("```python\nsvexport.tensorrt.no_such_function()\n```\n", AttributeError),
        ("```python\nx = (\n```\n", SyntaxError),
    ],
)
def test_a_wrong_block_that_does_not_run_fails(text, error):
    with pytest.raises(error):
        check(blocks_of(f"<!-- not run: needs TensorRT -->\n{text}")[0])


def test_numbers_are_not_compared_and_all_else_is(tmp_path, monkeypatch):
    environment(monkeypatch, tmp_path)
    run("page", page("print('max', 1.5e-6, [3, 4])", "max 2.0e-07 [30, 4]"), tmp_path)


def test_a_page_may_define_the_model_that_a_reader_replaces(tmp_path, monkeypatch):
    environment(monkeypatch, tmp_path)
    run("page", page("model, x = 1, 2") + page("assert (model, x) == (3, 4)"), tmp_path, lambda: (3, 4))
    assert Path.cwd() == tmp_path
