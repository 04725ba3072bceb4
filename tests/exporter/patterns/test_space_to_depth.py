"""Concatenated slices of an image become the op; slices in another order are left alone."""

import pytest
import torch
from torch import nn

import svexport
from tests.exporter.patterns.outcomes import replaced_with, whats

WHAT = "strided slices and cat"


class Stem(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.before, self.mix = nn.Conv2d(3, 4, 1), mix

    def forward(self, x):
        return self.mix(self.before(x))


def corners(x):
    return x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]


WRITTEN = {
    "yolox": lambda x: torch.cat(corners(x), dim=1),
    "yolov5": lambda x: torch.cat([*corners(x)], 1),
    "every axis": lambda x: torch.concat(
        [x[:, :, 0::2, 0::2], x[:, :, 1::2, 0::2], x[:, :, 0::2, 1::2], x[:, :, 1::2, 1::2]], -3
    ),
    "used again": lambda x: torch.cat((a := corners(x))[:1] + a[1:], 1) + a[0].mean(),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_found_however_it_is_written(name):
    replaced, found = replaced_with(Stem(WRITTEN[name]), (torch.randn(2, 3, 6, 8),), WHAT, [(torch.randn(1, 3, 2, 4),)])
    assert found
    with pytest.raises((RuntimeError, ValueError)):  # as torch.cat of slices of unlike sizes
        replaced(torch.randn(1, 3, 5, 4))


def other(order):
    return lambda x: torch.cat([corners(x)[i] for i in order], 1)


NEARLY = {
    "columns first": other((0, 2, 1, 3)),
    "reversed": other((3, 2, 1, 0)),
    "one twice": other((0, 1, 2, 2)),
    "three": other((0, 1, 2)),
    "along rows": lambda x: torch.cat(corners(x), 2),
    "along the batch": lambda x: torch.cat(corners(x), 0),
    "every third": lambda x: torch.cat([x[..., i::3, j::3] for j in (0, 1) for i in (0, 1)], 1),
    "to an end": lambda x: torch.cat([x[..., i:4:2, j:4:2] for j in (0, 1) for i in (0, 1)], 1),
    "of channels": lambda x: torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], 1),
    "of two images": lambda x: torch.cat([*corners(x)[:3], corners(x * 2)[3]], 1),
    "last axes": lambda x: torch.cat([x[:, i::2, j::2, :] for j in (0, 1) for i in (0, 1)], -1),
    "stacked": lambda x: torch.stack(corners(x), 1),
    "scaled between": lambda x: torch.cat([*corners(x)[:3], corners(x)[3] * 2], 1),
}


@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_that_is_left(name):
    _, found = replaced_with(Stem(NEARLY[name]), (torch.randn(2, 3, 6, 6),), WHAT)
    assert not found


def test_skip():
    args = (torch.randn(2, 3, 6, 8),)
    assert whats(svexport.replace(Stem(WRITTEN["yolox"]), args, skip="space_to_depth", verbose=False)) == []
