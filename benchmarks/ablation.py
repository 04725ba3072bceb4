"""Which tactics earn their place: every valid one of every planned op, forced and timed, and what is lost without it.

``python -m benchmarks.ablation time FILE`` times the named workloads, what the example models ask for, the sweeps and
random shapes, as far as ``--seconds`` go, and appends a row of JSON for each; started again, it goes on.
``python -m benchmarks.ablation report FILE`` reads them: for every tactic, and every constant of one, how much slower
the fastest of the others is. One stays if without it a named workload or an example loses 10 %, or 2 % of the other
shapes lose 10 %.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from benchmarks._measure import Workload, captured, queued_times
from svexport.kernels import planner
from svexport.kernels.tune import forced, problems_of
from svexport.ops import _cuda
from svexport.tracing.swapped import swapped

SHARES = {
    "grid_sample": 0.36,
    "einsum": 0.2,
    "add_bias_residual_layer_norm": 0.14,
    "bilinear_sample": 0.1,
    "ms_deform_attn": 0.08,
    "camera_sample": 0.06,
    "deform_conv2d": 0.06,
}
"""Modules of planned ops, and what each gets of the time that the named workloads leave."""

NAMED = (*SHARES, "int8_maps")
MAKERS = ("workload", "swept", "forward", "backward")
"""Functions of the modules that make a workload of a sweep."""

TORCHS = {"F.grid_sample", "F.grid_sample and mask", "torch.einsum", "F.layer_norm + adds", "torchvision"}
"""Peers that are torch's own way; compositions that nobody would run are not."""

REPLAYS = 20
SLOW = 8
"""Times the fastest, from which on a tactic is not timed again."""

LOSS, SHARE = 0.1, 0.02
"""Of time, and of the shapes that are neither named nor of an example: what a tactic that stays saves."""


class Case(NamedTuple):
    """Something to time: where it is from, which one of that, and how it is made."""

    module: str
    family: str  # named, example, sweep, random
    at: int
    make: Callable[[], Workload]

    @property
    def key(self) -> str:
        return f"{self.module} {self.family} {self.at}"


# ------------------------------------------------------------------------------------------------------ what is timed


def lazily(module: ModuleType, family: str) -> list[Callable[[], Workload]]:
    """The workloads of a sweep, none of them made yet."""
    originals = {name: getattr(module, name) for name in MAKERS if hasattr(module, name)}
    with swapped(module, **{name: partial(partial, function) for name, function in originals.items()}):
        return list(getattr(module, family)())


def named(name: str) -> Iterator[Case]:
    """Of a module. An einsum with its gradients is one product at a time: a choice is made for each."""
    module = importlib.import_module(f"benchmarks.{name}")
    cases: Iterator[Callable[[], Workload]] = (partial(lambda w: w, workload) for workload in module.workloads())
    if name == "einsum":
        shapes = ((e, ((module.GPU_BATCH, *x[1:]) if e[0] == "n" else x, y)) for e, (x, y) in module.WORKLOADS.items())
        kinds = itertools.product(list(module.SWEPT)[:3], shapes, (torch.float32, torch.float16))
        cases = (partial(module.swept, mode, equation, sizes, dtype) for mode, (equation, sizes), dtype in kinds)
    for index, make in enumerate(cases):
        yield Case(name, "named", index, make)


def others(name: str, seed: int) -> Iterator[Case]:
    """Of a module: shapes of its sweep and random ones in turn, all of them in an order that the seed says."""
    module = importlib.import_module(f"benchmarks.{name}")
    swept = list(enumerate(lazily(module, "sweep")))
    Random(seed).shuffle(swept)
    for turn in itertools.count():
        if turn < len(swept):
            index, make = swept[turn]
            yield Case(name, "sweep", index, make)
        yield Case(name, "random", turn, partial(module.at_random, Random(f"{seed} {name} {turn}")))


