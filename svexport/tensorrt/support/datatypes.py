"""Types of tensors by TensorRT version."""

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
    "UINT8": (8, 5),  # inputs and outputs of the network alone; constants become INT32 in every version
    "BFLOAT16": (9, 0),
    "FLOAT8E4M3FN": (9, 0),
    "INT4": (10, 0),
    "FLOAT4E2M1": (10, 8),
}
"""The first version that knows a type, by ONNX's name for it; no version knows the others."""

NARROWED: dict[str, tuple[str, Version]] = {"INT64": ("INT32", (9, 0)), "DOUBLE": ("FLOAT", (99, 0))}
"""What the parser makes of a type, and the first version that leaves it as it is."""


@cache
def onnx_name(number: int) -> str:
    """``"FLOAT"``; of a number that this onnx has no name for, the number."""
    return TensorProto.DataType.Name(number) if number in TensorProto.DataType.values() else f"type {number}"


@cache
def type_name(number: int, version: Version) -> str:
    """The type that a tensor of an ONNX type has in TensorRT."""
    name = onnx_name(number)
    narrow, until = NARROWED.get(name, (name, version))
    return narrow if version < until else name
