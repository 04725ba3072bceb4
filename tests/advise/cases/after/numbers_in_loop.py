import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, rows, scales):
        return x[rows] * scales.sum()


def example_inputs():
    return torch.randn(5, 4), torch.tensor([3, 0, 3]), torch.rand(6)
