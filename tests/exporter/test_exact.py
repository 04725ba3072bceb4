"""Functions at extremes: NaN, infinities, zeros of both signs, negative and large numbers, and empty tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport
from svexport.exporter.trace import torch_export_first

OPSETS = [11, 13, 17, 18, 20, 23]
INF, NAN = float("inf"), float("nan")


class Functions(nn.Module):
    """All of a table, by name."""

    def __init__(self, functions: dict[str, Callable[..., object]]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, *inputs: Tensor) -> dict[str, object]:
        return {name: function(*inputs) for name, function in self.functions.items()}


def hold(functions: dict[str, Callable[..., object]], tame: tuple, extremes: list[tuple], opset: int, tmp_path) -> None:
    """Exports the table with tame inputs, and compares the file with torch on extreme ones."""
    model = Functions(functions)
    report = svexport.export(model, tame, tmp_path / "m.onnx", opset=opset)
    assert report.verified
    engine = svexport.load(report.path)
    names = list(report.outputs)
    for run, inputs in enumerate((tame, *extremes)):
        actual = dict(zip(names, engine(*inputs), strict=True))
        flat = {}
        for name, value in model(*inputs).items():
            parts = value if isinstance(value, tuple) else (value,)
            flat |= {f"{name}_{i}" if isinstance(value, tuple) else name: part for i, part in enumerate(parts)}
        assert flat.keys() == actual.keys()
        for name, expected in flat.items():
            message = f"{name} at {opset} in run {run}"
            torch.testing.assert_close(
                actual[name], expected, rtol=1e-5, atol=1e-6, equal_nan=True, msg=lambda m, s=message: f"{s}: {m}"
            )


NUMBERS = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 20.0, -20.0, 100.0, -100.0, 1e4, -1e4, INF, -INF, NAN])
X = NUMBERS.repeat_interleave(len(NUMBERS)).view(len(NUMBERS), -1)
Y = NUMBERS.expand_as(X)
TAME = torch.randn(X.shape, generator=torch.Generator().manual_seed(0))
OF_FLOATS = {
    "all": lambda x, y: x.all(1),
    "amax": lambda x, y: x.amax((0, 1)),
    "amin": lambda x, y: x.amin(1, keepdim=True),
    "angle": lambda x, y: x.angle(),
    "any": lambda x, y: x.any(-1),
    "any_of_all": lambda x, y: (-x.abs()).any(),
    "argmax": lambda x, y: y.flip(0).argmax(1),
    "atan2": lambda x, y: torch.atan2(x, y),
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy_with_logits(
        x.clamp(-1e4, 1e4), torch.full_like(x, 0.3), pos_weight=torch.tensor(2.0), reduction="none"
    ),
    "clamp_max": lambda x, y: x.clamp(max=3),
    "clamp_min": lambda x, y: x.clamp(min=-3.0),
    "clamp_within": lambda x, y: x.clamp(-1, 2),
    "clamp_by_tensors": lambda x, y: x.clamp(torch.minimum(y, -y), None),
    "cummax": lambda x, y: y.cummax(1),
    "cummin": lambda x, y: x.cummin(0),
    "diagonal": lambda x, y: (x.diagonal(), x.diagonal(2), x.diagonal(-1)),
    "diagonal_scatter": lambda x, y: (
        x.diagonal_scatter(y[0]),
        x.diagonal_scatter(y[1, 3:], 3),
        x[:5].diagonal_scatter(y[2, :3], -2, 0, 1),
        (x > 0).diagonal_scatter(y[0] > 0),
    ),
    "erfcx": lambda x, y: torch.special.erfcx(x.clamp(-9, 100)),
    "expm1": lambda x, y: (x.expm1(), torch.special.expm1(y)),
    "ge": lambda x, y: x >= y,
    "isclose": lambda x, y: (
        x.isclose(y),
        y.isclose(y * 1.000005, equal_nan=True),
        x.isclose(y, 0.5, 2),
        y.isclose(x, 0, 0),
    ),
    "le": lambda x, y: x <= y,
    "log1p": lambda x, y: (x.log1p(), torch.special.log1p(y)),
    "log_ndtr": lambda x, y: torch.special.log_ndtr(x.clamp(-60, 60)),
    "logaddexp": lambda x, y: torch.logaddexp(x, y),
    "logaddexp2": lambda x, y: torch.logaddexp2(x, y),
    "logcumsumexp": lambda x, y: (x.T - y.T).logcumsumexp(0),
    "logit": lambda x, y: (x.logit(1e-3), x.clamp(0.1, 0.9).logit()),
    "logsigmoid": lambda x, y: F.logsigmoid(x),
    "max": lambda x, y: x.max(),
    "max_along": lambda x, y: x.max(0),
    "maximum": lambda x, y: torch.maximum(x, y),
    "min_along": lambda x, y: x.min(1, keepdim=True),
    "minimum": lambda x, y: torch.minimum(x, y),
    "relu": lambda x, y: x.relu(),
    "sgn": lambda x, y: x.sgn(),
    "sign": lambda x, y: x.sign(),
    "signbit": lambda x, y: x.signbit(),
    "softplus": lambda x, y: F.softplus(x, beta=3, threshold=2),
    "trunc_divided": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "vector_norm": lambda x, y: torch.linalg.vector_norm(x.clamp(-9, 9), 3, 1),
}


@pytest.mark.parametrize("opset", OPSETS)
def test_of_floats(opset: int, tmp_path) -> None:
    hold(OF_FLOATS, (TAME, TAME.T.contiguous()), [(X, Y), (Y.contiguous(), X), (TAME, Y.contiguous())], opset, tmp_path)


@pytest.mark.parametrize("opset", OPSETS)
def test_next_to_zero(opset: int, tmp_path) -> None:
    """Where 1 is added and taken away again, what is left is relative to the number, not to 1."""
    functions = {
        "expm1": lambda x: (x.expm1() / x, torch.special.expm1(x) / x),
        "log1p": lambda x: (x.log1p() / x, torch.special.log1p(x) / x),
        "logaddexp": lambda x: torch.logaddexp(x.abs().log(), x * 0) / x,
        "logaddexp2": lambda x: torch.logaddexp2(x.abs().log2(), x * 0) / x,
        "xlog1py": lambda x: torch.special.xlog1py(x, x) / x**2,
    }
    x = torch.rand(2, 9, generator=torch.Generator().manual_seed(2)) + 0.1
    x = torch.cat([x, -x])
    hold(functions, (x,), [(x * scale,) for scale in (1e-2, 1e-4, 1e-6, 1e-8, 1e-10)], opset, tmp_path)


DISTINCT = torch.tensor([[3.0, NAN, -1.0, 7.0], [INF, -INF, 0.5, 2.0], [NAN, 1.0, -2.0, -INF]])
SORTED = {
    "argsort": lambda x: x.argsort(1, descending=True),
    "sort": lambda x: x.sort(1),
    "topk": lambda x: x.topk(3),
    "topk_smallest": lambda x: x.topk(2, largest=False),
}


@pytest.mark.parametrize("opset", OPSETS)
def test_sorted_nan(opset: int, tmp_path) -> None:
    tame = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    hold(SORTED, (tame,), [(DISTINCT,)], opset, tmp_path)


LARGE = torch.tensor([0, 1, -1, 7, -8, 100, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63)])
I, J = LARGE[:, None].expand(-1, len(LARGE)).contiguous(), LARGE.expand(len(LARGE), -1).contiguous()
PLACES = torch.arange(-3, 7).expand_as(I).contiguous()
OF_INTEGERS = {
    "any": lambda i, j, n: i.any(1),
    "clamp": lambda i, j, n: i.clamp(-5, 2**33),
    "clamp_min": lambda i, j, n: i.clamp(min=0),
    "left_shift": lambda i, j, n: i << n,
    "left_shift_of_3": lambda i, j, n: 3 << n,
    "floor_divided": lambda i, j, n: (i // (j.abs() + 2), i // (-3 - j.abs() % 9), i.to(torch.int8) // 3),
    "isclose": lambda i, j, n: (i.isclose(j), i.isclose(j, 1.0), (~i).isclose(i.flip(0) - 1)),
    "isclose_of_masks": lambda i, j, n: (i > 0).isclose(j > 0),
    "max": lambda i, j, n: torch.maximum(i, j),
    "min": lambda i, j, n: torch.minimum(i, j),
    "power": lambda i, j, n: i**j,
    "power_of_0": lambda i, j, n: i**0,
    "power_of_11": lambda i, j, n: i**11,
    "power_of_bytes": lambda i, j, n: (i % 256 - 128).to(torch.int8) ** 3,
    "power_of_int32": lambda i, j, n: i.to(torch.int32) ** n.to(torch.int32),
    "power_of_masks": lambda i, j, n: (i > 0) ** 2,
    "powers_of_2": lambda i, j, n: (2**j, 2**n, 1**n),
    "powers_of_negative_numbers": lambda i, j, n: (torch.tensor(-1) ** n, torch.tensor(-7) ** j),
    "relu": lambda i, j, n: i.relu(),
    "right_shift": lambda i, j, n: i >> n,
    "right_shift_by_1": lambda i, j, n: i >> 1,
    "right_shift_of_bytes": lambda i, j, n: (i % 256 - 128).to(torch.int8) >> 2,
    "shifts_of_unsigned_bytes": lambda i, j, n: (
        (i % 256).to(torch.uint8) >> 7,
        (i % 256).to(torch.uint8) >> (n.abs() + 4).to(torch.uint8),
        (i % 256).to(torch.uint8) << n.abs().to(torch.uint8),
    ),
    "sign": lambda i, j, n: i.sign(),
    "trunc_divided": lambda i, j, n: torch.div(i, j.abs() + 2, rounding_mode="trunc"),
}


@pytest.mark.parametrize("opset", OPSETS)
def test_of_integers(opset: int, tmp_path) -> None:
    tame = (I.remainder(9), J.remainder(9), PLACES.abs())
    hold(OF_INTEGERS, tame, [(I, J, PLACES), (J, I, PLACES * 20)], opset, tmp_path)


OF_NARROW_INTEGERS = {
    "max": lambda x: (x.max(), x.amax(1), x.amin(0)),
    "remainder": lambda x: (x % 7, torch.fmod(x, 5)),
    "sum": lambda x: (x.sum(dtype=x.dtype), x.sum(1, dtype=x.dtype)),
}


@pytest.mark.parametrize(("opset", "target"), [(9, None), (11, "8.4"), (13, None), (18, None), (20, None)])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.uint8])
def test_of_narrow_integers(dtype: torch.dtype, opset: int, target: str | None, tmp_path) -> None:
    """Of which ops of ONNX take fewer than torch."""
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    x = torch.randint(low, high + 1, (5, 7), generator=torch.Generator().manual_seed(3)).to(dtype)
    report = svexport.export(Functions(OF_NARROW_INTEGERS), x, tmp_path / "m.onnx", opset=opset, target=target)
    assert report.verified
    x = torch.full_like(x, high)
    expected = [part for function in OF_NARROW_INTEGERS.values() for part in function(x)]
    for actual, wanted in zip(svexport.load(report.path)(x), expected, strict=True):
        assert actual.dtype == wanted.dtype
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("opset", OPSETS)
def test_half_precision_stays(opset: int, tmp_path) -> None:
    """Numbers among the arguments make no float32 of it."""
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)).half() + 0.1
    functions = {
        "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
        "entropy": lambda x: torch.special.entr(x),
        "log10": lambda x: x.log10(),
        "triplet": lambda x: F.triplet_margin_loss(x, x + 1, x - 1),
    }
    report = svexport.export(Functions(functions), (x,), tmp_path / "m.onnx", opset=opset)
    assert report.verified
    assert [output.dtype for output in svexport.load(report.path)(x)] == [torch.float16] * 4


@pytest.mark.parametrize("opset", OPSETS)
def test_places_of_a_number(opset: int, tmp_path) -> None:
    """Rows of no columns: one, or none."""
    functions = {"argwhere": lambda x: torch.argwhere(x.sum()), "nonzero": lambda x: x.sum().nonzero()}
    hold(functions, (torch.ones(2),), [(torch.zeros(2),)], opset, tmp_path)


@pytest.mark.parametrize("opset", OPSETS)
def test_native_batch_norm(opset: int, tmp_path) -> None:
    """In training by the batch, and what else it returns."""
    generator = torch.Generator().manual_seed(0)
    x, other = (torch.randn(3, 2, 5, generator=generator) * k for k in (1, 7))
    mean, var, weight, bias = (torch.rand(2, generator=generator) + 0.5 for _ in range(4))
    functions = {
        "training": lambda x: torch.native_batch_norm(x, weight, bias, mean.clone(), var.clone(), True, 0.1, 1e-3),
        "fixed": lambda x: torch.native_batch_norm(x, None, bias, mean, var, False, 0.1, 1e-3)[0],
    }
    hold(functions, (x,), [(other,)], opset, tmp_path)


@pytest.mark.parametrize("opset", [13, 17, 18, 20, 23])
def test_padding_counted_from_the_end(opset: int, tmp_path) -> None:
    weight = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    offsets = torch.tensor([0, 3])
    functions = {"bag": lambda i: F.embedding_bag(i, weight, offsets, mode="sum", padding_idx=-1)}
    hold(functions, (torch.tensor([0, 1, 4, 4, 3, 2]),), [(torch.tensor([4, 4, 4, 0, 1, 4]),)], opset, tmp_path)


@pytest.mark.parametrize("opset", OPSETS)
def test_small_numbers_stay(opset: int, tmp_path) -> None:
    """What is added so that nothing is divided by 0, and factors that are nearly 1."""
    functions = {
        "added": lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-12),
        "added_to_squares": lambda x: torch.rsqrt((x * x).sum(-1) + 1e-9),
        "taken": lambda x: (x - 1e-10) * 1e10,
        "times": lambda x: (x * (1 + 2e-6) - x) * 1e6,
        "clamped": lambda x: 1 / x.abs().clamp(min=1e-10),
    }
    tame = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    hold(functions, (tame,), [(torch.zeros_like(tame),), (tame * 1e-9,)], opset, tmp_path)


@pytest.mark.parametrize("opset", [11, 18, 20])
def test_cosine_of_booleans(opset: int, tmp_path) -> None:
    """None of them true, the length is 0."""
    functions = {"loss": lambda x, y, t: F.cosine_embedding_loss(x, y, t, margin=0.3, reduction="none")}
    generator = torch.Generator().manual_seed(0)
    tame = tuple(torch.rand(4, 5, generator=generator) > 0.5 for _ in range(2))
    target = torch.tensor([1.0, -1.0, 1.0, -1.0])
    hold(functions, (*tame, target), [(torch.zeros_like(tame[0]), tame[1], target)], opset, tmp_path)


@pytest.mark.parametrize("opset", [11, 20])
def test_truth_of_bytes(opset: int, tmp_path) -> None:
    """Is of bytes, as torch has it, by either axis."""
    model = Functions({"any": lambda x: x.any(1), "all": lambda x: x.all(), "rows": lambda x: x.all(0, keepdim=True)})
    report = svexport.export(model, (torch.ones(3, 4, dtype=torch.uint8),), tmp_path / "m.onnx", opset=opset)
    assert not report.notes  # by torch.export
    engine = svexport.load(report.path)
    for x in (torch.eye(3, 4, dtype=torch.uint8) * 2, torch.ones(3, 4, dtype=torch.uint8) * 255):
        for actual, expected in zip(engine(x), model(x).values(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)


class Chosen(nn.Module):
    """The mean of what a mask chooses, whether any or all of it is large, and the shapes of other reductions."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        rows = x[x[:, 0] > 0]
        large = (x[x > 0] > 1).any(), (rows > 1).any(0), (rows > 1).all(0), (rows > 1).any((0, 1), keepdim=True)
        large += rows.all(), (rows > 1).all((0, 1)), (rows > 1).all(-1, keepdim=True)
        means = x[x > 0].mean(), rows.mean(0), rows.std(0), rows.mean(-1, keepdim=True)
        return *means, rows.sum(-1), rows.amax(-1), *large


