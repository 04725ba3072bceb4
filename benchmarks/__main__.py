"""``python -m benchmarks [op …]``: the CUDA kernels beside what a user would have without them.

Every module here with ``workloads()`` is one workload family. Ours and the peers are replayed from CUDA graphs, ten
replays each in turn, in one process; ``--eager`` times plain calls too, ``--sweep`` a module's ``sweep()``: many
shapes, none of which should be slower than the peer.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

import benchmarks
from benchmarks._measure import RESULTS, Workload, eager_times, graph_times, queued_times, write


def modules(names: list[str]) -> Iterator[tuple[str, ModuleType]]:
    every = [m.name for m in pkgutil.iter_modules(benchmarks.__path__) if not m.name.startswith("_")]
    if unknown := set(names) - set(every):
        raise SystemExit(f"expected names among {', '.join(every)}; got {', '.join(sorted(unknown))}")
    for name in names or every:
        module = importlib.import_module(f"benchmarks.{name}")
        if hasattr(module, "workloads"):
            yield name, module


def measure(workload: Workload, replays: int, eager: bool) -> dict:
    torch.compiler.reset()  # else compiled peers of one source would count as recompiled, and stop being
    functions = {"ours": workload.ours, **workload.peers}
    measured = (graph_times if workload.capturable else queued_times)(functions, replays)
    timings = {name: dict(t) for name, t in measured.items()}
    plain = eager_times({**(functions if eager else {}), **workload.eager}) if eager or workload.eager else {}
    for name, timing in plain.items():
        timings[f"{name} (eager)" if name in functions else name] = timing
    row: dict = {"workload": workload.name, "times": timings}
    ours = timings["ours"]["median"]
    if workload.bytes:
        row["bytes"] = workload.bytes
    if workload.peers:
        row["peer"] = next(iter(workload.peers))
        row["ratio"] = ours / timings[row["peer"]]["median"]
    met = [ours <= limit for limit in [workload.limit] if limit is not None]
    met += [row["ratio"] <= goal for goal in [workload.goal] if goal is not None]
    row |= {key: value for key in ("goal", "limit") if (value := getattr(workload, key)) is not None}
    if met:
        row["met"] = all(met)
    return row


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
    limit = f" limit {row['limit']:.1f} us" if "limit" in row else ""
    met = {True: " met", False: " MISSED", None: ""}[row.get("met")]
    return f"{row['workload']:<64} {row['times']['ours']['median']:9.1f} us {ratio:>8}{goal}{limit}{met}  | {others}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help="modules of this folder; all that have workloads by default")
    parser.add_argument("--filter", default="", help="only workloads whose name contains this")
    parser.add_argument(
        "--sweep", action="store_true", help="the sweep of shapes; prints those that are slower than the peer"
    )
    parser.add_argument("--eager", action="store_true", help="plain calls as well as graph replays")
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument("--out", type=Path, help="folder for <module>.json; default: results/<device>")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("expected a CUDA GPU, found none: these are benchmarks of CUDA kernels", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    device = torch.cuda.get_device_name().lower().replace(" ", "-")
    folder = options.out or RESULTS / device
    for name, module in modules(options.names):
        generate = getattr(module, "sweep" if options.sweep else "workloads", None)
        if generate is None:
            continue
        rows: list[dict] = []
        path = None
        for workload in generate():
            if options.filter not in workload.name:
                continue
            row = measure(workload, options.replays, options.eager)
            if options.sweep and is_slower(row):  # or was it noise?
                row = measure(workload, 10 * options.replays, options.eager)
            rows.append({"module": name, **row})
            if options.out or not options.filter:  # at every row: a run that is cut short leaves what it has measured
                path = write(f"{name}-sweep" if options.sweep else name, rows, folder)
            if not options.sweep or is_slower(row):
                print(line(row), flush=True)
            torch.cuda.empty_cache()
        ratios = sorted(row["ratio"] for row in rows if "ratio" in row)
        if options.sweep and ratios:
            print(
                f"{name}: {len(rows)} shapes, {sum(map(is_slower, rows))} slower than the peer; "
                f"ratio median {ratios[len(ratios) // 2]:.2f}, worst {ratios[-1]:.2f}"
            )
        if path:
            print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
