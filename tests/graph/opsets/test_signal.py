"""Fourier transforms and windows at lower opsets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from svexport import UnsupportedError
from tests.graph.opsets.nodes import check, converted, node_model


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def pairs(x: np.ndarray) -> np.ndarray:
    return np.stack([x.real, x.imag], -1).astype(np.float32)


@pytest.mark.parametrize("target", [17, 16, 11, 9])
@pytest.mark.parametrize("length", [None, 6, 12])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("inverse", "onesided", "parts"), [(0, 0, 1), (0, 0, 2), (0, 1, 1), (1, 0, 2), (1, 1, 2)])
def test_transforms(inverse: int, onesided: int, parts: int, dynamic: bool, length: int | None, target: int) -> None:
    x = draw(2, 9, 3, parts)
    signal = x[..., 0] if parts == 1 else x[..., 0] + 1j * x[..., 1]
    transform = {(0, 0): np.fft.fft, (0, 1): np.fft.rfft, (1, 0): np.fft.ifft, (1, 1): np.fft.irfft}[inverse, onesided]
    y = transform(signal, length, axis=1)
    wanted = y[..., None].astype(np.float32) if inverse and onesided else pairs(y)
    inputs = [x, None if length is None else np.array(length), np.array(1)]
    model = node_model("DFT", 20, inputs, constant=(1, 2), inverse=inverse, onesided=onesided)
    if dynamic:  # but whether numbers are real or complex
        for dim in model.graph.input[0].type.tensor_type.shape.dim[:3]:
            dim.dim_param = "n"
    check(model, inputs, target, [wanted], tolerance=1e-4)


@pytest.mark.parametrize("target", [16, 11, 9])
@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize("constant", [(), (1, 2, 3)])
def test_short_transforms(constant: tuple[int, ...], onesided: int, target: int) -> None:
    x, window = draw(2, 32, 1), np.hanning(8).astype(np.float32)
    y = torch.stft(
        torch.from_numpy(x[..., 0]), 8, 4, window=torch.from_numpy(window), center=False, onesided=bool(onesided),
        return_complex=True,
    )  # fmt: skip
    wanted = pairs(y.transpose(1, 2).numpy())
    inputs = [x, np.array(4), window, np.array(8)]
    check(
        node_model("STFT", 17, inputs, constant=constant, onesided=onesided), inputs, target, [wanted], tolerance=1e-4
    )


@pytest.mark.parametrize("target", [16, 9])
@pytest.mark.parametrize("constant", [(), (0,)])
@pytest.mark.parametrize("periodic", [0, 1])
@pytest.mark.parametrize("name", ["Hann", "Blackman"])
def test_windows(name: str, periodic: int, constant: tuple[int, ...], target: int) -> None:
    function = {"Hann": torch.hann_window, "Blackman": torch.blackman_window}[name]
    inputs = [np.array(10)]
    model = node_model(f"{name}Window", 17, inputs, constant=constant, periodic=periodic)
    check(model, inputs, target, [function(10, bool(periodic)).numpy()], tolerance=1e-5)


def test_mel_weights() -> None:
    inputs = [np.array(8), np.array(16), np.array(8192), np.array(0.0, np.float32), np.array(4096.0, np.float32)]
    result = check(node_model("MelWeightMatrix", 17, inputs, constant=range(5)), inputs, 9)
    assert [node.op_type for node in result.graph.node] in ([], ["Identity"])


def test_an_axis_that_the_run_decides_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"\(DFT\) cannot be written below opset 20: its axis is not constant"):
        converted(node_model("DFT", 20, [draw(2, 8, 1), None, np.array(1)]), 19)
