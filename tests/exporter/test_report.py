"""The report as text and as a page; the tests of export check that its numbers are right."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from svexport.errors import SvexportError
from svexport.exporter.report import ExportReport, NodeSource
from svexport.parity import parity

pytestmark = pytest.mark.core

VOID = {"meta", "path", "use", "rect", "line", "image", "br", "wbr", "img"}


class Wellformed(HTMLParser):
    """Fails on tags that do not match, and collects the text."""

    def __init__(self, source):
        super().__init__()
        self.open, self.text = [], []
        self.feed(source)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def report() -> ExportReport:
    expected = torch.linspace(-1, 1, 100)
    results = [
        parity(name, expected, expected + error, run=run)
        for name, error in (("boxes", 1e-6), ("<scores>", 2e-5))
        for run in ("given", "random")
    ]
    source = 'net.py:12 in forward: x = torch.einsum("ab,bc->ac", x, w) if a < b & c else x'
    return ExportReport(
        path=Path("out/[net].onnx"),
        model="Net",
        opset=11,
        ir_version=8,
        target="TensorRT 8.6",
        bytes=2_500_000,
        inputs={"image": "float32[batch, 3, 8, 8]"},
        outputs={"boxes": "float32[100]", "<scores>": "float32[100]"},
        nodes={"Conv": 3, "SvEinsum": 2},
        traced_nodes={"Conv": 3, "SvEinsum": 2},
        lowered_nodes={"Conv": 3, "MatMul": 2},
        svexport_nodes=[NodeSource(f"/blocks.{i}/SvEinsum", "SvEinsum", source, False) for i in range(2)],
        parity=results,
        rtol=1e-3,
        atol=1e-4,
        seconds={"trace": 1.25, "verify": 0.5},
        notes=["net.py:3: a <branch> was traced"],
    )


def test_page(report, tmp_path):
    report.to_html(tmp_path / "deep" / "report.html")
    page = (tmp_path / "deep" / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    text = " ".join(Wellformed(page).text)
    verdict = "Verified: 2 outputs on given, random inputs, largest absolute error 2.0e-05"
    order = [
        text.index(piece) for piece in ("Net at opset 11", verdict, "Parity with torch", "Nodes", "Details", "Notes")
    ]
    assert order == sorted(order)
    for piece in ("x = torch.einsum(", "if a < b & c else x", "a <branch> was traced", "<scores>", "for TensorRT 8.6"):
        assert piece in text
    assert page.count('role="img"') == 4  # parity, nodes: for wide and for narrow pages
    assert not re.search(r"<script |<link|(src|href)=.http|@import", page)  # but for the page's own script


def test_the_largest_error_is_that_of_inputs_like_the_given_ones(report):
    far = parity("boxes", torch.ones(2), torch.ones(2) + 1e-3, run="scaled", rtol=1e-2)
    text = " ".join(Wellformed(replace(report, parity=[*report.parity, far])._repr_html_()).text)
    assert "on given, random, scaled inputs, largest absolute error 2.0e-05 on those like the given ones" in text


def test_sources_are_counted(report):
    page = report._repr_html_()
    words = [word for word in map(str.strip, Wellformed(page).text) if word]
    rows = [words[i : i + 3] for i in range(len(words))]
    assert rows.count(["2", "SvEinsum", "node"]) == 1
    assert page.index("<details>") < page.index("/blocks.0/SvEinsum") < page.index("</details>")


def test_notebook_gets_a_fragment(report):
    fragment = report._repr_html_()
    Wellformed(fragment)
    assert fragment.startswith('<div class="svexport">')
    assert "<html" not in fragment
    assert fragment.count("<img") == 2  # where pages have SVG
    assert "<svg" not in fragment


def test_repr_is_one_line(report):
    assert repr(report) == "ExportReport(Net -> out/[net].onnx at opset 11: verified, largest absolute error 2.0e-05)"
    assert repr(replace(report, parity=[])) == "ExportReport(Net -> out/[net].onnx at opset 11: not verified)"


def test_failed_and_unverified(report):
    worst = parity("boxes", torch.ones(2), torch.zeros(2))
    failed = replace(report, parity=[worst])._repr_html_()
    assert '<p class="fail">Not verified: 1 output on given inputs, largest absolute error 1.0e+00</p>' in failed
    bare = replace(report, parity=[], svexport_nodes=[], notes=[])
    page = bare._repr_html_()
    assert '<p class="warning">Not compared with torch (verify=False)</p>' in page
    assert "Parity" not in page
    assert "Notes" not in page
    assert "not verified" in str(bare)


def test_without_matplotlib(report, monkeypatch):
    import sys

    for name in [m for m in sys.modules if m.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = report._repr_html_()
    assert "<svg" not in page
    assert page.count("matplotlib is not installed") == 2
    assert "Verified: 2 outputs" in page


def test_unwritable(report, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SvexportError, match="cannot write"):
        report.to_html(tmp_path / "file" / "report.html")
    with pytest.raises(SvexportError, match="expected the path of a file, got the folder"):
        report.to_html(tmp_path)


def test_text(report):
    text = str(report)
    assert text.startswith("Net -> [net].onnx: verified")
    assert "/blocks.1/SvEinsum" in text
    assert "rtol 0.001, atol 0.0001" in text
    assert "note: net.py:3: a <branch> was traced" in text


def test_dict_is_json(report):
    loaded = json.loads(json.dumps(report.to_dict()))
    assert loaded["verified"] is True
    assert loaded["path"] == "out/[net].onnx"
    assert loaded["parity"][0]["ok"] is True
