"""Regions and boxes at lower opsets."""

from __future__ import annotations

import numpy as np
import pytest

from svexport import UnsupportedError
from tests.graph.opsets.backend import run
from tests.graph.opsets.nodes import check, converted, node_model


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("target", [15, 11, 9])
@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("coordinates", ["half_pixel", "output_half_pixel"])
def test_regions(coordinates: str, mode: str, target: int) -> None:
    x = draw(2, 3, 12, 10)
    rois = np.array([[0, 0, 20, 15], [5, 2, 5.2, 2.1], [-9, -9, 50, 60], [8, 8, 3, 3]], np.float32)
    inputs = [x, rois, np.array([0, 1, 1, 0])]
    attributes = {"output_height": 3, "output_width": 2, "sampling_ratio": 2, "spatial_scale": 0.5}
    model = node_model("RoiAlign", 16, inputs, mode=mode, coordinate_transformation_mode=coordinates, **attributes)
    check(model, inputs, target, run(model, inputs))


def test_samples_of_unknown_number_are_refused() -> None:
    inputs = [draw(1, 2, 4, 4), np.array([[0, 0, 2, 2]], np.float32), np.array([0])]
    with pytest.raises(UnsupportedError, match="the number of samples depends on the size of each region"):
        converted(node_model("RoiAlign", 16, inputs), 15)


@pytest.mark.parametrize("limit", [0, 3, 100])
@pytest.mark.parametrize("least", [None, 0.4])
@pytest.mark.parametrize("centred", [0, 1])
@pytest.mark.parametrize("overlap", [0.0, 0.3, 0.9])
def test_suppression(overlap: float, centred: int, least: float | None, limit: int) -> None:
    random = np.random.default_rng(0)
    boxes = random.random((2, 30, 4), np.float32)
    boxes[:, 10:20] = boxes[:, :10] + 0.02 * random.random((2, 10, 4), np.float32)
    boxes[0, 5] = boxes[0, 6]  # one twice
    scores = random.random((2, 3, 30), np.float32)
    inputs = [boxes, scores, np.array([limit]), np.array([overlap], np.float32)]
    inputs += [] if least is None else [np.array([least], np.float32)]
    check(node_model("NonMaxSuppression", 11, inputs, center_point_box=centred), inputs, 9, tolerance=0)
