from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport.ops.scatter_reduce import OP, REDUCTIONS, scatter_add, scatter_reduce
from tests.support import OPSETS, check_export, run_op


def explicit(x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, include_self: bool) -> Tensor:
    """Collects what falls on each position, then reduces it."""
    found: dict[tuple, list] = {}
    for place in itertools.product(*map(range, index.shape)):
        target = list(place)
        target[dim] = int(index[place])
        found.setdefault(tuple(target), []).append(src[place].item())
    output = x.clone()
    for target, values in found.items():
        values = [x[target].item()] * include_self + values
        reduced = {
            "sum": sum,
            "prod": math.prod,
            "amax": max,
            "amin": min,
            "mean": lambda v: sum(v) // len(v) if not x.is_floating_point() else sum(v) / len(v),
        }[reduce](values)
        output[target] = reduced
    return output


SHAPES = {  # of the input, the index and the source, and the dimension
    "rows": ((5, 3), (9, 3), (9, 3), 0),
    "columns": ((3, 4), (3, 7), (3, 7), 1),
    "middle": ((2, 5, 3), (2, 8, 3), (2, 8, 3), 1),
    "vector": ((4,), (6,), (6,), 0),
    "longer source": ((4, 3), (5, 3), (7, 4), 0),
    "one": ((1, 1), (3, 1), (3, 1), 0),
}


def problem(name: str, dtype: torch.dtype) -> tuple[Tensor, int, Tensor, Tensor]:
    torch.manual_seed(len(name))
    shape, index_shape, src_shape, dim = SHAPES[name]
    values = [torch.randn(s, dtype=torch.float64) * 3 for s in (shape, src_shape)]
    x, src = (v.to(dtype) for v in values)
    return x, dim, torch.randint(shape[dim], index_shape), src


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_duplicates_at_every_opset(reduce: str, include_self: bool) -> None:
    for name in SHAPES:
        x, dim, index, src = problem(name, torch.float64)
        expected = explicit(x, dim, index, src, reduce, include_self)
        torch.testing.assert_close(scatter_reduce(x, dim, index, src, reduce, include_self=include_self), expected)
        args = (x.float(), dim, index, src.float(), REDUCTIONS.index(reduce), include_self)
        for opset in OPSETS:
            for dynamic in (False, True):
                (actual,) = run_op(OP, args, opset, dynamic=dynamic)
                torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("opset", [9, 11, 16, 18])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float16, torch.float64, torch.int8])
def test_types(dtype: torch.dtype, opset: int) -> None:
    x, dim, index, src = problem("columns", dtype)
    for reduce, include_self in itertools.product(REDUCTIONS, (True, False)):
        if dtype == torch.int8 and reduce == "prod":
            continue  # overflows
        (actual,) = run_op(OP, (x, dim, index, src, REDUCTIONS.index(reduce), include_self), opset)
        assert actual.dtype == dtype
        if dtype == torch.float16:
            expected = explicit(x.double(), dim, index, src.double(), reduce, include_self)
            torch.testing.assert_close(actual.double(), expected, rtol=2e-3, atol=2e-3)
        else:
            torch.testing.assert_close(actual, explicit(x, dim, index, src, reduce, include_self))


@pytest.mark.parametrize("opset", [9, 11, 16, 18])
def test_infinite_sources_stay_where_they_belong(opset: int) -> None:
    """A product with a matrix of zeros and ones would spread NaN."""
    x, index, src = torch.zeros(3), torch.tensor([0, 2, 2]), torch.tensor([torch.inf, 1.0, 2.0])
    assert run_op(OP, (x, 0, index, src, 0, True), opset)[0].tolist() == [torch.inf, 0, 3]


