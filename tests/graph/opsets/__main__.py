"""Writes docs/convert.md: how far down every op goes, from a run of ONNX's own tests of nodes.

python -m tests.graph.opsets
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import onnx
import onnxruntime

from svexport.graph.opsets import LOWEST
from svexport.graph.opsets.rules import REFUSED
from tests.graph.opsets.backend import HIGHEST, Case, Verdict, cases, judge, modules, reason

PAGE = Path(__file__).parents[3] / "docs" / "convert.md"

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
    counts: Counter[str] = Counter()
    lowest: dict[str, list[int]] = defaultdict(list)
    reasons: dict[str, dict[str, int]] = defaultdict(dict)
    for module in modules():
        for case in cases(module):
            if "_expanded" in case.name:  # into other ops, which have tests of their own
                continue
            found = {target: judge(case, target) for target in range(case.opset - 1, LOWEST - 1, -1)}
            counts.update(verdict.kind for verdict in found.values())
            for target, verdict in found.items():
                if verdict.kind in ("wrong", "unable"):
                    print(f"{verdict.kind} {case.name} {case.opset} -> {target}: {verdict.detail[:300]}", flush=True)
            _note(case, found, lowest, reasons)
    for (op_type, version), text in REFUSED.items():
        if op_type not in lowest:
            lowest[op_type] = [version]
            reasons[op_type][text] = version
    print(dict(counts))
    PAGE.write_text(f"{HEAD}\n{_summary(counts)}\n\n{_table(lowest, reasons)}\n")


def _note(
    case: Case,
    found: dict[int, Verdict],
    lowest: dict[str, list[int]],
    reasons: dict[str, dict[str, int]],
) -> None:
    op_type = case.model.graph.node[-1].op_type
    reached = case.opset
    for target, verdict in found.items():
        if verdict.kind == "refused":
            text = reason(verdict).partition(": ")[2]
            reasons[op_type][text] = max(reasons[op_type].get(text, 0), target + 1)
            break
        reached = target
    lowest[op_type].append(reached)


def _summary(counts: Counter[str]) -> str:
    right, refused = counts["right"], counts["refused"]
    return (
        f"In this run: {right:,} right, {refused:,} refused, {counts['wrong']} wrong; of {counts['unable']} ONNX "
        "Runtime runs neither the file nor what became of it, and neither does ONNX's reference."
    )


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
