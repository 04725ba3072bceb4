"""The options of an engine build."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from svexport.errors import BuildError, UnsupportedError
from svexport.tensorrt.support.target import Version, dotted

__all__ = ["ALWAYS_STRONGLY_TYPED", "STRONGLY_TYPED", "BuildOptions"]

_HARDWARE = {"ampere+": "AMPERE_PLUS", "same": "SAME_COMPUTE_CAPABILITY"}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
STRONGLY_TYPED: Version = (10, 0)
"""From this version on an engine has the types of its file."""
ALWAYS_STRONGLY_TYPED: Version = (11, 0)


@dataclass(frozen=True)
class BuildOptions:
    """The options that :func:`svexport.build` passes to TensorRT, with the same meaning.

    Attributes:
        fp16: lets a TensorRT older than 10 compute in half where that is faster.
        tf32: lets TensorRT multiply float32 in TF32.
        optimization_level: 0 to 5; None is TensorRT's default.
        workspace: bytes of scratch memory; None is all memory.
        dla_core: the DLA that runs the layers it supports; the GPU runs the rest.
        version_compatible: the engine loads in later versions of the same major version.
        hardware_compatibility: ``"ampere+"`` or ``"same"`` (compute capability): the engine runs on other GPUs.
        strip_weights: the plan omits the weights that :meth:`TensorRTEngine.refit` can fill in.
        refit: weights can be replaced.
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
        """Makes options and checks them as far as possible without TensorRT.

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
        """Checks that a TensorRT version supports the options.

        Raises:
            UnsupportedError: names the unsupported option.
        """
        here = f"TensorRT {dotted(version)}"
        if self.fp16 and version >= STRONGLY_TYPED:
            raise UnsupportedError(
                f"fp16 is for TensorRT before 10; {here} takes types from the file: export with dtype=torch.float16"
            )
        if self.strip_weights and version < (10, 0):
            raise UnsupportedError(f"strip_weights needs TensorRT 10, this is {dotted(version)}")
        if self.hardware_compatibility == "same" and version <= (10, 1):  # where in 10 it came is not known here
            raise UnsupportedError(f'hardware_compatibility="same" needs a later TensorRT, this is {dotted(version)}')

    def apply(self, trt: Any, config: Any, half: bool, integers: bool) -> None:
        """Sets a builder's configuration.

        Args:
            half: the file has float16 tensors; integers: it has quantizers. Before 10, flags must allow either.

        Raises:
            UnsupportedError: if this TensorRT lacks a member that an option needs.
        """
        flags = [(self.version_compatible, "VERSION_COMPATIBLE"), (self.refit, "REFIT")]
        flags += [(self.strip_weights, "STRIP_PLAN"), (self.strip_weights and not self.refit, "REFIT_IDENTICAL")]
        if not hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):
            flags += [(self.fp16 or half, "FP16"), (integers, "INT8")]
            # Let several threads run the same profile; later versions always allow it.
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
    """Parses ``"4G"``, ``"512MiB"`` or a number of bytes."""
    if size is None or (isinstance(size, int) and not isinstance(size, bool) and size > 0):
        return size  # type: ignore[return-value]
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]?)(?:i?B)?", str(size).strip(), re.IGNORECASE)
    found = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if not found:
        raise BuildError(f'workspace expects bytes, or a text such as "4G" or "512M"; got {size!r}')
    return found
