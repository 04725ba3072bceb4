"""Replacements are measured, and those without gain are dropped; the times here are made up, not measured."""

import pytest
import torch
from torch import nn

import svexport
from svexport.errors import UnsupportedError
from svexport.exporter import replace as module
from svexport.exporter.faster import Times, gains, measure


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return torch.einsum("bij,bjk->bik", self.norm(x), torch.linalg.inv(x))


def args():
    return (torch.randn(2, 4, 4) + 5 * torch.eye(4),)


def timed_as(monkeypatch, seconds):
    """Has each op cost so much more or less than what it replaces."""

    def fake(models, call):
        found = {}
        for name, m in models.items():
            call(m)
            kinds = {r.after.rpartition(".")[2] for r in getattr(m, "svexport_replacements", ())}
            kinds |= {type(x).__name__ for x in m.modules() if type(x).__module__.startswith("svexport")}
            with torch.no_grad(), torch.profiler.profile() as profile:
                call(m)
            kinds |= {e.key.removeprefix("svexport::") for e in profile.key_averages() if "svexport::" in e.key}
            cost = 1 + sum(seconds.get(kind, 0) for kind in kinds)
            found[name] = Times((cost,), (cost,))
        return found

    monkeypatch.setattr(module, "measure", fake)


@pytest.mark.parametrize(
    ("seconds", "kept"),
    [
        ({"LayerNorm": -0.1, "inverse": -0.2}, {"LayerNorm", "inverse"}),
        ({"LayerNorm": 0.1, "inverse": -0.2}, {"inverse"}),
        ({"LayerNorm": -0.1, "inverse": 0.2}, {"LayerNorm"}),
        ({"LayerNorm": 0.1, "inverse": 0.2}, set()),
    ],
)
def test_what_does_not_gain_is_left_alone(monkeypatch, capsys, seconds, kept):
    timed_as(monkeypatch, seconds)
    model, given = Model(), args()
    replaced = svexport.replace(model, given, skip="einsum", choose="faster")
    assert {r.after.rpartition(".")[2] for r in replaced.svexport_replacements} == kept
    assert all("x" in r.gain for r in replaced.svexport_replacements)
    left = [a.reason for a in replaced.svexport_left_alone]
    assert len(left) == 2 - len(kept)
    assert all("was measured" in reason for reason in left)
    torch.testing.assert_close(replaced(*given), model(*given))
    printed = capsys.readouterr().out
    assert ("as a whole is" in printed) == bool(kept)


def test_everything_the_same_with_all(monkeypatch):
    timed_as(monkeypatch, {"LayerNorm": 1, "inverse": 1})
    replaced = svexport.replace(Model(), args(), choose="all", skip="einsum", verbose=False)
    assert len(replaced.svexport_replacements) == 2
    assert all(r.gain == "" for r in replaced.svexport_replacements)


def test_refusals():
    with pytest.raises(UnsupportedError, match="choose expects 'faster', 'all' or None, got 'best'"):
        svexport.replace(Model(), args(), choose="best")
    with pytest.raises(UnsupportedError, match="expects arguments of the model"):
        svexport.replace(Model(), choose="faster")


def test_gains():
    one = Times((1.0,), (1.0,))
    assert gains(one, Times((0.9,), (0.9,)))
    assert gains(one, Times((1.01,), (0.9,)))
    assert not gains(one, Times((1.015,), (0.9,)), 1.01)
    assert not gains(one, Times((1.1,), (0.5,)))
    assert not gains(one, Times((1.0,), (1.0,)))
    assert gains(Times((1.0,)), Times((0.9,)))
    assert not gains(one, Times((0.985,), (0.99,)))  # noise


def test_gains_in_most_rounds():
    others = Times((1.0, 1.0, 1.0, 1.0, 1.0))
    assert gains(others, Times((0.9, 0.9, 0.9, 0.9, 1.1)))
    assert not gains(others, Times((0.9, 0.9, 0.9, 1.1, 1.1)))


def test_measuring_leaves_models_as_they_are():
    models = {"a": Model(), "b": Model()}
    before = {name: {k: v.clone() for k, v in m.state_dict().items()} for name, m in models.items()}
    given = args()
    times = measure(models, lambda m: m(*given))
    assert all(min(t.inference) > 0 and min(t.training) > 0 for t in times.values())
    assert all(p.grad is None for m in models.values() for p in m.parameters())
    for name, m in models.items():
        torch.testing.assert_close(m.state_dict(), before[name])


def test_timed_under_the_callers_autocast(monkeypatch):
    """With weights converted in every call: autocast keeps them until it is left."""

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.types = nn.Linear(4, 4), []

        def forward(self, x):
            y = self.linear(x)
            self.types.append(y.dtype)
            return torch.einsum("bij,bjk->bik", y, y)

    def fake(models, call):
        for model in models.values():
            call(model)
            types.update(model.types)
        return {name: Times((1.0 if name else 0.5,)) for name in models}

    types = set()
    monkeypatch.setattr(module, "measure", fake)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        replaced = svexport.replace(Watched(), args(), choose="faster", verbose=False)
    assert types == {torch.bfloat16}
    assert [r.before for r in replaced.svexport_replacements] == ["torch.einsum"]

    model, given = Watched(), args()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.profiler.profile() as profile:
        measure({"": model}, lambda m: m(*given))
    casts = sum(e.count for e in profile.key_averages() if e.key == "aten::_to_copy")
    assert casts >= 3 * len(model.types)  # of input, weight and bias
