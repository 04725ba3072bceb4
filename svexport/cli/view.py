"""Show an ONNX file as a graph in the browser, by Netron.

Netron is a package of its own; without it, this command says how to install it. Ctrl-C ends it.

examples:
  svexport view detr3d.onnx
"""

from __future__ import annotations

import argparse
from pathlib import Path

from svexport.cli import Outcome, _ahead


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE.onnx", type=Path)
    parser.add_argument("--port", type=int, metavar="N", help="port of the address (default: a free one)")
    parser.add_argument("--no-browser", action="store_true", help="only serve the graph, and print the address")


def run(options: argparse.Namespace) -> Outcome:
    from svexport.errors import BackendNotAvailableError, SvexportError

    _ahead.all_of(_ahead.existing(options.file))
    if options.file.suffix.lower() != ".onnx":
        raise SvexportError(
            f"expected an .onnx file, got {options.file}; of an engine, svexport build --report shows the layers"
        )
    try:
        import netron
    except ImportError as error:
        raise BackendNotAvailableError(
            f"svexport view needs Netron, which does not import here ({error}): pip install netron. Or drop the file "
            "on https://netron.app, which reads it in the browser and uploads nothing"
        ) from error
    host, port = netron.start(str(options.file), options.port, browse=not options.no_browser)
    address = f"http://{host}:{port}"
    try:
        netron.wait()
    except KeyboardInterrupt:
        netron.stop()
    return Outcome(True, {"file": str(options.file), "address": address}, [f"served {options.file} at {address}"])
