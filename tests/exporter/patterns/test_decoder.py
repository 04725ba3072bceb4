"""A whole decoder becomes one op, and one autograd node if gradients are recorded."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import svexport
from svexport.cli._model import load_file
from svexport.tracing.arguments import leaves

EXAMPLE = Path(__file__).parents[3] / "examples" / "detr3d.py"
WHAT = "a decoder of the DETR3D kind"


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


def gradients(model, args, **options):
    """Of a loss of all outputs, for inputs and parameters; and the nodes of autograd."""
    features, cameras = args
    given = [*(f.detach().clone().requires_grad_() for f in features), cameras.detach().clone().requires_grad_()]
    outputs = [t for _, t in leaves(model(given[:-1], given[-1]))]
    nodes, pending = set(), [t.grad_fn for t in outputs]
    while pending:
        if (node := pending.pop()) is not None and node not in nodes:
            nodes.add(node)
            pending += [n for n, _ in node.next_functions]
    total = torch.stack([t.square().mean() for t in outputs]).sum()
    wanted = [*given, *(p for p in model.parameters() if p.requires_grad)]
    found = torch.autograd.grad(total, wanted, allow_unused=True, **options)
    return found, {type(node).__name__ for node in nodes}


def same_gradients(model, replaced, args, **options):
    expected, found = gradients(model, args, **options)[0], gradients(replaced, args, **options)[0]
    for e, f in zip(expected, found, strict=True):
        e, f = (torch.zeros((), dtype=args[1].dtype) if g is None else g for g in (e, f))
        scale = float(e.abs().max())
        torch.testing.assert_close(f, e.expand_as(f), rtol=1e-4, atol=1e-5 + 1e-4 * scale)


def doubled(model):
    """In float64, with its inputs: in float32 rounding alone decides over points at the edges of pixels."""
    args = [f.double() for f in model.example_inputs[0]], model.example_inputs[1].double()
    return copy.deepcopy(model).double(), args


def test_one_node_with_gradients(pair):
    model, replaced = pair
    assert "_RecordedBackward" in gradients(replaced, model.example_inputs)[1]
    theirs, args = doubled(model)
    ours = copy.deepcopy(replaced).double()
    assert "_RecordedBackward" in gradients(ours, args)[1]
    same_gradients(theirs, ours, args)
    for m in (theirs, ours):
        for name, p in m.named_parameters():
            p.requires_grad_("layers.0" not in name)
    same_gradients(theirs, ours, args)


def test_other_gradients_are_of_the_layers(pair):
    """Of gradients, under autocast and in half: as the author's layers have them."""
    model, replaced = pair
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "_RecordedBackward" not in gradients(replaced, model.example_inputs)[1]
    theirs, args = doubled(model)
    ours = copy.deepcopy(replaced).double()
    parameter = "layers.0.ffn.0.weight"
    found = []
    for m in (theirs, ours):
        loss = m(*args)["boxes"].square().mean()
        (g,) = torch.autograd.grad(loss, [dict(m.named_parameters())[parameter]], create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), [dict(m.named_parameters())["reference_points.weight"]])[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4 * float(found[0].abs().max()))


class Stopped(nn.Module):
    """Stops the gradient of something between layers."""

    def __init__(self, what):
        super().__init__()
        self.head, self.what = load_file(EXAMPLE).model("small", queries=9), what
        self.example_inputs = self.head.example_inputs

    def forward(self, features, lidar2img):
        head = self.head
        query, query_pos, points = head.queries(lidar2img.shape[0])
        for layer in head.layers:
            if self.what == "points":
                points = points.detach()
            elif self.what == "half of points":
                points = 0.5 * points + 0.5 * points.detach()
            elif self.what == "query":
                query = query.detach()
            query, reg = layer(query, query_pos, points, features, lidar2img)
            offset = torch.cat((reg[..., 0:2], reg[..., 4:5]), dim=-1)
            inverse = torch.log(points.clamp(0, 1).clamp(min=1e-5) / (1 - points.clamp(0, 1)).clamp(min=1e-5))
            points = torch.sigmoid(offset + inverse)
        return {"classes": head.cls(query), "points": points}


@pytest.mark.parametrize(("what", "suffix"), [("points", ""), ("half of points", None), ("query", None)])
def test_where_gradients_stop(what, suffix):
    model = Stopped(what)
    replaced = svexport.replace(model, verbose=False)
    whats = [r.before for r in replaced.svexport_replacements]
    assert (WHAT in whats) == (suffix == "")
    theirs, args = doubled(model)
    same_gradients(theirs, copy.deepcopy(replaced).double(), args)


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
