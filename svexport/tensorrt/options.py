"""What an engine is built with, and the command of trtexec that says the same."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svexport.errors import BuildError, UnsupportedError
from svexport.tensorrt.profiles import Profile
from svexport.tensorrt.support.target import Version, dotted

__all__ = ["BuildOptions", "trtexec_command"]

_HARDWARE = {"ampere+": "AMPERE_PLUS", "same": "SAME_COMPUTE_CAPABILITY"}
_TRTEXEC_HARDWARE = {"ampere+": "ampere+", "same": "sameComputeCapability"}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
STRONGLY_TYPED: Version = (10, 0)
"""From here on the types of a file are those of its engine."""
ALWAYS_STRONGLY_TYPED: Version = (11, 0)


@dataclass(frozen=True)
class BuildOptions:
    """What :func:`svexport.build` passes on to TensorRT; each as there.

    Attributes:
        fp16: lets a TensorRT older than 10 compute in half where that is faster.
        tf32: lets it multiply float32 in TF32.
        optimization_level: 0 to 5; None is TensorRT's own.
        workspace: bytes of scratch memory; None is all there is.
        dla_core: the DLA that layers run on where they can, the GPU takes the rest.
        version_compatible: the engine loads in later versions of this major one.
        hardware_compatibility: ``"ampere+"`` or ``"same"`` (compute capability): the engine runs on other GPUs.
        strip_weights: the plan is without weights that :meth:`TensorRTEngine.refit` can fill in.
        refit: weights can be exchanged.
    """

    fp16: bool = False
    tf32: bool = False
    optimization_level: int | None = None
    workspace: int | None = None
    dla_core: int | None = None
    version_compatible: bool = False
    hardware_compatibility: str | None = None
    strip_weights: bool = False
    refit: bool = False

    @classmethod
    def of(cls, workspace: int | str | None, **options: Any) -> BuildOptions:
        """Options that are checked as far as they can be without TensorRT.

        Raises:
            BuildError: on a value out of range.
        """
        made = cls(workspace=_bytes(workspace), **options)
        level, core = made.optimization_level, made.dla_core
        if level is not None and level not in range(6):
            raise BuildError(f"optimization_level expects 0 to 5, got {level!r}")
        if core is not None and not (isinstance(core, int) and core >= 0):
            raise BuildError(f"dla_core expects the number of a DLA, got {core!r}")
        if made.hardware_compatibility not in (None, *_HARDWARE):
            raise BuildError(
                f"hardware_compatibility expects {' or '.join(map(repr, _HARDWARE))}, "
                f"got {made.hardware_compatibility!r}"
            )
        return made

    def hold_to(self, version: Version) -> None:
        """Refuses what a version does not have.

        Raises:
            UnsupportedError: naming it.
        """
        here = f"TensorRT {dotted(version)}"
        if self.fp16 and version >= STRONGLY_TYPED:
            raise UnsupportedError(
                f"fp16 is for TensorRT before 10; {here} takes types from the file: export with dtype=torch.float16"
            )
        if self.strip_weights and version < (10, 0):
            raise UnsupportedError(f"strip_weights needs TensorRT 10, this is {dotted(version)}")
        if self.hardware_compatibility == "same" and version <= (10, 1):  # where in 10 it came is not known here
            raise UnsupportedError(f'hardware_compatibility="same" is of later versions; {dotted(version)} has it not')

    def apply(self, trt: Any, config: Any, half: bool, integers: bool) -> None:
        """Sets a builder's configuration.

        Args:
            half: the file has float16 tensors; integers: it has quantizers. Before 10 both are allowed by flags.

        Raises:
            UnsupportedError: if this TensorRT lacks something after all.
        """
        flags = [(self.version_compatible, "VERSION_COMPATIBLE"), (self.refit, "REFIT")]
        flags += [(self.strip_weights, "STRIP_PLAN"), (self.strip_weights and not self.refit, "REFIT_IDENTICAL")]
        if not hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):
            flags += [(self.fp16 or half, "FP16"), (integers, "INT8")]
            # So that threads may run the same profile; later versions always allow it.
            config.set_preview_feature(trt.PreviewFeature.PROFILE_SHARING_0806, True)
        for wanted, name in flags:
            if wanted:
                config.set_flag(_member(trt, trt.BuilderFlag, name))
        if not self.tf32:
            config.clear_flag(trt.BuilderFlag.TF32)
        if self.optimization_level is not None:
            config.builder_optimization_level = self.optimization_level
        if self.workspace is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, self.workspace)
        if self.dla_core is not None:
            config.default_device_type = trt.DeviceType.DLA
            config.DLA_core = self.dla_core
            config.set_flag(trt.BuilderFlag.GPU_FALLBACK)
        if self.hardware_compatibility is not None:
            name = _HARDWARE[self.hardware_compatibility]
            config.hardware_compatibility_level = _member(trt, trt.HardwareCompatibilityLevel, name)
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # for which layers came from which nodes


def _member(trt: Any, kind: Any, name: str) -> Any:
    if not hasattr(kind, name):
        raise UnsupportedError(f"TensorRT {trt.__version__} has no {kind.__name__}.{name}, which was asked for")
    return getattr(kind, name)


def _bytes(size: int | str | None) -> int | None:
    """``"4G"``, ``"512MiB"`` or a number of bytes."""
    if size is None or (isinstance(size, int) and not isinstance(size, bool) and size > 0):
        return size  # type: ignore[return-value]
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]?)(?:i?B)?", str(size).strip(), re.IGNORECASE)
    found = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if not found:
        raise BuildError(f'workspace expects bytes, or a text such as "4G" or "512M"; got {size!r}')
    return found


def trtexec_command(
    onnx: Path,
    engine: Path,
    version: Version,
    options: BuildOptions,
    profiles: Sequence[Profile],
    *,
    plugins: str | os.PathLike[str] | None = None,
    timing_cache: str | os.PathLike[str] | None = None,
    device: int = 0,
    half: bool = False,
    integers: bool = False,
) -> str:
    """The trtexec of that version which builds the same engine, as a line for a shell.

    Raises:
        UnsupportedError: on options that the version lacks, and several profiles before 10, whose trtexec knows one.
    """
    options.hold_to(version)
    words = ["trtexec", f"--onnx={onnx}", f"--saveEngine={engine}", "--skipInference"]
    if STRONGLY_TYPED <= version < ALWAYS_STRONGLY_TYPED:
        words.append("--stronglyTyped")
    if version < STRONGLY_TYPED:
        words += ["--fp16"] * (options.fp16 or half) + ["--int8"] * integers + ["--preview=+profileSharing0806"]
    words += ["--noTF32"] * (not options.tf32)
    if len(profiles) > 1 and version < (10, 0):
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
        words.append(f"--hardwareCompatibilityLevel={_TRTEXEC_HARDWARE[options.hardware_compatibility]}")
    words += ["--stripWeights"] * options.strip_weights + ["--refit"] * options.refit
    words.append("--profilingVerbosity=detailed")
    if plugins is not None:
        words.append(f"--dynamicPlugins={plugins}")
        words += [f"--setPluginsToSerialize={plugins}"] * options.version_compatible
    if timing_cache is not None:
        words.append(f"--timingCacheFile={timing_cache}")
    words += [f"--device={device}"] * (device != 0)
    return shlex.join(words)
