from __future__ import annotations

import pytest
import torch

from svexport.ops.fast_sigmoid import OP, fast_tanh
from tests.gpu.support import check_kernel, gpu, relative_error

pytestmark = gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (4099,), (1,), (), (0, 3), (64, 1024), (1, 16, 8, 8)])
def test_values_and_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 4).to(dtype)
    check_kernel(OP, (x,))
    expected = OP.reference(x.double())
    layouts = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(shape), torch.stack([x, x], -1)[..., 0]]
    if x.dim() == 4:
        layouts.append(x.to(memory_format=torch.channels_last))
    for layout in layouts:
        leaf = layout.cuda().detach().requires_grad_()
        output = OP(leaf)
        assert relative_error(output, expected) < 1e-2
        (grad,) = torch.autograd.grad(output.sum(), leaf)
        assert grad.is_contiguous()
        same = x.double().requires_grad_()
        assert relative_error(grad, torch.autograd.grad(OP.reference(same).sum(), same)[0]) < 1e-2


def test_limits() -> None:
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1e-40])
    expected = OP.reference(x)
    assert torch.equal(OP(x.cuda()).cpu().nan_to_num(7), expected.nan_to_num(7))
    on_cpu, on_gpu = x.clone().requires_grad_(), x.cuda().requires_grad_()
    wanted, actual = (torch.autograd.grad(OP(t).sum(), t)[0].cpu() for t in (on_cpu, on_gpu))
    torch.testing.assert_close(actual, wanted, equal_nan=True)


def test_fast_tanh() -> None:
    x = torch.randn(1000)
    assert relative_error(fast_tanh(x.cuda()), fast_tanh(x.double())) < 1e-5
