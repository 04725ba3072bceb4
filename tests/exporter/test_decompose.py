"""Functions that the TorchScript exporter does not know, exported as their decompositions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport
from svexport.exporter.trace import torch_export_first

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Call(nn.Module):
    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(x)


# Which of torch's own decompositions fix sizes, is theirs to say; ours do not.
OURS = {
    "acosh": lambda x: torch.acosh(1 + x.abs()),
    "asinh": lambda x: torch.asinh(x),
    "atanh": lambda x: torch.atanh(x.tanh() / 2),
    "bitwise_and": lambda x: torch.where(torch.bitwise_and(x > -1, x < 1), x, 0.0),
    "bitwise_xor": lambda x: torch.where(torch.bitwise_xor(x > -1, x < 1), x, 0.0),
    "channel_shuffle": lambda x: F.channel_shuffle(x[..., None, None], 2),
    "cosh": lambda x: torch.cosh(x),
    "cummax": lambda x: (x * 2).round().cummax(1),
    "cummin": lambda x: x.cummin(0),
    "cummax_of_integers": lambda x: (x * 2).long().cummax(0),
    "erfc": lambda x: torch.erfc(x),
    "exp2": lambda x: torch.exp2(x),
    "expm1": lambda x: torch.expm1(x),
    "frac": lambda x: torch.frac(x * 3),
    "hypot": lambda x: torch.hypot(x, x + 1),
    "index_reduce": lambda x: (
        x.index_reduce(1, torch.tensor([2, 0, 2]), x[:, :3] * 2, "amax", include_self=False),
        x.clone().index_reduce_(1, torch.tensor([2, 0, 2]), x[:, :3], "prod"),
    ),
    "isclose": lambda x: torch.isclose(x, x.round(), atol=0.3).float(),
    "isin": lambda x: torch.isin((x * 2).long(), torch.tensor([1, -1])).float(),
    "kthvalue": lambda x: (*x.kthvalue(2), torch.kthvalue(x, 3, 0, keepdim=True).values),
    "masked_select": lambda x: torch.masked_select(x, x[:1] > 0),
    "median": lambda x: x.median(),
    "median_of_rows": lambda x: (*x.median(1), x.median(0, keepdim=True).values),
    "outer": lambda x: torch.outer(x[0], x[:, 1]),
    "pdist": lambda x: (F.pdist(x), torch.pdist(x * 2, 1.0), F.pdist(x, float("inf"))),
    "repeat_interleave": lambda x: x[x[:, 0] > -9].repeat_interleave(2, dim=0),
    "repeat_interleave_by_a_size": lambda x: x.repeat_interleave(x.shape[0], dim=1),
    "searchsorted": lambda x: torch.searchsorted(x[0].sort().values, x / 2),
    "searchsorted_from_the_right": lambda x: torch.searchsorted((x * 2).round().sort().values, x.round(), side="right"),
    "sinh": lambda x: torch.sinh(x),
    "stacks": lambda x: (
        torch.hstack([x, x * 2]),
        torch.hstack([x[0], x[0, 0], x[:, 1]]),
        torch.vstack([x, x[0]]),
        torch.dstack((x, x + 1)),
        torch.column_stack([x[:, 0], x]),
    ),
    "trunc": lambda x: torch.trunc(x * 3),
}
POOLS = {
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x[None], 3),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x[None, None], (2, 3)),
    "adaptive_avg_pool2d_to_more": lambda x: F.adaptive_avg_pool2d(x[None], (5, 7)),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x.reshape(1, 1, 3, 2, 2), (2, 1, 2)),
}
TORCH = {
    "addcdiv": lambda x: torch.addcdiv(x, x, x + 9),
    "count_nonzero": lambda x: torch.count_nonzero(x),
    "diag_embed": lambda x: torch.diag_embed(x),
    "diagonal": lambda x: x.diagonal() + 1,
    "diff": lambda x: torch.diff(x),
    "fliplr": lambda x: torch.fliplr(x),
    "huber_loss": lambda x: F.huber_loss(x, x * 2),
    "kron": lambda x: torch.kron(x, x),
    "logaddexp": lambda x: torch.logaddexp(x, x + 1),
    "quantile": lambda x: x.quantile(0.3, 1),
    "rad2deg": lambda x: torch.rad2deg(x),
    "rms_norm": nn.RMSNorm(4),
    "rot90": lambda x: x.rot90(1),
    "slice_scatter": lambda x: x.slice_scatter(x[:2] * 2, 0, 0, 2),
    "take_along_dim": lambda x: torch.take_along_dim(x, x.argsort(1), 1),
    "tensordot": lambda x: torch.tensordot(x, x, ([1], [1])),
    "tensordot_of_the_last": lambda x: torch.tensordot(x.view(1, 3, 4), x, 2),
    "xlogy": lambda x: torch.xlogy(x, x.abs() + 1),
}


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("name", [*OURS, *POOLS, *TORCH])
def test_static(name, opset, tmp_path) -> None:
    model = Call({**OURS, **POOLS, **TORCH}[name])
    assert svexport.export(model, X, tmp_path / "m.onnx", opset=opset).verified


@pytest.mark.parametrize("name", OURS)
def test_ours_with_dynamic_sizes(name, tmp_path) -> None:
    report = svexport.export(Call(OURS[name]), X, tmp_path / "m.onnx", opset=13, dynamic_axes={"x": {0: "rows"}})
    assert report.verified
    assert any(p.run == "rows=4" for p in report.parity)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("name", ["cdist", "index_reduce", "kthvalue", "masked_select", "pdist", "searchsorted"])
def test_opset_18(name: str, rows: bool, tmp_path) -> None:
    """What the other exporter does not know either."""
    functions = {**OURS, "cdist": lambda x: (torch.cdist(x, x[:2] + 1), torch.cdist(x[None], x[None] * 2, 1.0))}
    axes = {"x": {0: "rows"}} if rows else None
    assert svexport.export(Call(functions[name]), X, tmp_path / "m.onnx", opset=18, dynamic_axes=axes).verified


def test_average_pooling_of_windows_that_differ_is_matrix_products(tmp_path) -> None:
    with torch_export_first(False):
        report = svexport.export(Call(POOLS["adaptive_avg_pool2d_to_more"]), X, tmp_path / "m.onnx")
    assert report.nodes["MatMul"] == 2
    assert not {"Gather", "Loop", "Slice"} & set(report.nodes)


@pytest.mark.parametrize("opset", [11, 17])
def test_sizes_of_a_trace(opset: int, tmp_path) -> None:
    """The tracer leaves numbers of a call for the kernel under the name of an argument: with one of Python, the next
    function with an argument of that name got them, and an assertion of torch's failed, in later exports too."""

    class Pyramid(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            height, width = x.shape[2:]
            pooled = F.adaptive_avg_pool2d(x, (height // 3, width // 2))
            narrow = F.interpolate(x, scale_factor=0.4, mode="area")
            return F.interpolate(pooled, (height, width)), F.interpolate(narrow, x.shape[2:], mode="bilinear")

    assert svexport.export(Pyramid(), torch.randn(1, 2, 11, 7), tmp_path / "m.onnx", opset=opset).verified
    assert svexport.export(
        Call(lambda x: F.interpolate(x[None, None], (x.shape[0] * 2, 7))), X, opset=opset, path=tmp_path / "n.onnx"
    ).verified


def test_torch_is_left_as_it_was(tmp_path) -> None:
    def traced() -> list[str]:
        graph = torch.jit.trace(Call(OURS["outer"]), X, check_trace=False).inlined_graph
        return [node.kind() for node in graph.nodes()]

    before = traced()
    svexport.export(Call(OURS["outer"]), X, tmp_path / "m.onnx")
    assert traced() == before
    assert "aten::outer" in before


def test_no_decomposition(tmp_path) -> None:
    with pytest.raises(svexport.ExportError, match=r"lgamma(?s:.*)at opset 11|opset 11(?s:.*)lgamma"):
        svexport.export(Call(lambda x: torch.lgamma(x.abs())), X, tmp_path / "m.onnx")  # made of itself only
    assert not list(tmp_path.iterdir())


@pytest.mark.core
@pytest.mark.parametrize("opset", [11, 17, 18])
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: torch.linalg.cholesky(x), "linalg_cholesky"),
        (lambda x: torch.linalg.svd(x)[1], "linalg_svd"),
        (lambda x: torch.linalg.qr(x)[1], "linalg_qr"),
    ],
)
def test_factorizations_are_at_no_opset(function, name: str, opset: int, tmp_path) -> None:
    with pytest.raises(
        svexport.ExportError, match=rf"{name}(?s:.*)test_decompose.py:\d+ in (?s:.*)no matrix factorization"
    ):
        svexport.export(Call(function), torch.eye(3) + 1, tmp_path / "m.onnx", opset=opset)
    assert not list(tmp_path.iterdir())


def test_scripted_code_keeps_its_functions(tmp_path) -> None:
    class Scripted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.hypot(x[0], x[1])

    with pytest.raises(svexport.ExportError, match=r"aten::hypot cannot be exported at opset 11"):
        svexport.export(torch.jit.script(Scripted()), X, tmp_path / "m.onnx")
