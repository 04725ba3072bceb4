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

`svexport.convert(model, opset=11)` and `svexport convert` convert a model of opset 10 to 24 to a lower opset, from
{LOWEST} on. Either the converted model computes exactly the same in ONNX Runtime, or the conversion is refused. The
error then names each node that has no exact form, the reason, and the lowest opset that has one. Subgraphs and local
functions are converted too. Nodes of other domains stay as they are.

The table shows how low each op can go. It comes from a run of every node test of the onnx package: each test is a
file of opset {HIGHEST}, or of the last opset at which it is valid, and is converted to each lower opset and run. Each
test has three forms: as it is; with its small inputs (axes, pads, bounds) as constants, which they are in most files;
and with every size dynamic. *All* is the lowest opset that all tests of an op reach, *some* the lowest that any of
them reaches. `python -m tests.graph.opsets` writes this page (onnx {onnx.__version__}, ONNX Runtime
{onnxruntime.__version__}).

There are two limits. Below opset 14, a Reshape to several computed sizes is exact only if none of them is zero. Sums
and products are rounded as ONNX Runtime rounds them, and its kernels differ by units in the last place.
"""

TYPE = r"\b(u?int\d+|b?float\d+\w*)\b"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=math.inf, help="CPU seconds to spend; the next run continues")
    parser.add_argument("--again", default="(?!)", help="regular expression of test files to run again")
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
    print(f"{missing} test files are left" if missing else f"{PAGE}: {_write(results)}")


def _of(case: Case) -> dict[str, Any]:
    """The verdicts on a case, and the lowest opset that it reaches.

    Its forms with constants and open sizes take the same steps down, so they are converted to some opsets only.
    """
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
    unable = f"; {counts['unable']} run neither in ONNX Runtime nor in ONNX's reference" if counts["unable"] else ""
    return (
        f"Of all conversions in this run {counts['right']:,} are right, {counts['refused']:,} are refused and "
        f"{counts['wrong']} are wrong{unable}."
    )


def _table(lowest: dict[str, list[int]], reasons: dict[str, dict[str, int]]) -> str:
    rows = ["| op | tests | all | some | refused |", "|---|---|---|---|---|"]
    for op_type in sorted(lowest):
        reached = lowest[op_type]
        why = "; ".join(_joined(reasons[op_type]))
        rows.append(f"| {op_type} | {len(reached)} | {max(reached)} | {min(reached)} | {why} |")
    return "\n".join(rows)


def _joined(reasons: dict[str, int]) -> list[str]:
    """The reasons of an op, highest opset first. Those that differ only in the data type are one."""
    types: dict[tuple[str, int], list[str]] = defaultdict(list)
    for text, opset in sorted(reasons.items(), key=lambda reason: -reason[1]):
        found = re.search(TYPE, text)
        types[re.sub(TYPE, "TYPE", text, count=1), opset] += [found[0]] if found else []
    return [f"below {opset}: {text.replace('TYPE', _listed(names))}" for (text, opset), names in types.items()]


def _listed(names: list[str]) -> str:
    return " or ".join(", ".join(names).rsplit(", ", 1))


if __name__ == "__main__":
    main()
