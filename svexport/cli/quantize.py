"""Quantize a model to int8 or fp8, with scales calibrated on batches of inputs, and export it.

examples:
  svexport quantize models.resnet:ResNet --batches data.py:loader -o resnet.onnx
  svexport quantize head.py:build --weights head.pt --batches samples/*.npz --keep "neck.*" --ranking
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import islice
from typing import Any

from svexport.cli import Outcome, _ahead, _model
from svexport.cli._progress import status
from svexport.errors import ExportError

METHODS = ("entropy", "minmax", "mse", "percentile")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _model.add_model(parser)
    parser.add_argument(
        "--batches",
        nargs="+",
        required=True,
        metavar="FILE|MODULE:NAME",
        help=".npz or .pt files with the arguments of forward, or an iterable of them in Python, such as a DataLoader",
    )
    parser.add_argument("--limit", type=_count, metavar="N", help="number of batches to use (default: all)")
    parser.add_argument("-o", "--output", metavar="FILE.onnx", type=_ahead.onnx_file, help="file to write")
    parser.add_argument(
        "--method",
        choices=METHODS,
        help="how scales are chosen (default: entropy; fp8, which has minmax and percentile: minmax)",
    )
    parser.add_argument(
        "--format", choices=("int8", "fp8"), default="int8", help="type of quantized numbers (default: int8)"
    )
    parser.add_argument(
        "--percentile", type=float, default=99.99, help="of --method percentile, in per cent (default: 99.99)"
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="LAYER",
        help="a layer that stays as it is, by name or pattern; may be repeated",
    )
    parser.add_argument(
        "--cache", metavar="FILE.json", help="where to keep statistics: an interrupted calibration continues"
    )
    parser.add_argument("--ranking", action="store_true", help="rank the layers by the noise that each alone makes")
    parser.add_argument("--opset", type=int, metavar="N", help="13 to 23; fp8: 19 to 23 (default: 17; fp8: 19)")
    parser.add_argument("--target", metavar="VERSION", help="TensorRT version the file is for, such as 8.6")


def run(options: argparse.Namespace) -> Outcome:
    import svexport
    from svexport import html

    files = [path for path in options.batches if ":" not in path]
    _ahead.all_of(
        *_model.checks(options),
        _ahead.target(options.target),
        partial(_check_opset, options.opset),
        *map(_ahead.existing, files),
        *(partial(html.check_place, path) for path in (options.output, options.cache) if path),
    )
    model = _model.load_model(options)
    taken: list[Any] = []

    def batches() -> Any:
        for batch in islice(_model.batches(options.batches, model), options.limit):
            if options.ranking or not taken:
                taken.append(batch)
            yield batch

    with status("calibrating"):
        quantized = svexport.quantize(
            model,
            batches(),
            method=options.method,
            format=options.format,
            percentile=options.percentile,
            keep=options.keep,
            cache=options.cache,
        )
        if not taken:
            raise ExportError("--batches has no batch; give at least one, which the file is traced and verified with")
        ranking = svexport.sensitivity(quantized, taken) if options.ranking else None
    opset = options.opset or (19 if options.format == "fp8" else 17)
    with status(f"exporting {options.output}"):
        report = svexport.export(quantized, taken[0], options.output, opset=opset, target=options.target)
    data = {"report": report.to_dict(), "ranking": None if ranking is None else ranking.to_dict()}
    shown = [*(ranking.tables() if ranking else ()), *report.tables(), *(f"note: {note}" for note in report.notes)]
    return Outcome(True, data, shown)


def _check_opset(opset: int | None) -> None:
    """Below 13 a file has no scales per channel: it would have rounded weights, and compute in floating point. Export
    itself refuses fp8 below 19."""
    if opset is not None and opset < 13:
        raise ExportError(f"int8 weights, which have a scale per channel, need opset 13 or later, got {opset}")


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number of batches, at least 1, got {text!r}")
    return int(text)
