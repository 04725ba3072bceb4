"""Errors of svexport: each message says what was expected, what came, and what to do next."""

from __future__ import annotations

from typing import Any

__all__ = [
    "BackendNotAvailableError",
    "BuildError",
    "EngineError",
    "ExportError",
    "PluginBuildError",
    "SvexportError",
    "UnsupportedError",
    "VerificationError",
]


class SvexportError(Exception):
    """Base of every error raised by svexport."""


class ExportError(SvexportError):
    """The model, its arguments or the requested file cannot be exported as asked."""


class VerificationError(SvexportError):
    """The exported file does not compute what torch computes. No file is left behind.

    Attributes:
        parity: one :class:`svexport.exporter.report.Parity` per compared output, worst first.
    """

    def __init__(self, message: str, parity: list[Any] | None = None) -> None:
        super().__init__(message)
        self.parity = parity or []


class EngineError(SvexportError):
    """A file that cannot be loaded as an engine, inputs that do not fit an engine, or a run that failed."""


class BuildError(SvexportError):
    """An engine cannot be built as asked, or its builder failed. No file is left behind."""


class UnsupportedError(SvexportError):
    """A request that svexport understands but does not (or cannot) support."""


class BackendNotAvailableError(SvexportError):
    """An optional backend (ONNX Runtime, TensorRT, CUDA, matplotlib, ...) is not installed or not usable."""


class PluginBuildError(SvexportError):
    """A plugin or CUDA kernel could not be compiled or loaded."""
