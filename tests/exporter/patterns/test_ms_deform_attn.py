"""Multi-scale deformable attention under other names, and near misses."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import svexport
from tests.exporter.patterns.outcomes import gradients_of, replaced_with, whats

WHAT = "split, sample, stack, weigh, sum"
SIZES = ((4, 6), (2, 3))


def attend(value, sizes, locations, weights, *, options=(), place=lambda g: g, stack=torch.stack, total=None):
    """mmcv's definition, by another name, with every step open to change."""
    n, _, heads, channels = value.shape
    _, queries, _, levels, points, _ = locations.shape
    grids = place(2 * locations - 1)
    found = []
    for level, part in enumerate(value.split([h * w for h, w in sizes], dim=1)):
        h, w = sizes[level]
        image = part.flatten(2).transpose(1, 2).reshape(n * heads, channels, h, w)
        grid = grids[:, :, :, level].transpose(1, 2).flatten(0, 1)
        settings = {"mode": "bilinear", "padding_mode": "zeros", "align_corners": False, **dict(options)}
        found.append(F.grid_sample(image, grid, **settings))
    weights = weights.transpose(1, 2).reshape(n * heads, 1, queries, levels * points)
    mixed = stack(found, dim=-2).flatten(-2) * weights
    mixed = mixed.sum(-1) if total is None else total(mixed)
    return mixed.view(n, heads * channels, queries).transpose(1, 2).contiguous()


class Attends(nn.Module):
    def __init__(self, **change):
        super().__init__()
        self.heads, self.points, self.change = 2, 3, change
        self.value, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.offsets, self.weights = nn.Linear(8, 2 * 2 * 3 * 2), nn.Linear(8, 2 * 2 * 3)

    def parts(self, query, memory):
        n, queries, _ = query.shape
        offsets = self.offsets(query).view(n, queries, self.heads, 2, self.points, 2)
        weights = self.weights(query).view(n, queries, self.heads, -1).softmax(-1).view(n, queries, self.heads, 2, -1)
        return self.value(memory).view(n, memory.shape[1], self.heads, -1), (offsets * 0.3).sigmoid(), weights


class Constants(Attends):
    sizes = SIZES

    def forward(self, query, memory):
        value, locations, weights = self.parts(query, memory)
        return self.out(attend(value, SIZES, locations, weights, **self.change)) + query


class Data(Attends):
    """The sizes are a tensor."""

    def forward(self, query, memory, sizes):
        value, locations, weights = self.parts(query, memory)
        return self.out(attend(value, sizes, locations, weights, **self.change)) + query


class Buffer(Attends):
    def __init__(self):
        super().__init__()
        self.register_buffer("sizes", torch.tensor(SIZES))

    def forward(self, query, memory):
        value, locations, weights = self.parts(query, memory)
        return self.out(attend(value, self.sizes, locations, weights)) + query


def inputs(batch=2, queries=5, sizes=SIZES):
    return torch.randn(batch, queries, 8), torch.randn(batch, sum(h * w for h, w in sizes), 8)


@pytest.mark.parametrize("kind", [Constants, Buffer])
def test_found_with_constant_sizes(kind):
    model = kind()
    replaced, found = replaced_with(model, inputs(), WHAT, [inputs(1, 9)])
    assert found
    for same in (copy.deepcopy(replaced), pickle.loads(pickle.dumps(replaced))):  # noqa: S301 - written here
        args = inputs()
        torch.testing.assert_close(same(*args), model(*args), rtol=1e-4, atol=1e-4)
    with torch.profiler.profile() as profile:
        replaced(*inputs())
    assert "svexport::ms_deform_attn" in [e.key for e in profile.key_averages()]


def test_found_with_sizes_as_data():
    """Of as many levels; with more of them the forward is the author's."""
    model, other = Data(), ((3, 2), (1, 7))
    given = (*inputs(), torch.tensor(SIZES))
    more = (*inputs(1, 9, other), torch.tensor(other))
    replaced, found = replaced_with(model, given, WHAT, [more])
    assert found
    with pytest.raises((RuntimeError, IndexError)):
        replaced(*inputs(1, 4, (*other, (2, 2))), torch.tensor((*other, (2, 2))))
    torch.compiler.reset()
    exported = torch.export.export(replaced, given, strict=False)
    assert "svexport.ms_deform_attn.default" in [str(node.target) for node in exported.graph.nodes]


NEARLY = {
    "corners": {"options": {"align_corners": True}},
    "border": {"options": {"padding_mode": "border"}},
    "nearest": {"options": {"mode": "nearest"}},
    "y before x": {"place": lambda g: g.flip(-1)},
    "levels in reverse": {"place": lambda g: g.flip(3)},
    "points shared": {"place": lambda g: g.mean(4, keepdim=True).expand_as(g)},
    "clamped": {"place": lambda g: g.clamp(-0.2, 0.2)},
    "interleaved": {"stack": lambda found, dim: torch.stack(found, dim=-1)},
    "largest": {"total": lambda mixed: mixed.amax(-1)},
    "mean": {"total": lambda mixed: mixed.mean(-1)},
    "masked": {"total": lambda mixed: mixed.relu().sum(-1)},
    "constant places": {"place": lambda g: g.detach()},
}


@pytest.mark.parametrize("name", NEARLY)
@pytest.mark.parametrize("kind", [Constants, Data])
def test_what_is_nearly_that_is_left(name, kind):
    args = inputs() if kind is Constants else (*inputs(), torch.tensor(SIZES))
    _, found = replaced_with(kind(**NEARLY[name]), args, WHAT)
    assert not found


def test_rows_and_columns_of_square_levels():
    """Swapped sizes do not show where all levels are square; they are tried on others."""

    class Swapped(Data):
        def forward(self, query, memory, sizes):
            value, locations, weights = self.parts(query, memory)
            return self.out(attend(value, sizes.flip(-1), locations, weights))

    square = (3, 3), (2, 2)
    model, args = Swapped(), (*inputs(sizes=square), torch.tensor(square))
    replaced = svexport.replace(model, args, verbose=False)
    other = (3, 2), (1, 7)
    args = (*inputs(sizes=other), torch.tensor(other))
    torch.testing.assert_close(gradients_of(replaced, args), gradients_of(model, args), rtol=1e-4, atol=1e-4)


def test_more_than_it_is_given():
    class Scaled(Constants):
        def __init__(self):
            super().__init__(total=lambda mixed: (mixed * self.scale).sum(-1))
            self.scale = nn.Parameter(torch.ones(()))

    model, args = Scaled(), inputs()
    replaced = svexport.replace(model, args, verbose=False)
    with torch.no_grad():
        for m in (model, replaced):
            m.scale.fill_(3.0)
    torch.testing.assert_close(replaced(*args), model(*args), rtol=1e-4, atol=1e-4)
    assert whats(svexport.replace(Constants(), args, skip="ms_deform_attn", verbose=False)) == []
