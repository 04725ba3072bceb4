"""Makes ``docs/opsets.md`` from the results: a row per function, a cell per exporter and opset."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from tests.sweep.judge import EXPORTERS, OPSETS
from tests.sweep.samples import names

PAGE = Path(__file__).parents[2] / "docs" / "opsets.md"
MARKS = {"right": "✓", "part": "part", "refused": "-", "limits": "✓*", "wrong": "**wrong**", "": ""}

Results = dict[str, dict[str, Any]]


def read(path: Path) -> Results:
    """Of each function, by exporter and opset, its newest cell."""
    results: Results = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        line = json.loads(text)
        of = results.setdefault(line["function"], {})
        if "skipped" in line:
            of["skipped"] = line["skipped"]
        else:
            of.setdefault(line["exporter"], {}).update(
                {o: {**c, "torch": line["torch"]} for o, c in line["cells"].items()}
            )
    return results


def cell(verdict: Mapping[str, Any] | None) -> str:
    """``right``, ``part`` (of the samples; the rest is refused), ``refused`` or ``wrong``."""
    if verdict is None:
        return ""
    if verdict["wrong"]:
        return "wrong"
    if verdict["limits"] and not verdict["refused"]:
        return "limits"
    if not verdict["refused"]:
        return "right"
    return "part" if verdict["right"] or verdict["limits"] else "refused"


def mark(verdict: Mapping[str, Any] | None) -> str:
    """Of a cell, as the page shows it, with how many samples were tried where that is not all of them."""
    shown = MARKS[cell(verdict)]
    if verdict is None or not (untried := verdict.get("untried", 0)):
        return shown
    tried = sum(verdict[kind] for kind in ("right", "refused", "wrong", "limits"))
    return f"{shown} (tried {tried} of {tried + untried})"


def write(results: Results) -> None:
    """Writes the page."""
    compared = {name: of for name, of in results.items() if "skipped" not in of}
    columns = [(exporter, opset) for exporter in EXPORTERS for opset in OPSETS]
    kinds = {
        column: Counter(cell(of.get(column[0], {}).get(str(column[1]))) for of in compared.values())
        for column in columns
    }
    versions = sorted({c["torch"] for of in compared.values() for cells in of.values() for c in cells.values()})
    lines = [
        "# Functions and opsets",
        "",
        "Which functions of torch are exported right, at which opset: a row for each of PyTorch's own table of samples "
        "(`op_db`), in float32, float16, int64 and bool where it has them, called with its samples and with extremes "
        "(NaN, infinities, zeros of both signs, subnormal, huge, negative and largest numbers, masks all true and all "
        "false), and compared with torch in ONNX Runtime. Written by `python -m tests.sweep`; each cell is from a run "
        f"(torch {' or '.join(versions)}, onnx {onnx.__version__}, ONNX Runtime {onnxruntime.__version__}): "
        f"{len(compared)} of {len(names())} functions so far.",
        "",
        "✓ right; ✓* right of tame numbers, and other than torch of NaN, infinities or numbers whose sums or squares "
        "overflow; part: some samples right, others refused; - refused; **wrong**: a file that differs from torch; "
        "tried k of n: the others were not, for samples are exported together, and by halves as long as some are "
        "refused; empty: not run yet. *torch* is `torch.onnx.export`, by TorchScript up to 17 and by torch.export from "
        "18 on.",
        "",
        "| | " + " | ".join(f"{e} {o}" for e, o in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    lines += [
        f"| {kind} | " + " | ".join(str(kinds[column][kind]) for column in columns) + " |"
        for kind in ("right", "limits", "part", "refused", "wrong")
    ]
    lines += ["", "| function | " + " | ".join(f"{e} {o}" for e, o in columns) + " |", "|---|" + "---|" * len(columns)]
    for name in sorted(compared):
        marks = [mark(compared[name].get(exporter, {}).get(str(opset))) for exporter, opset in columns]
        lines.append(f"| `{name}` | " + " | ".join(marks) + " |")
    lines += ["", "## Refused, and why", ""]
    for name in sorted(compared):
        found: dict[str, list[str]] = {}
        for opset in OPSETS:
            verdict = compared[name].get("svexport", {}).get(str(opset))
            if cell(verdict) in ("refused", "part", "wrong"):
                why = next(iter(verdict["reasons"]), "").partition("Error: ")[2] or "some samples"
                found.setdefault(why.replace(f"opset {opset}", "this opset"), []).append(str(opset))
        lines += [f"* `{name}` at {', '.join(opsets)}: {why}" for why, opsets in found.items()]
    skipped: dict[str, list[str]] = {}
    for name, of in sorted(results.items()):
        if "skipped" in of:
            skipped.setdefault(of["skipped"].partition(":")[0], []).append(f"`{name}`")
    lines += ["", "## Not compared", ""] + [f"* {why}: {', '.join(found)}" for why, found in sorted(skipped.items())]
    PAGE.write_text("\n".join(lines) + "\n")
