"""Checks dynamic sizes of 0: what a file computes from empty inputs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from svexport.errors import EngineError
from svexport.exporter.sizes_of_file import may_end_the_process
from svexport.parity import Parity

if TYPE_CHECKING:
    from svexport.exporter.verify import Verification

__all__ = ["compare_empty"]


def compare_empty(verification: Verification, empty: Iterable[tuple[str, list[Tensor]]]) -> list[str]:
    """Tries 0 for each dynamic size, if the model accepts it. If the file computes something else then, or may end the
    process, it is declared valid only for sizes from 1 on, with a note.

    Args:
        verification: the verification of sizes from 1 on; results are added to it.
        empty: each size, with inputs in which it is 0.

    Returns:
        The sizes that must not be 0.
    """
    safe: bool | None = None
    from_one = []
    for root, inputs in empty:
        run = f"{root}=0"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of divisions by how many there are
                expected = verification.forward(run, inputs)
        except Exception:  # noqa: BLE001 - not what the model is for
            continue
        if safe is None:
            named = zip(verification.input_names, verification.tensors, strict=True)
            path = verification.file.engine.path
            assert path is not None  # an engine of a file
            safe = not may_end_the_process(path, [name for name, t in named if not t.is_floating_point()])
        found = _judged(verification, run, inputs, expected) if safe else None
        if found is None:
            from_one.append(root)
            verification.notes.append(f"{root}: sizes from 1; with 0 the file does not compute what torch does")
        else:
            verification.results += found
        verification.forget(run)
    return from_one


def _judged(
    verification: Verification, run: str, inputs: list[Tensor], expected: Sequence[Tensor]
) -> list[Parity] | None:
    """How each output agrees; None if the file does not compute what torch does."""
    try:
        actual = verification.file.engine.run([t.detach().cpu() for t in inputs])
    except EngineError:
        return None
    if len(actual) != len(expected):
        return None
    pairs = list(zip(verification.output_names, expected, actual, strict=True))
    found = verification.judged(run, inputs, pairs)
    return found if found is not None and all(p.ok for p in found) else None
