"""Three hundred models that take values or sizes out of tensors, as combinations of ways and uses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport
from svexport.exporter.trace import torch_export_first

Way = Callable[[Tensor], float]
VALUES: dict[str, Way] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.mean()),
    "tolist": lambda x: x.flatten().tolist()[0],
    "numpy": lambda x: float(x.detach().numpy().max()),
    "asarray": lambda x: float(np.asarray(x).min()),
    "text": lambda x: float(f"{x.sum():.4f}"),
    "repr": lambda x: float(repr(x.amax().detach()).partition("(")[2].partition(")")[0].partition(",")[0]),
    "argmax": lambda x: float(int(x.flatten().argmax())),
    "norm": lambda x: x.norm().item(),
    "count": lambda x: float((x > 0.5).sum()),
    "found": lambda x: float(x[x > 0.6].numel()),
    "nonzero": lambda x: float(len(torch.nonzero(x > 0.4))),
    "sorted": lambda x: sorted(x.flatten().tolist())[1],
    "in place": lambda x: torch.zeros(3).copy_(x.flatten()[:3]).sum().item(),
    "view": lambda x: x.flatten()[1:].max().item(),
    "unbound": lambda x: float(x.flatten().unbind()[2]),
}
SIZES: dict[str, Way] = {
    "shape": lambda x: float(x.shape[1]),
    "size": lambda x: float(x.size(-1)),
    "len": lambda x: float(len(x[0])),
    "numel": lambda x: float(x.numel() // 3),
    "pooled": lambda x: float(F.max_pool1d(x[None], 2).shape[2]),
    "ratio": lambda x: x.shape[1] / x.shape[0],
    "iterated": lambda x: float(sum(1 for _ in x[0])),
    "chunks": lambda x: float(len(x.split(5, 1))),
    "root": lambda x: math.sqrt(x.shape[1]),
}
USES: dict[str, Callable[[Tensor, float], Any]] = {
    "scale": lambda x, n: x * (n + 2),
    "branch": lambda x, n: x * 2 if n > 3.3 else x * 3,
    "odd": lambda x, n: x * 2 if int(n) % 7 == 3 else x * 3,
    "within": lambda x, n: x + 1 if 4.2 < n < 11.5 else x - 1,
    "slice": lambda x, n: x[:, : max(int(n) % 5, 1)],
    "repeat": lambda x, n: torch.cat([x] * (1 + int(n) % 4), 0),
    "key": lambda x, n: x * {8: 2.0, 12: 5.0}.get(int(n), 1.0),
    "shift": lambda x, n: x.roll(int(n) % 6, 1),
    "power": lambda x, n: x.abs() ** (1 + int(n) % 3),
    "pad": lambda x, n: F.pad(x, (0, int(n) % 3)),
    "steps": lambda x, n: sum(x * k for k in range(1, 2 + int(n) // 4)),
    "capped": lambda x, n: x * min(n, 13.0),
}
COUNTS = [*itertools.product(["found"], ["branch", "capped", "power"]), ("nonzero", "branch"), ("nonzero", "odd")]
"""How many values a mask or ``nonzero`` finds, which only a run with so many of them tells."""

MODELS = [*itertools.product(VALUES, USES), *itertools.product(SIZES, USES)]


class Taking(nn.Module):
    def __init__(self, way: str, use: str) -> None:
        super().__init__()
        self.way, self.use = way, use

    def forward(self, x: Tensor) -> Any:
        return USES[self.use](x, (VALUES | SIZES)[self.way](x))


def inputs(sized: bool) -> list[Tensor]:
    """Of other values, of other sizes, and of both."""
    generator = torch.Generator().manual_seed(3)
    values = [torch.rand(3, 8, generator=generator) * k + b for k, b in ((1, 0), (1, 0.5), (9, -4), (0.01, 0), (40, 0))]
    sizes = (2, 3, 5, 7, 10, 12, 15, 17, 24, 31, 45, 64)
    return values + [torch.rand(3, n, generator=generator) for n in sizes if sized]


def test_there_are_three_hundred() -> None:
    assert len(MODELS) == len({*MODELS}) == 300


@pytest.mark.exhaustive
@pytest.mark.parametrize("opset", [11, 20])
@pytest.mark.parametrize("model", MODELS, ids="-".join)
def test_none_is_wrong(model, opset, tmp_path) -> None:
    check(model, opset, tmp_path)


@pytest.mark.parametrize("model", MODELS[::13], ids="-".join)
def test_some_are_not_wrong(model, tmp_path) -> None:
    check(model, 11 if MODELS.index(model) % 2 else 17, tmp_path)


@pytest.mark.parametrize("opset", [11, 17, 18, 20])
@pytest.mark.parametrize("model", COUNTS, ids="-".join)
def test_how_many_are_found(model, opset, tmp_path) -> None:
    """Refused, with the line."""
    x = torch.rand(3, 8, generator=torch.Generator().manual_seed(2))
    with pytest.raises(svexport.SvexportError, match=r"test_taking\.py:\d+"):
        svexport.export(Taking(*model), x, tmp_path / "m.onnx", opset=opset)
    assert not list(tmp_path.iterdir())


NOT_FINITE: dict[str, Callable[[Tensor], bool]] = {
    "isfinite": lambda x: not math.isfinite(x.sum().item()),
    "isinf": lambda x: any(map(math.isinf, x.flatten().tolist())),
    "isnan": lambda x: bool(np.isnan(x.detach().numpy()).any()),
    "itself": lambda x: (total := float(x.sum())) != total,
    "text": lambda x: "inf" in str(x.detach()),
}


@pytest.mark.parametrize("which", NOT_FINITE)
def test_numbers_that_are_not_finite(which, tmp_path) -> None:
    """Which no tried input has."""

    class Finite(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros_like(x) if NOT_FINITE[which](x) else x * 2

    with pytest.raises(svexport.ExportError, match=r"takes values of x out of tensors[^$]*test_taking\.py:\d+"):
        svexport.export(Finite(), torch.rand(3, 4), tmp_path / "m.onnx", opset=11)


def boxes(x: Tensor) -> Tensor:
    found = x[x[:, 0] > 0.3]
    count, width = found.shape
    assert width == 8, found.shape
    halves = found.reshape(2 * count, 4).unbind(1)
    return torch.stack(halves, 1) * found.shape[0] + torch.zeros(2 * count, 4)


def places(x: Tensor) -> Tensor:
    rows, columns = torch.nonzero(x > 0.3, as_tuple=True)
    if rows.dim() != 1 or columns.size(0) < 0:
        raise ValueError(f"{len(rows)} places")
    return torch.cat([rows, columns]).view(2, -1)[:, : rows.shape[0]]


def logged(x: Tensor) -> Tensor:
    print(f"{x[x > 0.3].shape[0]} found")
    return x * 2


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("function", [boxes, places, logged], ids=lambda f: f.__name__)
def test_sizes_of_what_is_found(function, opset, tmp_path) -> None:
    """A tracer follows them: no good model is refused."""

    class Finding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    x = torch.rand(3, 8, generator=torch.Generator().manual_seed(2))
    with torch_export_first(False):
        assert svexport.export(Finding(), x, tmp_path / "m.onnx", opset=opset).verified
    engine = svexport.load(tmp_path / "m.onnx")
    for other in inputs(sized=False):
        torch.testing.assert_close(engine(other), function(other))


def rows(x: Tensor) -> Tensor:
    return torch.stack([row * 2 for row in x[x[:, 0] > 0.2]]).sum(0)


def ranged(x: Tensor) -> Tensor:
    return sum((x + k for k in range(torch.nonzero(x > 0.3).shape[0])), x)


def capped(x: Tensor) -> Tensor:
    found = x.unique()
    return x * 2 if found.shape[0] > 25 else x * 3


def pairs(x: Tensor) -> Tensor:
    return x * 2 if len(x[x > 0.7]) == len(x[x < 0.1]) + 9 else x * 3


@pytest.mark.parametrize("function", [rows, ranged, capped, pairs], ids=lambda f: f.__name__)
def test_what_follows_from_how_many_are_found(function, tmp_path) -> None:
    class Finding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    x = torch.rand(4, 8, generator=torch.Generator().manual_seed(2))
    with torch_export_first(False), pytest.raises(svexport.SvexportError, match=rf"in {function.__name__}: "):
        svexport.export(Finding(), x, tmp_path / "m.onnx", opset=11)


def check(model: tuple[str, str], opset: int, tmp_path: Path) -> None:
    """Refused, or right on inputs that the export has not seen."""
    way, use = model
    x = torch.rand(3, 8, generator=torch.Generator().manual_seed(2))
    axes = {"x": {1: "n"}} if way in SIZES else None
    try:
        svexport.export(Taking(way, use), x, tmp_path / "m.onnx", opset=opset, dynamic_shapes=axes)
    except svexport.SvexportError:
        assert not list(tmp_path.iterdir())
        return
    engine = svexport.load(tmp_path / "m.onnx")
    for other in inputs(way in SIZES):
        try:
            expected = Taking(way, use)(other)
        except RuntimeError:
            continue
        torch.testing.assert_close(engine(other), expected, rtol=1e-3, atol=1e-3)
