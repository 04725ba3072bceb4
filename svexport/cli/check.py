"""Check whether a TensorRT version parses an ONNX file, without TensorRT or a GPU.

Exit code 1 if there are errors; warnings and notes leave it at 0.

examples:
  svexport check detr3d.onnx --target 8.4
  svexport check detr3d.onnx --target 10.12 --json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from svexport.cli import Outcome, _ahead


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE.onnx", type=Path)
    parser.add_argument(
        "--target", metavar="VERSION", required=True, help='a TensorRT version, such as "8.4" or "10.12"'
    )
    parser.add_argument("--report", metavar="FILE.html", help="write the findings as a page")


def run(options: argparse.Namespace) -> Outcome:
    from svexport.tensorrt.check import check

    _ahead.all_of(_ahead.existing(options.file), _ahead.target(options.target), *_places(options.report))
    report = check(options.file, options.target)
    if options.report:
        report.to_html(options.report)
    return Outcome(report.ok, report.to_dict(), report.tables())


def _places(report: str | None) -> list[Callable[[], None]]:
    """A check that the page can be written; imported on demand, because svexport.html imports torch."""
    if report is None:
        return []
    from svexport import html

    return [partial(html.check_place, report)]
