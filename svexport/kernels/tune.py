"""Finds the fastest tactic on this machine's GPU: times each valid tactic once, and stores the winner.

``svexport kernels tune`` does this for shapes that users name, :func:`tune` for any call of one op.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from svexport.errors import BackendNotAvailableError, UnsupportedError
from svexport.kernels import planner
from svexport.kernels.shapes import problem
from svexport.ops import _cuda, _winners
from svexport.ops._einsum.labels import parse

__all__ = ["NAMED", "Tuned", "Tuning", "call_of", "forced", "keep", "medians", "needed", "problems_of", "tune"]

Call = Callable[[], Any]
Timer = Callable[[Mapping[str, Call]], Mapping[str, float]]

LEAST = 0.02
"""The minimum fraction of the planner's choice's time that a winner saves; less is noise between two timings."""

NAMED: dict[str, list[tuple[tuple[int, ...], bool]]] = {
    "add_bias_residual_layer_norm": [((rows, 256), back) for rows in (900, 40_000) for back in (False, True)],
    "camera_sample": [((1, 900, 1, 4, 256), False), ((1, 512, 1, 3, 256), False), ((1, 900, 13, 4, 256), False)],
    "deform_conv2d": [((1, 256, 58, 100, 9), False), ((6, 256, 58, 100, 9), False), ((1, 64, 58, 100, 9), False)],
    "einsum": [((1, 64, 64, 7500, 1, 128, 1), False), ((1, 64, 3, 19_200, 25, 1, 25), False)],
    "grid_sample": [((6, 256, 116, 200, 900), False), ((6, 256, 36, 92, 512), False)],
    "grid_sample_backward": [((6, 256, 116, 200, 900), True), ((6, 256, 36, 92, 512), True)],
    "ms_deform_attn": [((1, queries, 8, 16, 32), back) for queries in (900, 20_000) for back in (False, True)],
}
"""By op, shapes in the form that `svexport kernels list` describes, and whether to tune the gradient."""


@dataclass(frozen=True)
class Tuned:
    """The result of timing the tactics for a problem.

    Attributes:
        op: the planner's op.
        problem: all numbers of the problem.
        chosen: the tactic that the planner chooses by cost.
        winner: the fastest tactic, or ``chosen`` if that saves less than :data:`LEAST`.
        times: microseconds by tactic id.
    """

    op: str
    problem: dict[str, int]
    chosen: planner.Tactic
    winner: planner.Tactic
    times: dict[int, float]


def needed() -> planner.Gpu:
    """This machine's GPU, after loading the kernels.

    Raises:
        BackendNotAvailableError: without a GPU, or without kernels.
    """
    gpu = planner.this_gpu()
    if gpu is None:
        raise BackendNotAvailableError(
            "tactics are timed on a GPU, and torch sees no CUDA device here; `svexport kernels explain --gpu NAME` "
            "says what the planner expects on a GPU by name"
        )
    if not _cuda.load():
        raise BackendNotAvailableError(
            "there are no CUDA kernels to time: SVEXPORT_KERNELS=0 is set, or no compiler was found"
        )
    return gpu


def tune(call: Call, timer: Timer | None = None) -> Tuned:
    """Times every valid tactic for the problem of a call.

    Args:
        call: calls one svexport op once, on CUDA tensors.
        timer: returns the microseconds of calls, by name; default: :func:`medians`.

    Raises:
        UnsupportedError: if the call chooses no tactic, or several.
    """
    gpu = planner.this_gpu() or planner.GPUS["h100"]
    asked = problems_of(call)
    if len(asked) != 1:
        raise UnsupportedError(f"expected a call that chooses one tactic, got one that chooses {len(asked) or 'none'}")
    ((op, numbers),) = asked
    plan = planner.by_cost(op, gpu, **numbers)

    def by(tactic: int) -> Call:
        def run() -> Any:
            with forced(op, numbers, tactic):
                return call()

        return run

    times = {int(name): us for name, us in (timer or medians)({str(t.id): by(t.id) for t in plan.tactics}).items()}
    fastest = min(plan.tactics, key=lambda t: times[t.id])
    saves = times[fastest.id] <= (1 - LEAST) * times[plan.chosen.id]
    return Tuned(op, numbers, plan.chosen, fastest if saves else plan.chosen, times)


class Tuning(TorchDispatchMode):
    """``with Tuning(): step()``: tunes every call of svexport's ops, once per sizes and types, and stores the winners.

    Calls that choose no tactic, or several, run normally. Calls inside must not be captured in a CUDA graph.

    Attributes:
        tuned: the results, in order.
    """

    def __init__(self, timer: Timer | None = None) -> None:
        super().__init__()
        self.gpu, self.timer = needed(), timer
        self.tuned: list[Tuned] = []
        self._met: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        kinds = tree_map_only(Tensor, lambda t: (t.dtype, t.shape, t.stride(), t.data_ptr() % 16), (args, kwargs))
        if func.namespace == "svexport" and (met := f"{func.name()} {kinds}") not in self._met:
            self._met.add(met)
            with suppress(UnsupportedError):
                self.tuned.append(tune(call, self.timer))
                keep(self.gpu.name, self.tuned[-1:])
        return call()


def keep(gpu: str, tuned: Sequence[Tuned]) -> Any:
    """Writes the winners into the cache's table of a device, passes them to the kernels; returns the table's path."""
    table: dict[str, list[dict[str, Any]]] = {}
    for one in tuned:
        table.setdefault(one.op, []).append({"problem": one.problem, "tactic": one.winner.id})
    file = _winners.write(gpu, table)
    if _cuda.tried() and _cuda.load():
        _winners.tell()
    return file


def problems_of(call: Call) -> list[tuple[str, dict[str, int]]]:
    """The problems that a call chooses tactics for, each once, in order."""
    torch.ops.svexport._watch_problems(True)
    try:
        call()
    finally:
        lines = torch.ops.svexport._watch_problems(False)
    known, found = planner.problems(), []
    for line in lines:
        op, *numbers = line.split()
        one = op, dict(zip(known[op], map(int, numbers), strict=True))
        if one not in found:
            found.append(one)
    return found


@contextmanager
def forced(op: str, problem: Mapping[str, int], tactic: int) -> Iterator[None]:
    """Makes all calls of an op use a tactic."""
    gradient = "_backward" if problem.get("backward") and not op.endswith("_backward") else ""
    names = [op + gradient, *([op.replace("grid", "bilinear")] if op.startswith("grid_sample") else [])]
    for name in names:
        torch.ops.svexport._force_tactic(name, tactic)
    try:
        yield
    finally:
        for name in names:
            torch.ops.svexport._force_tactic(name, 0)


def medians(calls: Mapping[str, Call], rounds: int = 20, inner: int = 5) -> dict[str, float]:
    """Median microseconds per call: each runs as a CUDA graph of several, in turn, so that nothing favours one."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, call in calls.items():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(inner):
                call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / inner)
    return {name: statistics.median(found) for name, found in times.items()}


