"""Finds the blocks of code on pages and runs them as a reader does: in order, in one folder.

A comment before a block marks special cases:

* ``<!-- not run: why -->``: the block is checked but not run;
* ``<!-- of this model -->``: the block makes no sense with a reader's own model in place of the page's;
* ``<!-- in the repository -->``: the block runs in the repository.
"""

from __future__ import annotations

import ast
import io
import linecache
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from onnx import TensorProto, helper

import svexport
import svexport.symbolic  # before a page defines an op
from svexport.cli import main, parser

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^>]*?) -->\n)?^(?P<fence>```+)(?P<language>[\w-]*)\n(?P<text>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
_COMMAND = re.compile(r"^svexport [^$|>\n]*$")


@dataclass(frozen=True)
class Block:
    """A block of code: language, text, first line in its page, the comment before it, and what it prints (or None)."""

    language: str
    text: str
    line: int
    mark: str
    output: str | None

    @property
    def runs(self) -> bool:
        return self.language in ("python", "sh") and not self.mark.startswith("not run: ")


def blocks_of(page: str) -> list[Block]:
    """Every block; a ``text`` block right behind code, with nothing between, is its output."""
    found: list[Block] = []
    end = -1
    for match in _FENCE.finditer(page):
        if match["language"] == "text" and found and not page[end : match.start()].strip():
            last = found.pop()
            found.append(Block(last.language, last.text, last.line, last.mark, match["text"]))
        else:
            line = page.count("\n", 0, match.start("text")) + 1
            found.append(Block(match["language"], match["text"], line, match["mark"] or "", None))
        end = match.end()
    return found


def run(name: str, page: str, folder: Path, own: Callable[[], tuple[Any, Any]] | None = None) -> None:
    """Runs the blocks of a page in ``folder``, which is the current one, and compares what they print.

    ``own`` makes a reader's model and its input, which then take the place of ``model`` and ``x`` wherever the page
    makes these; what blocks print is not compared then.
    """
    pair = None if own is None else own()
    module = types.ModuleType("page_" + re.sub(r"\W", "_", name))
    file = folder / "net.py"
    sys.modules[module.__name__] = module
    try:
        for block in blocks_of(page):
            if not block.runs or (own is not None and block.mark == "of this model"):
                continue
            printed = io.StringIO()
            with redirect_stdout(printed):
                if block.language == "python":
                    _run_python(block, module, file, pair)
                else:
                    _run_shell(block, folder)
            if own is None and block.output is not None:
                assert _is(block.output, printed.getvalue()), f"{name}, line {block.line}:\n{printed.getvalue()}"
    finally:
        del sys.modules[module.__name__]


def _run_python(block: Block, module: types.ModuleType, file: Path, own: tuple[Any, Any] | None) -> None:
    """At its line of the page, so that source lines of models are those of a file."""
    source = "\n" * (block.line - 1) + block.text
    linecache.cache[str(file)] = len(source), None, source.splitlines(keepends=True), str(file)
    tree = ast.parse(source)
    if own is not None:
        module.__dict__["_own"] = own
        tree.body = [following for statement in tree.body for following in _with_own(statement)]
    exec(compile(tree, str(file), "exec"), module.__dict__)  # noqa: S102 - a page of ours


def _run_shell(block: Block, folder: Path) -> None:
    """Lines that are svexport's commands in this process, all others by a shell."""
    where = ROOT if block.mark == "in the repository" else folder
    for piece in _pieces(block.text):
        if _COMMAND.match(piece):
            assert main(shlex.split(piece, comments=True)[1:]) == 0, piece
        else:
            done = subprocess.run(["bash", "-euc", piece], cwd=where, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{piece}\n{done.stderr}"
            print(done.stdout, end="")


def _pieces(text: str) -> Iterator[str]:
    other: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        if _COMMAND.match(line):
            if other:
                yield "\n".join(other)
            other = []
            yield line
        else:
            other.append(line)
    if any(line.strip() for line in other):
        yield "\n".join(other)


def _with_own(statement: ast.stmt) -> list[ast.stmt]:
    """A statement, and behind one that makes ``model`` or ``x``, one that puts the reader's there."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    if not {"model", "x"} & names:
        return [statement]
    return [statement, *ast.parse("model, x = _own").body]


def _is(expected: str, printed: str) -> bool:
    """Whether it is what a page says; a line of three dots there stands for any lines."""
    pieces = [re.escape(_plain(piece)) for piece in re.split(r"^\.\.\.$", expected, flags=re.MULTILINE)]
    return re.fullmatch(" ?.*".join(pieces), _plain(printed)) is not None


def _plain(text: str) -> str:
    """Without what differs from machine to machine: digits, and the widths of columns that follow from them."""
    text = re.sub(r"(?<![\w.])[-+]?(\d[\d,]*\.?\d*|\.\d+)(e[-+]?\d+)?", "#", text)
    return re.sub(r"\s+", " ", re.sub(r"─+", "─", text)).strip()


def check(block: Block) -> None:
    """What can be said of a block that does not run: its syntax, svexport's commands and names in it."""
    if block.language == "sh":
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
        for line in re.sub(r"\$\(svexport [^)]*\)", "FILE", block.text).replace("\\\n", " ").splitlines():
            if line.startswith("svexport "):
                parser().parse_args(shlex.split(line, comments=True)[1:])  # SystemExit: wrong usage
    elif block.language == "python":
        for node in ast.walk(ast.parse(block.text)):
            names = ast.unparse(node).split(".") if isinstance(node, ast.Attribute) else []
            if names[:1] == ["svexport"] and all(name.isidentifier() for name in names):
                assert reduce(getattr, names[1:], svexport) is not None


def environment(monkeypatch: Any, folder: Path) -> None:
    """The current folder is ``folder``, where files may be imported from, with two ONNX files."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "graph", [x], [y])
    for name, opset in (("m", 11), ("any", 17)):
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
        (folder / f"{name}.onnx").write_bytes(model.SerializeToString())
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