@pytest.mark.parametrize(("opset", "first"), [*((opset, True) for opset in OPSETS), (17, False)])
def test_reductions_of_nothing(opset: int, first: bool, tmp_path) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    with torch_export_first(first):
        report = svexport.export(Chosen(), (x,), tmp_path / "m.onnx", opset=opset)
    assert first or not any("traced by" in note for note in report.notes)
    engine = svexport.load(report.path)
    for given in (x, -x.abs(), x.abs()):
        torch.testing.assert_close(tuple(engine(given)), Chosen()(given), equal_nan=True)


class Means(nn.Module):
    """Of a dynamic size, whole and in part, and what torch makes of means."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        of_sizes = x.mean(0), x.mean(), x.mean((0, 1)), x.mean(0, keepdim=True), x[: x.shape[0] // 2].mean(0)
        return *of_sizes, x.nanmean(0), x.std(0), x.var(0, correction=0), F.mse_loss(x, x + 1), x.mean(-1)


class TakesAValue(Means):
    """Which torch.export refuses."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        print(x.sum().item() > 0)
        return super().forward(x)


@pytest.mark.parametrize(("kind", "opset"), [*((Means, opset) for opset in OPSETS), (TakesAValue, 11)])
def test_means_along_dynamic_sizes(kind: type[nn.Module], opset: int, tmp_path) -> None:
    x = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(0))
    report = svexport.export(kind(), (x,), tmp_path / "m.onnx", opset=opset, dynamic_axes={"x": {0: "n"}})
    assert "n=0" in {p.run for p in report.parity}
    assert not any("sizes from" in note for note in report.notes)
    engine = svexport.load(report.path)
    for given in (x, x[:1], x[:0]):
        torch.testing.assert_close(tuple(engine(given)), Means()(given), equal_nan=True)


