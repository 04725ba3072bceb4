"""``svexport.build``: builds a TensorRT engine from an ONNX file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from svexport.errors import BuildError, UnsupportedError
from svexport.runtime.tensorrt import TensorRTEngine, place
from svexport.tensorrt import builder
from svexport.tensorrt.bindings import load_tensorrt, version_of
from svexport.tensorrt.build_report import BuildReport
from svexport.tensorrt.command import trtexec_command
from svexport.tensorrt.options import BuildOptions
from svexport.tensorrt.source import Source, read_source, source_lines

if TYPE_CHECKING:
    import onnx
    import torch

__all__ = ["build"]


def build(
    onnx: str | os.PathLike[str] | onnx.ModelProto,
    path: str | os.PathLike[str] | None = None,
    *,
    shapes: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    values: Mapping[str, Any] | None = None,
    fp16: bool = False,
    tf32: bool = False,
    optimization_level: int | None = None,
    workspace: int | str | None = None,
    dla_core: int | None = None,
    version_compatible: bool = False,
    hardware_compatibility: str | None = None,
    strip_weights: bool = False,
    refit: bool = False,
    plugins: str | os.PathLike[str] | None = None,
    timing_cache: bool | str | os.PathLike[str] = True,
    check: bool = True,
    device: str | torch.device | None = None,
) -> TensorRTEngine:
    """Builds a TensorRT engine (8.6 or later), on the GPU that it is for.

    >>> images = (1, 3, 224, 224), (4, 3, 224, 224), (8, 3, 224, 224)
    >>> engine = svexport.build("model.onnx", "model.engine", shapes={"images": images})
    >>> print(engine.report)

    From TensorRT 10 on the engine has the types of the file; before, flags allow the half precision and the quantizers
    that the file has. Plugins for svexport nodes are registered first (:func:`svexport.tensorrt.register_plugins`).
    Bodies are removed for a TensorRT that would run them instead of the plugins. Ctrl-C ends the build and leaves no
    file; TensorRT before 10 reacts to it only after the build has finished.

    Args:
        onnx: the path of an ONNX file, or a model in memory.
        path: the engine's file; default: that of the ONNX file, as ``.engine``. An engine of a model in memory is
            written only if a path is given.
        shapes: sizes to build for, by input: ``(smallest, usual, largest)`` shape, or one for all three. Several
            mappings in a list make several profiles. Missing sizes follow from sizes of the same name; otherwise an
            open first axis is 1 to 8, which the report says. Any other open axis is an error that says what to give.
        values: likewise, for inputs whose values are sizes (for a Reshape, for example).
        fp16: before TensorRT 10: also compute in half where that is faster.
        tf32: multiply float32 in TF32, with errors of 1e-3.
        optimization_level: 0 to 5: how long to search for fast kernels; default: TensorRT's.
        workspace: scratch memory, in bytes or as ``"4G"``; default: all memory.
        dla_core: run what this DLA of a Jetson or DRIVE supports on it, and the rest on the GPU.
        version_compatible: the engine loads in later versions of the same major version (``load(…, trusted=True)``)
            and contains the plugin library.
        hardware_compatibility: ``"ampere+"`` or ``"same"`` (compute capability): the engine runs on other GPUs too.
        strip_weights: leave the weights out of the plan; ``load(…, refit="model.onnx")`` adds them.
        refit: weights can be replaced by :meth:`TensorRTEngine.refit`.
        plugins: the plugin library; default: as for :func:`svexport.tensorrt.register_plugins`.
        timing_cache: kernel timings measured by earlier builds: True for those in svexport's cache, by device and
            version; a path; False for none.
        check: before minutes of building, check the file against what this TensorRT parses (:func:`svexport.check`).
        device: ``"cuda"`` or ``"cuda:1"``; default: torch's current one.

    Returns:
        The engine, loaded from its file; ``engine.report`` describes the build.

    Raises:
        BuildError: if the file is refused, does not parse, or does not build, with TensorRT's reason.
        UnsupportedError: if this version of TensorRT lacks a requested feature.
        BackendNotAvailableError: without TensorRT 8.6 or later, or without a GPU.
        PluginBuildError: if the plugin library cannot be loaded.
    """
    options = BuildOptions.of(
        workspace,
        fp16=fp16,
        tf32=tf32,
        optimization_level=optimization_level,
        dla_core=dla_core,
        version_compatible=version_compatible,
        hardware_compatibility=hardware_compatibility,
        strip_weights=strip_weights,
        refit=refit,
    )
    if not isinstance(timing_cache, (bool, str, os.PathLike)):
        raise BuildError(f"timing_cache expects True, False or a path, got {timing_cache!r}")
    source = read_source(onnx)
    target = engine_path(source, path)
    trt = load_tensorrt()
    where = place(device)
    cache = builder.timing_cache_path(trt.__version__, where.name) if timing_cache is True else None
    if not isinstance(timing_cache, bool):
        cache = Path(timing_cache)
    with where.active():
        built = builder.build_plan(
            trt,
            source,
            options,
            shapes=shapes,
            values=values,
            plugins=plugins,
            timing_cache=cache,
            check=check,
        )
    refit_from = (source.path or source.model) if strip_weights else None
    engine = TensorRTEngine(built.plan, path=target, device=where.device, refit=refit_from, trusted=True)
    if target is not None:
        try:
            builder.write(target, built.plan)
        except BaseException:
            engine.close()
            raise
    engine.report = _report(trt, source, target, options, built, engine, cache)
    engine.sources = engine.report.sources
    engine.built_from = (
        source.path or source.model,
        {
            "values": values,
            "fp16": fp16,
            "tf32": tf32,
            "optimization_level": optimization_level,
            "workspace": workspace,
            "dla_core": dla_core,
            "hardware_compatibility": hardware_compatibility,
            "plugins": plugins,
            "timing_cache": timing_cache,
            "device": where.device,
        },
    )
    return engine


def _report(
    trt: ModuleType,
    source: Source,
    path: Path | None,
    options: BuildOptions,
    built: builder.Built,
    engine: TensorRTEngine,
    timing_cache: Path | None,
) -> BuildReport:
    where = place(engine.device)
    try:
        command = trtexec_command(
            source,
            path,
            version_of(trt),
            options,
            built.profiles,
            plugins=built.library,
            timing_cache=timing_cache,
            device=where.device.index or 0,
        )
    except UnsupportedError as error:
        command = f"# {error}"
    return BuildReport(
        source=str(source),
        path=path,
        tensorrt=trt.__version__,
        device=where.name,
        bytes=len(built.plan),
        profiles=[str(profile) for profile in built.profiles],
        plugins=built.plugins,
        layers=engine.layers(),
        sources=source_lines(source.model),
        seconds=built.seconds,
        trtexec=command,
        notes=built.notes,
        check=built.check,
    )


def engine_path(source: Source, path: str | os.PathLike[str] | None) -> Path | None:
    """The path of the engine file.

    Raises:
        BuildError: if it is not writable; raised before the build, which takes minutes.
    """
    from svexport import html
    from svexport.errors import SvexportError

    if path is not None and not isinstance(path, (str, os.PathLike)):
        raise BuildError(f"expected the path of a .engine or .plan file, got {path!r}")
    if path is None:
        target = None if source.path is None else source.path.with_suffix(".engine")
    else:
        target = Path(path)
    if target is None:
        return None
    if target.suffix.lower() not in (".engine", ".plan"):
        raise BuildError(f"an engine is a .engine or .plan file, by which svexport.load knows it; got {target}")
    try:
        html.check_place(target)
    except SvexportError as error:
        raise BuildError(str(error)) from error
    return target
