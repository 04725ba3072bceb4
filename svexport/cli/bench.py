"""Time a model and the files made of it side by side, and compare their results.

Exit code 1 if a file differs from torch by more than the tolerances of `svexport compare`.

examples:
  svexport bench models.resnet:ResNet resnet.onnx resnet.engine --input x=1x3x224x224
  svexport bench head.py:build head.onnx --compile --inputs sample.npz --report head.html
"""

from __future__ import annotations

import argparse

from svexport.cli import Outcome, _model
from svexport.cli._progress import status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _model.add_arguments(parser)
    parser.add_argument("files", metavar="FILE", nargs="*", help=".onnx, .engine or .plan (default: none, torch alone)")
    parser.add_argument("--compile", action="store_true", help="also time torch.compile of the model")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="how long to time each (default: 1, and at least 10 runs)"
    )
    parser.add_argument("--runs", type=int, metavar="N", help="number of runs of each, in place of --seconds")
    parser.add_argument("--report", metavar="FILE.html", help="write table and picture as a page")


def run(options: argparse.Namespace) -> Outcome:
    import svexport
    from svexport import html

    if options.report:
        html.check_place(options.report)
    model, args = _model.load(options)
    with status("benchmark"):
        result = svexport.bench(
            model, options.files, args, seconds=options.seconds, runs=options.runs, compiled=options.compile
        )
    if options.report:
        result.to_html(options.report)
    return Outcome(result.ok, result.to_dict(), [*result.tables(), *(f"note: {note}" for note in result.notes)])
