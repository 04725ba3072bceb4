"""Undoes what a forward changes in its model: counters, memories of the last frame, cached grids."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from svexport.tracing.reach import Reached, Root, bytes_of

__all__ = ["State", "derivative_levels", "random_state", "same_random_state", "set_random_state", "unchanged"]

MAX_PARAMETER_BYTES = 2**30


class State:
    """A snapshot of a model's values (:class:`~svexport.tracing.reach.Reached`) and of global state: random number
    generators and the default dtype.

    Parameters of more than a gibibyte in total are left out, because a forward hardly ever changes them. State kept by
    functions is left out too, such as a hook's list of results.

    Attributes:
        root: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        held = sum(bytes_of(p) for p in model.parameters() if not nn.parameter.is_lazy(p))
        small = held <= MAX_PARAMETER_BYTES
        self.root = Root("", None, None, model)
        self._reached = Reached([self.root], lambda t: small or not isinstance(t, nn.Parameter), functions=False)
        self._random = random_state()
        self._dtype = torch.get_default_dtype()

    def restore(self) -> None:
        """Restores what changed and touches nothing else, because another thread may run the model."""
        self._reached.restore()
        set_random_state(self._random)
        if torch.get_default_dtype() != self._dtype:
            torch.set_default_dtype(self._dtype)

    def changed(self) -> list[str]:
        """Names of changed values: ``head.memory``."""
        return self._reached.changed()


def random_state() -> dict[str, Any]:
    """Random states of torch on the CPU and the GPUs in use, of Python, and of NumPy."""
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def same_random_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two random states would draw the same numbers."""
    numbers, others = (state["numpy"] for state in (one, other))
    same = torch.equal(one["torch"], other["torch"]) and one["python"] == other["python"]
    same &= all(np.array_equal(a, b) for a, b in zip(numbers, others, strict=True))
    return same and all(map(torch.equal, one.get("cuda", []), other.get("cuda", [])))


def set_random_state(state: dict[str, Any]) -> None:
    """Sets the random states that ``state`` contains."""
    torch.set_rng_state(state["torch"])
    if "python" in state:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def derivative_levels() -> Iterator[None]:
    """Leaves the ``torch.func`` levels that a failed capture entered, which dynamo does not do. In a remaining
    forward-mode level every later capture would fail."""
    functorch: Any = torch._C._functorch
    depth = functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        if functorch.get_dynamic_layer_stack_depth() > depth:
            functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
            with suppress(RuntimeError):  # there may be no forward-mode level; there is at most one
                torch._C._exit_dual_level(level=0)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[State]:
    """Undoes changes of the model's attributes, buffers and parameters by forwards inside; yields the state before."""
    state = State(model)
    try:
        yield state
    finally:
        state.restore()
