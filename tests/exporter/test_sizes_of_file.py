"""Sizes that a forward computes in floats: the file gives the same as Python at every size, or is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport
from svexport.exporter.followed import Sizes
from svexport.exporter.rounded import nearest_unlike
from svexport.exporter.sizes_of_file import SizesOfFile, unlike
from svexport.exporter.trace import torch_export_first
from svexport.exporter.way import Way

SIZES = [*range(2, 132), 200, 300, 700, 999, 1000]
OPSETS = [11, 17, 20]


class Sized(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def to(size: Callable[[int], int]) -> Callable[[Tensor], Tensor]:
    """The first elements, as many as a size says."""
    return lambda x: x[..., : size(x.shape[-1])]


def written(function, path, opset: int, width: int = 12, **options) -> svexport.ExportReport:
    options = {"dynamic_shapes": {"x": {2: "w"}}} | options
    return svexport.export(Sized(function), torch.randn(2, 3, width), path, opset=opset, **options)


def assert_right(function, path) -> None:
    engine = svexport.load(path)
    for size in SIZES:
        x = torch.randn(2, 3, size)
        torch.testing.assert_close(engine(x), function(x), rtol=1e-3, atol=1e-3, msg=lambda m, n=size: f"{n}: {m}")


RIGHT = {
    "int": to(lambda n: int(n * 0.7)),
    "a sum of products": to(lambda n: int(n * 0.1 + n * 0.5)),
    "twice": to(lambda n: int(int(n * 0.9) * 0.8)),
    "half to even": to(lambda n: round(n / 2)),
    "half up": to(lambda n: int(n / 2 + 0.5)),
    "thirds, up": to(lambda n: math.ceil(n / 3)),
    "less than zero, down": to(lambda n: math.floor(-n / 3)),
    "less than zero, to zero": to(lambda n: int(-n * 0.3)),
    "less than zero, half to even": to(lambda n: round(-n * 0.5)),
    "of a square": to(lambda n: int(n**2 * 0.01)),
    "of a root": to(lambda n: int(math.sqrt(n * 3))),
    "steps": lambda x: torch.arange(0, x.shape[-1], 0.7),
    "steps down": lambda x: torch.arange(x.shape[-1], 0, -0.3),
    "steps to a float": lambda x: torch.arange(0.1, x.shape[-1] / 10, 0.1),
    "steps in double": lambda x: torch.arange(0, x.shape[-1], 0.1, dtype=torch.float64),
    "steps from a float": lambda x: torch.arange(0.5, x.shape[-1]) / x.shape[-1],
    "pixels": lambda x: F.interpolate(x, size=math.ceil(x.shape[-1] * 0.6), mode="nearest"),
    "padding": lambda x: F.pad(x, (0, math.ceil(x.shape[-1] / 8) * 8 - x.shape[-1])),
    "a window": lambda x: F.avg_pool1d(x, 2, 3, 0, ceil_mode=True),
}


@pytest.mark.parametrize("opset", [11, 20])
@pytest.mark.parametrize("function", RIGHT.values(), ids=RIGHT)
def test_right_at_every_size(function, opset, tmp_path) -> None:
    assert written(function, tmp_path / "m.onnx", opset).verified
    assert_right(function, tmp_path / "m.onnx")


OTHERS = {
    "one product": to(lambda n: int(n * 0.7 * 0.1 * 10)),  # torch.export multiplies the numbers first
    "a share": lambda x: torch.arange(0, 1, 1 / x.shape[-1]),
    "a quotient": to(lambda n: int(n // 1.1)),
    "an end": lambda x: torch.arange(0, x.shape[-1] * 0.1, 0.1),
}


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("first", [True, False], ids=["torch.export", "TorchScript"])
@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS)
def test_another_order_or_type(function, first, opset, tmp_path) -> None:
    """Right at every size, or refused with the line."""
    refusal = ""
    try:
        with torch_export_first(first):
            written(function, tmp_path / "m.onnx", opset)
    except svexport.SvexportError as error:
        refusal = str(error)
    if refusal:
        assert "test_sizes_of_file.py:" in refusal
        assert not list(tmp_path.iterdir())
    else:
        assert_right(function, tmp_path / "m.onnx")


def test_refusal_names_the_line_and_what_to_write(tmp_path) -> None:
    with pytest.raises(svexport.VerificationError, match=r"rounds a float computed from dynamic sizes(.|\n)*\* 10\)"):
        written(OTHERS["one product"], tmp_path / "m.onnx", 20)


# ---------------------------------------------------------------- scripted code, whose sizes Python does not see


@torch.jit.script
def shrunk(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=0.7, mode="linear", align_corners=False)


@torch.jit.script
def enlarged(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=1.5, mode="linear", align_corners=False)


@torch.jit.script
def of_seven(x: Tensor) -> Tensor:
    return F.interpolate(x, size=7, mode="nearest")


@torch.jit.script
def of_eight(x: Tensor) -> Tensor:
    return F.interpolate(x, size=8, mode="linear", align_corners=False)


class Scripted(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()

        class Calling(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return function(x)

        self.function = torch.jit.script(Calling())

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) + 1


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("function", [shrunk, of_seven], ids=["factor", "nearest"])
def test_resize_that_is_not_torchs(function, opset, tmp_path) -> None:
    options = {"opset": opset, "dynamic_shapes": {"x": {2: "w"}}}
    with pytest.raises(svexport.ExportError, match=r"F\.interpolate .* of a dynamic size"):
        svexport.export(Scripted(function), torch.randn(2, 3, 12), tmp_path / "m.onnx", **options)
    assert not list(tmp_path.iterdir())
    # Of another dynamic size it is no other.
    options["dynamic_shapes"] = {"x": {0: "n"}}
    assert svexport.export(Scripted(function), torch.randn(2, 3, 12), tmp_path / "m.onnx", **options).verified


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("function", [enlarged, of_eight], ids=["factor", "linear"])
def test_resize_that_is_torchs(function, opset, tmp_path) -> None:
    model = Scripted(function)
    options = {"opset": opset, "dynamic_shapes": {"x": {2: "w"}}}
    assert svexport.export(model, torch.randn(2, 3, 12), tmp_path / "m.onnx", **options).verified
    assert_right(model, tmp_path / "m.onnx")


@pytest.mark.parametrize("opset", [11, 17])
def test_nearest_pixels_of_what_torchscript_traces(opset, tmp_path) -> None:
    """Of 14, Resize to 8 takes another pixel than torch, of 12 and the sizes that are tried of every model none."""

    def resized(x: Tensor) -> Tensor:
        return F.interpolate(x, size=x.shape[-1] // 2 + 1, mode="nearest")

    with torch_export_first(False), pytest.raises(svexport.VerificationError, match="on w=14 inputs"):
        written(resized, tmp_path / "m.onnx", opset)


# ---------------------------------------------------------------- the parts


def test_nearest_unlike_is_what_onnxruntime_does() -> None:
    """Where it says that there is no difference there is none, and some where it says so."""
    info = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node(
        *("Resize", ["x", "", "", "size"], ["y"]),
        mode="nearest",
        nearest_mode="floor",
        coordinate_transformation_mode="asymmetric",
    )
    inputs = [info("x", 1, [1, 1, None]), info("size", 7, [3])]
    graph = onnx.helper.make_graph([node], "resize", inputs, [info("y", 1, None)])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    seen = set()
    for old in range(1, 60):
        for new in range(1, 60):
            x = torch.arange(float(old))[None, None]
            (found,) = session.run(None, {"x": x.numpy(), "size": np.array([1, 1, new])})
            same = torch.equal(torch.from_numpy(found), F.interpolate(x, size=new, mode="nearest"))
            assert same or nearest_unlike(old, new), (old, new)
            seen.add((same, nearest_unlike(old, new)))
    assert (False, True) in seen
    assert (True, False) in seen


def test_sizes_of_file(tmp_path) -> None:
    """Only what depends on sizes runs: no convolution, and no division by what may be zero."""

    def function(x: Tensor) -> Tensor:
        y = F.conv1d(x, torch.ones(3, 3, 3), padding=1)
        return y[..., : int(x.shape[-1] * 0.35)] * (100 // (x.shape[-1] - 3))

    written(function, tmp_path / "m.onnx", 20)
    x = torch.randn(2, 3, 12)
    file = SizesOfFile(tmp_path / "m.onnx", ["x"], [x], lambda roots: [[2, 3, roots["w"]]])
    found = [file.at({"w": n}) for n in (3, 20, 40, 60, 1000)]
    assert len({len(numbers) for numbers in found}) == 1
    assert [7, 14, 21, 350] in [list(column)[1:] for column in zip(*found, strict=True)]


def test_unlike() -> None:
    sizes, python = [10, 20, 30, 90], [7, 14, 21, 62]
    assert list(unlike(sizes, python, [[10, 7], [20, 14], [30, 21], [90, 63]])) == [90]
    assert not list(unlike(sizes, python, [[7, 7], [14, 14], [21, 21], [62, 63]]))  # one is the same
    assert not list(unlike(sizes, python, [[1, 2], [1, 2], [1, 2], [1, 2]]))  # none is meant to be
    assert not list(unlike(sizes, python, [[]] * 4))


def test_what_is_rounded_is_noted() -> None:
    x = torch.randn(2, 12)
    sizes = Sizes({"w": 12}, [{}])

    def forward(x: Tensor) -> None:
        n = sizes.size(12, ("step", 0), 1)
        int(n * 0.7), n // 5, round(n / 8, 1), (n * 1.5) // 1, int(n), range(n)
        torch.arange(0, n, 0.5), torch.arange(n), torch.arange(0, 3, 0.5)

    with Way([x], sizes=sizes):
        forward(x)
    at = dict.fromkeys(sizes.values, 21)
    noted = [(rounding.before(at), rounding.after(at)) for rounding in sizes.roundings.values()]
    assert noted == [(21 * 0.7, 14), (21 / 8, 2.6), (31.5, 31), (42.0, 42)]
