"""Checks a command line before anything is loaded or run, and reports all that is wrong with it at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from svexport.errors import ExportError, SvexportError

__all__ = ["all_of", "existing", "onnx_file", "target"]


def all_of(*checks: Callable[[], Any]) -> None:
    """Runs every check and raises their errors: a single one unchanged, several as one error that lists them.

    Raises:
        SvexportError: if any check does.
    """
    errors: list[SvexportError] = []
    for check in checks:
        try:
            check()
        except SvexportError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise SvexportError("\n".join([f"{len(errors)} things are wrong:", *(f"  - {error}" for error in errors)]))


def existing(path: str | Path | None) -> Callable[[], None]:
    """A check that a file to read exists; whoever reads it reports anything else that is wrong with it."""

    def check() -> None:
        if path is not None and not Path(path).exists():
            raise ExportError(f"no such file: {path}")

    return check


def target(text: str | None) -> Callable[[], None]:
    """A check that a TensorRT version is known; None passes."""

    def check() -> None:
        from svexport.tensorrt.support.target import Target

        if text is not None:
            Target.parse(text)

    return check


def onnx_file(text: str) -> str:
    """The argparse type of an option that names an ONNX file to write."""
    from svexport.graph.saving import check_name

    if not Path(text).is_dir():  # the command itself refuses a folder
        try:
            check_name(Path(text))
        except ExportError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return text
