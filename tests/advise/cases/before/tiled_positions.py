import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device).repeat(x.shape[0], 1)  # SVX201 *
        grid = torch.linspace(0, 1, x.shape[1]).view(1, x.shape[1]).repeat(x.shape[0], 1)  # SVX201 *
        return positions < x, x * grid


def example_inputs():
    return (torch.rand(2, 6) * 6,)
