"""Pages in a browser: nothing is cut off, narrow or wide, and the console stays empty."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport.tensorrt.build_report import BuildReport, Layer

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on PATH")

QUIET = ["headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking", "disable-sync"]
QUIET = [f"--{option}" for option in (*QUIET, "disable-component-update", "enable-logging=stderr")]

MEASURE = """
for (const folded of document.querySelectorAll("details")) folded.open = true
const seen = e => e.getClientRects().length > 0
const scrolls = e => e && (getComputedStyle(e).overflowX === "auto" || scrolls(e.parentElement))
const name = e => `${e.tagName} ${e.textContent.trim().slice(0, 40)}`
const out = [...document.querySelectorAll("body *")]
  .filter(e => seen(e) && !scrolls(e.parentElement) && e.getBoundingClientRect().right > innerWidth + 1)
const cut = [...document.querySelectorAll("svg text")].filter(e => {
  const [a, b] = [e.getBoundingClientRect(), e.closest("svg").getBoundingClientRect()]
  return seen(e) && (a.left < b.left - 2 || a.right > b.right + 2 || a.top < b.top - 2 || a.bottom > b.bottom + 2)
})
const over = [...document.querySelectorAll("svg")].filter(seen).flatMap(svg => {
  const texts = [...svg.querySelectorAll("text")].map(e => [name(e), e.getBoundingClientRect()])
  const meets = (a, b) => a.left < b.right - 2 && b.left < a.right - 2 && a.top < b.bottom - 4 && b.top < a.bottom - 4
  return texts.flatMap(([one, a], i) =>
    texts.slice(i + 1).filter(([, b]) => meets(a, b)).map(([other]) => [one, other]))
})
const found = {width: innerWidth, whole: document.documentElement.scrollWidth, out: out.map(name), cut: cut.map(name),
  over, pictures: [...document.querySelectorAll("svg")].filter(seen).length}
parent.document.body.innerHTML = `<pre id="found">${encodeURIComponent(JSON.stringify(found))}</pre>`
"""


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.projection_of_the_features_of_all_cameras = nn.Linear(8, 8)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        x = self.projection_of_the_features_of_all_cameras(self.stem(images).flatten(2).transpose(1, 2))
        return {"boxes": torch.einsum("nlc,nmc->nlm", x, x), "scores_of_all_classes_and_cameras": x.sigmoid()}


def built(file: Path) -> BuildReport:
    """What TensorRT says of an engine, with names as long as it makes them."""
    names = [f"/stem/stem.{i}/Conv + PWN(/stem/stem.{i}/Relu, /neck/Add_{i})" for i in range(30)]
    formats = ("Half NHWC8 4x9x16", "Half Channel major FP16 format where channel % 8 == 0")
    layers = [
        Layer(n, "CaskConvolution", tuple(n.split(" + ")), "sm90_xmma_fprop_f16f16_t64x32", formats) for n in names
    ]
    layers.append(
        Layer("Reformatting CopyNode for Input Tensor 0 to /stem/stem.0/Conv", "Reformat", (), "", *[formats] * 2)
    )
    return BuildReport(
        source=file.name, path=file.with_suffix(".engine"), tensorrt="10.1.0", device="NVIDIA H200", bytes=123456,
        profiles=["images 1x3x12x20 / 2x3x12x20 / 8x3x12x20"], plugins={"node_grid_sampler_of_all_cameras": "C++"},
        layers=layers, sources={"node_grid_sampler_of_all_cameras": "head.py:31 in forward: F.grid_sample(x, grid)"},
        seconds={"parse": 0.1, "build": 12.5}, notes=["no range was given for images: its batch is 1 to 8"],
        trtexec=f"trtexec --onnx={file.name} --saveEngine=m.engine --minShapes=images:1x3x12x20 --stronglyTyped",
    )  # fmt: skip


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    torch.manual_seed(0)
    model, images = Head().eval(), torch.randn(2, 3, 12, 20)
    file = folder / "head_of_a_detector_with_six_cameras.onnx"
    report = svexport.export(model, images, file, opset=11, target="8.6")
    model.stem[0].weight.data[1] *= 1.5
    results = {
        "export": report,
        "check": svexport.check(file, target="8.4"),
        "compare": svexport.compare(model, file, images, layers=True),
        "bench": svexport.bench(model, file, images, runs=10),
        "build": built(file),
    }
    for name, result in results.items():
        result.to_html(folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in results}


def look(page: Path, folder: Path) -> tuple[str, list[str]]:
    """The document after its scripts, and what the console says of it."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        *QUIET,
        f"--user-data-dir={folder}",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("name", ["export", "check", "compare", "bench", "build"])
def test_nothing_is_cut_off(name, width, pages, tmp_path) -> None:
    _, console = look(pages[name], tmp_path / "profile")
    assert console == []
    text = pages[name].read_text("utf-8")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)  # which would refuse to measure
    measured = tmp_path / "measured.html"
    text = escape(text.replace("</body>", f"<script>{MEASURE}</script></body>"))
    frame = f'<iframe width="{width}" height="1200" style="border: 0" srcdoc="{text}"></iframe>'
    measured.write_text(frame, "utf-8")  # a window of Chromium's has 500 pixels at least, a frame any number
    document, console = look(measured, tmp_path / "profile")
    assert console == []
    found = json.loads(unquote(re.search(r'id="found">([^<]*)<', document)[1]))
    assert found["width"] == width
    assert found["whole"] <= width
    assert found["out"] == []
    assert found["cut"] == []
    assert found["over"] == []
    assert found["pictures"] >= {"export": 2, "compare": 3, "bench": 1}.get(name, 0)


USE = """
const table = [...document.querySelectorAll("table")].find(t => t.tBodies[0].rows.length > 8)
const shown = () => [...table.tBodies[0].rows].filter(row => !row.hidden).map(row => row.cells[0].textContent.trim())
const found = {first: shown()}
const heading = table.tHead.rows[0].cells[0]
heading.click()
found.rising = shown()
heading.click()
found.falling = shown()
const field = document.querySelector("input[type=search]")
field.value = "stem.7"
field.dispatchEvent(new Event("input"))
found.searched = shown()
document.body.innerHTML = `<pre id="found">${encodeURIComponent(JSON.stringify(found))}</pre>`
"""


def test_tables_are_sorted_and_searched(pages, tmp_path) -> None:
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", pages["build"].read_text("utf-8"))
    used = tmp_path / "used.html"
    used.write_text(text.replace("</body>", f"<script>{USE}</script></body>"), "utf-8")
    document, console = look(used, tmp_path / "profile")
    assert console == []
    found = json.loads(unquote(re.search(r'id="found">([^<]*)<', document)[1]))
    assert len(found["first"]) == 31
    assert sorted(found["first"]) == sorted(found["rising"])
    assert found["falling"] == found["rising"][::-1] != found["first"]
    stems = [int(name[len("/stem/stem.") :].split("/")[0]) for name in found["rising"] if name.startswith("/stem")]
    assert stems == sorted(stems)
    assert len(found["searched"]) == 1
    assert "stem.7" in found["searched"][0]
