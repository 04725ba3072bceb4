"""Reads Python sources, runs the rules over them, and reports or fixes what they find."""

from __future__ import annotations

import ast
import fnmatch
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from svexport.advise.flow import Flow
from svexport.advise.functions import File, Function, Reach
from svexport.advise.kinds import Peers
from svexport.advise.report import AdviseReport, Finding
from svexport.advise.rule import Found, Rule, Scope
from svexport.advise.rules import RULES
from svexport.advise.source import Edit, Source, UnreadableError
from svexport.errors import SvexportError

__all__ = ["AdviseError", "advise", "selected"]

# Folders that hold none of the repo's own sources.
LEFT_OUT = {
    ".git", ".hg", ".svn", ".venv", "venv", ".env", "env", ".tox", ".nox", ".eggs", ".mypy_cache", ".ruff_cache",
    ".pytest_cache", ".ipynb_checkpoints", "__pycache__", "__pypackages__", "node_modules", "site-packages", "build",
    "dist",
}  # fmt: skip
_ROUNDS = 100  # limit on rounds of fixes: one fix may enable another
MAX_NODES = 20_000  # limit on the nodes of a function's syntax tree: several times what people write


class AdviseError(SvexportError):
    """A path or rule does not exist, or a fix could not be written."""


def advise(
    paths: Iterable[str | os.PathLike[str]] = (".",),
    *,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    exclude: Sequence[str] = (),
    fix: bool = False,
) -> AdviseReport:
    """Finds habits that cost at export or run time in Python sources, without importing or running any of them.

    Args:
        paths: files, and folders whose ``*.py`` files are read; links to folders are not followed.
        select: codes or prefixes of codes of the only rules to run; all rules if empty.
        ignore: codes or prefixes of codes of rules not to run.
        exclude: patterns of files and folders to leave out, matched against the name and the path.
        fix: whether to write the better form into the files, where it certainly computes the same.

    Returns:
        What was found; with ``fix``, what is left. Files that cannot be read or parsed are in ``report.unread``.

    Raises:
        AdviseError: if a path or a rule does not exist, or a fix cannot be written.
    """
    rules = selected(select, ignore)
    findings: list[Finding] = []
    unread: list[Finding] = []
    fixed: dict[str, int] = {}
    number = 0
    for path in _files(list(paths), exclude):
        number += 1
        name = _shown(path)
        try:
            found, too_long, count = _advise_file(path, name, rules, fix)
        except UnreadableError as error:
            unread.append(Finding(name, error.line, error.column, "", str(error)))
            continue
        findings += found
        unread += too_long
        if count:
            fixed[name] = count
    return AdviseReport(number, tuple(sorted(findings)), tuple(sorted(unread)), fixed)


def selected(select: Sequence[str] = (), ignore: Sequence[str] = ()) -> list[Rule]:
    """The rules that ``select`` names (all rules if it is empty), except those that ``ignore`` names.

    Raises:
        AdviseError: if one of the names is not a prefix of any code.
    """
    wrong = [given for given in (*select, *ignore) if not any(_begins(code, given) for code in RULES)]
    if wrong:
        raise AdviseError(
            f"expected codes of rules such as SVX101 or SVX1, got {', '.join(wrong)}; there are {', '.join(RULES)}"
        )
    return [
        rule
        for code, rule in RULES.items()
        if (not select or any(_begins(code, given) for given in select))
        and not any(_begins(code, given) for given in ignore)
    ]


def _begins(code: str, given: str) -> bool:
    return bool(given) and code.startswith(given.upper())


def _files(paths: list[str | os.PathLike[str]], exclude: Sequence[str]) -> Iterator[Path]:
    missing = [os.fspath(path) for path in paths if not os.path.lexists(path)]
    if missing:
        raise AdviseError(f"expected files and folders, no such: {', '.join(map(_shown, missing))}")
    seen: set[str] = set()  # real paths: a file may have two names, or be given twice
    for path in paths:
        for file in sorted(_below(Path(path), exclude)) if os.path.isdir(path) else [Path(path)]:
            real = os.path.realpath(file)
            if real not in seen:
                seen.add(real)
                yield file


def _below(folder: Path, exclude: Sequence[str]) -> Iterator[Path]:
    def kept(path: Path) -> bool:
        return not any(fnmatch.fnmatch(path.name, p) or fnmatch.fnmatch(path.as_posix(), p) for p in exclude)

    for place, folders, files in os.walk(folder):
        folders[:] = sorted(
            n for n in folders if n not in LEFT_OUT and not n.endswith(".egg-info") and kept(Path(place, n))
        )
        for name in files:
            path = Path(place, name)
            if name.endswith(".py") and kept(path):
                yield path


