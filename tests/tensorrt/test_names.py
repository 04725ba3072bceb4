"""The code uses no name of TensorRT that a version running that code lacks.

The test walks the code with the set of versions that may run it; ``hasattr(..., "name")`` splits the set by who has
the name. The names of each version come from its Python bindings (``reference/api.json``).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import svexport
from tests.tensorrt.reference import API, VERSIONS

PACKAGE = Path(svexport.__file__).parent
FILES = {
    "tensorrt/aot_plugin.py": VERSIONS[1:],
    "tensorrt/bindings.py": VERSIONS,
    "tensorrt/builder.py": VERSIONS,
    "tensorrt/fields.py": VERSIONS[1:],
    "tensorrt/jit_plugin.py": VERSIONS[1:],
    "tensorrt/options.py": VERSIONS,
    "tensorrt/plugins.py": VERSIONS,
    "tensorrt/python_plugin.py": VERSIONS[1:],
    "tensorrt/signature.py": VERSIONS[1:],
    "tensorrt/torch_tensorrt.py": VERSIONS[1:],  # Torch-TensorRT is for 10 and later
    "runtime/build.py": VERSIONS,
    "runtime/context.py": VERSIONS,
    "runtime/tensorrt.py": VERSIONS,
}
FROM_10 = {"_monitor", "create_plugin"}
"""What is reached after ``load_tensorrt_for_plugins()``, which refuses what is older, or a name of 10 was asked for."""
FROM_10_8 = {"_AotCreator", "_AotPlugin", "_integer"}
"""What ``aot_plugin.plugin_classes`` makes after it has asked for their interface."""
BEFORE_10 = {"_registered_in_library"}
OF_OTHERS = {"clone", "enqueue"}
"""Names that torch's tensors, or our own classes, have too."""

NAMES = {version: {name for cls in API[version].values() for name in cls} | set(API[version]) for version in VERSIONS}
ALL = set().union(*NAMES.values()) - {"()", "__init__"} - OF_OTHERS
SOMEWHERE_ONLY = {name for name in ALL if any(name not in NAMES[version] for version in VERSIONS)}
"""Names that at least one version lacks; a name of another library's that is the same would be a false alarm."""


