"""Forwards that take any keywords or lists of sizes, branch on sizes, or ask whether they train or are compiled."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import svexport

WHAT = "softmax(QK^T)V"
FORWARD = "its forward as a graph"


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(12, 36)

    def attended(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 6).transpose(1, 3).unbind(2)  # (B, H, N, D)
        return ((q @ k.mT * 0.3).softmax(-1) @ v).transpose(1, 2).flatten(2)


class AnyKeywords(Attends):
    def forward(self, x, **options):
        return self.attended(x) * options.get("factor", 1.0) + options.get("bias", 0)


class ListOfSizes(Attends):
    def forward(self, x, sizes, mask=None):
        parts = self.attended(x).split([h * w for h, w in sizes], 1)
        return torch.cat([p.unflatten(1, size).transpose(1, 2).flatten(1, 2) for p, size in zip(parts, sizes)], 1)


class BySizes(Attends):
    def forward(self, x, y):
        rows, columns = y.shape
        if rows == columns or x.size(1) > 9:
            return self.attended(x) + y.sum()
        return self.attended(x) - y.sum() if y.shape[-1] != 5 else x


class Drops(Attends):
    def forward(self, x):
        return F.dropout(self.attended(x), 0.5, training=self.training) + F.dropout(x, 0.3, self.training)


class DropsWeights(Attends):
    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 6).transpose(1, 3).unbind(2)
        weights = F.dropout((q @ k.mT * 0.3).softmax(-1), 0.5, self.training)
        return (weights @ v).transpose(1, 2).flatten(2)


class DropsQueries(DropsWeights):
    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 6).transpose(1, 3).unbind(2)
        scores = F.dropout(q @ k.mT, p=0.5, training=self.training) * 0.3
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def checked(holds, message):
    """As packages check what they are given, compiled or not."""
    if torch.compiler.is_compiling():
        torch._check(holds)
    elif not holds:
        raise ValueError(message)


class Checks(Attends):
    def forward(self, x, sizes):
        checked(sum(h * w for h, w in sizes) == x.shape[1], "expected as many rows as the sizes say")
        return self.attended(x)


class OtherCompiled(Attends):
    def forward(self, x):
        return x * 2 if torch.compiler.is_compiling() else self.attended(x)


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind()

    def forward(self, *args, **options):
        return self.layer(*args, **options)


def replaced(kind, *args):
    model = Model(kind).eval()
    copied = svexport.replace(model, args, verbose=False)
    assert WHAT in [r.before for r in copied.svexport_replacements]
    return model, copied


def count(model, *args, **kwargs):
    """How often a call runs attention as one function: 0 where the forward is the author's."""
    with torch.profiler.profile() as profile:
        model(*args, **kwargs)
    return sum(e.count for e in profile.key_averages() if e.key == "aten::scaled_dot_product_attention")


def same(model, copied, *args, **kwargs):
    torch.testing.assert_close(copied(*args, **kwargs), model(*args, **kwargs), rtol=1e-5, atol=1e-5)


def test_any_keywords():
    class Calls(Model):
        def forward(self, x):
            return self.layer(x, factor=2.0, names=["a", ("b", None)])

    x, model = torch.randn(2, 7, 12), Calls(AnyKeywords).eval()
    copied = svexport.replace(model, (x,), verbose=False).layer
    assert count(copied, x, factor=2.0, names=["a", ("b", None)]) == 1
    others = [{}, {"factor": 3.0}, {"factor": 2.0, "names": ["a", ("b", 1)]}, {"factor": 2.0, "bias": x.mean()}]
    for options in others:
        same(model.layer, copied, x, **options)
        assert count(copied, x, **options) == 0
    same(model.layer, pickle.loads(pickle.dumps(copied)), x, factor=2.0)  # noqa: S301 - of this test
    same(model.layer, copy.deepcopy(copied), x, factor=2.0)


def test_no_keywords():
    x = torch.randn(2, 7, 12)
    model, copied = replaced(AnyKeywords, x)
    assert count(copied, x) == 1
    same(model, copied, x)
    same(model, copied, x, factor=0.5)
    compiled = torch.compile(copied, backend="eager", fullgraph=True)
    same(model, compiled, x)
    same(model, compiled, x, factor=0.5)


