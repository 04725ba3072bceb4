"""``python -m benchmarks.plot results/<device>``: a folder of results as pictures.

``results/<device>.png`` and ``.svg``: how many times as fast as the first peer each op is, a dot a shape.
``results/<device>/<op>.svg``: the workloads of one op in microseconds, beside all peers and what the bytes alone take.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

BANDWIDTH = {"NVIDIA H200": 4.3e12}
"""Bytes per second of a large copy, read and written, by device; devices that nobody measured get no ticks."""
OURS = "black"
SWEPT = "silver"


def plot(folder: Path) -> list[Path]:
    """Draws the results in ``folder``, but no random shapes; returns the files written.

    Raises:
        ValueError: if it holds no results of ``python -m benchmarks``.
    """
    records = {p.stem: json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))}
    for record in records.values():
        record["rows"] = [row for row in record.get("rows", []) if "times" in row]
    records = {name: r for name, r in records.items() if r["rows"] and not name.endswith("-random")}
    if not records:
        raise ValueError(f"{folder}: expected results written by python -m benchmarks, found none")
    written = list(save(overview(records), folder.with_suffix(".png"), folder.with_suffix(".svg")))
    for name, record in records.items():
        if not name.endswith("-sweep"):
            written += save(details(record), folder / f"{name}.svg")
    return written


def save(figure: Figure, *targets: Path) -> Iterator[Path]:
    with plt.rc_context({"svg.hashsalt": "svexport", "svg.fonttype": "none"}):  # the same picture is the same file
        for target in targets:
            figure.savefig(target, dpi=130, metadata={"Date": None} if target.suffix == ".svg" else None)
            yield target
    plt.close(figure)


def overview(records: dict[str, dict]) -> Figure:
    """A line of dots for each op and direction: the first peer's time divided by ours."""
    lines: dict[str, list[tuple[bool, dict]]] = {}
    for name, record in records.items():
        for row in record["rows"]:
            if "ratio" in row:
                label = f"{row['module']}{', backward' if is_backward(row) else ''}"
                lines.setdefault(label, []).append((name.endswith("-sweep"), row))
    labels = sorted(lines)
    figure, axis = plt.subplots(figsize=(11, 0.27 * len(labels) + 1.3), layout="constrained")
    for y, label in enumerate(labels):
        for sweep, color, size in ((True, SWEPT, 9), (False, OURS, 16)):
            times = [1 / row["ratio"] for swept, row in lines[label] if swept == sweep]
            axis.scatter(times, [y] * len(times), s=size, color=color, alpha=0.5, linewidths=0, zorder=3 - sweep)
        median = statistics.median(1 / row["ratio"] for _, row in lines[label])
        peers = ", ".join(dict.fromkeys(row["peer"] for _, row in lines[label]))
        text = f"{median:.1f}x, {len(lines[label])}, {peers}"
        axis.annotate(text, (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    axis.axvline(1, color="crimson", linewidth=1)
    axis.set(xscale="log", ylim=(len(labels) - 0.5, -0.5))
    axis.set_xlabel("times as fast as the peer (dark: workloads, light: the sweep)")
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.grid(axis="x", alpha=0.3)
    axis.set_title(heading(records.values()), loc="left", fontsize=9)
    axis.annotate("median, shapes, peer", (1.01, 1.01), xycoords="axes fraction", fontsize=8)
    return figure


def is_backward(row: dict) -> bool:
    return any(word in row["workload"] for word in ("backward", "gradient"))


def heading(records: Iterator[dict]) -> str:
    """Device, version of torch and the days on which these records were measured."""
    records = list(records)
    dates = sorted({record["date"] for record in records})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{records[0]['device']}, torch {records[0]['versions']['torch']}, {days}"


def details(record: dict) -> Figure:
    """One row a workload: a dot for ours, a ring for each peer, a tick for the time the bytes alone would take."""
    rows = record["rows"]
    figure, axis = plt.subplots(figsize=(11, 0.24 * len(rows) + 1.2), layout="constrained")
    peers = list(dict.fromkeys(name for row in rows for name in row["times"] if name != "ours"))
    colors = dict(zip(peers, plt.get_cmap("tab10").colors * (1 + len(peers) // 10), strict=False))
    seen: dict[str, object] = {}
    for y, row in enumerate(rows):
        for peer, timing in row["times"].items():
            if peer != "ours":
                seen[peer] = axis.plot(timing["median"], y, "o", mfc="none", color=colors[peer])[0]
        seen["svexport"] = axis.plot(row["times"]["ours"]["median"], y, "o", color=OURS)[0]
        if "bytes" in row and record["device"] in BANDWIDTH:
            floor = row["bytes"] / BANDWIDTH[record["device"]] * 1e6
            seen["bytes floor"] = axis.plot(floor, y, "|", color="gray", markersize=9)[0]
    labels = [row["workload"].removeprefix(f"{row['module']} ") for row in rows]
    axis.set_yticks(range(len(rows)), labels, fontsize=7)
    axis.set(xscale="log", ylim=(len(rows) - 0.5, -0.5), xlabel="microseconds, median")
    axis.set_xlim(left=1)  # a floor of less says nothing: a launch takes longer
    axis.grid(axis="x", alpha=0.3)
    order = sorted(seen, key=lambda label: (label != "svexport", label == "bytes floor"))
    title = f"{rows[0]['module']}: {heading(iter([record]))}"
    figure.legend([seen[k] for k in order], order, title=title, loc="outside upper center", ncols=6, fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="results/<device>")
    for written in plot(parser.parse_args().results):
        print(written)


if __name__ == "__main__":
    main()
