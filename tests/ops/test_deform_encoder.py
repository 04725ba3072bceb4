"""Compares the hand-written backward of Deformable DETR's encoder with torch's of the same layers."""

import pytest
import torch
import torch.nn.functional as F

from svexport import ops
from svexport.ops import _gradients
from svexport.ops._deform_attn_gradients import Shape
from svexport.ops._deform_encoder import MODULES, Encoder, Given, encoded

SIZES = torch.tensor([(4, 5), (3, 1)])
STARTS = torch.tensor([0, 20])
SHAPE = Shape(heads=2, levels=2, points=3)
PIXELS, CHANNELS, WIDTH = 23, 6, 9


def tensors(n=2, layers=2):
    """Source, position, centre and scale, and weights, in float64, all but the scale asking for gradients."""
    samples = 2 * 2 * 3
    rows = [(2 * samples, CHANNELS), (samples, CHANNELS), *[(CHANNELS, CHANNELS)] * 2, (CHANNELS,)]
    rows += [(WIDTH, CHANNELS), (CHANNELS, WIDTH), (CHANNELS,)]
    weights = [t for _ in range(layers) for row in rows for t in (torch.randn(row) * 0.4, torch.randn(row[0]) * 0.4)]
    given = [torch.randn(n, PIXELS, CHANNELS), torch.randn(PIXELS, CHANNELS), torch.rand(n, PIXELS, 1, 2, 1, 2)]
    scale = SIZES.flip(-1)[:, None].double()
    return [t.double().requires_grad_() for t in given], scale, [w.double().requires_grad_() for w in weights]


def eps_of(weights):
    return tuple((1e-5, 1e-3 * (i + 1)) for i in range(len(weights) // (2 * len(MODULES))))


def composed(source, pos, centre, scale, weights):
    pairs = list(zip(weights[::2], weights[1::2], strict=True))
    for i, (first, second) in enumerate(eps_of(weights)):
        layer = dict(zip(MODULES, pairs[len(MODULES) * i :], strict=False))
        n, shape = len(source), (len(source), PIXELS, *SHAPE)
        query = source + pos
        value = F.linear(source, *layer["value"]).view(n, PIXELS, SHAPE.heads, -1)
        places = centre + F.linear(query, *layer["offsets"]).view(*shape, 2) / scale
        scores = F.linear(query, *layer["attention"]).view(n, PIXELS, SHAPE.heads, -1).softmax(-1).view(shape)
        mixed = F.linear(ops.ms_deform_attn(value, SIZES, STARTS, places, scores), *layer["output"])
        middle = F.layer_norm(source + mixed, (CHANNELS,), *layer["norm1"], first)
        hidden = F.linear(F.linear(middle, *layer["linear1"]).relu(), *layer["linear2"])
        source = F.layer_norm(middle + hidden, (CHANNELS,), *layer["norm2"], second)
    return source


def ours(source, pos, centre, scale, weights):
    given = Given(pos, centre, scale, SIZES, STARTS)
    return encoded(Encoder(SHAPE, eps_of(weights)), source, given, weights)


@pytest.mark.parametrize("large", [2**22, 150, 0])
@pytest.mark.parametrize(("n", "layers"), [(2, 2), (1, 1), (3, 3)])
def test_gradients_are_those_of_the_layers(n, layers, large, monkeypatch):
    monkeypatch.setattr(_gradients, "LARGE", large)
    found, scale, weights = tensors(n, layers)
    given = [*found, *weights]
    outputs = [f(*found, scale, weights) for f in (ours, composed)]
    torch.testing.assert_close(*outputs)
    rate = torch.randn_like(outputs[0])
    found_all = [torch.autograd.grad(o, given, rate, retain_graph=True) for o in outputs]
    again = torch.autograd.grad(outputs[0], given, rate)  # a second time from one graph
    torch.testing.assert_close(found_all[0], found_all[1])
    torch.testing.assert_close(again, found_all[1])
    with torch.no_grad():
        torch.testing.assert_close(ours(*found, scale, weights), outputs[1])


@pytest.mark.parametrize("asked", range(3 + 2 * 2 * len(MODULES)))
def test_gradients_that_nobody_asks_for(asked):
    found, scale, weights = tensors()
    given = [t.detach().requires_grad_(i == asked) for i, t in enumerate((*found, *weights))]
    totals = [f(*given[:3], scale, given[3:]).square().sum() for f in (ours, composed)]
    torch.testing.assert_close(*(torch.autograd.grad(total, given[asked]) for total in totals))


def test_gradients_of_gradients():
    found, scale, weights = tensors(1)
    given, second = [*found, *weights], []
    for function in (ours, composed):
        output = function(*found, scale, weights)
        first = torch.autograd.grad(output.square().sum(), given, create_graph=True)
        second.append(torch.autograd.grad(sum(g.square().sum() for g in first), given))
    torch.testing.assert_close(second[0], second[1], rtol=1e-6, atol=1e-8)


def test_a_weight_changed_since_the_forward_is_noticed():
    found, scale, weights = tensors()
    output = ours(*found, scale, weights)
    with torch.no_grad():
        weights[4].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