class Rows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-1) - x.var(-1)


@pytest.mark.parametrize("axes", [{}, {"x": {0: "n"}}])
def test_means_of_static_sizes_stay_as_they_are(axes: dict, tmp_path) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    report = svexport.export(Rows(), (x,), tmp_path / "m.onnx", dynamic_axes=axes)
    assert "Where" not in report.nodes


def test_statistics_of_a_dynamic_batch(tmp_path) -> None:
    function = Functions({"y": lambda x: F.batch_norm(x, x.new_zeros(3), x.new_ones(3), training=True)})
    x = torch.randn(5, 3, 4)
    report = svexport.export(function, x, tmp_path / "m.onnx", opset=18, dynamic_shapes={"inputs_0": {0: "batch"}})
    engine = svexport.load(report.path)
    for batch in (2, 7):
        x = torch.randn(batch, 3, 4) * 3 + 1
        torch.testing.assert_close(engine(x)["y"], F.batch_norm(x, None, None, training=True))


@pytest.mark.parametrize("opset", OPSETS)
def test_sums_with_products_of_nothing(opset: int, tmp_path) -> None:
    functions = {
        "addmm": lambda x, y, z: torch.addmm(x, y, z, beta=0.2, alpha=3),
        "row": lambda x, y, z: x[0].addmm(y, z, beta=0.2),
        "forgotten": lambda x, y, z: torch.addmm(x, y, z, beta=0),
        "products": lambda x, y, z: torch.addmm(x, y.new_ones(2, 4), z.new_ones(4, 3), beta=0.2),
    }
    inputs = torch.randn(2, 3), torch.zeros(2, 0), torch.zeros(0, 3)
    hold(functions, inputs, [(torch.full((2, 3), NAN), *inputs[1:])], opset, tmp_path)


