"""What "verified" means: files that are wrong somewhere are refused, correct files are not."""

from __future__ import annotations

import copy
import logging
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport.exporter import inputs as tried
from svexport.exporter.rounding import Perturbed, Rounding, Tolerances
from svexport.parity import parity
from svexport.tracing.quantizers import allow_steps

ALL_OPSETS = pytest.mark.parametrize("opset", [11, 17, 18, 20])
BOTH_EXPORTERS = pytest.mark.parametrize("opset", [11, 18])


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- outputs below any absolute tolerance


class Faulty(nn.Module):
    """Computes another function in the file than in torch."""

    def __init__(self, right: Any, wrong: Any) -> None:
        super().__init__()
        self.right, self.wrong = right, wrong
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        traced = torch.jit.is_tracing() or torch.compiler.is_exporting()
        return (self.wrong if traced else self.right)(self.linear(x))


SMALL_FAULTS = {
    "sign": (lambda x: x * 1e-5, lambda x: x * -1e-5),
    "offset": (lambda x: x * 1e-6, lambda x: x * 1e-6 + 1e-7),
    "one column": (lambda x: x * 1e-6, lambda x: x * 1e-6 * torch.tensor([1.0] * 7 + [0.9])),
    "activation": (lambda x: x.relu() * 1e-6, lambda x: x * 1e-6),
    "mean": (lambda x: x.mean(1) * 1e-6, lambda x: x.sum(1) * 1e-6 / 7.9),
    "softmax": (lambda x: x.softmax(1) * 1e-6, lambda x: x.softmax(0) * 1e-6),
    "whole numbers": (lambda x: (x * 1e5).long() + 10**6, lambda x: (x * 1e5).long() + 10**6 + 7),
    "half": (lambda x: (x * 1e-3).half(), lambda x: (x * 1.02e-3).half()),
    "scale": (lambda x: x * 1e-6, lambda x: x * 1.01e-6),
    "one row": (lambda x: x * 1e-6, lambda x: torch.cat([x[:1] * 1.01e-6, x[1:] * 1e-6])),
    "transposed": (lambda x: x[:4, :4] * 1e-6, lambda x: x[:4, :4].T * 1e-6),
    "absolute": (lambda x: x.abs() * 1e-6, lambda x: x * 1e-6),
    "clamp": (lambda x: x.clamp(max=0.1) * 1e-6, lambda x: x * 1e-6),
    "maximum": (lambda x: x.amax(1) * 1e-6, lambda x: x.amin(1) * 1e-6),
    "shifted": (lambda x: x * 1e-6, lambda x: x.roll(1, 1) * 1e-6),
    "bias": (lambda x: (x + 0.01) * 1e-6, lambda x: x * 1e-6),
    "power": (lambda x: x.square() * 1e-6, lambda x: x.abs() * x.abs() * x.abs() * 1e-6),
    "comparison": (lambda x: torch.where(x > 0, x, -x) * 1e-6, lambda x: torch.where(x < 0, x, -x) * 1e-6),
    "zero": (lambda x: x * 1e-6, lambda x: x * 0),
    "rounded": (lambda x: x * 1e-6, lambda x: (x * 8).round() / 8 * 1e-6),
    "negated": (lambda x: x * 1e-6, lambda x: x * -1e-6),
    "sine": (lambda x: x.sin() * 1e-6, lambda x: x * 1e-6),
    "axis": (lambda x: x.cumsum(1) * 1e-6, lambda x: x.cumsum(0) * 1e-6),
}


