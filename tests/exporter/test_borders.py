"""Dynamic sizes in Python's comparisons and counts: both sides are tried; a file with only one branch is refused."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport
from svexport.exporter.followed import Sizes
from svexport.exporter.way import Way
from svexport.tracing.sizes import Size

ALL_OPSETS = pytest.mark.parametrize("opset", [11, 17, 18, 20])
CHUNK = 90
TABLE = {64: 2.0}


def sevenths(x: Tensor) -> Tensor:
    return x * 2 if x.shape[2] % 7 == 0 else x * 3


def nested(x: Tensor) -> Tensor:
    if x.shape[2] > 16:
        return x * 2 if x.shape[2] % 7 == 0 else x * 3
    return x * 3


def pooled(x: Tensor) -> Tensor:
    y = F.max_pool2d(x, 2)
    return y * 2 if y.shape[2] % 11 == 0 else y * 3


def areas(x: Tensor) -> Tensor:
    return x * 2 if x.shape[2] * x.shape[3] >= 1000 else x * 3


def powers(x: Tensor) -> Tensor:
    return x * 2 if x.shape[2] & (x.shape[2] - 1) else x * 3


def aligned(x: Tensor) -> Tensor:
    return x * 2 if (x.shape[3] + 1) // 2 % 12 == 0 else x * 3


def rounded(x: Tensor) -> Tensor:
    return x * math.ceil(x.size(2) / 100)


def steps(x: Tensor) -> Tensor:
    return torch.cat([x[:, :, i : i + CHUNK].sum(2, keepdim=True) for i in range(0, x.shape[2], CHUNK)], 2)


def key(x: Tensor) -> Tensor:
    return x * TABLE.get(x.shape[2], 3.0)


def parts(x: Tensor) -> Tensor:
    return torch.stack([part.amax(2) for part in x.split(70, 2)]).sum(0)


def rows(x: Tensor) -> Tensor:
    return torch.stack([row * 2 for row in x[0, 0]])


def elements(x: Tensor) -> Tensor:
    return x * 2 if x.numel() > 999 else x * 3


def equal(x: Tensor) -> Tensor:
    return x * 2 if x.shape[2:] == x.mT.shape[2:] else x * 3


def far_key(x: Tensor) -> Tensor:
    return x * {512: 2.0, 640: 5.0}.get(x.shape[2], 3.0)


def strides(x: Tensor) -> Tensor:
    return x * 2 if x.stride(1) > 4000 else x * 3


def logarithms(x: Tensor) -> Tensor:
    return x * 2 if math.log2(x.shape[2]) > 9 else x * 3


def both_of_one(x: Tensor) -> Tensor:
    return x * 2 if x.shape[2] % 32 == 0 and x.shape[2] % 5 == 0 else x * 3


def large_powers(x: Tensor) -> Tensor:
    return x * 2 if x.shape[2] & (x.shape[2] - 1) == 0 and x.shape[2] > 300 else x * 3


def listed(x: Tensor) -> Tensor:
    return x * 2 if x.shape[2] in (19, 23) else x * 3


def averaged(x: Tensor) -> Tensor:
    """Of one row the sum is the mean, which says nothing of the other sizes on that side."""
    return x.mean(2) if x.shape[2] > 5 else x.sum(2)


WRONG = [
    averaged,
    sevenths,
    nested,
    pooled,
    areas,
    powers,
    aligned,
    rounded,
    steps,
    key,
    parts,
    rows,
    elements,
    equal,
    listed,
    far_key,
    strides,
    logarithms,
    both_of_one,
    large_powers,
]
SHAPES = [
    (8, 8),
    (512, 2),
    (160, 2),
    (640, 8),
    (9, 5),
    (7, 4),
    (21, 6),
    (22, 9),
    (24, 24),
    (64, 3),
    (101, 2),
    (180, 4),
    (40, 30),
    (1, 1),
    (19, 2),
]


def written(function, path, **options) -> svexport.ExportReport:
    class Sized(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    axes = options.pop("dynamic_shapes", {"x": {2: "h", 3: "w"}})
    return svexport.export(Sized(), torch.rand(1, 2, 8, 8), path, dynamic_shapes=axes, **options)


def assert_right(function, path) -> None:
    for shape in SHAPES:
        x = torch.rand(1, 2, *shape)
        try:
            expected = function(x)
        except RuntimeError:
            continue
        torch.testing.assert_close(svexport.load(path)(x), expected)


@ALL_OPSETS
@pytest.mark.parametrize("function", WRONG, ids=lambda f: f.__name__)
def test_sizes_that_decide(function, opset, tmp_path) -> None:
    """Refused with the line, or right at all sizes."""
    refusal = ""
    try:
        written(function, tmp_path / "m.onnx", opset=opset)
    except svexport.SvexportError as error:
        refusal = str(error)
    if not refusal:
        return assert_right(function, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())
    line = rf"test_borders\.py:\d+ in {function.__name__}|test_borders\.py:\d+: |is to be dynamic|unhashable type: "
    assert re.search(line, refusal) or function in (parts, strides), refusal


def padded(x: Tensor) -> Tensor:
    """As its size says, whatever that is."""
    h, w = x.shape[2:]
    return F.pad(x, (0, (4 - w % 4) % 4, 0, (4 - h % 4) % 4))


def checked(x: Tensor) -> Tensor:
    assert x.shape[2] >= 2, x.shape
    if x.shape[3] > 5000:
        raise ValueError(f"too wide: {x.shape[3]}")
    return x.flatten(2).relu()


def either(x: Tensor) -> Tensor:
    return F.pad(x, (0, 1)) if x.shape[2] > 16 else torch.cat([x, torch.zeros_like(x[..., :1])], 3)


def channels(x: Tensor) -> Tensor:
    """Of a size that is not dynamic, though forward computes it."""
    y = F.avg_pool2d(torch.cat([x, x], 1), 1)
    return y * 2 if y.shape[1] == 4 and y.dim() == 4 else y * 3


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("function", [padded, checked, either, channels], ids=lambda f: f.__name__)
def test_sizes_that_may_decide(function, opset, tmp_path) -> None:
    """No good model is refused."""
    report = written(function, tmp_path / "m.onnx", opset=opset)
    assert report.verified
    assert_right(function, tmp_path / "m.onnx") if function is not checked else None
    both = [note for note in report.notes if note.startswith("compared on both sides (")]
    assert len(both) == (function is either)


def logged(x: Tensor) -> Tensor:
    print(f"{x.shape}", x.shape[2])
    return x * x.sum().item()


def named(x: Tensor) -> Tensor:
    return x * {"h13": 2.0}.get(f"h{x.shape[2]}", 3.0)


@pytest.mark.parametrize("opset", [11, 18])
def test_texts_of_sizes(opset, tmp_path) -> None:
    """A key is what follows from sizes, a print is nothing, and values that torch.export keeps are as they were."""
    assert written(logged, tmp_path / "m.onnx", opset=opset).verified
    assert_right(logged, tmp_path / "m.onnx")
    with pytest.raises(svexport.SvexportError):
        written(named, tmp_path / "n.onnx", opset=opset)


def test_sizes_too_large_to_try(tmp_path) -> None:
    def large(x: Tensor) -> Tensor:
        return x * 2 if x.shape[2] > 3_000_000 else x * 3

    with pytest.raises(svexport.ExportError, match=r"in large: return .*\n.*torch\.export\.Dim\('h', min="):
        written(large, tmp_path / "m.onnx", opset=11)
    assert not list(tmp_path.iterdir())
    bounded = {"x": {2: torch.export.Dim("h", max=100_000), 3: "w"}}
    assert written(large, tmp_path / "m.onnx", opset=11, dynamic_shapes=bounded).verified


def test_numbers_made_of_sizes_are_numbers() -> None:
    x = torch.rand(3, 5)
    sizes = Sizes({"n": 3}, [{0: Size("n", "n")}])

    def forward(x: Tensor) -> None:
        n, m = x.shape
        assert (n + 1, 7 - n, n * 2, n // 2, n % 2, n**2, -n, abs(n), round(n)) == (4, 4, 6, 1, 1, 9, -3, 3, 3)
        assert (n / 2, n * 0.5, math.ceil(n / 2), math.sqrt(n + 1), divmod(n, 2), 2**n) == (1.5, 1.5, 2, 2.0, (1, 1), 8)
        assert (f"{n:02d}", str(n), repr(n), hash(n), [0] * n, int(n / 2)) == ("03", "3", "3", hash(3), [0] * 3, 1)
        assert isinstance(n, int)
        assert type(m) is int
        assert (list(range(n)), bool(n), n == "3") == ([0, 1, 2], True, False)
        assert torch.zeros(n, m).reshape(m, n).shape == (5, 3)
        assert n.bit_length() == 2

    with Way([x], sizes=sizes):
        forward(x)
    assert sizes.turns
    assert all(turn.test(sizes.values) == turn.truth for turn in sizes.turns.values())
    assert any(turn.test({**sizes.values, "n": 8}) != turn.truth for turn in sizes.turns.values())
