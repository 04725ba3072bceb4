"""A part of a graph that may be an op, and the proof that it is."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.autograd import forward_ad

from svexport.exporter.patterns.traced import Traced
from svexport.exporter.proof import Proof, Random

__all__ = ["ADDS", "RELUS", "VIEWS", "Pattern", "has_plain_gradients", "is_bare", "prove", "source_of"]

DRAWS = 3
"""Number of drawn inputs on which a part is tried, besides the model's own."""


@dataclass(frozen=True)
class Pattern:
    """A part of a graph, and the op that it may be.

    Attributes:
        op: the name of the op.
        what: the part in words: ``"softmax(QK^T)V"``.
        output: the node that the op computes.
        given: the nodes that it is computed from; their values are tensors.
        ours: the op on values of ``given``.
        build: puts the op into the graph, before ``output``, and returns the node that has its value.
        draw: makes other values of ``given``, in float64.
        more: further nodes that the op computes; then ``ours`` and ``build`` return as many results.
        modules: names of submodules whose parameters the op gets too.
    """

    op: str
    what: str
    output: fx.Node
    given: tuple[fx.Node, ...]
    ours: Callable[..., Any]
    build: Callable[[fx.Graph], Any]
    draw: Callable[[Random], Sequence[Tensor]]
    more: tuple[fx.Node, ...] = ()
    modules: frozenset[str] = frozenset()

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The nodes whose values a replacement has to compute."""
        return self.output, *self.more


def has_plain_gradients(like: Tensor) -> bool:
    """Whether the ops' own gradients apply: in float32 or float64, without autocast, and without transforms
    (``torch.func``, forward mode)."""
    if like.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled(like.device.type):
        return False
    return not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


def prove(traced: Traced, pattern: Pattern) -> Proof:
    """Compares a part with the op on the model's own values, and with gradients on drawn values in float64."""
    proof = Proof()
    if any(traced.region(node, pattern.given, pattern.modules) is None for node in pattern.outputs):
        proof.fault = "it depends on more than the op is given"
        return proof
    given = tuple(dict.fromkeys(pattern.given))  # one node may be given twice

    def ours(*values: Any) -> tuple[Any, ...]:
        known = dict(zip(given, values, strict=True))
        found = pattern.ours(*(known[node] for node in pattern.given))
        return tuple(found) if pattern.more else (found,)

    def theirs(*values: Any) -> tuple[Any, ...]:
        known = dict(zip(given, values, strict=True))
        return tuple(traced.evaluate(node, known) for node in pattern.outputs)

    proof.add(tuple(traced.values[n] for n in pattern.outputs), lambda: ours(*(traced.values[n] for n in given)))
    random = Random(0)
    draw: Sequence[Tensor] = ()
    for _ in range(DRAWS):
        if proof.fault:
            return proof
        known = dict(zip(pattern.given, pattern.draw(random), strict=True))
        draw = [known[node] for node in given]
        proof.add_other(lambda: theirs(*draw), lambda: ours(*draw))  # noqa: B023 - called at once
    if not proof.fault:
        proof.add_gradients(theirs, ours, draw)
    return proof


def is_bare(module: nn.Module) -> bool:
    """Whether calling a module runs the forward of its class and nothing else."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return not hooks and "forward" not in vars(module)


ADDS: set[Any] = {operator.add, torch.add, "add"}
RELUS: set[Any] = {F.relu, torch.relu, "relu"}
VIEWS = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", torch.flatten, torch.reshape}
VIEWS |= {torch.squeeze, torch.unsqueeze, torch.unflatten}


def source_of(traced: Traced, node: fx.Node, fits: Callable[[Tensor], bool]) -> Iterator[fx.Node]:
    """A node and the nodes that it views, with the same elements in the same order, as far as they fit; last first."""
    found = []
    while (value := traced.tensor(node)) is not None:
        if fits(value):
            found.append(node)
        if node.target not in VIEWS or not node.args or not isinstance(node.args[0], fx.Node):
            break
        node = node.args[0]
    yield from reversed(found)
