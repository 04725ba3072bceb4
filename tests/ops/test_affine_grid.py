from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from svexport.ops.affine_grid import OP, affine_grid
from tests.support import OPSETS, check_export, run_op

SIZES = [(2, 3, 5, 7), (1, 1, 1, 1), (3, 1, 1, 4), (2, 4, 6, 1), (2, 1, 3, 4, 5), (1, 2, 1, 1, 3), (2, 3, 2, 1, 1)]


def explicit(theta: Tensor, size: tuple[int, ...], align_corners: bool) -> Tensor:
    """Coordinates of pixel centres in [-1, 1], one point at a time."""
    spatial = size[2:]
    output = theta.new_empty(size[0], *spatial, len(spatial))
    for place in torch.cartesian_prod(*map(torch.arange, spatial)).reshape(-1, len(spatial)).tolist():
        point = []
        for i, steps in zip(place, spatial, strict=True):
            if steps == 1:
                point.append(0.0)
            else:
                point.append(2 * i / (steps - 1) - 1 if align_corners else (2 * i + 1) / steps - 1)
        homogeneous = theta.new_tensor([*reversed(point), 1.0])  # x, the last dimension, first
        output[(slice(None), *place)] = theta @ homogeneous
    return output


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_body(size: tuple[int, ...], align_corners: bool) -> None:
    dims = len(size) - 2
    theta = torch.randn(size[0], dims, dims + 1, dtype=torch.float64)
    expected = explicit(theta, size, align_corners)
    torch.testing.assert_close(affine_grid(theta, size, align_corners), expected)
    for opset in OPSETS:
        for dynamic in (False, True):
            (actual,) = run_op(OP, (theta.float(), size, align_corners), opset, dynamic=dynamic)
            torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


def test_half_keeps_columns_apart() -> None:
    theta = torch.tensor([[[1.0, 0, 0], [0, 1, 0]]]).half()
    expected = explicit(theta.double(), (1, 1, 1, 3000), False)
    for actual in (OP(theta, (1, 1, 1, 3000), False), *run_op(OP, (theta, (1, 1, 1, 3000), False), 11)):
        assert actual.dtype == torch.float16
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=5e-4)


class Transformer(nn.Module):
    """A spatial transformer: the sizes come from the image, the constants of others are their own."""

    def forward(self, image: Tensor, theta: Tensor) -> dict[str, Tensor]:
        n, c, h, w = image.shape
        return {
            "of image": F.affine_grid(theta, image.size(), align_corners=False),
            "aligned": F.affine_grid(theta, image.size(), align_corners=True),
            "larger": F.affine_grid(theta, [n, c, 2 * h, w + 1], align_corners=False),
            "constant": F.affine_grid(theta[:1], (1, 1, 3, 5), align_corners=True),
            "default": F.affine_grid(theta, [n, 1, 4, w]),
            "volume": F.affine_grid(
                torch.stack([theta[:, 0], theta[:, 1], theta[:, 0]], 1)[..., [0, 1, 2, 2]], [n, c, 3, h, w]
            ),
        }


@pytest.mark.core
@pytest.mark.filterwarnings("ignore:Default grid_sample")
@pytest.mark.parametrize("opset", [9, 11, 13, 17, 18, 20])
@pytest.mark.parametrize("dynamic", [False, True])
def test_unedited_models(opset: int, dynamic: bool, tmp_path) -> None:
    shapes = {"image": {0: "n", 2: "h", 3: "w"}, "theta": {0: "n"}} if dynamic else None
    inputs = [(torch.randn(n, 3, h, w), torch.randn(n, 2, 3)) for n, h, w in ((2, 4, 6), (3, 7, 2), (1, 5, 1))]
    report = check_export(
        Transformer(), tmp_path, opset, *(inputs if dynamic else inputs[:1]), dynamic_shapes=shapes, verify=False
    )
    assert not {"AffineGrid", "SvAffineGrid"} & report.nodes.keys()


@pytest.mark.parametrize("opset", [11, 17])
def test_with_grid_sample(opset: int, tmp_path) -> None:
    class Model(nn.Module):
        def forward(self, image: Tensor, theta: Tensor) -> list[Tensor]:
            grid = F.affine_grid(theta, image.shape, align_corners=False)
            return [F.grid_sample(image, grid, align_corners=False)]

    theta = torch.tensor([[[0.8, -0.3, 0.1], [0.3, 0.8, -0.2]]]).repeat(2, 1, 1)
    report = check_export(Model(), tmp_path, opset, (torch.randn(2, 3, 6, 5), theta), tolerance=1e-4)
    assert report.nodes["SvGridSample"] == 1
