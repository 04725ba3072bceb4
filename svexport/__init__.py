"""svexport: PyTorch to TensorRT through ONNX, exact and proven.

>>> import svexport
>>> report = svexport.export(model, (images,), "model.onnx", opset=11)
>>> print(report)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from svexport._version import __version__
from svexport.errors import (
    BackendNotAvailableError,
    BuildError,
    EngineError,
    ExportError,
    PluginBuildError,
    SvexportError,
    UnsupportedError,
    VerificationError,
)

if TYPE_CHECKING:
    from svexport import ops, tensorrt
    from svexport.exporter.export import export
    from svexport.exporter.replace import replace
    from svexport.exporter.report import ExportReport
    from svexport.graph.bodies import lower
    from svexport.graph.opsets import convert
    from svexport.parity import Parity
    from svexport.quantization.precisions import Precisions, precisions
    from svexport.quantization.quantize import quantize
    from svexport.quantization.sensitivity import Sensitivity, sensitivity
    from svexport.quantization.table import CalibrationTable
    from svexport.runtime.bench import Bench, bench
    from svexport.runtime.build import build
    from svexport.runtime.compare import Comparison, compare
    from svexport.runtime.reduce import reduce
    from svexport.runtime.session import load
    from svexport.runtime.triton import TritonRepository, triton_repository
    from svexport.tensorrt.check import check
    from svexport.tensorrt.check.report import CheckReport
    from svexport.tracing.record import record

__all__ = [
    "BackendNotAvailableError",
    "Bench",
    "BuildError",
    "CalibrationTable",
    "CheckReport",
    "Comparison",
    "EngineError",
    "ExportError",
    "ExportReport",
    "Parity",
    "PluginBuildError",
    "Precisions",
    "Sensitivity",
    "SvexportError",
    "TritonRepository",
    "UnsupportedError",
    "VerificationError",
    "__version__",
    "bench",
    "build",
    "check",
    "compare",
    "convert",
    "export",
    "load",
    "lower",
    "ops",
    "precisions",
    "quantize",
    "record",
    "reduce",
    "replace",
    "sensitivity",
    "tensorrt",
    "triton_repository",
]

# Imported on first use: onnx costs as much time to import as svexport may take, and the command line has to answer
# `--help` without torch and `doctor` even where it is missing.
_LAZY = {
    "Bench": "svexport.runtime.bench",
    "CalibrationTable": "svexport.quantization.table",
    "CheckReport": "svexport.tensorrt.check.report",
    "Comparison": "svexport.runtime.compare",
    "ExportReport": "svexport.exporter.report",
    "Parity": "svexport.parity",
    "Precisions": "svexport.quantization.precisions",
    "Sensitivity": "svexport.quantization.sensitivity",
    "TritonRepository": "svexport.runtime.triton",
    "bench": "svexport.runtime.bench",
    "build": "svexport.runtime.build",
    "check": "svexport.tensorrt.check",
    "compare": "svexport.runtime.compare",
    "convert": "svexport.graph.opsets",
    "export": "svexport.exporter.export",
    "load": "svexport.runtime.session",
    "lower": "svexport.graph.bodies",
    "precisions": "svexport.quantization.precisions",
    "quantize": "svexport.quantization.quantize",
    "record": "svexport.tracing.record",
    "reduce": "svexport.runtime.reduce",
    "replace": "svexport.exporter.replace",
    "sensitivity": "svexport.quantization.sensitivity",
    "triton_repository": "svexport.runtime.triton",
}

_NEEDED = {"numpy", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "rich", "torch"}

_MODULES = ("ops", "tensorrt")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"svexport.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'svexport' has no attribute {name!r}")
    try:
        value = getattr(import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _NEEDED:
            raise
        raise BackendNotAvailableError(
            f"svexport.{name} needs {error.name}, which is not installed here: pip install {error.name}"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_MODULES})
