"""Small models of our own, written as training repositories write theirs: one file per family; ``ZOO`` lists all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn

Model = TypeVar("Model", bound=type[nn.Module])


@dataclass(frozen=True)
class Entry:
    """A model, its random inputs for a batch, and what is expected of its export."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    dynamic: bool = True
    """Whether the first axis of every input is a batch that may vary."""
    scales: tuple[float, ...] = (0.0, -1.0, 30.0)
    """What the floats of the inputs are multiplied with; no 0 where it would tie what is ranked."""
    refused: str = ""
    """A part of the message by which the export is refused, if it is."""


ZOO: dict[str, Entry] = {}


def entry(
    inputs: Callable[[int], tuple[Tensor, ...]],
    *,
    dynamic: bool = True,
    scales: tuple[float, ...] = Entry.scales,
    refused: str = "",
) -> Callable[[Model], Model]:
    """Adds a class of models that is built without arguments."""

    def add(model: Model) -> Model:
        ZOO[model.__name__] = Entry(model, inputs, dynamic, scales, refused)
        return model

    return add
