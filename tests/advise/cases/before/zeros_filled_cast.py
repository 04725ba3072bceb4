import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x: torch.Tensor):
        n = x.shape[-1]
        a = torch.zeros(n, 3).fill_(1).type_as(x)  # SVX202 *
        b = torch.zeros_like(x).fill_(0.5)  # SVX202 *
        c = torch.zeros(x.shape).fill_(2)  # SVX202 *
        d = x.new_zeros(n, n).fill_(-1)  # SVX202 *
        return a, b, c, d


def example_inputs():
    return (torch.randn(2, 3, 4),)
