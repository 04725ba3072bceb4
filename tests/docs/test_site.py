"""The site builds in strict mode, every page can be read without a network, and every link has a target."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from svexport.ops._op import OPS
from tests.docs.blocks import ROOT

pytest.importorskip("mkdocs", reason="mkdocs is not installed")
pytest.importorskip("material", reason="mkdocs-material is not installed")


class Page(HTMLParser):
    """What a browser loads with a page, what it links to, and where links may lead to on it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if "id" in given:
            self.ids.add(given["id"])
        if tag in ("script", "img", "iframe", "source", "object") and given.get("src"):
            self.loads.append(given["src"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.loads.append(given["href"])
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | {"CI": "1"})
    assert done.returncode == 0, done.stderr
    return {path: Page(path.read_text("utf-8")) for path in folder.rglob("*.html")}, folder


def test_nothing_is_loaded_from_elsewhere(site):
    pages, folder = site
    assert len(pages) > 50
    for path, page in pages.items():
        for source in page.loads:
            assert not urlsplit(source).scheme, f"{path} loads {source}"
            if path.name == "404.html":  # it is served from anywhere, and loads from the root
                source = source.removeprefix("/")
            assert (path.parent / unquote(urlsplit(source).path)).is_file(), f"{path} loads {source}"
    styles = "".join(path.read_text("utf-8") for path in folder.rglob("*.css"))
    assert not re.findall(r"url\([\"']?(?:https?:)?//", styles)


def test_every_link_leads_somewhere(site):
    pages, folder = site
    for path, page in pages.items():
        if path.name == "404.html":  # it is served from anywhere, and links from the root
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{path.relative_to(folder)} links to {link}"
            if target in pages:
                assert unquote(parts.fragment) in pages[target].ids, f"{path.relative_to(folder)} links to {link}"


def test_every_op_has_a_page_of_its_definition(site):
    _, folder = site
    for name, op in OPS.items():
        text = (folder / "ops" / f"{name}.html").read_text("utf-8").replace("<wbr>", "")
        assert f"svexport::{op.node_type}" in text
        assert all(f"<code>{argument.name}</code>" in text for argument in op.arguments)
    assert {path.stem for path in (folder / "ops").glob("*.html")} == {*OPS, "index"}


def test_marks_for_the_tests_are_not_on_the_pages(site):
    pages, _ = site
    assert not [path for path in pages if "<!-- not run" in path.read_text("utf-8")]
    assert "not run: needs TensorRT" in (Path(ROOT) / "docs" / "problems" / "plugin-not-found.md").read_text("utf-8")
