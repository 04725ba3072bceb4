import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return x.masked_fill(x[:, :1] > 0, 0)


def example_inputs():
    return (torch.randn(5, 3),)
