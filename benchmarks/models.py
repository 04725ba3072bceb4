"""Whole models: the examples as they are, beside their copies by ``svexport.replace``.

Wall time of plain calls, launches included, on one GPU in float32: inference and a training step (forward, backward,
SGD), eager and by ``torch.compile(mode="reduce-overhead")``; and the device memory that a call takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import svexport
from benchmarks._measure import Workload
from svexport.cli._model import load_file
from svexport.exporter.arguments import leaves, rebuild

EXAMPLES = ("stgcn", "detr3d", "deformable_detr", "multicamera", "yolox_stem")
BATCHES = {"stgcn": (1, 16)}
DEVICE = "cuda"
GOAL = 1.02
"""A replaced model is slower by no more than what two timings of one model differ by."""


@cache
def pair(name: str, batch: int) -> tuple[nn.Module, nn.Module, tuple]:
    """An example, its copy, and inputs of both, on the GPU."""
    model = load_file(Path(__file__).parents[1] / "examples" / f"{name}.py").model()

    def repeated(t: Tensor) -> Tensor:
        return t.repeat(batch, *[1] * (t.dim() - 1)).to(DEVICE)

    inputs = rebuild(model.example_inputs, repeated)
    model = model.to(DEVICE)
    return model, svexport.replace(model, inputs, verbose=False), inputs


def inference(name: str, batch: int, replaced: bool, compiled: bool) -> Callable[[], Any]:
    """A forward in evaluation mode."""
    model, inputs = pair(name, batch)[replaced].eval(), pair(name, batch)[2]
    call: Any = torch.compile(model, mode="reduce-overhead") if compiled else model

    def run() -> Any:
        with torch.no_grad():
            return call(*inputs)

    return run


def training(name: str, batch: int, replaced: bool, compiled: bool) -> Callable[[], Tensor]:
    """A training step, of steps too small to change what is computed; returns the loss."""
    model, inputs = pair(name, batch)[replaced].train(), pair(name, batch)[2]
    call: Any = torch.compile(model, mode="reduce-overhead") if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def run() -> Tensor:
        optimizer.zero_grad()
        outputs = [leaf for _, leaf in leaves(call(*inputs))]
        loss = torch.stack([output.square().mean() for output in outputs]).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return run


def later(make: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
    """A function that is made when it is first called: models that are not asked for are never loaded."""
    made = cache(make)
    return lambda: made()()


def workloads() -> Iterator[Workload]:
    for name in EXAMPLES:
        for batch in BATCHES.get(name, (1,)):
            for step in (inference, training):
                for how in ("eager", "compiled"):
                    if how == "compiled" and batch > 1:
                        continue
                    make = partial(step, name, batch, compiled=how == "compiled")
                    yield Workload(
                        f"{name} batch {batch} {step.__name__} {how}",
                        later(partial(make, True)),
                        {"original": later(partial(make, False))},
                        goal=GOAL,
                        whole=True,
                    )
