"""A whole decoder as one op, where no gradient is asked for."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import svexport
from svexport.cli._model import load_file
from svexport.exporter.arguments import leaves

EXAMPLE = Path(__file__).parents[3] / "examples" / "detr3d.py"
WHAT = "a decoder of the DETR3D kind, without gradients"


@pytest.fixture(scope="module")
def pair():
    model = load_file(EXAMPLE).model("small", queries=12)
    return model, svexport.replace(model, verbose=False)


def ops_of(model, args):
    with torch.profiler.profile() as profile:
        outputs = model(*args)
    return outputs, {e.key for e in profile.key_averages() if e.key.startswith("svexport::")}


def same(ours, theirs):
    for (_, a), (_, b) in zip(leaves(ours), leaves(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_one_op_without_gradients(pair):
    model, replaced = pair
    assert WHAT in [r.before for r in replaced.svexport_replacements]
    for m in (replaced, copy.deepcopy(replaced), pickle.loads(pickle.dumps(replaced))):  # noqa: S301 - written here
        with torch.no_grad():
            outputs, ops = ops_of(m, model.example_inputs)
        assert ops == {"svexport::transformer_decoder"}
        same(outputs, model(*model.example_inputs))
    features, cameras = model.example_inputs
    args = [torch.cat((f, f.flip(0) * 0.5)) for f in features], torch.cat((cameras, cameras.flip(1)))
    with torch.no_grad():
        same(replaced(*args), model(*args))


def test_layers_with_gradients(pair):
    model, replaced = pair
    found = []
    for m in (model, replaced):
        outputs, ops = ops_of(m, model.example_inputs)
        total = sum(t.square().sum() for _, t in leaves(outputs))
        found.append(torch.autograd.grad(total, list(m.parameters())))
    assert "svexport::transformer_decoder" not in ops
    assert "svexport::camera_sample" in ops
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-2)


def test_layers_where_somebody_changed_them(pair):
    model, replaced = copy.deepcopy(pair)

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    calls = []
    handle = replaced.layers[1].register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        _, ops = ops_of(replaced, model.example_inputs)
        assert calls == [1]
        assert "svexport::transformer_decoder" not in ops
        handle.remove()
        for m in (model, replaced):
            other = Doubled(64, 128)
            other.load_state_dict(m.layers[0].ffn[0].state_dict())
            m.layers[0].ffn[0] = other
        outputs, ops = ops_of(replaced, model.example_inputs)
        assert "svexport::transformer_decoder" not in ops
        same(outputs, model(*model.example_inputs))


def test_parameters_are_those_of_the_modules(pair):
    model, replaced = copy.deepcopy(pair)
    with torch.no_grad():
        for m in (model, replaced):
            for p in m.parameters():
                p.mul_(1.02)
        outputs, ops = ops_of(replaced, model.example_inputs)
        assert ops == {"svexport::transformer_decoder"}
        same(outputs, model(*model.example_inputs))


@pytest.mark.parametrize("change", ["eps", "relu", "residual", "order"])
def test_what_is_nearly_a_decoder_is_left_or_right(change):
    example = load_file(EXAMPLE)
    model = example.model("small", queries=12, layers=1)
    layer = model.layers[0]
    if change == "eps":
        layer.ffn_norm.eps = 1e-2
    elif change == "relu":
        layer.ffn[1] = nn.GELU()
    elif change == "residual":
        layer.__class__ = type("Other", (type(layer),), {"forward": _without_residual})
    else:
        model.cls[1], model.cls[2] = model.cls[2], model.cls[1]
    replaced = svexport.replace(model, verbose=False)
    assert WHAT not in [r.before for r in replaced.svexport_replacements]
    with torch.no_grad():
        same(replaced(*model.example_inputs), model(*model.example_inputs))


def _without_residual(self, query, query_pos, reference_points, features, lidar2img):
    query = self.mha_norm(query + self.mha(query, query_pos))
    query = self.svca_norm(self.svca(query, query_pos, reference_points, features, lidar2img))
    query = self.ffn_norm(query * 0.5 + self.ffn(query))
    return query, self.reg(query)