class Calls(TorchDispatchMode):
    """Keeps the calls of svexport's ops, each sizes and types once, with copies of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "svexport":
            key = f"{func.name().removeprefix('svexport::')} {tree_map_only(Tensor, _kind, args)}"
            if key not in self.found:
                self.found[key] = func, tree_map_only(Tensor, lambda t: t.detach().clone(), args)
        return func(*args, **(kwargs or {}))


def _kind(t: Tensor) -> str:
    return f"{str(t.dtype)[6:]}{tuple(t.shape)}{t.stride()}"


def examples() -> Iterator[Case]:
    """What replaced example models call, in inference and training, in float32 and under autocast."""
    from benchmarks import models

    index = 0
    for name, half, step in itertools.product(models.EXAMPLES, (False, True), (models.inference, models.training)):
        with Calls() as calls:
            step(models.Cell(name, 1, half, False), True)()
        for key, (func, args) in calls.found.items():
            for needs, call in _one_by_one(func, args):
                workload = Workload(f"{name} {'half' if half else 'float32'} {step.__name__} {key[:120]}{needs}", call)
                yield Case("examples", "example", index, partial(lambda w: w, workload))
                index += 1


def _one_by_one(func: Any, args: tuple[Any, ...]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """A call; of an einsum's gradients one call for each."""
    if func.name() != "svexport::einsum_backward":
        yield "", partial(func, *args)
        return
    *rest, needs = args
    for at in itertools.compress(range(len(needs)), needs):
        yield f" {at}", partial(func, *rest, [i == at for i in range(len(needs))])


# ------------------------------------------------------------------------------------------------------------- timing


def without_kernels() -> AbstractContextManager[None]:
    """Einsums are plans of products by cuBLAS, as those are that no kernel is faster for."""
    return swapped(sys.modules["svexport.ops.einsum"], _way=lambda *_: None)