@pytest.mark.parametrize("opset", OPSETS)
def test_embedding_within_a_norm(opset: int, tmp_path) -> None:
    """Every row is shortened that is read, whichever the example reads, and none in the model."""
    model = nn.Embedding(6, 4, max_norm=1.0)
    torch.nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(0))
    before = model.weight.detach().clone()
    report = svexport.export(model, (torch.tensor([0, 1]),), tmp_path / "m.onnx", opset=opset)
    assert torch.equal(model.weight, before)
    every = torch.arange(6)
    torch.testing.assert_close(svexport.load(report.path)(every[:2] + 4), model(every[:2] + 4))


@pytest.mark.parametrize("opset", OPSETS)
def test_average_with_a_divisor(opset: int, tmp_path) -> None:
    x = torch.randn(1, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    functions = {
        "all": lambda x: F.avg_pool2d(x, 3, 1, 1, divisor_override=2),
        "within": lambda x: F.avg_pool2d(x, 2, count_include_pad=False, divisor_override=3),
        "of_one": lambda x: F.avg_pool2d(x[0], 2, divisor_override=1),
    }
    hold(functions, (x,), [], opset, tmp_path)
    with pytest.raises(svexport.ExportError, match="divisor_override"):
        svexport.export(
            Functions({"y": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, divisor_override=2)}),
            (x,),
            tmp_path / "m.onnx",
            opset=opset,
        )


