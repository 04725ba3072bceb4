"""Pools at lower opsets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from svexport import UnsupportedError
from tests.graph.opsets.nodes import check, converted, node_model


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("target", [21, 18, 10, 9])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("counted", [0, 1])
@pytest.mark.parametrize(("kernel", "stride", "pad", "size"), [(3, 2, 1, 8), (2, 2, 1, 5), (3, 1, 0, 6), (3, 3, 1, 9)])
def test_average(kernel: int, stride: int, pad: int, size: int, counted: int, dynamic: bool, target: int) -> None:
    x = draw(2, 3, size, size + 1)
    wanted = F.avg_pool2d(torch.from_numpy(x), kernel, stride, pad, True, bool(counted)).numpy()
    attributes = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
    model = node_model("AveragePool", 22, [x], dynamic=dynamic, ceil_mode=1, count_include_pad=counted, **attributes)
    if dynamic and target == 9 and pad + stride > kernel:
        with pytest.raises(UnsupportedError, match="whether ceil_mode drops the last window depends on a size"):
            converted(model, target)
    else:
        check(model, [x], target, [wanted])


@pytest.mark.parametrize("target", [18, 9])
@pytest.mark.parametrize("ceil", [0, 1])
@pytest.mark.parametrize("counted", [0, 1])
@pytest.mark.parametrize("dynamic", [False, True])
def test_dilated_average(dynamic: bool, counted: int, ceil: int, target: int) -> None:
    x = draw(2, 3, 9, 8)
    attributes = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1], "dilations": [2, 3]}
    model = node_model("AveragePool", 19, [x], dynamic=dynamic, ceil_mode=ceil, count_include_pad=counted, **attributes)
    check(model, [x], target)


@pytest.mark.parametrize("target", [21, 10, 9])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize(("kernel", "stride", "pad", "size"), [(3, 2, 1, 8), (2, 2, 1, 5), (3, 1, 1, 6)])
def test_maximum(kernel: int, stride: int, pad: int, size: int, dilation: int, dynamic: bool, target: int) -> None:
    x = draw(2, 3, size, size + 1)
    wanted = F.max_pool2d(torch.from_numpy(x), kernel, stride, pad, dilation, ceil_mode=True).numpy()
    attributes = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4, "dilations": [dilation] * 2}
    model = node_model("MaxPool", 22, [x], dynamic=dynamic, ceil_mode=1, **attributes)
    unknown = pad + stride > dilation * (kernel - 1) + 1
    if dynamic and target == 9 and (dilation > 1 or unknown):
        with pytest.raises(UnsupportedError, match="a size that is not static"):
            converted(model, target)
    else:
        check(model, [x], target, [wanted])


@pytest.mark.parametrize("target", [17, 9])
@pytest.mark.parametrize("p", [1, 2, 3])
def test_norms(p: int, target: int) -> None:
    x = draw(2, 3, 9, 8)
    model = node_model("LpPool", 18, [x], kernel_shape=[3, 3], strides=[2, 2], dilations=[2, 1], ceil_mode=1, p=p)
    check(model, [x], target)


def test_integers() -> None:
    x = np.arange(48, dtype=np.int8).reshape(1, 1, 6, 8)
    check(node_model("MaxPool", 12, [x], kernel_shape=[2, 2], strides=[2, 2]), [x], 9)