def times_of(calls: Mapping[str, Callable[[], Any]], replays: int = REPLAYS) -> dict[str, float]:
    """Medians in microseconds, in turn; of what is far slower than the fastest, or takes long, of fewer calls."""
    rough = {name: t["median"] for name, t in queued_times(calls, 3).items()}
    least = min(rough.values())
    worth = {name: call for name, call in calls.items() if rough[name] <= SLOW * least}
    most = max(rough[name] for name in worth)
    runs = replays if most < 500 else max(4, replays // 2) if most < 5000 else 4
    return rough | {name: t["median"] for name, t in queued_times(worth, runs).items()}


def measured(case: Case) -> dict[str, Any]:
    """A row: the problem, the tactics with their constants, which is chosen, and the time of each."""
    workload = case.make()
    row: dict[str, Any] = {"key": case.key, "family": case.family, "workload": workload.name}
    asked = problems_of(workload.ours)
    if len(asked) != 1 or "forward and backward" in workload.name:  # of the forward, which is timed alone
        return row | {"skipped": f"{len(asked)} choices"}
    ((op, problem),) = asked
    gpu = planner.this_gpu() or planner.GPUS["h200"]
    plan = planner.plan(op, gpu, **problem)
    calls: dict[str, Callable[[], Any]] = {}
    for tactic in plan.tactics:
        with forced(op, problem, tactic.id):
            calls |= captured({str(tactic.id): workload.ours})
    if op == "einsum" and case.family != "example":
        with without_kernels():
            calls |= captured({"plan": workload.ours})
    for name in itertools.islice(filter(TORCHS.__contains__, workload.peers), 1):
        peer = workload.peers[name]
        calls["torch"] = peer if name == "torchvision" else captured({name: peer})[name]
    constants = {str(t.id): dict(t.constants) for t in plan.tactics}
    row |= {"op": op, "problem": problem, "chosen": str(plan.chosen.id), "constants": constants}
    return row | {"times": {name: round(us, 2) for name, us in times_of(calls).items()}}


class Results:
    """A file of rows. What was begun when a process ended is not tried again."""

    def __init__(self, path: Path) -> None:
        self.path, self.begun = path, path.with_suffix(".begun")
        self.rows = read(path) if path.exists() else []
        self.keys = {row["key"] for row in self.rows}
        if self.begun.exists():
            self.add({"key": self.begun.read_text(), "skipped": "the process ended"})

    def add(self, row: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        self.keys.add(row["key"])
        self.begun.unlink(missing_ok=True)

    def take(self, case: Case) -> None:
        if case.key in self.keys:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.begun.write_text(case.key)
        try:
            row = measured(case)
        except Exception as error:  # one shape is left out, whatever is wrong with it
            row = {"key": case.key, "family": case.family, "skipped": str(error).partition("\n")[0][:200]}
            print(f"{case.key}: {row['skipped']}", file=sys.stderr, flush=True)
            if "CUDA error" in str(error):  # nothing runs after that
                self.add(row)
                raise
        self.add(row)
        if torch.cuda.is_available() and torch.cuda.memory_reserved() > 32 << 30:
            torch.cuda.empty_cache()


def time_all(results: Results, seconds: float, seed: int = 0) -> None:
    """Named workloads and examples first; the modules share what is left of the time."""
    start = time.monotonic()
    with swapped(torch, compile=lambda function, **_: function):  # of peers that are not timed
        sources: dict[str, Callable[[], Iterator[Case]]] = {name: partial(named, name) for name in NAMED}
        for name, cases in {**sources, "examples": examples}.items():
            if f"all of {name}" in results.keys:  # making them takes as long as timing them
                continue
            for case in _guarded(cases()):
                results.take(case)
            results.add({"key": f"all of {name}"})
            print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
        left, spent = seconds - (time.monotonic() - start), 0.0
        for name, share in SHARES.items():
            spent += share
            for case in _guarded(others(name, seed)):
                if time.monotonic() - start > seconds - left * (1 - spent):
                    break
                results.take(case)
            print(f"{name}: {sum(row['key'].startswith(name + ' ') for row in results.rows)} rows", flush=True)


def _guarded(cases: Iterator[Case]) -> Iterator[Case]:
    """As far as they can be made: a missing package takes its own shapes away, not all others."""
    try:
        yield from cases
    except (ImportError, RuntimeError) as error:
        if "CUDA error" in str(error):
            raise
        warnings.warn(f"left out: {error}", stacklevel=2)


# ------------------------------------------------------------------------------------------------------------- report


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def group_of(row: Mapping[str, Any]) -> str:
    return row["op"] + (" backward" if row["problem"].get("backward") else "")


def is_other(row: Mapping[str, Any]) -> bool:
    """Whether it is neither named nor an example's."""
    return row["family"] in ("sweep", "random")


def labels_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By id: the constants that every problem has alike; not those that follow from sizes."""
    values: dict[str, dict[str, set[Any]]] = defaultdict(lambda: defaultdict(set))
    for row in rows:
        for tactic, constants in row["constants"].items():
            for name, value in constants.items():
                values[tactic][name].add(value)
    varying = {name for constants in values.values() for name, found in constants.items() if len(found) > 1}
    return {
        tactic: {name: next(iter(found)) for name, found in constants.items() if name not in varying}
        for tactic, constants in values.items()
    }


def text_of(label: Mapping[str, Any]) -> str:
    return " ".join(str(v) if not isinstance(v, bool) else n * v for n, v in label.items()).replace("  ", " ").strip()


def loss(row: Mapping[str, Any], gone: set[str], more: Sequence[str] = ()) -> float:
    """By how much the fastest that is left is slower than the fastest; infinite where none is.

    Args:
        gone: ids of tactics.
        more: what else is left: ``"torch"``, ``"plan"``.
    """
    times = row["times"]
    ours = {name: us for name, us in times.items() if name in row["constants"]}
    left = [us for name, us in ours.items() if name not in gone] + [times[name] for name in more if name in times]
    return min(left, default=math.inf) / min(ours.values()) - 1


class Verdict(NamedTuple):
    """What is lost without something."""

    worst: float  # of a named workload or an example
    where: str
    share: float  # of the other shapes, that lose LOSS
    valid: int  # rows in which it is a tactic
    fastest: int  # and the fastest
    mean: float  # of all rows in which something is left

    @property
    def stays(self) -> bool:
        return self.worst > LOSS or self.share > SHARE


def verdict(rows: Sequence[Mapping[str, Any]], gone: set[str], more: Sequence[str] = ()) -> Verdict:
    worst, where = max(
        ((loss(row, gone, more), row["workload"]) for row in rows if not is_other(row)), default=(0.0, "")
    )
    rest = [loss(row, gone, more) for row in rows if is_other(row)]
    share = sum(x > LOSS for x in rest) / len(rest) if rest else 0.0
    valid = sum(not gone.isdisjoint(row["constants"]) for row in rows)
    lost = [x for row in rows if math.isfinite(x := loss(row, gone, more))]
    fastest = sum(loss(row, gone) > 0 for row in rows)
    return Verdict(worst, where, share, valid, fastest, sum(lost) / max(1, len(lost)))


def items_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, set[str]]:
    """What can be taken away: each tactic, and all that have a value of a constant; by name the ids."""
    labels = labels_of(rows)
    items: dict[str, set[str]] = defaultdict(set)
    for tactic, label in sorted(labels.items(), key=lambda item: int(item[0])):
        items[f"{text_of(label)} ({tactic})"].add(tactic)
    constants: dict[str, set[str]] = defaultdict(set)
    for tactic, label in labels.items():
        for name, value in label.items():
            constants[f"{name}={value}"].add(tactic)
    return items | {name: gone for name, gone in constants.items() if 1 < len(gone) < len(labels)}


def eliminated(rows: Sequence[Mapping[str, Any]], more: Sequence[str] = ()) -> list[str]:
    """Ids, one after another the least missed one, as long as all that are gone are not missed by the rule."""
    ids: set[str] = {tactic for row in rows for tactic in row["constants"]}
    gone: list[str] = []
    while ids:
        found = {tactic: verdict(rows, {*gone, tactic}, more) for tactic in ids}
        least = min(found, key=lambda t: (found[t].stays, found[t].share + max(0, found[t].worst) / 10, found[t].mean))
        if found[least].stays:
            break
        gone.append(least)
        ids.remove(least)
    return gone


def choices(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the planner's choice loses against the fastest."""
    ratios = []
    for row in rows:
        ours = [row["times"][name] for name in row["constants"]]
        ratios.append((row["times"][row["chosen"]] / min(ours), row["workload"]))
    mean = math.exp(sum(math.log(ratio) for ratio, _ in ratios) / len(ratios))
    over = sum(ratio > 1 + LOSS for ratio, _ in ratios) / len(ratios)
    worst = max(ratios)
    return f"chosen / fastest: geometric mean {mean:.3f}, over 1.1 in {over:.1%}, worst {worst[0]:.2f}: {worst[1][:90]}"


def percent(x: float) -> str:
    return "none left" if math.isinf(x) else f"{x:.0%}"


def report(rows: Sequence[Mapping[str, Any]], alone: str = "") -> Iterator[str]:
    """Lines of text; ``alone``: of ops whose name has that in it."""
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if "times" in row:
            groups[group_of(row)].append(row)
    skipped = [row for row in rows if "skipped" in row]
    yield f"{len(rows)} rows, {len(skipped)} without a time"
    for group, of_group in groups.items():
        if alone not in group:
            continue
        kept = [row for row in of_group if not is_other(row)]
        yield f"\n{group}: {len(kept)} named and of examples, {len(of_group) - len(kept)} others"
        yield choices(of_group)
        yield f"{'without':<44} {'valid':>5} {'best':>5} {'named':>9} {'others':>7} {'torch too':>15}  stays"
        items = items_of(of_group)
        for name, gone in items.items():
            ours, all_ = verdict(of_group, gone), verdict(of_group, gone, ("torch", "plan"))
            yield (
                f"{name:<44} {ours.valid:>5} {ours.fastest:>5} {percent(ours.worst):>9} {ours.share:>7.1%} "
                f"{percent(all_.worst):>8} {all_.share:>6.1%}  {'yes' if ours.stays else 'no':<4} {ours.where[:80]}"
            )
        names = {min(gone): name for name, gone in items.items() if len(gone) == 1}
        for more in ((), ("torch", "plan")):
            gone_ids = eliminated(of_group, more)
            beside = " with torch's own" if more else ""
            yield f"all of these can go together{beside}: {', '.join(names.get(i, i) for i in gone_ids) or 'none'}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablation", description=__doc__)
    parser.add_argument("action", choices=("time", "report"))
    parser.add_argument("file", type=Path, help="rows of JSON, one a line")
    parser.add_argument("--seconds", type=float, default=280, help="time: for all, but for compiling the kernels")
    parser.add_argument("--seed", type=int, default=0, help="time: of random shapes, and of the order of sweeps")
    parser.add_argument("--op", default="", help="report: only ops whose name has this in it")
    options = parser.parse_args(arguments)
    if options.action == "report":
        print("\n".join(report(read(options.file), options.op)))
        return 0
    if not torch.cuda.is_available():
        print("expected a CUDA GPU, found none: these are timings of CUDA kernels", file=sys.stderr)
        return 1
    if not _cuda.load():
        return 1
    torch.manual_seed(0)
    time_all(Results(options.file), options.seconds, options.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
