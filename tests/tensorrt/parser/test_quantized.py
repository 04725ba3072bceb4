"""Files with quantizers in NVIDIA's parser, compared with ONNX Runtime: int8, fp8 and half models, layers, maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport import ops
from tests.quantization import trained
from tests.quantization.test_maps import LEVELS, Attention, Deformed, Sampler, Warp, config, images
from tests.quantization.test_quantize import Net, batches
from tests.tensorrt.parser.parser import Parser, outcome
from tests.tensorrt.parser.test_files import held, known, tensors

STEP = 1 / 127
"""Of the largest magnitude: what one step of int8 is worth."""

Made = tuple[nn.Module, tuple[Any, ...]]
"""A quantized model, and arguments that it was not calibrated with."""


def sampled(**options: Any) -> Made:
    return svexport.quantize(Sampler().eval(), images(), **options), (images(1)[0],)


def warped(keep: Sequence[str] = (), **options: Any) -> Made:
    data = [(torch.randn(2, 3, 7, 9), torch.rand(2, 5, 4, 2) * 2.2 - 1.1) for _ in range(4)]
    return svexport.quantize(Warp(**options).eval(), data[1:], keep=keep), data[0]


class Volume(nn.Module):
    """A map in 5-D, and layers of one and three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Conv3d(2, 6, 3, padding=1, groups=2), nn.Conv1d(6, 4, 3)
        self.sample = ops.GridSample(align_corners=True)

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        return self.after(self.sample(self.before(x), grid).flatten(2))


def volumes() -> Made:
    data = [(torch.randn(2, 2, 3, 5, 7), torch.rand(2, 2, 3, 3, 3) * 2.2 - 1.1) for _ in range(4)]
    return svexport.quantize(Volume().eval(), data[1:]), data[0]


def attended(keep: Sequence[str] = ()) -> Made:
    rows = int(LEVELS.prod(1).sum())
    data = [(torch.randn(2, 9, 16), torch.randn(2, rows, 16), torch.rand(2, 9, 2, 2)) for _ in range(4)]
    return svexport.quantize(Attention().eval(), data[1:], keep=keep), data[0]


def deformed(packed: bool, keep: Sequence[str] = ()) -> Made:
    data = [(torch.randn(2, 3, 7, 9),) for _ in range(4)]
    return svexport.quantize(Deformed(packed).eval(), data[1:], keep=keep), data[0]


def decoded(fuse: str) -> Made:
    decoder = ops.TransformerDecoder(config(), fuse).eval()
    return svexport.quantize(decoder, [decoder.example_inputs]), tuple(decoder.example_inputs)


def layered(**options: Any) -> Made:
    return svexport.quantize(Net().eval(), batches(), **options), (batches(1)[0],)


HALF: dict[str, Any] = {"dtype": torch.float16}
MODELS: dict[str, tuple[Callable[[], Made], dict[str, Any]]] = {
    "layers": (layered, {}),
    "layers, kept": (partial(layered, keep=["stem.*", "up"]), {}),
    "layers, half": (layered, HALF),
    "layers, half, auto": (layered, HALF | {"keep": "auto"}),
    "layers, dynamic": (layered, {"dynamic_shapes": {"x": {0: "batch"}}}),
    "layers, fp8": (partial(layered, format="fp8"), {}),
    "layers, fp8, half": (partial(layered, format="fp8"), HALF),
    "camera_sample": (sampled, {}),
    "camera_sample, maps": (partial(sampled, keep=["backbone.0", "coarser", "head"]), {}),
    "camera_sample, half": (sampled, HALF),
    "camera_sample, half, auto": (sampled, HALF | {"keep": "auto"}),
    "camera_sample, dynamic": (sampled, {"dynamic_shapes": {"x": {0: "batch"}}}),
    "camera_sample, fp8": (partial(sampled, format="fp8"), {}),
    "grid_sample": (warped, {}),
    "grid_sample, maps": (partial(warped, keep=["before", "after"]), {}),
    "grid_sample, nearest": (partial(warped, mode="nearest", padding_mode="border"), {}),
    "grid_sample, bicubic": (partial(warped, mode="bicubic", padding_mode="reflection"), {}),
    "grid_sample, half": (warped, HALF),
    "grid_sample, 5-D": (volumes, {}),
    "ms_deform_attn": (attended, {}),
    "ms_deform_attn, maps": (partial(attended, keep=["attention.*_*"]), {}),
    "ms_deform_attn, half": (attended, HALF),
    "deform_conv2d": (partial(deformed, False), {}),
    "deform_conv2d, mask": (partial(deformed, True), {}),
    "deform_conv2d, maps": (partial(deformed, False, ["before", "after", "offsets"]), {}),
    "deform_conv2d, half": (partial(deformed, True), HALF),
    "decoder": (partial(decoded, "block"), {}),
    "decoder, nodes": (partial(decoded, "nodes"), {}),
    "decoder, half": (partial(decoded, "block"), HALF),
}
OPSETS = (13, 17, 20)
FILES = [(name, 19 if "fp8" in name else OPSETS[i % 3]) for i, name in enumerate(MODELS)]
FILES += [(name, opset) for name in ("layers", "camera_sample") for opset in OPSETS if (name, opset) not in FILES]


