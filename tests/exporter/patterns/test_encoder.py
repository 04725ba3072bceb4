"""A whole Deformable DETR encoder becomes one autograd node; layers that do more than that stay layers."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import svexport
from svexport.exporter.patterns import encoder
from tests.exporter.patterns.outcomes import gradients_of, whats
from tests.exporter.patterns.test_ms_deform_attn import SIZES
from tests.exporter.patterns.test_projections import Attends

NODE = "_EncodedBackward"
CHANNELS, PIXELS = 8, sum(h * w for h, w in SIZES)


class Layer(nn.Module):
    """Post-norm, with dropout at the usual places."""

    def __init__(self):
        super().__init__()
        self.attends, self.drops = Attends(), nn.ModuleList(nn.Dropout(0.0) for _ in range(3))
        self.norm1, self.norm2 = nn.LayerNorm(CHANNELS, eps=1e-3), nn.LayerNorm(CHANNELS)
        self.linear1, self.linear2 = nn.Linear(CHANNELS, 11), nn.Linear(11, CHANNELS)

    def forward(self, x, pos, points, sizes):
        x = self.norm1(x + self.drops[0](self.attends(x + pos, x, points, sizes)))
        return self.norm2(x + self.drops[2](self.linear2(self.drops[1](self.act(self.linear1(x))))))

    def act(self, x):
        return F.relu(x)


class Encoder(nn.Module):
    def __init__(self, layers, kind=Layer):
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(layers))
        self.level = nn.Parameter(torch.randn(CHANNELS))

    def forward(self, x, pos, points, sizes):
        for layer in self.layers:
            x = layer(x, pos + self.level, points, sizes)
        return x.tanh()


def arguments(batch=2):
    like = torch.randn(batch, PIXELS, CHANNELS)
    return like, torch.randn_like(like), torch.rand(batch, PIXELS, 2, 2), torch.tensor(SIZES)


def lively(model):
    """No weight at a neutral value."""
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn_like(p)
    return model


def pair_of(layers=2, kind=Layer):
    model, given = lively(Encoder(layers, kind)), arguments()
    return model, svexport.replace(model, given, skip="add_bias_residual_layer_norm", verbose=False)


def node_of(model, given):
    """The name of what made the last hidden state."""
    return type(model(*given).grad_fn.next_functions[0][0]).__name__


@pytest.fixture(scope="module")
def made():
    torch.manual_seed(0)
    return pair_of(3)


@pytest.fixture
def pair(made):
    return copy.deepcopy(made)


def test_one_node_with_the_gradients_of_the_layers(pair):
    model, replaced = pair
    assert whats(replaced).count(encoder.WHAT) == 1
    assert list(replaced.state_dict()) == list(model.state_dict())
    for m in pair:
        m.double().train()
    for batch in (2, 1, 3):
        given = [t.double() if t.is_floating_point() else t for t in arguments(batch)]
        assert node_of(replaced, given) == NODE
        torch.testing.assert_close(gradients_of(replaced, given), gradients_of(model, given), rtol=1e-7, atol=1e-9)
        with torch.no_grad():
            torch.testing.assert_close(replaced(*given), model(*given), rtol=1e-7, atol=1e-9)


def test_frozen_parameters_have_no_gradients(pair):
    given, found = arguments(), []
    for m in pair:
        for name, p in m.named_parameters():
            p.requires_grad_("linear1" in name or "layers.2.attends" in name)
        m(*given).square().sum().backward()
        found.append({name: p.grad for name, p in m.named_parameters()})
    assert [name for name, g in found[0].items() if g is None] == [name for name, g in found[1].items() if g is None]
    wanted = {name for name, g in found[0].items() if g is not None}
    for name in wanted:
        torch.testing.assert_close(found[1][name], found[0][name], rtol=1e-4, atol=1e-4)


CHANGES = ["forward hook", "backward hook", "dropout", "autocast", "half", "vmap", "class", "no bias"]


@pytest.mark.parametrize("case", CHANGES)
def test_what_one_node_is_not_made_for(case, pair):
    """There the layers are called one by one."""
    model, replaced = pair
    given, seen = arguments(), []
    assert node_of(replaced.eval(), given) == NODE
    for m in (model, replaced):
        m.train()
        layer = m.layers[1]
        if case == "forward hook":
            layer.linear1.register_forward_hook(lambda *_: seen.append(1))
        elif case == "backward hook":
            layer.norm1.register_full_backward_hook(lambda *_: seen.append(1))
        elif case == "dropout":
            layer.drops[1].p = 0.5
        elif case == "class":
            layer.linear2.__class__ = Doubled
        elif case == "no bias":
            layer.linear2.bias = None
        elif case == "half":
            m.bfloat16()
    if case == "half":
        given = tuple(t.bfloat16() if t.is_floating_point() else t for t in given)
    if case == "vmap":
        rows = torch.randn(3, *given[0].shape)
        ours, theirs = (torch.vmap(lambda x, m=m: m(x, *given[1:]))(rows) for m in (replaced, model))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        return
    found = []
    for m in (model, replaced):
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
            assert node_of(m, given) != NODE
            torch.manual_seed(3)
            found.append(gradients_of(m, given))
    tolerance = 5e-2 if case in ("half", "autocast") else 1e-4
    scale = max(float(t.detach().float().abs().max()) for t in found[0])
    torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance * scale)
    assert bool(seen) == ("hook" in case)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.exhaustive
def test_copies_and_tracers(pair):
    model, replaced = pair
    given = arguments()
    for same in (copy.deepcopy(replaced), pickle.loads(pickle.dumps(replaced))):  # noqa: S301 - written here
        assert node_of(same, given) == NODE
        torch.testing.assert_close(gradients_of(same, given), gradients_of(replaced, given), rtol=0, atol=0)
    torch.compiler.reset()
    exported = torch.export.export(replaced, given, strict=False)
    targets = [str(node.target) for node in exported.graph.nodes]
    assert targets.count("svexport.ms_deform_attn.default") == 3
    assert targets.count("aten.linear.default") == 3 * 6
    compiled = torch.compile(replaced, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients_of(compiled, given), gradients_of(model, given), rtol=1e-3, atol=1e-3)


class Gelu(Layer):
    def act(self, x):
        return F.gelu(x)


class PreNorm(Layer):
    def forward(self, x, pos, points, sizes):
        y = self.norm1(x)
        x = x + self.attends(y + pos, y, points, sizes)
        return x + self.linear2(F.relu(self.linear1(self.norm2(x))))


class OtherResidual(Layer):
    """The second sum is of what came in."""

    def forward(self, x, pos, points, sizes):
        y = self.norm1(x + self.attends(x + pos, x, points, sizes))
        return self.norm2(x + self.linear2(F.relu(self.linear1(y))))


class Scaled(Layer):
    """Each layer has other points to look around."""

    def forward(self, x, pos, points, sizes):
        return super().forward(x, pos, points * self.linear1.bias[:1].sigmoid(), sizes)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.exhaustive) for k in (Gelu, PreNorm, Scaled)] + [OtherResidual]
)
def test_what_is_nearly_an_encoder_is_left_alone(kind):
    model, replaced = pair_of(2, kind)
    assert encoder.WHAT not in whats(replaced)
    given = arguments(1)
    torch.testing.assert_close(gradients_of(replaced, given), gradients_of(model, given), rtol=1e-3, atol=1e-3)


class ReturnsAll(Encoder):
    def forward(self, x, pos, points, sizes):
        first = self.layers[0](x, pos, points, sizes)
        return self.layers[1](first, pos, points, sizes), first


@pytest.mark.exhaustive
def test_what_layers_come_to_may_be_used_elsewhere():
    torch.manual_seed(0)
    model, given = lively(ReturnsAll(2)), arguments()
    replaced = svexport.replace(model, given, verbose=False)
    assert encoder.WHAT not in whats(replaced)
    torch.testing.assert_close(replaced(*given), model(*given), rtol=1e-4, atol=1e-4)
