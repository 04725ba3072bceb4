"""Randomly drawn slices, splits, pads and shapes at lower opsets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import svexport
from svexport import UnsupportedError
from tests.graph.opsets.nodes import check, node_model

LOWER = (17, 12, 10, 9)


def number(low: int, high: int) -> int:
    return int(torch.randint(low, high, ()))


@pytest.mark.parametrize("dynamic", [False, True])
def test_slices(dynamic: bool) -> None:
    x = torch.randn(3, 7, 5).numpy()
    made = 0
    for _ in range(40):
        axes = torch.randperm(3)[: number(1, 4)].tolist()
        steps = [number(1, 4) * (1 if number(0, 2) else -1) for _ in axes]
        bounds = [(number(-9, 10), number(-9, 10)) for _ in axes]
        if dynamic:
            steps = [1] * len(axes)
        axes = [axis - 3 * number(0, 2) for axis in axes]
        lists = [np.array(each) for each in (*zip(*bounds, strict=True), axes, steps)]
        model = node_model("Slice", 20, [x, *lists], constant=range(1, 5), dynamic=dynamic)
        expected = x
        for axis, step, (start, end) in zip(axes, steps, bounds, strict=True):
            size = x.shape[axis]
            start, end = (bound + size if bound < 0 else bound for bound in (start, end))
            top = size if step > 0 else size - 1
            low = 0 if step > 0 else -1
            places = range(min(max(start, 0), top), min(max(end, low), top), step)
            expected = np.take(expected, list(places), axis)
        for opset in LOWER:
            check(model, [x, *lists], opset, [expected])
            made += 1
    assert made == 160


@pytest.mark.parametrize("size", [4, 5, 7])
@pytest.mark.parametrize("dynamic", [False, True])
def test_parts_of_a_number(size: int, dynamic: bool) -> None:
    x = torch.randn(2, size).numpy()
    model = node_model("Split", 20, [x], outputs=2, axis=-1, num_outputs=2, dynamic=dynamic)
    half = (size + 1) // 2
    for opset in LOWER[: 3 if dynamic else 4]:
        check(model, [x], opset, [x[:, :half], x[:, half:]])


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge", "wrap"])
def test_pads(mode: str) -> None:
    x = torch.randn(2, 4, 5).numpy()
    for _ in range(10):
        pads = [number(0, 4) for _ in range(4)]
        given = [x, np.array(pads), np.array(7.5, np.float32) if mode == "constant" else None, np.array([-1, 1])]
        model = node_model("Pad", 20, given, constant=(1, 2, 3), mode=mode)
        widths = [(0, 0), (pads[1], pads[3]), (pads[0], pads[2])]
        options = {"constant_values": 7.5} if mode == "constant" else {}
        for opset in LOWER:
            check(model, given, opset, [np.pad(x, widths, mode=mode, **options)])  # type: ignore[call-overload]


def test_pads_of_large_integers() -> None:
    x = np.array([[2**60 + 1, -3]])
    given = [x, np.array([1, 0, 0, 2]), np.array(2**62 + 1)]
    for dynamic in (False, True):
        model = node_model("Pad", 20, given, constant=(1, 2), dynamic=dynamic)
        check(model, given, 9, [np.pad(x, [(1, 0), (0, 2)], constant_values=2**62 + 1)])


@pytest.mark.parametrize("opset", [13, 11, 9])
def test_shapes_of_real_zeros(opset: int) -> None:
    x = np.zeros((0, 6), np.float32)
    model = node_model("Reshape", 20, [x, np.array([3, 0, 4])], constant=[1], allowzero=1)
    check(model, [x], opset, [x.reshape(3, 0, 4)])
    kept = node_model("Reshape", 20, [np.ones((2, 6), np.float32), np.array([0, 3, -1])], constant=[1])
    check(kept, [np.ones((2, 6), np.float32)], opset, [np.ones((2, 3, 2), np.float32)])


@pytest.mark.parametrize(("start", "end"), [(0, None), (1, None), (-2, None), (0, -1), (1, 2), (5, 9), (-9, 1)])
def test_parts_of_a_shape(start: int, end: int | None) -> None:
    x = torch.randn(2, 3, 4).numpy()
    bounds = {"start": start} if end is None else {"start": start, "end": end}
    for dynamic in (False, True):
        model = node_model("Shape", 20, [x], dynamic=dynamic, **bounds)
        for opset in (14, 9):
            check(model, [x], opset, [np.array([2, 3, 4][start:end], np.int64)])


@pytest.mark.parametrize(("start", "limit", "step"), [(0, 5, 1), (5, 0, -2), (3, 3, 1), (4, 1, 1), (0.5, 2.25, 0.5)])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.float32])
def test_ranges(start: float, limit: float, step: float, dtype: type) -> None:
    given = [np.array(x, dtype) for x in (start, limit, step)]
    if not given[2]:  # 0.5 as an integer
        pytest.skip("a step of zero")
    expected = np.arange(*(x.item() for x in given)).astype(dtype)
    for constant in ((), (0, 1, 2)):
        if constant == ():
            check(node_model("Range", 20, given), given, 9, [expected])
        else:
            with_input = node_model("Range", 20, given, constant=(0, 2))
            check(with_input, given, 9, [expected])


def test_what_only_numbers_can_say_is_refused() -> None:
    x = torch.randn(2, 3).numpy()
    model = node_model("ReduceMax", 20, [x, np.array([1])])
    with pytest.raises(UnsupportedError, match="cannot be written below opset 18: its axes are computed"):
        svexport.convert(model, 17)


@pytest.mark.parametrize("opset", LOWER)
@pytest.mark.parametrize(("dilation", "padding", "stride"), [(None, None, None), (2, 1, 1), (1, 0, 2)])
def test_columns_to_an_image(dilation: int | None, padding: int | None, stride: int | None, opset: int) -> None:
    """``fold``, with attributes and with what they are where they are absent."""
    given = {"dilation": dilation, "padding": padding, "stride": stride}
    given = {name: value for name, value in given.items() if value is not None}
    image, block = (7, 9), (2, 3)
    positions = torch.nn.functional.unfold(torch.zeros(1, 1, *image), block, **given).shape[-1]
    x = torch.randn(2, 3 * 2 * 3, positions)
    expected = torch.nn.functional.fold(x, image, block, **given).numpy()
    names = {"dilation": "dilations", "padding": "pads", "stride": "strides"}
    attributes = {names[name]: [value] * (4 if name == "padding" else 2) for name, value in given.items()}
    inputs = [x.numpy(), np.array(image), np.array(block)]
    check(node_model("Col2Im", 18, inputs, constant=(1, 2), **attributes), inputs, opset, [expected])
