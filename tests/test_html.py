"""Pages stand alone, show every text as it is, and are never half written."""

from __future__ import annotations

import re
import sys
from functools import cache
from html.parser import HTMLParser

import pytest
import torch

from svexport import html
from svexport.errors import SvexportError
from svexport.parity import parity

HOSTILE = "</style><script>alert('x')</script>&amp;\"' $x_{1}$ \u2192 \u5c42 \0"


class Checked(HTMLParser):
    """Collects tags, ids, text and whatever a browser would load."""

    VOID = ("meta", "use")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self._note(attributes)
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self._note(attributes)

    def _note(self, attributes):
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "data", "action") and not value.startswith("#"):
                self.loads.append(value)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data


def parities():
    torch.manual_seed(0)
    e = torch.randn(500)
    return [
        parity("boxes", e, e + 1e-6 * torch.randn(500)),
        parity("boxes", e, e, run="random"),
        parity(HOSTILE, e, e + 1e-2 * torch.randn(500)),
        parity("infinite", e, torch.where(e > 2, float("inf"), e)),
        parity("empty", e[:0], e[:0]),
        parity("shape", e, e[:5]),
    ]


NODES = {"Conv": 12, "Add": 3, HOSTILE: 1, **{f"Type{i}": i for i in range(30)}}
PICTURES = {
    "errors": (html.error_figure, parities(), 1e-4),
    "no errors": (html.error_figure, [], 1e-4),
    "zero tolerance": (html.error_figure, parities(), 0.0),
    "many outputs": (html.error_figure, [parity(f"y{i}", torch.ones(3), torch.ones(3)) for i in range(20)], 1e-4),
    "nodes": (html.node_figure, NODES, {"Conv": 12}),
    "labelled": (html.node_figure, {"Conv": 1}, {"Add": 2}, ("traced", "lowered")),
    "no nodes": (html.node_figure, {}, {}),
    "layers": (html.layer_figure, parities(), 1e-4),
    "one layer": (html.layer_figure, parities()[:1], 0.0),
}


@cache
def drawn(name: str) -> str:
    return html.picture(f"{name} {HOSTILE}", *PICTURES[name])


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(name):
    svg = drawn(name)
    checked = Checked(svg)
    assert checked.tags[0] == "svg"
    assert checked.loads == []
    assert "script" not in checked.tags
    assert len(set(checked.ids)) == len(checked.ids)
    assert "viewBox" in svg
    assert "#010203" not in svg  # what stands for the page's own colour


def test_pictures_take_the_colour_of_the_page_and_are_reproducible():
    assert drawn("layers").count("currentColor") > 5
    assert html.picture(f"layers {HOSTILE}", *PICTURES["layers"]) == drawn("layers")


def test_pictures_say_what_they_show():
    errors = Checked(drawn("errors")).text
    assert "boxes" in errors
    assert "$x_{1}$" in errors  # as text, not as a formula
    assert errors.count("outside tolerance") == 3
    nodes = Checked(drawn("nodes")).text
    assert "before: 451 nodes" in nodes
    assert "after: 12 nodes" in nodes
    assert "17 other types" in nodes
    assert "12 more outputs" in Checked(drawn("many outputs")).text
    assert "alert" in Checked(drawn("layers")).text  # the first layer outside


def test_matplotlib_settings_are_left_alone():
    import matplotlib

    before = dict(matplotlib.rcParams)
    html.picture("", *PICTURES["one layer"])
    assert dict(matplotlib.rcParams) == before
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_page_stands_alone():
    body = [html.section("Errors", drawn("errors")), drawn("layers"), drawn("nodes")]
    body += [html.table(("a", "b"), [("x", 1)]), html.note(HOSTILE)]
    text = html.page(HOSTILE, *body)
    checked = Checked(text)
    assert text.startswith("<!DOCTYPE html>")
    assert "script" not in checked.tags
    assert checked.loads == []
    assert not re.search(r"@import|url\((?!#)", text)
    assert checked.tags.count("title") == 1
    assert "prefers-color-scheme: dark" in text
    assert len(set(checked.ids)) == len(checked.ids)


def test_fragment_styles_nothing_else():
    text = html.fragment(html.note("x"))
    assert Checked(text).tags == ["div", "style", "p"]
    rules = re.sub(r"@media[^{]*", "", text[text.index("<style>") + 7 : text.index("</style>")])
    selectors = re.findall(r"([^{}]+)\{", rules)
    assert all(".svexport" in part for selector in selectors if selector.strip() for part in selector.split(","))


def test_table():
    rows = [("conv", 12, "1.5e-07", "ok"), (HOSTILE, 3, "inf", "FAIL")]
    text = html.table(("layer", "count", "error", ""), rows, marked=[1])
    checked = Checked(text)
    assert checked.tags.count("td") == 8
    assert "<script" not in text
    assert text.count("class=marked") == 1
    assert text.count("class=number") == 2 * 3  # two columns, with their heads
    assert "<td class=ok>ok</td>" in text
    assert "<td class=fail>FAIL</td>" in text
    assert Checked(html.table((), [("a", "b")])).tags.count("th") == 0
    assert Checked(html.table(("a",), [])).tags.count("tr") == 1


def test_write(tmp_path):
    path = tmp_path / "new" / "report.html"
    html.write(path, "eins \u2192 \u5c42")
    html.write(str(path), "two \u2192")
    assert path.read_text(encoding="utf-8") == "two \u2192"
    assert [f.name for f in path.parent.iterdir()] == ["report.html"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    html.write(path, "old")
    with pytest.raises(SvexportError, match="cannot write"):
        html.write(path / "inside", "new")
    monkeypatch.setattr(html.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(SvexportError, match="No space left on device"):
        html.write(path, "new")
    assert path.read_text() == "old"
    assert [f.name for f in tmp_path.iterdir()] == ["report.html"]


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in html.picture("errors", *PICTURES["errors"])
