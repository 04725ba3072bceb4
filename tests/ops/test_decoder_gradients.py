"""Compares the decoder's hand-written backward with that of its definition."""

import pytest
import torch

from svexport import ops
from svexport.ops._decoder.config import weight_names
from svexport.ops._decoder.gradients import recorded, takes
from svexport.ops.transformer_decoder import differentiable

CONFIG = {
    "num_layers": 3,
    "embed_dims": 8,
    "num_heads": 2,
    "ffn_dims": 6,
    "num_classes": 3,
    "num_cams": 2,
    "num_points": 2,
    "image_size": (32, 48),
    "pc_range": (-2.0, -2.0, -1.0, 2.0, 2.0, 1.0),
    "num_queries": 5,
    "feature_sizes": ((4, 5), (2, 3)),
}


def tensors(config, batch=2):
    """Query, position, points, cameras, features and weights in float64, all of which ask for gradients."""
    model = ops.TransformerDecoder(config).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    query, pos, points, features, cameras = model.example_inputs
    found = [query, pos, points, cameras, *features]
    found = [torch.cat([t.double()] * batch) + 0.05 * torch.randn(batch, *t.shape[1:]).double() for t in found]
    found[2] = found[2].clamp(0.05, 0.95)
    found[2][0, 0] = torch.tensor([0.0, 1.0, 5e-6])  # where the inverse sigmoid is bounded
    return [t.detach().requires_grad_() for t in (*found, *model.weights())]


def both(config, joined, given, parts=False):
    query, pos, points, cameras, *rest = given
    features, weights = rest[:2], rest[2:]
    if parts:  # as linear layers of their own have them
        names = weight_names(vars(config))
        split = [w.chunk(3) if "in_proj" in name else w for name, w in zip(names, weights, strict=True)]
        ours = recorded(query, pos, points, features, cameras, split, config, joined=joined)
        return ours, differentiable(joined, query, pos, points, features, cameras, weights, *config.attributes())
    ours = recorded(query, pos, points, features, cameras, weights, config, joined=joined)
    return ours, differentiable(joined, query, pos, points, features, cameras, weights, *config.attributes())


@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("options", [{}, {"uv_clamp": (-1.0, 2.0), "activation": "softmax", "code_size": 8}])
def test_gradients_are_those_of_the_definition(parts, joined, options):
    config = ops.TransformerDecoderConfig(**CONFIG, **options)
    assert takes(config)
    given = tensors(config)
    ours, theirs = both(config, joined, given, parts)
    torch.testing.assert_close(ours, theirs)
    rates = [torch.rand_like(t) for t in theirs]
    for used in ((0, 1, 2), (0,), (1,), (2,), (0, 1)):  # a loss of some outputs, twice from one graph
        found = [
            torch.autograd.grad(
                [outputs[i] for i in used], given, [rates[i] for i in used], retain_graph=True, materialize_grads=True
            )
            for outputs in (ours, theirs)
        ]
        assert max(float(g.abs().max()) for g in found[1]) > 0
        torch.testing.assert_close(found[0], found[1], rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("asked", ["weights", "query", "cameras and a feature"])
def test_gradients_that_nobody_asks_for(asked):
    config = ops.TransformerDecoderConfig(**CONFIG)
    given = tensors(config)
    wanted = {"weights": range(6, len(given)), "query": [0], "cameras and a feature": [3, 5]}[asked]
    given = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(given)]
    found = [
        torch.autograd.grad(sum(t.square().sum() for t in outputs), [given[i] for i in wanted])
        for outputs in both(config, True, given)
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("parts", [True, False])
def test_gradients_of_gradients(parts):
    config = ops.TransformerDecoderConfig(**{**CONFIG, "num_layers": 1})
    given = tensors(config)
    found = []
    dependent = [given[0], given[1] + given[0].mean(), *given[2:]]  # a way that is none of the decoder's
    for outputs in both(config, False, dependent, parts):
        first = torch.autograd.grad(outputs[1].square().sum(), [given[0], given[8]], create_graph=True)
        total = sum(g.square().sum() for g in first)
        found.append(torch.autograd.grad(total, [given[0], given[1], given[8]], retain_graph=True))
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-8)


def test_a_weight_changed_since_the_forward_is_noticed():
    config = ops.TransformerDecoderConfig(**{**CONFIG, "num_layers": 1})
    given = tensors(config)
    ours, _ = both(config, False, given)
    with torch.no_grad():
        given[8].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ours[0].sum().backward()
