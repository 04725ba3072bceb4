from __future__ import annotations

import pytest
import torch
from torch import nn

import svexport
from examples import deformable_detr


@pytest.fixture(scope="module")
def net() -> deformable_detr.DeformableEncoder:
    return deformable_detr.model("small", layers=1)


def test_default_is_the_papers():
    with torch.device("meta"):
        layer = deformable_detr.EncoderLayer(deformable_detr.CONFIGS["deformable_detr"])
    attention = layer.self_attn
    assert (attention.heads, attention.levels, attention.points) == (8, 4, 4)
    assert attention.sampling_offsets.weight.shape == (8 * 4 * 4 * 2, 256)
    assert layer.linear1.weight.shape == (1024, 256)


def test_sampling_on_pixels_reads_them():
    shapes = torch.tensor([(3, 4), (2, 2)])
    value = torch.arange(16.0).view(1, 16, 1, 1)
    at = torch.tensor([[2.5 / 4, 1.5 / 3], [0.5 / 2, 1.5 / 2]])  # the middles of row 1, column 2 and row 1, column 0
    locations = at.view(1, 1, 1, 2, 1, 2)
    weights = torch.tensor([1.0, 100.0]).view(1, 1, 1, 2, 1)
    output = deformable_detr.ms_deform_attn_core_pytorch(value, shapes, locations, weights)
    assert output.item() == pytest.approx(6 + 100 * (12 + 2))


def test_fresh_heads_look_in_their_own_directions():
    attention = deformable_detr.MSDeformAttn(16, levels=2, heads=4, points=3)
    offsets = attention.sampling_offsets.bias.detach().view(4, 2, 3, 2)
    expected = torch.tensor([(1.0, 0), (0, 1), (-1, 0), (0, -1)])[:, None, None] * torch.tensor([1.0, 2, 3])[:, None]
    torch.testing.assert_close(offsets, expected.expand(-1, 2, -1, -1), rtol=0, atol=1e-6)


def test_every_level_is_looked_at(net):
    (features,) = net.example_inputs
    with torch.no_grad():
        expected = net(features)
        for level in range(4):
            changed = [feature + (i == level) for i, feature in enumerate(features)]
            moved = (net(changed) - expected).abs().amax(dim=-1)[0] > 1e-4
            assert moved.float().mean() > 0.9  # also the queries of the other levels


def test_rounding_stays_rounding(net):
    (features,) = net.example_inputs
    exact = deformable_detr.model("small", layers=1).double()
    with torch.no_grad():
        expected = exact([feature.double() for feature in features])
        torch.testing.assert_close(net(features).double(), expected, rtol=1e-4, atol=1e-4)


def test_gradient_reaches_everything():
    net = deformable_detr.model("small")
    net(*net.example_inputs).square().mean().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_model_is_deterministic_and_leaves_the_random_state_alone(net):
    state = torch.get_rng_state()
    again, other = deformable_detr.model("small", layers=1), deformable_detr.model("small", layers=1, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert not again.training
    torch.testing.assert_close(again.state_dict(), net.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(again.example_inputs, net.example_inputs, rtol=0, atol=0)
    assert not torch.equal(other.level_embed, net.level_embed)
    assert all((m.weight != 1).all() for m in net.modules() if isinstance(m, nn.LayerNorm))


@pytest.mark.core
@pytest.mark.parametrize("opset", [11, 17])
def test_exports_unedited(net, opset, tmp_path):
    report = svexport.export(net, path=tmp_path / "encoder.onnx", opset=opset)
    assert report.verified
    assert report.nodes["SvGridSample"] == 4
