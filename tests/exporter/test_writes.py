"""Graphs whose in-place writes were removed equal torch: views of views, written to in any order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from svexport.exporter import writes

VIEWS: list[Callable[[Tensor, random.Random], Tensor]] = [
    lambda x, r: x.select(r.randrange(x.dim()), r.choice((0, -1))),
    lambda x, r: x.narrow(d := r.randrange(x.dim()), 0, (x.shape[d] + 1) // 2),
    lambda x, r: x[..., 1 : -1 if x.shape[-1] > 2 else None],
    lambda x, r: x[:: r.choice((2, 3))],
    lambda x, r: x.permute(r.sample(range(x.dim()), x.dim())),
    lambda x, r: x.permute(-1, *range(x.dim() - 1)),
    lambda x, r: x.transpose(0, -1),
    lambda x, r: x.T if x.dim() == 2 else x.swapaxes(0, -1),
    lambda x, r: x.mT if x.dim() > 1 else x.movedim(0, -1),
    lambda x, r: x.movedim(0, -1),
    lambda x, r: x.unsqueeze(r.randrange(-1, x.dim() + 1)),
    lambda x, r: x.squeeze() if x.squeeze().dim() else x,
    lambda x, r: x[:1].squeeze(0) if x.dim() > 1 else x.detach(),
    lambda x, r: x.view(-1) if x.is_contiguous() else x.detach(),
    lambda x, r: x.reshape(-1),
    lambda x, r: x.chunk(2)[-1],
    lambda x, r: x.diagonal() if x.dim() > 1 else x,
    lambda x, r: x.contiguous(),
    lambda x, r: x.clone(),
]
"""Of a tensor with axes; some copy."""


def _assign(x: Tensor, r: random.Random) -> None:
    x[..., 0] = x[..., -1] * 2 - 1


WRITES: list[Callable[[Tensor, random.Random], Any]] = [
    lambda x, r: x.add_(r.choice((1, -0.5))),
    lambda x, r: x.mul_(x.flip(0)),
    lambda x, r: x.fill_(0.25),
    lambda x, r: x.relu_().neg_(),
    lambda x, r: x.pow_(r.choice((2, 3))),
    lambda x, r: x.abs_().pow_(x.flip(0).abs()),
    lambda x, r: x.copy_(x.sum()),
    lambda x, r: x.masked_fill_(x > 0.5, -2.0),
    _assign,
]


class Program(nn.Module):
    """Views and writes at random, the same in each call."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        r = random.Random(self.seed)
        found = [x * 1, x + 1]
        seen = []
        for _ in range(r.randrange(3, 14)):
            one = r.choice(found)
            if r.random() < 0.5 and one.dim() and one.numel():
                found.append(r.choice(VIEWS)(one, r))
            elif one.dim() and one.numel():
                r.choice(WRITES)(one, r)
            if r.random() < 0.3:
                seen.append(r.choice(found).sum())
        return (*seen, *r.sample(found, min(len(found), 4)))


def test_views_are_written_to() -> None:
    """Each program computes what it did, or is left to a second trace; most are not."""
    first, followed = random.randrange(2**32), 0
    for seed in range(first, first + 24):
        torch.manual_seed(seed)
        r = random.Random(seed)
        shape = [r.choice((1, 2, 3, 5)) for _ in range(r.choice((1, 2, 3)))]
        model = Program(seed)
        program = torch.export.export(model, (torch.randn(shape),), strict=False)
        fakes = torch._guards.detect_fake_mode([node.meta.get("val") for node in program.graph.nodes])
        try:
            graph = writes.without_writes(program.graph, (), fakes)
        except writes.SecondTrace:
            continue
        followed += 1
        assert not any(map(writes.writes, graph.nodes)), seed
        graph.lint()
        x = torch.randn(shape)
        results = torch.fx.Interpreter(torch.fx.GraphModule(program.graph_module, graph)).run(x.clone())
        for ours, theirs in zip(results, model(x.clone()), strict=True):
            torch.testing.assert_close(ours, theirs, msg=lambda text, seed=seed: f"seed {seed}: {text}")
    assert followed > 8


@pytest.mark.parametrize("held", [(), ("x",)])
def test_what_the_program_holds_is_not_written_to(held: tuple[str, ...]) -> None:
    """Nor through a view of it."""
    program = torch.export.export(_OfAFunction(lambda x: x[1:].add_(1)), (torch.randn(3, 2),), strict=False)
    fakes = torch._guards.detect_fake_mode([node.meta.get("val") for node in program.graph.nodes])
    if held:
        with pytest.raises(writes.SecondTrace):
            writes.without_writes(program.graph, held, fakes)
    else:
        writes.without_writes(program.graph, held, fakes)


class _OfAFunction(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)
