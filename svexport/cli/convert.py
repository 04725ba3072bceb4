"""Write an ONNX file at a lower opset, exactly: standard ONNX for older runtimes and TensorRT versions.

examples:
  svexport convert model.onnx -o model-11.onnx
  svexport convert model.onnx -o model-17.onnx --opset 17
"""

from __future__ import annotations

import argparse
from collections import Counter
from functools import partial
from pathlib import Path

from svexport.cli import Outcome, _ahead
from svexport.errors import SvexportError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN.onnx", type=Path)
    parser.add_argument(
        "-o", "--output", metavar="OUT.onnx", type=_ahead.onnx_file, required=True, help="may be IN.onnx"
    )
    parser.add_argument("--opset", type=int, default=11, help="from 9 to the model's own (default: %(default)s)")


def run(options: argparse.Namespace) -> Outcome:
    from svexport import html

    _ahead.all_of(_ahead.existing(options.input), partial(html.check_place, options.output))
    import onnx

    from svexport.graph.opsets import convert
    from svexport.graph.walk import graphs, opset_of

    try:
        before = onnx.load(str(options.input), load_external_data=False)
    except Exception as error:
        raise SvexportError(f"{options.input} is not an ONNX file that can be read: {error}") from error
    converted = convert(options.input, options.opset, options.output)
    was, now = (Counter(n.op_type for g in graphs(m.graph) for n in g.node) for m in (before, converted))
    data = {
        "input": str(options.input),
        "output": str(options.output),
        "from": opset_of(before),
        "opset": opset_of(converted),
        "rewritten": dict(was - now),
        "nodes": sum(now.values()),
    }
    gone = ", ".join(f"{count} {kind}" for kind, count in sorted((was - now).items()))
    line = f"{options.output}: opset {data['from']} became {data['opset']}, {sum(was.values())} nodes {data['nodes']}"
    return Outcome(True, data, [line, *([f"written in other ops: {gone}"] if gone else [])])
