from __future__ import annotations

import pytest
import torch
from torch import nn

import svexport
from examples import yolox_stem


@pytest.fixture(scope="module")
def net() -> yolox_stem.Stem:
    return yolox_stem.model(**yolox_stem.QUICK)


def test_focus_loses_no_pixel():
    focus = yolox_stem.Focus(2, 8)
    focus.conv = nn.Identity()
    image = torch.arange(2 * 4 * 6.0).view(1, 2, 4, 6)
    result = focus(image)
    assert result.shape == (1, 8, 2, 3)
    assert sorted(result.flatten().tolist()) == list(range(48))
    assert result[0, ::2, 0, 0].tolist() == [0, 6, 1, 7]  # of the first channel: down first, then to the right


@pytest.mark.parametrize(("size", "channels", "bottlenecks"), [("s", 32, (1, 3)), ("m", 48, (2, 6)), ("l", 64, (3, 9))])
def test_sizes_are_the_published_ones(size, channels, bottlenecks):
    net = yolox_stem.Stem(*yolox_stem.SIZES[size])
    assert net.stem.conv.conv.weight.shape == (channels, 12, 3, 3)
    assert tuple(len(stage[1].m) for stage in (net.dark2, net.dark3)) == bottlenecks
    with torch.no_grad():
        result = net.eval()(torch.zeros(1, 3, 16, 24))
    assert {k: tuple(v.shape) for k, v in result.items()} == {
        "dark2": (1, 2 * channels, 4, 6),
        "dark3": (1, 4 * channels, 2, 3),
    }


def test_bottlenecks_see_half_of_the_channels(net):
    layer = net.dark2[1]
    seen = []
    handles = [m.register_forward_hook(lambda _, args, output: seen.append((args[0], output))) for m in (layer.m[0],)]
    handles.append(layer.conv3.register_forward_pre_hook(lambda _, args: seen.append(args[0])))
    x = torch.randn(1, 64, 5, 5)
    with torch.no_grad():
        layer(x)
        (before, after), merged = seen
        torch.testing.assert_close(merged[:, :32], after, rtol=0, atol=0)
        torch.testing.assert_close(merged[:, 32:], layer.conv2(x), rtol=0, atol=0)
        torch.testing.assert_close(after - before, layer.m[0].conv2(layer.m[0].conv1(before)), rtol=1e-4, atol=1e-5)
    for handle in handles:
        handle.remove()


def test_model_is_deterministic_and_leaves_the_random_state_alone(net):
    state = torch.get_rng_state()
    again, other = yolox_stem.model(**yolox_stem.QUICK), yolox_stem.model(**yolox_stem.QUICK, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert not again.training
    torch.testing.assert_close(again.state_dict(), net.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(again.example_inputs, net.example_inputs, rtol=0, atol=0)
    assert not torch.equal(other.stem.conv.conv.weight, net.stem.conv.conv.weight)
    for norm in (m for m in net.modules() if isinstance(m, nn.BatchNorm2d)):
        assert (norm.running_var != 1).all()
        assert norm.momentum == 0.03


@pytest.mark.core
@pytest.mark.parametrize("opset", [11, 17])
def test_exports_unedited(net, opset, tmp_path):
    report = svexport.export(net, path=tmp_path / "stem.onnx", opset=opset)
    assert report.verified
    assert report.nodes["Conv"] == sum(isinstance(m, nn.Conv2d) for m in net.modules())
