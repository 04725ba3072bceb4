"""TensorRT versions as targets: the opsets they parse, and whether a file may carry bodies together with plugins."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from svexport.errors import ExportError

__all__ = [
    "DOMAIN_AS_NAMESPACE",
    "KNOWN",
    "LOCAL_FUNCTIONS",
    "PLUGINS_BEFORE_FUNCTIONS",
    "PLUGINS_FIRST",
    "Target",
    "Version",
    "dotted",
    "version",
]

Version: TypeAlias = tuple[int, int]

# From the release notes.
_MINORS = {8: (2, 4, 5, 6), 9: range(4), 10: range(17), 11: range(6)}
KNOWN = tuple((major, minor) for major, minors in _MINORS.items() for minor in minors)
"""The released versions, up to the newest that this module knows."""

# (first version, lowest opset, highest opset), from the release notes and docs/operators.md of onnx-tensorrt.
_OPSETS = [((8, 2), 9, 13), ((8, 4), 9, 17), ((10, 0), 9, 20), ((10, 15), 9, 24), ((11, 5), 9, 25)]

LOCAL_FUNCTIONS: Version = (9, 0)
"""The first version that parses local functions."""
PLUGINS_BEFORE_FUNCTIONS: Version = (10, 7)
"""The first version that looks for a plugin before local functions, by the changelog of its parser."""
DOMAIN_AS_NAMESPACE: Version = (10, 10)
"""The first version that looks for a plugin under the node's domain, if the node has no attribute plugin_namespace."""
PLUGINS_FIRST: Version = (10, 16)
"""The first version that looks for a plugin before anything else, if the node has that attribute."""


def version(text: str) -> Version:
    """``"8.6"`` as (8, 6)."""
    major, minor = text.split(".")
    return int(major), int(minor)


def dotted(version: Version) -> str:
    """(8, 6) as ``"8.6"``."""
    return f"{version[0]}.{version[1]}"


@dataclass(frozen=True)
class Target:
    """A TensorRT version.

    Attributes:
        version: (major, minor).
        opsets: lowest and highest opset that its parser supports.
        bodies: whether the parser looks for a plugin before local functions. In earlier versions a body would shadow
            the plugin, so files for them carry none.
    """

    version: Version
    opsets: tuple[int, int]
    bodies: bool

    @classmethod
    def parse(cls, text: str) -> Target:
        """Parses ``"8.6"``, ``"10.12"``, ``"11"``; ``"8.6.1"`` is 8.6.

        Raises:
            ExportError: on a text that is not one of the versions in ``KNOWN``.
        """
        if isinstance(text, float):
            raise ExportError(f"target expects a text, such as '8.6', got the number {text}: 10.10 would be 10.1")
        match = re.fullmatch(r"(\d+)(?:\.(\d+))?(?:\.\d+)*", str(text))
        version = (int(match[1]), int(match[2] or 0)) if match else (0, 0)
        if version not in KNOWN:
            ranges = [
                f"{major}.{minors[0]} to {major}.{minors[-1]}"
                if isinstance(minors, range)
                else ", ".join(f"{major}.{minor}" for minor in minors)
                for major, minors in _MINORS.items()
            ]
            listed = ", ".join(ranges)
            newest = dotted(KNOWN[-1])
            newer = f". For a newer TensorRT give {newest}, the newest whose rules are known" * (version > KNOWN[-1])
            raise ExportError(f"target expects a TensorRT version, one of {listed}; got {text!r}{newer}")
        opsets = next(entry[1:] for entry in reversed(_OPSETS) if entry[0] <= version)
        return cls(version, opsets, version >= PLUGINS_BEFORE_FUNCTIONS)

    def __str__(self) -> str:
        return f"TensorRT {dotted(self.version)}"
