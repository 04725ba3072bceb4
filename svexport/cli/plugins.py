"""Build the TensorRT plugin library, list what it has, print where it is.

examples:
  svexport plugins build --tensorrt-root /opt/TensorRT-10.16 --arch 8.7
  svexport plugins list
  trtexec --onnx=detr3d.onnx --dynamicPlugins=$(svexport plugins path)
"""

from __future__ import annotations

import argparse
from pathlib import Path

from svexport.cli import Outcome
from svexport.errors import BackendNotAvailableError
from svexport.text import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("build", "list", "path"))
    parser.add_argument(
        "--tensorrt", metavar="MAJOR", type=int, help="path: the library for this version (default: the newest built)"
    )
    build = parser.add_argument_group("build")
    build.add_argument(
        "--tensorrt-root",
        metavar="DIR",
        type=Path,
        help="folder with its include/ (default: TENSORRT_ROOT, else the system's)",
    )
    build.add_argument(
        "--arch",
        nargs="+",
        metavar="X.Y",
        help="compute capabilities, such as 8.7 (default: those of this machine's GPUs, or all without a GPU)",
    )
    build.add_argument(
        "-o", "--output", metavar="DIR", type=Path, help="folder of the library (default: svexport's cache)"
    )


def run(options: argparse.Namespace) -> Outcome:
    return {"build": _build, "list": _list, "path": _path}[options.action](options)


def _build(options: argparse.Namespace) -> Outcome:
    from rich.console import Console
    from rich.progress import Progress

    from svexport.tensorrt.library import build

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Compiling", total=None)
        library = build(
            options.tensorrt_root,
            architectures=options.arch,
            output=options.output,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    data = {"path": str(library.path), "tensorrt": library.major}
    return Outcome(True, data, [f"{library.path}: plugins for TensorRT {library.major}"])


def _list(options: argparse.Namespace) -> Outcome:
    from svexport.tensorrt.library import libraries
    from svexport.tensorrt.nodes import plugin_ops

    nodes, rows = {}, []
    for op in plugin_ops():
        inputs = [a.name + ("..." if a.kind == "tensors" else "?" * a.optional) for a in op.arguments if a.is_tensor]
        nodes[op.node_type] = {"inputs": inputs, "attributes": {a.name: a.kind for a in op.attributes}}
        rows.append((op.node_type, ", ".join(inputs), ", ".join(a.name for a in op.attributes)))
    found = libraries()
    lines = [f"{lib.path}: plugins for TensorRT {lib.major}" for lib in found]
    data = {"nodes": nodes, "libraries": [{"path": str(lib.path), "tensorrt": lib.major} for lib in found]}
    shown = table(("node", "inputs", "attributes"), rows)
    return Outcome(True, data, [shown, *(lines or ["no library was built yet: svexport plugins build"])])


def _path(options: argparse.Namespace) -> Outcome:
    from svexport.tensorrt.library import libraries

    found = [lib for lib in libraries() if options.tensorrt in (None, lib.major)]
    if not found:
        version = f" for TensorRT {options.tensorrt}" if options.tensorrt else ""
        raise BackendNotAvailableError(f"no plugin library was built{version}; run `svexport plugins build`")
    return Outcome(True, {"path": str(found[0].path), "tensorrt": found[0].major}, [str(found[0].path)])
