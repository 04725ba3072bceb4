import torch
from torch import nn


class Shift(nn.Module):
    def forward(self, x, ys):
        centre = torch.zeros(2, 1).to(x)  # SVX202 *
        return x[..., 0, None] - ys - centre[0]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = Shift()

    def forward(self, x):
        """x (B, N, 2)"""
        ys = torch.arange(x.shape[1]).to(x.device)  # SVX202 *
        moved = self.shift(x, ys)
        kept = x.new_empty(*moved.shape, 2)
        kept[..., 0], kept[..., 1] = moved.sin(), moved.cos()  # SVX105
        return kept


def example_inputs():
    return (torch.randn(2, 5, 2),)
