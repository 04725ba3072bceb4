from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from svexport.ops.from_chw32 import OP as FROM
from svexport.ops.to_chw32 import OP
from tests.gpu.support import gpu

pytestmark = gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64]
SHAPES = [
    (1, 256, 116, 200),
    (2, 64, 18, 46),
    (1, 33, 9, 23),
    (3, 5, 1, 1),
    (2, 70, 7, 16),
    (1, 32, 29, 50),
    (0, 3, 4, 4),
]


def make(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-100, 100, shape, device="cuda").to(dtype)


def by_formula(x: Tensor) -> Tensor:
    """Element (n, c, h, w) at ((n*ceil(C/32) + c//32)*H*W + h*W + w)*32 + c%32."""
    n, c, h, w = x.shape
    blocks = -(-c // 32)
    flat = torch.zeros(n * blocks * h * w * 32, dtype=x.dtype)
    i, j, k, l = torch.meshgrid(*map(torch.arange, x.shape), indexing="ij")
    flat[((i * blocks + j // 32) * h * w + k * w + l) * 32 + j % 32] = x.cpu()
    return flat.view(n, blocks, h, w, 32)


def layouts(x: Tensor) -> list[Tensor]:
    return [
        x,
        x.to(memory_format=torch.channels_last),
        torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
        torch.cat([x, x], -1)[..., : x.shape[-1]],
        torch.cat([x, x], 1)[:, : x.shape[1]],
        x.transpose(2, 3).contiguous().transpose(2, 3),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = make(*shape, dtype=dtype)
    expected = by_formula(x)
    for layout in layouts(x):
        actual = OP(layout, False)
        assert actual.is_contiguous()
        assert torch.equal(actual.cpu(), expected)
    packed = OP(x, False)
    spread = torch.stack([packed, packed], -1)[..., 0]
    shifted = torch.cat([packed.new_zeros(1), packed.flatten()])[1:].view(packed.shape)
    for layout in (packed, spread, shifted, packed.transpose(0, 2).contiguous().transpose(0, 2)):
        back = FROM(layout, shape[1])
        assert back.is_contiguous()
        assert torch.equal(back, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("shape", [(1, 256, 18, 46), (2, 70, 7, 40), (2, 33, 9, 23), (1, 5, 2, 2), (1, 3, 3, 7)])
def test_pool(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = make(*shape, dtype=dtype)
    expected = by_formula(F.max_pool2d(x.double(), 2).to(dtype))
    for layout in layouts(x):
        assert torch.equal(OP(layout, True).cpu(), expected)


def test_pool_of_nan_and_infinity() -> None:
    x = torch.randn(1, 3, 6, 8)
    x[0, 0, 0, 1], x[0, 1, 3, 2], x[0, 2, 4, 4] = torch.nan, torch.inf, -torch.inf
    x[0, 1, :2, :2] = -torch.inf
    assert torch.equal(OP(x.cuda(), True).cpu().nan_to_num(123), OP(x, True).nan_to_num(123))


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 64, 18, 46), (1, 33, 9, 23), (2, 5, 3, 2)])
def test_gradients(shape: tuple[int, ...], dtype: torch.dtype, pool: bool) -> None:
    """Of equal pixels the first one gets it, of several NaN the last: as on the CPU."""
    x = torch.randint(-2, 3, shape).to(dtype)
    x[0, 0, 0, :2] = torch.nan
    for layout in layouts(x):
        on_cpu, on_gpu = x.clone().requires_grad_(), layout.cuda().detach().requires_grad_()
        expected = OP(on_cpu, pool)
        grad = torch.randint(-9, 9, expected.shape).to(dtype)
        (wanted,) = torch.autograd.grad(expected, on_cpu, grad)
        for g in (grad.cuda(), torch.stack([grad, grad], -1).cuda()[..., 0]):
            (actual,) = torch.autograd.grad(OP(on_gpu, pool), on_gpu, g)
            assert torch.equal(actual.cpu(), wanted)


@pytest.mark.parametrize("channels", [1, 32, 33, 70])
def test_gradients_of_the_inverse(channels: int) -> None:
    x = torch.randn(2, -(-channels // 32), 5, 8, 32)
    grad = torch.randn(2, channels, 5, 8)
    leaf, cuda = x.clone().requires_grad_(), x.cuda().requires_grad_()
    (wanted,) = torch.autograd.grad(FROM(leaf, channels), leaf, grad)
    for g in layouts(grad.cuda()):
        (actual,) = torch.autograd.grad(FROM(cuda, channels), cuda, g)
        assert torch.equal(actual.cpu(), wanted)


@pytest.mark.large
def test_more_than_2_to_the_31_elements() -> None:
    x = torch.zeros(1, 65, 5000, 6800, device="cuda", dtype=torch.int8)
    x[0, 64, -1, -8:] = torch.arange(8, dtype=torch.int8)
    packed = OP(x, False)
    assert packed[0, 2, -1, -8:, 0].tolist() == list(range(8))
    assert torch.equal(FROM(packed, 65), x)
