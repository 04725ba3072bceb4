from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import svexport
from svexport.cli._model import load_file

fused_decoder = load_file(Path(__file__).parents[2] / "examples" / "fused_decoder.py")  # it imports another example
SMALL = {"image_size": (48, 80), "feature_sizes": ((12, 20), (6, 10)), "embed_dims": 16}


@pytest.fixture(scope="module")
def net():
    return fused_decoder.model(**fused_decoder.QUICK, **SMALL)


def test_features_have_the_sizes_of_the_configuration():
    net = fused_decoder.model(**fused_decoder.QUICK)
    config = net.decoder.config
    seen = []
    net.decoder.register_forward_pre_hook(lambda _, args: seen.extend(args[3]))
    result = net(*net.example_inputs)
    assert [tuple(f.shape) for f in seen] == [(1, 3, config.embed_dims, *size) for size in config.feature_sizes]
    assert {name: tuple(value.shape) for name, value in result.items()} == {
        "classes": (1, 30, 10),
        "boxes": (1, 30, 10),
        "reference_points": (1, 30, 3),
    }


def test_every_camera_counts(net):
    images, lidar2img = net.example_inputs
    with torch.no_grad():
        expected = net(images, lidar2img)["boxes"]
        for camera in range(3):
            changed = images.clone()
            changed[:, camera] *= -1
            assert (net(changed, lidar2img)["boxes"] - expected).abs().max() > 1e-3


def test_model_is_deterministic_and_leaves_the_random_state_alone(net):
    state = torch.get_rng_state()
    again, other = (fused_decoder.model(**fused_decoder.QUICK, **SMALL, seed=seed) for seed in (0, 1))
    assert torch.equal(state, torch.get_rng_state())
    assert not again.training
    torch.testing.assert_close(again.state_dict(), net.state_dict(), rtol=0, atol=0)
    assert not torch.equal(other.reference_points.weight, net.reference_points.weight)


def test_gradient_reaches_the_pixels(net):
    images, lidar2img = net.example_inputs
    images = images.clone().requires_grad_()
    net(images, lidar2img)["boxes"].square().mean().backward()
    assert images.grad.abs().amax(dim=(0, 2, 3, 4)).min() > 0


def test_exports_as_one_node(net, tmp_path):
    report = svexport.export(net, path=tmp_path / "net.onnx", opset=11)
    assert [n.type for n in report.svexport_nodes if not n.lowered] == ["SvTransformerDecoder"]
    assert report.verified


def test_script(monkeypatch, tmp_path, capsys):
    small = replace(fused_decoder.CONFIG, **fused_decoder.QUICK, **SMALL)
    monkeypatch.setattr(fused_decoder, "CONFIG", small)
    output = tmp_path / "nodes.onnx"
    monkeypatch.setattr("sys.argv", ["fused_decoder.py", "--nodes", "--output", str(output)])
    fused_decoder.main()
    assert output.is_file()
    printed = capsys.readouterr().out
    assert "output  (1, 30, 10) = boxes" in printed
    assert "SvCameraSample" in printed
