from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from svexport.ops.interpolate import OP, interpolate
from tests.support import BOTH_EXPORTERS, OPSETS, check_export, op_model, run_op


def explicit(x: Tensor, size: tuple[int, int], bicubic: bool, ratios: tuple[float, float]) -> Tensor:
    """One output pixel at a time: the mean of the inputs under a filter that is as wide as the reduction."""

    def weight(distance: float) -> float:
        d = abs(distance)
        if not bicubic:
            return max(0.0, 1 - d)
        if d < 1:
            return 1.5 * d**3 - 2.5 * d**2 + 1
        return -0.5 * d**3 + 2.5 * d**2 - 4 * d + 2 if d < 2 else 0.0

    def weights(old: int, new: int, ratio: float) -> Tensor:
        rows = []
        for i in range(new):
            row = [weight((j + 0.5 - ratio * (i + 0.5)) / max(ratio, 1)) for j in range(old)]
            rows.append([w / math.fsum(row) for w in row])
        return torch.tensor(rows, dtype=torch.float64)

    rows, columns = (weights(x.shape[2 + i], size[i], ratios[i]) for i in (0, 1))
    return torch.einsum("oh,nchw,pw->ncop", rows, x.double(), columns)


SIZES = [((9, 11), (4, 5)), ((5, 6), (8, 13)), ((7, 4), (7, 9)), ((1, 3), (4, 2)), ((8, 8), (3, 12)), ((13, 3), (1, 2))]


@pytest.mark.parametrize("bicubic", [False, True])
@pytest.mark.parametrize(("old", "new"), SIZES)
def test_body(old: tuple[int, int], new: tuple[int, int], bicubic: bool) -> None:
    x = torch.randn(2, 3, *old)
    expected = explicit(x, new, bicubic, (old[0] / new[0], old[1] / new[1]))
    mode = "bicubic" if bicubic else "bilinear"
    torch.testing.assert_close(interpolate(x.double(), new, mode=mode, antialias=True), expected)
    for opset in OPSETS:
        for dynamic in (False, True):
            (actual,) = run_op(OP, (x, new, bicubic, False, ()), opset, dynamic=dynamic)
            torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bicubic", [False, True])
def test_scale_factors_and_aligned_corners(bicubic: bool) -> None:
    """A given scale is used as it is, though the size was rounded down."""
    x = torch.randn(1, 2, 10, 7)
    cases = [
        (((), bicubic, False, (9, 20, 13, 10)), (4, 9), (1 / 0.45, 1 / 1.3)),
        (((4, 9), bicubic, True, ()), (4, 9), (9 / 3, 6 / 8)),
        (((4, 9), bicubic, True, (9, 20, 13, 10)), (4, 9), (9 / 3, 6 / 8)),
    ]
    for args, size, ratios in cases:
        expected = explicit(x, size, bicubic, ratios)
        torch.testing.assert_close(OP(x.double(), *args), expected)
        for opset in (9, 11, 20):
            for dynamic in (False, True):
                (actual,) = run_op(OP, (x, *args), opset, dynamic=dynamic)
                torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


def test_empty_batch() -> None:
    (actual,) = run_op(OP, (torch.randn(0, 2, 3, 5), (2, 7), False, False, ()), 11)
    assert actual.shape == (0, 2, 2, 7)


def test_two_products_where_sizes_are_static() -> None:
    model = op_model(OP, (torch.randn(1, 2, 9, 8), (4, 5), True, False, ()), 13)
    assert [node.op_type for node in model.graph.node] == ["MatMul", "MatMul"]


class Resizes(nn.Module):
    """With an old torch TorchScript traces dynamic sizes, and computes one of them in float32."""

    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        half = [size // 2 for size in x.shape[2:]]
        results = {
            "size": F.interpolate(x, size=(4, 3), mode="bilinear", antialias=True),
            "bicubic": F.interpolate(x, size=(4, 3), mode="bicubic", antialias=True),
            "scale": F.interpolate(x, scale_factor=0.45, mode="bilinear", antialias=True),
            "scales": F.interpolate(x, scale_factor=(0.7, 1.6), mode="bicubic", antialias=True),
            "aligned": F.interpolate(x, size=(4, 3), mode="bilinear", antialias=True, align_corners=True),
            "computed": F.interpolate(x, size=half, mode="bicubic", antialias=True),
            "ours": interpolate(x, (5, 9), mode="bilinear", antialias=True),
        }
        if self.recomputed:
            options = {"scale_factor": 0.45, "recompute_scale_factor": True}
            results["recomputed"] = F.interpolate(x, mode="bilinear", antialias=True, **options)
        return results


@pytest.mark.core
@pytest.mark.parametrize("opset", [9, 11, 13, 17, 18, 20])
@pytest.mark.parametrize("dynamic", [False, True])
def test_unedited_models(opset: int, dynamic: bool, tmp_path) -> None:
    shapes = {"x": {0: "n", 2: "h", 3: "w"}} if dynamic else None
    inputs = [(torch.randn(n, 3, h, w),) for n, h, w in ((2, 9, 11), (1, 6, 14), (3, 20, 7))]
    report = check_export(
        Resizes(BOTH_EXPORTERS or not dynamic),
        tmp_path,
        opset,
        *(inputs if dynamic else inputs[:1]),
        dynamic_shapes=shapes,
        tolerance=1e-4,
    )
    assert report.verified
    assert report.nodes["MatMul"] >= 12
    assert "Resize" not in report.nodes


def test_other_modes_are_those_of_torch() -> None:
    x = torch.randn(1, 2, 5, 6)
    for options in ({"size": 3}, {"scale_factor": 1.5, "mode": "bilinear", "align_corners": True}):
        torch.testing.assert_close(interpolate(x, **options), F.interpolate(x, **options))
