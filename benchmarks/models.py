"""Whole models: the examples and others' (:mod:`benchmarks._pypi`), beside their copies by ``svexport.replace``.

It is called for each cell. Wall time of plain calls, launches included, on one GPU, in float32 and under autocast to
half: inference and a training step (forward, backward, SGD), eager and by ``torch.compile(mode="reduce-overhead")``;
and the device memory that a call takes. All of it does not fit one sitting: ``python -m benchmarks models --resume``
goes on where the last one ended. Models whose package is not installed are left out, and cells that the GPU has no
room for.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import svexport
from benchmarks._measure import Workload, noise
from benchmarks._pypi import MODELS, like_trained
from svexport.cli._model import load_file
from svexport.tracing.arguments import leaves, rebuild

EXAMPLES = ("detr3d", "deformable_detr", "stgcn", "multicamera", "yolox_stem")
COMPILED = (*EXAMPLES, "hf_rt_detr_v2", "hf_swin", "stgcn_kinetics")
BATCHES = (1, 8, 32)
MORE_BATCHES = {"stgcn": (16,)}
DEVICE = "cuda"
GOAL = 1.02
"""A replaced model takes no more than 2 % more time, beyond what two timings of the original differ by, or memory."""


class Cell(NamedTuple):
    """What is timed, but for which of the two models.

    Attributes:
        half: whether under autocast.
    """

    name: str
    batch: int
    half: bool
    compiled: bool


def example(name: str) -> tuple[nn.Module, tuple]:
    model = load_file(Path(__file__).parents[1] / "examples" / f"{name}.py").model()
    return model, model.example_inputs


def others(name: str) -> tuple[nn.Module, tuple]:
    torch.manual_seed(0)
    model, inputs = MODELS[name].build(False)
    like_trained(model)
    return model.eval(), inputs


@contextmanager
def in_turn() -> Iterator[None]:
    """Alone among processes that prepare side by side (``--apart``): ``replace`` chooses by what it times."""
    with Path(tempfile.gettempdir(), "svexport-benchmark.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@lru_cache(maxsize=1)  # of large models no two have to fit
def pair(name: str, batch: int, half: bool) -> tuple[nn.Module, nn.Module, tuple]:
    """A model, its copy, made under autocast where it is to run there, and inputs of both, on the GPU."""
    model, one = example(name) if name in EXAMPLES else others(name)

    def repeated(t: Tensor) -> Tensor:
        return t.repeat(batch, *[1] * (t.dim() - 1)).to(DEVICE)

    inputs = rebuild(one, repeated)
    model = model.to(DEVICE)
    with in_turn(), torch.autocast(DEVICE, enabled=half):
        return model, svexport.replace(model, inputs, verbose=False), inputs


def inference(cell: Cell, replaced: bool) -> Callable[[], Any]:
    """A forward in evaluation mode."""
    *models, inputs = pair(cell.name, cell.batch, cell.half)
    model = models[replaced].eval()
    call: Any = torch.compile(model, mode="reduce-overhead") if cell.compiled else model

    def run() -> Any:
        with torch.no_grad(), torch.autocast(DEVICE, enabled=cell.half):
            return call(*inputs)

    return run


def training(cell: Cell, replaced: bool) -> Callable[[], Tensor]:
    """A training step, of steps too small to change what is computed; returns the loss."""
    *models, inputs = pair(cell.name, cell.batch, cell.half)
    model = models[replaced].train()
    call: Any = torch.compile(model, mode="reduce-overhead") if cell.compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def run() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(DEVICE, enabled=cell.half):
            outputs = [leaf for _, leaf in leaves(call(*inputs))]
        loss = torch.stack([output.float().square().mean() for output in outputs]).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return run


def later(make: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
    """A function that is made when it is first called: models that are not asked for are never loaded."""
    made: list[Callable[[], Any]] = []

    def call() -> Any:
        if not made:
            made.append(make())
        return made[0]()

    return call


def installed() -> list[str]:
    """The models whose package there is."""
    found = list(EXAMPLES)
    for name, model in MODELS.items():
        if importlib.util.find_spec(model.package):
            found.append(name)
        else:
            print(f"{name}: left out: {model.package} is not installed", file=sys.stderr)
    return found


def workloads() -> Iterator[Workload]:
    names, halves = installed(), (False, True)
    cells = [Cell(n, b, half, False) for n in names for b in (1, *MORE_BATCHES.get(n, ())) for half in halves]
    cells += [Cell(name, 1, False, True) for name in COMPILED if name in names]
    cells += [Cell(name, batch, half, False) for batch in BATCHES[1:] for name in names for half in halves]
    for cell in cells:
        for step in (inference, training):
            half, how = ("half" if cell.half else "float32"), ("compiled" if cell.compiled else "eager")
            yield Workload(
                f"{cell.name} batch {cell.batch} {half} {step.__name__} {how}",
                later(partial(step, cell, True)),
                {"original": later(partial(step, cell, False))},
                goal=GOAL,
                memory_goal=GOAL,
                whole=True,
            )


def table(rows: Iterable[dict]) -> Iterator[str]:
    """Lines of Markdown: a model and batch size each, original and replaced in ms, and their ratio.

    Ratios are bold that miss the goal beyond what two timings of the original differ by, memory's too.
    """
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        name, _, rest = row["workload"].partition(" batch ")
        batch, half, step, how = rest.split()
        column = f"{half} {step}" if how == "eager" else f"{step} {how}"
        cells.setdefault((name, batch), {})[column] = _entry(row)
    columns = [f"{half} {step}" for half in ("float32", "half") for step in ("inference", "training")]
    columns += [f"{step} compiled" for step in ("inference", "training")]
    yield f"| model | batch | {' | '.join(columns)} |"
    yield f"|---|---|{'---|' * len(columns)}"
    names = list(dict.fromkeys((*EXAMPLES, *MODELS)))
    for (name, batch), cell in sorted(cells.items(), key=lambda item: (names.index(item[0][0]), int(item[0][1]))):
        yield f"| {name} | {batch} | {' | '.join(cell.get(column, '') for column in columns)} |"


def _entry(row: dict) -> str:
    ours, original = (row["times"][name]["median"] / 1e3 for name in ("ours", "original"))
    memory = row["peak_bytes"]["ours"] / max(row["peak_bytes"]["original"], 1)
    ratio, missed = f"{row['ratio']:.2f}", row["ratio"] > GOAL * noise(row)
    found = f"{original:.3g} / {ours:.3g}, {f'**{ratio}**' if missed else ratio}"
    return f"{found}, memory **{memory:.2f}**" if memory > GOAL else found


if __name__ == "__main__":
    print(*table(json.loads(Path(sys.argv[1]).read_text())["rows"]), sep="\n")
