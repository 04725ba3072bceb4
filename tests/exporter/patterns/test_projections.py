"""Deformable attention together with the linear layers around it, and near misses."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import svexport
from svexport.exporter.patterns import projections
from tests.exporter.patterns.outcomes import gradients_of, replaced_with, whats
from tests.exporter.patterns.test_ms_deform_attn import SIZES, attend, inputs

WHAT = "linear layers, softmax, deformable attention"


def ms_deform_attn_core_pytorch(value, spatial_shapes, sampling_locations, attention_weights):
    """As its authors have it: sizes are read from a tensor."""
    sizes = [(int(h), int(w)) for h, w in spatial_shapes]
    return attend(value, sizes, sampling_locations, attention_weights)


class Attends(nn.Module):
    """Deformable DETR's own: a function known by its name between linear layers."""

    def __init__(self):
        super().__init__()
        self.value, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.offsets, self.weights = nn.Linear(8, 2 * 2 * 3 * 2), nn.Linear(8, 2 * 2 * 3)
        nn.init.constant_(self.offsets.weight, 0.05)

    def project(self, query, memory):
        n, queries, _ = query.shape
        offsets = self.offsets(query).view(n, queries, 2, 2, 3, 2)
        weights = F.softmax(self.weights(query).view(n, queries, 2, 6), -1).view(n, queries, 2, 2, 3)
        return self.value(memory).view(n, memory.shape[1], 2, 4), offsets, weights

    def place(self, offsets, points, sizes):
        return points[:, :, None, :, None, :] + offsets / sizes.flip(-1)[None, None, None, :, None, :]

    def forward(self, query, memory, points, sizes):
        value, offsets, weights = self.project(query, memory)
        locations = self.place(offsets, points, sizes)
        return self.out(ms_deform_attn_core_pytorch(value, sizes, locations, weights))


class OtherName(Attends):
    """Sizes are constants, the function is one of the model's."""

    def forward(self, query, memory, points, scale):
        value, offsets, weights = self.project(query, memory)
        return self.out(attend(value, SIZES, points[:, :, None, :, None] + offsets / scale, weights)) + query


class OwnValue(Attends):
    """The value is masked between its projection and the sampling."""

    def forward(self, query, memory, points, sizes):
        value, offsets, weights = self.project(query, memory.relu())
        locations = self.place(offsets, points, sizes)
        return self.out(ms_deform_attn_core_pytorch(value.relu(), sizes, locations, weights))


def arguments(batch=2, queries=5):
    points = torch.rand(batch, queries, 2, 2)
    return *inputs(batch, queries), points, torch.tensor(SIZES)


