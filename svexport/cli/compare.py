"""Compare an exported file with its torch model, output by output or layer by layer.

examples:
  svexport compare models.resnet:ResNet resnet.onnx --input x=1x3x224x224
  svexport compare head.py:build head.onnx --weights head.pt --inputs sample.npz --layers --report head.html
"""

from __future__ import annotations

import argparse
from functools import partial

from svexport.cli import Outcome, _ahead, _model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _model.add_arguments(parser)
    parser.add_argument("file", metavar="FILE", help="the exported model: .onnx, .engine or .plan")
    parser.add_argument("--layers", action="store_true", help="also compare layers, and find the first that differs")
    parser.add_argument("--onnx", metavar="FILE.onnx", help="with --layers: the file an .engine was built from")
    parser.add_argument("--rtol", type=float, help="relative tolerance (default: by data type)")
    parser.add_argument("--atol", type=float, help="absolute tolerance (default: by data type)")
    parser.add_argument("--report", metavar="FILE.html", help="write the comparison as a page")


def run(options: argparse.Namespace) -> Outcome:
    import svexport
    from svexport import html

    _ahead.all_of(
        *_model.checks(options),
        _ahead.existing(options.file if options.file.endswith(".onnx") else None),  # load checks other files
        _ahead.existing(options.onnx),
        *(partial(html.check_place, path) for path in [options.report] if path),
    )
    model, args = _model.load(options)
    with svexport.load(options.file) as engine:
        comparison = svexport.compare(
            model, engine, args, layers=options.layers or None, onnx=options.onnx, rtol=options.rtol, atol=options.atol
        )
    if options.report:
        comparison.to_html(options.report)
    return Outcome(
        comparison.ok, comparison.to_dict(), [*comparison.tables(), *(f"note: {note}" for note in comparison.notes)]
    )
