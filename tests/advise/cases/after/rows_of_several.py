import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, y):
        return torch.abs(x - y).flatten(1).mean(1), torch.cumsum((x > y).int(), 1)


def example_inputs():
    return torch.randn(3, 4, 5), torch.randn(3, 4, 5)