def named(model):
    return [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("kind", [Attends, OtherName, OwnValue])
def test_found(kind):
    model, other = kind(), arguments(1, 9)
    given = arguments()
    if kind is OtherName:
        scale = torch.rand(2, 1, 2) + 2
        given, other = (*given[:3], scale), (*other[:3], scale)
    replaced, found = replaced_with(model, given, WHAT, [other])
    assert found
    assert named(replaced) == named(model)
    for same in (copy.deepcopy(replaced), pickle.loads(pickle.dumps(replaced))):  # noqa: S301 - written here
        torch.testing.assert_close(same(*given), model(*given), rtol=1e-4, atol=1e-4)


def test_one_node_of_autograd():
    model, given = Attends(), arguments()
    replaced = svexport.replace(model, given, verbose=False)
    assert type(replaced(*given).grad_fn).__name__ == "_ProjectedBackward"
    with torch.no_grad():
        torch.testing.assert_close(replaced(*given), model(*given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["hook", "autocast", "half", "scale", "vmap", "class"])
def test_what_one_node_is_not_made_for(case):
    """There the layers are called one by one."""
    model, given = Attends(), arguments()
    replaced = svexport.replace(model, given, verbose=False)
    seen = []
    if case == "hook":
        replaced.out.register_forward_hook(lambda *_: seen.append(1))
        assert type(replaced(*given).grad_fn).__name__ != "_ProjectedBackward"
        assert seen
    elif case == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            ours, theirs = replaced(*given), model(*given)
        assert ours.dtype == theirs.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)
    elif case == "half":
        half = [t.half() if t.is_floating_point() else t for t in given]
        torch.testing.assert_close(replaced.half()(*half), model.half()(*half), rtol=2e-2, atol=2e-2)
    elif case == "scale":
        model = OtherName()
        scale = (torch.rand(2, 1, 2) + 2).requires_grad_()
        args = *given[:3], scale
        replaced = svexport.replace(model, args, verbose=False)
        found = [torch.autograd.grad(m(*args).square().sum(), scale) for m in (replaced, model)]
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    elif case == "vmap":
        rows = torch.randn(3, *given[0].shape)
        ours = torch.vmap(lambda q: replaced(q, *given[1:]))(rows)
        torch.testing.assert_close(ours, torch.stack([model(q, *given[1:]) for q in rows]), rtol=1e-4, atol=1e-4)
    else:

        class Scaled(nn.Linear):
            def forward(self, x):
                return 2 * super().forward(x)

        for m in (model, replaced):
            m.value.__class__ = Scaled
        torch.testing.assert_close(gradients_of(replaced, given), gradients_of(model, given), rtol=1e-4, atol=1e-4)


def test_tracers_have_the_layers():
    model, given = Attends(), arguments()
    replaced = svexport.replace(model, given, verbose=False)
    torch.compiler.reset()
    exported = torch.export.export(replaced, given, strict=False)
    targets = [str(node.target) for node in exported.graph.nodes]
    assert targets.count("aten.linear.default") == 4
    assert targets.count("svexport.ms_deform_attn.default") == 1
    torch.testing.assert_close(exported.module()(*given), model(*given), rtol=1e-4, atol=1e-4)
    compiled = torch.compile(replaced, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients_of(compiled, given), gradients_of(model, given), rtol=1e-4, atol=1e-4)


class Nearly(Attends):
    def __init__(self, name):
        super().__init__()
        self.name = name
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, query, memory, points, sizes):
        name = self.name
        value, offsets, weights = self.project(query, memory)
        if name == "other query":
            weights = self.project(query.flip(1), memory)[2]
        elif name == "bounded offsets":
            offsets = offsets.tanh()
        elif name == "sigmoid":
            weights = self.weights(query).sigmoid().view(weights.shape)
        elif name == "softmax of points":
            weights = self.weights(query).view(weights.shape).softmax(-1)
        elif name == "order of offsets":
            offsets = self.offsets(query).view(*offsets.shape[:4], 2, 3).transpose(4, 5)
        elif name == "order of heads":
            value = self.value(memory).view(*value.shape[:2], 4, 2).transpose(2, 3)
        elif name == "normed value":
            value = F.layer_norm(value, (4,))
        if name == "y before x":
            offsets = offsets.flip(-1)
        locations = self.place(offsets, points, sizes)
        if name == "clamped":
            locations = locations.clamp(0.2, 0.8)
        elif name == "learned":
            weights = weights * self.scale
        mixed = ms_deform_attn_core_pytorch(value, sizes, locations, weights)
        return self.out(mixed) + (mixed if name == "used twice" else 0)


NAMES = ["other query", "bounded offsets", "sigmoid", "softmax of points", "order of offsets"]
NAMES += ["y before x", "clamped", "learned", "used twice"]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_nearly_that_is_left(name):
    _, found = replaced_with(Nearly(name), arguments(), WHAT, [arguments(3, 4)])
    assert not found


@pytest.mark.parametrize("name", ["normed value", "order of heads"])
def test_a_value_that_is_more_than_projected(name):
    _, found = replaced_with(Nearly(name), arguments(), WHAT, [arguments(3, 4)])
    assert found


def test_of_no_name_and_skipped():
    model, given = Attends(), arguments()
    assert WHAT not in whats(svexport.replace(model, given, skip="ms_deform_attn", verbose=False))
    assert WHAT not in whats(svexport.replace(model, given, skip="ms_deform_attn_core_pytorch", verbose=False))


@pytest.mark.parametrize("layer", ["plain", "bias", "hook"])
def test_layers_that_are_more_than_linear(layer):
    given = nn.Linear(2, 3, bias=layer != "bias")
    if layer == "hook":
        given.register_forward_pre_hook(lambda *_: None)
    assert projections._is_plain(given) == (layer == "plain")