# ------------------------------------------------------------------------------------------------ calls of a shape


def call_of(op: str, shape: Sequence[int], dtype: str, *, backward: bool = False, device: str = "cuda") -> Call:
    """A call of an op on random contiguous tensors of a shape, with the problem that `svexport kernels explain` plans.

    Raises:
        UnsupportedError: as for :func:`svexport.kernels.shapes.problem`.
    """
    problem(op, shape, dtype, backward=backward)  # raises on an invalid shape

    def make(*sizes: int, of: torch.dtype | None = None) -> Tensor:
        return torch.randn(*sizes, device=device).to(of or getattr(torch, dtype))

    return _CALLS[op](make, shape, backward)


Make = Callable[..., Tensor]


def _norm(make: Make, shape: Sequence[int], backward: bool) -> Call:
    x, residual = make(*shape), make(*shape)
    bias, weight, norm_bias = (make(shape[-1]) for _ in range(3))
    given = x, bias, residual, weight, norm_bias, 1e-5, None
    if not backward:
        return lambda: torch.ops.svexport.add_bias_residual_layer_norm(*given)
    grads = [make(*shape), make(*shape)]
    return lambda: torch.ops.svexport.add_bias_residual_layer_norm_backward(grads, *given, [True] * 5)


def _camera(make: Make, shape: Sequence[int], backward: bool) -> Call:
    images, queries, points, levels, channels = shape
    sizes = [(116 >> level, 200 >> level) for level in range(levels)]  # of six cameras around
    features = [make(images, 6, channels, max(1, h), max(1, w)) for h, w in sizes]
    turn = torch.arange(6, device=features[0].device) * (math.tau / 6)
    cos, sin, zero = turn.cos(), turn.sin(), 0 * turn
    rows = [
        (800 * cos + 1000 * sin, 800 * sin - 1000 * cos, zero, zero),
        (464 * cos, 464 * sin, zero - 1000, zero),
        (cos, sin, zero, zero),
        (zero, zero, zero, zero + 1),
    ]
    lidar2img = torch.stack([torch.stack(row, -1) for row in rows], 1).expand(images, 6, 4, 4).contiguous()
    where = torch.rand(images, queries, 3, device=features[0].device)
    weights, offsets = make(images, queries, 6, points, levels, 1), make(1, 1, 1, 3, of=torch.float32) * 0
    box = [-51.2, -51.2, -5.0, 51.2, 51.2, 3.0]
    rest = [928, 1600], box, 1e-5, True, [0.0, 1.0], 0, [1.0] * levels
    return lambda: torch.ops.svexport.camera_sample(features, where, lidar2img, weights, offsets, *rest)


