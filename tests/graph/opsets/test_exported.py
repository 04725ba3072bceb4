"""Files that torch's exporter writes at opset 20, converted to lower opsets."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx.version_converter
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport
from tests.support import BOTH_EXPORTERS, run_model

pytestmark = pytest.mark.skipif(not BOTH_EXPORTERS, reason="torch is too old for the exporter on torch.export")

LOWER = (17, 13, 11, 9)
ROWS, IMAGE = (2, 4, 6), (2, 4, 8, 8)

Function = Callable[[Tensor], tuple[Tensor, ...]]
FUNCTIONS: dict[str, tuple[Function, tuple[int, ...]]] = {}


def function(*shape: int) -> Callable[[Function], Function]:
    """Adds a function of a tensor of a shape."""

    def add(of: Function) -> Function:
        FUNCTIONS[of.__name__] = of, shape
        return of

    return add


@function(*ROWS)
def reductions(x: Tensor) -> tuple[Tensor, ...]:
    sums = x.mean(1), x.sum((0, -1)), x.logsumexp(1), x.norm(dim=1), x.prod(-1), x.std(1), x.abs().sum(), x.cumsum(1)
    return *sums, x.amax(1), x.amin(-1, keepdim=True), x.argmax(1), x.argmin(-1), x.max(), x.all(1), (x > 0).any(-1)


@function(*ROWS)
def parts(x: Tensor) -> tuple[Tensor, ...]:
    slices = x[:, 1:3], x[..., ::2], x.flip(1), x[:, -1], x.roll(1, 1), x.unfold(2, 2, 1), x.narrow(1, 1, 2)
    return *slices, *x.split(2, 1), *x.chunk(4, -1), *x.unbind(0), x.repeat(1, 2, 1), x.tile(2)


@function(*ROWS)
def shapes(x: Tensor) -> tuple[Tensor, ...]:
    some = x.reshape(-1), x.flatten(1), x.unsqueeze(1), x[:, :1].squeeze(1), x.permute(2, 0, 1), x.expand(3, 2, 4, 6)
    return *some, x.view(2, 2, 2, 6), torch.stack([x, x], 1), torch.cat([x, x], -1), torch.tril(x), torch.triu(x, 1)


@function(*ROWS)
def pads(x: Tensor) -> tuple[Tensor, ...]:
    modes = (F.pad(x, (1, 2), mode=mode) for mode in ("reflect", "replicate", "circular"))
    return *modes, F.pad(x, (1, 2), value=3.0), F.pad(x, (-1, 1, 0, 2)), F.pad((x * 9).long(), (1, 0), value=2**60)


@function(*ROWS)
def bounds(x: Tensor) -> tuple[Tensor, ...]:
    whole = (x * 10).long()
    integers = whole.clamp(0, 3), whole.int().clamp(min=1), whole.maximum(torch.tensor(2)), whole.minimum(whole * 2)
    return *integers, x.clamp(0, 1), x.clamp(min=0.5), F.relu6(x), F.hardtanh(x), torch.maximum(x, x * 2)


@function(*ROWS)
def activations(x: Tensor) -> tuple[Tensor, ...]:
    simple = (F.silu, F.mish, F.hardswish, F.hardsigmoid, F.elu, F.celu, F.selu, F.softplus, F.leaky_relu, F.softsign)
    gelus = F.gelu(x), F.gelu(x, approximate="tanh"), F.glu(x, 1), F.threshold(x, 0.1, 20.0)
    return *gelus, *(each(x) for each in simple), F.softmax(x, 1), F.log_softmax(x, -1), F.logsigmoid(x)


@function(*ROWS)
def norms(x: Tensor) -> tuple[Tensor, ...]:
    layers = F.layer_norm(x, x.shape[1:]), F.layer_norm(x, (6,), torch.ones(6) * 2, torch.ones(6))
    return *layers, F.group_norm(x, 2), F.instance_norm(x), F.normalize(x, dim=1), F.rms_norm(x, (6,))


@function(*ROWS)
def indices(x: Tensor) -> tuple[Tensor, ...]:
    first, two = torch.zeros(2, 1, 6, dtype=torch.long), torch.zeros(2, 2, 6, dtype=torch.long)
    taken = (
        x[:, torch.tensor([0, -2])],
        x.gather(1, first),
        x.take_along_dim(x.argsort(1), 1),
        x.index_select(2, two[0, 0]),
    )
    put = x.scatter(1, first, x[:, :1]), x.scatter_add(1, two, x[:, :2]), x.scatter_reduce(1, two, x[:, :2], "amax")
    sorted_ = x.topk(2, 1)[0], x.topk(2, -1, largest=False)[1], x.sort(1)[0]
    return *taken, *put, *sorted_, x.masked_fill(x > 0, 0.0), torch.where(x > 0, x, -x), F.one_hot(two[0, 0] + 2, 4)


@function(*ROWS)
def arithmetic(x: Tensor) -> tuple[Tensor, ...]:
    whole = (x * 10).int()
    bits = whole & 3, whole | 5, whole ^ 9, ~whole, whole << 1, whole.long() % 3, whole.long() // 3
    kinds = x.isnan(), x.isinf(), x.logical_not(), (x > 0) & (x < 1), (x > 0) ^ (x < 1), x >= 0, x != x
    return (
        *bits,
        *kinds,
        x.round(),
        x.floor(),
        x.trunc(),
        x.sign(),
        x.erf(),
        x**2,
        x.abs() ** 0.5,
        torch.atan2(x, x + 1),
    )


@function(*IMAGE)
def pools(x: Tensor) -> tuple[Tensor, ...]:
    largest = F.max_pool2d(x, 2), F.max_pool2d(x, 3, 2, 1, ceil_mode=True), F.adaptive_max_pool2d(x, 1)
    means = F.avg_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False)
    return *largest, *means, F.adaptive_avg_pool2d(x, 2), F.max_pool2d(x, 2, return_indices=True)[1]


@function(*IMAGE)
def sizes(x: Tensor) -> tuple[Tensor, ...]:
    linear = (F.interpolate(x, size=(5, 7), mode="bilinear", align_corners=corners) for corners in (False, True))
    other = F.interpolate(x, scale_factor=2), F.interpolate(x, scale_factor=2, mode="bicubic")
    return *linear, *other, F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2)


@function(*IMAGE)
def convolutions(x: Tensor) -> tuple[Tensor, ...]:
    weight = torch.linspace(-1, 1, 72).view(2, 4, 3, 3)
    normed = F.batch_norm(x, torch.zeros(4), torch.ones(4) * 2)
    return F.conv2d(x, weight, padding=1), F.conv_transpose2d(x[:, :2], weight, stride=2), F.unfold(x, 2), normed


class Of(nn.Module):
    def __init__(self, of: Function) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.of(x)


def exported(name: str, dynamic: bool) -> tuple[onnx.ModelProto, list[Tensor]]:
    """A model at opset 20, and inputs of another batch size than it was traced with where that is dynamic."""
    of, shape = FUNCTIONS[name]
    batch = {0: torch.export.Dim("batch", min=2)} if dynamic else None
    program = torch.onnx.export(
        Of(of).eval(),
        (torch.randn(shape),),
        dynamo=True,
        opset_version=20,
        verbose=False,
        dynamic_shapes=None if batch is None else (batch,),
    )
    assert program is not None
    return program.model_proto, [torch.randn(3 if dynamic and name != "shapes" else 2, *shape[1:])]


def check(model: onnx.ModelProto, inputs: list[Tensor]) -> None:
    expected = run_model(model, inputs)
    for opset in LOWER:
        for actual, wanted in zip(run_model(svexport.convert(model, opset), inputs), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


OFTEN = ("reductions", "norms", "indices")


@pytest.mark.parametrize(
    "name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.exhaustive) for n in FUNCTIONS]
)
def test_functions(name: str) -> None:
    check(*exported(name, dynamic=False))


@pytest.mark.exhaustive
@pytest.mark.parametrize(  # torch.export takes the batch of the others for a number
    "name", sorted(FUNCTIONS.keys() - {"shapes", "parts", "norms", "indices"})
)
def test_functions_of_any_batch(name: str) -> None:
    check(*exported(name, dynamic=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FUNCTIONS)
def test_up_by_onnx_and_down_again(name: str) -> None:
    model, inputs = exported(name, dynamic=False)
    low = svexport.convert(model, 13)
    check(onnx.version_converter.convert_version(low, 20), inputs)
