"""Writes docs/convert.md: the lowest opset of every op, from a run of ONNX's own node tests.

python -m tests.graph.opsets
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from svexport.graph.opsets import LOWEST
from svexport.graph.opsets.rules import REFUSED
from tests.graph.opsets.backend import HIGHEST, Case, cases, judge, modules, reason

ROOT = Path(__file__).parents[3]
PAGE, RESULTS = ROOT / "docs" / "convert.md", ROOT / "build" / "opsets.json"

HEAD = f"""# Opsets, downwards

`svexport.convert(model, opset=11)` and `svexport convert` write a model of opset 10 to 24 at a lower one, down to
{LOWEST}, so that it computes exactly the same in ONNX Runtime, or refuse it: the error names the nodes, says why, and
what the lowest opset is that has a form. It holds for graphs in graphs and for local functions; nodes of other
domains stay as they are.

Below, how far down each op goes: every test of it that the onnx package has, as a file of opset {HIGHEST} or the last
that it is valid at, converted to each lower opset and run. Every test is taken as it is; with its small inputs (axes,
pads, bounds) as constants, which they are in most files; and with every size open. *All* is the lowest opset that all
of them reach, *some* the lowest that any of them does. Written by `python -m tests.graph.opsets`; each cell is from a
run (onnx {onnx.__version__}, ONNX Runtime {onnxruntime.__version__}).

Limits: a Reshape to several sizes that are computed takes them not to be zero below opset 14. Sums and products are
rounded as ONNX Runtime rounds them, which differs between kernels by units in the last place.
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=math.inf, help="to spend: the next run goes on")
    parser.add_argument("--again", default="(?!)", help="regular expression of files to run once more")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results = {module: of for module, of in results.items() if not re.search(options.again, module)}
    end = time.process_time() + options.seconds
    for module in modules():
        if module not in results and time.process_time() < end:
            results[module] = [_of(case) for case in cases(module) if "_expanded" not in case.name]
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(results))
    missing = len(modules()) - len(results)
    print(f"{missing} files of tests are left" if missing else f"{PAGE}: {_write(results)}")


def _of(case: Case) -> dict[str, Any]:
    """What came of a case, told by opset. Its forms with constants and open sizes take the same steps down."""
    targets = range(case.opset - 1, LOWEST - 1, -1) if ":" not in case.name else (17, 13, 11, 9)
    found = {target: judge(case, target) for target in targets if target < case.opset}
    for target, verdict in found.items():
        if verdict.kind == "wrong":
            print(f"{verdict.kind} {case.name} {case.opset} -> {target}: {verdict.detail[:300]}", flush=True)
    reached, why = case.opset, {}
    for target, verdict in found.items():
        if verdict.kind == "refused":
            first = re.search(r"below opset (\d+)", reason(verdict))
            why = {reason(verdict).partition(": ")[2]: int(first[1]) if first else target + 1}
            reached = max(why.values())
            break
        reached = target
    counts = Counter(verdict.kind for verdict in found.values())
    return {"op": case.model.graph.node[-1].op_type, "reached": reached, "why": why, "counts": counts}


def _write(results: dict[str, list[dict[str, Any]]]) -> str:
    counts: Counter[str] = Counter()
    lowest: dict[str, list[int]] = defaultdict(list)
    reasons: dict[str, dict[str, int]] = defaultdict(dict)
    for case in (case for of in results.values() for case in of):
        counts.update(case["counts"])
        lowest[case["op"]].append(case["reached"])
        for text, opset in case["why"].items():
            reasons[case["op"]][text] = max(reasons[case["op"]].get(text, 0), opset)
    for (op_type, version), text in REFUSED.items():
        if op_type not in lowest:
            lowest[op_type] = [version]
            reasons[op_type][text] = version
    summary = _summary(counts)
    PAGE.write_text(f"{HEAD}\n{summary}\n\n{_table(lowest, reasons)}\n")
    return summary


def _summary(counts: Counter[str]) -> str:
    unable = f"; {counts['unable']} that neither ONNX Runtime nor ONNX's reference runs" if counts["unable"] else ""
    return f"In this run: {counts['right']:,} right, {counts['refused']:,} refused, {counts['wrong']} wrong{unable}."


def _table(lowest: dict[str, list[int]], reasons: dict[str, dict[str, int]]) -> str:
    rows = ["| op | tests | all | some | refused |", "|---|---|---|---|---|"]
    for op_type in sorted(lowest):
        reached = lowest[op_type]
        why = "; ".join(
            f"below {opset}: {text}" for text, opset in sorted(reasons[op_type].items(), key=lambda r: -r[1])
        )
        rows.append(f"| {op_type} | {len(reached)} | {max(reached)} | {min(reached)} | {why} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
