"""``svexport.ops.einsum`` beside ``torch.einsum``: values, and values with gradients.

The four equations of skeleton and attention networks at their sizes; with a smaller batch on a CPU, where
``python -m benchmarks.einsum`` runs them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

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


GPU_BATCH = 64  # of the first three
GOALS = {("nctw,cd->ndtw", forward, torch.float32): 232 / 365}


def workloads() -> Iterator[Workload]:
    for equation, (first, second) in WORKLOADS.items():
        if equation.startswith("n"):
            first = (GPU_BATCH, *first[1:])
        for dtype, mode in product((torch.float32, torch.float16), (forward, backward)):
            operands = [torch.randn(shape, device="cuda", dtype=dtype) for shape in (first, second)]
            output = math.prod(torch.einsum(equation, *operands).shape)
            sides = {f: mode(f, equation, operands) for f in (einsum, torch.einsum)}
            elements = output + sum(x.numel() for x in operands)
            yield Workload(
                f"einsum {mode.__name__} {equation} {'x'.join(map(str, first))} {str(dtype).removeprefix('torch.')}",
                sides[einsum],
                {"torch.einsum": sides[torch.einsum]},
                bytes=dtype.itemsize * elements * (1 if mode is forward else 2),
                goal=GOALS.get((equation, mode, dtype), 1.0),
            )


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
