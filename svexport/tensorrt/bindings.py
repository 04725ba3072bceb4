"""TensorRT's Python bindings: found, and asked what they have."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from svexport.errors import BackendNotAvailableError
from svexport.tensorrt.support.target import Version

__all__ = ["OLDEST", "Log", "dtypes", "load_tensorrt", "load_tensorrt_for_plugins", "logger_for", "version_of"]

OLDEST: Version = (8, 6)
"""The first TensorRT that engines are built and run with: tensors by name, libraries of plugins by path."""


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
    """The bindings, of a TensorRT that takes plugins in Python.

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
    """The data types that both this TensorRT and torch have."""
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
    """What TensorRT says while it works.

    Attributes:
        errors: its errors, in order.
        warnings: its warnings, each once.
    """

    KEPT = 50

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def add(self, severity: Any, levels: Any, message: str) -> None:
        """Keeps a message, of any thread, and hands it to svexport's logger."""
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
        """The first error, from which others follow; the last one where it is about memory."""
        memory = [text for text in self.errors if "memory" in text.lower()]
        return (memory or self.errors or ["TensorRT gives no reason"])[0].strip()


def logger_for(trt: ModuleType, log: Log) -> Any:
    """A logger of TensorRT's that writes to ``log``."""

    class Logger(trt.ILogger):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            log.add(severity, trt.ILogger, msg)

    return Logger()