@pytest.mark.parametrize("opset", [9, 10])
def test_comparisons_of_floats_before_they_could_be_equal(opset: int, tmp_path) -> None:
    """Equal takes no floating-point numbers before opset 11."""
    functions = {
        "eq": lambda x, y: x == y,
        "eq_of_a_number": lambda x, y: x == 0,
        "ge": lambda x, y: x >= y,
        "le": lambda x, y: x <= 1,
        "ne": lambda x, y: x != y,
    }
    hold(functions, (TAME, TAME.flip(0)), [(X, Y)], opset, tmp_path)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_bounds_of_tensors(opset: int, dtype: torch.dtype, tmp_path) -> None:
    """A bound that is NaN makes NaN of a number, the upper one too."""
    functions = {
        "both": torch.clamp,
        "least": lambda x, low, high: x.clamp(min=low),
        "most": lambda x, low, high: x.clamp(max=high),
    }
    tame = tuple((torch.randn(3, 5) * 3).to(dtype) for _ in range(3))
    extremes = [tame[::-1]]
    if dtype.is_floating_point:
        for place in range(3):
            for number in (NAN, INF, -INF):
                extreme = [t.clone() for t in tame]
                extreme[place][1, 1:4] = number
                extremes.append(tuple(extreme))
    hold(functions, tame, extremes, opset, tmp_path)


