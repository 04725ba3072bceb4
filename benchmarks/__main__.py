"""``python -m benchmarks [op …]``: the CUDA kernels beside what a user would have without them.

Every module here with ``workloads()`` is one workload family. Ours and the peers are replayed from CUDA graphs, ten
replays each in turn, in one process; ``--eager`` times plain calls too, ``--sweep`` a module's ``sweep()``: many
shapes, none of which should be slower than the peer, and ``--random`` shapes that nobody has chosen. Where peers take
long to compile, ``--apart`` compiles them side by side, and ``--compiled`` keeps what was compiled.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import lzma
import multiprocessing
import multiprocessing.connection
import pkgutil
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import torch

import benchmarks
from benchmarks._measure import RESULTS, Workload, captured, eager_times, noise, peak_memory, queued_times, write


def modules(names: list[str]) -> Iterator[tuple[str, ModuleType]]:
    every = [m.name for m in pkgutil.iter_modules(benchmarks.__path__) if not m.name.startswith("_")]
    if unknown := set(names) - set(every):
        raise SystemExit(f"expected names among {', '.join(every)}; got {', '.join(sorted(unknown))}")
    for name in names or every:
        module = importlib.import_module(f"benchmarks.{name}")
        if hasattr(module, "workloads"):
            yield name, module


def family(options: argparse.Namespace) -> str:
    """The function of a module that makes its workloads."""
    return "at_random" if options.random else "sweep" if options.sweep else "workloads"


def chosen(name: str, options: argparse.Namespace) -> Iterator[Workload]:
    generate = getattr(importlib.import_module(f"benchmarks.{name}"), family(options), None)
    if generate and options.random:
        generate = partial(at_random, generate, options)
    done = {row["workload"] for row in getattr(options, "done", ())}
    return (w for w in (generate() if generate else ()) if re.search(options.filter, w.name) and w.name not in done)


def at_random(draw: Callable[[Random], Workload], options: argparse.Namespace) -> Iterator[Workload]:
    """Workloads until the time is over, from the second on. One seed draws the same ones, of a faster GPU more."""
    generator = Random(options.seed)
    yield draw(generator)  # before which modules are imported and libraries loaded
    until = time.monotonic() + options.random
    while time.monotonic() < until:
        yield draw(generator)


def prepare(workload: Workload, kept: Path | None = None) -> Mapping[str, Callable[[], Any]]:
    """What is timed: replays of graphs, where these can be captured.

    Args:
        kept: the folder that keeps what torch.compile makes, a file a workload.
    """
    torch.compiler.reset()  # else compiled peers of one source would count as recompiled, and stop being
    file = kept / f"{re.sub(r'[^0-9A-Za-z]+', '-', workload.name)}.xz" if kept else None
    known = file is not None and file.exists()
    if file and known:
        torch.compiler.load_cache_artifacts(lzma.decompress(file.read_bytes()))
    functions = {"ours": workload.ours, **workload.peers}
    calls = captured(functions) if workload.capturable and not workload.whole else functions
    for call in calls.values() if workload.whole else ():
        for _ in range(3):  # compiles them, and records their graphs
            call()
    if file and not known and (made := torch.compiler.save_cache_artifacts()):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_bytes(lzma.compress(made[0]))
        part.replace(file)
    return calls


def measure(
    workload: Workload, calls: Mapping[str, Callable[[], Any]], replays: int = 100, eager: bool = False
) -> dict:
    """A row of the results. ``calls``: what :func:`prepare` returns."""
    functions = {"ours": workload.ours, **workload.peers}
    if workload.whole:
        again = {f"{name} again": calls[name] for name in itertools.islice(workload.peers, 1)}
        measured = eager_times({**calls, **again}, max(replays // 5, 5))
    else:
        measured = queued_times(calls, replays)
    timings = {name: dict(t) for name, t in measured.items()}
    plain = eager_times({**(functions if eager else {}), **workload.eager}) if eager or workload.eager else {}
    for name, timing in plain.items():
        timings[f"{name} (eager)" if name in functions else name] = timing
    row: dict = {"workload": workload.name, "times": timings}
    ours = timings["ours"]["median"]
    if workload.whole:
        row["peak_bytes"] = {name: peak_memory(call) for name, call in calls.items()}
    if workload.bytes:
        row["bytes"] = workload.bytes
    if workload.peers:
        row["peer"] = next(iter(workload.peers))
        row["ratio"] = ours / timings[row["peer"]]["median"]
    met = [ours <= limit for limit in [workload.limit] if limit is not None]
    met += [row["ratio"] <= goal * noise(row) for goal in [workload.goal] if goal is not None]
    if workload.memory_goal is not None:
        met.append(row["peak_bytes"]["ours"] <= workload.memory_goal * row["peak_bytes"][row["peer"]])
    row |= {key: value for key in ("goal", "limit", "memory_goal") if (value := getattr(workload, key)) is not None}
    if met:
        row["met"] = all(met)
    return row


def row_of(name: str, workload: Workload, calls: Mapping[str, Callable[[], Any]], options: argparse.Namespace) -> dict:
    row = measure(workload, calls, options.replays, options.eager)
    if family(options) != "workloads" and is_slower(row):  # or was it noise?
        row = measure(workload, calls, 10 * options.replays, options.eager)
    return {"module": name, **row}


def one_by_one(name: str, options: argparse.Namespace) -> Iterator[dict]:
    for workload in chosen(name, options):
        try:
            row = row_of(name, workload, prepare(workload, options.compiled), options)
        except torch.OutOfMemoryError as error:  # of models in large batches
            print(f"{workload.name}: left out: {str(error).partition('.')[0]}", file=sys.stderr, flush=True)
        else:
            yield row
        torch.cuda.empty_cache()


def stand_by(end: Any, name: str, index: int, options: argparse.Namespace) -> None:
    """Prepares one workload, says so, and measures it when it is told to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.manual_seed(0)
    workload = next(itertools.islice(chosen(name, options), index, None))
    calls = prepare(workload, options.compiled)
    torch.cuda.synchronize()
    end.send(None)
    end.recv()
    end.send(row_of(name, workload, calls, options))


