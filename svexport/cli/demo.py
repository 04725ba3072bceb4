"""Export the example models, unedited, and prove every file against torch.

Writes <model>-opset<N>.onnx and report.html. Exit code 0 only if every file is verified.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from svexport.cli import Outcome, _model
from svexport.errors import SvexportError
from svexport.progress import phases_to
from svexport.text import table

if TYPE_CHECKING:
    from svexport.exporter.report import ExportReport

PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Run:
    """One model at one opset: its report, or its error."""

    model: str
    opset: int
    seconds: float
    report: ExportReport | None = None
    error: str = ""

    @property
    def verified(self) -> bool:
        """Whether the file was written and compared."""
        return self.report is not None and self.report.verified


def add_arguments(parser: argparse.ArgumentParser) -> None:
    folder = Path("build/demo")
    parser.add_argument("-o", "--output", type=Path, default=folder, metavar="FOLDER", help=f"default: {folder}")
    parser.add_argument("--opset", type=int, nargs="+", default=[11, 17], metavar="N", help="default: 11 17")
    parser.add_argument("--model", nargs="+", metavar="NAME", help="examples to export (default: all)")
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="default: report.html in that folder")
    parser.add_argument("--quick", action="store_true", help="use the small configuration of each model")


def run(options: argparse.Namespace) -> Outcome:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from svexport import html

    files = examples(options.model)
    page = options.report or options.output / "report.html"
    html.check_place(page)
    runs: list[Run] = []
    console = Console(stderr=True)
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(files) * len(options.opset))
        for name, file in files.items():
            for opset in options.opset:

                def show(phase: str, running: str = f"{name}, opset {opset}") -> None:
                    progress.update(task, description=f"{running}: {phase}")

                show("loading")
                with phases_to(show):
                    runs.append(_export(name, file, opset, options))
                progress.advance(task)
    _write_page(runs, page)
    ok = all(r.verified for r in runs)
    return Outcome(ok, {"report": str(page), "runs": [_facts(r) for r in runs]}, _shown(runs, options.output, page))


def examples(names: list[str] | None = None) -> dict[str, Path]:
    """The examples that have a ``model()``, by name: in the installed package, or beside it in a checkout.

    Raises:
        SvexportError: if there are none, or none of a given name.
    """
    folder = next((f for f in (PACKAGE / "examples", PACKAGE.parent / "examples") if f.is_dir()), None)
    if folder is None:
        raise SvexportError(f"the examples are not in {PACKAGE} and not in {PACKAGE.parent}; reinstall svexport")
    found = {f.stem: f for f in sorted(folder.glob("*.py")) if "\ndef model(" in f.read_text(encoding="utf-8")}
    unknown = sorted(set(names or ()) - found.keys())
    if unknown or not found:
        wanted = ", ".join(unknown) or "with a model()"
        raise SvexportError(f"no example {wanted} in {folder}; there are {', '.join(found) or 'none'}")
    return {name: found[name] for name in names} if names else found


def _export(name: str, file: Path, opset: int, options: argparse.Namespace) -> Run:
    import torch

    import svexport

    started = time.perf_counter()
    report, error = None, ""
    try:
        module = _model.load_file(file)
        model = module.model(**(getattr(module, "QUICK", {}) if options.quick else {}))
        torch.manual_seed(0)  # verification draws inputs; the seed makes them the same in every demo
        report = svexport.export(model, path=options.output / f"{name}-opset{opset}.onnx", opset=opset)
    except Exception as failure:  # noqa: BLE001 - the other models are still worth showing
        error = str(failure) if isinstance(failure, SvexportError) else f"{type(failure).__name__}: {failure}"
    return Run(name, opset, time.perf_counter() - started, report, error)


def _facts(run: Run) -> dict[str, Any]:
    report = None if run.report is None else run.report.to_dict()
    facts = {"model": run.model, "opset": run.opset, "seconds": run.seconds, "verified": run.verified}
    return {**facts, "report": report, "error": run.error or None}


def _shown(runs: list[Run], folder: Path, page: Path) -> list[Any]:
    from rich.text import Text

    marks = {True: Text("yes", "green"), False: Text("NO", "bold red")}
    rows = ((r.model, r.opset, *_numbers(r), marks[r.verified], f"{r.seconds:.1f}") for r in runs)
    header = ("model", "opset", "file", "nodes", "svexport nodes", "max abs error", "verified", "seconds")
    made = table(header, rows)
    for place in (1, 3, 5, 7):  # numbers
        made.columns[place].justify = "right"
    failures = [Text(f"{r.model}, opset {r.opset}: {r.error}", "red") for r in runs if r.error]
    return [made, *failures, f"files: {folder}", f"report: {page}"]


def _write_page(runs: list[Run], page: Path) -> None:
    """Writes one page: the summary, then each report in full."""
    from svexport import html

    rows = [
        (
            html.Link(r.model, f"{r.model}-{r.opset}"),
            r.opset,
            *_numbers(r),
            "ok" if r.verified else "FAIL",
            f"{r.seconds:.1f}",
        )
        for r in runs
    ]
    body = [html.table(("model", "opset", "file", "nodes", "svexport nodes", "max abs error", "", "seconds"), rows)]
    for r in runs:
        pieces = [html.verdict(r.error, "fail")] if r.report is None else r.report.html_body()
        body.append(
            f'<article id="{escape(r.model)}-{r.opset}" style="margin-top: 4rem">\n'
            f"<h1>{escape(r.model)} at opset {r.opset}</h1>\n" + "\n".join(pieces) + "\n</article>"
        )
    passed = sum(r.verified for r in runs)
    html.write(page, html.page(f"svexport demo: {passed} of {len(runs)} files verified", *body))


def _numbers(run: Run) -> tuple[str, str, str, str]:
    """The file, its nodes, its svexport nodes (``SvGridSample 24``) and largest error; blanks without a file."""
    if run.report is None:
        return "", "", "", ""
    counts = Counter(node.type for node in run.report.svexport_nodes if not node.lowered)
    ours = ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))
    return run.report.path.name, str(sum(run.report.nodes.values())), ours, f"{run.report.max_abs:.1e}"
