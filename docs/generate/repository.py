"""Files of the repository that pages link to: on the site they are pages too, and so are those that these link to."""

from __future__ import annotations

import json
import logging
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Linked", "linked", "with_links"]

_LOG = logging.getLogger("mkdocs.repository")
ROOT = Path(__file__).parents[2]
FOLDER = "repository"
"""Of the site, where files from outside of ``docs/`` stand with their own paths."""

_LINK = re.compile(
    r"^(?P<fence>```+).*?^(?P=fence)$|`[^`\n]+`"  # code: brackets before parentheses are no link there
    r"|(?P<image>!?)\[(?P<text>[^][]*(?:\[[^][]*\][^][]*)*)\]\((?P<target>[^()\s]+)\)",
    re.MULTILINE | re.DOTALL,
)
_IMAGES = (".png", ".svg")
_LANGUAGES = {
    ".py": "python",
    ".toml": "toml",
    ".json": "json",
    ".cu": "cpp",
    ".cuh": "cpp",
    ".cpp": "cpp",
    ".h": "cpp",
}
_LONGEST = 200_000
"""Bytes of a file that a reader may want to see: measured results are larger, and stay in the repository."""


@dataclass
class Linked:
    """What has to be on the site: pages by place, their text still with the links it has in the repository; images."""

    pages: dict[str, str] = field(default_factory=dict)
    copies: dict[str, Path] = field(default_factory=dict)


def linked(pages: Mapping[str, str]) -> Linked:
    """All that ``pages`` (path in the repository -> text) link to outside of ``docs/``, and what that links to."""
    found = Linked()
    waiting = dict(pages)
    while waiting:
        origin, text = waiting.popitem()
        for path in _targets(text, origin):
            place = _place(path)
            if place is None or not place.startswith(FOLDER) or place in found.pages or place in found.copies:
                continue
            if place.endswith(_IMAGES):
                found.copies[place] = ROOT / path
            else:
                found.pages[place] = waiting[path] = _page(path)
    return found


def with_links(text: str, uri: str) -> str:
    """The text of the page at ``uri`` with its links into the repository made links of the site.

    A folder, and what is too large for a page, is named without a link.
    """
    origin = uri.removeprefix(f"{FOLDER}/").removesuffix(".md") if uri.startswith(FOLDER) else f"docs/{uri}"
    if uri.startswith(FOLDER) and not (ROOT / origin).is_file():
        origin += ".md"

    def resolved(match: re.Match[str]) -> str:
        if match["target"] is None:
            return match[0]
        path, anchor = _path(match["target"], origin)
        if path is None or (path.startswith("docs/") and origin.startswith("docs/")):
            return match[0]
        if not (ROOT / path).exists() and not path.startswith("docs/"):
            _LOG.warning("%s links to %s, which is not in the repository", uri, path)  # an error of a strict build
        place = _place(path)
        if place is None:
            return match["text"]
        return f"{match['image']}[{match['text']}]({posixpath.relpath(place, posixpath.dirname(uri) or '.')}{anchor})"

    return _LINK.sub(resolved, text)


def _targets(text: str, origin: str) -> Iterator[str]:
    for match in _LINK.finditer(text):
        path, _ = _path(match["target"] or "", origin)
        if path is not None:
            yield path


def _path(target: str, origin: str) -> tuple[str | None, str]:
    """A link's path in the repository, and its anchor; None for one that leads elsewhere or stays on the page."""
    target, hash_, anchor = target.partition("#")
    if not target or "://" in target or target.startswith(("mailto:", "/")):
        return None, ""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
    return (None if path.startswith("..") else path), hash_ + anchor


def _place(path: str) -> str | None:
    """Where a file of the repository stands on the site; None if it does not."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    file = ROOT / path
    if not file.is_file() or (file.suffix not in _IMAGES and file.stat().st_size > _LONGEST):
        return None
    return f"{FOLDER}/{path}" if file.suffix in (*_IMAGES, ".md") else f"{FOLDER}/{path}.md"


def _page(path: str) -> str:
    text = (ROOT / path).read_text("utf-8")
    if path.endswith(".md"):
        return text
    if path.endswith(".ipynb"):
        return _notebook(text, path)
    fence = "`" * (3 + max(map(len, re.findall(r"`+", text)), default=0))
    return f"# {path}\n\n{fence}{_LANGUAGES.get(Path(path).suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def _notebook(text: str, path: str) -> str:
    pieces = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        pieces.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
    where = f"*This is `{path}` without its outputs: run it to see them.*"
    return "\n\n".join([pieces[0], where, *pieces[1:]]) + "\n"
