"""Export a model to ONNX and prove the file against torch.

examples:
  svexport export models.resnet:ResNet --input x=1x3x224x224 -o resnet.onnx
  svexport export head.py:build --weights head.pt --inputs sample.npz --target 8.6 --dtype float16 --report head.html
"""

from __future__ import annotations

import argparse
import re
from functools import partial

from svexport.cli import Outcome, _ahead, _model
from svexport.cli._progress import status
from svexport.errors import ExportError

DTYPES = ("float16", "bfloat16", "float32", "float64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _model.add_arguments(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE.onnx",
        type=_ahead.onnx_file,
        help="file to write (default: the class name, ./Model.onnx)",
    )
    parser.add_argument("--opset", type=int, default=11, metavar="N", help="9 to 23 (default: 11)")
    parser.add_argument(
        "--plugins",
        type=_plugins,
        default=True,
        metavar="all|none|OP,OP",
        help="svexport nodes to keep; the others are lowered to standard ONNX (default: all with a TensorRT plugin)",
    )
    parser.add_argument("--target", metavar="VERSION", help="TensorRT version the file is for, such as 8.6")
    parser.add_argument("--dtype", choices=DTYPES, help="data type of the exported model; inputs keep theirs")
    parser.add_argument(
        "--dynamic",
        type=_dynamic,
        action="append",
        default=[],
        metavar="auto|NAME:AXIS=SYMBOL",
        help="a size that may change, such as image:0=batch; may be repeated. auto: the first size of "
        "every input for which the model allows it",
    )
    parser.add_argument(
        "--input-names", type=_names, metavar="NAME,NAME", help="inputs of the file (default: forward's parameters)"
    )
    parser.add_argument(
        "--output-names",
        type=_names,
        metavar="NAME,NAME",
        help="outputs of the file (default: keys and places of the result)",
    )
    parser.add_argument(
        "--simplify", action="store_true", help="fold constants, share equal nodes and remove Transposes that cancel"
    )
    parser.add_argument(
        "--weights-as",
        choices=("inputs", "attributes"),
        default="inputs",
        help="how a node with many weights (the transformer decoder) holds them: a TensorRT plugin gets attributes "
        "once, when it is created, and inputs in every inference (default: inputs)",
    )
    parser.add_argument(
        "--verify",
        choices=("default", "quick", "thorough"),
        default="default",
        help="quick compares the file with torch on the given inputs only, and does not call that verified; "
        "thorough plants faults in the file and searches for inputs that notice them",
    )
    parser.add_argument("--no-verify", action="store_true", help="do not compare the file with torch")
    parser.add_argument(
        "--freeze", action="append", default=[], metavar="NAME", help="an input that becomes a constant of the file"
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="auto|MODULE",
        help="with a half --dtype, what stays float32: modules by name or pattern, may be repeated; auto: what "
        "overflows or loses too much on the inputs",
    )
    parser.add_argument("--rtol", type=float, help="relative tolerance (default: by data type)")
    parser.add_argument("--atol", type=float, help="absolute tolerance (default: by data type)")
    parser.add_argument("--report", metavar="FILE.html", help="write the report as a page")


def run(options: argparse.Namespace) -> Outcome:
    import torch

    import svexport
    from svexport import html

    _ahead.all_of(
        *_model.checks(options),
        _ahead.target(options.target),
        *(partial(html.check_place, path) for path in (options.output, options.report) if path),
    )
    model, args = _model.load(options)
    dynamic = _sizes(options.dynamic)
    with status(f"exporting {options.output}"):
        report = svexport.export(
            model,
            args,
            options.output,
            opset=options.opset,
            plugins=options.plugins,
            target=options.target,
            dtype=getattr(torch, options.dtype) if options.dtype else None,
            dynamic_shapes=dynamic or None,
            input_names=options.input_names,
            output_names=options.output_names,
            simplify=options.simplify,
            weights=options.weights_as,
            verify=False if options.no_verify else options.verify,
            freeze=options.freeze,
            keep="auto" if options.keep == ["auto"] else options.keep or None,
            rtol=options.rtol,
            atol=options.atol,
        )
    if options.report:
        report.to_html(options.report)
    return Outcome(True, report.to_dict(), [*report.tables(), *(f"note: {note}" for note in report.notes)])


def _sizes(given: list[tuple[str, int, str] | str]) -> dict[str, dict[int, str]] | str:
    if "auto" in given:
        if len(given) > 1:
            raise ExportError("--dynamic auto finds the sizes itself; give it alone, or name the sizes")
        return "auto"
    sizes: dict[str, dict[int, str]] = {}
    for name, axis, symbol in (one for one in given if not isinstance(one, str)):
        other = sizes.setdefault(name, {}).setdefault(axis, symbol)
        if other != symbol:
            raise ExportError(f"--dynamic calls {name}:{axis} both {other} and {symbol}; give it one name")
    return sizes


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _plugins(text: str) -> bool | list[str]:
    if text in ("all", "none"):
        return text == "all"
    return op_names(text)


def op_names(text: str) -> list[str]:
    """The argparse type of a list of op names: ``grid_sample,einsum``."""
    names = text.split(",")
    if not all(re.fullmatch(r"[a-z]\w*", name) for name in names):
        raise argparse.ArgumentTypeError(f"expected names of ops such as grid_sample,einsum; got {text!r}")
    return names


def _dynamic(text: str) -> tuple[str, int, str] | str:
    if text == "auto":
        return text
    match = re.fullmatch(r"(?P<name>\w+):(?P<axis>-?\d+)=(?P<symbol>[^\W\d]\w*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected NAME:AXIS=SYMBOL, such as image:0=batch; got {text!r}")
    return match["name"], int(match["axis"]), match["symbol"]
