"""Compares attention whose backward is called by hand with torch's autograd."""

import pytest
import torch
import torch.nn.functional as F

from svexport.ops._gradients import Attended


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("shape", "keys"), [((1, 4, 17, 8), 17), ((3, 2, 5, 3), 7), ((2, 1, 1, 16), 1)])
@pytest.mark.parametrize("by", ["operators", "autograd"])
def test_attention(shape, keys, dtype, by, monkeypatch):
    if by == "autograd":
        monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_: torch.nn.attention.SDPBackend.MATH.value)
    n, heads, _, width = shape
    q, k, v = (torch.randn(n, rows, heads, width, dtype=dtype).transpose(1, 2) for rows in (shape[2], keys, keys))
    attended = Attended.of(q, k, v)
    assert bool(attended.kept) == (by == "operators")
    given = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(*given)
    torch.testing.assert_close(attended.output, expected)
    rate = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, given, rate)
    torch.testing.assert_close(attended.backward(rate), gradients)
