"""The command of trtexec for a file, without TensorRT."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svexport.graph.nodes import svexport_nodes
from svexport.tensorrt.bindings import load_tensorrt, version_of
from svexport.tensorrt.builder import read_source
from svexport.tensorrt.library import library_name
from svexport.tensorrt.options import BuildOptions, trtexec_command
from svexport.tensorrt.profiles import profiles_of
from svexport.tensorrt.support.target import Target, dotted

__all__ = ["Command", "trtexec"]


@dataclass(frozen=True)
class Command:
    """What :func:`trtexec` hands back.

    Attributes:
        command: a line for a shell.
        target: the TensorRT that it is for.
        notes: what was assumed, and what it needs.
    """

    command: str
    target: str
    notes: list[str]

    def __str__(self) -> str:
        return self.command


def trtexec(
    onnx: str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    *,
    target: str | None = None,
    shapes: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    values: Mapping[str, Any] | None = None,
    workspace: int | str | None = None,
    plugins: str | os.PathLike[str] | None = None,
    timing_cache: bool | str | os.PathLike[str] = False,
    device: str | None = None,
    **options: Any,
) -> Command:
    """The command of trtexec that builds what :func:`build` would, for a machine without Python; needs no TensorRT.

    Args:
        onnx: the path of an ONNX file.
        path: the engine's file; default: that of the ONNX file, as ``.engine``.
        target: the version of that trtexec, such as ``"8.6"``; default: of the TensorRT that is installed here.
        plugins: the plugin library on that machine.
        timing_cache: a path; True and False are no cache.
        device: ``"cuda:1"``.
        shapes, values, workspace, options: as for :func:`svexport.build`.

    Raises:
        BuildError: if sizes do not fit the file.
        ExportError: if ``target`` is no version that is known.
        UnsupportedError: if that version lacks what is asked for.
    """
    source = read_source(onnx)
    version = version_of(load_tensorrt()) if target is None else Target.parse(target).version
    profiles = profiles_of(source.model.graph, shapes, values)
    notes = [note for profile in profiles for note in profile.notes]
    nodes = sorted({node.op_type for node in svexport_nodes(source.model)})
    if nodes and plugins is None:
        plugins = library_name(version[0])
        notes.append(
            f"{', '.join(nodes)}: put {plugins} there (svexport plugins build, against that TensorRT), or give plugins="
        )
    engine = source.path.with_suffix(".engine") if path is None and source.path else Path(path or "model.engine")
    command = trtexec_command(
        source.path or Path("model.onnx"),
        engine,
        version,
        BuildOptions.of(workspace, **options),
        profiles,
        plugins=plugins,
        timing_cache=None if isinstance(timing_cache, bool) else timing_cache,
        device=int(str(device).partition(":")[2] or 0),
        half=source.half,
        integers=source.integers,
    )
    return Command(command, dotted(version), notes)
