"""The notebooks of ``examples/`` run unchanged in any folder, and are stored without outputs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Runs a notebook in an empty folder; the files of the kernel stay in another."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
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
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, execute):
    """To the end, where what it claims is asserted; with pictures, and verdicts where it shows a report."""
    outputs = outputs_of(execute(nbformat.read(path, as_version=4)))
    assert not [output for output in outputs if output.get("name") == "stderr"]
    pages = [output.get("data", {}).get("text/html", "") for output in outputs]
    pictures = sum("image/png" in output.get("data", {}) for output in outputs) + sum(
        page.count("<img") for page in pages
    )
    assert pictures >= 2
    shown = [page for page in pages if 'class="svexport"' in page]
    judged = [
        page for page in shown if not re.search(">(Layers by what is lost|Signal over noise, layer by layer)<", page)
    ]
    assert all(re.search(r'<p class="(ok|fail)">', page) for page in judged)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_stored_as_it_was_written(path):
    """Without outputs, counts of runs, and anything of the machine it ran on."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert outputs_of(notebook) == []
    assert {cell.get("execution_count") for cell in notebook.cells} == {None}
    text = path.read_text(encoding="utf-8")
    assert len(text) < 50_000
    assert not re.findall(r"/(?:home|root|tmp|opt|usr)/|site-packages|ipykernel_", text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path):
    targets = re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8"))
    assert [target for target in targets if "://" not in target and not (path.parent / target).exists()] == []


def test_a_cell_that_raises_fails(execute):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import svexport\nassert not svexport")])
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="AssertionError"):
        execute(notebook)
