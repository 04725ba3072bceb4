"""Finds four concatenated strided slices of an image: the Focus stem of YOLOX and YOLOv5."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from svexport import ops
from svexport.exporter.patterns.pattern import Pattern
from svexport.exporter.patterns.traced import Traced, operand
from svexport.exporter.proof import Random

__all__ = ["CATS", "find"]

CATS: set[Any] = {torch.cat, torch.concat, torch.concatenate}
_ORDER = [(0, 0), (1, 0), (0, 1), (1, 1)]


def find(traced: Traced) -> Iterator[Pattern]:
    """Candidates for a :func:`svexport.ops.space_to_depth`."""
    for node in traced.graph.nodes:
        if node.target not in CATS or operand(node, 1, "dim") not in (1, -3):
            continue
        slices = operand(node, 0, "tensors")
        if not isinstance(slices, (list, tuple)) or [_start(traced, s) for s in slices] != _ORDER:
            continue
        images = {s.args[0] for s in slices}
        if len(images) == 1:
            yield _pattern(traced, node, images.pop())


def _start(traced: Traced, node: Any) -> tuple[int, int] | None:
    """Row and column that every other one of an image is taken from."""
    if not isinstance(node, fx.Node) or node.target is not operator.getitem:
        return None
    image, index = node.args
    value = traced.tensor(image)
    if value is None or value.dim() != 4 or not isinstance(index, tuple):
        return None
    if index.count(...) == 1:
        at = index.index(...)
        index = (*index[:at], *[slice(None)] * (5 - len(index)), *index[at + 1 :])
    if len(index) != 4 or any(part != slice(None) for part in index[:2]):
        return None
    starts = {0: 0, 1: 1, None: 0}
    known = all(isinstance(p, slice) and p.stop is None and p.step == 2 and p.start in starts for p in index[2:])
    return (starts[index[2].start], starts[index[3].start]) if known else None  # type: ignore[union-attr]


def _pattern(traced: Traced, node: fx.Node, image: fx.Node) -> Pattern:
    def build(graph: fx.Graph) -> fx.Node:
        return graph.call_function(ops.space_to_depth, (image,))

    def draw(random: Random) -> list[Tensor]:
        return [random.normal(traced.values[image])]

    what = "strided slices and cat"
    return Pattern("space_to_depth", what, node, (image,), ops.space_to_depth, build, draw)
