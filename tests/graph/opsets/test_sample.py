"""Sampling at lower opsets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.graph.opsets.nodes import check, node_model


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("target", [19, 15, 11, 9])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize(("mode", "name"), [("bilinear", "linear"), ("nearest", "nearest"), ("bicubic", "cubic")])
@pytest.mark.parametrize("dynamic", [False, True])
def test_images(dynamic: bool, mode: str, name: str, padding: str, target: int) -> None:
    x, grid = draw(2, 3, 5, 6), draw(2, 4, 3, 2)
    wanted = F.grid_sample(torch.from_numpy(x), torch.from_numpy(grid), mode, padding, False).numpy()
    check(
        node_model("GridSample", 20, [x, grid], mode=name, padding_mode=padding, dynamic=dynamic),
        [x, grid],
        target,
        [wanted],
    )


@pytest.mark.parametrize("target", [19, 11, 9])
@pytest.mark.parametrize("name", ["linear", "nearest"])
def test_volumes(name: str, target: int) -> None:
    x, grid = draw(2, 3, 4, 5, 6), draw(2, 4, 3, 2, 3)
    mode = {"linear": "bilinear"}.get(name, name)
    wanted = F.grid_sample(torch.from_numpy(x), torch.from_numpy(grid), mode, align_corners=True).numpy()
    check(node_model("GridSample", 20, [x, grid], mode=name, align_corners=1), [x, grid], target, [wanted])


@pytest.mark.parametrize("target", [19, 11, 9])
@pytest.mark.parametrize("constant", [(), (1,)])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 3, 4, 5, 6)])
def test_affine_grids(size: tuple[int, ...], aligned: bool, constant: tuple[int, ...], target: int) -> None:
    theta = draw(2, len(size) - 2, len(size) - 1)
    inputs = [theta, np.array(size)]
    wanted = F.affine_grid(torch.from_numpy(theta), list(size), aligned).numpy()
    check(node_model("AffineGrid", 20, inputs, align_corners=int(aligned), constant=constant), inputs, target, [wanted])


@pytest.mark.parametrize("target", [18, 11, 9])
def test_deformed_convolutions(target: int) -> None:
    x, weight, bias = draw(2, 4, 7, 6), draw(6, 2, 3, 3), draw(6)
    inputs = [x, weight, draw(2, 36, 4, 3), bias, draw(2, 18, 4, 3)]
    attributes = {"strides": [2, 2], "pads": [1, 1, 1, 1], "group": 2, "offset_group": 2}
    check(node_model("DeformConv", 19, inputs, **attributes), inputs, target)