class Scatters(nn.Module):
    def forward(self, x: Tensor, index: Tensor, src: Tensor) -> dict[str, Tensor]:
        return {
            "scatter_add": x.scatter_add(1, index, src),
            "in place": (x + 1).scatter_add_(-1, index, src),
            "function": torch.scatter_add(x, 1, index, src * 2),
            **{f"{r}": x.scatter_reduce(1, index, src, r) for r in REDUCTIONS},
            **{f"{r} alone": x.scatter_reduce(1, index, src, r, include_self=False) for r in REDUCTIONS},
            "add": torch.scatter(x, 1, index, src, reduce="add"),
            "multiply": (x * 2).scatter_(1, index, src, reduce="multiply"),
            "overwrite": x.scatter(1, index[:, :1], src[:, :1]),
            "fill": x.scatter(1, index, 3.5),
            "counts": torch.zeros_like(x, dtype=torch.int64).scatter_add(1, index, torch.ones_like(index)),
            "ours": scatter_add(x, 1, index, src) + scatter_reduce(x, 1, index, src, "amax"),
        }


def inputs(rows: int, columns: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    index = torch.randint(4, (rows, columns), generator=generator)
    index[:, 1] = index[:, 0]  # a duplicate in every row
    return torch.randn(rows, 4, generator=generator), index, torch.randn(rows, columns, generator=generator)


@pytest.mark.core
@pytest.mark.parametrize("opset", [9, 11, 13, 15, 16, 17, 18, 20])
def test_unedited_models(opset: int, tmp_path) -> None:
    shapes = (
        {name: {0: "n", 1: "m"} for name in ("index", "src")} | {"x": {0: "n"}} if opset in (9, 13, 16, 20) else None
    )
    others = [inputs(2, 9), inputs(5, 2)] if shapes else []
    report = check_export(Scatters(), tmp_path, opset, inputs(3, 7), *others, dynamic_shapes=shapes)
    assert report.verified
    assert "SvScatterReduce" not in report.nodes


class Single(nn.Module):
    """Tensors without dimensions count as of one element."""

    def forward(self, x: Tensor, index: Tensor, src: Tensor) -> dict[str, Tensor]:
        return {
            "all": x.scatter_add(0, index, src),
            "source": x[None].scatter_add(-1, index[None], src),
            "index": x[None].scatter_reduce(0, index, src, "amax", include_self=False),
            "input": x.scatter_reduce(0, index[None], src[None], "mean"),
        }


@pytest.mark.parametrize("opset", [9, 11, 16, 18, 20])
def test_tensors_without_dimensions(opset: int, tmp_path) -> None:
    args = (torch.randn(()), torch.tensor(0), torch.randn(()))
    check_export(Single(), tmp_path, opset, args)


@pytest.mark.parametrize("opset", [11, 15])
def test_what_would_take_too_much_is_refused(opset: int, tmp_path) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, index: Tensor, src: Tensor) -> Tensor:
            return x.scatter_add(0, index, src)

    many = torch.zeros(10_000, dtype=torch.int64)
    with pytest.raises(svexport.ExportError, match="opset=16"):
        svexport.export(Model(), (torch.zeros(10_000), many, many.float()), tmp_path / "m.onnx", opset=opset)
    x, index = torch.zeros(4, 3), torch.zeros(2, 1, dtype=torch.int64)  # does not reach the other columns
    with pytest.raises(svexport.ExportError, match="opset=16"):
        svexport.export(Model(), (x, index, torch.ones(2, 1)), tmp_path / "m.onnx", opset=opset)
    assert not list(tmp_path.iterdir())
    check_export(_Listed(Model()), tmp_path, 16, (x, index, torch.ones(2, 1)))


class _Listed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, index: Tensor, src: Tensor) -> list[Tensor]:
        return [self.model(x, index, src)]


@pytest.mark.parametrize("opset", [9, 13])
def test_shapes_that_turn_out_not_to_fit_are_an_error(opset: int, tmp_path) -> None:
    """Where sizes are dynamic, an index for a part of the rows must not be spread over all of them."""

    class Model(nn.Module):
        def forward(self, x: Tensor, index: Tensor, src: Tensor) -> Tensor:
            return x.scatter_add(1, index, src)

    shapes = {"x": {0: "n"}, "index": {0: "m"}, "src": {0: "m"}}
    args = (torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
    report = svexport.export(Model(), args, tmp_path / "m.onnx", opset=opset, dynamic_shapes=shapes, verify=False)
    engine = svexport.load(report.path)
    torch.testing.assert_close(engine(*args), Model()(*args))
    with pytest.raises(svexport.SvexportError, match=r"index: \[1, 2\].*dimensions must match"):
        engine(args[0], args[1][:1], args[2][:1])
