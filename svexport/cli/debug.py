"""Cut a file that fails to the smallest part that still fails the same way, ready for a bug report.

Writes the part, and a script beside it that shows the failure.

examples:
  svexport debug reduce net.onnx -o small.onnx --fails check --target 8.6
  svexport debug reduce net.onnx -o small.onnx --fails build
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from svexport.cli import Outcome, _ahead
from svexport.cli._progress import status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("reduce",))
    parser.add_argument("file", metavar="FILE.onnx", type=Path)
    parser.add_argument("-o", "--output", metavar="OUT.onnx", type=_ahead.onnx_file, required=True)
    parser.add_argument(
        "--fails",
        choices=("check", "load", "build", "differs"),
        required=True,
        help="check: svexport check finds an error; load: ONNX Runtime does not load it; build: TensorRT builds no "
        "engine; differs: its engine computes something else than ONNX Runtime",
    )
    parser.add_argument("--target", metavar="VERSION", help="with --fails check: a TensorRT version, such as 8.6")


def run(options: argparse.Namespace) -> Outcome:
    import svexport
    from svexport import html

    _ahead.all_of(
        _ahead.existing(options.file), partial(html.check_place, options.output), _ahead.target(options.target)
    )
    with status(f"reducing {options.file}"):
        found = svexport.reduce(options.file, options.fails, options.output, target=options.target)
    return Outcome(True, found.to_dict(), [str(found), f"{found.path}, shown by {found.script}"])
