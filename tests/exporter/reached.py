"""Functions that call torch's in the ways that people write; a module of its own, so that a fresh process finds it."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional
import torch.nn.functional as F
from torch import einsum, nn
from torch.utils.checkpoint import checkpoint

scale = 1.0
entered = 0
TABLE = {"sample": F.grid_sample}


def warp(x, grid):
    global entered
    entered += 1
    return F.grid_sample(x, grid, align_corners=False) * scale


def long_name(x, grid):
    return torch.nn.functional.grid_sample(x, grid, align_corners=True)


def decorate(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@decorate
def mix(x, w):
    return einsum("nchw,cd->ndhw", x, w)


def again(x, n):
    squared = torch.einsum("nchw,nchw->nchw", x, x)
    return squared if n == 0 else squared + again(x, n - 1)


def even(x, n):
    return x if n == 0 else odd(x, n - 1)


def odd(x, n):
    return torch.einsum("nchw,nchw->nchw", x, x) if n == 0 else even(x, n - 1)


partial = functools.partial(F.grid_sample, align_corners=False)
partial_of_ours = functools.partial(warp, grid=torch.zeros(2, 5, 5, 2))


def made(mode):
    def inner(x, grid):
        return F.grid_sample(x, grid, mode=mode, align_corners=False)

    return inner


nearest = made("nearest")


def over(functional):
    def inner(x, grid):
        return functional.relu(functional.grid_sample(x, grid, align_corners=False))

    return inner


closed_over = over(F)


def generated(x, grid):
    return sum(F.grid_sample(y, grid, align_corners=False) for y in (x, x))


def nested(x, grid):
    inner = lambda y: torch.stack([F.grid_sample(z, grid, align_corners=False) for z in (y, y)]).sum(0)  # noqa: E731
    return inner(x)


def default(x, grid, sampler=F.grid_sample):
    return sampler(x, grid, align_corners=False)


def alias(x, grid):
    sampler = F.grid_sample
    return sampler(x, grid, align_corners=False)


def inverses(m):
    out = torch.linalg.inv(m, out=torch.empty_like(m))
    return (
        m.inverse()
        + (m @ m).inverse()
        + torch.linalg.inv(m)
        + torch.inverse(m)
        + torch.linalg.solve(m, m)
        + torch.Tensor.inverse(m)
        + out
    )


class Static:
    @staticmethod
    def sample(x, grid):
        return F.grid_sample(x, grid, align_corners=False)

    @classmethod
    def sample_too(cls, x, grid):
        return F.grid_sample(x, grid, align_corners=False)


class Helper:
    """Neither a module nor known to one but as an attribute."""

    def __call__(self, x, grid):
        return self.sample(x, grid)

    def sample(self, x, grid):
        return F.grid_sample(x, grid, align_corners=False)


class Base(nn.Module):
    def forward(self, x, grid):
        return F.grid_sample(x, grid, align_corners=False)


class Derived(Base):
    def forward(self, x, grid):
        return super().forward(x, grid) + Base.forward(self, x, grid)


class Property(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(2 * torch.eye(3))

    @property
    def inverted(self):
        return torch.linalg.inv(self.matrix)

    def forward(self, x):
        return x * self.inverted.sum()


def hook(module, args, output):
    return torch.einsum("nchw,nchw->nchw", output, output)


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.derived, self.property, self.helper, self.list = Derived(), Property(), Helper(), [Helper()]
        self.function, self.torchs, self.partial = warp, torch.einsum, functools.partial(warp)
        self.relu = nn.ReLU()
        self.relu.register_forward_hook(hook)

    def method(self, x, grid):
        return F.grid_sample(x, grid, align_corners=False)

    @torch.no_grad()
    def decorated(self, x, grid):
        return F.grid_sample(x, grid, align_corners=False)

    def forward(self, x, grid):
        w = self.weight
        matrix = torch.einsum("ij,kj->ik", w, w) + 4 * torch.eye(3)
        y = warp(x, grid) + long_name(x, grid) + partial(x, grid) + partial_of_ours(x) + nearest(x, grid)
        y = y + closed_over(x, grid) + generated(x, grid) + nested(x, grid) + default(x, grid) + alias(x, grid)
        y = y + Static.sample(x, grid) + Static.sample_too(x, grid) + self.derived(x, grid) + self.helper(x, grid)
        y = (
            y
            + self.list[0].sample(x, grid)
            + self.function(x, grid)
            + self.partial(x, grid)
            + self.torchs("nchw->nchw", x)
        )
        y = y + checkpoint(self.method, x, grid, use_reentrant=False) + self.decorated(x, grid)
        return self.relu(mix(self.property(y), w)) + again(x, 2) + even(x, 3), inverses(matrix.detach())


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, grid):
        return F.grid_sample(x, grid, align_corners=False)


def of_a_table(x, grid):
    return TABLE["sample"](x, grid, align_corners=False)


def imported(x, grid):
    from torch.nn.functional import grid_sample

    return grid_sample(x, grid, align_corners=False)


_names = {"F": F}
exec("def from_text(x, grid): return F.grid_sample(x, grid, align_corners=False)", _names)  # noqa: S102
from_text = _names["from_text"]


class Unbindable(nn.Module):
    """What is reached by no name."""

    def forward(self, x, grid):
        return of_a_table(x, grid) + imported(x, grid) + Function.apply(x, grid) + from_text(x, grid) + warp(x, grid)


class Small(nn.Module):
    """What torch compiles and scripts as a whole."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def warp(self, x, grid):
        return F.grid_sample(x, grid, align_corners=False)

    def forward(self, x, grid):
        y = self.warp(self.conv(x), grid)
        return torch.einsum("nchw,ncij->nhwij", y, x)
