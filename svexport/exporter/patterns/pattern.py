"""A part of a graph that may be an op, and the proof that it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from svexport.exporter.patterns.traced import Traced
from svexport.exporter.proof import Proof

__all__ = ["VIEWS", "Pattern", "noise", "prove", "source_of"]

DRAWS = 3
"""How many inputs of its own a part is tried on, beside the model's."""


@dataclass(frozen=True)
class Pattern:
    """What a part of a graph seems to compute.

    Attributes:
        op: the name of the op.
        what: the part in words: ``"softmax(QK^T)V"``.
        output: the node that the op computes.
        given: the nodes it is computed from, tensors.
        ours: the op on values of ``given``.
        build: puts the op into the graph, before ``output``, and returns the node that has its value.
        draw: other values of ``given``, in float64.
    """

    op: str
    what: str
    output: fx.Node
    given: tuple[fx.Node, ...]
    ours: Callable[..., Tensor]
    build: Callable[[fx.Graph], fx.Node]
    draw: Callable[[torch.Generator], Sequence[Tensor]]


def prove(traced: Traced, pattern: Pattern) -> Proof:
    """Compares a part with the op: on the model's own values, and in float64 on others, there with gradients."""
    proof = Proof()
    if traced.region(pattern.output, pattern.given) is None:
        proof.fault = "it depends on more than the op is given"
        return proof
    proof.add(traced.values[pattern.output], lambda: pattern.ours(*(traced.values[node] for node in pattern.given)))
    generator = torch.Generator().manual_seed(0)

    def theirs(*values: Any) -> Any:
        return traced.evaluate(pattern.output, dict(zip(pattern.given, values, strict=True)))

    draw: Sequence[Tensor] = ()
    for _ in range(DRAWS):
        if proof.fault:
            return proof
        draw = pattern.draw(generator)
        proof.add_other(lambda: theirs(*draw), lambda: pattern.ours(*draw))  # noqa: B023 - called at once
    if not proof.fault:
        proof.add_gradients(theirs, pattern.ours, draw)
    return proof


def noise(like: Tensor, generator: torch.Generator, *, scale: float = 1.0) -> Tensor:
    """Normal numbers in float64."""
    return (torch.randn(like.shape, generator=generator, dtype=torch.float64) * scale).to(like.device)


VIEWS = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", torch.flatten, torch.reshape}
VIEWS |= {torch.squeeze, torch.unsqueeze, torch.unflatten}


def source_of(traced: Traced, node: fx.Node, fits: Callable[[Tensor], bool]) -> Iterator[fx.Node]:
    """A node and what it is a view of, element by element in the same order, as far as they fit; the last first."""
    found = []
    while (value := traced.tensor(node)) is not None:
        if fits(value):
            found.append(node)
        if node.target not in VIEWS or not node.args or not isinstance(node.args[0], fx.Node):
            break
        node = node.args[0]
    yield from reversed(found)
