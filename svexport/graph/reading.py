"""Reads files that others wrote: rejects what cannot be a model; the content of a model may still be anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
from onnx import TensorProto

from svexport.errors import SvexportError, UnsupportedError
from svexport.graph.walk import STANDARD, graphs

__all__ = ["check_regular", "check_whole", "damaged", "read_model"]

MAX_BYTES = 2**31 - 1


def check_regular(path: Path) -> None:
    """Raises :class:`SvexportError` on a path of a pipe or a device, which could block, or a path that cannot
    exist."""
    if "\0" in str(path):
        raise SvexportError(f"expected the path of a file, got {str(path)!r}, with a NUL in it; take that out")
    try:
        special = path.exists() and not path.is_file() and not path.is_dir()
    except OSError as error:  # too long a name, say
        raise SvexportError(f"cannot read {path}: {error.strerror}; check the path") from error
    if special:
        raise SvexportError(f"expected a file, got {path}, which is a pipe or a device; copy it to a file first")


@contextmanager
def damaged(what: str) -> Iterator[None]:
    """Treats any error inside the context, of a library or of Python, as caused by a damaged or unusual file.

    Raises:
        UnsupportedError: in place of that error.
    """
    try:
        yield
    except SvexportError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0][:300]
        raise UnsupportedError(
            f"{what} cannot be read as the model it says it is: {type(error).__name__}: {reason}\n  "
            "onnx.checker.check_model(model, full_check=True) tells whether it is damaged: export or copy it again"
        ) from error


def read_model(path: Path, external: bool = True) -> onnx.ModelProto:
    """Reads a model from its file, including external data unless told otherwise.

    Raises:
        SvexportError: if the path is not a regular file, or the file is not an ONNX model.
    """
    check_regular(path)
    if path.is_dir():
        raise SvexportError(f"expected an ONNX file, got the folder {path}")
    if not path.exists():
        raise SvexportError(f"no such file: {path}")
    if path.stat().st_size > MAX_BYTES:
        raise SvexportError(
            f"{path} has {path.stat().st_size} bytes, and nothing reads a protobuf above 2 GiB, TensorRT's parser "
            "included; save its weights beside it: onnx.save(..., save_as_external_data=True)"
        )
    try:
        return onnx.load(str(path), load_external_data=external)
    except Exception as error:
        raise SvexportError(f"{path} is not a valid ONNX file: {str(error) or type(error).__name__}") from error


def check_whole(model: onnx.ModelProto, what: str) -> None:
    """Whether there is all that a check needs: bytes that are something else may well be parsed as a model of nothing.

    Raises:
        SvexportError: naming what is missing.
    """
    missing = [name for name in ("ir_version", "graph") if not model.HasField(name)]
    if not any(entry.domain in STANDARD for entry in model.opset_import):
        missing.append("opset of the default domain")
    if missing:
        raise SvexportError(f"{what} is not a valid ONNX file: it has no {' and no '.join(missing)}")
    if any(isinstance(name, bytes) for name in _names(model)):  # which protobuf makes of what is no UTF-8
        raise SvexportError(f"{what} is not a valid ONNX file: it has names that are no text")
    known = set(TensorProto.DataType.values()) - {TensorProto.UNDEFINED}
    for graph in graphs(model.graph):
        for tensor in graph.initializer:
            if tensor.data_type not in known or min(tensor.dims, default=0) < 0:
                raise SvexportError(
                    f"{what} is not a valid ONNX file: the initializer {tensor.name!r} has data type "
                    f"{tensor.data_type} and dimensions {list(tensor.dims)}"
                )


def _names(model: onnx.ModelProto) -> Iterator[str | bytes]:
    yield model.graph.name
    yield from (entry.domain for entry in model.opset_import)
    for function in model.functions:
        yield from (function.name, function.domain, *function.input, *function.output)
    bodies = [onnx.GraphProto(node=function.node) for function in model.functions]
    for graph in (inner for outer in (model.graph, *bodies) for inner in graphs(outer)):
        for node in graph.node:
            yield from (node.op_type, node.domain, node.name, *node.input, *node.output)
            yield from (attribute.name for attribute in node.attribute)
        yield from (value.name for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer))
