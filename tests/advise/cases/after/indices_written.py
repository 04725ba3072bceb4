import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x: torch.Tensor):
        y = x * 1
        y[:, 1:3] = 0.0
        y[:1] *= 2
        return y


def example_inputs():
    return (torch.rand(2, 4),)
