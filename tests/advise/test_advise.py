"""Tests the linter as a whole: which files it reads, what excuses a line, how it writes fixes, and odd sources."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from svexport.advise import RULES, advise
from svexport.advise.advise import MAX_NODES, AdviseError
from svexport.advise.source import MAX_BYTES
from svexport.advise.table import table
from tests.advise import codes

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[2]
HABIT = """import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return x.permute(0, 2, 1).sigmoid()
"""
FIXED = HABIT.replace("x.permute(0, 2, 1).sigmoid()", "x.sigmoid().permute(0, 2, 1)")
FOCUS = "x = torch.cat((x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]), 1)"


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(HABIT)
    return Path("model.py")


def forward(*lines, parameters="self, x: torch.Tensor"):
    body = "\n".join(f"        {line}" for line in lines)
    return f"import torch\nfrom torch import nn\n\n\nclass Model(nn.Module):\n    def forward({parameters}):\n{body}\n"


def test_place(model):
    (finding,) = advise([model]).findings
    assert str(finding).startswith("model.py:7:16: SVX205 [*] permuted before `sigmoid`")
    assert (finding.line, finding.column, finding.end_line, finding.fixable) == (7, 16, 7, True)


def test_columns_count_characters(tmp_path):
    (finding,) = _findings(forward("return 'größer →', x.permute(0, 2, 1).sigmoid()"), tmp_path)
    assert finding.column == 9 + len("return 'größer →', ")


def _findings(text, folder):
    path = folder / "text.py"
    path.write_text(text, encoding="utf-8")
    return advise([path]).findings


def test_folders(model):
    for name in (
        "a/b/deep.py",
        ".venv/lib.py",
        "build/copy.py",
        "a/notes.txt",
        "a/skipped/other.py",
        "a/x.egg-info/y.py",
    ):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(HABIT)
    assert [f.file for f in advise().findings] == ["a/b/deep.py", "a/skipped/other.py", "model.py"]
    assert [f.file for f in advise(["."], exclude=["skipped", "model.py"]).findings] == ["a/b/deep.py"]
    assert [f.file for f in advise(["."], exclude=["a/*"]).findings] == ["model.py"]
    assert [f.file for f in advise([".venv", "a/b", "a/b/deep.py", "./a/b/deep.py"]).findings] == [
        ".venv/lib.py",
        "a/b/deep.py",
    ]


def test_links(model):
    """A loop ends, a file of two names is read once, and a fix leaves the link one."""
    Path("loop").symlink_to(".")
    Path("linked.py").symlink_to("model.py")
    Path("dangling.py").symlink_to("nowhere.py")
    report = advise(["."])
    assert report.files == 2
    assert len(report.findings) == 1
    assert [(f.file, "cannot be read" in f.message) for f in report.unread] == [("dangling.py", True)]
    advise(["linked.py"], fix=True)
    assert Path("linked.py").is_symlink()
    assert model.read_text() == FIXED


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"def forward(:\n", "does not parse: invalid syntax"),
        (b"import torch\nx = 'a\x00b'\n", "does not parse: "),
        (b"# coding: nonsense\nimport torch\n", "cannot be decoded: unknown encoding"),
        (b"import torch  # \xff\xfe\n", "cannot be decoded: "),
        (b"import torch\nx = " + b"(" * 5000 + b")" * 5000, "does not parse: "),
        (b"import torch\nx = " + b"-" * 100_000 + b"1\n", "does not parse: "),
        (b"import torch\ndef f(x):\n  return x" + b".a" * 50_000, None),
        (b"import torch\n" + b"# more\n" * (MAX_BYTES // 7), "larger than 4 MiB"),
        (b"import torch\nprint 'two'\n", "does not parse: Missing parentheses"),
    ],
    ids=["syntax", "null", "codec", "bytes", "parentheses", "signs", "attributes", "huge", "python2"],
)
def test_unread(model, data, message):
    """Said with its place, and the other files are read."""
    Path("bad.py").write_bytes(data)
    report = advise(["."])
    assert [f.file for f in report.findings] == ["model.py"]
    assert not report.ok
    if message is None and not report.unread:
        return  # deep, but not too deep for this Python
    (bad,) = report.unread
    assert bad.file == "bad.py"
    assert message is None or bad.message.startswith(message)
    assert bad.line >= 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_pipes_are_not_waited_for(model):
    os.mkfifo("pipe.py")
    report = advise(["."])
    assert [(f.file, f.message) for f in report.unread] == [("pipe.py", "not a regular file")]


def test_paths_are_shown_escaped(model):
    name = os.fsdecode(b"line\nbreak\x1b\xff.py")
    Path(name).write_text(HABIT)
    assert [f.file for f in advise([name]).findings] == ["line\\nbreak\\x1b\\xff.py"]


def test_all_that_is_missing_is_said_at_once(model):
    with pytest.raises(AdviseError, match=r"no such: absent, other\.py"):
        advise(["absent", model, "other.py"])
    with pytest.raises(AdviseError, match="got SVX9, 205; there are SVX101"):
        advise([model], select=["SVX9"], ignore=["205", "SVX2"])


def test_select_and_ignore(tmp_path):
    path = tmp_path / "text.py"
    path.write_text(forward("n = len(x)", "return x.permute(0, 2, 1).sigmoid(), torch.nonzero(x), n"))
    found = lambda **kwargs: [f.code for f in advise([path], **kwargs).findings]  # noqa: E731
    assert found() == ["SVX103", "SVX205", "SVX104"]
    assert found(select=["SVX1"]) == ["SVX103", "SVX104"]
    assert found(select=["svx1", "SVX205"], ignore=["SVX104"]) == ["SVX103", "SVX205"]


@pytest.mark.parametrize(
    ("comment", "left"),
    [
        ("# noqa", []),
        ("# noqa: SVX205", []),
        ("# NOQA:svx205, E501", []),
        ("# E501 # noqa: E501 SVX205", []),
        ("# noqa: SVX104", ["SVX205"]),
        ("# a word on noqa", ["SVX205"]),
        ("; y = '# noqa'", ["SVX205"]),
    ],
)
def test_noqa(tmp_path, comment, left):
    assert codes(HABIT.replace("sigmoid()", f"sigmoid()  {comment}"), tmp_path) == left


def test_noqa_of_several_lines(tmp_path):
    text = forward("return (", "    x.permute(0, 2, 1).sigmoid()", "    + 1", ")  # noqa: SVX205")
    assert codes(text, tmp_path) == []


@pytest.mark.parametrize(
    ("comment", "left"),
    [("# svexport: noqa", []), ("# svexport: noqa: SVX205", []), ("# svexport: noqa: SVX104", ["SVX205"])],
)
def test_noqa_of_a_file(tmp_path, comment, left):
    assert codes(f"{comment}\n{HABIT}", tmp_path) == left
    assert codes(f"s = '''\n{comment}\n'''\n{HABIT}", tmp_path) == ["SVX205"]


@pytest.mark.parametrize(
    "code",
    [
        HABIT.encode(),
        b"\xef\xbb\xbf" + HABIT.encode(),
        HABIT.replace("\n", "\r\n").encode(),
        HABIT.replace("\n", "\r").encode(),
        ("# coding: latin-1\nname = 'ÄÖÜ'\n" + HABIT).encode("latin-1"),
        HABIT.replace("        return", "        'äöü→𝄞'; y = 'ß\x0c'; return").encode(),
        HABIT.rstrip("\n").encode(),
        HABIT.replace("    def", "\x0c\n    def").encode(),
    ],
    ids=["plain", "bom", "crlf", "cr", "latin-1", "wide", "no newline", "form feed"],
)
def test_fix_changes_nothing_else(model, code):
    model.write_bytes(code)
    model.chmod(0o751)
    report = advise([model], fix=True)
    assert report.ok
    assert report.fixed == {"model.py": 1}
    assert model.read_bytes() == code.replace(b"x.permute(0, 2, 1).sigmoid()", b"x.sigmoid().permute(0, 2, 1)")
    assert stat.S_IMODE(model.stat().st_mode) == 0o751
    assert list(Path().iterdir()) == [model]  # nothing beside it


def test_fix_that_cannot_be_written(model, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(AdviseError, match=r"cannot write model\.py: No space left on device"):
        advise([model], fix=True)
    assert model.read_text() == HABIT
    assert list(Path().iterdir()) == [model]


def test_fix_keeps_comments(model):
    """Where an edit would lose one, the place is found and left."""
    text = forward("return x.permute(", "    0, 2, 1  # to (N, C, L)", ").transpose(0, 1)")
    model.write_text(text)
    report = advise([model], fix=True)
    assert [(f.code, f.fixable) for f in report.findings] == [("SVX206", False)]
    assert model.read_text() == text


@pytest.mark.parametrize(
    "line",
    [
        "x[:, [0, 1]] = x[:, 1:3]",
        "x[:, [0, 1]] *= x[:, 1:3]",
        "y = x[:, [0, 1]]",
        "x[:, [0, 1]].view(-1)",
        "x[:, [0, 1]].t()[0] = 1",
    ],
)
def test_views_that_would_tell(model, line):
    model.write_text(forward(line, "return x"))
    assert [(f.code, f.fixable) for f in advise([model], fix=True).findings] == [("SVX204", False)]


@pytest.mark.parametrize(("sizes", "found"), [("-x.shape[1]", ["SVX103"]), ("not x.shape[1]", [])])
def test_what_an_operator_makes_of_a_size(tmp_path, sizes, found):
    assert codes(forward(f"return x.sum() * int({sizes})"), tmp_path) == found


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("import torch\n", "import svexport\nimport torch\n"),
        ("import abc\nimport torch\n", "import abc\nimport svexport\nimport torch\n"),
        ("import torch, svexport\n", "import torch, svexport\n"),
        ('"""Doc."""\nfrom __future__ import annotations\nimport torch\n',
         '"""Doc."""\nfrom __future__ import annotations\nimport svexport\nimport torch\n'),
        ("#!/usr/bin/env python\nfrom torch import *\nimport torch\n",
         "#!/usr/bin/env python\nfrom torch import *\nimport svexport\nimport torch\n"),
    ],
)  # fmt: skip
def test_fix_adds_imports(model, head, expected):
    body = f"class Model(torch.nn.Module):\n    def forward(self, x):\n        {FOCUS}\n        return x\n"
    model.write_text(head + body)
    assert advise([model], fix=True).fixed == {"model.py": 1}
    assert model.read_text() == expected + body.replace(FOCUS, "x = svexport.ops.space_to_depth(x)")


@pytest.mark.parametrize(
    "lines",
    [
        ("a = x[..., ::2, ::2]", FOCUS.replace("(x[..., ::2, ::2]", "(a"), "return x, a"),
        ("svexport = None", FOCUS, "return x"),
        ("y = [x]", FOCUS.replace("x[", "y[0]["), "return x"),
    ],
    ids=["slice used again", "name taken", "no name"],
)
def test_slices_that_are_found_but_not_fixed(model, lines):
    model.write_text(forward(*lines))
    assert [(f.code, f.fixable) for f in advise([model], fix=True).findings] == [("SVX203", False)]
    assert model.read_text() == forward(*lines)


@pytest.mark.parametrize(
    "text",
    [
        forward("return x.permute(0, 2, 1).sigmoid()").replace("nn.Module", "object").replace(": torch.Tensor", ""),
        forward("return x.permute(0, 2, 1).sigmoid()").replace("def forward", "def __init__"),
        forward("return x.permute(0, 2, 1).sigmoid()").replace("class Model", "class FocalLoss"),
        forward("return x.permute(0, 2, 1).sigmoid()").replace("class Model", "class CocoDataset"),
        forward("return np.tanh(np.transpose(y, (0, 2, 1))), y", parameters="self, y: np.ndarray"),
        forward("if self.training:", "    x = x[:, torch.nonzero(x)]", "return x"),
        forward("if torch.onnx.is_in_onnx_export():", "    n = len(x)", "else:", "    n = 1", "return n"),
        forward("assert len(x) == 3", "return x"),
        forward("if len(x) > 3:", "    raise ValueError(f'{len(x)}')", "return x"),
        forward("if targets is not None:", "    x = torch.nonzero(x)", "return x", parameters="self, x, targets=None"),
        forward("if self.grid is None:", "    self.grid = torch.arange(8)", "return self.grid + x"),
        forward("for row in x:", "    state = self.cell(row, state)", "return state", parameters="self, x, state"),
        forward("for level in x:", "    y.append(level)", "return y", parameters="self, x: list[torch.Tensor], y"),
        forward("return x[[0, 0]], x[[0, 1], [0, 1]], x[[2, 1, 0]], x[[-1, 0]], x[[True, False]]"),
        forward("return x.repeat(1, 3, 1) * y, x.unsqueeze(1).repeat(2, 3, 1) * y", parameters="self, x, y"),
        forward("y = x.unsqueeze(1).repeat(1, 3, 1)", "return y * x, y"),
        forward("y = x.unsqueeze(1).repeat(1, 3, 1)", "y *= x", "return y"),
        forward("return x.unsqueeze(1).repeat(1, 3, 1) * 2"),
        forward("s = x.sigmoid()", "return s, s > 0.5"),
        forward("return x.sigmoid() > 1.5"),
        forward("return (x.unsqueeze(-1) * y).sum(-2)", parameters="self, x, y"),
        forward("return (x.unsqueeze(-1) * y.unsqueeze(-2)).sum(-1)", parameters="self, x, y"),
        forward("x = x.clamp(min=1e-5, max=1 - 1e-5)", "return torch.log(x / (1 - x))"),
        forward("y = torch.log(x / (1 - x))", "return y.masked_fill(x > 1, 0)"),
        forward("y = torch.zeros_like(x)", "y[:, 0] = x", "z = y[:, 2]", "y[:, 1] = z", "return y"),
        forward("p = x.softmax(-1)", "return p, p.argmax(-1)"),
        forward("return x.softmax(1).argmax(-1)"),
        forward("return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)"),
        forward("k = x.transpose(1, 2)", "return x @ k.transpose(-1, -2)"),
        forward("print(f'{x.permute(0, 2, 1).sigmoid()}')", "return x"),
        forward("match x.shape:", "    case [x]:", "        return len(x)", parameters="self, x"),
        forward("for size in x:", "    y.append(round_up(size))", "return y", parameters="self, x: torch.Tensor, y"),
        forward("return [h * w for h, w in x]"),
        forward("if isinstance(x, torch.Tensor):", "    return x.shape[0]", "return len(x) + 1", parameters="self, x"),
        forward("masks = [len(row[row > 0]) for row in x]", "return [x[i][keep[i]] for i in range(len(x))]"),
        forward("return [x[i][y[i]] for i in range(x.shape[0])]", parameters="self, x, y: torch.Tensor"),
        forward("for i in range(10):", "    s = self.step(x)", "    if s.item() < 1:", "        break", "return s"),
        forward("y = x.clone()", "y[:, 0] += 1", "y[:, 1] = y[:, 0]", "return y"),
        forward("if x.numel():", "    y = torch.zeros_like(x)", "    y[0] = 0", "return x"),
        forward("y = torch.zeros_like(x)", "y[0] = 3", "y[1] = 4", "return y"),
        forward("y = x.clone()", "y[..., 0, 0] *= 2", "y[..., 1, 1] *= 2", "return y"),
        forward("y = torch.zeros_like(x)", "y[:, :3] = x", "y[:3, :] = x", "return y"),
        forward("y = self.linear(x).permute(0, 3, 1, 2).contiguous()", "return self.conv(y).view(2, -1), y"),
        forward("return int(x.sum()), int(self.scale), len(self.layers), len(x.shape)"),
    ],
)
def test_not_found(tmp_path, text):
    assert codes(text, tmp_path) == []


def test_names_that_define_each_other_end(tmp_path):
    """No text makes the analysis take long."""
    lines = [f"a{i} = a{i} + a{i + 1} + a{i + 1}" for i in range(60)] + ["return len(a0)"]
    assert codes(forward(*lines), tmp_path) == []
    deep = "+".join(["x"] * 900)
    assert codes(forward(f"return len({deep}), x.permute(0, 2, 1).sigmoid()"), tmp_path) == ["SVX205"]


def test_a_function_too_long(tmp_path):
    """Said, and the others are analysed: no file takes minutes."""
    path = tmp_path / "long.py"
    long = "\n".join(["def long(x):"] + ["    y = torch.log(x / (1 - x))"] * (MAX_NODES // 8))
    path.write_text(f"{HABIT}\n\n{long}\n")
    report = advise([path])
    assert [f.code for f in report.findings] == ["SVX205"]
    assert [(f.line, f.message) for f in report.unread] == [
        (10, "a function of more than 20,000 nodes is not analysed")
    ]


def test_nothing_is_imported_or_run(tmp_path):
    """Not the sources, and not torch either: a hook answers at once."""
    path = tmp_path / "model.py"
    path.write_text(f"open('{tmp_path}/ran', 'w')\n{HABIT}")
    code = f"import sys; from svexport.cli import main; main(['advise', {str(path)!r}]); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "SVX205" in result.stdout
    assert result.stdout.endswith("False\n")
    assert not (tmp_path / "ran").exists()


def test_own_sources_are_read():
    report = advise([ROOT / "svexport", ROOT / "examples"])
    assert report.files > 150
    assert report.unread == ()


def test_page_has_the_table():
    assert table() in (ROOT / "docs" / "advise.md").read_text()
    assert all(rule.fixes or rule.note for rule in RULES.values())


def test_hook():
    lines = (ROOT / ".pre-commit-hooks.yaml").read_text().splitlines()
    assert "  entry: svexport advise" in lines
    assert "  types: [python]" in lines
