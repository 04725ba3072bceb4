"""The text of a Python file: read with limits, addressed by syntax tree positions, and edited without reformatting."""

from __future__ import annotations

import ast
import io
import os
import re
import stat
import tempfile
import tokenize
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MAX_BYTES", "Edit", "Source", "UnreadableError"]

MAX_BYTES = 4 << 20  # generated tables are larger; models are not

_NEWLINE = re.compile(r"\r\n|\r|\n")
_NOQA = re.compile(r"#\s*noqa(?P<codes>\s*:\s*[A-Za-z]+[0-9]+(?:[\s,]+[A-Za-z]+[0-9]+)*)?", re.IGNORECASE)
_FILE_NOQA = re.compile(r"^\s*#\s*svexport:\s*noqa(?P<codes>\s*:\s*SVX[0-9]+(?:[\s,]+SVX[0-9]+)*)?\s*$", re.MULTILINE)


class UnreadableError(Exception):
    """Raised for a file that cannot be analysed, with the reason as message and the place in ``line``, ``column``."""

    def __init__(self, message: str, line: int = 1, column: int = 1) -> None:
        super().__init__(message)
        self.line = line
        self.column = column


@dataclass(frozen=True, order=True)
class Edit:
    """Replaces the characters from ``start`` to ``end`` by ``text``."""

    start: int
    end: int
    text: str


