"""Write a model repository for Triton Inference Server: each file with its config.pbtxt.

Prints the command that starts a server with it. A file is batched if a run of several rows gives what runs of
single rows give.

examples:
  svexport triton models detector.onnx
  svexport triton models detector=detr3d.engine --instances 2 --queue-delay 500
  svexport triton models prepare.onnx detector.onnx --ensemble perception --connect images=pixels
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from svexport.cli import Outcome
from svexport.cli._progress import status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="folder of the repository; it must be empty or not exist")
    parser.add_argument(
        "files",
        metavar="[NAME=]FILE",
        nargs="+",
        type=_file,
        help=".onnx, .engine or .plan; NAME is the model's (default: the file's name)",
    )
    parser.add_argument(
        "--max-batch-size", type=int, metavar="N", help="0: no batching (default: batch models that allow it)"
    )
    parser.add_argument(
        "--shape",
        metavar="INPUT=1x3x224x224",
        action="append",
        default=[],
        type=_shape,
        help="a typical shape of an input that has open sizes, the batch axis included; may be repeated",
    )
    parser.add_argument("--instances", type=int, default=1, metavar="N", help="instances of each model (default: 1)")
    parser.add_argument(
        "--device", metavar="cpu|cuda:N", help="where models run (default: a GPU if the server has one)"
    )
    delay = parser.add_mutually_exclusive_group()
    delay.add_argument(
        "--queue-delay", type=int, default=100, metavar="US", help="microseconds to wait for a batch (default: 100)"
    )
    delay.add_argument("--no-dynamic-batching", action="store_true", help="run each request by itself")
    parser.add_argument("--no-warmup", action="store_true", help="do not run on zeros before the first request")
    parser.add_argument("--ensemble", metavar="NAME", help="add a model of this name that runs all files in order")
    parser.add_argument(
        "--connect",
        metavar="INPUT=OUTPUT",
        action="append",
        default=[],
        type=_pair,
        help="with --ensemble: an input that is the output of a file before it; may be repeated",
    )
    parser.add_argument(
        "--trusted", action="store_true", help="run code that plans contain, as version-compatible ones do"
    )
    parser.add_argument("--client", metavar="MODEL", help="also print a program that asks the server for a result")


def run(options: argparse.Namespace) -> Outcome:
    import svexport
    from svexport.errors import EngineError

    given: dict[str, dict[str, Any]] = {}
    for what, pairs in (("files", options.files), ("--shape", options.shape), ("--connect", options.connect)):
        names = [name for name, _ in pairs]
        given[what] = dict(pairs)
        if len(given[what]) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise EngineError(f"{what} gives {', '.join(twice)} twice; give each once (files as NAME=FILE)")
    with status(f"writing {options.folder}"):
        made = svexport.triton_repository(
            options.folder,
            given["files"],
            max_batch_size=options.max_batch_size,
            shapes=given["--shape"],
            instances=options.instances,
            device=options.device,
            queue_delay=None if options.no_dynamic_batching else options.queue_delay,
            warmup=not options.no_warmup,
            ensemble=options.ensemble,
            connect=given["--connect"],
            trusted=options.trusted,
        )
    data = made.to_dict()
    shown = [*made.tables(), *(f"note: {note}" for note in made.notes)]
    if options.client is not None:
        data["client"] = made.client(options.client)
        shown.append(data["client"])
    return Outcome(True, data, shown)


def _file(text: str) -> tuple[str, str]:
    from pathlib import Path

    named = re.fullmatch(r"([A-Za-z0-9_][A-Za-z0-9_.-]*)=(.+)", text)
    return (named[1], named[2]) if named else (Path(text).stem, text)


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, sizes = text.rpartition("=")
    if not name or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes):
        raise argparse.ArgumentTypeError(f"expected INPUT=SHAPE, sizes joined by x, got {text!r}; like x=1x3x224x224")
    return name, tuple(map(int, sizes.split("x")))


def _pair(text: str) -> tuple[str, str]:
    name, _, other = text.partition("=")
    if not name or not other:
        raise argparse.ArgumentTypeError(f"expected INPUT=OUTPUT, got {text!r}")
    return name, other