@pytest.mark.parametrize("opset", OPSETS)
def test_logsumexp_behind_infinity(opset: int, tmp_path) -> None:
    """ONNX Runtime's own takes numbers below -88 for nothing where the first is minus infinity."""
    functions = {
        "along": lambda x: x.logsumexp(1),
        "kept": lambda x: x.logsumexp((0, -1), keepdim=True),
        "whole": lambda x: x.logsumexp((0, 1, 2)),
        "of_one": lambda x: x.sum().logsumexp(0),
        "integers": lambda x: (x > 0).long().logsumexp(0),
    }
    tame = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    masked = tame.clone()
    masked[:, :2] = -INF
    odd = tame * 200
    odd[0, :, 0], odd[1, 2, 1], odd[0, 0, 1] = -INF, INF, NAN
    hold(
        functions,
        (tame,),
        [(masked,), (masked * 1e3 - 4e3,), (odd,), (odd.nan_to_num(0.0, 3e38, -3e38),)],
        opset,
        tmp_path,
    )


@pytest.mark.parametrize("opset", [11, 18])
def test_logsigmoid_of_large_numbers_is_not_nothing(opset: int, tmp_path) -> None:
    model, x = torch.nn.LogSigmoid(), 30 + 3 * torch.rand(3, 5)
    assert svexport.export(model, x, tmp_path / "m.onnx", opset=opset, verify="thorough").verified
    for x in (torch.linspace(-200, 100, 15).reshape(3, 5), 8 * torch.randn(3, 5), torch.full((3, 5), 87.0)):
        torch.testing.assert_close(svexport.load(tmp_path / "m.onnx")(x), model(x), rtol=1e-5, atol=1e-44)


