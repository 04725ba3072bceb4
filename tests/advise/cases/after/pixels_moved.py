import torch
from torch import nn


class Shift(nn.Module):
    def forward(self, x, ys):
        centre = x.new_zeros(2, 1)
        return x[..., 0, None] - ys - centre[0]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = Shift()

    def forward(self, x):
        """x (B, N, 2)"""
        ys = torch.arange(x.shape[1], device=x.device)
        moved = self.shift(x, ys)
        return torch.stack((moved.sin(), moved.cos()), -1)


def example_inputs():
    return (torch.randn(2, 5, 2),)
