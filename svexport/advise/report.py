"""The report of findings in files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["AdviseReport", "Finding"]


@dataclass(frozen=True, order=True)
class Finding:
    """One place where a rule applies.

    Attributes:
        file: path as given, or below the given folder.
        line, column: position, counted from 1.
        code: code of the rule.
        message: the pattern found, and the better form.
        fixable: whether ``fix`` writes the better form.
    """

    file: str
    line: int
    column: int
    code: str
    message: str
    fixable: bool = False
    end_line: int = 0

    def __str__(self) -> str:
        mark = "[*] " if self.fixable else ""
        return f"{self.file}:{self.line}:{self.column}: {self.code} {mark}{self.message}"

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "end_line": self.end_line,
            "code": self.code,
            "message": self.message,
            "fixable": self.fixable,
        }


@dataclass(frozen=True)
class AdviseReport:
    """The result of :func:`svexport.advise.advise`.

    Attributes:
        files: number of files read.
        findings: the findings, by file and position.
        unread: files that could not be analysed, as findings whose code is ``""``.
        fixed: number of fixed findings, by file.
    """

    files: int
    findings: tuple[Finding, ...]
    unread: tuple[Finding, ...] = ()
    fixed: Mapping[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether there is nothing to do, and every file was read."""
        return not self.findings and not self.unread

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "files": self.files,
            "findings": [f.to_dict() for f in self.findings],
            "unread": [{"file": f.file, "line": f.line, "column": f.column, "message": f.message} for f in self.unread],
            "fixed": dict(self.fixed),
        }

    def lines(self) -> list[str]:
        """One line for each finding and unread file, and a summary."""
        shown = [f"{f.file}:{f.line}:{f.column}: error: {f.message}" for f in self.unread]
        shown += [str(f) for f in self.findings]
        fixed = sum(self.fixed.values())
        if fixed:
            shown.append(f"Fixed {_count(fixed, 'place')} in {_count(len(self.fixed), 'file')}.")
        if self.findings:
            fixable = sum(f.fixable for f in self.findings)
            more = f"; [*] {fixable} fixable with `--fix`" if fixable else ""
            where = _count(len({f.file for f in self.findings}), "file")
            shown.append(f"Found {_count(len(self.findings), 'place')} in {where} of {self.files}{more}.")
            shown.append("`svexport advise --explain CODE` says what a habit costs, and shows its better form.")
        elif not self.unread:
            shown.append(f"Nothing found in {_count(self.files, 'file')}.")
        return shown

    def __str__(self) -> str:
        return "\n".join(self.lines())


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
