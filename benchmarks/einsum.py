"""``svexport.ops.einsum`` beside ``torch.einsum``: values, and values with gradients.

The four equations of skeleton and attention networks at their sizes; with a smaller batch on a CPU, where
``python -m benchmarks.einsum`` runs them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from random import Random

import torch
from torch import Tensor

from benchmarks import _random
from benchmarks._measure import Workload, interleaved, write
from svexport.ops.einsum import einsum

WORKLOADS = {
    "nctw,cd->ndtw": ((4, 64, 300, 25), (64, 128)),
    "nkctv,kvw->nctw": ((4, 3, 64, 300, 25), (3, 25, 25)),
    "nkctv,kcvw->nctw": ((4, 3, 64, 300, 25), (3, 64, 25, 25)),
    "bhnm,bdhm->bdhn": ((2, 8, 512, 512), (2, 32, 8, 512)),
}


def forward(function: Callable[..., Tensor], equation: str, operands: list[Tensor]) -> Callable[[], object]:
    return lambda: function(equation, *operands)


def backward(function: Callable[..., Tensor], equation: str, operands: list[Tensor]) -> Callable[[], object]:
    leaves = [x.clone().requires_grad_() for x in operands]
    gradient = torch.randn_like(function(equation, *operands), memory_format=torch.contiguous_format)
    return lambda: torch.autograd.grad(function(equation, *leaves), leaves, gradient)


def workload(
    name: str,
    mode: Callable[..., Callable[[], object]],
    equation: str,
    sizes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    goal: float | None = None,
) -> Workload:
    """Of what ``mode`` makes of an equation on random operands; ``sizes``: of these."""
    operands = [torch.randn(shape, device="cuda", dtype=dtype) for shape in sizes]
    traffic = sum(x.nbytes for x in (*operands, torch.einsum(equation, *operands)))
    return Workload(
        f"einsum {name} {str(dtype).removeprefix('torch.')}",
        mode(einsum, equation, operands),
        {"torch.einsum": mode(torch.einsum, equation, operands)},
        bytes=traffic * (2 if mode is backward else 1),
        goal=goal,
    )


GPU_BATCH = 64  # of the first three
GOALS = {("nctw,cd->ndtw", forward, torch.float32): 232 / 365}


def workloads() -> Iterator[Workload]:
    for equation, (first, second) in WORKLOADS.items():
        if equation.startswith("n"):
            first = (GPU_BATCH, *first[1:])
        for dtype, mode in product((torch.float32, torch.float16), (forward, backward)):
            name = f"{mode.__name__} {equation} {'x'.join(map(str, first))}"
            goal = GOALS.get((equation, mode, dtype), 1.0)
            yield workload(name, mode, equation, (first, second), dtype, goal)


def gradient(
    function: Callable[..., Tensor], equation: str, operands: list[Tensor], index: int
) -> Callable[[], object]:
    """That of one operand, the forward not included."""
    leaves = [x.clone().requires_grad_(i == index) for i, x in enumerate(operands)]
    stream = torch.cuda.Stream()  # on which autograd runs the backward too: a graph cannot capture the default one
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        output = function(equation, *leaves)
        grad = torch.randn_like(output, memory_format=torch.contiguous_format)
    return lambda: torch.autograd.grad(output, leaves[index], grad, retain_graph=True)


SWEPT = {
    "forward": forward,
    "gradient of the first": partial(gradient, index=0),
    "gradient of the second": partial(gradient, index=1),
    "backward": backward,
}
FEATURES = [  # N, C, T, V
    (1, 64, 300, 25),
    (1, 128, 150, 25),
    (1, 256, 75, 25),
    (1, 32, 75, 17),
    (2, 64, 300, 17),
    (2, 256, 80, 18),
    (4, 63, 151, 17),
    (4, 64, 300, 25),
    (8, 32, 100, 18),
    (8, 128, 75, 20),
    (16, 96, 97, 25),
    (16, 256, 75, 25),
    (32, 48, 200, 22),
    (32, 64, 150, 18),
    (64, 63, 151, 17),
    (64, 128, 75, 25),
    (64, 64, 300, 25),
]
ATTENTION = [  # B, H, N, D
    (1, 4, 75, 32),
    (1, 8, 300, 64),
    (2, 8, 512, 32),
    (4, 4, 151, 63),
    (8, 3, 75, 128),
    (16, 8, 25, 64),
    (16, 8, 300, 32),
    (64, 4, 75, 256),
    (64, 8, 25, 32),
    (64, 8, 150, 32),
]


def swept(mode: str, equation: str, sizes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> Workload:
    """Of a mode of ``SWEPT``, which the name begins with."""
    name = f"{mode} {equation} {' '.join('x'.join(map(str, shape)) for shape in sizes)}"
    return workload(name, SWEPT[mode], equation, sizes, dtype)


def sweep() -> Iterator[Workload]:
    shapes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    for n, c, t, v in FEATURES:
        shapes.append(("nkctv,kvw->nctw", (n, 3, c, t, v), (3, v, v)))
        shapes.append(("nkctv,kcvw->nctw", (n, 3, c, t, v), (3, c, v, v)))
        shapes.append(("nctw,cd->ndtw", (n, c, t, v), (c, c if c > 128 else 2 * c)))
    shapes += [("bhnm,bdhm->bdhn", (b, h, n, n), (b, d, h, n)) for b, h, n, d in ATTENTION]
    for (equation, *sizes), dtype, mode in product(shapes, (torch.float32, torch.float16, torch.bfloat16), SWEPT):
        yield swept(mode, equation, sizes, dtype)


def at_random(r: Random) -> Workload:
    equation = r.choice(["nkctv,kvw->nctw", "nkctv,kcvw->nctw", "nctw,cd->ndtw", "bhnm,bdhm->bdhn"])
    if equation.startswith("b"):
        b, h, n, d = _random.drawn(
            lambda: (
                2 ** r.randint(0, 5),
                2 ** r.randint(0, 3),
                _random.count(r, 8, 600),
                r.choice([16, 32, 32, 64, 128]),
            ),
            lambda s: s[0] * s[1] * s[2] * max(s[2:]) < _random.LARGEST,
        )
        sizes: tuple[tuple[int, ...], ...] = (b, h, n, n), (b, d, h, n)
    else:
        k = r.choice([1, 2, 3, 3, 8])
        n, c, t, v = _random.drawn(
            lambda: (
                r.choice([1, 1, 2, 4, 8, 16, 32, 64]),
                _random.size(r, 3, 300),
                r.choice([_random.count(r, 8, 300), 75, 150, 300]),
                r.choice([17, 18, 20, 22, 25, 25, 27, 42, 50]),
            ),
            lambda s: 3 * math.prod(s) < 2 * _random.LARGEST,
        )
        sizes = {
            "nkctv,kvw->nctw": ((n, k, c, t, v), (k, v, v)),
            "nkctv,kcvw->nctw": ((n, k, c, t, v), (k, c, v, v)),
            "nctw,cd->ndtw": ((n, c, t, v), (c, _random.size(r, 3, 512))),
        }[equation]
    return swept(r.choice(list(SWEPT)), equation, sizes, _random.dtype(r))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1, help="one, so that no other process is waited for")
    parser.add_argument("--seconds", type=float, default=3.0, help="per equation and side")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    rows = []
    for equation, shapes in WORKLOADS.items():
        operands = [torch.randn(shape) for shape in shapes]
        for mode in (forward, backward):
            timings = interleaved(
                {name: mode(f, equation, operands) for name, f in (("torch", torch.einsum), ("svexport", einsum))},
                seconds=options.seconds,
            )
            base = timings["torch"]
            for name, timing in timings.items():
                ratios = {f"{key}_ratio": timing[key] / base[key] for key in ("median", "min")}
                row = {"equation": equation, "shapes": shapes, "mode": mode.__name__, "name": name, **timing, **ratios}
                rows.append(row)
                print(
                    f"{equation:>17} {mode.__name__:>9} {name:<9} {timing['median'] * 1e3:8.2f} ms"
                    f"  {ratios['median_ratio']:.2f}x median  {ratios['min_ratio']:.2f}x min"
                )
    print(write("einsum-cpu", rows))


if __name__ == "__main__":
    main()
