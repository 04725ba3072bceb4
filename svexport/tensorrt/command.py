"""Writes the trtexec command for a file, without TensorRT."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svexport.errors import BackendNotAvailableError, UnsupportedError
from svexport.graph.nodes import svexport_nodes
from svexport.tensorrt.bindings import load_tensorrt, version_of
from svexport.tensorrt.library import library_name
from svexport.tensorrt.options import ALWAYS_STRONGLY_TYPED, STRONGLY_TYPED, BuildOptions
from svexport.tensorrt.profiles import Profile, profiles_of
from svexport.tensorrt.source import Source, read_source
from svexport.tensorrt.support.target import Target, Version, dotted

__all__ = ["Command", "trtexec", "trtexec_command"]

_HARDWARE = {"ampere+": "ampere+", "same": "sameComputeCapability"}


@dataclass(frozen=True)
class Command:
    """The result of :func:`trtexec`.

    Attributes:
        command: a shell command line.
        target: the TensorRT version that it is for.
        notes: assumptions and requirements.
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
    """The trtexec command for the engine of :func:`build`, for a machine without Python; needs no TensorRT here.

    Args:
        onnx: the path of an ONNX file.
        path: the engine's file; default: that of the ONNX file, as ``.engine``.
        target: the version of that trtexec, such as ``"8.6"``; default: that of the TensorRT installed here.
        plugins: path of the plugin library on that machine.
        timing_cache: a path; True and False mean no cache.
        device: ``"cuda:1"``.
        shapes, values, workspace, options: as for :func:`svexport.build`.

    Raises:
        BuildError: if sizes do not fit the file.
        ExportError: if ``target`` is not a known version.
        UnsupportedError: if that version lacks a requested feature.
    """
    source = read_source(onnx)
    version = _installed() if target is None else Target.parse(target).version
    profiles = profiles_of(source.model.graph, shapes, values)
    notes = [note for profile in profiles for note in profile.notes]
    nodes = sorted({node.op_type for node in svexport_nodes(source.model)})
    if nodes and plugins is None:
        plugins = library_name(version[0])
        notes.append(
            f"{', '.join(nodes)}: put {plugins} there (svexport plugins build, against that TensorRT), or give plugins="
        )
    engine = Path(path) if path else source.path.with_suffix(".engine") if source.path else None
    command = trtexec_command(
        source,
        engine,
        version,
        BuildOptions.of(workspace, **options),
        profiles,
        plugins=plugins,
        timing_cache=None if isinstance(timing_cache, bool) else timing_cache,
        device=int(str(device).partition(":")[2] or 0),
    )
    return Command(command, dotted(version), notes)


def _installed() -> Version:
    try:
        return version_of(load_tensorrt())
    except BackendNotAvailableError as error:
        raise BackendNotAvailableError(
            f"the command is for the TensorRT that is installed unless target= names one (--target 8.6): {error}"
        ) from error


def trtexec_command(
    source: Source,
    engine: Path | None,
    version: Version,
    options: BuildOptions,
    profiles: Sequence[Profile],
    *,
    plugins: str | os.PathLike[str] | None = None,
    timing_cache: str | os.PathLike[str] | None = None,
    device: int = 0,
) -> str:
    """The shell command line for this version's trtexec that builds the same engine.

    Raises:
        UnsupportedError: on options that the version lacks, and on several profiles before 10 (trtexec supports one).
    """
    options.hold_to(version)
    words = ["trtexec", f"--onnx={source.path or 'model.onnx'}", f"--saveEngine={engine or 'model.engine'}"]
    words.append("--skipInference")
    if STRONGLY_TYPED <= version < ALWAYS_STRONGLY_TYPED:
        words.append("--stronglyTyped")
    if version < STRONGLY_TYPED:
        words += ["--fp16"] * (options.fp16 or source.half) + ["--int8"] * source.integers
        words.append("--preview=+profileSharing0806")
    words += ["--noTF32"] * (not options.tf32)
    if len(profiles) > 1 and version < STRONGLY_TYPED:
        raise UnsupportedError("trtexec before 10 builds one profile; give one, or build in Python")
    for number, profile in enumerate(profiles):
        if len(profiles) > 1:
            words.append(f"--profile={number}")
        given = {**profile.shapes, **profile.values}
        for place, which in enumerate(("min", "opt", "max")):
            named = (f"{name}:{'x'.join(map(str, sizes[place])) or 'scalar'}" for name, sizes in given.items())
            words += [f"--{which}Shapes={','.join(named)}"] if given else []
    if options.optimization_level is not None:
        words.append(f"--builderOptimizationLevel={options.optimization_level}")
    if options.workspace is not None:
        words.append(f"--memPoolSize=workspace:{options.workspace / (1 << 20):g}")  # MiB, in every version
    if options.dla_core is not None:
        words += [f"--useDLACore={options.dla_core}", "--allowGPUFallback"]
    words += ["--versionCompatible"] * options.version_compatible
    if options.hardware_compatibility:
        words.append(f"--hardwareCompatibilityLevel={_HARDWARE[options.hardware_compatibility]}")
    words += ["--stripWeights"] * options.strip_weights + ["--refit"] * options.refit
    words.append("--profilingVerbosity=detailed")
    if plugins is not None:
        words.append(f"--dynamicPlugins={plugins}")
        words += [f"--setPluginsToSerialize={plugins}"] * options.version_compatible
    if timing_cache is not None:
        words.append(f"--timingCacheFile={timing_cache}")
    words += [f"--device={device}"] * (device != 0)
    return shlex.join(words)
