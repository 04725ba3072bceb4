import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device)
        grid = torch.linspace(0, 1, x.shape[1])
        return positions < x, x * grid


def example_inputs():
    return (torch.rand(2, 6) * 6,)
