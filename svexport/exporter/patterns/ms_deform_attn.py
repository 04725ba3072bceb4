"""Finds multi-scale deformable attention under any name: value split into levels, sampled, weighted and summed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from svexport.exporter.functions import deform_attn
from svexport.exporter.patterns.camera_sample import SAMPLERS
from svexport.exporter.patterns.pattern import Pattern
from svexport.exporter.patterns.traced import Traced, operand
from svexport.exporter.proof import Random
from svexport.ops._op import tracing

__all__ = ["deform_attn_of_sizes", "drawn_sizes", "find", "shapes_of"]

_TRIES = 3
"""How many nodes are tried that may be the sum."""

_DRAWN = ((3, 5), (4, 2), (2, 6), (5, 3), (1, 4), (3, 1))
"""Sizes of levels that are tried beside the model's, where they are data: of no square, in which rows are columns."""


def drawn_sizes(turn: int, levels: int) -> tuple[tuple[int, int], ...]:
    """Sizes of levels, others at every turn."""
    return tuple(_DRAWN[(i + turn) % len(_DRAWN)] for i in range(levels))


def deform_attn_of_sizes(
    value: Tensor, sizes: tuple[tuple[int, int], ...], locations: Tensor, weights: Tensor
) -> Tensor:
    """:func:`svexport.ops.ms_deform_attn` of levels whose sizes are constants."""
    return deform_attn(value, shapes_of(sizes, value.device), locations, weights)


_known: dict[tuple[tuple[tuple[int, int], ...], torch.device], Tensor] = {}


def shapes_of(sizes: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Constant sizes of levels as a tensor, which nobody writes to."""
    if tracing():
        return torch.tensor(sizes, device=device)
    if (sizes, device) not in _known:
        _known[sizes, device] = torch.tensor(sizes, device=device)
    return _known[sizes, device]


@dataclass(frozen=True)
class _Sampled:
    """What seems to be attended to.

    Attributes:
        value, locations, weights: nodes of the op's arguments.
        shapes: node of the sizes of levels; None where they are constants.
        sizes: what they are.
    """

    value: fx.Node
    locations: fx.Node
    weights: fx.Node
    shapes: fx.Node | None
    sizes: tuple[tuple[int, int], ...]


def find(traced: Traced) -> Iterator[Pattern]:
    """What may be a :func:`svexport.ops.ms_deform_attn`."""
    samples = [n for n in traced.graph.nodes if n.target in SAMPLERS and traced.tensor(n) is not None]
    if not samples:
        return
    tensors = [n for n in traced.graph.nodes if traced.tensor(n) is not None]
    for locations in tensors:
        value_of = traced.values[locations]
        if value_of.dim() != 6 or value_of.shape[-1] != 2 or not value_of.is_floating_point():
            continue
        levels = value_of.shape[3]
        mine = [s for s in samples if locations in traced.ancestors(operand(s, 1, "grid"))][:levels]
        if len(mine) == levels:
            yield from _patterns(traced, tensors, locations, mine)


def _patterns(
    traced: Traced, tensors: Sequence[fx.Node], locations: fx.Node, samples: Sequence[fx.Node]
) -> Iterator[Pattern]:
    n, queries, heads, levels, _, _ = traced.values[locations].shape
    sizes = tuple(tuple(traced.values[operand(s, 0, "input")].shape[-2:]) for s in samples)
    pixels = sum(h * w for h, w in sizes)
    above = frozenset.intersection(*(traced.ancestors(operand(s, 0, "input")) for s in samples))
    sized = [v for v in tensors if v in above and traced.values[v].dim() == 4]
    values = [v for v in sized if traced.values[v].shape[:3] == (n, pixels, heads)]
    shapes = [s for s in tensors if traced.values[s].shape == (levels, 2) and not traced.values[s].is_floating_point()]
    for value in values[-2:]:
        channels = heads * traced.values[value].shape[3]
        outputs = [
            o
            for o in tensors
            if traced.values[o].shape == (n, queries, channels) and set(samples) <= traced.ancestors(o)
        ]
        for output in outputs[:_TRIES]:
            weights = [
                w
                for w in tensors
                if traced.values[w].shape == traced.values[locations].shape[:5]
                and w in traced.ancestors(output)
                and not traced.ancestors(w) & {locations, *samples}
            ]
            constant = [None] if all(map(_is_constant, samples)) else []
            for weight, shape in itertools.product(weights[-2:], [*shapes[-2:], *constant]):
                given = [value, locations, weight, *([] if shape is None else [shape])]
                if traced.region(output, given) is not None:
                    yield _pattern(traced, output, _Sampled(value, locations, weight, shape, sizes))  # type: ignore[arg-type]


def _is_constant(sample: fx.Node) -> bool:
    """Whether the size of what is sampled is two numbers, and not that of some other tensor."""
    image: Any = operand(sample, 0, "input")
    if image.target not in ("view", "reshape", "unflatten", torch.reshape):
        return False
    sizes = image.args[-1] if isinstance(image.args[-1], (list, tuple)) else image.args[-2:]
    return all(type(size) is int and size > 0 for size in sizes[-2:])


def _pattern(traced: Traced, output: fx.Node, sampled: _Sampled) -> Pattern:
    given = sampled.value, sampled.locations, sampled.weights
    shapes = () if sampled.shapes is None else (sampled.shapes,)

    def ours(value: Tensor, locations: Tensor, weights: Tensor, sizes: Tensor | None = None) -> Tensor:
        if sizes is None:
            return deform_attn_of_sizes(value, sampled.sizes, locations, weights)
        return deform_attn(value, sizes, locations, weights)

    def build(graph: fx.Graph) -> fx.Node:
        value, locations, weights = given
        if not shapes:
            return graph.call_function(deform_attn_of_sizes, (value, sampled.sizes, locations, weights))
        return graph.call_function(deform_attn, (value, *shapes, locations, weights))

    turns = itertools.count()

    def draw(random: Random) -> list[Tensor]:
        value, locations, weights = (traced.values[node] for node in given)
        sizes = sampled.sizes
        turn = next(turns)
        if shapes and turn % 3 != 2:
            sizes = drawn_sizes(turn, len(sizes))
        like = value[:, :1].expand(-1, sum(h * w for h, w in sizes), -1, -1)
        places = 1.4 * random.uniform(locations) - 0.2
        drawn = [random.normal(like), places, random.normal(weights)]
        return drawn + [torch.tensor(sizes, device=value.device).to(traced.values[s].dtype) for s in shapes]

    what = "split, sample, stack, weigh, sum"
    return Pattern("ms_deform_attn", what, output, (*given, *shapes), ours, build, draw)