def _shown(path: str | os.PathLike[str]) -> str:
    """The path as printable text: control characters and bytes that do not decode are escaped."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass
class _Analysis:
    """The findings of one source, and its functions that were too long to analyse."""

    source: Source
    found: list[tuple[Rule, Found]] = field(default_factory=list)
    too_long: list[Function] = field(default_factory=list)

    def findings(self, name: str) -> list[Finding]:
        result = []
        for rule, found in self.found:
            line, column = self.source.position(found.node)
            end = found.node.end_lineno or line  # type: ignore[attr-defined]
            result.append(Finding(name, line, column, rule.code, found.message, bool(found.edits), end))
        return result


def _advise_file(path: Path, name: str, rules: list[Rule], fix: bool) -> tuple[list[Finding], list[Finding], int]:
    """The findings of a file, its functions that are too long to analyse, and the number of places fixed."""
    source = Source(path)
    if "torch" not in source.text:
        return [], [], 0
    fixed = 0
    analysis = _analyse(source, rules)
    for _ in range(_ROUNDS if fix else 0):
        edits, imports, count = _together(analysis.found)
        if not edits:
            break
        source.apply(edits, imports)
        fixed += count
        analysis = _analyse(source, rules)
    if fixed:
        try:
            source.write()
        except OSError as error:
            raise AdviseError(f"cannot write {name}: {error.strerror or error}; the file was not changed") from error
    message = f"a function of more than {MAX_NODES:,} nodes is not analysed"
    too_long = [Finding(name, *source.position(f.node), "", message) for f in analysis.too_long]
    return analysis.findings(name), too_long, fixed


def _together(found: Iterable[tuple[Rule, Found]]) -> tuple[list[Edit], set[str], int]:
    """Collects the edits of findings that do not overlap: their edits, the imports these need, and their number."""
    edits: list[Edit] = []
    imports: set[str] = set()
    count = 0
    for _, item in found:
        clash = any(e.start < taken.end and taken.start < e.end for e in item.edits for taken in edits)
        if item.edits and not clash:
            edits += item.edits
            imports |= {*item.imports}
            count += 1
    return edits, imports, count


def _analyse(source: Source, rules: list[Rule]) -> _Analysis:
    analysis = _Analysis(source)
    try:
        file = File(source)
        flows: dict[Function, Flow] = {}
        scopes = _scopes(file, flows)
        while _reach_given(scopes):
            scopes = _scopes(file, flows)  # fresh scopes, because kinds depend on which functions are reached
        for function, scope in scopes.items():
            if function.reach is Reach.OTHER:
                continue
            if sum(map(len, function.nodes.values())) > MAX_NODES:
                analysis.too_long.append(function)
                continue
            for rule in rules:
                if function.reach >= rule.reach:
                    analysis.found += [(rule, found) for found in rule.find(scope) if _counts(rule, found, scope)]
    except RecursionError as error:
        raise UnreadableError("is nested too deeply") from error
    analysis.found.sort(key=lambda item: (source.span(item[1].node)[0], item[0].code))
    return analysis


def _scopes(file: File, flows: dict[Function, Flow]) -> dict[Function, Scope]:
    scopes: dict[Function, Scope] = {}
    peers = Peers(flows)
    for function in file.functions:  # outer ones come first
        scopes[function] = Scope(function, scopes.get(function.parent) if function.parent else None)
        scopes[function].peers = peers
    peers.update(scopes)
    return scopes


def _reach_given(scopes: dict[Function, Scope]) -> bool:
    """Marks helpers that reached functions call with tensors as reached too; returns whether any reach changed."""
    before = [function.reach for function in scopes]
    for function, scope in scopes.items():  # outer ones come first
        if function.parent is not None:
            function.reach = max(function.reach, function.parent.reach)
        for call in function.all(ast.Call) if function.reach is not Reach.OTHER else []:
            helper = scope.target(call)
            if helper is None or helper.name == "forward":
                continue
            tensors, in_forward = any(map(scope.is_tensor, call.args)), function.reach is Reach.FORWARD
            if not helper.may_be_reached and not (tensors and in_forward and helper.is_set_up_by_name):
                continue
            given = tensors or helper.reach is Reach.TENSORS
            given |= in_forward and helper.takes_axes  # a forward has no numpy arrays, so what has axes is a tensor
            if given and not function.guarded(call):
                helper.reach = max(helper.reach, function.reach)
    return before != [function.reach for function in scopes]


def _counts(rule: Rule, found: Found, scope: Scope) -> bool:
    """Whether a finding counts: no comment suppresses it, and no f-string holds it (old Pythons misplace its nodes)."""
    if any(isinstance(parent, ast.JoinedStr) for _, parent in scope.function.above(found.node)):
        return False
    statement = scope.function.statement(found.node)
    last = statement.body[0].lineno - 1 if hasattr(statement, "body") else statement.end_lineno or statement.lineno
    line = found.node.lineno  # type: ignore[attr-defined]
    return not scope.source.suppressed(rule.code, {line, statement.lineno, max(last, statement.lineno)})
