"""Reads a plan, the file of a TensorRT engine; only its header has a known format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from svexport.errors import EngineError, SvexportError
from svexport.graph.reading import check_regular

__all__ = ["HEADER_BYTES", "Plan", "check_file", "read_plan"]

HEADER_BYTES = 28
_MAGIC = b"ftrt"
_LAYOUT = bytes(4)  # of the header: the only one that is documented, by trtexec --getPlanVersionOnly


@dataclass(frozen=True)
class Plan:
    """A plan with a valid header.

    Attributes:
        content: the whole file.
        version: version of the TensorRT that built it, ``"10.16.1.11"``; empty if the header has a newer layout.
    """

    content: bytes
    version: str

    @classmethod
    def parse(cls, content: bytes, name: str) -> Plan:
        """Parses the header only.

        Raises:
            EngineError: if it is not a plan.
        """
        if len(content) <= HEADER_BYTES:
            raise EngineError(f"{name} has {len(content)} bytes, which is no TensorRT engine; build or copy it again")
        if content[:4] != _MAGIC:
            said = " but a protobuf, probably an ONNX file: name it .onnx" if content[:1] == b"\x08" else ""
            raise EngineError(
                f"{name} is no TensorRT engine{said}: it should begin with {_MAGIC.decode()!r}, got {content[:4]!r}; "
                "build it with svexport.build or trtexec --saveEngine"
            )
        known = content[4:8] == _LAYOUT
        return cls(content, ".".join(str(byte) for byte in content[24:28]) if known else "")


def check_file(path: Path) -> None:
    """Raises :class:`EngineError` on a path that cannot be read, or on a pipe, which could block."""
    try:
        check_regular(path)
        with path.open("rb"):
            pass
    except SvexportError as error:
        raise EngineError(str(error)) from error
    except OSError as error:
        raise EngineError(f"cannot read {path}: {error.strerror or error}; check the path") from error


def read_plan(path: Path) -> Plan:
    """Reads the plan in a file.

    Raises:
        EngineError: if it cannot be read, or is not a plan.
    """
    check_file(path)
    try:
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES + 1)
            Plan.parse(head, str(path))  # raises before a large file that is not a plan is read whole
            content = head + file.read()
    except OSError as error:
        raise EngineError(f"cannot read {path}: {error.strerror or error}; check the path") from error
    return Plan.parse(content, str(path))
