from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from svexport.ops.fold import OP, fold
from tests.support import OPSETS, check_export, op_model, run_op

CASES = {  # output size, kernel, dilation, padding, stride
    "sliding": ((5, 7), (3, 3), (1, 1), (1, 1), (1, 1)),
    "blocks": ((6, 8), (2, 4), (1, 1), (0, 0), (2, 4)),
    "gaps": ((8, 9), (2, 2), (1, 1), (0, 0), (3, 3)),
    "not reached": ((7, 9), (2, 3), (1, 1), (0, 1), (2, 3)),
    "dilated": ((9, 8), (3, 2), (2, 3), (2, 0), (2, 1)),
    "one row": ((1, 11), (1, 5), (1, 2), (0, 2), (1, 3)),
    "wide padding": ((3, 3), (5, 5), (1, 1), (3, 4), (2, 3)),
}


def explicit(x: Tensor, size, kernel, dilation, padding, stride) -> Tensor:
    """Every block added at its place, one element at a time."""
    n, rows, _ = x.shape
    counts = [(size[i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in (0, 1)]
    x = x.reshape(n, rows // (kernel[0] * kernel[1]), *kernel, *counts)
    output = x.new_zeros(n, x.shape[1], size[0] + 2 * padding[0], size[1] + 2 * padding[1])
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            for r in range(counts[0]):
                for c in range(counts[1]):
                    place = r * stride[0] + i * dilation[0], c * stride[1] + j * dilation[1]
                    output[:, :, place[0], place[1]] += x[:, :, i, j, r, c]
    return output[:, :, padding[0] : padding[0] + size[0], padding[1] : padding[1] + size[1]]


def blocks(case: str, n: int = 2, channels: int = 3) -> Tensor:
    size, kernel, dilation, padding, stride = CASES[case]
    return F.unfold(torch.randn(n, channels, *size, dtype=torch.float64), kernel, dilation, padding, stride)


@pytest.mark.parametrize("case", CASES)
def test_body_adds_every_block(case: str) -> None:
    torch.manual_seed(0)
    x = torch.randn_like(blocks(case))
    expected = explicit(x, *CASES[case])
    torch.testing.assert_close(fold(x, *CASES[case]), expected)
    for opset in OPSETS:
        for dynamic in (False, True):
            (actual,) = run_op(OP, (x.float(), *CASES[case]), opset, dynamic=dynamic)
            torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_body_is_one_convolution() -> None:
    model = op_model(OP, (blocks("sliding").float(), *CASES["sliding"]), 17)
    assert [node.op_type for node in model.graph.node] == ["Reshape", "ConvTranspose", "Reshape"]


class Folds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fold = nn.Fold((5, 7), 3, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        blocks = F.unfold(x, 3, padding=1)
        return {
            "module": self.fold(blocks),
            "function": F.fold(blocks * 2, (5, 7), (3, 3), padding=1),
            "unbatched": F.fold(blocks[0], (5, 7), 3, padding=1),
            "windows": F.fold(F.unfold(x, (2, 3), stride=(2, 3)), (5, 7), (2, 3), stride=(2, 3)),
        }


class AnySize(nn.Module):
    """The average of overlapping windows, for images of any size."""

    def forward(self, x: Tensor) -> list[Tensor]:
        size = x.shape[-2:]
        blocks = F.unfold(x, 3, dilation=1, padding=1, stride=2)
        return [F.fold(blocks, size, 3, padding=1, stride=2)]


@pytest.mark.core
@pytest.mark.parametrize("opset", [11, 13, 17, 18, 20])
def test_unedited_models(opset: int, tmp_path) -> None:
    images = [torch.randn(n, 2, 5, 7) for n in (2, 1, 5)]
    shapes = {"x": {0: "n"}} if opset != 13 else None
    others = [(x,) for x in images[1:]] if shapes else []
    report = check_export(Folds(), tmp_path, opset, images[:1] and (images[0],), *others, dynamic_shapes=shapes)
    assert report.verified
    assert "Col2Im" not in report.nodes  # TensorRT has none


@pytest.mark.parametrize("opset", [11, 17, 18])
def test_dynamic_output_size(opset: int, tmp_path) -> None:
    shapes = {"x": {0: "n", 2: "h", 3: "w"}}
    others = [(torch.randn(3, 2, h, w),) for h, w in ((5, 8), (9, 4), (12, 12))]
    check_export(AnySize(), tmp_path, opset, (torch.randn(2, 2, 6, 7),), *others, dynamic_shapes=shapes)


def test_opset_9_without_unfold(tmp_path) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return [F.fold(x, (5, 6), (2, 3), stride=(1, 3))]

    check_export(Model(), tmp_path, 9, (torch.randn(2, 12, 8),))
