"""Functions of dynamic sizes that torch.export turns into numbers, tested at sizes from 1 on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import svexport


def windows(x: Tensor) -> Tensor:
    size = x.shape[-1]
    made = [
        *(f(size, periodic) for f in WINDOWS for periodic in (True, False)),
        *(f(2 * size - 1, dtype=torch.float32) for f in WINDOWS),
        *(torch.hamming_window(size, periodic, 0.6, 0.3) for periodic in (True, False)),
    ]
    return torch.cat([*made, x.flatten()])


WINDOWS = torch.hann_window, torch.hamming_window, torch.bartlett_window, torch.blackman_window


def frequencies(x: Tensor) -> Tensor:
    size = x.shape[-1]
    fft = torch.fft
    return torch.cat(
        [fft.fftfreq(size), fft.fftfreq(size, 0.25), fft.rfftfreq(size, d=2.0), fft.rfftfreq(3 * size - 1), x.flatten()]
    )


def shifts(x: Tensor) -> Tensor:
    fft = torch.fft
    return torch.stack([fft.fftshift(x), fft.ifftshift(x, (-1, -2)), fft.fftshift(x, dim=2), fft.ifftshift(x, -2)])


def rolls(x: Tensor) -> Tensor:
    return torch.stack(
        [x.roll(x.shape[-1] // 3, -1), torch.roll(x, (-x.shape[-1], x.shape[-2] + 1), (1, 2)), x.roll(5)]
    )


def norms(x: Tensor) -> Tensor:
    norm = torch.linalg.matrix_norm
    return torch.stack(
        [norm(x, 1), norm(x, -1), norm(x, torch.inf, (2, 1)), norm(x, -torch.inf, keepdim=True)[:, 0, 0]]
    )


@pytest.mark.parametrize("function", [windows, frequencies, shifts, rolls, norms])
@pytest.mark.parametrize("opset", [11, 17, 18, 20])
def test_functions_of_dynamic_sizes(opset: int, function: Callable[[Tensor], Tensor], tmp_path) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    axes = {"x": {1: "h", 2: "w"}}
    report = svexport.export(Model(), torch.randn(2, 5, 12), tmp_path / "m.onnx", opset=opset, dynamic_shapes=axes)
    engine = svexport.load(report.path)
    for height, width in [(1, 1), (1, 2), (2, 1), (3, 3), (4, 5), (5, 30), (8, 31), (7, 64)]:
        x = torch.randn(2, height, width)
        expected = function(x)
        torch.testing.assert_close(engine(x), expected, rtol=1e-5, atol=1e-5, msg=lambda m, x=x: f"{x.shape}: {m}")


class Masks(nn.Module):
    """Of shifted windows, as Swin makes them: nine regions of a padded map."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        height, width = (size + -size % 4 for size in x.shape[-2:])
        mask = torch.zeros(1, height, width, 1)
        slices = slice(0, -4), slice(-4, -2), slice(-2, None)
        for number, (rows, columns) in enumerate((rows, columns) for rows in slices for columns in slices):
            mask[:, rows, columns] = number
        parts = mask.view(1, height // 4, 4, width // 4, 4, 1).transpose(2, 3).reshape(-1, 16)
        return parts[:, None] - parts[:, :, None], x + 1


@pytest.mark.parametrize("opset", [11, 18])
def test_slices_assigned_one_after_another(opset: int, tmp_path) -> None:
    """Sums of the sizes of parts would grow with each, until torch takes minutes for one."""
    model, axes = Masks(), {"x": {2: "h", 3: "w"}}
    report = svexport.export(model, torch.randn(1, 3, 9, 13), tmp_path / "m.onnx", opset=opset, dynamic_shapes=axes)
    engine = svexport.load(report.path)
    for size in [(1, 1), (4, 4), (5, 12), (8, 7), (17, 30)]:
        x = torch.randn(1, 3, *size)
        for actual, expected in zip(engine(x), model(x), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("opset", [11, 18])
def test_slopes(opset: int, tmp_path) -> None:
    class Slopes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            both = torch.gradient(x, spacing=(0.5, 3), dim=(1, 0))
            return torch.stack([*both, *torch.gradient(x, spacing=2.0, dim=-1, edge_order=2)])

    sizes = {"x": {1: torch.export.Dim("n", min=3)}}
    report = svexport.export(Slopes(), torch.randn(4, 6), tmp_path / "m.onnx", opset=opset, dynamic_shapes=sizes)
    engine = svexport.load(report.path)
    for x in (torch.randn(4, n) for n in (3, 4, 17)):
        torch.testing.assert_close(engine(x), Slopes()(x))


@pytest.mark.parametrize("opset", [11, 18])
def test_statistics_of_a_dynamic_batch(opset: int, tmp_path) -> None:
    class Trains(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.batch_norm(x, None, None, training=True)

    report = svexport.export(
        Trains(), torch.randn(4, 3), tmp_path / "m.onnx", opset=opset, dynamic_axes={"x": {0: "n"}}
    )
    assert not any("TorchScript" in note for note in report.notes)
    engine = svexport.load(report.path)
    for x in (torch.randn(n, 3) for n in (2, 5, 30)):
        torch.testing.assert_close(engine(x), Trains()(x), rtol=1e-4, atol=1e-5)