class Walk:
    """Collects uses of names that some version in the set lacks."""

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.wrong: list[tuple[int, str, str]] = []

    def body(self, statements: Sequence[ast.stmt], versions: frozenset[str]) -> frozenset[str]:
        """The versions that reach the end."""
        for statement in statements:
            versions = self.statement(statement, versions)
        return versions

    def statement(self, node: ast.stmt, versions: frozenset[str]) -> frozenset[str]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inside = self.within(node.name, versions)
            for part in (*node.decorator_list, node.args):
                self.expression(part, versions)
            self.body(node.body, inside)
            return versions
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                self.expression(base, versions)
            self.body(node.body, self.within(node.name, versions))
            return versions
        if isinstance(node, ast.If):
            yes, no = self.condition(node.test, versions)
            return self.body(node.body, yes) | self.body(node.orelse, no)
        if isinstance(node, (ast.Return, ast.Raise)):
            self.expression(node, versions)
            return frozenset()
        if isinstance(node, (ast.For, ast.While, ast.With, ast.Try)):
            fields = [part for name, part in ast.iter_fields(node) if name not in ("body", "orelse", "finalbody")]
            for part in fields:
                for one in part if isinstance(part, list) else [part]:
                    if isinstance(one, ast.ExceptHandler):
                        self.body(one.body, versions)
                    elif isinstance(one, ast.AST):
                        self.expression(one, versions)
            for name in ("body", "orelse", "finalbody"):
                self.body(getattr(node, name, []), versions)
            return versions
        self.expression(node, versions)
        return versions

    @staticmethod
    def within(name: str, versions: frozenset[str]) -> frozenset[str]:
        old = {"8.6.1"}
        if name in FROM_10_8:
            return versions - old - {"10.1.0"}
        return versions - old if name in FROM_10 else versions & old if name in BEFORE_10 else versions

    def condition(self, test: ast.expr, versions: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        """The versions with which a test may hold, and those with which it may not."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            no, yes = self.condition(test.operand, versions)
            return yes, no
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            yes = versions
            for value in test.values:
                yes, _ = self.condition(value, yes)
            return yes, versions
        if isinstance(test, ast.BoolOp):
            yes, no = frozenset(), versions
            for value in test.values:
                more, no = self.condition(value, no)
                yes |= more
            return yes, no
        if name := asked(test):
            have = frozenset(v for v in versions if name in NAMES[v])
            return have, versions - have
        self.expression(test, versions)
        return versions, versions

    def expression(self, node: ast.AST, versions: frozenset[str]) -> None:
        if isinstance(node, ast.IfExp):
            yes, no = self.condition(node.test, versions)
            self.expression(node.body, yes)
            return self.expression(node.orelse, no)
        if isinstance(node, ast.BoolOp):
            self.condition(node, versions)
            return None
        if asked(node):
            return None
        if isinstance(node, ast.Attribute):
            self.attribute(node, versions)
        for child in ast.iter_child_nodes(node):
            self.expression(child, versions)
        return None

    def attribute(self, node: ast.Attribute, versions: frozenset[str]) -> None:
        outer = node.value
        of_class = outer.attr if isinstance(outer, ast.Attribute) and is_trt(outer.value) else None
        if is_trt(outer) and not node.attr.startswith("__"):
            self.used.add(node.attr)
            lacking = [v for v in versions if node.attr not in API[v]]
        elif of_class is not None and of_class in API[VERSIONS[-1]]:
            self.used.add(f"{of_class}.{node.attr}")
            lacking = [v for v in versions if of_class in API[v] and node.attr not in API[v][of_class]]
        elif node.attr in SOMEWHERE_ONLY and not (isinstance(outer, ast.Name) and outer.id in ("self", "torch")):
            self.used.add(node.attr)
            lacking = [v for v in versions if node.attr not in NAMES[v]]
        else:
            if node.attr in ALL:
                self.used.add(node.attr)
            return
        if lacking:
            self.wrong.append((node.lineno, ast.unparse(node), ", ".join(sorted(lacking))))


def is_trt(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in ("trt", "_trt") and isinstance(node.value, ast.Name) and node.value.id == "self"
    return isinstance(node, ast.Name) and node.id in ("trt", "tensorrt")


def asked(node: ast.AST) -> str | None:
    """``name`` of ``hasattr(anything, "name")``."""
    call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr"
    if call and isinstance(node.args[1], ast.Constant):
        return str(node.args[1].value)
    return None


def walked(text: str, versions: Sequence[str] = VERSIONS) -> Walk:
    walk = Walk()
    walk.body(ast.parse(text).body, frozenset(versions))
    return walk


@pytest.mark.parametrize("file", FILES)
def test_every_name_is_there(file: str) -> None:
    walk = walked((PACKAGE / file).read_text(), FILES[file])
    assert not walk.wrong


def test_names_that_matter_are_among_those_walked() -> None:
    used = set().union(*(walked((PACKAGE / file).read_text(), FILES[file]).used for file in FILES))
    assert {"IProgressMonitor", "OnnxParserRefitter", "progress_monitor", "node_name", "execute_async_v3"} <= used
    assert {"BuilderFlag.TF32", "MemoryPoolType.WORKSPACE", "set_shape_input", "get_tensor_profile_shape"} <= used


def texts() -> Iterator[tuple[str, list[str]]]:
    yield "trt.IProgressMonitor()", ["8.6.1"]
    yield "if hasattr(config, 'progress_monitor'):\n config.progress_monitor = trt.IProgressMonitor()", []
    yield "x = trt.IProgressMonitor() if hasattr(config, 'progress_monitor') else None", []
    yield "x = None if hasattr(config, 'progress_monitor') else trt.IProgressMonitor()", ["8.6.1"]
    yield "def f():\n if not hasattr(trt, 'Refitter'):\n  return 1\n trt.Refitter(engine)", []
    yield "def f():\n if not hasattr(trt, 'OnnxParserRefitter'):\n  raise E\n trt.OnnxParserRefitter(r)", []
    yield "trt.BuilderFlag.FP4", ["10.1.0, 11.4.0, 8.6.1"]
    yield "engine.device_memory_size", ["11.4.0"]
    yield "hasattr(engine, 'device_memory_size') and engine.device_memory_size", []
    yield "builder.max_batch_size", ["10.1.0, 10.16.1, 11.4.0"]
    yield "config.max_workspace_size = 1", ["10.1.0, 10.16.1, 11.4.0"]
    yield "config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED", []
    yield "trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH", ["11.4.0"]
    yield "self.trt.NoSuchThing", [", ".join(sorted(VERSIONS))]
    yield "trt.NoSuchThing", [", ".join(sorted(VERSIONS))]


@pytest.mark.parametrize(("text", "lacking"), list(texts()))
def test_the_walk_finds_what_is_lacking(text: str, lacking: list[str]) -> None:
    assert [found[2] for found in walked(text).wrong] == lacking


def test_every_file_that_uses_tensorrt_is_walked() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if any(is_trt(node.value) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)):
            found.add(path.relative_to(PACKAGE).as_posix())
    assert found - {"__init__.py"} <= set(FILES)
