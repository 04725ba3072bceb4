"""Compares the hand-written backward of deformable attention with projections with torch's of the same composition."""

import pytest
import torch
import torch.nn.functional as F

from svexport import ops
from svexport.ops._deform_attn_gradients import Shape, projected

SHAPE = Shape(heads=2, levels=2, points=3)
SIZES = ((4, 5), (3, 1))
CHANNELS, WIDTH = 7, 6


def tensors(n=2, queries=5, values=True, sizes=SIZES):
    """Query, source, centre and scale, and weights, in float64, all but the scale asking for gradients."""
    pixels, samples = sum(h * w for h, w in sizes), 2 * len(sizes) * 3
    source = torch.randn(n, pixels, 4) if values else torch.randn(n, pixels, 2, WIDTH // 2)
    centre = torch.rand(n, queries, 1, len(sizes), 1, 2)
    rows = [(2 * samples, CHANNELS), (samples, CHANNELS), (CHANNELS, WIDTH), *([(WIDTH, 4)] if values else [])]
    weights = [t for out, channels in rows for t in (torch.randn(out, channels) * 0.3, torch.randn(out) * 0.3)]
    found = [torch.randn(n, queries, CHANNELS), source, centre]
    scale = torch.tensor(sizes, dtype=torch.float64).flip(-1)[:, None]
    return [t.double().requires_grad_() for t in found], scale, [w.double().requires_grad_() for w in weights]


def starts(shapes):
    return shapes.prod(1).cumsum(0) - shapes.prod(1)


def composed(query, source, centre, scale, shapes, weights):
    n, queries, _ = query.shape
    offsets, attention, output, *value = zip(weights[::2], weights[1::2], strict=True)
    shape = n, queries, SHAPE.heads, len(shapes), SHAPE.points
    if value:
        source = F.linear(source, *value[0]).view(n, source.shape[1], SHAPE.heads, -1)
    places = centre + F.linear(query, *offsets).view(*shape, 2) / scale
    scores = F.linear(query, *attention).view(*shape[:3], shape[3] * shape[4]).softmax(-1).view(shape)
    return F.linear(ops.ms_deform_attn(source, shapes, starts(shapes), places, scores), *output)


def ours(query, source, centre, scale, shapes, weights):
    shape = SHAPE._replace(levels=len(shapes))
    return projected(shape, query, source, centre, scale, shapes, starts(shapes), weights)


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize(
    ("n", "queries", "sizes"), [(2, 5, SIZES), (1, 1, ((1, 1), (2, 3))), (3, 2, ((7, 3),)), (2, 0, SIZES)]
)
def test_gradients_are_those_of_the_composition(values, n, queries, sizes):
    (query, source, centre), scale, weights = tensors(n, queries, values, sizes)
    shapes = torch.tensor(sizes)
    given = [query, source, centre, *weights]
    outputs = [f(query, source, centre, scale, shapes, weights) for f in (ours, composed)]
    torch.testing.assert_close(*outputs)
    rate = torch.randn_like(outputs[0])
    found = [torch.autograd.grad(o, given, rate, retain_graph=True) for o in outputs]
    again = torch.autograd.grad(outputs[0], given, rate)  # a second time from one graph
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(again, found[1])
    with torch.no_grad():
        torch.testing.assert_close(ours(query, source, centre, scale, shapes, weights), outputs[1])


@pytest.mark.parametrize("asked", range(11))
def test_gradients_that_nobody_asks_for(asked):
    (query, source, centre), scale, weights = tensors()
    given = [t.detach().requires_grad_(i == asked) for i, t in enumerate((query, source, centre, *weights))]
    shapes = torch.tensor(SIZES)
    found = [f(*given[:3], scale, shapes, given[3:]).square().sum() for f in (ours, composed)]
    torch.testing.assert_close(*(torch.autograd.grad(f, given[asked]) for f in found))


def test_gradients_of_gradients():
    (query, source, centre), scale, weights = tensors()
    given, shapes, found = [query, source, centre, *weights], torch.tensor(SIZES), []
    for function in (ours, composed):
        # a way from the query to the source that is none of the operator's
        output = function(query, source + query.mean(), centre, scale, shapes, weights)
        first = torch.autograd.grad(output.square().sum(), given, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), given))
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-8)


def test_a_weight_changed_since_the_forward_is_noticed():
    (query, source, centre), scale, weights = tensors()
    output = ours(query, source, centre, scale, torch.tensor(SIZES), weights)
    with torch.no_grad():
        weights[4].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
