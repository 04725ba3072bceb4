"""Pages are self-contained, show every text unchanged, and are never half written."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import sys
from functools import cache
from html.parser import HTMLParser

import pytest
import torch

from svexport import html
from svexport.errors import SvexportError
from svexport.parity import parity
from svexport.runtime.where import Where

pytestmark = pytest.mark.core

HOSTILE = "</style><script>alert('x')</script>&amp;\"' $x_{1}$ \u2192 \u5c42 \0"


class Checked(HTMLParser):
    """Collects tags, ids, text and whatever a browser would load."""

    VOID = ("meta", "use", "img", "wbr")

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
    assert checked.tags[:2] == ["div", "svg"]
    assert checked.loads == []
    assert "script" not in checked.tags
    assert len(set(checked.ids)) == len(checked.ids)
    assert "viewBox" in svg
    assert "#010203" not in svg  # what stands for the page's own colour


def test_pictures_take_the_colour_of_the_page_and_are_reproducible():
    assert drawn("layers").count("currentColor") > 5
    assert html.picture(f"layers {HOSTILE}", *PICTURES["layers"]) == drawn("layers")


@pytest.mark.parametrize("name", PICTURES)
def test_images(name):
    """For viewers of notebooks, which drop SVG: the same picture in dots, on white whatever is around it."""
    from PIL import Image

    text = html.image(f"{name} {HOSTILE}", *PICTURES[name])
    checked = Checked(text)
    assert checked.tags == ["img"]
    (source,) = checked.loads
    kind, _, data = source.partition(",")
    assert kind == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as png:
        png.load()
        width, height = (float(n) for n in re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn(name)).groups())
        assert png.width / png.height == pytest.approx(width / height, rel=0.02)
        assert png.width > 1.2 * int(re.search(r'width="(\d+)"', text)[1])  # sharp
        pixels = png.convert("RGB")
        assert {pixels.getpixel((x, y)) for x in (0, png.width - 1) for y in (0, png.height - 1)} == {(255, 255, 255)}
        colours = {colour for _, colour in pixels.getcolors()}
    assert 2 <= len(colours) <= 32 or "no " in name
    assert len(data) < 40_000


def test_images_have_the_colours_of_the_pictures():
    from PIL import Image

    data = html.image("", *PICTURES["errors"]).partition("base64,")[2].partition('"')[0]
    with Image.open(io.BytesIO(base64.b64decode(data))) as png:
        found = [colour for _, colour in png.convert("RGB").getcolors()]
    for wanted in ((0x3B, 0x82, 0xF6), (0xE5, 0x48, 0x4D)):
        assert min(max(abs(a - b) for a, b in zip(colour, wanted)) for colour in found) < 8


def test_pictures_say_what_they_show():
    errors = Checked(drawn("errors")).text
    assert "boxes" in errors
    assert "$x_{1}$" in errors  # as text, not as a formula
    assert errors.count(", outside") == 2 * 3  # for wide and for narrow pages
    nodes = Checked(drawn("nodes")).text
    assert "before: 451 nodes" in nodes
    assert "after: 12 nodes" in nodes
    assert "17 other types" in nodes
    assert "12 more outputs" in Checked(drawn("many outputs")).text
    assert "alert" in Checked(drawn("layers")).text  # the first layer outside
    exact = torch.randn(5)
    layers = [parity("a", exact, exact), parity("b", exact, exact + 1e-5)]
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", html.picture("", html.layer_figure, layers, 1e-4))
    assert "0" in labels
    assert "1e-12" not in labels  # where zeros stand


def test_colours_are_explained_where_they_are():
    """Amber by a legend, but only if it is there; colours of one decade of errors by numbers at both ends."""
    e = torch.full((500,), 100.0)
    passed, exact, failed = parity("y", e, e + 1e-2), parity("y", e, e), parity("y", e, e + 10)
    shown = [Checked(html.picture("", html.error_figure, [p], 1e-4)).text for p in (passed, exact, failed)]
    assert passed.ok
    assert ["amber" in text for text in shown] == [True, False, False]
    for errors, labels in (((0.02, 0.34), ("2.0e-02", "3.4e-01")), ((0.02, 3.4), ("1e-1", "1e0"))):
        where = Where("y", (2,), (errors,), (((0, 1),),))
        text = Checked(html.picture("", html.where_figure, where)).text
        assert all(label in text for label in labels)


def test_long_names_and_commands_break_where_they_can_be_read():
    name = "head_of_a_detector_with_six_cameras.onnx"
    text = html.page(name, html.verdict(f"{name} differs", "warning"), html.note(f"trtexec --onnx={name} --fp16"))
    assert '<p class="warning">head_<wbr>of_<wbr>' in text
    assert "<h1>head_<wbr>of_<wbr>" in text
    assert text.count('<span class="word">') == 3
    assert f"trtexec --onnx={name} --fp16" in Checked(text).text  # as it is copied


def test_a_narrow_page_has_pictures_of_its_width():
    names = [f"backbone.stage{i}.attention.query_projection" for i in range(3)]
    wide, narrow = html.picture("", html.ranking_figure, names, [0.1, 0.2, 0.3], [0.3, 0.2, 0.1], 0.4).split("\n<div")
    widths = [float(re.search(r'viewBox="0 0 ([\d.]+)', text)[1]) for text in (wide, narrow)]
    assert widths == pytest.approx([9.0 * 72, 3.9 * 72])
    shown = [re.findall(r">(…?[\w.]*query_projection)<", text) for text in (wide, narrow)]
    assert shown[0] == names
    assert all(name.startswith("…") and len(name) < 30 for name in shown[1])
    assert len(shown[1]) == 3


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
    assert checked.tags.count("script") == 1  # ours, and by its hash no other runs
    digest = hashlib.sha256(re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1].encode()).digest()
    assert f"script-src 'sha256-{base64.b64encode(digest).decode()}'" in text
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


def test_fragment_is_readable_on_any_background():
    """A notebook has a theme of its own, whatever the reader's system is set to."""
    style = html.fragment("")
    assert "prefers-color-scheme" not in style
    assert "color-scheme" not in style
    assert re.search(r"\.svexport \{[^}]*; color: inherit;", style)
    for colour in re.findall(r"--(?:soft|good|bad): (#\w+)", style):
        channels = torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)], dtype=torch.float64)
        linear = torch.where(channels <= 0.03928, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        luminance = float(linear @ torch.tensor([0.2126, 0.7152, 0.0722], dtype=torch.float64))
        assert 1.05 / (luminance + 0.05) > 3  # contrast with white, as WCAG counts it
        assert (luminance + 0.05) / 0.05 > 3  # with black
    assert style.count("--soft") == 3  # defined, and used twice


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
    assert text.count('data-label="layer"') == 2  # of narrow pages, which have no headings
    severities = html.table(("", "op"), [("error", "A"), ("warning", "B"), ("note", "C")])
    assert all(f"<td class={kind}>" in severities for kind in ("error", "warning", "info"))
    linked = html.table(("model",), [(html.Link(HOSTILE, "a-11"),)])
    assert '<a href="#a-11">' in linked
    assert "<script" not in linked
    assert Checked(html.table((), [("a", "b")])).tags.count("th") == 0
    shapes = html.table(("", "shape"), [("a", [1, 2]), ("b", [])])
    assert shapes.count("class=number") == 3
    name = "layers.0.svca.position_encoder.1"
    broken = html.table((), [(name,), ("short.name",)])
    assert broken.count("<wbr>") == 5
    assert Checked(broken).text.split() == [name, "short.name"]
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
