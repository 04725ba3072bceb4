"""Rules that keep the package readable: no cyclic imports of folders, and limits on functions and files."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "svexport"

LONGEST_FUNCTION = 80
"""Lines of a function, its signature with it, its docstring aside."""

MOST_ARGUMENTS = 8

LONGEST_FILE = 600

MOST_KERNELS, MOST_KERNEL_LINES = 62, 20_880
"""Of csrc. Lower them with what goes."""

TRACERS = (
    *("complex", "conversions", "corrections", "decompose", "dynamo", "exact", "jit_graph", "torchscript"),
    "translations",
)
MOST_TRACER_LINES = 1_799
"""With code, of the files of svexport/exporter that correct the two tracers. Lower it with what goes."""

MANY_ARGUMENTS = {
    # The schema of an op: its reference, implementation and body have its inputs and attributes in order.
    "ops/_decoder/layers.py": {"decode"},
    "ops/camera_sample.py": {"__init__", "_project", "camera_sample", "forward", "implementation", "reference"},
    "ops/deform_conv2d.py": {"__init__", "deform_conv2d", "implementation", "reference"},
    "ops/ms_deform_attn.py": {"__init__", "forward"},
    "symbolic/camera_sample.py": {"body"},
    "symbolic/deform_conv2d.py": {"body", "convert"},
    "symbolic/transformer_decoder.py": {"body"},
    # What users call, with every option by name.
    "exporter/export.py": {"export"},
    "runtime/build.py": {"build"},
    "runtime/compare.py": {"compare"},
    "runtime/triton.py": {"triton_repository"},
    "tensorrt/command.py": {"trtexec"},
}

ENTRANCES = {"__init__", "__main__"}
"""Of the package itself: they import what they lead to, on first use."""


@cache
def sources() -> dict[str, ast.Module]:
    return {p.relative_to(PACKAGE).as_posix(): ast.parse(p.read_text("utf-8")) for p in sorted(PACKAGE.rglob("*.py"))}


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    docstring = 0
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        docstring = (first.end_lineno or 0) - first.lineno + 1
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def arguments_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def lines_with_code(text: str) -> int:
    """Without blank lines, and those of comments and docstrings alone."""
    said = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({n for t in tokens if t.type not in nothing for n in range(t.start[0], t.end[0] + 1)} - said)


def imported(path: str, tree: ast.AST) -> Iterator[str]:
    """Every module that a file imports, on first use too but not for types alone, as ``exporter.aten.pool``."""
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in set(ast.walk(tree)) - for_types:
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: svexport imports by absolute names"
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (m.removeprefix("svexport.") for m in modules if m.startswith("svexport."))


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """The names along one cycle, its first at its end again; empty where there is none."""
    done: set[str] = set()

    def search(path: list[str]) -> list[str]:
        for name in sorted(edges.get(path[-1], ())):
            if name in path:
                return [*path[path.index(name) :], name]
            if name not in done and (found := search([*path, name])):
                return found
        done.add(path[-1])
        return []

    return next((found for name in sorted(edges) if name not in done and (found := search([name]))), [])


def test_a_cycle_is_found() -> None:
    edges = {"a": {"b", "c"}, "b": {"c"}, "c": {"d"}}
    assert cycle(edges) == []
    assert cycle({**edges, "d": {"b"}}) == ["b", "c", "d", "b"]


def test_no_folder_imports_one_that_imports_it() -> None:
    edges: dict[str, set[str]] = {}
    for path, tree in sources().items():
        room = path.removesuffix(".py").partition("/")[0]
        if room not in ENTRANCES:
            rooms = {module.partition(".")[0] for module in imported(path, tree)}
            edges.setdefault(room, set()).update(rooms - {room})
    assert {"exporter", "graph", "runtime", "tensorrt", "tracing"} <= set(edges)
    assert edges["runtime"] >= {"graph", "tracing"}
    assert not cycle(edges), " imports ".join(cycle(edges))


def test_ops_import_torch_alone_and_nobody_imports_the_command_line() -> None:
    for path, tree in sources().items():
        rooms = {module.partition(".")[0] for module in imported(path, tree)}
        if path.startswith("ops/"):
            assert rooms <= {"_version", "errors", "ops"}, path
        if not path.startswith(("cli/", "__")):
            assert "cli" not in rooms, path


@pytest.mark.parametrize("limit", ["lines", "arguments"])
def test_functions_are_short(limit: str) -> None:
    most, count = (LONGEST_FUNCTION, lines_of) if limit == "lines" else (MOST_ARGUMENTS, arguments_of)
    excepted = (
        {(path, name) for path, names in MANY_ARGUMENTS.items() for name in names} if limit == "arguments" else set()
    )
    over = {
        (path, function.name): f"svexport/{path}:{function.lineno}: {function.name} has {count(function)} {limit}"
        for path, tree in sources().items()
        for function in functions(tree)
        if count(function) > most
    }
    assert not (set(over) - excepted), "\n".join(text for key, text in over.items() if key not in excepted)
    assert not (excepted - set(over)), f"no exceptions any more: {sorted(excepted - set(over))}"


def test_files_are_of_one_subject() -> None:
    lengths = {path: (PACKAGE / path).read_text("utf-8").count("\n") for path in sources()}
    assert not {path: length for path, length in lengths.items() if length > LONGEST_FILE}


def test_lines_with_code_are_counted() -> None:
    text = '"""Of a file."""\n\nX = (\n    1,  # one\n    # two\n)\n"""Of X."""\n\n\n'
    text += 'def f():\n    """Of f.\n\n    """\n    return """a\nb"""\n'
    assert lines_with_code(text) == 6


def test_corrections_of_tracers_are_few() -> None:
    """What one tracer needs is a rule for both, wherever it can be."""
    lines = sum(lines_with_code((PACKAGE / "exporter" / f"{name}.py").read_text("utf-8")) for name in TRACERS)
    assert lines <= MOST_TRACER_LINES, f"{lines} lines, {MOST_TRACER_LINES} at most: say each meaning once"


def test_kernels_are_few() -> None:
    """One stays where without it a named workload loses 10 %, or one shape in fifty does."""
    texts = [p.read_text("utf-8") for p in (PACKAGE / "csrc").rglob("*") if p.is_file()]
    kernels = sum(len(re.findall(r"\b__global__ void\b", text)) for text in texts)
    lines = sum(text.count("\n") for text in texts)
    said = (
        "take out what another does as well, or raise the number above in the commit that says what the new one gains"
    )
    assert kernels <= MOST_KERNELS, f"{kernels} kernels in svexport/csrc, {MOST_KERNELS} at most: {said}"
    assert lines <= MOST_KERNEL_LINES, f"{lines} lines in svexport/csrc, {MOST_KERNEL_LINES} at most: {said}"