def apart(name: str, options: argparse.Namespace) -> Iterator[dict]:
    """Every workload in a process of its own, that prepare side by side and then measure in turn.

    Those that are not ready after ``options.apart`` seconds, or when somebody presses Ctrl-C, are left out.
    """
    context = multiprocessing.get_context("spawn")
    target = importlib.import_module("benchmarks.__main__").stand_by  # under a name that a new process finds
    started: dict[Any, tuple[Any, str]] = {}
    for index, workload in enumerate(chosen(name, options)):
        here, there = context.Pipe()
        process = context.Process(target=target, args=(there, name, index, options), daemon=True)
        process.start()
        there.close()
        started[here] = process, workload.name
    until, waiting, ready = time.monotonic() + options.apart, set(started), set()
    try:
        while waiting and (left := until - time.monotonic()) > 0:
            for end in multiprocessing.connection.wait(list(waiting), left):
                waiting.remove(end)
                with suppress(EOFError, OSError):  # it failed, and said why
                    end.recv()
                    ready.add(end)
    except KeyboardInterrupt:
        pass
    for end in started.keys() - ready:
        process, label = started[end]
        print(f"{label}: {'not ready' if end in waiting else 'failed'}", file=sys.stderr, flush=True)
        process.kill()
        process.join()
    for end in filter(ready.__contains__, started):
        try:
            end.send(None)
            yield end.recv()
        except (EOFError, OSError):
            print(f"{started[end][1]}: ready, but not measured", file=sys.stderr, flush=True)
    for process, _ in started.values():
        process.kill()


def is_slower(row: dict) -> bool:
    """Than the peer, by median and by minimum: two timings of one kernel differ by a percent or two."""
    if "peer" not in row:
        return False
    ours, peer = row["times"]["ours"], row["times"][row["peer"]]
    return ours["median"] > 1.02 * peer["median"] and ours["min"] > 1.02 * peer["min"]


def line(row: dict) -> str:
    others = "  ".join(f"{n} {t['median']:.1f}" for n, t in row["times"].items() if n != "ours")
    ratio = f"{row['ratio']:.3f}x" if "ratio" in row else ""
    goal = f" goal {row['goal']:.3f}" if "goal" in row else ""
    if "peak_bytes" in row and "peer" in row:
        goal += f" memory {row['peak_bytes']['ours'] / max(row['peak_bytes'][row['peer']], 1):.3f}x"
    limit = f" limit {row['limit']:.1f} us" if "limit" in row else ""
    met = {True: " met", False: " MISSED", None: ""}[row.get("met")]
    return f"{row['workload']:<64} {row['times']['ours']['median']:9.1f} us {ratio:>8}{goal}{limit}{met}  | {others}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help="modules of this folder; all that have workloads by default")
    parser.add_argument("--filter", default="", help="only workloads whose name this regular expression matches")
    parser.add_argument(
        "--sweep", action="store_true", help="the sweep of shapes; prints those that are slower than the peer"
    )
    parser.add_argument(
        "--random", type=float, metavar="SECONDS", help="random shapes for so long; prints those that are slower"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random shapes")
    parser.add_argument("--eager", action="store_true", help="plain calls as well as graph replays")
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument("--out", type=Path, help="folder for <module>.json; default: results/<device>")
    parser.add_argument(
        "--apart", type=float, metavar="SECONDS", help="a process for every workload: prepared (compiled, captured) "
        "side by side, for so long at most, then timed one after the other",
    )  # fmt: skip
    parser.add_argument("--compiled", type=Path, help="folder that keeps what torch.compile made for the next time")
    parser.add_argument("--resume", action="store_true", help="keep what <module>.json has, measure what it lacks")
    options = parser.parse_args(arguments)
    if options.random and (options.sweep or options.apart):
        parser.error("expected --random alone, got --sweep or --apart beside it: drop one of them")
    if not torch.cuda.is_available():
        print("expected a CUDA GPU, found none: these are benchmarks of CUDA kernels", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    device = torch.cuda.get_device_name().lower().replace(" ", "-")
    folder = options.out or RESULTS / device
    suffix = "-random" if options.random else "-sweep" if options.sweep else ""
    for name, module in modules(options.names):
        if not hasattr(module, family(options)):
            continue
        path = None
        kept = folder / f"{name}{suffix}.json"
        options.done = json.loads(kept.read_text())["rows"] if options.resume and kept.exists() else []
        rows: list[dict] = list(options.done)
        for row in (apart if options.apart else one_by_one)(name, options):
            rows.append(row)
            if options.out or not options.filter:  # at every row: a run that is cut short leaves what it has measured
                path = write(f"{name}{suffix}", rows, folder)
            if not suffix or is_slower(row):
                print(line(row), flush=True)
        ratios = sorted(row["ratio"] for row in rows if "ratio" in row)
        if suffix and ratios:
            print(
                f"{name}: {len(rows)} shapes, {sum(map(is_slower, rows))} slower than the peer; "
                f"ratio median {ratios[len(ratios) // 2]:.2f}, worst {ratios[-1]:.2f}"
            )
        if path:
            print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
