"""Serializes a model to the bytes of its file."""

from __future__ import annotations

from typing import IO, Any

import onnx

from svexport.graph.scope import LARGE, byte_size

__all__ = ["write_model"]


def write_model(model: onnx.ModelProto, stream: IO[bytes]) -> None:
    """Writes what ``model.SerializeToString()`` returns, one weight after another. The library would first build one
    string of all weights, which takes most of the time of saving a large model, and its size again in memory."""
    before, after = _around(model, "graph")
    nodes, rest = _around(model.graph, "initializer")
    parts = [_apart(tensor) for tensor in model.graph.initializer]
    sizes = [len(head) + size + len(tail) for head, size, tail in parts]
    tags = [_tag(model.graph, "initializer", size) for size in sizes]
    stream.write(before + _tag(model, "graph", sum(map(len, (nodes, *tags, rest))) + sum(sizes)) + nodes)
    for tensor, tag, (head, size, tail) in zip(model.graph.initializer, tags, parts, strict=True):
        stream.write(tag + head)
        if size:
            stream.write(tensor.raw_data)
            stream.write(tail)
    stream.write(rest + after)


def _apart(tensor: onnx.TensorProto) -> tuple[bytes, int, bytes]:
    """A tensor up to its numbers, how many bytes of them are to follow, and what comes then; a small one whole."""
    size = len(tensor.raw_data) if byte_size(tensor) > LARGE else 0
    if not size:
        return tensor.SerializeToString(), 0, b""
    before, after = _around(tensor, "raw_data")
    return before + _tag(tensor, "raw_data", size), size, after


def _around(message: Any, name: str) -> tuple[bytes, bytes]:
    """The bytes of a message before and after one of its fields; they are written in the order of their numbers."""
    number = message.DESCRIPTOR.fields_by_name[name].number
    parts = type(message)(), type(message)()
    for field, value in message.ListFields():
        part = parts[field.number > number]
        if field.name == name:
            continue
        if hasattr(value, "extend"):
            getattr(part, field.name).extend(value)
        elif field.message_type:
            getattr(part, field.name).CopyFrom(value)
        else:
            setattr(part, field.name, value)
    before, after = (part.SerializeToString() for part in parts)
    return before, after


def _tag(message: Any, name: str, size: int) -> bytes:
    """The bytes before a field of ``size`` bytes: its number and wire type, and the length."""
    return b"".join(map(_varint, (message.DESCRIPTOR.fields_by_name[name].number << 3 | 2, size)))


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; all but the last have the eighth."""
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])
