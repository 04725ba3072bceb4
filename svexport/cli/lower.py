"""Replace svexport nodes of an ONNX file by their bodies: standard ONNX for any runtime.

examples:
  svexport lower detr3d.onnx -o detr3d-standard.onnx
  svexport lower detr3d.onnx -o detr3d-sampled.onnx --ops grid_sample
"""

from __future__ import annotations

import argparse
from collections import Counter
from functools import partial
from pathlib import Path

from svexport.cli import Outcome, _ahead
from svexport.cli.export import op_names
from svexport.errors import SvexportError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN.onnx", type=Path)
    parser.add_argument(
        "-o", "--output", metavar="OUT.onnx", type=_ahead.onnx_file, required=True, help="may be IN.onnx"
    )
    parser.add_argument("--ops", type=op_names, metavar="OP,OP", help="ops to lower (default: every one)")


def run(options: argparse.Namespace) -> Outcome:
    from svexport import html

    _ahead.all_of(_ahead.existing(options.input), partial(html.check_place, options.output))
    import onnx

    from svexport.graph.bodies import lower
    from svexport.graph.nodes import svexport_nodes
    from svexport.graph.saving import write
    from svexport.graph.walk import opset_of

    try:
        onnx.checker.check_model(str(options.input))  # by path, because the model may exceed protobuf's limit
        model = onnx.load(str(options.input))
    except Exception as error:
        raise SvexportError(f"{options.input} is not a valid ONNX file: {error}") from error
    lowered = lower(model, options.ops)
    write(lowered, Path(options.output))

    before, after = (Counter(node.op_type for node in svexport_nodes(m)) for m in (model, lowered))
    data = {
        "input": str(options.input),
        "output": str(options.output),
        "opset": opset_of(lowered),
        "lowered": dict(before - after),
        "kept": dict(after),
        "nodes": len(lowered.graph.node),
    }
    gone = ", ".join(f"{count} {kind}" for kind, count in (before - after).items()) or "nothing: it has no such nodes"
    left = ", ".join(f"{count} {kind}" for kind, count in after.items()) or "no svexport nodes left"
    line = f"{options.output}: lowered {gone}; {left}, opset {data['opset']}, {data['nodes']} nodes"
    return Outcome(True, data, [line])
