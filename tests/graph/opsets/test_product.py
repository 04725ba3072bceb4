"""Products at lower opsets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from svexport import UnsupportedError
from tests.graph.opsets.backend import run
from tests.graph.opsets.nodes import check, converted, node_model


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("target", [11, 9])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("nkctv,kvw->nctw", [(2, 3, 4, 5, 6), (3, 6, 6)]),
        ("...ij,...jk", [(2, 3, 4), (2, 4, 5)]),
        ("bii->b", [(2, 3, 3)]),
        ("i,j,k->kij", [(2,), (3,), (4,)]),
        ("ij->", [(2, 3)]),
    ],
)
def test_einsum(equation: str, shapes: list[tuple[int, ...]], dynamic: bool, target: int) -> None:
    inputs = [draw(*shape) for shape in shapes]
    wanted = np.asarray(torch.einsum(equation, *map(torch.from_numpy, inputs)).numpy())
    check(node_model("Einsum", 12, inputs, equation=equation, dynamic=dynamic), inputs, target, [wanted])


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_determinants(n: int) -> None:
    x = draw(4, n, n)
    x[1] = np.eye(n)[::-1]  # every pivot is elsewhere
    x[2, :, 0] = 0  # no pivot
    check(node_model("Det", 11, [x]), [x], 9, [np.linalg.det(x).astype(np.float32)])


def test_determinants_of_unknown_size_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="its matrices have a size that is not static"):
        converted(node_model("Det", 11, [draw(2, 3, 3)], dynamic=True), 9)


def test_gemm_without_a_sum() -> None:
    inputs = [draw(2, 3), draw(3, 4)]
    check(node_model("Gemm", 13, inputs, alpha=0.5), inputs, 9, [0.5 * inputs[0] @ inputs[1]])


def integers(dtype: type, *shape: int) -> np.ndarray:
    info = np.iinfo(dtype)
    return np.random.default_rng(sum(shape)).integers(info.min, info.max, shape, dtype, endpoint=True)


@pytest.mark.parametrize("each", [False, True])
def test_integer_matrices(each: bool) -> None:
    a, b = integers(np.uint8, 3, 400), integers(np.int8, 400, 5)
    zeros = [integers(np.uint8, 3), integers(np.int8, 5)] if each else [np.uint8(7), np.int8(-3)]
    inputs = [a, b, *map(np.asarray, zeros)]
    left = a.astype(np.int32) - (inputs[2].astype(np.int32)[:, None] if each else 7)
    right = b.astype(np.int32) - inputs[3].astype(np.int32)
    check(node_model("MatMulInteger", 10, inputs), inputs, 9, [left @ right], tolerance=0)


@pytest.mark.parametrize(("channels", "group"), [(4, 1), (70, 1), (8, 2)])
def test_integer_convolutions(channels: int, group: int) -> None:
    """The sums of 70 channels are larger than float32 holds exactly."""
    x, w = integers(np.uint8, 2, channels, 5, 6), integers(np.uint8, 4, channels // group, 3, 3)
    x[0], w[0] = 255, 255
    inputs = [x, w, np.array(0, np.uint8), np.array(1, np.uint8)]
    t = [torch.from_numpy(v.astype(np.float64)) for v in (x, w.astype(np.float64) - 1)]
    wanted = torch.nn.functional.conv2d(*t, padding=1, stride=2, groups=group).numpy().astype(np.int32)
    attributes = {"pads": [1] * 4, "strides": [2, 2], "group": group}
    check(node_model("ConvInteger", 10, inputs, **attributes), inputs, 9, [wanted], tolerance=0)


def test_quantized_convolutions() -> None:
    x, w = integers(np.uint8, 1, 4, 5, 6), integers(np.uint8, 3, 4, 3, 3)
    scale, zero = np.array(0.02, np.float32), np.array(120, np.uint8)
    inputs = [x, scale, zero, w, scale, zero, np.array(0.3, np.float32), zero, np.arange(-3, 6, 3, dtype=np.int32) * 99]
    model = node_model("QLinearConv", 10, inputs, pads=[1] * 4)
    check(model, inputs, 9, run(model, inputs), tolerance=0)
