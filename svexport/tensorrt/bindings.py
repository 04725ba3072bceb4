"""Imports TensorRT's Python bindings and queries their features."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from svexport.errors import BackendNotAvailableError
from svexport.tensorrt.support.target import Version

__all__ = ["OLDEST", "Log", "dtypes", "load_tensorrt", "load_tensorrt_for_plugins", "logger_for", "version_of"]

OLDEST: Version = (8, 6)
"""The oldest TensorRT that builds and runs engines here: tensors are addressed by name, plugin libraries by path."""


def load_tensorrt() -> ModuleType:
    """The module ``tensorrt``.

    Raises:
        BackendNotAvailableError: if it does not import, or is older than :data:`OLDEST`.
    """
    try:
        import tensorrt
    except (ImportError, OSError) as error:
        raise BackendNotAvailableError(
            f"this needs TensorRT's Python bindings, which do not import here ({error}); pip install tensorrt, of the "
            "version that the engine is for"
        ) from error
    if version_of(tensorrt) < OLDEST:
        raise BackendNotAvailableError(
            f"engines need TensorRT {OLDEST[0]}.{OLDEST[1]} or later, this is {tensorrt.__version__}; use trtexec "
            "there: svexport build FILE.onnx --trtexec prints the command"
        )
    return tensorrt


def load_tensorrt_for_plugins() -> ModuleType:
    """The module ``tensorrt``, of a version that takes plugins in Python.

    Raises:
        BackendNotAvailableError: without TensorRT 10 or later.
    """
    trt = load_tensorrt()
    if not hasattr(trt, "IPluginV3OneBuild"):
        raise BackendNotAvailableError(
            f"plugins in Python need TensorRT 10 or later, this is {trt.__version__}; build those in C++ for it: "
            "svexport plugins build"
        )
    return trt


def version_of(trt: ModuleType) -> Version:
    """(major, minor)."""
    major, minor = trt.__version__.split(".")[:2]
    return int(major), int(minor)


def dtypes(trt: ModuleType) -> dict[Any, torch.dtype]:
    """Maps this TensorRT's data types to torch's, for those that both have."""
    names = {
        "FLOAT": torch.float32,
        "HALF": torch.float16,
        "BF16": torch.bfloat16,
        "INT8": torch.int8,
        "UINT8": torch.uint8,
        "INT32": torch.int32,
        "INT64": torch.int64,
        "BOOL": torch.bool,
    }
    return {getattr(trt.DataType, name): dtype for name, dtype in names.items() if hasattr(trt.DataType, name)}


class Log:
    """The messages of TensorRT during an operation.

    Attributes:
        errors: errors, in order.
        warnings: warnings, each once.
    """

    KEPT = 50

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def add(self, severity: Any, levels: Any, message: str) -> None:
        """Stores a message, from any thread, and passes it to svexport's logger."""
        from svexport.logging import logger

        if severity in (levels.INTERNAL_ERROR, levels.ERROR):
            logger.debug("TensorRT fails: {}", message)
            self.errors = [*self.errors, message][-self.KEPT :]
        elif severity == levels.WARNING:
            logger.debug("TensorRT warns: {}", message)
            if message not in self.warnings and len(self.warnings) < self.KEPT:
                self.warnings.append(message)
        else:
            logger.trace("TensorRT: {}", message)

    def reason(self) -> str:
        """The first error, which usually causes the others; but the last one about memory, if there is any."""
        memory = [text for text in self.errors if "memory" in text.lower()]
        return (memory or self.errors or ["TensorRT gives no reason"])[0].strip()


def logger_for(trt: ModuleType, log: Log) -> Any:
    """A TensorRT logger that writes to ``log``."""

    class Logger(trt.ILogger):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            log.add(severity, trt.ILogger, msg)

    return Logger()