def _deform_conv2d(make: Make, shape: Sequence[int], backward: bool) -> Call:
    images, channels, height, width, taps = shape
    down = next(k for k in range(math.isqrt(taps), 0, -1) if taps % k == 0)
    kernel = down, taps // down
    padding = [kernel[0] // 2, kernel[1] // 2]
    out = [size + 2 * p - k + 1 for size, p, k in zip((height, width), padding, kernel, strict=True)]
    x, offset = make(images, channels, height, width), make(images, 2 * taps, *out)
    weight, mask = make(channels, channels, *kernel), make(images, taps, *out).sigmoid()
    given = x, offset, weight, None, mask, [1, 1], padding, [1, 1], 1, 1, 1.0
    return lambda: torch.ops.svexport.deform_conv2d(*given)


def _einsum(make: Make, shape: Sequence[int], backward: bool) -> Call:
    s, o, k, t, v, m, w = shape
    operands = [make(s, o, k, t, v), make(s, k, v, m, w)]
    labels, ranks = parse("soktv,skvmw->somtw", (5, 5))
    return lambda: torch.ops.svexport.einsum(operands, labels, ranks)


def _grid_sample(make: Make, shape: Sequence[int], backward: bool) -> Call:
    images, channels, height, width, points = shape
    image = make(images, channels, height, width)
    grid = torch.rand(images, 1, points, 2, device=image.device) * 2 - 1
    if not backward:
        return lambda: torch.ops.svexport.grid_sample(image, grid, 0, 0, False, 1.0)
    grad = make(images, channels, 1, points)
    return lambda: torch.ops.svexport.grid_sample_backward([grad], image, grid, 0, 0, False, 1.0, [True, True])


def _ms_deform_attn(make: Make, shape: Sequence[int], backward: bool) -> Call:
    images, queries, heads, samples, channels = shape
    levels = 4 if samples % 4 == 0 else 1
    sizes = torch.tensor([(116 >> level, 200 >> level) for level in range(levels)])
    counts = sizes.prod(1)
    value = make(images, int(counts.sum()), heads, channels)
    shapes, starts = sizes.to(value.device), (counts.cumsum(0) - counts).to(value.device)
    locations = torch.rand(images, queries, heads, levels, samples // levels, 2, device=value.device)
    given = value, shapes, starts, locations, make(images, queries, heads, levels, samples // levels), 1.0
    if not backward:
        return lambda: torch.ops.svexport.ms_deform_attn(*given)
    grad, needs = make(images, queries, heads * channels), [True, False, False, True, True]
    return lambda: torch.ops.svexport.ms_deform_attn_backward([grad], *given, needs)


_CALLS: dict[str, Callable[[Make, Sequence[int], bool], Call]] = {
    "add_bias_residual_layer_norm": _norm,
    "camera_sample": _camera,
    "deform_conv2d": _deform_conv2d,
    "einsum": _einsum,
    "grid_sample": _grid_sample,
    "grid_sample_backward": _grid_sample,
    "ms_deform_attn": _ms_deform_attn,
}