def apart(results: Sequence[Tensor], expected: Sequence[Tensor], half: bool) -> str:
    """What is wrong, in words: nothing may be two steps away, and next to nothing more than rounding."""
    rounding = 0.02 if half else 1e-3
    for result, wanted in zip(results, expected, strict=True):
        if result.shape != wanted.shape:
            return f"an output of shape {list(result.shape)} for {list(wanted.shape)}"
        error = (result.double() - wanted.double()).abs() / wanted.double().abs().max().clamp_min(1e-9)
        near = float((error <= rounding).double().mean())
        if not float(error.max()) <= 2 * STEP + rounding or near < 0.97:
            return f"numbers differ by {float(error.max()):.3g} of the largest, {near:.1%} are near"
    return ""


def compared(parser: Parser, library: Path, folder: Path, made: Made, opset: int, **options: Any) -> None:
    """For the parser's version: what check says is what the parser does, and the network is ONNX Runtime's.

    So is that of the file for any engine, where the parser takes it.
    """
    model, args = made
    common = {"opset": opset, "verify": False, **options}
    paths = [folder / name for name in ("any.onnx", "plugins.onnx", "lowered.onnx")]
    report = svexport.export(model, args, paths[0], **common)
    expected = svexport.load(paths[0]).run(tensors(args))
    svexport.export(model, args, paths[1], target=str(parser), **common)
    svexport.export(model, args, paths[2], target=str(parser), plugins=False, **common)
    feeds, compare = dict(zip(report.inputs, tensors(args), strict=True)), partial(apart, half="dtype" in options)
    read = parser.read(paths, library)
    for path, parsed in zip(paths, read, strict=True):
        said = svexport.check(path, str(parser))
        found, why = outcome(parsed, feeds, expected, compare)
        assert said.ok == (found == "right"), (path.name, found, why, [finding.came for finding in said.errors])
        assert path == paths[0] or found == "right", (path.name, found, why)
    held(read[1], paths[1])


@pytest.mark.parametrize(("name", "opset"), FILES, ids=[f"{name}-{opset}" for name, opset in FILES])
def test_models(parser: Parser, plugin_library: Path, tmp_path: Path, name: str, opset: int) -> None:
    known(parser, opset)
    make, options = MODELS[name]
    torch.manual_seed(6)
    compared(parser, plugin_library, tmp_path, make(), opset, **options)


@cache
def learned(name: str) -> trained.Trained:
    with torch.random.fork_rng(devices=[]):
        found: trained.Trained = getattr(trained, name)()
    return found


@pytest.mark.large
@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize("name", ["skeletons", "cameras"])
def test_trained(parser: Parser, plugin_library: Path, tmp_path: Path, name: str, opset: int) -> None:
    """On data that failed sensors are in."""
    model, generator = learned(name), torch.Generator().manual_seed(7)
    quantized = svexport.quantize(model.model, model.make(256, generator)[0].split(64))
    shapes = {"x": {0: "batch"}}
    made = quantized, (model.make(32, generator)[0],)
    compared(parser, plugin_library, tmp_path, made, opset, dynamic_shapes=shapes)


def test_newest_versions_take_them(tmp_path: Path) -> None:
    """Of versions whose parser cannot be had, what check says of files for them."""
    torch.manual_seed(6)
    for name in ("layers", "layers, fp8", "camera_sample", "deform_conv2d, mask"):
        make, options = MODELS[name]
        model, args = make()
        report = svexport.export(model, args, tmp_path / "m.onnx", opset=19, target="11.0", verify="quick", **options)
        assert report.check is not None
        assert report.check.ok, report.check.errors[0].came