@pytest.mark.parametrize("shape", [(), (7,), (3, 65539)])
def test_perturbed_by_rounding_errors_alone(shape) -> None:
    """Every element by no more than was said, most of them by some; neither what is given nor a view of it is."""
    x = torch.randn(shape)
    before = x.clone()
    with Perturbed(0, errors=2.0):
        roots = [x.mT.exp() if x.dim() > 1 else x.exp(), torch.ops.aten._unsafe_view(x, [-1]), x.half().exp()]
    exact = [before.mT.exp() if x.dim() > 1 else before.exp(), before.view(-1), before.half().exp()]
    assert torch.equal(x, before)
    for root, wanted in zip(roots, exact, strict=True):
        assert root.stride() == wanted.stride()
        eps = torch.finfo(root.dtype).eps
        apart = (root.double() - wanted.double()).abs() / wanted.double().abs()
        assert float(apart.max()) <= 3 * eps  # one of them rounds
        assert not x.numel() > 100 or float(apart.gt(0).double().mean()) > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_perturbed_in_part(dtype) -> None:
    """Of large results some elements, the first and the last among them; of others all, as without a limit."""
    x = torch.randn(7, 2**17 + 3).to(dtype)
    before = x.clone()
    with Perturbed(0, most=2**18) as large:
        roots = [x.exp(), torch.ops.aten._unsafe_view(x, [-1]), x.mT.exp().mT]
    assert large.in_part
    assert torch.equal(x, before)
    for root, wanted in zip(roots, [before.exp(), before.view(-1), before.exp()], strict=True):
        changed = (root != wanted).double().mT.reshape(-1) if root is roots[2] else (root != wanted).double().view(-1)
        assert 0.1 * 2**18 < float(changed.sum()) <= 2**18
        assert float(changed[: 2**14].mean()) > 0.1
        assert float(changed[-(2**14) :].mean()) > 0.1
    with Perturbed(1, most=2**18) as small:
        few = x[:1].exp(), x[:1].sum()
    with Perturbed(1):
        assert all(map(torch.equal, few, (x[:1].exp(), x[:1].sum())))
    assert not small.in_part


def test_perturbed_sums_of_large_numbers() -> None:
    """What is added up may be larger than the sum, and than its type holds."""
    x = torch.tensor([[60000.0, 60000.0, -60000.0, -60000.0]], dtype=torch.float16)
    exact = torch.tensor([[1e30, -1e30, 1.0]])
    with Perturbed(0, errors=2.0):
        half, single = x.sum(-1), exact.sum(-1)
    eps = torch.finfo(torch.float16).eps
    assert 0 < float((half.double() - x.double().sum(-1)).abs()) <= 2.1 * eps * 240000
    assert 0 < abs(float(single)) <= 2.1 * torch.finfo(torch.float32).eps * 2e30


@BOTH_EXPORTERS
@pytest.mark.parametrize("fault", SMALL_FAULTS)
def test_faults_of_small_outputs(fault, opset, tmp_path) -> None:
    torch.manual_seed(0)
    right, wrong = SMALL_FAULTS[fault]
    with pytest.raises(svexport.VerificationError, match="differs by up to"):
        svexport.export(Faulty(right, wrong), seeded(4, 8), tmp_path / "m.onnx", opset=opset)
    assert not list(tmp_path.iterdir())
    assert svexport.export(Faulty(right, right), seeded(4, 8), tmp_path / "m.onnx", opset=opset).verified


def test_tolerances_that_are_given_hold(tmp_path) -> None:
    model = Faulty(*SMALL_FAULTS["offset"])
    report = svexport.export(model, seeded(4, 8), tmp_path / "m.onnx", opset=11, atol=1e-4)
    assert {(p.rtol, p.atol) for p in report.parity} == {(1e-3, 1e-4)}


SLIGHT_FAULTS = {
    "scale": lambda x: x * 1.0001,
    "offset": lambda x: x + 9e-5,
    "one element": lambda x: x + 9e-5 * (torch.arange(8) == 3),
    "half of them": lambda x: torch.where(x > 0, x * 1.0002, x),
}


@BOTH_EXPORTERS
@pytest.mark.parametrize("fault", SLIGHT_FAULTS)
def test_faults_within_tolerances_that_no_rounding_explains(fault, opset, tmp_path) -> None:
    torch.manual_seed(0)
    model = Faulty(lambda x: x + 0.5, lambda x: SLIGHT_FAULTS[fault](x + 0.5))
    with pytest.raises(svexport.VerificationError, match=r"differs by up to .* outside rtol=0, atol="):
        svexport.export(model, seeded(4, 8), tmp_path / "m.onnx", opset=opset)
    assert not list(tmp_path.iterdir())
    for given in ({"rtol": 1e-3}, {"atol": 1e-3}):
        report = svexport.export(model, seeded(4, 8), tmp_path / "m.onnx", opset=opset, **given)
        assert report.verified
        assert report.max_abs > 1e-5


