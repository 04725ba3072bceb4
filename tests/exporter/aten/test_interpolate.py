"""``F.interpolate`` by factors and to sizes: for every size, as many pixels as in torch, with the same values."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport
from tests.exporter.aten import exported

FACTORS = [0.5, 0.7, 1 / 3, 1.04, 1.3, 1.5, 2.0, 2.7, 3.3, (0.7, 2.7), (1.3, 0.5)]
AXES = {"x": {2: "h", 3: "w"}}


def made_as_by_torch(path, function, sizes, tolerance, channels=2):
    engine = svexport.load(path / "m.onnx")
    for height, width in sizes:
        x = torch.randn(1, channels, height, width)
        actual, expected = engine(x), function(x)
        assert actual.shape == expected.shape, (height, width)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=f"{height}x{width}")


def sizes_of(count: int) -> list[tuple[int, int]]:
    """90, 170 and 180, of which 0.7 are one pixel less in double than in float32, and any others."""
    known = [(90, 20), (170, 3), (180, 90), (2, 180), (3, 3), (10, 90), (29, 28)]
    return known + torch.randint(2, 200, (count, 2)).tolist()


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic", "area"])
def test_factors_of_dynamic_sizes(mode: str, factor, opset: int, tmp_path) -> None:
    def function(x):
        return F.interpolate(x, scale_factor=factor, mode=mode)

    exported(function, torch.randn(1, 2, 20, 23), tmp_path, opset, True, dynamic_shapes=AXES)
    tolerance = 0 if mode.startswith("nearest") else 2e-4 if mode == "bicubic" else 1e-4
    least = 4 if min(factor if isinstance(factor, tuple) else (factor,)) < 0.5 else 2
    sizes = [(max(h, least), max(w, least)) for h, w in sizes_of(12)]
    made_as_by_torch(tmp_path, function, sizes, tolerance)


@pytest.mark.parametrize("options", [{"recompute_scale_factor": True}, {"align_corners": True}])
@pytest.mark.parametrize("opset", [11, 20])
def test_factors_that_only_say_the_size(options: dict[str, bool], opset: int, tmp_path) -> None:
    def function(x):
        return F.interpolate(x, scale_factor=(1.3, 0.7), mode="bilinear", **options)

    exported(function, torch.randn(1, 2, 20, 23), tmp_path, opset, True, dynamic_shapes=AXES)
    made_as_by_torch(tmp_path, function, sizes_of(20), 1e-4)


@pytest.mark.parametrize("factor", [0.7, 1.3, 2.7, 1 / 3])
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_factors_of_static_sizes(mode: str, factor: float, tmp_path) -> None:
    """90 rows; 3 columns, which stay 3."""

    def function(x):
        return F.interpolate(x, scale_factor=factor, mode=mode)

    exported(function, torch.randn(1, 2, 90, 3), tmp_path, 11, True)
    made_as_by_torch(tmp_path, function, [(90, 3)], 0 if mode == "nearest" else 1e-4)


def test_short_factors_stay_one_node(tmp_path) -> None:
    for mode in ("bilinear", "nearest", "bicubic"):
        for factor in (0.5, 2.0, 4.0):
            report = exported(
                lambda x: F.interpolate(x, scale_factor=factor, mode=mode),  # noqa: B023 - called at once
                torch.randn(1, 2, 20, 23),
                tmp_path,
                18,
                True,
                dynamic_shapes=AXES,
            )
            assert report.nodes == {"Resize": 1}


@pytest.mark.parametrize("channels", [2, 5])
def test_pixels_that_stay_as_many(channels: int, tmp_path) -> None:
    """torch copies them in one of its kernels, small images and those with channels last, and not in the other."""

    def function(x):
        return F.interpolate(x, scale_factor=1.04)

    x = torch.randn(1, channels, 20, 23)
    exported(function, x, tmp_path, 18, True, dynamic_shapes=AXES)
    made_as_by_torch(tmp_path, function, [(20, 20), (24, 100), (24, 105), (12, 118), (3, 130)], 0, channels)
    exported(function, x.contiguous(memory_format=torch.channels_last), tmp_path, 18, True, dynamic_shapes=AXES)
    engine = svexport.load(tmp_path / "m.onnx")
    for size in ((20, 20), (24, 105), (12, 140)):
        given = torch.randn(1, channels, *size).contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(engine(given), function(given), rtol=0, atol=0)


@pytest.mark.parametrize("opset", [11, 18])
def test_bicubic_pixels_that_stay_as_many(opset: int, tmp_path) -> None:
    """torch moves them by the factor; ONNX Runtime copies an image of which both sizes stay."""

    def function(x):
        return F.interpolate(x, scale_factor=1.1, mode="bicubic")

    exported(function, torch.randn(1, 2, 48, 64), tmp_path, opset, True, dynamic_shapes=AXES)
    made_as_by_torch(tmp_path, function, [(5, 5), (9, 9), (2, 7), (9, 10), (1, 1), (48, 64)], 1e-4)
    x = torch.randn(1, 2, 6, 8)
    exported(function, x, tmp_path, opset, True)
    made_as_by_torch(tmp_path, function, [(6, 8)], 1e-4)


@pytest.mark.parametrize(
    ("shape", "mode"), [((2, 3, 90), "linear"), ((2, 3, 90), "nearest"), ((1, 2, 5, 9, 4), "trilinear")]
)
def test_lines_and_volumes(shape: tuple[int, ...], mode: str, tmp_path) -> None:
    def function(x):
        return F.interpolate(x, scale_factor=0.7, mode=mode)

    exported(function, torch.randn(shape), tmp_path, 11, True, dynamic_shapes={"x": {2: "n"}})
    engine = svexport.load(tmp_path / "m.onnx")
    for length in (4, 10, 90, 97, 170):
        x = torch.randn(*shape[:2], length, *shape[3:])
        torch.testing.assert_close(engine(x), function(x), rtol=1e-4, atol=1e-4)


def test_half(tmp_path) -> None:
    class Up(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.interpolate(x, scale_factor=1.3, mode="bilinear")

    x = torch.randn(1, 2, 9, 90).half()
    report = svexport.export(Up(), x, tmp_path / "m.onnx", opset=17, dynamic_shapes={"x": {3: "w"}})
    engine = svexport.load(report.path)
    for width in (3, 90, 170):
        x = torch.randn(1, 2, 9, width).half()
        torch.testing.assert_close(engine(x), Up()(x), rtol=2e-3, atol=2e-3)


# ------------------------------------------------------------------ numbers that Python computes of sizes


NUMBERS = {
    "times 0.7": lambda h: int(h * 0.7),
    "times 0.7 and again": lambda h: int(h * 0.7 * 0.3),
    "a third": lambda h: int(h / 3),
    "a third up": lambda h: math.ceil(h / 3),
    "a part of 49, all": lambda h: math.floor(h / 49 * 49) + 1,
    "halves": lambda h: int(h * 1.5),
    "halves and a quarter": lambda h: math.ceil(h * 0.5 + 0.25),
    "rounded": lambda h: round(h * 0.7),
    "rounded halves": lambda h: round(h / 2),
    "up of less than nothing": lambda h: math.ceil((3 - h) / 2) + 500,
    "towards zero": lambda h: int((3 - h) / 2) + 500,
    "of a difference": lambda h: int((h - 0.5) * 0.3),
    "of an integer division": lambda h: h // 2.5,
    "as a float": lambda h: float(h) * 0.7,
    "a power": lambda h: int(h**0.5),
    "padding to 32": lambda h: math.ceil(h / 32) * 32,
    "a quotient of sizes": lambda h: int((h + 1) / h * 64),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("opset", [11, 18])
def test_numbers_are_doubles(name: str, opset: int, tmp_path) -> None:
    number = NUMBERS[name]

    def function(x):
        return x.new_ones(int(number(x.shape[0])) + 1).cumsum(0) + x.sum() * 0

    exported(function, torch.randn(37), tmp_path, opset, True, dynamic_shapes={"x": {0: "n"}})
    engine = svexport.load(tmp_path / "m.onnx")
    for n in [2, 3, 10, 49, 90, 98, 170, 180, *torch.randint(4, 400, (40,)).tolist()]:
        torch.testing.assert_close(engine(torch.zeros(n)), function(torch.zeros(n)), rtol=0, atol=0, msg=f"{n}")


def test_numbers_go_into_tensors(tmp_path) -> None:
    def function(x):
        h = x.shape[0]
        return x * (h * 0.7) + h / 3 - int(h * 0.7) * 0.1, x.half() * (h * 0.5), x * (h % 1.7) + (3 - h) % 7.5

    exported(function, torch.randn(37), tmp_path, 17, True, dynamic_shapes={"x": {0: "n"}})
    engine = svexport.load(tmp_path / "m.onnx")
    for n in (2, 10, 90, 1000):
        x = torch.randn(n)
        for actual, expected in zip(engine(x), function(x), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