def test_lists_of_sizes():
    x, sizes = torch.randn(2, 10, 12), [(2, 3), (4, 1)]
    model, copied = replaced(ListOfSizes, x, sizes)
    assert count(copied, x, sizes) == 1
    for other in (sizes, [(3, 2), (4, 1)], [(2, 5)], [(2, 3), (2, 2)], [[2, 3], [4, 1]]):
        same(model, copied, x, other)
    compiled = torch.compile(copied, backend="eager", fullgraph=True)
    for other in (sizes, [(3, 2), (4, 1)]):
        same(model, compiled, x, other)


@pytest.mark.parametrize("shape", [(4, 4), (4, 6), (2, 5)], ids=str)
def test_decisions_by_sizes(shape):
    x, y = torch.randn(2, 7, 12), torch.randn(*shape)
    model = Model(BySizes).eval()
    copied = svexport.replace(model, (x, y), verbose=False)
    for rows in (7, 10):
        for other in ((4, 4), (3, 3), (4, 6), (3, 5), (5, 5), (1, 2)):
            same(model, copied, torch.randn(3, rows, 12), torch.randn(*other))
    if shape != (2, 5):  # where there is attention
        assert count(copied, x, y) == 1
        square = shape[0] == shape[1]
        assert count(copied, x, torch.randn(9, 9)) == square
        assert count(copied, x, torch.randn(9, 8)) == (not square)


def test_sizes_that_a_forward_decides_by_stay_dynamic():
    model, copied = replaced(BySizes, torch.randn(2, 7, 12), torch.randn(4, 4))
    b, n = torch.export.Dim("b", max=8), torch.export.Dim("n", min=2)
    shapes = {"x": {0: b}, "y": {0: n, 1: n}}
    program = torch.export.export(copied.layer, (torch.randn(2, 7, 12), torch.randn(4, 4)), dynamic_shapes=shapes)
    x, y = torch.randn(3, 7, 12), torch.randn(6, 6)
    torch.testing.assert_close(program.module()(x, y), model(x, y), rtol=1e-5, atol=1e-5)


def test_functions_that_are_told_whether_they_train():
    x = torch.randn(2, 7, 12)
    model, copied = replaced(Drops, x)
    same(model, copied, x)
    for m in (model, copied):
        m.train()
    for seed in range(3):
        outputs = []
        for m in (model, copied):
            torch.manual_seed(seed)
            outputs.append(m(x))
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
        assert (outputs[0] == 0).any()
    copied.layer.eval()
    same(model.eval(), copied, x)


@pytest.mark.parametrize("kind", [DropsWeights, DropsQueries])
def test_what_drops_inside_is_left(kind):
    x, model = torch.randn(2, 7, 12), Model(kind).train()
    copied = svexport.replace(model, (x,), verbose=False).train()
    assert WHAT not in [r.before for r in copied.svexport_replacements]
    outputs = []
    for m in (model, copied):
        torch.manual_seed(0)
        outputs.append(m(x))
    assert torch.equal(*outputs)
    assert not torch.allclose(outputs[0], model.eval()(x))


def test_checks_that_ask_whether_they_are_compiled():
    x, sizes = torch.randn(2, 10, 12), [(2, 3), (4, 1)]
    model, copied = replaced(Checks, x, sizes)
    assert count(copied, x, sizes) == 1
    same(model, copied, x, sizes)
    same(model, torch.compile(copied, backend="eager", fullgraph=True), x, sizes)
    for wrong in ((torch.randn(2, 9, 12), sizes), (x, [(2, 3)])):
        with pytest.raises(ValueError, match="as many rows"):
            copied(*wrong)


def test_another_forward_when_compiled_is_left_alone():
    x = torch.randn(2, 7, 12)
    copied = svexport.replace(Model(OtherCompiled).eval(), (x,), verbose=False)
    (left,) = [a for a in copied.svexport_left_alone if a.kind == FORWARD and a.name == "layer"]
    assert "another path when it is compiled" in left.reason
    assert not torch.compiler.is_compiling()
