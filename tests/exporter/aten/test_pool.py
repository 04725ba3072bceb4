"""Adaptive pools: windows of one size, of different sizes, and more windows than pixels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import svexport
from tests.exporter.aten import agrees, exported

TRACED = [(11, True), (11, False), (17, True), (20, True)]
"""Opset, and whether torch.export traces below 18."""

LARGEST = {
    "1d": ((3, 13), (5,), 1),
    "2d": ((2, 3, 7, 11), (3, 4), 2),
    "2d_no_batch": ((3, 7, 11), (5, 7), 2),
    "2d_alike_but_overlapping": ((1, 2, 7, 9), (3, 4), 2),
    "2d_to_more": ((1, 2, 3, 4), (5, 7), 2),
    "2d_one_axis": ((1, 2, 6, 11), (3, 4), 2),
    "3d": ((1, 2, 5, 7, 3), (2, 3, 2), 3),
}


@pytest.mark.parametrize(("opset", "first"), TRACED)
@pytest.mark.parametrize("name", LARGEST)
def test_largest_and_its_place(name: str, opset: int, first: bool, tmp_path) -> None:
    shape, output_size, axes = LARGEST[name]
    pool = getattr(F, f"adaptive_max_pool{axes}d")
    function = lambda x: pool(x, output_size, return_indices=True)  # noqa: E731
    exported(function, torch.randn(shape), tmp_path, opset, first)
    for x in (torch.randn(shape), torch.randint(-1, 2, shape).float(), torch.zeros(shape), -torch.ones(shape)):
        agrees(tmp_path, function, x)  # ties: the first of a window


@pytest.mark.parametrize(("opset", "first"), TRACED)
def test_windows_that_differ_are_gathered_once(opset: int, first: bool, tmp_path) -> None:
    report = exported(lambda x: F.adaptive_max_pool2d(x, (5, 4)), torch.randn(1, 3, 12, 16), tmp_path, opset, first)
    assert report.lowered_nodes == {"Gather": 1, "MaxPool": 1}


@pytest.mark.parametrize(("opset", "first"), TRACED)
def test_dynamic_batch(opset: int, first: bool, tmp_path) -> None:
    def function(x):
        return F.adaptive_max_pool2d(x, (5, 4)), F.adaptive_max_pool2d(x, (3, 1))

    exported(function, torch.randn(2, 3, 12, 7), tmp_path, opset, first, dynamic_shapes={"x": {0: "b"}})
    for batch in (1, 2, 5):
        agrees(tmp_path, function, torch.randn(batch, 3, 12, 7))


@pytest.mark.parametrize(("opset", "first"), TRACED)
def test_mean_of_overlapping_windows_is_a_pool(opset: int, first: bool, tmp_path) -> None:
    """3 windows of 3 pixels from 7, 4 of 3 from 9."""
    x = torch.randn(1, 2, 7, 9)
    report = exported(lambda x: F.adaptive_avg_pool2d(x, (3, 4)), x, tmp_path, opset, first)
    assert report.lowered_nodes == {"AveragePool": 1}


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize(
    ("kind", "size"),
    [(kind, size) for kind in ("avg", "max") for size in ((7, 7), (1, 1), (1, 4), (9, 40))] + [("avg", (3, None))],
)
def test_dynamic_height_and_width(size: tuple, kind: str, opset: int, tmp_path) -> None:
    def function(x):
        return getattr(F, f"adaptive_{kind}_pool2d")(x, size)

    axes = {"x": {2: "h", 3: "w"}}
    report = exported(function, torch.randn(1, 2, 20, 23), tmp_path, opset, True, dynamic_shapes=axes)
    if size == (1, 1):
        assert "MatMul" not in report.nodes
        assert report.nodes.get("Gather", 0) == (kind == "avg")  # of the sizes: the mean of nothing is NaN
    engine = svexport.load(tmp_path / "m.onnx")
    for height, width in [(7, 7), (1, 3), (13, 5), *torch.randint(1, 80, (12, 2)).tolist()]:
        x = torch.randn(1, 2, height, width)
        torch.testing.assert_close(engine(x), function(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("opset", "first"), TRACED)
def test_rows_of_a_dynamic_length(opset: int, first: bool, tmp_path) -> None:
    def function(x):
        more = F.max_pool1d(x, 3, 2, 1, ceil_mode=True), torch.max_pool1d(x, 2, 3, dilation=2)
        return F.max_pool1d(x, 3), *more, torch.nn.MaxPool1d(2)(x[0]), F.max_pool1d(x, 3, 2, return_indices=True)[0]

    exported(function, torch.randn(2, 3, 9), tmp_path, opset, first, dynamic_shapes={"x": {2: "n"}})
    for length in (3, 4, 5, 6, 10, 31):
        agrees(tmp_path, function, torch.randn(2, 3, length))


@pytest.mark.parametrize("size", [(1, 1), (3, 4)])
def test_places_of_the_largest_with_a_dynamic_height(size: tuple, tmp_path) -> None:
    """Ties too: the first of a window, row after row."""

    def function(x):
        return F.adaptive_max_pool2d(x, size, return_indices=True)

    exported(function, torch.randn(2, 3, 10, 11), tmp_path, 17, True, dynamic_shapes={"x": {2: "h"}})
    for height in (3, 10, 17):
        for x in (torch.randn(2, 3, height, 11), torch.randint(-1, 2, (2, 3, height, 11)).float()):
            agrees(tmp_path, function, x)


def test_volume_of_dynamic_depth(tmp_path) -> None:
    def function(x):
        return F.adaptive_avg_pool3d(x, (2, 3, 2)), F.adaptive_max_pool3d(x, (2, 3, 2))

    exported(function, torch.randn(1, 2, 5, 7, 3), tmp_path, 11, True, dynamic_shapes={"x": {2: "d"}})
    engine = svexport.load(tmp_path / "m.onnx")
    for depth in (2, 5, 9):
        x = torch.randn(1, 2, depth, 7, 3)
        for actual, expected in zip(engine(x), function(x), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


WHOLE = {
    "mean": lambda x: F.avg_pool2d(x, x.size()[2:]),
    "mean of one axis": lambda x: F.avg_pool2d(x, (x.size(2), 1), stride=(3, 1)),
    "mean of a row": lambda x: F.avg_pool1d(x[..., 0], x.shape[2]),
    "mean of a volume": lambda x: F.avg_pool3d(x, (1, *x.shape[2:])),
    "largest": lambda x: F.max_pool2d(x, kernel_size=x.shape[-2:]),
    "largest of one axis": lambda x: F.max_pool2d(x, (x.size(2), 1), stride=1),
    "largest of a row": lambda x: F.max_pool1d(x[..., 0], x.shape[2]),
    "largest of a volume": lambda x: F.max_pool3d(x, (1, x.size(2), x.size(3))),
}


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize("name", WHOLE)
def test_windows_of_a_dynamic_size(name: str, opset: int, tmp_path) -> None:
    """As the last pool of ST-GCN; the size of the window is that of a tensor which a convolution has made smaller."""

    class Pooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 4, (3, 1), (2, 1), (1, 0))

        def forward(self, x):
            return WHOLE[name](self.conv(x))

    model = Pooled().eval()
    report = svexport.export(
        model, torch.randn(2, 3, 11, 5), tmp_path / "m.onnx", opset=opset, dynamic_shapes={"x": {0: "n", 2: "t"}}
    )
    assert report.verified
    engine = svexport.load(tmp_path / "m.onnx")
    for shape in ((1, 3, 7, 5), (5, 3, 26, 5)):
        x = torch.randn(shape)
        torch.testing.assert_close(engine(x), model(x), rtol=1e-5, atol=1e-5)


def test_windows_of_known_sizes_stay_pools(tmp_path) -> None:
    def function(x):
        return F.avg_pool2d(x, x.size()[2:]), F.max_pool2d(x, (x.size(2), 1), stride=1), F.max_pool2d(x, 2)

    report = exported(function, torch.randn(2, 3, 6, 4), tmp_path, 11, True)
    assert report.lowered_nodes == {"AveragePool": 1, "MaxPool": 2}