@BOTH_EXPORTERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_differs_by_rounding_alone_is_verified(dtype, opset, tmp_path) -> None:
    """The same sum in another order, of which torch itself makes a hundredth of rounding errors."""
    torch.manual_seed(0)
    large = 1000.0 if dtype == torch.float32 else 4.0
    model = Faulty(lambda x: (x + large) - large, lambda x: x)
    report = svexport.export(model, seeded(4, 8), tmp_path / "m.onnx", opset=opset, dtype=dtype)
    assert report.verified
    assert report.max_abs > 2e-5
    assert not [note for note in report.notes if "rounding errors change" in note]


@BOTH_EXPORTERS
def test_outputs_that_are_nothing_but_rounding(opset, tmp_path) -> None:
    """A mean taken off what is alike: 1e-8 of anything."""

    class Centered(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.register_buffer("ones", torch.ones(64))
            self.tied = tied

        def forward(self, x: Tensor) -> Tensor:
            x = x.float() @ self.ones[:, None].float().expand(64, 3) * 0.1 if self.tied else self.linear(x)
            return (x @ torch.full((x.shape[1], 1), 0.1)) - (x * 0.1).sum(1, keepdim=True)

    for tied in (False, True):  # to float32, by a constant
        torch.manual_seed(0)
        report = svexport.export(Centered(tied), seeded(4, 64), tmp_path / "m.onnx", opset=opset)
        assert report.verified
        assert report.max_abs < 1e-5


def test_scale_of_an_output() -> None:
    held = Tolerances.of(None, None, {torch.float32}).held
    assert held(torch.tensor([1e-6, float("inf"), float("nan")])) == (1e-3, pytest.approx(1e-10))
    assert held(torch.tensor([1e6])) == (1e-3, 1e-4)
    assert held(torch.tensor([], dtype=torch.float32))[1] < 1e-40
    assert held(torch.tensor([7])) == held(torch.tensor([True])) == (0.0, 0.0)
    assert Tolerances.of(None, 0.5, {torch.float32}).held(torch.tensor([7])) == (0.0, 0.5)
    assert Tolerances.of(0.1, 0.2, {torch.float32}).held(torch.tensor([1e-6])) == (0.1, 0.2)


class Alone(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x,)


@torch.no_grad()
def test_rounding_explains_only_itself() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(1024, 16), Alone()), seeded(8, 1024)
    (expected,) = model(x)
    exact = copy.deepcopy(model).double()(x.double())[0].float()
    rounding = Rounding(model, [x], [expected])
    assert 0 < rounding.allows(0, exact, 0.0, 0.0) < 1e-5
    assert rounding.allows(0, expected + 1e-4, 0.0, 0.0) == 0.0
    rounding.allows(0, expected + 1, 0.0, 0.0)  # which nothing explains
    biased = expected + 5 * rounding.gaps[0].amax()
    assert rounding.allows(0, biased, 0.0, 0.0) == 0.0
    random = nn.Sequential(nn.Dropout(), model)  # which is no rounding
    assert Rounding(random, [x], random(x)).allows(0, random(x)[0], 0.0, 0.0) == 0.0


# ---------------------------------------------------------------- steps of quantizers


