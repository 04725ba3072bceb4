"""Layer norms of sums in all their spellings, and near misses."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import svexport
from tests.exporter.patterns.outcomes import gradients_of, replaced_with, whats

WHAT = "layer_norm(x + y)"


class Block(nn.Module):
    def __init__(self, mix, channels=12):
        super().__init__()
        self.linear, self.other, self.mix = nn.Linear(channels, channels), nn.Linear(channels, channels), mix
        self.norm = nn.LayerNorm(channels, eps=1e-4)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        nn.init.uniform_(self.norm.bias, -0.5, 0.5)
        self.factor = 1.5

    def forward(self, x):
        return self.mix(self, x, self.linear(x))


WRITTEN = {
    "after": lambda m, x, y: m.norm(x + y),
    "method": lambda m, x, y: m.norm(y.add(x)),
    "before": lambda m, x, y: (s := x + y) + m.other(m.norm(s)),
    "sum first": lambda m, x, y: m.other(s := torch.add(x, y)) * m.norm(s) + s,
    "three": lambda m, x, y: m.norm(m.other(x) + x + y),
    "three the other way": lambda m, x, y: m.norm(x + (y + m.other(y))),
    "function": lambda m, x, y: F.layer_norm(x + y, (12,), m.norm.weight, m.norm.bias, 1e-3),
    "twice the same": lambda m, x, y: m.norm(y + y),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_found_however_it_is_written(name):
    model, x = Block(WRITTEN[name]), torch.randn(3, 7, 12)
    replaced, found = replaced_with(model, (x,), WHAT, [(torch.randn(1, 5, 12),)])
    assert found
    with torch.profiler.profile() as profile:
        replaced(x)
    assert "svexport::add_bias_residual_layer_norm" in [e.key for e in profile.key_averages()]


def test_found_behind_dropout():
    model, x = Block(lambda m, x, y: m.norm(x + F.dropout(y, 0.5, m.training))).eval(), torch.randn(2, 7, 12)
    replaced, found = replaced_with(model, (x,), WHAT)
    assert found
    same_in_training(model, replaced, x)


NEARLY = {
    "other axis": lambda m, x, y: F.layer_norm(x + y, (7, 12)),
    "other layout": lambda m, x, y: m.norm((x + y).transpose(0, 1)).transpose(0, 1),
    "scaled": lambda m, x, y: m.norm((x + y) * m.factor),
    "weighted sum": lambda m, x, y: m.norm(torch.add(x, y, alpha=2)),
    "broadcast": lambda m, x, y: m.norm(x + y.mean(1, keepdim=True)),
    "a number": lambda m, x, y: m.norm(y + 0.5),
    "difference": lambda m, x, y: m.norm(x - y),
    "no weight": lambda m, x, y: F.layer_norm(x + y, (12,)),
    "weight of its own": lambda m, x, y: F.layer_norm(x + y, (12,), m.norm.weight * 2, m.norm.bias),
    "eps outside": lambda m, x, y: (s := x + y - (x + y).mean(-1, keepdim=True)) / (s.std(-1, keepdim=True) + 1e-3),
    "in place": lambda m, x, y: m.norm((x + y).relu_()),
}


@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_that_is_left(name):
    model, x = Block(NEARLY[name]).eval(), torch.randn(2, 7, 12)
    replaced, found = replaced_with(model, (x,), WHAT)
    assert not found
    same_in_training(model, replaced, x)


def same_in_training(model, replaced, x):
    for m in (model.train(), replaced.train()):
        torch.manual_seed(0)
        m.found = gradients_of(m, (x,))
    torch.testing.assert_close(replaced.found, model.found, rtol=1e-4, atol=1e-4)


def before(m, x, y):
    total = x + y
    return total + m.other(m.norm(total))


@pytest.fixture
def pair():
    model, x = Block(before), torch.randn(2, 7, 12)
    return model, svexport.replace(model, (x,), verbose=False), x


def test_the_norm_may_be_another_one_later(pair):
    model, replaced, x = pair
    calls = []
    replaced.norm.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(replaced(x), model(x))
    assert calls == [1]
    for m in (model, replaced):
        m.norm = nn.GroupNorm(7, 7, eps=1e-2)
    torch.testing.assert_close(replaced(x), model(x))
    for m in (model, replaced):
        m.norm = nn.LayerNorm((7, 12), elementwise_affine=False)
    torch.testing.assert_close(replaced(x), model(x))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_types_are_torchs(pair, half):
    model, replaced, x = pair
    with torch.autocast("cpu", dtype=half):
        expected, found = gradients_of(model, (x,)), gradients_of(replaced, (x,))
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(replaced.double()(x.double()), model.double()(x.double()))
    torch.testing.assert_close(replaced.to(half)(x.to(half)), model.to(half)(x.to(half)), rtol=2e-2, atol=2e-2)


class Names(nn.Module):
    """Whose code asks for the name of its module, as what wraps a forward does."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(7)

    def forward(self, x):
        return self.norm(x + x.relu()) if __name__ else x


def test_a_name_of_the_authors_does_not_stop_torch_compile():
    model, x = nn.Sequential(Names()), torch.randn(3, 7)
    replaced = svexport.replace(model, (x,), verbose=False)
    assert len(whats(replaced)) == 1
    torch.compiler.reset()
    compiled = torch.compile(replaced, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))


def test_copies_compile_and_files(pair, tmp_path):
    model, replaced, x = pair
    for same in (copy.deepcopy(replaced), pickle.loads(pickle.dumps(replaced))):  # noqa: S301 - written here
        torch.testing.assert_close(gradients_of(same, (x,)), gradients_of(replaced, (x,)), rtol=0, atol=0)
    torch.compiler.reset()
    compiled = torch.compile(replaced, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    files = [tmp_path / "theirs.onnx", tmp_path / "ours.onnx"]
    for m, file in zip((model, replaced), files, strict=True):
        svexport.export(m, (x,), file, opset=16)
    assert files[1].stat().st_size <= files[0].stat().st_size
    assert whats(svexport.replace(model, (x,), skip="add_bias_residual_layer_norm", verbose=False)) == []
