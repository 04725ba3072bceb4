import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return torch.cat((x[..., :2] - x[..., 2:] / 2, x[..., 2:]), -1)


def example_inputs():
    return (torch.rand(2, 5, 4),)
