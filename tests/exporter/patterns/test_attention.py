"""softmax(QK^T)V in all its spellings, and near misses."""

import gc
import math
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import svexport

WHAT = "softmax(QK^T)V"


class Attends(nn.Module):
    def __init__(self, mix, heads=2, channels=12):
        super().__init__()
        self.heads, self.mix = heads, mix
        self.qkv = nn.Linear(channels, 3 * channels)
        self.scale = (channels // heads) ** -0.5

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, c // self.heads).unbind(2)  # (B, N, H, D)
        return self.mix(self, q, k, v).reshape(b, n, c)


def einsum(m, q, k, v):
    return torch.einsum("bhqk,bkhd->bqhd", (torch.einsum("bqhd,bkhd->bhqk", q, k) * m.scale).softmax(-1), v)


def other_letters(m, q, k, v):
    weights = F.softmax(torch.einsum("bihc,bjhc->bhij", q, k) / math.sqrt(6), dim=-1)
    return torch.einsum("abxy,aybz->axbz", weights, v)


def matmul(m, q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return (torch.softmax(q @ k.transpose(-2, -1) * m.scale, -1) @ v).transpose(1, 2)


def batched(m, q, k, v):
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    mixed = torch.bmm((torch.bmm(q, k.mT) * 0.3).softmax(dim=-1), v)
    return mixed.unflatten(0, (-1, m.heads)).transpose(1, 2)


def unscaled(m, q, k, v):
    return torch.einsum("bhqk,bkhd->bqhd", torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1), v)


def outcome(model, x):
    x = x.clone().requires_grad_()
    output = model(x)
    return [output, *torch.autograd.grad(output.square().sum(), [x, *model.parameters()])]


def test_found_while_others_watch_collections():
    """A profiler of the garbage collector looks at the clock wherever a collection happens to be."""
    threshold = gc.get_threshold()

    def watch(phase, info):
        time.perf_counter()

    gc.callbacks.append(watch)
    gc.set_threshold(1)
    try:
        replaced = svexport.replace(Attends(einsum), (torch.randn(3, 7, 12),), verbose=False)
    finally:
        gc.callbacks.remove(watch)
        gc.set_threshold(*threshold)
    assert [r.before for r in replaced.svexport_replacements] == [WHAT]
    assert gc.isenabled()


@pytest.mark.parametrize("mix", [einsum, other_letters, matmul, batched, unscaled], ids=lambda f: f.__name__)
def test_found_however_it_is_written(mix):
    model, x = Attends(mix), torch.randn(3, 7, 12)
    replaced = svexport.replace(model, (x,), verbose=False)
    assert [r.before for r in replaced.svexport_replacements] == [WHAT]
    for given in (x, torch.randn(1, 11, 12)):
        torch.testing.assert_close(outcome(replaced, given), outcome(model, given), rtol=1e-4, atol=1e-5)


def over_queries(m, q, k, v):
    return torch.einsum("bhqk,bkhd->bqhd", (torch.einsum("bqhd,bkhd->bhqk", q, k) * m.scale).softmax(-2), v)


def weights_used_again(m, q, k, v):
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) * m.scale).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v) * weights.mean()


def masked(m, q, k, v):
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * m.scale
    return torch.einsum("bhqk,bkhd->bqhd", (scores + scores.new_ones(scores.shape[-2:]).tril()).softmax(-1), v)


def dropped(m, q, k, v):
    weights = F.dropout((torch.einsum("bqhd,bkhd->bhqk", q, k) * m.scale).softmax(-1), 0.5, m.training)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def transposed(m, q, k, v):
    return torch.einsum("bhkq,bkhd->bqhd", (torch.einsum("bqhd,bkhd->bhqk", q, k) * m.scale).softmax(-1), v)


def constant_keys(m, q, k, v):
    with torch.no_grad():
        k = k * 1
    return einsum(m, q, k, v)


def by_value(m, q, k, v):
    return einsum(m, q, k, v) if q.sum() > -1e9 else v


NEARLY = [over_queries, weights_used_again, masked, dropped, transposed, constant_keys, by_value]


@pytest.mark.parametrize("mix", NEARLY, ids=lambda f: f.__name__)
def test_what_is_nearly_that_is_left(mix):
    model, x = Attends(mix), torch.randn(2, 6, 12)
    replaced = svexport.replace(model, (x,), verbose=False)
    assert WHAT not in [r.before for r in replaced.svexport_replacements]
    for m in (model.train(), replaced.train()):
        torch.manual_seed(0)
        m.found = outcome(m, x)
    torch.testing.assert_close(replaced.found, model.found, rtol=1e-4, atol=1e-5)


LOG: list[int] = []


class Counts(Attends):
    def forward(self, x):
        self.count = getattr(self, "count", 0) + 1
        return super().forward(x)


class Prints(Attends):
    def forward(self, x):
        print("forward")
        return super().forward(x)


class Logs(Attends):
    def forward(self, x):
        LOG.append(1)
        return super().forward(x)


class Noisy(Attends):
    def forward(self, x):
        return super().forward(x) + torch.rand(())


@pytest.mark.parametrize("kind", [Counts, Prints, Logs, Noisy])
def test_a_forward_that_does_more_stays_as_it_is(kind):
    replaced = svexport.replace(kind(einsum), (torch.randn(2, 6, 12),), verbose=False)
    assert WHAT not in [r.before for r in replaced.svexport_replacements]


class Configured(Attends):
    def __init__(self):
        super().__init__(einsum)
        self.config = {"scale": 1.0}

    def forward(self, x, scale=1.0, *, bias=None):
        y = super().forward(x) * scale * self.config["scale"]
        return y if bias is None else y + bias


def test_other_arguments_and_settings():
    model, x = Configured(), torch.randn(2, 6, 12)
    replaced = svexport.replace(model, (x,), verbose=False)
    assert WHAT in [r.before for r in replaced.svexport_replacements]
    for args, kwargs in [((x,), {}), ((x, 2.0), {}), ((x,), {"bias": x}), ((), {"scale": 3, "x": x})]:
        torch.testing.assert_close(replaced(*args, **kwargs), model(*args, **kwargs))
    for m in (model, replaced):
        m.config["scale"] = 2.0
    torch.testing.assert_close(replaced(x), model(x))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))

    def forward(self, x):
        weights = F.softmax(self.q(x) @ self.k(x).transpose(-2, -1), dim=-1)
        return weights @ self.v(x)


def test_scripts_to_the_authors_text():
    model, x = Plain(), torch.randn(2, 6, 12)
    replaced = svexport.replace(model, (x,), verbose=False)
    assert [r.before for r in replaced.svexport_replacements] == [WHAT]
    scripted = torch.jit.script(replaced)
    assert "softmax" in scripted.code
    torch.testing.assert_close(scripted(x), model(x))
    torch.testing.assert_close(torch.jit.trace(replaced, (x,))(x), model(x))
