"""Normalizations at lower opsets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from svexport import UnsupportedError
from tests.graph.opsets.nodes import check, converted, node_model


def draw(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("target", [16, 13, 9])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("axis", "bias", "dynamic"), [(-1, True, False), (1, False, True), (-2, True, True)])
def test_layer_normalization(axis: int, bias: bool, dynamic: bool, dtype: type, target: int) -> None:
    x = draw(2, 3, 4, dtype=dtype)
    sizes = x.shape[axis:]
    scale, shift = draw(*sizes, dtype=dtype), draw(*sizes, dtype=dtype) + 1
    inputs = [x, scale, shift] if bias else [x, scale]
    t = [torch.from_numpy(v).double() for v in (x, scale, shift)]
    wanted = F.layer_norm(t[0], sizes, t[1], t[2] if bias else None, 1e-3).numpy().astype(dtype)
    model = node_model("LayerNormalization", 17, inputs, axis=axis, epsilon=1e-3, dynamic=dynamic)
    check(model, inputs, target, [wanted], tolerance=1e-5 if dtype == np.float32 else 2e-3)


def test_layer_normalization_returns_statistics() -> None:
    x, scale = draw(2, 3, 4), draw(4)
    model = node_model("LayerNormalization", 17, [x, scale], outputs=3)
    mean, deviation = x.mean(-1, keepdims=True), x.std(-1, keepdims=True)
    wanted = [(x - mean) / deviation * scale, mean, 1 / deviation]
    check(model, [x, scale], 9, wanted, tolerance=1e-4)


@pytest.mark.parametrize("target", [22, 13, 9])
@pytest.mark.parametrize("axis", [-1, 1])
def test_rms_normalization(axis: int, target: int) -> None:
    x, scale = draw(2, 3, 4), draw(*(2, 3, 4)[axis:])
    wanted = F.rms_norm(torch.from_numpy(x), x.shape[axis:], torch.from_numpy(scale), 1e-5).numpy()
    check(node_model("RMSNormalization", 23, [x, scale], axis=axis), [x, scale], target, [wanted])


@pytest.mark.parametrize("target", [20, 17, 13, 9])
@pytest.mark.parametrize(("shape", "dynamic"), [((2, 6, 5, 4), False), ((2, 6, 5, 4), True), ((3, 6), False)])
def test_group_normalization(shape: tuple[int, ...], dynamic: bool, target: int) -> None:
    x, scale, bias = draw(*shape), draw(6), draw(6) + 1
    wanted = F.group_norm(
        *(torch.from_numpy(v) for v in (x,)), 3, torch.from_numpy(scale), torch.from_numpy(bias)
    ).numpy()
    model = node_model("GroupNormalization", 21, [x, scale, bias], num_groups=3, dynamic=dynamic)
    check(model, [x, scale, bias], target, [wanted])


@pytest.mark.parametrize("target", [17, 9])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_group_normalization_by_groups(dtype: type, target: int) -> None:
    x, scale, bias = draw(2, 6, 5, dtype=dtype), draw(3, dtype=dtype), draw(3, dtype=dtype) + 1
    each = [torch.from_numpy(np.repeat(v, 2)) for v in (scale, bias)]
    wanted = F.group_norm(torch.from_numpy(x), 3, *each).numpy()
    check(node_model("GroupNormalization", 18, [x, scale, bias], num_groups=3), [x, scale, bias], target, [wanted])


@pytest.mark.parametrize("target", [14, 13, 9])
def test_batch_normalization_of_mixed_types(target: int) -> None:
    x = draw(2, 3, 4, dtype=np.float16)
    scale, bias, mean, variance = draw(3), draw(3) + 1, draw(3) * 2, np.abs(draw(3)) + 0.5
    inputs = [x, scale, bias, mean, variance]
    t = [torch.from_numpy(v).double() for v in (x, mean, variance, scale, bias)]
    wanted = F.batch_norm(*t, eps=1e-5).numpy().astype(np.float16)
    check(node_model("BatchNormalization", 15, inputs), inputs, target, [wanted], tolerance=2e-3)


@pytest.mark.parametrize("target", [13, 9])
def test_batch_normalization_in_training(target: int) -> None:
    x, scale, bias, mean = draw(4, 3, 5), draw(3), draw(3) + 1, draw(3) * 2
    variance = np.abs(draw(3)) + 0.5
    inputs = [x, scale, bias, mean, variance]
    batch = x.mean((0, 2)), x.var((0, 2))
    y = (x - batch[0][:, None]) / np.sqrt(batch[1][:, None] + 1e-5) * scale[:, None] + bias[:, None]
    wanted = [y, 0.8 * mean + 0.2 * batch[0], 0.8 * variance + 0.2 * batch[1]]
    model = node_model("BatchNormalization", 15, inputs, outputs=3, training_mode=1, momentum=0.8)
    check(model, inputs, target, wanted)


def test_what_is_not_known_is_said() -> None:
    x, scale = draw(2, 3, 4), draw(3, 4)
    model = node_model("LayerNormalization", 17, [x, scale], axis=1)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    with pytest.raises(
        UnsupportedError, match=r"'node' \(LayerNormalization\) .* opset 17: the rank of its input 'x0'"
    ):
        converted(model, 13)
