from __future__ import annotations

import pytest
import torch
from torch import Tensor

from svexport.ops.space_to_depth import OP
from tests.gpu.support import gpu

pytestmark = gpu

DTYPES = [torch.float32, torch.float16, torch.int8, torch.bool, torch.int64]


def make(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-100, 100, shape, device="cuda").to(dtype)


def by_slices(x: Tensor) -> Tensor:
    return torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        *[
            (1, 3, 640, 640),
            (2, 3, 36, 92),
            (3, 1, 2, 2),
            (2, 5, 14, 58),
            (1, 64, 30, 66),
            (2, 16, 6, 50),
            (0, 3, 4, 4),
        ],
        *[(2, 25, 12, 2), (2, 46, 10, 16), (2, 101, 6, 58), (1, 5, 8, 94)],
    ],
)
def test_values(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = make(*shape, dtype=dtype)
    layouts = [
        x,
        x.to(memory_format=torch.channels_last),
        torch.cat([x, x], -1)[..., : shape[-1]],
        torch.cat([x.new_zeros(1), x.flatten()])[1:].view(shape),
        x.transpose(2, 3).contiguous().transpose(2, 3),
        torch.stack([x, x], -1)[..., 0],
        x[:, :1].expand(shape),
    ]
    for layout in layouts:
        output = OP(layout)
        assert output.is_contiguous()
        assert torch.equal(output, by_slices(layout))


@pytest.mark.parametrize("shape", [(1, 3, 64, 640), (2, 3, 10, 14), (2, 40, 6, 70), (2, 7, 10, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradient(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = make(*shape, dtype=dtype)
    grad = make(shape[0], 4 * shape[1], shape[2] // 2, shape[3] // 2, dtype=dtype)
    for layout in (x, x.to(memory_format=torch.channels_last)):
        leaf = layout.detach().requires_grad_()
        for g in (grad, grad.to(memory_format=torch.channels_last), grad[:, :1].expand(grad.shape)):
            (actual,) = torch.autograd.grad(OP(leaf), leaf, g)
            (expected,) = torch.autograd.grad(by_slices(leaf), leaf, g)
            assert torch.equal(actual, expected)


@pytest.mark.large
def test_more_than_2_to_the_31_elements() -> None:
    x = torch.randint(-100, 100, (1, 2, 2**15 + 2, 2**15 + 32), device="cuda", dtype=torch.int8)
    assert torch.equal(OP(x), by_slices(x))
    x = x.to(memory_format=torch.channels_last)
    assert torch.equal(OP(x), by_slices(x))
