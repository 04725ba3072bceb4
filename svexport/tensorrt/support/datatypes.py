"""The tensor types that each TensorRT version supports."""

from __future__ import annotations

from functools import cache

from onnx import TensorProto

from svexport.tensorrt.support.target import Version

__all__ = ["FIRST", "NARROWED", "onnx_name", "type_name"]

FIRST: dict[str, Version] = {
    "FLOAT": (8, 2),
    "FLOAT16": (8, 2),
    "INT8": (8, 2),
    "INT32": (8, 2),
    "INT64": (8, 2),
    "BOOL": (8, 2),
    "DOUBLE": (8, 2),
    "UINT8": (8, 5),  # only network inputs and outputs; constants become INT32 in every version
    "BFLOAT16": (9, 0),
    "FLOAT8E4M3FN": (9, 0),
    "INT4": (10, 0),
    "FLOAT4E2M1": (10, 8),
}
"""The first version that supports a type, by ONNX's name for it; no version supports the others."""

NARROWED: dict[str, tuple[str, Version]] = {"INT64": ("INT32", (9, 0)), "DOUBLE": ("FLOAT", (99, 0))}
"""The type that the parser converts a type to, and the first version that keeps the original."""


@cache
def onnx_name(number: int) -> str:
    """ONNX's name of a type, such as ``"FLOAT"``; the number itself if this onnx has no name for it."""
    return TensorProto.DataType.Name(number) if number in TensorProto.DataType.values() else f"type {number}"


@cache
def type_name(number: int, version: Version) -> str:
    """The type that a tensor of an ONNX type has in TensorRT."""
    name = onnx_name(number)
    narrow, until = NARROWED.get(name, (name, version))
    return narrow if version < until else name
