from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import svexport
from svexport.cli._model import load_file

multicamera = load_file(Path(__file__).parents[2] / "examples" / "multicamera.py")  # it imports the example beside it
TINY = {"queries": 20, "layers": 1, "cameras": 2, "image_size": (72, 120)}


@pytest.fixture(scope="module")
def net():
    return multicamera.model(**TINY)


def test_features_have_the_levels_of_the_head():
    net = multicamera.model(**multicamera.QUICK)
    images, _ = net.example_inputs
    with torch.no_grad():
        features = net.neck(net.backbone(images.flatten(0, 1)))
    config = net.head.config
    assert [tuple(f.shape) for f in features] == [(config.cameras, config.dim, *level) for level in config.levels]


def test_pyramid_adds_coarse_to_fine(net):
    features = [torch.zeros(1, width, *size) for width, size in zip((64, 128, 256), ((8, 8), (4, 4), (2, 2)))]
    with torch.no_grad():
        expected = net.neck(features)
        features[2] += 1
        moved = [(a != b).any() for a, b in zip(net.neck(features), expected)]
        assert all(moved)
        features[2] -= 1
        features[0] += 1
        moved = [(a != b).any() for a, b in zip(net.neck(features), expected)]
        assert [bool(m) for m in moved] == [True, False, False, False]


def test_every_camera_counts_on_its_own(net):
    images, lidar2img = net.example_inputs
    with torch.no_grad():
        expected = net(images, lidar2img)["classes"]
        for camera in range(2):
            changed = images.clone()
            changed[:, camera] *= -1
            assert (net(changed, lidar2img)["classes"] - expected).abs().max() > 0.01
        swapped = net(images.flip(1), lidar2img.flip(1))["classes"]
    assert (swapped - expected).abs().max() > 0.01  # for the weights are each camera's own


def test_gradient_reaches_the_pixels():
    net = multicamera.model(**TINY)
    images, lidar2img = net.example_inputs
    result = net(images.requires_grad_(), lidar2img)
    (result["classes"].square().mean() + result["boxes"].square().mean()).backward()
    assert images.grad.abs().amax(dim=(0, 2, 3, 4)).min() > 0
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_model_is_deterministic_and_leaves_the_random_state_alone(net):
    state = torch.get_rng_state()
    again, other = multicamera.model(**TINY), multicamera.model(**TINY, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert not again.training
    torch.testing.assert_close(again.state_dict(), net.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(again.example_inputs, net.example_inputs, rtol=0, atol=0)
    assert not torch.equal(other.backbone.conv1.weight, net.backbone.conv1.weight)
    for norm in (m for m in net.modules() if isinstance(m, nn.BatchNorm2d)):
        assert (norm.running_var != 1).all()
        assert norm.momentum == 0.1


@pytest.mark.core
@pytest.mark.parametrize("opset", [11, 17])
def test_exports_unedited(net, opset, tmp_path):
    report = svexport.export(net, path=tmp_path / "detector.onnx", opset=opset)
    assert report.verified
    assert (report.traced_nodes["SvEinsum"], report.nodes["SvGridSample"]) == (3, 4)
