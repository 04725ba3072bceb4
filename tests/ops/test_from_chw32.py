from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from svexport.ops.from_chw32 import OP, from_chw32
from tests.support import OPSETS, run_op

PROBLEMS = [
    ((1, 1, 1, 1), 1),
    ((2, 1, 2, 3), 3),
    ((1, 1, 3, 2), 32),
    ((1, 2, 2, 2), 33),
    ((2, 3, 1, 5), 96),
    ((0, 1, 2, 2), 5),
]


def blocks(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Without zeros where the padding is: it must not matter."""
    x = torch.randn(*shape, 32, generator=torch.Generator().manual_seed(sum(shape))) * 60
    return x.clamp(-128, 127).to(dtype)


def by_hand(x: np.ndarray, channels: int) -> np.ndarray:
    n, count, h, w, _ = x.shape
    y = np.empty((n, channels, h, w), x.dtype)
    flat = x.reshape(-1)
    for i, j, a, b in itertools.product(*map(range, y.shape)):
        y[i, j, a, b] = flat[((i * count + j // 32) * h * w + a * w + b) * 32 + j % 32]
    return y


@pytest.mark.parametrize(("shape", "channels"), PROBLEMS)
def test_values(shape, channels) -> None:
    for dtype in (torch.int8, torch.float16, torch.float32, torch.int64):
        x = blocks(shape, dtype)
        y = from_chw32(x, channels)
        assert y.is_contiguous()
        assert y.dtype == dtype
        np.testing.assert_array_equal(y.numpy(), by_hand(x.numpy(), channels))


@pytest.mark.parametrize("opset", OPSETS)
def test_body(opset) -> None:
    for shape, channels in PROBLEMS:
        for dtype in (torch.int8, torch.float16, torch.float32):
            x = blocks(shape, dtype)
            for dynamic in (False, True):
                (y,) = run_op(OP, (x, channels), opset, dynamic=dynamic)
                assert y.dtype == dtype
                np.testing.assert_array_equal(y.numpy(), by_hand(x.numpy(), channels))


@pytest.mark.parametrize(
    ("shape", "channels"), [((1, 1, 2, 2, 32), 33), ((1, 2, 2, 2, 32), 32), ((1, 1, 2, 2, 16), 5), ((1, 1, 2, 32), 5)]
)
def test_errors(shape, channels) -> None:
    with pytest.raises(ValueError, match=rf"H, W, 32\) for {channels} channels, got \("):
        from_chw32(torch.randn(shape), channels)
    with pytest.raises(ValueError, match="for 0 channels"):
        from_chw32(torch.randn(1, 0, 2, 2, 32), 0)
