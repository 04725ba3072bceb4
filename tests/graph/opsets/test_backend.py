"""ONNX's own node tests at every lower opset are right in ONNX Runtime, or refused."""

from __future__ import annotations

import pytest

from tests.graph.opsets.backend import cases, judge, modules

OFTEN = {
    *("clip", "cumsum", "gathernd", "gelu", "layernormalization", "mod", "onehot", "pad", "reducemax", "reducesum"),
    *("reshape", "scatterelements", "shape", "slice", "softmax", "split", "squeeze", "topk", "unsqueeze"),
}
"""Files whose ops changed most of what exporters write."""


def wrong(module: str, targets: tuple[int, ...]) -> list[tuple[str, int, str]]:
    found = []
    for case in cases(module):
        for target in targets:
            if target < case.opset and (verdict := judge(case, target)).kind == "wrong":
                found.append((case.name, target, verdict.detail))
    return found


@pytest.mark.parametrize("module", sorted(OFTEN))
def test_often(module: str) -> None:
    assert sum(judge(case, 17).kind == "right" for case in cases(module)) > 0
    assert wrong(module, (9, 11)) == []


STATES = "ONNX Runtime wants the shape of a Scan's states, which it infers no longer where all sizes are open"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "module",
    [
        pytest.param(name, marks=pytest.mark.xfail(reason=STATES, strict=True)) if name == "linear_attention" else name
        for name in modules()
    ],
)
def test_all(module: str) -> None:
    """At the opsets that deployments have; ``python -m tests.graph.opsets`` goes to every one."""
    assert wrong(module, (9, 11, 13, 17)) == []
