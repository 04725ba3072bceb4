"""``python -m benchmarks.plot results/<device>``: a folder of results as a picture, PNG and SVG beside it.

One row a workload: a dot for ours, a ring for each peer, a tick for the time the bytes alone would take.
"""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from pathlib import Path

import matplotlib.pyplot as plt

BANDWIDTH = {"NVIDIA H200": 4.3e12}
"""Bytes per second of a large copy, read and written, by device; devices that nobody measured get no ticks."""


def plot(folder: Path) -> list[Path]:
    """Draws the results in ``folder``, but no sweeps or random shapes; returns the files written.

    Raises:
        ValueError: if it holds no results of ``python -m benchmarks``.
    """
    records = [
        json.loads(p.read_text()) for p in sorted(folder.glob("*.json")) if not p.stem.endswith(("-sweep", "-random"))
    ]
    rows = [row for record in records for row in record.get("rows", []) if "times" in row]
    if not rows:
        raise ValueError(f"{folder}: expected results written by python -m benchmarks, found none")
    record = records[0]
    groups = [(name, list(group)) for name, group in groupby(rows, key=lambda row: row["module"])]
    heights = [len(group) for _, group in groups]
    figure, axes = plt.subplots(
        len(groups), 1, figsize=(11, 0.24 * sum(heights) + 0.7 * len(groups)), sharex=True, squeeze=False,
        gridspec_kw={"height_ratios": [height + 1 for height in heights]}, layout="constrained",
    )  # fmt: skip
    peers = list(dict.fromkeys(name for row in rows for name in row["times"] if name != "ours"))
    colors = dict(zip(peers, plt.get_cmap("tab10").colors * (1 + len(peers) // 10), strict=False))
    seen: dict[str, object] = {}
    for axis, (name, group) in zip(axes[:, 0], groups, strict=True):
        for y, row in enumerate(group):
            for peer, timing in row["times"].items():
                if peer != "ours":
                    seen[peer] = axis.plot(timing["median"], y, "o", mfc="none", color=colors[peer])[0]
            seen["svexport"] = axis.plot(row["times"]["ours"]["median"], y, "o", color="black")[0]
            if "bytes" in row and record["device"] in BANDWIDTH:
                floor = row["bytes"] / BANDWIDTH[record["device"]] * 1e6
                seen["bytes floor"] = axis.plot(floor, y, "|", color="gray", markersize=9)[0]
        axis.set_yticks(range(len(group)), [row["workload"].removeprefix(f"{name} ") for row in group], fontsize=7)
        axis.set_ylim(len(group) - 0.5, -0.5)
        axis.set_xscale("log")
        axis.grid(axis="x", alpha=0.3)
        axis.set_title(name, loc="left", fontsize=9, fontweight="bold")
    axes[-1, 0].set_xlim(left=1)  # a floor of less says nothing: a launch takes longer
    axes[-1, 0].set_xlabel("microseconds, median")
    order = sorted(seen, key=lambda label: (label != "svexport", label == "bytes floor"))
    title = f"{record['device']}, torch {record['versions']['torch']}, {record['date']}"
    figure.legend([seen[k] for k in order], order, title=title, loc="outside upper center", ncols=6, fontsize=8)
    written = [folder.with_suffix(suffix) for suffix in (".png", ".svg")]
    for target in written:
        figure.savefig(target, dpi=150)
    plt.close(figure)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="results/<device>")
    for written in plot(parser.parse_args().results):
        print(written)


if __name__ == "__main__":
    main()
