"""A part of the sweep over PyTorch's samples finds nothing wrong; and how the sweep judges what is wrong."""

from __future__ import annotations

import pytest
import torch

from tests.sweep import judge as judge_of_sweep
from tests.sweep import page
from tests.sweep.judge import Verdict, expected, judge
from tests.sweep.samples import Case, cases

FUNCTIONS = [
    *("abs", "amax", "any", "argmax", "atan2", "bitwise_right_shift", "clamp", "cummin", "floor_divide", "logaddexp"),
    *("max.reduction_with_dim", "maximum", "mean", "nn.functional.logsigmoid", "nn.functional.gelu"),
    *("softmax", "nn.functional.softplus", "sort", "topk", "where"),
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_is_wrong_at_the_oldest_opset(name: str) -> None:
    held(name, 11)


@pytest.mark.parametrize("name", ["any", "atan2", "cummin", "maximum", "nn.functional.logsigmoid", "topk"])
def test_nothing_is_wrong_by_the_other_exporter(name: str) -> None:
    held(name, 18)


def held(name: str, opset: int) -> None:
    runs = [(case, found) for case in cases(name, most=4) if isinstance(found := expected(case), list) and found]
    verdict = judge(runs, opset, "svexport")
    assert not verdict.wrong, verdict.reasons
    assert verdict.right + verdict.limits > 0, verdict.reasons


def test_a_wrong_file_is_seen() -> None:
    """torch.onnx.export asks whether a sum is positive."""
    case = Case(lambda given: [given[0].any(-1)], [torch.tensor([[-1.0, 0.5], [0.0, 0.0]])], torch.float32, "any")
    runs = expected(case)
    assert isinstance(runs, list)
    verdict = judge([(case, runs)], 11, "torch")
    assert page.cell(vars(verdict)) == "wrong"
    assert "samples: False for True" in verdict.reasons[0]
    assert page.cell(vars(judge([(case, runs)], 11, "svexport"))) == "right"


def test_what_is_refused_says_why() -> None:
    case = Case(lambda given: [torch.linalg.qr(given[0])[0]], [torch.eye(2)], torch.float32, "qr")
    runs = expected(case)
    assert isinstance(runs, list)
    verdict = judge([(case, runs)] * 3, 11, "svexport")
    assert (verdict.right, verdict.refused, verdict.wrong) == (0, 3, 0)
    assert "linalg_qr" in verdict.reasons[0]


def test_what_the_limit_leaves_is_untried() -> None:
    good, bad = (
        Case(lambda given, f=f: [f(given[0])], [torch.eye(2)], torch.float32, f.__name__)
        for f in (torch.neg, lambda x: torch.linalg.qr(x)[0])
    )
    runs = [(case, expected(case)) for case in (good, bad, good)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge_of_sweep, "EXPORTS", 2)
        verdict = judge(runs, 11, "svexport")  # type: ignore[arg-type]
    assert (verdict.right, verdict.refused, verdict.untried) == (1, 0, 2)
    assert page.mark(vars(verdict)) == "✓ (tried 1 of 3)"


def test_random_functions_are_not_compared() -> None:
    case = Case(lambda given: [torch.rand_like(given[0])], [torch.ones(2)], torch.float32, "rand_like")
    assert expected(case) == "random"


@pytest.mark.parametrize(
    ("verdict", "kind"),
    [
        (Verdict(right=2), "right"),
        (Verdict(right=2, limits=1), "limits"),
        (Verdict(right=1, refused=1), "part"),
        (Verdict(refused=1), "refused"),
        (Verdict(right=5, wrong=1), "wrong"),
        (None, ""),
    ],
)
def test_cells(verdict: Verdict | None, kind: str) -> None:
    assert page.cell(None if verdict is None else vars(verdict)) == kind
