"""Hooks of ``mkdocs``: adds the generated pages, resolves links into the repository, drops marks for the tests.

``tests/docs`` runs the blocks of a page; what it has to know stands in HTML comments, which no reader needs.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from docs.generate import ops, reference, repository  # noqa: E402 - of this checkout, wherever mkdocs is called

_SHIM = "https://unpkg.com/iframe-worker/shim"
_NARROW = re.compile(r"<(td|th|h[1-3])\b.*?</\1>", re.DOTALL)
_LONG_NAME = re.compile(r"[\w./:]{21,}(?=[^<>]*<)")  # no attribute of a tag
_JOINT = re.compile(r"(?:(?<=[A-Za-z0-9]_)|(?<=[./:]))(?=[A-Za-z])")
_COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """The generated pages in the navigation, where ``mkdocs.yml`` names their folder."""
    entries = {"ops/": ops.navigation(), "reference/": reference.navigation()}
    config.nav = [
        {title: entries.get(target, target) if isinstance(target, str) else target}
        for entry in config.nav
        for title, target in entry.items()
    ]
    return config


def on_files(files: Files, config: Any) -> Files:
    pages = {**ops.pages(), **reference.pages()}
    written = {file.src_uri: Path(str(file.abs_src_path)).read_text("utf-8") for file in files.documentation_pages()}
    linked = repository.linked({f"docs/{uri}": text for uri, text in {**written, **pages}.items()})
    for uri, text in {**pages, **linked.pages}.items():
        files.append(File.generated(config, uri, content=text))
    for uri, path in linked.copies.items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """The one script that the theme would load from elsewhere is one of ours."""
    return output.replace(_SHIM, get_relative_url("assets/worker.js", page.url))


def on_post_template(output_content: str, *, template_name: str, config: Any) -> str:
    return output_content.replace(_SHIM, "/assets/worker.js")  # of the page for addresses that lead nowhere


def on_page_content(html: str, *, page: Any, config: Any, files: Files) -> str:
    """Long names in cells of tables and in headings may break after dots, slashes, colons and underscores."""
    return _NARROW.sub(lambda part: _LONG_NAME.sub(lambda name: _JOINT.sub("<wbr>", name[0]), part[0]), html)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    return repository.with_links(_COMMENT.sub("", markdown), page.file.src_uri)
