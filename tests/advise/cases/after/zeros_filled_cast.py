import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x: torch.Tensor):
        n = x.shape[-1]
        a = x.new_full((n, 3), 1)
        b = torch.full_like(x, 0.5)
        c = torch.full(x.shape, 2.0)
        d = x.new_full((n, n), -1)
        return a, b, c, d


def example_inputs():
    return (torch.randn(2, 3, 4),)
