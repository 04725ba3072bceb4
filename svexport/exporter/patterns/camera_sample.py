"""Finds projection into cameras, sampling of every level and the weighted sum, however they are written.

The author's projection is not parsed but run, with chosen cameras and points: its results give the size of the image,
the range of the points, the least depth and the bounds of u and v. The pattern is then proven.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from svexport import ops
from svexport.exporter.patterns.pattern import Pattern, source_of
from svexport.exporter.patterns.traced import Traced, operand
from svexport.exporter.proof import Random

__all__ = ["CROP", "SAMPLERS", "find", "looking"]

SAMPLERS: set[Any] = {F.grid_sample, torch.grid_sampler, torch.grid_sampler_2d}
_ACTIVATIONS: dict[Any, str] = {
    **dict.fromkeys((torch.sigmoid, F.sigmoid, "sigmoid"), "sigmoid"),
    **dict.fromkeys((torch.softmax, F.softmax, "softmax"), "softmax"),
}
_MODULES: dict[type, str] = {nn.Sigmoid: "sigmoid", nn.Softmax: "softmax"}
_TRANSPOSES = {"permute", "transpose", "swapaxes", torch.permute, torch.transpose}
_TRIES = 6
"""Most nodes that are tried as the final sum."""

CROP = 12
"""Features are cropped to this many pixels each way when drawn values are tried."""


@dataclass(frozen=True)
class _Sampling:
    """The nodes of a sampling, and its options.

    Attributes:
        samples: nodes that sample, one per level.
        features: nodes of the levels, ``(B, cams, C, H, W)`` each.
        grid: the grid of the first sample.
        points, cameras: nodes, ``(B, Q, 3)`` and ``(B, cams, 4, 4)``.
        options: the op's options, as the projection has them.
    """

    samples: tuple[fx.Node, ...]
    features: tuple[fx.Node, ...]
    points: fx.Node
    cameras: fx.Node
    options: dict[str, Any]


def find(traced: Traced) -> Iterator[Pattern]:
    """Parts that may be :func:`svexport.ops.camera_sample`, the likeliest first."""
    for sampling in _samplings(traced):
        for output, transposed in itertools.islice(_outputs(traced, sampling), _TRIES):
            for weights, order, activation in _weights(traced, sampling, output):
                yield _pattern(traced, sampling, output, transposed, weights, order, activation)


def _samplings(traced: Traced) -> Iterator[_Sampling]:
    found: dict[tuple[int, ...], list[tuple[fx.Node, fx.Node, fx.Node]]] = {}
    for node in traced.graph.nodes:
        if node.target not in SAMPLERS:
            continue
        image, grid = operand(node, 0, "input"), operand(node, 1, "grid")
        size = traced.tensor(image).shape if traced.tensor(image) is not None else ()  # type: ignore[union-attr]
        if len(size) != 4 or traced.tensor(grid) is None:
            continue
        sources = source_of(traced, image, lambda t: t.dim() == 5 and t.shape[2:] == size[1:])  # noqa: B023
        if (feature := next(sources, None)) is not None:
            key = *traced.values[feature].shape[:3], traced.values[grid].numel()
            found.setdefault(key, []).append((node, feature, grid))
    for (batch, cams, *_), group in found.items():
        samples, features, grids = zip(*group, strict=True)
        common = frozenset.intersection(*map(traced.ancestors, grids))
        nodes = [n for n in traced.graph.nodes if n in common and traced.tensor(n) is not None]
        cameras = [n for n in nodes if traced.values[n].shape == (batch, cams, 4, 4)]
        points = [n for n in nodes if traced.values[n].dim() == 3 and traced.values[n].shape[::2] == (batch, 3)]
        for camera, point in itertools.product(cameras[:2], points[:4]):
            if traced.region(grids[0], (camera, point)) is None:
                continue
            try:
                options = _projection(traced, grids[0], point, camera)
            except Exception:  # noqa: BLE001 - code that is no projection may fail on such matrices
                continue
            if options is not None:
                yield _Sampling(samples, features, point, camera, options)


def _projection(traced: Traced, grid: fx.Node, points: fx.Node, cameras: fx.Node) -> dict[str, Any] | None:
    """The op's options, read from the projection's results for chosen points and cameras; None if there is none."""
    like_points, like_cameras = traced.values[points], traced.values[cameras]

    def seen(corner: float, *rows: Sequence[float]) -> tuple[float, float]:
        """u and v of points at a corner of the range, for a matrix with these rows; NaN if points differ."""
        matrix = torch.zeros(4, 4, dtype=torch.float64)
        matrix[3, 3] = 1
        for i, row in enumerate(rows):
            matrix[i] = torch.tensor(row, dtype=torch.float64)
        place = torch.full(like_points.shape, corner, dtype=torch.float64, device=like_points.device)
        given = {points: place, cameras: matrix.to(like_cameras.device).expand(like_cameras.shape).clone()}
        uv = (traced.evaluate(grid, given).reshape(-1, 2) + 1) / 2
        first = uv[0]
        return tuple(first.tolist()) if bool((uv - first).abs().max() < 1e-9) else (math.nan, math.nan)

    def constant(x: float, z: float = 1.0) -> tuple[list[float], list[float], list[float]]:
        return [0, 0, 0, x], [0, 0, 0, x], [0, 0, 0, z]

    with torch.no_grad():
        width, height = (1 / t if t > 0 else math.nan for t in seen(0.0, *constant(1.0)))
        if not (1 <= width < 1e6 and 1 <= height < 1e6) or max(abs(s - round(s)) for s in (width, height)) > 1e-6:
            return None
        size = round(height), round(width)
        step = 1e-3 * size[1]
        bounds = []
        for corner in (0.0, 1.0):
            for axis in range(3):
                row = [0.0, 0.0, 0.0, size[1] / 2]
                row[axis] = step
                u, _ = seen(corner, row, [0, 0, 0, size[0] / 2], [0, 0, 0, 1])
                bounds.append((u - 0.5) * size[1] / step)
        _, least = seen(0.0, *constant(1e-8 * size[0], 0.0))
        depth_eps = 1e-8 / least if least > 0 else math.nan
        largest, smallest = (seen(0.0, *constant(x))[0] for x in (1e9, -1e9))
    if not all(map(math.isfinite, (*bounds, depth_eps, largest, smallest))):
        return None
    clamp = (_rounded(smallest), _rounded(largest)) if largest < 1e4 else None
    return {
        "image_size": size,
        "pc_range": tuple(map(_rounded, bounds)),
        "depth_eps": _rounded(depth_eps, 6),
        "uv_clamp": clamp,
    }


def _rounded(x: float, digits: int = 9) -> float:
    return float(f"{x:.{digits}g}") if abs(x) > 1e-9 else 0.0


def _outputs(traced: Traced, sampling: _Sampling) -> Iterator[tuple[fx.Node, bool]]:
    """Nodes that may be the weighted sum, and whether channels come before queries."""
    batch, queries, _ = traced.values[sampling.points].shape
    channels = traced.values[sampling.features[0]].shape[2]
    samples = set(sampling.samples)
    for node in traced.graph.nodes:
        value = traced.tensor(node)
        if value is None or not samples <= traced.ancestors(node):
            continue
        if value.shape == (batch, channels, queries):
            user = next(iter(node.users), None)
            if len(node.users) == 1 and user is not None and user.target in _TRANSPOSES:
                yield user, False
            yield node, True
        if value.shape == (batch, queries, channels):
            yield node, False


def _weights(traced: Traced, sampling: _Sampling, output: fx.Node) -> Iterator[tuple[fx.Node, tuple[int, ...], str]]:
    """The node of the raw weights, ``(B, Q, n)``; its order of cameras, points and levels; and the activation."""
    batch, queries, _ = traced.values[sampling.points].shape
    cams, levels = traced.values[sampling.cameras].shape[1], len(sampling.features)
    samples = set(sampling.samples)
    for node in traced.graph.nodes:
        called = traced.called(node)
        activation = _ACTIVATIONS.get(node.target) if called is None else _MODULES.get(type(called))
        if activation is None or node not in traced.ancestors(output) or samples & traced.ancestors(node):
            continue
        before = operand(node, 0, "input")
        value = traced.tensor(before)
        if value is None or value.numel() % (batch * queries * cams * levels):
            continue
        count = value.numel() // (batch * queries)
        fitting = source_of(traced, before, lambda t: t.shape == (batch, queries, count))  # noqa: B023
        if (source := next(fitting, None)) is None:
            continue
        for order in itertools.permutations(range(3)):
            yield source, order, activation


def _pattern(
    traced: Traced,
    sampling: _Sampling,
    output: fx.Node,
    transposed: bool,
    weights: fx.Node,
    order: tuple[int, ...],
    activation: str,
) -> Pattern:
    cams, levels = traced.values[sampling.cameras].shape[1], len(sampling.features)
    sizes = cams, traced.values[weights].shape[2] // (cams * levels), levels
    written = tuple(sizes[i] for i in order)
    back = tuple(2 + order.index(i) for i in range(3))
    options = {**sampling.options, "activation": activation}

    def ours(points: Tensor, cameras: Tensor, scores: Tensor, *features: Tensor) -> Tensor:
        scores = scores.unflatten(-1, written).permute(0, 1, *back)
        sampled = ops.camera_sample(list(features), points, cameras, scores, **options)
        return sampled.transpose(1, 2) if transposed else sampled

    def build(graph: fx.Graph) -> fx.Node:
        scores = graph.call_method("unflatten", (weights, -1, written))
        if back != (2, 3, 4):
            scores = graph.call_method("permute", (scores, 0, 1, *back))
        given = list(sampling.features), sampling.points, sampling.cameras, scores
        sampled = graph.call_function(ops.camera_sample, given, options)
        return graph.call_method("transpose", (sampled, 1, 2)) if transposed else sampled

    turns = itertools.count()

    def draw(random: Random) -> list[Tensor]:
        given = [traced.values[node].detach() for node in (sampling.points, sampling.cameras, weights)]
        points = random.uniform(given[0])
        turn = next(turns)
        if turn % 2:
            cameras = given[1].double()
            cameras = cameras + 0.03 * cameras.abs() * random.normal(cameras)
            cameras[:, -1] = _behind(options).to(cameras)
        else:
            cameras = looking(given[1], options, random)
        features = [random.normal(traced.values[node][..., :CROP, :CROP]) for node in sampling.features]
        return [points, cameras, random.normal(given[2], scale=2.0), *features]

    given = sampling.points, sampling.cameras, weights, *sampling.features
    what = "project, mask, sample, weigh, sum"
    return Pattern("camera_sample", what, output, given, ours, build, draw)


def _behind(options: dict[str, Any]) -> Tensor:
    """A camera that looks away, and projects the points behind it into the image nevertheless."""
    (height, width), least = options["image_size"], options["depth_eps"]
    matrix = torch.zeros(4, 4, dtype=torch.float64)
    matrix[:, 3] = torch.tensor((width / 3 * least, height / 3 * least, -1.0, 1.0))
    return matrix


def looking(like: Tensor, options: dict[str, Any], random: Random) -> Tensor:
    """Cameras that have most of the range in their image, at many depths."""
    low, high = (torch.tensor(options["pc_range"][i : i + 3], dtype=torch.float64) for i in (0, 3))
    reach = (high - low).abs().max().clamp(min=1e-3)
    matrix = torch.zeros(like.shape, dtype=torch.float64)
    draw = random.uniform(like[..., :3, :]).cpu()
    depth = torch.cat(((draw[..., 2, :3] - 0.5) * 4 / reach, 3 + 9 * draw[..., 2, 3:]), -1)
    for row, size in ((0, options["image_size"][1]), (1, options["image_size"][0])):
        slope = torch.cat(((draw[..., row, :3] - 0.5) * 4 / reach, torch.zeros_like(draw[..., row, 3:])), -1)
        matrix[..., row, :] = size * (depth * (0.2 + 0.6 * draw[..., row, 3:]) + slope)
    matrix[..., 2, :] = depth
    matrix[..., 3, 3] = 1
    return matrix.to(like.device)
