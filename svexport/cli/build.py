"""Build a TensorRT engine from an ONNX file, on the GPU that it is for.

With --trtexec it builds nothing and needs no TensorRT: it prints the command that does the same.

examples:
  svexport build detr3d.onnx -o detr3d.engine
  svexport build net.onnx --shapes images=1x3x224x224:4x3x224x224:8x3x224x224 --workspace 4G
  svexport build net.onnx --trtexec --target 10.3 --plugins libsvexport_tensorrt10.so
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from svexport.cli import Outcome
from svexport.cli._progress import status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE.onnx", type=Path)
    parser.add_argument(
        "-o", "--output", metavar="FILE.engine", type=Path, help="default: FILE.engine, beside FILE.onnx"
    )
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument(
        "--shapes",
        metavar="NAME=MIN:OPT:MAX",
        action="append",
        default=[],
        type=_ranges,
        help="sizes to build for, such as images=1x3x8x8:4x3x8x8:8x3x8x8, or one shape; may be repeated",
    )
    sizes.add_argument(
        "--values",
        metavar="NAME=MIN:OPT:MAX",
        action="append",
        default=[],
        type=_ranges,
        help="the same for inputs whose numbers are sizes",
    )
    options = parser.add_argument_group("options of TensorRT")
    options.add_argument("--fp16", action="store_true", help="before TensorRT 10: also compute in half")
    options.add_argument("--tf32", action="store_true", help="multiply float32 in TF32")
    options.add_argument("--optimization-level", type=int, metavar="0-5", help="how long to search for fast kernels")
    options.add_argument("--workspace", metavar="SIZE", help="scratch memory, such as 4G or 512M (default: all)")
    options.add_argument("--dla-core", type=int, metavar="N", help="run on this DLA what it supports")
    options.add_argument("--version-compatible", action="store_true", help="load in later versions of this major")
    options.add_argument("--hardware-compatibility", choices=("ampere+", "same"), help="run on other GPUs too")
    options.add_argument("--strip-weights", action="store_true", help="leave the weights out of the plan")
    options.add_argument("--refit", action="store_true", help="let the weights be exchanged")
    options.add_argument("--plugins", metavar="LIBRARY", type=Path, help="the plugin library (default: the one found)")
    options.add_argument("--timing-cache", metavar="FILE", type=Path, help="timings (default: by device and version)")
    options.add_argument("--no-timing-cache", action="store_true", help="measure every kernel anew")
    options.add_argument("--device", metavar="cuda:N", help="default: cuda")
    parser.add_argument("--no-check", action="store_true", help="skip the check of what TensorRT parses")
    parser.add_argument("--report", metavar="FILE.html", help="write layers, plugins and reformats as a page")
    parser.add_argument("--trtexec", action="store_true", help="only print the command of trtexec")
    parser.add_argument(
        "--target", metavar="VERSION", help="with --trtexec: the TensorRT version (default: the installed one)"
    )


def run(options: argparse.Namespace) -> Outcome:
    from svexport.errors import BuildError

    given: dict[str, Any] = {
        name: getattr(options, name)
        for name in (
            "fp16", "tf32", "optimization_level", "workspace", "dla_core", "version_compatible",
            "hardware_compatibility", "strip_weights", "refit", "plugins", "device",
        )
    }  # fmt: skip
    for name in ("shapes", "values"):
        given[name] = _named(getattr(options, name), f"--{name}") or None
    given["timing_cache"] = False if options.no_timing_cache else options.timing_cache or True
    if options.trtexec:
        return _command(options, given)
    if options.target:
        raise BuildError("--target goes with --trtexec: an engine is built by the TensorRT that is installed")
    import svexport
    from svexport import html

    if options.report:
        html.check_place(options.report)
    with (
        status(f"building {options.output or options.file.with_suffix('.engine')}"),
        svexport.build(options.file, options.output, check=not options.no_check, **given) as engine,
    ):
        report, info = engine.report, engine.info()
    assert report is not None  # because the engine was built here
    if options.report:
        report.to_html(options.report)
    notes = [f"note: {note}" for note in report.notes]
    return Outcome(True, {**report.to_dict(), "engine": info}, [*report.tables(), *notes, report.trtexec])


def _command(options: argparse.Namespace, given: dict[str, Any]) -> Outcome:
    from svexport.tensorrt.check import check
    from svexport.tensorrt.command import trtexec

    made = trtexec(options.file, options.output, target=options.target, **given)
    notes = list(made.notes)
    ok = True
    if not options.no_check:
        found = check(options.file, made.target)
        ok = found.ok
        notes += [f"{f.severity}: expected {f.expected}, came {f.came}; {f.todo}" for f in found.errors]
    data = {"trtexec": made.command, "target": made.target, "notes": notes}
    return Outcome(ok, data, [made.command, *(f"note: {note}" for note in notes)])


def _ranges(text: str) -> tuple[str, list[tuple[int, ...]]]:
    name, _, sizes = text.rpartition("=")
    shapes = sizes.split(":")
    if not name or len(shapes) not in (1, 3) or not all(re.fullmatch(r"\d+(x\d+)*|scalar", shape) for shape in shapes):
        raise argparse.ArgumentTypeError(
            f"expected NAME=MIN:OPT:MAX or NAME=SHAPE, sizes joined by x, got {text!r}; "
            "for example images=1x3x8x8:4x3x8x8:8x3x8x8"
        )
    numbers = [() if shape == "scalar" else tuple(map(int, shape.split("x"))) for shape in shapes]
    return name, numbers * 3 if len(numbers) == 1 else numbers


def _named(given: list[tuple[str, list[tuple[int, ...]]]], flag: str) -> dict[str, list[tuple[int, ...]]]:
    from svexport.errors import BuildError

    named = dict(given)
    if len(named) < len(given):
        raise BuildError(f"{flag} gives {', '.join(sorted(n for n, _ in given))}: one of them twice; give each once")
    return named