class Source:
    """Text and syntax tree of one file.

    Attributes:
        path: the file.
        text: its content, with original line ends.
        tree: its syntax tree, which is never executed.

    Raises:
        UnreadableError: if the file is not a regular file, is too large, or does not decode or parse.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        data = _read(path)
        try:
            self.encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            self.text = data.decode(self.encoding)
        except (SyntaxError, UnicodeDecodeError, LookupError) as error:
            raise UnreadableError(f"cannot be decoded: {error}") from error
        self._set(self.text)

    def _set(self, text: str) -> None:
        self.text = text
        self.tree = parse(text)
        self._starts = [0, *(match.end() for match in _NEWLINE.finditer(text))]
        self._comments: dict[int, tuple[int, str]] | None = None

    def offset(self, line: int, column: int) -> int:
        """The index in ``text`` of a position as ``ast`` gives it: lines from 1, columns in bytes of UTF-8."""
        start = self._starts[line - 1]
        end = self._starts[line] if line < len(self._starts) else len(self.text)
        content = self.text[start:end]
        return start + (column if content.isascii() else len(content.encode()[:column].decode(errors="ignore")))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where ``node`` begins and ends in ``text``, without parentheses around it."""
        return (
            self.offset(node.lineno, node.col_offset),  # type: ignore[attr-defined]
            self.offset(node.end_lineno, node.end_col_offset),  # type: ignore[attr-defined]
        )

    def segment(self, node: ast.AST) -> str:
        """The text of ``node``, without parentheses around it."""
        start, end = self.span(node)
        return self.text[start:end]

    def receiver(self, call: ast.Call) -> str:
        """The text before the dot of a method call, including parentheses."""
        assert isinstance(call.func, ast.Attribute)
        text = self.segment(call.func)[: -len(call.func.attr)].rstrip()
        return text.removesuffix(".").rstrip()

    def replace(self, node: ast.AST, text: str) -> Edit | None:
        """The edit that replaces ``node`` by ``text``; None if a comment would be lost."""
        start, end = self.span(node)
        if "#" in self.text[start:end] and self.comments_in(start, end):
            return None
        return Edit(start, end, text)

    def position(self, node: ast.AST) -> tuple[int, int]:
        """Line and column of ``node`` for people: both from 1, columns in characters."""
        start, _ = self.span(node)
        return node.lineno, start - self._starts[node.lineno - 1] + 1  # type: ignore[attr-defined]

    @property
    def comments(self) -> dict[int, str]:
        """The comment of each line that has one."""
        return {line: text for line, (_, text) in self._found_comments.items()}

    def comment(self, line: int) -> str:
        """The comment of a line, empty if it has none."""
        return self._found_comments.get(line, (0, ""))[1]

    @property
    def _found_comments(self) -> dict[int, tuple[int, str]]:
        """By line, the index in ``text`` where its comment begins, and the comment."""
        if self._comments is None:
            self._comments = {}
            text = "\n".join(_NEWLINE.split(self.text))
            try:
                for token in tokenize.generate_tokens(io.StringIO(text).readline):
                    if token.type == tokenize.COMMENT:
                        line, column = token.start
                        self._comments[line] = (self._starts[line - 1] + column, token.string)
            except (tokenize.TokenError, SyntaxError):  # ast took it: what came before the error counts
                pass
        return self._comments

    def comments_in(self, start: int, end: int) -> bool:
        """Whether a comment begins between two indices of ``text``."""
        return any(start <= at < end for at, _ in self._found_comments.values())

    def _end(self, line: int) -> int:
        return self._starts[line] if line < len(self._starts) else len(self.text)

    def suppressed(self, code: str, lines: Iterable[int]) -> bool:
        """Whether ``# noqa``, alone or with this code, is on one of ``lines``, or ``# svexport: noqa`` in the file."""
        if "noqa" not in self.text.lower():
            return False
        found = _FILE_NOQA.finditer(self.text)
        if any(match.group().strip() in self.comments.values() and _names(match, code) for match in found):
            return True
        return any(
            _names(match, code) for line in lines if (match := _NOQA.search(self.comments.get(line, ""))) is not None
        )

    def apply(self, edits: Sequence[Edit], imports: Iterable[str] = ()) -> None:
        """Edits the text, adds ``import name`` for each of ``imports`` that is missing, and parses it again.

        Raises:
            UnreadableError: if the result does not parse; nothing is changed then.
        """
        text = self.text
        for edit in sorted({*edits, *self._imports(imports)}, reverse=True):
            text = text[: edit.start] + edit.text + text[edit.end :]
        parse(text)
        self._set(text)

    def _imports(self, names: Iterable[str]) -> list[Edit]:
        present = {
            alias.name
            for node in self.tree.body
            if isinstance(node, ast.Import)
            for alias in node.names
            if alias.asname is None
        }
        missing = sorted({*names} - present)
        if not missing:
            return []
        newline = match.group() if (match := _NEWLINE.search(self.text)) else "\n"
        body = self.tree.body
        imports = [n for n in body if isinstance(n, (ast.Import, ast.ImportFrom)) and not _future(n)]
        later = [n for n in imports if isinstance(n, ast.Import) and n.names[0].name > missing[0]]
        before = next(iter(later or imports), None)
        at = self.offset(before.lineno, 0) if before else self._after_docstring()
        return [Edit(at, at, "".join(f"import {name}{newline}" for name in missing))]

    def _after_docstring(self) -> int:
        last = 0
        for node in self.tree.body:
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and last == 0
            if not (is_text or _future(node)):
                break
            last = node.end_lineno or last
        return self._end(last) if last else self._after_comments()

    def _after_comments(self) -> int:
        line = 1
        while self.comments.get(line) and self.text[self._starts[line - 1] :].startswith("#"):
            line += 1
        return self._starts[line - 1]

    def write(self) -> None:
        """Writes the text under another name and renames it, keeping the file's permissions.

        Raises:
            OSError: if the folder or the file cannot be written; the file is unchanged then.
        """
        target = self.path.resolve()  # a link stays one
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(self.text.encode(self.encoding))
            os.chmod(name, stat.S_IMODE(target.stat().st_mode))
            os.replace(name, target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def parse(text: str) -> ast.Module:
    """The syntax tree of ``text``.

    Raises:
        UnreadableError: if the text does not parse.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes and the like are another linter's
            return ast.parse(text)
    except SyntaxError as error:
        message = f"does not parse: {error.msg}"
        raise UnreadableError(message, max(error.lineno or 1, 1), max(error.offset or 1, 1)) from error
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes, nesting without end
        raise UnreadableError(f"does not parse: {error or type(error).__name__}") from error


def _read(path: Path) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableError("not a regular file")
        if status.st_size > MAX_BYTES:
            raise UnreadableError(f"larger than {MAX_BYTES >> 20} MiB: not read")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise UnreadableError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > MAX_BYTES:
        raise UnreadableError(f"larger than {MAX_BYTES >> 20} MiB: not read")
    return data


def _names(match: re.Match[str], code: str) -> bool:
    codes = match.group("codes")
    return codes is None or code in re.findall(r"[A-Z]+[0-9]+", codes.upper())


def _future(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"
