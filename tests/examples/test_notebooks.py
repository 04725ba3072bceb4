"""The notebooks of ``examples/`` run as they are, and show the outputs of such a run.

After a change, ``jupyter execute --inplace examples/compare.ipynb``, which comes with nbclient, makes the outputs anew.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|\bnan\b|[-+]?\binf\b")
"""As a verdict may print one: which digits, sign and exponent depends on the machine."""


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Runs a notebook beside a copy of the examples; its files, and those of the kernel, stay in a temporary folder."""
    folder = tmp_path / "examples"
    shutil.copytree(ROOT / "examples", folder, ignore=shutil.ignore_patterns("__pycache__", "*.onnx"))
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("MPLBACKEND", raising=False)  # a kernel has its own

    def run(notebook):
        resources = {"metadata": {"path": str(folder)}}
        return nbclient.NotebookClient(notebook, timeout=600, resources=resources, record_timing=False).execute()

    return run


def outputs_of(notebook):
    """What each output of the code cells is, and the verdicts of its reports, numbers aside."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            page = output.get("data", {}).get("text/html", "")
            verdicts = re.findall(r'<p class="(ok|fail)">(.*?)</p>', page)
            kinds = output.get("name") or sorted(output.get("data", {}))
            numberless = [(kind, NUMBER.sub("#", text)) for kind, text in verdicts]
            found.append((cell.id, output.output_type, kinds, numberless, page.count("<img"), page.count("<tr>")))
    return found


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize(
    "number", ["0", "7.", ".5", "0.0e+00", "1.9e-06", "-3.4e5", "1e10", "nan", "inf", "-inf", "12.25"]
)
def test_verdicts_are_compared_without_their_numbers(number):
    """However a number is printed, nothing of it is left."""
    assert NUMBER.sub("#", f"max error {number}, given") == "max error #, given"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, execute):
    shown = nbformat.read(path, as_version=4)
    run = execute(nbformat.read(path, as_version=4))
    assert outputs_of(run) == outputs_of(shown)
    assert "stderr" not in str(outputs_of(run))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_fit_to_be_looked_at(path):
    """From one run in order, small, without anything of the machine it ran on."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert sum("<img" in str(output) or "image/png" in str(output) for cell in code for output in cell.outputs) >= 3
    text = path.read_text(encoding="utf-8")
    assert len(text) < 300_000
    assert not re.findall(r"/(?:home|root|tmp|opt|usr)/|site-packages|ipykernel_", text)


def test_a_cell_that_raises_fails(execute):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import detr3d\nassert not detr3d.CONFIGS")])
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="AssertionError"):
        execute(notebook)
