"""Resize at lower opsets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from svexport import UnsupportedError
from tests.graph.opsets.backend import run
from tests.graph.opsets.nodes import check, converted, node_model

UP, DOWN = ((6, 7), (12, 14)), ((6, 7), (9, 5))


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def sized(
    old: tuple[int, ...], new: tuple[int, ...], by: str, roi: np.ndarray | None = None
) -> list[np.ndarray | None]:
    """The inputs of a Resize of images."""
    x = draw(2, 3, *old)
    if by == "scales":
        return [x, roi, np.array([1, 1, *(n / o for n, o in zip(new, old, strict=True))], np.float32)]
    return [x, roi, None, np.array([2, 3, *new])]


def resize(inputs: list[np.ndarray | None], dynamic: bool = False, opset: int = 19, **attributes: Any) -> Any:
    return node_model("Resize", opset, inputs, constant=(1, 2, 3), dynamic=dynamic, **attributes)


COORDINATES = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"]


@pytest.mark.parametrize("target", [18, 11, 10, 9])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("by", ["scales", "sizes"])
@pytest.mark.parametrize("sizes", [UP, DOWN])
@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_modes(mode: str, coordinates: str, sizes: tuple, by: str, dynamic: bool, target: int) -> None:
    inputs = sized(*sizes, by)
    nearest = "round_prefer_floor" if coordinates == "half_pixel" else "floor"
    attributes = {"mode": mode, "coordinate_transformation_mode": coordinates, "nearest_mode": nearest}
    check(resize(inputs, dynamic, **attributes), inputs, target)


@pytest.mark.parametrize("target", [17, 11, 9])
@pytest.mark.parametrize("nearest", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
@pytest.mark.parametrize("sizes", [UP, DOWN, ((1, 3), (3, 1)), ((8, 6), (4, 3))])
def test_nearest(sizes: tuple, nearest: str, target: int) -> None:
    inputs = sized(*sizes, "sizes")
    check(resize(inputs, mode="nearest", nearest_mode=nearest), inputs, target)


@pytest.mark.parametrize("target", [17, 11, 9])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_antialias(mode: str, dynamic: bool, target: int) -> None:
    inputs = sized(*DOWN, "scales")
    check(resize(inputs, dynamic, mode=mode, antialias=1), inputs, target)


def test_antialias_says_nothing_of_what_grows() -> None:
    inputs = sized(*UP, "scales")
    result = check(resize(inputs, mode="linear", antialias=1), inputs, 13)
    assert [node.op_type for node in result.graph.node] == ["Resize"]


@pytest.mark.parametrize("target", [13, 9])
@pytest.mark.parametrize("sizes", [UP, DOWN])
def test_weights_outside(sizes: tuple, target: int) -> None:
    inputs = sized(*sizes, "sizes")
    check(resize(inputs, mode="cubic", exclude_outside=1, cubic_coeff_a=-0.5), inputs, target)


@pytest.mark.parametrize("target", [17, 10])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_regions(mode: str, target: int) -> None:
    inputs = sized(*UP, "sizes", roi=np.array([0, 0, 0.1, 0.2, 1, 1, 0.8, 1.1], np.float32))
    attributes = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 7.0}
    check(resize(inputs, mode=mode, **attributes), inputs, target)


@pytest.mark.parametrize("target", [17, 11, 9])
@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("size", [(9, 9), (4, 11)])
def test_aspect_ratios(size: tuple[int, int], dynamic: bool, policy: str, target: int) -> None:
    inputs = [draw(2, 3, 6, 7), None, None, np.array(size)]
    check(resize(inputs, dynamic, mode="linear", axes=[2, 3], keep_aspect_ratio_policy=policy), inputs, target)


@pytest.mark.parametrize("target", [17, 13, 9])
@pytest.mark.parametrize("axes", [[2, 3], [3, 2], [-1]])
def test_axes(axes: list[int], target: int) -> None:
    inputs = [draw(2, 3, 6, 7), None, np.array([1.5, 2, 3][: len(axes)], np.float32)]
    check(resize(inputs, mode="linear", axes=axes), inputs, target)


@pytest.mark.parametrize("target", [17, 11, 9])
def test_sizes_that_the_run_decides(target: int) -> None:
    inputs = [draw(2, 3, 6, 7), None, None, np.array([2, 3, 9, 5])]
    check(node_model("Resize", 19, inputs, dynamic=True, mode="linear"), inputs, target)


@pytest.mark.parametrize("by", ["scales", "sizes"])
def test_what_upsample_can_stays_one_node(by: str) -> None:
    inputs = sized(*UP, by)
    attributes = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    for target, op_type in ((11, "Resize"), (10, "Resize"), (9, "Upsample")):
        result = check(resize(inputs, mode="nearest", **attributes), inputs, target)
        assert [node.op_type for node in result.graph.node] == [op_type]


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float16])
def test_types(dtype: type) -> None:
    x = (np.arange(2 * 3 * 5 * 7) % 100).reshape(2, 3, 5, 7).astype(dtype)
    inputs = [x, None, None, np.array([2, 3, 8, 9])]
    expected = None
    if dtype == np.float16:
        single = [x.astype(np.float32), *inputs[1:]]
        expected = [run(resize(single, mode="nearest"), single[:1])[0].astype(dtype)]
    check(resize(inputs, mode="nearest"), inputs, 9, expected)


def test_pixels_that_are_not_finite_stay_where_they_are() -> None:
    inputs = sized(*UP, "sizes")
    assert inputs[0] is not None
    inputs[0][0, 0, 2, 3] = -np.inf
    check(resize(inputs, mode="linear", antialias=1), inputs, 9)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("sizes", [UP, DOWN, ((8, 6), (4, 3))])
def test_the_first_resize(sizes: tuple, dynamic: bool, mode: str) -> None:
    x, _, scales = sized(*sizes, "scales")
    check(node_model("Resize", 10, [x, scales], constant=(1,), dynamic=dynamic, mode=mode), [x, scales], 9)


def test_unknown_ranks_are_refused() -> None:
    model = resize(sized(*UP, "sizes"), mode="cubic")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    with pytest.raises(UnsupportedError, match=r"\(Resize\) cannot be written below opset 11: the rank of its input"):
        converted(model, 9)
