from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from svexport.ops.dequantize import DTYPES, dequantize
from svexport.ops.dequantize import OP as DEQUANTIZE
from svexport.ops.quantize import OP, quantize
from tests.gpu.support import gpu

pytestmark = gpu

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def layouts(x: Tensor) -> list[Tensor]:
    variants = [x, torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape), torch.stack([x, x], -1)[..., 0]]
    if x.dim() == 4:
        variants += [
            x.to(memory_format=torch.channels_last),
            x.transpose(2, 3).contiguous().transpose(2, 3),
            x[:, :, ::2],
        ]
    return variants


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 32, 16, 24), (4099,), (1,), (), (0, 4), (3, 129), (2, 7, 1, 64)])
def test_values_are_those_of_the_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 2).to(dtype)
    scales = [0.013, torch.tensor(0.021), torch.tensor([0.5]).half()]
    axes = [(axis, torch.rand(size) * 0.05 + 1e-3) for axis, size in enumerate(shape) if size != 1]
    for restricted in (False, True):
        for layout in layouts(x):
            for scale, axis in [*((s, 0) for s in scales), *((s[: layout.shape[a]], a) for a, s in axes)]:
                expected = quantize(layout, scale, axis, restricted)
                cuda = layout.cuda()
                if layout.is_contiguous(memory_format=torch.channels_last) and layout.dim() == 4:
                    cuda = cuda.to(memory_format=torch.channels_last)
                actual = quantize(cuda, scale.cuda() if isinstance(scale, Tensor) else scale, axis, restricted)
                assert torch.equal(actual.cpu(), expected)
                assert actual.stride() == torch.empty_like(cuda).stride()
                for result in FLOATS:
                    wide = dequantize(expected, scale, result, axis)
                    back = dequantize(actual, scale.cuda() if isinstance(scale, Tensor) else scale, result, axis)
                    assert back.dtype == result
                    assert torch.equal(back.cpu(), wide)


def test_ties_and_neighbours_of_ties() -> None:
    """The quotient is rounded to float32 before it is rounded to an integer: x next to (k + 1/2) * scale."""
    scales = torch.cat(
        [torch.rand(3000) * 10.0 ** torch.randint(-30, 30, (3000,)), torch.tensor([1e-38, 1e-42, 1e38, 0.1])]
    )
    ties = torch.arange(-130, 130) + 0.5
    x = scales[:, None] * ties
    for near in (x, x.nextafter(torch.tensor(math.inf)), x.nextafter(torch.tensor(-math.inf))):
        expected = OP(near, 1.0, scales, 0, False)
        assert torch.equal(OP(near.cuda(), 1.0, scales.cuda(), 0, False).cpu(), expected)


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 0.02, 1e30, 3e38])
def test_far_beyond_the_range(scale: float) -> None:
    x = torch.tensor([math.inf, -math.inf, 3.4e38, -3.4e38, 1e-45, -1e-45, 0.0, -0.0, 1e-38, 65504.0])
    for restricted in (False, True):
        assert torch.equal(quantize(x.cuda(), scale, 0, restricted).cpu(), quantize(x, scale, 0, restricted))


def test_all_integers_return() -> None:
    q = torch.arange(-128, 128, dtype=torch.int8)
    for dtype in FLOATS:
        x = dequantize(q.cuda(), 0.037, dtype)
        assert torch.equal(quantize(x, 0.037, 0, False).cpu(), q)


def test_gradient_of_the_scales() -> None:
    number = {dtype: number for number, dtype in DTYPES.items()}[torch.float32]
    q, scales = torch.randint(-128, 128, (6, 5, 7), dtype=torch.int8), torch.rand(5)
    grad = torch.randn(6, 5, 7)
    (wanted,) = torch.autograd.grad(DEQUANTIZE(q, 1.0, scales.requires_grad_(), 1, number), scales, grad)
    leaf = scales.detach().cuda().requires_grad_()
    (actual,) = torch.autograd.grad(DEQUANTIZE(q.cuda(), 1.0, leaf, 1, number), leaf, grad.cuda())
    torch.testing.assert_close(actual.cpu(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.large
def test_more_than_2_to_the_31_elements() -> None:
    x = torch.empty(2**31 + 2**12, dtype=torch.float16, device="cuda").fill_(0.5)
    x[-3:] = torch.tensor([1.0, -2.0, 100.0])
    q = quantize(x, 0.5)
    assert q[:-3].eq(1).all()
    assert q[-3:].tolist() == [2, -4, 127]
    assert torch.equal(dequantize(q[-5:], 0.5, torch.float16), torch.tensor([0.5, 0.5, 1, -2, 63.5]).half().cuda())
