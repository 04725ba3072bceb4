import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def forward(self, x):
        return x - F.pad(x[:, :-1], (0, 0, 1, 0))


def example_inputs():
    return (torch.randn(2, 5, 4),)