class Steps(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.scale = scale

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (torch.fake_quantize_per_tensor_affine(self.conv(x), self.scale, 0, -128, 127),)


@torch.no_grad()
@pytest.mark.parametrize("share", [0.5, 0.01])
@pytest.mark.parametrize("seed", range(3))
def test_planted_steps_are_refused(share, seed) -> None:
    """One step more in half of the elements, or in a few, none of which is near a border."""
    torch.manual_seed(seed)
    model, x = Steps(0.02), seeded(2, 3, 17, 19, seed=seed)
    (expected,) = model(x)
    planted = expected + 0.02 * (torch.rand(expected.shape) < share)
    found = [parity("y", expected, planted)]
    allow_steps(found, model, [x], [("y", expected, planted)], [])
    assert not found[0].ok, f"seed {seed}"


@torch.no_grad()
@pytest.mark.parametrize("values", ["large", "whole"])
def test_planted_steps_of_what_is_exact_are_refused(values) -> None:
    """Numbers of the inputs have no rounding error, however large."""

    class Whole(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x.round(),)

    x = seeded(50, 60) * 1e5 if values == "large" else torch.arange(3000.0).reshape(50, 60) + 0.5
    (expected,) = Whole()(x)
    planted = expected + (torch.arange(3000).reshape(50, 60) % 2)
    found = [parity("y", expected, planted, rtol=0, atol=1e-4)]
    allow_steps(found, Whole(), [x], [("y", expected, planted)], [])
    assert not found[0].ok


@torch.no_grad()
def test_steps_on_a_border_are_allowed() -> None:
    torch.manual_seed(0)
    model, x = Steps(0.02), seeded(8, 3, 37, 39)
    off = (model.conv(x) / 0.02).double().frac().abs() - 0.5
    place = off.abs().flatten().argmin()
    channel = int(place) // (35 * 37) % 8
    values = model.conv(x)
    up = values.flatten()[place].sign() * 0.02
    model.conv.bias[channel] -= up * off.flatten()[place]
    (expected,) = model(x)
    other = expected.clone()
    step = 1 if expected.flatten()[place].abs() < values.flatten()[place].abs() else -1
    other.view(-1)[place] += step * up
    found, notes = [parity("y", expected, other)], []
    assert not found[0].ok
    allow_steps(found, model, [x], [("y", expected, other)], notes)
    assert found[0].ok
    assert "in the same elements" in notes[0]


# ---------------------------------------------------------------- values of inputs in Python


class Taking(nn.Module):
    """A function of tensors and of the module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.table = nn.Embedding(9, 4)
        self.first = None

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def longest(m: Taking, x: Tensor, lengths: Tensor) -> Tensor:
    return x[:, : int(lengths.max())]


def rows(m: Taking, x: Tensor, lengths: Tensor) -> Tensor:
    return torch.stack([row[:n].sum(0) for row, n in zip(x, lengths.tolist(), strict=True)])


def padded(m: Taking, ids: Tensor) -> Tensor:
    if (ids == 0).any():
        return m.table(ids) * (ids != 0)[..., None]
    return m.table(ids) + 1


def expert(m: Taking, x: Tensor, t: Tensor) -> Tensor:
    return m.experts[t.item() % 3](x)


def best(m: Taking, x: Tensor, k: Tensor) -> Tensor:
    return torch.topk(x, int(k)).values


def reshaped(m: Taking, x: Tensor, shape: Tensor) -> Tensor:
    return x.reshape(shape.tolist())


def within(m: Taking, x: Tensor) -> Tensor:
    mean = float(x.mean())
    return x * 2 if 0.5 < mean < 0.9 else x * 3


def formatted(m: Taking, x: Tensor) -> Tensor:
    return x * float(f"{x.sum():.3f}")


def shown(m: Taking, x: Tensor) -> Tensor:
    return x * len(repr(x.sum()))


def array(m: Taking, x: Tensor) -> Tensor:
    return x - torch.as_tensor(np.from_dlpack(x.detach()).max())


def averaged(m: Taking, x: Tensor) -> Tensor:
    return x / (float(x.mean()) + 2)


def pickled(m: Taking, x: Tensor) -> Tensor:
    return x + pickle.loads(pickle.dumps(x)).max()  # noqa: S301 - its own


def stored(m: Taking, x: Tensor) -> Tensor:
    held = torch.zeros(4)
    held[:] = x[0]
    view = held[1:]
    return x * 2 if view.sum() > -1e30 else x * 3  # which no input that is tried is


def remembered(m: Taking, x: Tensor) -> Tensor:
    if m.first is None:
        m.first = x.abs().max()
    return x / m.first


X = torch.rand(3, 4, generator=torch.Generator().manual_seed(1)) * 0.2 + 0.6
LENGTHS = torch.tensor([4, 2, 3])
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
TAKING: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
    (longest, (torch.rand(3, 7, 4), LENGTHS)),
    (rows, (torch.rand(3, 7, 4), LENGTHS)),
    (padded, (IDS,)),
    (expert, (X, torch.tensor(4))),
    (best, (X, torch.tensor(2))),
    (reshaped, (X, torch.tensor([2, 6]))),
    (within, (X,)),
    (formatted, (X,)),
    (shown, (X,)),
    (array, (X,)),
    (averaged, (X,)),
    (pickled, (X,)),
    (stored, (X,)),
    (remembered, (X,)),
]


def refused(model: nn.Module, inputs: Any, folder: Path, **options: Any) -> str:
    """The error of an export, with no file written, or nothing."""
    try:
        svexport.export(model, inputs, folder / "m.onnx", **options)
    except svexport.SvexportError as error:
        assert not list(folder.iterdir())
        return str(error)
    return ""


def agrees(model: nn.Module, path: Any, inputs: tuple[Tensor, ...]) -> bool:
    """Of other inputs of the same kind, in a model that has seen none."""
    fresh = copy.deepcopy(model)
    expected, actual = fresh(*(t.clone() for t in inputs)), svexport.load(path)(*inputs)
    return expected.shape == actual.shape and torch.allclose(expected, actual, rtol=1e-3, atol=1e-4)


OTHERS = {
    longest: [(torch.rand(3, 7, 4), torch.tensor(n)) for n in ([7, 1, 2], [1, 1, 1])],
    rows: [(torch.rand(3, 7, 4), torch.tensor(n)) for n in ([7, 1, 2], [1, 1, 1])],
    padded: [(torch.tensor([[0, 2, 3], [4, 5, 8]]),), (IDS + 1,)],
    expert: [(X, torch.tensor(n)) for n in (0, 2)],
    best: [(X, torch.tensor(n)) for n in (1, 4)],
    reshaped: [(X, torch.tensor(n)) for n in ([3, 4], [12, 1])],
}


@ALL_OPSETS
@pytest.mark.parametrize(("function", "inputs"), TAKING, ids=[f.__name__ for f, _ in TAKING])
def test_values_of_inputs_in_python(function, inputs, opset, tmp_path) -> None:
    """The file is right for other values, or refused, up to opset 17 with the line that takes them."""
    torch.manual_seed(0)
    model = Taking(function).eval()
    error = refused(model, inputs, tmp_path, opset=opset)
    if error:
        lines = rf"test_verify\.py:\d+ in {function.__name__}: |forward changes first|test_verify\.py:\d+: "
        assert re.search(lines, error) or opset > 17, error
        return
    with torch.no_grad():
        others = OTHERS.get(function) or [(X * 9,), (X - 2,), (-X,)]
        assert all(agrees(model, tmp_path / "m.onnx", other) for other in others)


class Harmless(nn.Module):
    """Looks at values, from which nothing follows."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.register_buffer("sizes", torch.tensor([2, 6]))

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "assert":
            assert x.abs().max() < 1e30, f"too large: {x.abs().max().item()}"
        elif self.where == "raise":
            if x.abs().sum() > 1e30:
                raise ValueError(f"too much, {x.sum()}")
        elif self.where == "print":
            print(f"mean {x.mean():.3f}", x.sum().tolist())
        elif self.where == "log":
            logging.getLogger("test").debug("mean %s", x.mean().item())
        elif self.where == "kept":
            self.last = x.mean().item()
        elif self.where == "buffer":
            return x.reshape(int(self.sizes[0]), int(self.sizes[1])) * 2
        elif self.where == "size":
            return x.reshape(int(torch.tensor(x.shape[0])), -1) * 2
        return x * 2


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("where", ["assert", "raise", "print", "log", "kept", "buffer", "size"])
def test_values_from_which_nothing_follows(where, opset, tmp_path, capsys) -> None:
    assert svexport.export(Harmless(where), X, tmp_path / "m.onnx", opset=opset).verified
    assert ("mean -" not in capsys.readouterr().out) or where == "print"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("drawn", [tried.DRAWN, 2**17])
def test_scaled_inputs_of_many_elements(drawn, dtype, monkeypatch) -> None:
    """Of both signs and all scales alike everywhere, also where there are more elements than random numbers."""
    monkeypatch.setattr(tried, "DRAWN", drawn)
    torch.manual_seed(0)
    x = torch.rand(5, 2**17 + 3).to(dtype) + 1
    (scaled,) = next(tried.far("scaled", [x], {}))
    assert scaled.dtype == dtype
    factors = scaled.double() / x.double()
    for row in factors:
        for power in (0.1, 1.0, 10.0, 100.0):
            for sign in (1, -1):
                share = float(((row / (sign * power) - 1).abs() < 0.01).double().mean())
                assert abs(share - 1 / 8) < 0.01


@BOTH_EXPORTERS
def test_inputs_that_are_frozen(opset, tmp_path) -> None:
    model, inputs = Taking(longest).eval(), (torch.rand(3, 7, 4), LENGTHS)
    report = svexport.export(model, inputs, tmp_path / "m.onnx", opset=opset, freeze=["inputs_1"])
    assert report.verified
    assert list(report.inputs) == ["inputs_0"]
    text = "inputs_1 is a constant of the file (freeze): int64[3] [4, 2, 3]"
    assert text in report.notes
    assert onnx.load(report.path).doc_string == "inputs_1 is a constant: int64[3] [4, 2, 3]"
    other = torch.rand(3, 7, 4)
    torch.testing.assert_close(svexport.load(report.path)(other), other[:, :4])
    for freeze, message in (
        (["lengths"], r"freeze names \['lengths'\]; the inputs are"),
        ("inputs_1", "list of input names"),
    ):
        with pytest.raises(svexport.ExportError, match=message):
            svexport.export(model, inputs, tmp_path / "m.onnx", opset=opset, freeze=freeze)


# ---------------------------------------------------------------- sizes


def square(x: Tensor) -> Tensor:
    return x * 2 if x.shape[2] == x.shape[3] else x * 3


def thirds(x: Tensor) -> Tensor:
    return x * 2 if x.shape[2] % 3 == 0 else x * 3


def long(x: Tensor) -> Tensor:
    return x * 2 if x.shape[2] > 16 else x * 3


def alone(x: Tensor) -> Tensor:
    return x * 2 if x.shape[2] == 1 else x * 3


def chunks(x: Tensor) -> Tensor:
    return torch.cat([x[:, :, i : i + 4].sum(2, keepdim=True) for i in range(0, x.shape[2], 4)], 2)


def at_most(x: Tensor) -> Tensor:
    return x[:, :, : min(x.shape[2], 16)]


def to_square(x: Tensor) -> Tensor:
    size = max(x.shape[2], x.shape[3])
    return nn.functional.pad(x, (0, size - x.shape[3], 0, size - x.shape[2]))


SIZES = [(square, 8, 8), (thirds, 4, 5), (long, 4, 5), (alone, 4, 5), (alone, 1, 5), (chunks, 8, 5), (at_most, 4, 5)]
SIZES += [(to_square, 8, 6), (to_square, 8, 8), (long, 17, 5), (thirds, 6, 5)]


@ALL_OPSETS
@pytest.mark.parametrize(("function", "height", "width"), SIZES, ids=[f"{f.__name__}-{h}-{w}" for f, h, w in SIZES])
def test_sizes_in_python(function, height, width, opset, tmp_path) -> None:
    """The file is right for other sizes, or refused."""

    class Sized(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    axes = {"x": {2: "h", 3: "w"}}
    error = refused(Sized(), torch.rand(1, 2, height, width), tmp_path, opset=opset, dynamic_axes=axes)
    if error:
        says = r"test_verify\.py:\d+|on .*[hw]=\d+|[hw]=\d+ inputs|is to be dynamic|dynamic sizes of 2 or more"
        assert re.search(says, error), error
        return
    for h, w in ((3, 5), (12, 12), (1, 7), (9, 2), (20, 17), (40, 3)):
        x = torch.rand(1, 2, h, w)
        torch.testing.assert_close(svexport.load(tmp_path / "m.onnx")(x), function(x))


# ---------------------------------------------------------------- inputs that are tried, and the report


def dropped(x: Tensor, mask: Tensor, ids: Tensor, fault: str) -> Tensor:
    """Ends of functions that tame inputs do not reach; a fault leaves one out of the file."""
    traced = fault if torch.jit.is_tracing() or torch.compiler.is_exporting() else ""
    x = x if traced == "relu" else x.relu()
    x = x if traced == "clip" else x.clamp(max=50.0)
    x = x if traced == "where" else torch.where(mask, x, x * 2)
    return x * (1 if traced == "ids" else torch.where(ids == 5, 3, 1))


@BOTH_EXPORTERS
@pytest.mark.parametrize("fault", ["", "relu", "clip", "where", "ids"])
def test_what_tame_inputs_do_not_reach(fault, opset, tmp_path) -> None:
    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(6, 4)

        def forward(self, x: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
            return dropped(x, mask, ids[:, None], fault) + self.table(ids)

    inputs = torch.rand(8, 4) + 0.5, torch.ones(8, 4, dtype=torch.bool), torch.tensor([1, 2, 3, 1, 2, 3, 1, 2])
    torch.manual_seed(0)
    if fault:
        with pytest.raises(svexport.VerificationError):
            svexport.export(Ends(), inputs, tmp_path / "m.onnx", opset=opset)
        return
    report = svexport.export(Ends(), inputs, tmp_path / "m.onnx", opset=opset)
    assert [p.run for p in report.parity] == ["given", "scaled", "zeros"]
    assert report.skipped == []


def test_report_says_what_was_skipped(tmp_path) -> None:
    class Roots(nn.Module):
        def forward(self, x: Tensor, n: Tensor) -> Tensor:
            if (x < 0).any():
                raise ValueError("no roots")
            return x.sqrt() / n

    report = svexport.export(Roots(), (X, torch.tensor([3, 4, 5, 6])), tmp_path / "m.onnx", opset=11)
    assert report.skipped == ["scaled: the model itself fails there (ValueError: no roots)"]
    assert "not compared on" in str(report)
    assert report.to_dict()["skipped"] == report.skipped


@BOTH_EXPORTERS
def test_quick(opset, tmp_path) -> None:
    report = svexport.export(nn.Linear(4, 4), X, tmp_path / "m.onnx", opset=opset, verify="quick")
    assert {p.run for p in report.parity} == {"given"}
    assert not report.verified
    assert "not verified" in str(report)
    assert "Not verified, only compared" in report._repr_html_()
    assert svexport.export(nn.Linear(4, 4), X, tmp_path / "m.onnx", opset=opset, verify="default").verified


@pytest.mark.parametrize(("verify", "message"), [("slow", "is unknown"), ("fast", "is unknown"), (1.5, "unknown")])
def test_kinds_of_verification(verify, message, tmp_path) -> None:
    with pytest.raises(svexport.ExportError, match=message):
        svexport.export(nn.Linear(4, 4), X, tmp_path / "m.onnx", verify=verify)


class OfNothing(nn.Module):
    """torch has the least integer for the median of nothing, a file nothing to sort."""

    def forward(self, x: Tensor) -> Tensor:
        return x.long().median() + x.sum()


class Parts(nn.Module):
    """Divides a whole number by a size, which ends the process where that is 0; torch has none of nothing."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[0])
        return x[places % torch.tensor(7) // (torch.zeros_like(places).sum() + x.shape[0])]


@pytest.mark.parametrize("model", [OfNothing(), Parts()])
def test_a_size_that_may_not_be_zero_is_said(model: nn.Module, tmp_path) -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    report = svexport.export(model, (x,), tmp_path / "m.onnx", dynamic_axes={"x": {0: "n"}})
    assert report.verified
    assert "n: sizes from 1; with 0 the file does not compute what torch does" in report.notes
    file = onnx.load(report.path)
    assert file.doc_string == "n: sizes from 1"
    onnx.checker.check_model(file, full_check=True)
    engine = svexport.load(report.path)
    for given in (x, x[:1]):
        torch.testing.assert_close(engine(given), model(given))
    for named in ({}, {"x": x[:0]}):  # and not what may end the process
        with pytest.raises(svexport.EngineError, match="this file is for n from 1 on"):
            engine(*([] if named else [x[:0]]), **named)


def test_a_size_from_one_on_is_not_zero(tmp_path) -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    sizes = {"x": {0: torch.export.Dim("n", min=1)}}
    report = svexport.export(OfNothing(), (x,), tmp_path / "m.onnx", dynamic_shapes=sizes)
    assert report.verified
    assert not any("sizes from 1" in note for note in report.notes)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        heads = x.unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads)


class OfBatches(nn.Module):
    """With heads behind tokens, as in nn.MultiheadAttention: ONNX Runtime fuses the products with what moves them."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.reshape(x.shape[0], 5 * 3, 1).transpose(0, 1)
        return (heads @ heads.transpose(1, 2)).softmax(-1) @ heads


class OverPlaces(nn.Module):
    """A norm over as many places as the first size says: of none, ONNX Runtime reads the first."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(1, 2, 0))


ENDING = [
    (Recurrent(nn.LSTM), 11),
    (Recurrent(nn.GRU), 18),
    (Recurrent(nn.RNN), 17),
    (Attends(), 23),
    (OfBatches(), 11),
]
ENDING += [(OverPlaces(nn.InstanceNorm1d(3)), 11), (OverPlaces(nn.GroupNorm(3, 3)), 18)]


@pytest.mark.parametrize(("model", "opset"), ENDING)
def test_kernels_that_end_the_process_at_a_size_of_0_are_not_run(model: nn.Module, opset: int, tmp_path) -> None:
    report = svexport.export(
        model, torch.randn(2, 5, 3), tmp_path / "m.onnx", opset=opset, dynamic_axes={"x": {0: "n"}}
    )
    assert report.verified
    ran = "n=0" in {p.run for p in report.parity}
    assert ran != any(note.startswith("n: sizes from 1") for note in report.notes)
    assert not ran or not {"Attention", "GRU", "InstanceNormalization", "LSTM", "RNN"} & report.nodes.keys()


REMEMBERED: list[Tensor] = []


class Remembers(nn.Module):
    """Outside of itself, what it was given before."""

    def forward(self, x: Tensor) -> Tensor:
        REMEMBERED.append(x.mean())
        return x - REMEMBERED[-2] if len(REMEMBERED) > 1 else x


class Counts(nn.Module):
    """Something of each call goes into the next one, by another way each."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        REMEMBERED.append(len(REMEMBERED))
        count = REMEMBERED[-1]
        x = x * 1.5 + 2
        if self.way == "number":
            return x * (1 + 0.01 * count)
        if self.way == "tensor":
            return x * torch.from_numpy(np.float32([1 + 0.01 * count]))
        if self.way == "result":
            return (x, x * 1.01)[count % 2]
        if self.way == "autograd function":
            return _Counting.apply(x)
        return torch.ops.svexport_tests.counting(x)


def _counted(x: Tensor) -> Tensor:
    return x.detach() * (1 + 0.01 * REMEMBERED[-1])


class _Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return _counted(x)


torch.library.define("svexport_tests::counting", "(Tensor x) -> Tensor")
torch.library.impl("svexport_tests::counting", "CompositeImplicitAutograd", _counted)


@pytest.mark.parametrize("way", ["number", "tensor", "result", "autograd function", "op"])
def test_what_changes_with_every_call_excuses_nothing(way: str, tmp_path, monkeypatch) -> None:
    """Nor do perturbed calls, which are further from the first ones for that."""
    allowed, allows = [], Rounding.allows
    monkeypatch.setattr(Rounding, "allows", lambda *arguments: allowed.append(allows(*arguments)) or allowed[-1])
    REMEMBERED.clear()
    assert refused(Counts(way), torch.randn(4, 6) + 3, tmp_path, opset=18)
    assert allowed
    assert not any(allowed)


@pytest.mark.parametrize("opset", [11, 18])
def test_what_a_model_remembers_elsewhere(opset: int, tmp_path) -> None:
    REMEMBERED.clear()
    assert refused(Remembers(), torch.randn(4, 6) + 3, tmp_path, opset=opset)