@pytest.mark.parametrize("opset", [11, 18])
def test_masks_are_added(opset: int, tmp_path) -> None:
    class Masks(torch.nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            positive, small = x > 0, x < 1
            both = positive.clone()
            both += small
            return positive + small, positive * small, torch.add(small, positive), both, positive + 1, positive + x

    svexport.export(Masks(), torch.randn(3, 7), tmp_path / "m.onnx", opset=opset)
    x = 3 * torch.randn(3, 7)
    for actual, expected in zip(svexport.load(tmp_path / "m.onnx")(x), Masks()(x), strict=True):
        torch.testing.assert_close(actual, expected)


LOSSES = [
    {"label_smoothing": 0.1},
    {"label_smoothing": 1e-3, "ignore_index": 2},
    {"label_smoothing": 0.2, "weight": torch.rand(9), "reduction": "none"},
]


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize("options", [{}, *LOSSES])
def test_cross_entropy(options, opset: int, tmp_path) -> None:
    loss = torch.nn.CrossEntropyLoss(**options)
    kinds = [torch.tensor([0, 1, 2, 8]), torch.randn(4, 9).softmax(1)][: 1 + ("ignore_index" not in options)]
    for target in kinds:
        svexport.export(loss, (torch.randn(4, 9), target), tmp_path / "m.onnx", opset=opset)
        x, other = 9 * torch.randn(4, 9), target.flip(0)
        torch.testing.assert_close(svexport.load(tmp_path / "m.onnx")(x, other), loss(x, other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [11, 18])
def test_losses_left_in_forward(opset: int, tmp_path) -> None:
    """With dynamic sizes, where torch decomposes twice."""

    class Head(nn.Module):
        def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
            options = {"ignore_index": 0, "label_smoothing": 0.1}
            each = F.cross_entropy(x, target, reduction="none"), F.nll_loss(x, target, reduction="none")
            return F.cross_entropy(x, target, **options), F.cross_entropy(x, target, reduction="none", **options), *each

    model, axes = Head(), {"x": {0: "n"}, "target": {0: "n"}}
    svexport.export(
        model, (torch.randn(5, 4), torch.randint(0, 4, (5,))), tmp_path / "m.onnx", opset=opset, dynamic_shapes=axes
    )
    for n in (2, 9):
        x, target = 9 * torch.randn(n, 4), torch.arange(n) % 4
        torch.testing.assert_close(tuple(svexport.load(tmp_path / "m.onnx")(x, target)), model(x, target))


@pytest.mark.parametrize("opset", [11, 18])
def test_parts_of_a_dynamic_size(opset: int, tmp_path) -> None:
    model = Functions({"parts": lambda x: tuple(part.sum(1) for part in x.tensor_split(3, dim=1))})
    axes = {"x": {0: "b", 1: "n"}}

    class Parts(nn.Module):
        def forward(self, x: Tensor) -> object:
            return model(x)

    svexport.export(Parts(), torch.randn(2, 7, 4), tmp_path / "m.onnx", opset=opset, dynamic_shapes=axes)
    for n in (2, 4, 5, 9):
        x = torch.randn(3, n, 4)
        for actual, expected in zip(svexport.load(tmp_path / "m.onnx")(x), model(x)["parts"], strict=True):
            torch.testing.assert_close(actual, expected)


OF_QUOTIENTS = {
    "floor": lambda x, y: torch.div(x, 0.4, rounding_mode="floor"),
    "floor_divide": lambda x, y: x // y,
    "floor_divide_by_a_number": lambda x, y: x // 0.4,
    "remainder": lambda x, y: x % y,
    "remainder_by_a_number": lambda x, y: x % -0.1,
    "remainder_of_a_number": lambda x, y: 2.0 % y,
    "of_halves": lambda x, y: x.half() // 0.3,
    "of_integers": lambda x, y: (x * 10).round().long() // -3,
    "rest_of_integers": lambda x, y: (x * 10).round().long() % -3,
    "negative_bytes": lambda x, y: -(x * 10).abs().to(torch.uint8),
}


@pytest.mark.parametrize("opset", [11, 17, 20])
def test_multiples_of_the_divisor(opset: int, tmp_path) -> None:
    """To the bit: 2 / 0.4 rounds to 5, but 5 * 0.4 in float32 is more than 2. Points on voxels' borders are."""
    x = torch.arange(-60, 60)[:, None] / 10
    y = torch.tensor([0.4, -0.1, 0.3, -2.0, 0.001, 7.0])
    model = Functions(OF_QUOTIENTS)
    engine = svexport.load(
        svexport.export(model, (torch.randn(120, 1), torch.rand(6) + 0.1), tmp_path / "m.onnx", opset=opset).path
    )
    for actual, (name, expected) in zip(engine(x, y), model(x, y).items(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")


OF_DOUBLE_PRECISION = {
    "added": lambda x: x + 0.1,
    "full": lambda x: torch.full((3,), 0.1, dtype=torch.float64) * x,
    "full_like": lambda x: torch.full_like(x, 0.1) * x,
    "full_like_of_float32": lambda x: torch.full_like(x.float(), 0.1).double() * x,
    "large": lambda x: x * 1e300,
    "new_full": lambda x: x.new_full((3,), 1e-300) * x,
    "chosen": lambda x: torch.where(x > 0, 0.1, x),
    "whole": lambda x: ((x * 0.7).floor().long(), x.new_full((3,), 2**60 + 1, dtype=torch.int64)),
}


@pytest.mark.parametrize("opset", [11, 18, 23])
def test_numbers_of_double_precision(opset: int, tmp_path) -> None:
    """To the bit: in float32 0.7 is less than 7/10, and ten of it less than 7."""
    model, x = Functions(OF_DOUBLE_PRECISION), torch.randn(3, dtype=torch.float64)
    engine = svexport.load(svexport.export(model, x, tmp_path / "m.onnx", opset=opset).path)
    for given in (x, torch.tensor([10.0, -30.0, 1 / 3], dtype=torch.float64)):
        expected = torch.utils._pytree.tree_leaves(model(given))
        for actual, one in zip(engine(given), expected, strict=True):
            torch.testing.assert_close(actual, one, rtol=0, atol=0)
